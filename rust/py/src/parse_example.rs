//! Python bindings of `tf.train.Example` messages.

use grainmill_core::parse::example::{self, Names, Steps, Values};
use grainmill_core::parse::number::Number;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString};

use crate::array::array_of;
use crate::parse::{Described, Field, Fields, Given, Kind, object_array};

/// Parses `tf.train.Example` messages, or `tf.train.SequenceExample` messages.
#[pyclass(frozen, name = "ExampleParser", module = "grainmill._native")]
struct PyExampleParser {
    features: Fields<List>,
    names: Names,
    steps: Fields<List>,
    step_names: Names,
}

/// The list of a feature: its kind, and whether its bytes are text.
struct List {
    kind: example::Kind,
    is_text: bool,
}

impl Kind for List {
    const NAME: &'static str = "feature";
    const MIN_SHARE_LEN: usize = 128 << 10;
    type Found<'a> = Values<'a>;

    fn numbers<'s>(
        field: &Field<Self>,
        number: Number,
        values: &Values<'_>,
        scratch: &'s mut Vec<u8>,
    ) -> PyResult<&'s [u8]> {
        field.numbers_at(number, values, scratch, 0)
    }

    fn object<'py>(
        field: &Field<Self>,
        py: Python<'py>,
        values: &Values<'_>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let mut objects = Vec::new();
        field.push_objects(py, values, &mut objects)?;
        field.of_objects(py, objects)
    }
}

impl Field<List> {
    /// The number of values, if it and their kind are as described.
    fn checked_count(&self, values: &Values<'_>) -> PyResult<usize> {
        let kind = self.kind.kind;
        if values.kind != kind {
            let (found, expected) = (values.kind.name(), kind.name());
            return Err(self.error(format!("it is a {found}, expected a {expected}")));
        }
        let count = values.count().map_err(|problem| self.error(problem))?;
        let fits = if self.any_len {
            count.checked_rem(self.size).unwrap_or(count) == 0
        } else {
            count == self.size
        };
        if !fits {
            let needed = if self.any_len { "a multiple of " } else { "" };
            let size = self.size;
            return Err(
                self.error(format!("it has {count} values, its shape needs {needed}{size}"))
            );
        }
        Ok(count)
    }

    /// The numbers of `values`, which go into `scratch` from byte `at` on.
    fn numbers_at<'s>(
        &self,
        number: Number,
        values: &Values<'_>,
        scratch: &'s mut Vec<u8>,
        at: usize,
    ) -> PyResult<&'s [u8]> {
        let end = at + self.checked_count(values)? * number.byte_len();
        // What is longer is not filled with zeros again.
        if scratch.len() < end {
            scratch.resize(end, 0);
        }
        let numbers = &mut scratch[at..end];
        values.put_numbers(number, numbers).map_err(|problem| self.error(problem))?;
        Ok(numbers)
    }

    fn push_objects<'py>(
        &self,
        py: Python<'py>,
        values: &Values<'_>,
        objects: &mut Vec<Bound<'py, PyAny>>,
    ) -> PyResult<()> {
        objects.reserve(self.checked_count(values)?);
        let mut is_valid = true;
        let taken = values.for_each_bytes(|bytes| {
            if !self.kind.is_text {
                objects.push(PyBytes::new(py, bytes).into_any());
            } else if let Ok(text) = std::str::from_utf8(bytes) {
                objects.push(PyString::new(py, text).into_any());
            } else {
                is_valid = false;
            }
        });
        taken.map_err(|problem| self.error(problem))?;
        if is_valid { Ok(()) } else { Err(self.error("it is not valid UTF-8")) }
    }

    /// The value for an element, of a feature with a list for each step.
    fn steps_object<'py>(
        &self,
        py: Python<'py>,
        steps: Option<&Steps<'_>>,
        scratch: &mut Vec<u8>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let Some(steps) = steps else { return self.absent_object(py) };
        let mut count = 0;
        let mut objects = Vec::new();
        let mut row = Vec::new();
        let mut end = 0;
        let taken: Result<(), StepsError> = steps.for_each(|values| {
            count += 1;
            let values = values.unwrap_or_else(|| Values::empty(self.kind.kind));
            if self.any_len {
                objects.push(self.value(py, Some(&values), &mut row)?);
                return Ok(());
            }
            if let Some((number, _)) = &self.numbers {
                end += self.numbers_at(*number, &values, scratch, end)?.len();
                return Ok(());
            }
            Ok(self.push_objects(py, &values, &mut objects)?)
        });
        taken.map_err(|error| match error {
            StepsError::Malformed(problem) => self.error(problem),
            StepsError::Python(error) => {
                self.error(format!("step {}: {}", count - 1, error.value(py)))
            }
        })?;
        if self.any_len {
            return Ok(PyList::new(py, objects)?.into_any());
        }
        let shape: Vec<usize> = [count].into_iter().chain(self.shape.iter().copied()).collect();
        match &self.numbers {
            Some((_, dtype)) => array_of(&shape, dtype.bind(py), &scratch[..end]),
            None => object_array(py, objects, &shape),
        }
    }
}

enum StepsError {
    Malformed(grainmill_core::parse::wire::Malformed),
    Python(PyErr),
}

impl From<grainmill_core::parse::wire::Malformed> for StepsError {
    fn from(error: grainmill_core::parse::wire::Malformed) -> Self {
        Self::Malformed(error)
    }
}

impl From<PyErr> for StepsError {
    fn from(error: PyErr) -> Self {
        Self::Python(error)
    }
}

impl PyExampleParser {
    fn malformed(&self, problem: impl std::fmt::Display) -> PyErr {
        let name = if self.steps.0.is_empty() { "Example" } else { "SequenceExample" };
        PyValueError::new_err(format!("the record is no `tf.train.{name}`: {problem}"))
    }

    fn find<'a>(&self, record: &'a [u8], found: &mut [Option<Values<'a>>]) -> PyResult<()> {
        example::features(record, &self.names, found).map_err(|problem| self.malformed(problem))
    }
}

#[pymethods]
impl PyExampleParser {
    /// Takes the number of the field of each feature's list, whether its bytes are text, and the rest.
    #[new]
    fn new(
        py: Python<'_>,
        features: Vec<(u8, bool, Described<'_>)>,
        steps: Vec<(u8, bool, Described<'_>)>,
    ) -> PyResult<Self> {
        let field = |(kind, is_text, described)| {
            let kind = match kind {
                1 => example::Kind::Bytes,
                2 => example::Kind::Float,
                _ => example::Kind::Int64,
            };
            Field::of(py, List { kind, is_text }, described)
        };
        let all = |described: Vec<_>| -> PyResult<_> {
            Ok(Fields(described.into_iter().map(field).collect::<PyResult<_>>()?))
        };
        let (features, steps) = (all(features)?, all(steps)?);
        let names = Names::new(features.names());
        let step_names = Names::new(steps.names());
        Ok(Self { features, names, steps, step_names })
    }

    /// See `Fields::parse`.
    fn parse<'py>(
        &self,
        py: Python<'py>,
        records: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        let mut found = vec![None; self.steps.0.len()];
        let add_steps = |record, element: &Bound<'py, PyDict>, scratch: &mut Vec<u8>| {
            if self.steps.0.is_empty() {
                return Ok(());
            }
            example::feature_lists(record, &self.step_names, &mut found)
                .map_err(|problem| self.malformed(problem))?;
            for (feature, steps) in self.steps.0.iter().zip(&found) {
                let value = feature.steps_object(py, steps.as_ref(), scratch)?;
                element.set_item(feature.key.bind(py), value)?;
            }
            Ok(())
        };
        let given = Given::of(records)?;
        let find = |record, found: &mut [_]| self.find(record, found);
        self.features.parse(py, &given.slices(false)?, find, add_steps)
    }

    /// See `Fields::fill`.
    fn fill<'py>(
        &self,
        py: Python<'py>,
        records: &Bound<'py, PyAny>,
        columns: &Bound<'py, PyDict>,
        at: usize,
    ) -> PyResult<bool> {
        if !self.steps.0.is_empty() {
            return Ok(false);
        }
        let given = Given::of(records)?;
        let find = |record, found: &mut [_]| self.find(record, found);
        self.features.fill(py, &given.slices(false)?, columns, at, find)
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyExampleParser>()
}
