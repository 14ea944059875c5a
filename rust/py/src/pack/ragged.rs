//! Elements laid end to end, one array for each feature, to go to another core in one piece.

use std::ops::Range;
use std::sync::Arc;

use numpy::{PyArray1, PyArrayDescr, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PySlice};

use crate::cells::with_bytes;
use crate::pack::rows::{Features, alike};

/// One feature of consecutive elements.
pub(crate) struct Cells {
    key: Py<PyAny>,
    pub(crate) dtype: Py<PyArrayDescr>,
    cell_bytes: usize,
    bytes: Vec<u8>,
    /// Where each element's cells end, in cells.
    ends: Vec<usize>,
}

impl Cells {
    fn span(&self, element: usize) -> Range<usize> {
        let start = if element == 0 { 0 } else { self.ends[element - 1] };
        start..self.ends[element]
    }

    /// How many cells an element has.
    pub(crate) fn len(&self, element: usize) -> usize {
        self.span(element).len()
    }

    /// The bytes of an element's cells.
    pub(crate) fn bytes(&self, element: usize) -> &[u8] {
        let Range { start, end } = self.span(element);
        &self.bytes[start * self.cell_bytes..end * self.cell_bytes]
    }

    fn push(&mut self, array: &Bound<'_, PyUntypedArray>) {
        with_bytes(array, |bytes| self.bytes.extend_from_slice(bytes));
        self.ends.push(self.ends.last().copied().unwrap_or(0) + array.len());
    }
}

/// Consecutive elements, of each the features that are packed.
#[pyclass(module = "grainmill._native", frozen)]
pub(crate) struct Ragged {
    pub(crate) features: Arc<[Cells]>,
    /// The numbers that its elements have in `features`.
    pub(crate) elements: Range<usize>,
}

#[pymethods]
impl Ragged {
    fn __len__(&self) -> usize {
        self.elements.len()
    }

    /// The elements of a slice without a step, which are not copied.
    fn __getitem__(&self, part: &Bound<'_, PySlice>) -> PyResult<Self> {
        let indices = part.indices(isize::try_from(self.elements.len())?)?;
        if indices.step != 1 {
            return Err(PyIndexError::new_err("elements laid end to end have no step but 1"));
        }
        let first = self.elements.start + usize::try_from(indices.start)?;
        let elements = first..first + indices.slicelength;
        Ok(Self { features: Arc::clone(&self.features), elements })
    }

    /// The elements as dicts of arrays.
    fn elements<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let elements = self.elements.clone().map(|element| {
            let dict = PyDict::new(py);
            for feature in self.features.iter() {
                let bytes = PyArray1::from_slice(py, feature.bytes(element));
                dict.set_item(&feature.key, bytes.call_method1("view", (&feature.dtype,))?)?;
            }
            Ok(dict)
        });
        PyList::new(py, elements.collect::<PyResult<Vec<_>>>()?)
    }
}

impl Ragged {
    /// Lays `elements` end to end, or gives up where they are not all dicts of plain vectors.
    pub(crate) fn of(features: &Features, elements: &Bound<'_, PyList>) -> Option<Self> {
        let mut laid: Vec<Cells> = Vec::new();
        for element in elements {
            for (feature, path) in features.paths.iter().enumerate() {
                let [key] = path.as_slice() else { return None };
                let value = features.value(&element, feature, path).ok()?;
                let array = value.cast_into::<PyUntypedArray>().ok()?;
                let dtype = array.dtype();
                let plain = array.ndim() == 1 && array.is_c_contiguous() && !dtype.has_object();
                if !plain || dtype.itemsize() == 0 {
                    return None;
                }
                if laid.len() == feature {
                    laid.push(Cells {
                        key: key.clone_ref(element.py()),
                        cell_bytes: dtype.itemsize(),
                        dtype: dtype.unbind(),
                        bytes: Vec::new(),
                        ends: Vec::with_capacity(elements.len()),
                    });
                } else if !alike(&dtype, &laid[feature].dtype) {
                    return None;
                }
                laid[feature].push(&array);
            }
        }
        Some(Self { features: laid.into(), elements: 0..elements.len() })
    }
}
