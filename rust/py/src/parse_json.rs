//! Python bindings of JSON fields.

use std::borrow::Cow;
use std::str;

use grainmill_core::formats::json_lines;
use grainmill_core::parse::json::{self, Paths, Step, Value};
use grainmill_core::parse::number::{Number, put_float, put_integer};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString};

use crate::parse::{Described, Field, Fields, Given, Kind};

/// Takes fields out of JSON objects.
#[pyclass(frozen, name = "JsonParser", module = "grainmill._native")]
struct PyJsonParser {
    fields: Fields<Type>,
    paths: Paths,
}

/// The type of a field.
#[derive(PartialEq)]
enum Type {
    Object,
    Text,
    Bytes,
    Numbers,
}

impl Kind for Type {
    const NAME: &'static str = "field";
    const MIN_SHARE_LEN: usize = 16 << 10;
    type Found<'a> = &'a str;

    fn numbers<'s>(
        field: &Field<Self>,
        number: Number,
        text: &&str,
        scratch: &'s mut Vec<u8>,
    ) -> PyResult<&'s [u8]> {
        scratch.clear();
        field.for_each_value(text, field.num_axes(), &mut |value| {
            field.push_number(number, value, scratch)
        })?;
        Ok(scratch)
    }

    fn object<'py>(
        field: &Field<Self>,
        py: Python<'py>,
        text: &&str,
    ) -> PyResult<Bound<'py, PyAny>> {
        if field.kind == Self::Object {
            return python_object(py, text).map_err(|error| field.error(error.value(py)));
        }
        let mut objects = Vec::new();
        field.for_each_value(text, field.num_axes(), &mut |value| {
            objects.push(field.string(py, value)?);
            Ok(())
        })?;
        field.of_objects(py, objects)
    }
}

impl Field<Type> {
    fn num_axes(&self) -> usize {
        self.shape.len() + usize::from(self.any_len)
    }

    /// Calls `take` with each value of `text`, an array with `num_axes` axes.
    fn for_each_value<'a>(
        &self,
        text: &'a str,
        num_axes: usize,
        take: &mut impl FnMut(Value<'a>) -> PyResult<()>,
    ) -> PyResult<()> {
        let value = json::value(text);
        if num_axes == 0 {
            return take(value);
        }
        let Value::Array(array) = value else {
            return Err(self.unexpected("an array", value));
        };
        let mut count = 0;
        json::for_each_item(array, |item| {
            count += 1;
            self.for_each_value(item, num_axes - 1, take)
        })?;
        let axis = self.shape.len().checked_sub(num_axes);
        match axis.map(|axis| self.shape[axis]) {
            Some(expected) if expected != count => {
                Err(self.error(format!("an array has {count} items, its shape needs {expected}")))
            }
            _ => Ok(()),
        }
    }

    fn push_number(&self, number: Number, value: Value<'_>, out: &mut Vec<u8>) -> PyResult<()> {
        match value {
            Value::Number(text) if number.is_integer() => {
                let short = text.parse::<i64>().map(i128::from);
                match short.or_else(|_| text.parse::<i128>()) {
                    Ok(value) if put_integer(number, value, out) => Ok(()),
                    Ok(_) => Err(self.error(format!("the value {text} does not fit the dtype"))),
                    Err(_) => Err(self.error(format!("expected an integer, found {text}"))),
                }
            }
            Value::Number(text) => {
                let value = text.parse::<f64>().map_err(|error| self.error(error))?;
                put_float(number, value, out);
                Ok(())
            }
            Value::Bool(value) if number == Number::Bool => {
                out.push(u8::from(value));
                Ok(())
            }
            found if number == Number::Bool => Err(self.unexpected("true or false", found)),
            found => Err(self.unexpected("a number", found)),
        }
    }

    fn string<'py>(&self, py: Python<'py>, value: Value<'_>) -> PyResult<Bound<'py, PyAny>> {
        let Value::String(string) = value else { return Err(self.unexpected("a string", value)) };
        let text = decoded(string).map_err(|problem| self.error(problem))?;
        Ok(match self.kind {
            Type::Bytes => PyBytes::new(py, text.as_bytes()).into_any(),
            _ => PyString::new(py, &text).into_any(),
        })
    }

    fn unexpected(&self, expected: &str, found: Value<'_>) -> PyErr {
        self.error(format!("expected {expected}, found {}", described(found)))
    }
}

fn decoded(string: &str) -> Result<Cow<'_, str>, &'static str> {
    json::decoded(string).ok_or("half a surrogate pair in a string")
}

fn described(value: Value<'_>) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// What Python's `json.loads` returns.
fn python_object<'py>(py: Python<'py>, text: &str) -> PyResult<Bound<'py, PyAny>> {
    let decoded = |string| decoded(string).map_err(PyValueError::new_err);
    Ok(match json::value(text) {
        Value::Null => py.None().into_bound(py),
        Value::Bool(value) => PyBool::new(py, value).to_owned().into_any(),
        Value::Number(text) => {
            if let Ok(integer) = text.parse::<i64>() {
                integer.into_pyobject(py)?.into_any()
            } else if text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'-') {
                py.get_type::<PyInt>().call1((text,))?
            } else {
                PyFloat::new(py, text.parse()?).into_any()
            }
        }
        Value::String(string) => PyString::new(py, &decoded(string)?).into_any(),
        Value::Array(array) => {
            let list = PyList::empty(py);
            json::for_each_item(array, |item| list.append(python_object(py, item)?))?;
            list.into_any()
        }
        Value::Object(object) => {
            let dict = PyDict::new(py);
            json::for_each_member(object, |name, member| {
                dict.set_item(PyString::from_bytes(py, name)?, python_object(py, member)?)
            })?;
            dict.into_any()
        }
    })
}

fn not_json(problem: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(format!("the record is not JSON: {problem}"))
}

impl PyJsonParser {
    fn find<'a>(&self, record: &'a [u8], found: &mut [Option<&'a str>]) -> PyResult<()> {
        let text = record.strip_prefix(json_lines::BYTE_ORDER_MARK).unwrap_or(record);
        let text = str::from_utf8(text).map_err(|error| {
            not_json(format!("it is not valid UTF-8 at byte {}", error.valid_up_to()))
        })?;
        self.paths.find(text, found).map_err(not_json)?;
        if !text.trim_ascii_start().starts_with('{') {
            return Err(PyValueError::new_err("the record is not a JSON object"));
        }
        for (field, found) in self.fields.0.iter().zip(found) {
            *found = found.filter(|text| *text != "null" || field.kind == Type::Object);
        }
        Ok(())
    }
}

#[pymethods]
impl PyJsonParser {
    /// Takes the path and the type of each field, and the rest.
    #[new]
    fn new(
        py: Python<'_>,
        fields: Vec<(Vec<Bound<'_, PyAny>>, String, Described<'_>)>,
    ) -> PyResult<Self> {
        let (mut all, mut paths) = (Vec::new(), Vec::new());
        for (path, kind, described) in fields {
            let steps = path.iter().map(|step| match step.extract::<usize>() {
                Ok(item) => Ok(Step::Item(item)),
                Err(_) => step.extract().map(Step::Member),
            });
            paths.push(steps.collect::<PyResult<Vec<_>>>()?);
            let kind = match kind.as_str() {
                "object" => Type::Object,
                "str" => Type::Text,
                "bytes" => Type::Bytes,
                _ => Type::Numbers,
            };
            all.push(Field::of(py, kind, described)?);
        }
        Ok(Self { fields: Fields(all), paths: Paths::new(paths) })
    }

    /// See `Fields::parse`.
    fn parse<'py>(
        &self,
        py: Python<'py>,
        records: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        let given = Given::of(records)?;
        let find = |record, found: &mut [_]| self.find(record, found);
        self.fields.parse(py, &given.slices(true)?, find, |_, _, _| Ok(()))
    }

    /// See `Fields::fill`.
    fn fill<'py>(
        &self,
        py: Python<'py>,
        records: &Bound<'py, PyAny>,
        columns: &Bound<'py, PyDict>,
        at: usize,
    ) -> PyResult<bool> {
        let given = Given::of(records)?;
        let find = |record, found: &mut [_]| self.find(record, found);
        self.fields.fill(py, &given.slices(true)?, columns, at, find)
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyJsonParser>()
}
