//! Features of elements as arrays, and rows of values that become arrays.

use grainmill_core::pack::{FeatureRows, Placement};
use numpy::{PyArray1, PyArrayDescr, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::{PyKeyError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyBytesMethods, PyDict, PySlice, PyTuple};

use crate::array_bytes::bytes_of;
use crate::call::call;
use crate::error::Raised;

pub(crate) type Array<'py> = Bound<'py, PyUntypedArray>;

/// The features of an element to pack, and how values that are not plain arrays are converted.
pub(crate) struct Features {
    /// Keys from the element down to each feature.
    pub(crate) paths: Vec<Vec<Py<PyAny>>>,
    pub(crate) names: Vec<String>,
    pub(crate) marked: Vec<bool>,
    /// Whether elements must have these features and no others.
    pub(crate) exact: bool,
    /// Python's `Cells`, which converts values that are not plain arrays.
    pub(crate) cells: Py<PyAny>,
}

impl Features {
    /// Collects the arrays of `element`, with the trailing shapes of `rows`, if any.
    pub(crate) fn gather<'py>(
        &self,
        element: &Bound<'py, PyAny>,
        rows: &[Rows],
        arrays: &mut Vec<Array<'py>>,
        lengths: &mut Vec<usize>,
    ) -> PyResult<()> {
        arrays.clear();
        lengths.clear();
        if self.exact && !self.has_exactly_these(element)? {
            self.ask(element.py(), "refuse", (element,))?;
        }
        for (feature, path) in self.paths.iter().enumerate() {
            let value = self.value(element, feature, path)?;
            let rows = rows.get(feature);
            let array = match value.cast_into::<PyUntypedArray>() {
                Ok(array) if is_plain(&array, rows) => array,
                Ok(array) => self.coerce(feature, array.as_any(), rows)?,
                Err(other) => self.coerce(feature, &other.into_inner(), rows)?,
            };
            lengths.push(array.shape()[0]);
            arrays.push(array);
        }
        Ok(())
    }

    fn has_exactly_these(&self, element: &Bound<'_, PyAny>) -> PyResult<bool> {
        let Ok(dict) = element.cast::<PyDict>() else { return Ok(false) };
        if dict.len() != self.paths.len() {
            return Ok(false);
        }
        for path in &self.paths {
            if !dict.contains(path[0].bind(element.py()))? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn value<'py>(
        &self,
        element: &Bound<'py, PyAny>,
        feature: usize,
        path: &[Py<PyAny>],
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = element.py();
        let mut value = element.clone();
        for key in path {
            let Ok(dict) = value.cast::<PyDict>() else {
                return Err(PyValueError::new_err(format!(
                    "an element to pack must be a dictionary with the feature `{}`, got {} in its \
                     place",
                    self.names[feature],
                    value.get_type()
                )));
            };
            let Some(inner) = dict.get_item(key.bind(py))? else {
                return Err(PyKeyError::new_err(key.clone_ref(py)));
            };
            value = inner;
        }
        Ok(value)
    }

    fn coerce<'py>(
        &self,
        feature: usize,
        value: &Bound<'py, PyAny>,
        rows: Option<&Rows>,
    ) -> PyResult<Array<'py>> {
        let py = value.py();
        let trailing = rows.map(|rows| PyTuple::new(py, &rows.trailing)).transpose()?;
        Ok(self.ask(py, "coerce", (feature, value, trailing))?.cast_into::<PyUntypedArray>()?)
    }

    /// Whether `arrays` have the dtypes of `rows`, if there are any.
    pub(crate) fn fits(rows: &[Rows], arrays: &[Array<'_>]) -> bool {
        rows.iter().zip(arrays).all(|(rows, array)| has_dtype(array, rows))
    }

    /// Makes the dtypes of `arrays` those of `rows`, which become wider where they have to.
    pub(crate) fn fit(&self, rows: &mut [Rows], arrays: &mut [Array<'_>]) -> PyResult<()> {
        for (feature, (rows, array)) in rows.iter_mut().zip(arrays).enumerate() {
            if has_dtype(array, rows) {
                continue;
            }
            let py = array.py();
            let dtype = self.ask(py, "common_dtype", (feature, &rows.dtype, array.dtype()))?;
            let dtype = dtype.cast_into::<PyArrayDescr>()?;
            if !dtype.is_equiv_to(rows.dtype.bind(py)) {
                rows.widen(self, dtype)?;
            }
            let converted = self.ask(py, "converted", (&*array, &rows.dtype))?;
            *array = converted.cast_into::<PyUntypedArray>()?;
        }
        Ok(())
    }

    /// Calls a method of Python's `Cells`.
    fn ask<'py>(
        &self,
        py: Python<'py>,
        method: &str,
        args: impl IntoPyObject<'py, Target = PyTuple, Output = Bound<'py, PyTuple>, Error: Into<PyErr>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        call(&self.cells.bind(py).getattr(method)?, args)
    }
}

/// Whether the bytes of `array` can be copied unchanged, if it has the dtype of `rows`.
fn is_plain(array: &Array<'_>, rows: Option<&Rows>) -> bool {
    array.ndim() > 0
        && array.is_c_contiguous()
        && rows.is_none_or(|rows| array.shape()[1..] == rows.trailing)
}

fn has_dtype(array: &Array<'_>, rows: &Rows) -> bool {
    let (dtype, expected) = (array.dtype(), rows.dtype.bind(array.py()));
    dtype.is(expected) || dtype.is_equiv_to(expected)
}

/// One feature of the current batch.
pub(crate) struct Rows {
    dtype: Py<PyArrayDescr>,
    /// Sizes of the axes after the first.
    trailing: Vec<usize>,
    value_bytes: usize,
    column: FeatureRows,
    /// The rows, if values are Python objects.
    objects: Option<Py<PyAny>>,
}

impl Rows {
    /// Empty rows for values of the dtype and trailing shape of `array`.
    pub(crate) fn for_array(
        array: &Array<'_>,
        features: &Features,
        feature: usize,
        (num_rows, row_len): (usize, usize),
    ) -> PyResult<Self> {
        let py = array.py();
        let dtype = array.dtype();
        let trailing = array.shape()[1..].to_vec();
        let sizes = PyTuple::new(py, &trailing)?;
        let marked = features.marked[feature];
        if dtype.has_object() {
            let arguments = (feature, &dtype, num_rows, row_len, sizes);
            let objects = features.ask(py, "object_rows", arguments)?.unbind();
            let column = FeatureRows::new(num_rows, row_len, 0, None, marked).map_err(Raised)?;
            let dtype = dtype.unbind();
            return Ok(Self { dtype, trailing, value_bytes: 0, column, objects: Some(objects) });
        }
        let padding = features.ask(py, "padding", (feature, &dtype, sizes))?;
        let padding = padding.extract::<Option<Bound<'_, PyBytes>>>()?;
        let value_bytes = dtype.itemsize() * trailing.iter().product::<usize>();
        let padding = padding.as_ref().map(PyBytesMethods::as_bytes);
        let column =
            FeatureRows::new(num_rows, row_len, value_bytes, padding, marked).map_err(Raised)?;
        Ok(Self { dtype: dtype.unbind(), trailing, value_bytes, column, objects: None })
    }

    /// Converts the values to `dtype`; if that fails, they stay as they are.
    fn widen(&mut self, features: &Features, dtype: Bound<'_, PyArrayDescr>) -> PyResult<()> {
        let py = dtype.py();
        let values = self.column.values();
        let copy = |out: &mut [u8]| {
            out.copy_from_slice(values);
            Ok(())
        };
        let values = PyBytes::new_with(py, values.len(), copy)?;
        let (num_rows, row_len) = self.column.shape();
        let shape = PyTuple::new(py, [&[num_rows, row_len], &self.trailing[..]].concat())?;
        let wider = features.ask(py, "widened", (values, shape, &self.dtype, &dtype))?;
        if dtype.has_object() {
            drop(self.column.take_values());
            self.objects = Some(wider.unbind());
            self.value_bytes = 0;
        } else {
            self.value_bytes = dtype.itemsize() * self.trailing.iter().product::<usize>();
            let bytes = wider.cast_into::<PyBytes>()?;
            self.column.replace_values(self.value_bytes, bytes.as_bytes()).map_err(Raised)?;
        }
        self.dtype = dtype.unbind();
        Ok(())
    }

    /// Copies the values of `array`, which has their dtype, from `from` on to `to`.
    pub(crate) fn write(&mut self, array: &Array<'_>, from: usize, to: Placement) -> PyResult<()> {
        if let Some(objects) = &self.objects {
            let py = array.py();
            let values = array.as_any().get_item(slice(py, from, to.len)?)?;
            objects.bind(py).set_item((to.row, slice(py, to.start, to.len)?), values)?;
            self.column.mark(to);
        } else {
            let value_bytes = self.value_bytes;
            let range = from * value_bytes..(from + to.len) * value_bytes;
            self.column.write(to, bytes_of(array).slice(range));
        }
        Ok(())
    }

    /// Overwrites the first value of `to` with `token`.
    pub(crate) fn write_begin_token(
        &mut self,
        features: &Features,
        feature: usize,
        token: &Bound<'_, PyAny>,
        to: Placement,
    ) -> PyResult<()> {
        let py = token.py();
        if to.len == 0 {
            return Ok(());
        }
        if let Some(objects) = &self.objects {
            return objects.bind(py).set_item((to.row, to.start), token);
        }
        let sizes = PyTuple::new(py, &self.trailing)?;
        let bytes = features.ask(py, "cell", (feature, token, &self.dtype, sizes))?;
        self.column.overwrite(to.row, to.start, bytes.cast::<PyBytes>()?.as_bytes());
        Ok(())
    }

    /// The rows as (values, first byte, dtype, trailing sizes, segment ids, positions).
    pub(crate) fn into_python(mut self, py: Python<'_>) -> PyResult<Bound<'_, PyTuple>> {
        let (bytes, offset) = self.column.take_values();
        let values = match self.objects {
            Some(objects) => objects.into_bound(py),
            None => PyArray1::from_vec(py, bytes).into_any(),
        };
        let marks = self.column.take_marks();
        let (segment_ids, positions) = marks.unzip();
        let vector = |values: Option<Vec<i32>>| values.map(|values| PyArray1::from_vec(py, values));
        let trailing = PyTuple::new(py, &self.trailing)?;
        (values, offset, self.dtype, trailing, vector(segment_ids), vector(positions))
            .into_pyobject(py)
    }
}

fn slice(py: Python<'_>, start: usize, len: usize) -> PyResult<Bound<'_, PySlice>> {
    Ok(PySlice::new(py, isize::try_from(start)?, isize::try_from(start + len)?, 1))
}
