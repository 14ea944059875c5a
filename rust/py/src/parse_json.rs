//! Python bindings of JSON fields.

use std::str;

use grainmill_core::formats::json_lines;
use grainmill_core::parse::json::{self, Invalid, Paths, Step, Value};
use grainmill_core::parse::number::{Number, put_float, put_integer};
use numpy::PyArrayDescr;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString};

use crate::array::{array_of, scalar_of};
use crate::parse::{number_of, object_array};

/// Takes fields out of JSON objects.
#[pyclass(frozen, name = "JsonParser", module = "grainmill._native")]
struct PyJsonParser {
    fields: Vec<Field>,
    paths: Paths,
}

/// A field as Python describes it: its name; its path; `object`, `str`, `bytes` or the name of the
/// dtype of its numbers; that dtype; its shape, without a first axis of any length; whether it has
/// such an axis; what stands for it where it is missing, or None.
type Described<'py> = (
    String,
    Vec<Bound<'py, PyAny>>,
    String,
    Option<Bound<'py, PyArrayDescr>>,
    Vec<usize>,
    bool,
    Option<(Py<PyAny>,)>,
);

enum Kind {
    Object,
    Text,
    Bytes,
    Numbers(Number, Py<PyArrayDescr>),
}

struct Field {
    key: Py<PyString>,
    name: String,
    kind: Kind,
    shape: Vec<usize>,
    any_len: bool,
    absent: Option<(Py<PyAny>,)>,
}

/// The values of an array while it is read.
struct Values<'py> {
    objects: Vec<Bound<'py, PyAny>>,
    numbers: Vec<u8>,
}

impl Field {
    fn error(&self, problem: impl std::fmt::Display) -> PyErr {
        PyValueError::new_err(format!("field `{}`: {problem}", self.name))
    }

    fn object<'py>(&self, py: Python<'py>, text: Option<&str>) -> PyResult<Bound<'py, PyAny>> {
        let value = text.map_or(Value::Null, json::value);
        if let (Kind::Object, Some(text)) = (&self.kind, text) {
            return python_object(py, text).map_err(|error| self.error(error.value(py)));
        }
        if value == Value::Null {
            let Some((absent,)) = &self.absent else {
                return Err(
                    self.error("it is missing, and has neither a default nor `optional=True`")
                );
            };
            let absent = absent.bind(py);
            // Each element has its own; numbers and texts cannot change.
            return if absent.hasattr("copy")? {
                absent.call_method0("copy")
            } else {
                Ok(absent.clone())
            };
        }
        let mut values = Values { objects: Vec::new(), numbers: Vec::new() };
        let num_axes = self.shape.len() + usize::from(self.any_len);
        let count = self.push(py, text.unwrap_or_default(), num_axes, &mut values)?;
        let mut shape = self.shape.clone();
        if self.any_len {
            shape.insert(0, count);
        }
        match (&self.kind, num_axes) {
            (Kind::Numbers(_, dtype), 0) => scalar_of(dtype.bind(py), &values.numbers),
            (Kind::Numbers(_, dtype), _) => array_of(&shape, dtype.bind(py), &values.numbers),
            (_, 0) => values.objects.pop().ok_or_else(|| self.error("it has no value")),
            _ => object_array(py, values.objects, &shape),
        }
    }

    /// Appends what `text` is, an array with `num_axes` axes; returns the length of the first.
    fn push<'py>(
        &self,
        py: Python<'py>,
        text: &str,
        num_axes: usize,
        values: &mut Values<'py>,
    ) -> PyResult<usize> {
        let value = json::value(text);
        if num_axes == 0 {
            return self.push_one(py, value, values).map(|()| 1);
        }
        let Value::Array(array) = value else {
            return Err(self.error(format!("expected an array, found {}", described(value))));
        };
        let mut count = 0;
        json::for_each_item(array, |item| {
            count += 1;
            self.push(py, item, num_axes - 1, values).map(drop)
        })?;
        let axis = self.shape.len().checked_sub(num_axes);
        match axis.map(|axis| self.shape[axis]) {
            Some(expected) if expected != count => {
                Err(self.error(format!("an array has {count} items, its shape needs {expected}")))
            }
            _ => Ok(count),
        }
    }

    fn push_one<'py>(
        &self,
        py: Python<'py>,
        value: Value<'_>,
        values: &mut Values<'py>,
    ) -> PyResult<()> {
        match (&self.kind, value) {
            (Kind::Numbers(number, _), Value::Number(text)) if number.is_integer() => {
                let short = text.parse::<i64>().map(i128::from);
                match short.or_else(|_| text.parse::<i128>()) {
                    Ok(value) if put_integer(*number, value, &mut values.numbers) => Ok(()),
                    Ok(_) => Err(self.error(format!("the value {text} does not fit the dtype"))),
                    Err(_) => Err(self.error(format!("expected an integer, found {text}"))),
                }
            }
            (Kind::Numbers(number, _), Value::Number(text)) => {
                let value = text.parse::<f64>().map_err(|error| self.error(error))?;
                put_float(*number, value, &mut values.numbers);
                Ok(())
            }
            (Kind::Numbers(Number::Bool, _), Value::Bool(value)) => {
                values.numbers.push(u8::from(value));
                Ok(())
            }
            (Kind::Text, Value::String(string)) => {
                let text = self.decoded(string)?;
                values.objects.push(PyString::new(py, &text).into_any());
                Ok(())
            }
            (Kind::Bytes, Value::String(string)) => {
                let text = self.decoded(string)?;
                values.objects.push(PyBytes::new(py, text.as_bytes()).into_any());
                Ok(())
            }
            (kind, found) => {
                let expected = match kind {
                    Kind::Numbers(Number::Bool, _) => "true or false",
                    Kind::Numbers(..) => "a number",
                    _ => "a string",
                };
                Err(self.error(format!("expected {expected}, found {}", described(found))))
            }
        }
    }

    fn decoded<'a>(&self, string: &'a str) -> PyResult<std::borrow::Cow<'a, str>> {
        json::decoded(string).ok_or_else(|| self.error("half a surrogate pair in a string"))
    }
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
    let decoded = |string| {
        json::decoded(string)
            .ok_or_else(|| PyValueError::new_err("half a surrogate pair in a string"))
    };
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

/// The text of a record, without a byte order mark.
fn text_of<'a>(record: &'a Bound<'_, PyAny>) -> PyResult<&'a str> {
    if let Ok(bytes) = record.cast::<PyBytes>() {
        let bytes = bytes.as_bytes();
        let bytes = bytes.strip_prefix(json_lines::BYTE_ORDER_MARK).unwrap_or(bytes);
        return str::from_utf8(bytes).map_err(|error| {
            PyValueError::new_err(format!(
                "the record is not JSON: it is not valid UTF-8 at byte {}",
                error.valid_up_to()
            ))
        });
    }
    if let Ok(text) = record.cast::<PyString>() {
        let text = text.to_str()?;
        return Ok(text.strip_prefix('\u{feff}').unwrap_or(text));
    }
    let found = record.get_type().name()?;
    let problem = format!("a record must be `bytes` or `str`, got a value of type {found}");
    Err(PyTypeError::new_err(problem))
}

fn not_json(invalid: Invalid) -> PyErr {
    PyValueError::new_err(format!("the record is not JSON: {invalid}"))
}

#[pymethods]
impl PyJsonParser {
    #[new]
    fn new(py: Python<'_>, described: Vec<Described<'_>>) -> PyResult<Self> {
        let mut fields = Vec::new();
        let mut paths = Vec::new();
        for (name, path, kind, dtype, shape, any_len, absent) in described {
            let steps = path.iter().map(|step| match step.extract::<usize>() {
                Ok(item) => Ok(Step::Item(item)),
                Err(_) => step.extract().map(Step::Member),
            });
            paths.push(steps.collect::<PyResult<Vec<_>>>()?);
            let kind = match (kind.as_str(), dtype) {
                ("str", _) => Kind::Text,
                ("bytes", _) => Kind::Bytes,
                (name, Some(dtype)) => Kind::Numbers(number_of(name)?, dtype.unbind()),
                _ => Kind::Object,
            };
            let key = PyString::intern(py, &name).unbind();
            fields.push(Field { key, name, kind, shape, any_len, absent });
        }
        Ok(Self { fields, paths: Paths::new(paths) })
    }

    /// A dict for each record, with a value for each field.
    fn parse<'py>(
        &self,
        py: Python<'py>,
        records: &Bound<'py, PyList>,
    ) -> PyResult<Bound<'py, PyList>> {
        let elements = PyList::empty(py);
        let records: Vec<_> = records.iter().collect();
        let mut found = vec![None; self.fields.len()];
        for record in &records {
            let text = text_of(record)?;
            self.paths.find(text, &mut found).map_err(not_json)?;
            if !matches!(text.trim_ascii_start().as_bytes().first(), Some(b'{')) {
                return Err(PyValueError::new_err("the record is not a JSON object"));
            }
            let element = PyDict::new(py);
            for (field, text) in self.fields.iter().zip(&found) {
                element.set_item(field.key.bind(py), field.object(py, *text)?)?;
            }
            elements.append(element)?;
        }
        Ok(elements)
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyJsonParser>()
}
