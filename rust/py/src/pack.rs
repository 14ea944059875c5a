//! The layer `pack` of the engine, for Python: elements in, rows of arrays out.

use std::sync::{Mutex, MutexGuard};

use grainmill_core::pack::{Bins, Column, Fit, Layout, Placement};
use numpy::{PyArray1, PyArrayDescr, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::{PyKeyError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PySlice, PyTuple};

use crate::cells::with_bytes;
use crate::error::Raised;

type Array<'py> = Bound<'py, PyUntypedArray>;

/// Which parts of an element are laid out in cells, and who makes odd values plain.
struct Features {
    /// Keys from the element down to each feature.
    paths: Vec<Vec<Py<PyAny>>>,
    names: Vec<String>,
    marked: Vec<bool>,
    /// Python's `Cells`, asked about values that are not plain arrays.
    cells: Py<PyAny>,
}

impl Features {
    /// Collects the arrays of `element`; those of a batch under way have its dtypes.
    fn gather<'py>(
        &self,
        element: &Bound<'py, PyAny>,
        rows: &[Rows],
        arrays: &mut Vec<Array<'py>>,
        lengths: &mut Vec<usize>,
    ) -> PyResult<()> {
        arrays.clear();
        lengths.clear();
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
        let wanted = rows.map(|rows| (rows.dtype.clone_ref(py), rows.trailing.clone()));
        let (dtype, trailing) = wanted.unzip();
        let trailing = trailing.map(|sizes| PyTuple::new(py, sizes)).transpose()?;
        let arguments = (feature, value, dtype, trailing);
        Ok(self.cells.bind(py).call_method1("coerce", arguments)?.cast_into::<PyUntypedArray>()?)
    }
}

/// Whether the bytes of `array` can be copied as they are.
fn is_plain(array: &Array<'_>, rows: Option<&Rows>) -> bool {
    if array.ndim() == 0 || !array.is_c_contiguous() {
        return false;
    }
    let dtype = array.dtype();
    match rows {
        Some(rows) => {
            let wanted = rows.dtype.bind(array.py());
            (dtype.is(wanted) || dtype.is_equiv_to(wanted)) && array.shape()[1..] == rows.trailing
        }
        None => true,
    }
}

/// One feature of the batch under way.
struct Rows {
    dtype: Py<PyArrayDescr>,
    /// Sizes of the axes after the first.
    trailing: Vec<usize>,
    column: Column,
    /// The rows themselves, where cells are Python objects.
    objects: Option<Py<PyAny>>,
}

impl Rows {
    /// Empty rows for values like `array`.
    fn like(
        array: &Array<'_>,
        features: &Features,
        feature: usize,
        (num_rows, row_cells): (usize, usize),
    ) -> PyResult<Self> {
        let py = array.py();
        let dtype = array.dtype();
        let trailing = array.shape()[1..].to_vec();
        let cells = features.cells.bind(py);
        let sizes = PyTuple::new(py, &trailing)?;
        let marked = features.marked[feature];
        if dtype.has_object() {
            let arguments = (feature, &dtype, num_rows, row_cells, sizes);
            let objects = cells.call_method1("object_rows", arguments)?.unbind();
            let column = Column::new(num_rows, row_cells, 0, None, marked);
            return Ok(Self { dtype: dtype.unbind(), trailing, column, objects: Some(objects) });
        }
        let padding = cells.call_method1("padding", (feature, &dtype, sizes))?;
        let padding = padding.extract::<Option<Bound<'_, PyBytes>>>()?;
        let cell_bytes = dtype.itemsize() * trailing.iter().product::<usize>();
        let padding = padding.as_ref().map(|padding| padding.as_bytes());
        let column = Column::new(num_rows, row_cells, cell_bytes, padding, marked);
        Ok(Self { dtype: dtype.unbind(), trailing, column, objects: None })
    }

    fn write(&mut self, array: &Array<'_>, to: Placement) -> PyResult<()> {
        if let Some(objects) = &self.objects {
            let py = array.py();
            let start = isize::try_from(to.start)?;
            let cells = PySlice::new(py, start, start + isize::try_from(to.len)?, 1);
            objects.bind(py).set_item((to.row, cells), array)?;
            self.column.mark(to);
        } else {
            with_bytes(array, |bytes| self.column.write(to, bytes));
        }
        Ok(())
    }

    /// The rows as (values, first byte, dtype, trailing sizes, segment ids, positions).
    fn into_python(mut self, py: Python<'_>) -> PyResult<Bound<'_, PyTuple>> {
        let (bytes, offset) = self.column.take_values();
        let values = match self.objects {
            Some(objects) => objects.into_bound(py),
            None => PyArray1::from_vec(py, bytes).into_any(),
        };
        let marks = self.column.take_marks();
        let (segment_ids, positions) = marks.unzip();
        let vector = |cells: Option<Vec<i32>>| cells.map(|cells| PyArray1::from_vec(py, cells));
        let trailing = PyTuple::new(py, &self.trailing)?;
        (values, offset, self.dtype, trailing, vector(segment_ids), vector(positions))
            .into_pyobject(py)
    }
}

struct Batch {
    bins: Bins,
    rows: Vec<Rows>,
    /// By kept feature, then row: the values of its sequences.
    kept: Vec<Vec<Vec<Py<PyAny>>>>,
    full: bool,
}

/// Packs the features of elements into a batch of bins.
#[pyclass(module = "grainmill._native", frozen)]
pub(crate) struct BinPacker {
    features: Features,
    /// Keys of features whose values are kept as they are.
    kept: Vec<Py<PyAny>>,
    best_fit: bool,
    batch: Mutex<Batch>,
}

#[pymethods]
impl BinPacker {
    #[new]
    #[pyo3(signature = (*, paths, names, capacities, alignments, marked, kept, num_bins,
                        max_sequences, best_fit, cells))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of one call")]
    fn new(
        paths: Vec<Vec<Py<PyAny>>>,
        names: Vec<String>,
        capacities: Vec<usize>,
        alignments: Vec<usize>,
        marked: Vec<bool>,
        kept: Vec<Py<PyAny>>,
        num_bins: usize,
        max_sequences: Option<usize>,
        best_fit: bool,
        cells: Py<PyAny>,
    ) -> Result<Self, Raised> {
        let layout = Layout { capacities, alignments, num_bins, max_sequences };
        let bins = Bins::new(layout, if best_fit { Fit::Best } else { Fit::First })?;
        let batch = Batch { bins, rows: Vec::new(), kept: Vec::new(), full: false };
        let features = Features { paths, names, marked, cells };
        Ok(Self { features, kept, best_fit, batch: Mutex::new(batch) })
    }

    /// Puts elements of `elements` from `start` on into bins, until one fits nowhere.
    ///
    /// Returns how many were put, and whether the next one fits nowhere. An element that can
    /// not be packed raises when it is the first, so those before it are never lost.
    fn push(&self, elements: &Bound<'_, PyList>, start: usize) -> PyResult<(usize, bool)> {
        let mut batch = self.locked()?;
        let (mut arrays, mut lengths) = (Vec::new(), Vec::new());
        let mut taken = 0;
        for index in start..elements.len() {
            let element = elements.get_item(index)?;
            match self.add(&mut batch, &element, &mut arrays, &mut lengths) {
                Ok(true) => taken += 1,
                Ok(false) => break,
                Err(failure) if taken == 0 => return Err(failure),
                Err(_) => return Ok((taken, false)),
            }
        }
        Ok((taken, batch.full))
    }

    /// Gives the rows filled so far and starts a new batch.
    ///
    /// Returns the number of rows, the features' arrays and, by kept feature, lists by row.
    fn take<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<(usize, Vec<Bound<'py, PyTuple>>, Vec<Vec<Vec<Py<PyAny>>>>)> {
        let mut batch = self.locked()?;
        let num_rows = batch.bins.num_opened();
        let mut kept = std::mem::take(&mut batch.kept);
        for rows in &mut kept {
            rows.truncate(num_rows);
        }
        let rows = std::mem::take(&mut batch.rows);
        batch.bins.clear();
        batch.full = false;
        let columns = rows.into_iter().map(|rows| rows.into_python(py)).collect::<PyResult<_>>()?;
        Ok((num_rows, columns, kept))
    }
}

impl BinPacker {
    fn locked(&self) -> PyResult<MutexGuard<'_, Batch>> {
        self.batch.try_lock().map_err(|_| {
            PyRuntimeError::new_err("a packing iterator was advanced by two threads at once")
        })
    }

    /// Puts one element into a bin; `false` if none has room.
    fn add<'py>(
        &self,
        batch: &mut Batch,
        element: &Bound<'py, PyAny>,
        arrays: &mut Vec<Array<'py>>,
        lengths: &mut Vec<usize>,
    ) -> PyResult<bool> {
        self.features.gather(element, &batch.rows, arrays, lengths)?;
        batch.bins.check_lengths(lengths, &self.features.names, self.subject()).map_err(Raised)?;
        let kept = self.kept_values(element)?;
        let Some(bin) = batch.bins.choose(lengths) else {
            batch.full = true;
            return Ok(false);
        };
        if batch.rows.is_empty() {
            self.begin(batch, arrays)?;
        }
        let segment = i32::try_from(batch.bins.num_sequences(bin) + 1)?;
        for (feature, (array, rows)) in arrays.iter().zip(&mut batch.rows).enumerate() {
            let start = batch.bins.starts(bin)[feature];
            let to = Placement { row: bin, start, len: lengths[feature], segment };
            rows.write(array, to)?;
        }
        for (rows, value) in batch.kept.iter_mut().zip(kept) {
            rows[bin].push(value);
        }
        batch.bins.put(bin, lengths);
        Ok(true)
    }

    fn subject(&self) -> &'static str {
        if self.best_fit { "packer" } else { "PackedBatch" }
    }

    fn kept_values(&self, element: &Bound<'_, PyAny>) -> PyResult<Vec<Py<PyAny>>> {
        self.kept.iter().map(|key| element.get_item(key).map(Bound::unbind)).collect()
    }

    /// Makes rows for a batch whose first element has these arrays.
    fn begin(&self, batch: &mut Batch, arrays: &[Array<'_>]) -> PyResult<()> {
        let layout = batch.bins.layout();
        let rows = arrays.iter().enumerate().map(|(feature, array)| {
            let size = (layout.num_bins, layout.capacities[feature]);
            Rows::like(array, &self.features, feature, size)
        });
        let rows = rows.collect::<PyResult<_>>()?;
        let num_bins = layout.num_bins;
        let lists = || (0..num_bins).map(|_| Vec::new()).collect();
        batch.kept = self.kept.iter().map(|_| lists()).collect();
        batch.rows = rows;
        Ok(())
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<BinPacker>()
}
