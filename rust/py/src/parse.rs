//! Python bindings of the layer `parse`: records to dicts of arrays, or into the rows of a batch.

use grainmill_core::bytes::{Bytes, Destination};
use grainmill_core::compute;
use grainmill_core::parse::example::{self, Kind, Names, Steps, Values};
use grainmill_core::parse::number::Number;
use numpy::{PyArray1, PyArrayDescr, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString};

use crate::array::{RowBytes, array_of, same_dtype, scalar_of};
use crate::records::PyRecords;

/// Records of fewer bytes together are parsed without releasing the GIL.
const MIN_DETACHED_BYTES: usize = 64 << 10;

/// A core parses so much in 100 us: calling a helper takes 40 us of CPU, 7 % of 450 KiB.
const MIN_SHARE_LEN: usize = 128 << 10;

/// The memory of the next rows of a feature, and the length of each; None if its values are appended
/// to a list.
type RowsOf<'a> = Option<(Destination<'a>, usize)>;

/// By feature, the values of each record that were not written to a row.
type Kept<'a> = Vec<Vec<Option<Values<'a>>>>;

/// Parses `tf.train.Example` messages, or `tf.train.SequenceExample` messages.
#[pyclass(frozen, name = "ExampleParser", module = "grainmill._native")]
struct PyExampleParser {
    features: Vec<Feature>,
    names: Names,
    steps: Vec<Feature>,
    step_names: Names,
}

/// A feature as Python describes it: its name; the number of its list's field; the name and the dtype
/// of its numbers; whether its bytes are text; its shape, without a first axis of any length; whether
/// it has such an axis; what stands for it where it is missing, with the bytes, or None.
type Described<'py> = (
    String,
    u8,
    Option<String>,
    Option<Bound<'py, PyArrayDescr>>,
    bool,
    Vec<usize>,
    bool,
    Option<(Py<PyAny>, Vec<u8>)>,
);

struct Feature {
    key: Py<PyString>,
    name: String,
    kind: Kind,
    numbers: Option<(Number, Py<PyArrayDescr>)>,
    is_text: bool,
    shape: Vec<usize>,
    size: usize,
    any_len: bool,
    absent: Option<(Py<PyAny>, Vec<u8>)>,
}

impl Feature {
    fn of(py: Python<'_>, described: Described<'_>) -> PyResult<Self> {
        let (name, kind, number, dtype, is_text, shape, any_len, absent) = described;
        let kind = match kind {
            1 => Kind::Bytes,
            2 => Kind::Float,
            _ => Kind::Int64,
        };
        let numbers = match (number, dtype) {
            (Some(number), Some(dtype)) => Some((number_of(&number)?, dtype.unbind())),
            _ => None,
        };
        Ok(Self {
            key: PyString::intern(py, &name).unbind(),
            name,
            kind,
            numbers,
            is_text,
            size: shape.iter().product(),
            shape,
            any_len,
            absent,
        })
    }

    fn error(&self, problem: impl std::fmt::Display) -> PyErr {
        PyValueError::new_err(format!("feature `{}`: {problem}", self.name))
    }

    fn missing(&self) -> PyErr {
        self.error("it is missing, and has neither a default nor `optional=True`")
    }

    /// The number of values, if it and their kind are as described.
    fn checked_count(&self, values: &Values<'_>) -> PyResult<usize> {
        if values.kind != self.kind {
            let (found, expected) = (values.kind.name(), self.kind.name());
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

    /// The `count` numbers of `values`, which go into `scratch` from byte `at` on.
    fn numbers<'s>(
        &self,
        number: Number,
        (values, count): (&Values<'_>, usize),
        scratch: &'s mut Vec<u8>,
        at: usize,
    ) -> PyResult<&'s [u8]> {
        let end = at + count * number.byte_len();
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
        let mut is_valid = true;
        let taken = values.for_each_bytes(|bytes| {
            if !self.is_text {
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

    /// The shape of an array of `count` values, with an axis of any length if `has_axis`.
    fn shape_of(&self, count: usize, has_axis: bool) -> Vec<usize> {
        let axis = count.checked_div(self.size).unwrap_or(0);
        has_axis.then_some(axis).into_iter().chain(self.shape.iter().copied()).collect()
    }

    /// The value for an element.
    fn object<'py>(
        &self,
        py: Python<'py>,
        values: Option<&Values<'_>>,
        scratch: &mut Vec<u8>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let Some(values) = values else { return self.absent_object(py) };
        let count = self.checked_count(values)?;
        let shape = self.shape_of(count, self.any_len);
        let Some((number, dtype)) = &self.numbers else {
            let mut objects = Vec::with_capacity(count);
            self.push_objects(py, values, &mut objects)?;
            return match objects.pop() {
                Some(only) if shape.is_empty() => Ok(only),
                last => object_array(py, objects.into_iter().chain(last).collect(), &shape),
            };
        };
        let numbers = self.numbers(*number, (values, count), scratch, 0)?;
        if shape.is_empty() {
            scalar_of(dtype.bind(py), numbers)
        } else {
            array_of(&shape, dtype.bind(py), numbers)
        }
    }

    fn absent_object<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let (object, _) = self.absent.as_ref().ok_or_else(|| self.missing())?;
        let object = object.bind(py);
        // Each element has its own.
        if object.cast::<PyUntypedArray>().is_ok() {
            object.call_method0("copy")
        } else {
            Ok(object.clone())
        }
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
            let values = values.unwrap_or_else(|| Values::empty(self.kind));
            if self.any_len {
                objects.push(self.object(py, Some(&values), &mut row)?);
                return Ok(());
            }
            let num_values = self.checked_count(&values)?;
            match &self.numbers {
                Some((number, _)) => {
                    end += self.numbers(*number, (&values, num_values), scratch, end)?.len();
                }
                None => self.push_objects(py, &values, &mut objects)?,
            }
            Ok(())
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

    /// Whether the rows of `array` hold elements of this feature.
    fn fits(&self, array: &Bound<'_, PyUntypedArray>) -> bool {
        let Some((_, dtype)) = &self.numbers else { return false };
        !self.any_len
            && array.ndim() > 0
            && array.shape()[1..] == self.shape
            && same_dtype(&array.dtype(), dtype.bind(array.py()))
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

pub(crate) fn number_of(name: &str) -> PyResult<Number> {
    Ok(match name {
        "bool" => Number::Bool,
        "int8" => Number::I8,
        "int16" => Number::I16,
        "int32" => Number::I32,
        "int64" => Number::I64,
        "uint8" => Number::U8,
        "uint16" => Number::U16,
        "uint32" => Number::U32,
        "uint64" => Number::U64,
        "float32" => Number::F32,
        "float64" => Number::F64,
        _ => return Err(PyTypeError::new_err(format!("numbers of dtype {name} are not parsed"))),
    })
}

pub(crate) fn object_array<'py>(
    py: Python<'py>,
    objects: Vec<Bound<'py, PyAny>>,
    shape: &[usize],
) -> PyResult<Bound<'py, PyAny>> {
    let objects = objects.into_iter().map(Bound::unbind).collect();
    let array = PyArray1::<Py<PyAny>>::from_vec(py, objects).into_any();
    if shape.len() == 1 { Ok(array) } else { array.call_method1("reshape", (shape.to_vec(),)) }
}

/// The elements of `records`, which may not be changed by others meanwhile, so these are owned.
fn owned_records<'py>(records: &Bound<'py, PyList>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    let mut owned = Vec::with_capacity(records.len());
    for record in records {
        owned.push(record.cast_into::<PyBytes>().map_err(|error| {
            let found = error.into_inner().get_type().name();
            let found = found.map_or_else(|_| "?".to_owned(), |name| name.to_string());
            PyTypeError::new_err(format!("a record must be `bytes`, got a value of type {found}"))
        })?);
    }
    Ok(owned)
}

impl PyExampleParser {
    fn malformed(&self, problem: impl std::fmt::Display) -> PyErr {
        let name = if self.steps.is_empty() { "Example" } else { "SequenceExample" };
        PyValueError::new_err(format!("the record is no `tf.train.{name}`: {problem}"))
    }

    fn find<'a>(&self, record: &'a [u8], found: &mut [Option<Values<'a>>]) -> PyResult<()> {
        example::features(record, &self.names, found).map_err(|problem| self.malformed(problem))
    }
}

#[pymethods]
impl PyExampleParser {
    #[new]
    fn new(
        py: Python<'_>,
        features: Vec<Described<'_>>,
        steps: Vec<Described<'_>>,
    ) -> PyResult<Self> {
        let all = |described: Vec<Described<'_>>| {
            described.into_iter().map(|one| Feature::of(py, one)).collect::<PyResult<Vec<_>>>()
        };
        let (features, steps) = (all(features)?, all(steps)?);
        let names = Names::new(features.iter().map(|feature| feature.name.clone()));
        let step_names = Names::new(steps.iter().map(|feature| feature.name.clone()));
        Ok(Self { features, names, steps, step_names })
    }

    /// A dict for each record, with a value for each feature. Each owns its arrays: a view of one for all
    /// records would keep these alive as long as an element is in a shuffle window.
    fn parse<'py>(
        &self,
        py: Python<'py>,
        records: &Bound<'py, PyList>,
    ) -> PyResult<Bound<'py, PyList>> {
        let records = owned_records(records)?;
        let mut scratch = Vec::new();
        let mut found = vec![None; self.features.len()];
        let mut found_steps = vec![None; self.steps.len()];
        let elements = PyList::empty(py);
        for record in &records {
            let record = record.as_bytes();
            self.find(record, &mut found)?;
            let element = PyDict::new(py);
            for (feature, values) in self.features.iter().zip(&found) {
                let value = feature.object(py, values.as_ref(), &mut scratch)?;
                element.set_item(feature.key.bind(py), value)?;
            }
            if !self.steps.is_empty() {
                example::feature_lists(record, &self.step_names, &mut found_steps)
                    .map_err(|problem| self.malformed(problem))?;
                for (feature, steps) in self.steps.iter().zip(&found_steps) {
                    let value = feature.steps_object(py, steps.as_ref(), &mut scratch)?;
                    element.set_item(feature.key.bind(py), value)?;
                }
            }
            elements.append(element)?;
        }
        Ok(elements)
    }

    /// Writes the numbers of `records` to the rows of `columns` from row `at` on, and appends the
    /// other values to those columns that are lists.
    ///
    /// Returns whether it did: not if `columns`, pairs of a name and an array or list, are not those
    /// of these features. If a record cannot be parsed, the rows have any content, and nothing is
    /// appended. Nothing else may read or write the columns meanwhile.
    fn fill<'py>(
        &self,
        py: Python<'py>,
        records: &Bound<'py, PyAny>,
        columns: Vec<(String, Bound<'py, PyAny>)>,
        at: usize,
    ) -> PyResult<bool> {
        let (owned, as_they_are);
        let records: Vec<&[u8]> = if let Ok(list) = records.cast::<PyList>() {
            owned = owned_records(list)?;
            owned.iter().map(pyo3::types::PyBytesMethods::as_bytes).collect()
        } else {
            as_they_are = records.cast::<PyRecords>()?.get();
            as_they_are.slices()
        };
        if !self.steps.is_empty() || columns.len() != self.features.len() {
            return Ok(false);
        }
        let mut rows: Vec<Option<RowBytes<'py>>> = Vec::new();
        let mut lists = Vec::new();
        for (feature, (name, target)) in self.features.iter().zip(columns) {
            if *name != feature.name {
                return Ok(false);
            }
            match target.cast_into::<PyList>() {
                Ok(list) => {
                    rows.push(None);
                    lists.push(Some(list));
                }
                Err(other) => {
                    let array = other.into_inner().cast_into::<PyUntypedArray>()?;
                    if !feature.fits(&array) {
                        return Ok(false);
                    }
                    let own = RowBytes::of(array, at)?;
                    if own.num_rows < records.len() {
                        return Ok(false);
                    }
                    rows.push(Some(own));
                    lists.push(None);
                }
            }
        }
        let mut targets: Vec<RowsOf<'_>> = rows
            .iter_mut()
            .map(|own| {
                let own = own.as_mut()?;
                let row_len = own.row_len;
                Some((own.destination(0, records.len()), row_len))
            })
            .collect();
        let byte_len = records.iter().map(|record| record.len()).sum::<usize>();
        let kept = if byte_len < MIN_DETACHED_BYTES {
            vec![self.fill_rows(&records, &mut targets)?]
        } else {
            py.detach(|| self.fill_shares(&records, byte_len, &mut targets))?
        };
        let mut scratch = Vec::new();
        let mut added: Vec<Vec<Bound<'py, PyAny>>> = Vec::with_capacity(kept.len());
        for (number, feature) in self.features.iter().enumerate() {
            let values = kept.iter().flat_map(|kept| &kept[number]);
            let values = values.map(|values| feature.object(py, values.as_ref(), &mut scratch));
            added.push(values.collect::<PyResult<_>>()?);
        }
        for (list, values) in lists.iter().zip(added) {
            if let Some(list) = list {
                let values = PyList::new(py, values)?;
                list.set_slice(list.len(), list.len(), &values)?;
            }
        }
        Ok(true)
    }
}

impl PyExampleParser {
    /// As `fill_rows`, of which idle threads do shares; a result for each share, in their order.
    fn fill_shares<'a>(
        &self,
        records: &[&'a [u8]],
        byte_len: usize,
        targets: &mut [RowsOf<'_>],
    ) -> PyResult<Vec<Kept<'a>>> {
        let num_shares = compute::num_shares(byte_len, MIN_SHARE_LEN).min(records.len());
        let shares = records.chunks(records.len().div_ceil(num_shares)).map(|records| {
            let targets = targets.iter_mut().map(|rows| {
                let (target, row_len) = rows.as_mut()?;
                Some((target.take_front(records.len() * *row_len), *row_len))
            });
            (records, targets.collect())
        });
        let fill =
            |(records, mut targets): (_, Vec<RowsOf<'_>>)| self.fill_rows(records, &mut targets);
        compute::map(shares.collect(), fill).into_iter().collect()
    }

    /// Writes the numbers of each record to the next row of each target; returns the values of the
    /// features without one. Needs no GIL.
    fn fill_rows<'a>(
        &self,
        records: &[&'a [u8]],
        targets: &mut [RowsOf<'_>],
    ) -> PyResult<Kept<'a>> {
        let mut scratch = Vec::new();
        let mut found = vec![None; self.features.len()];
        let mut kept = vec![Vec::new(); self.features.len()];
        for record in records {
            self.find(record, &mut found)?;
            for (number, (feature, values)) in self.features.iter().zip(&mut found).enumerate() {
                let (Some((target, row_len)), Some((number, _))) =
                    (&mut targets[number], &feature.numbers)
                else {
                    kept[number].push(values.take());
                    continue;
                };
                let bytes: &[u8] = match values {
                    Some(values) => {
                        let count = feature.checked_count(values)?;
                        feature.numbers(*number, (values, count), &mut scratch, 0)?
                    }
                    None => &feature.absent.as_ref().ok_or_else(|| feature.missing())?.1,
                };
                if bytes.len() != *row_len {
                    // absent and optional
                    return Err(feature.missing());
                }
                Bytes::from(bytes).copy_to(&mut target.take_front(*row_len));
            }
        }
        Ok(kept)
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyExampleParser>()
}
