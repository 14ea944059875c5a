//! Batches of bins, for Python.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard};

use grainmill_core::pack::{Bins, Fit, Layout, Placement};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::error::Raised;
use crate::pack::ragged::Ragged;
use crate::pack::rows::{Array, Features, Rows};

/// By row, the values of its sequences.
type Kept = Vec<Vec<Py<PyAny>>>;

struct Batch {
    bins: Bins,
    rows: Vec<Rows>,
    /// By kept feature.
    kept: Vec<Kept>,
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
        let features = Features { paths, names, marked, exact: false, cells };
        Ok(Self { features, kept, best_fit, batch: Mutex::new(batch) })
    }

    /// Puts elements of `elements` from `start` on into bins, until one fits nowhere.
    ///
    /// Returns how many were put, and whether the next one fits nowhere. An element that can
    /// not be packed raises when it is the first, so those before it are never lost.
    fn push(&self, elements: &Bound<'_, PyList>, start: usize) -> PyResult<(usize, bool)> {
        let mut batch = self.locked()?;
        let (mut arrays, mut lengths) = (Vec::new(), Vec::new());
        let taken = take_each(start..elements.len(), |index| {
            self.add(&mut batch, &elements.get_item(index)?, &mut arrays, &mut lengths)
        })?;
        Ok((taken, batch.full))
    }

    /// Lays elements end to end for `push_ragged`; None where they are not all vectors of one dtype.
    ///
    /// Any thread may do that, whatever another one packs.
    fn lay_out(&self, elements: &Bound<'_, PyList>) -> Option<Ragged> {
        if self.kept.is_empty() { Ragged::of(&self.features, elements) } else { None }
    }

    /// As `push` with the elements of `ragged`; None, and nothing done, where they have another
    /// dtype than those in the bins.
    fn push_ragged(&self, py: Python<'_>, ragged: &Ragged) -> PyResult<Option<(usize, bool)>> {
        let mut batch = self.locked()?;
        let features = &ragged.features;
        let mut pairs = batch.rows.iter().zip(features.iter());
        if !pairs.all(|(rows, cells)| rows.are_of(cells.dtype.bind(py))) {
            return Ok(None);
        }
        let mut lengths = Vec::new();
        let taken = take_each(ragged.elements.clone(), |element| {
            lengths.clear();
            lengths.extend(features.iter().map(|cells| cells.len(element)));
            self.check_lengths(&batch, &lengths)?;
            let begin = |feature: usize, size| {
                let dtype = features[feature].dtype.bind(py).clone();
                Rows::of(dtype, Vec::new(), &self.features, feature, size)
            };
            let bin = place(&mut batch, &lengths, begin, |feature, rows, to| {
                rows.write_bytes(features[feature].bytes(element), to);
                Ok(())
            })?;
            Ok(bin.is_some())
        })?;
        Ok(Some((taken, batch.full)))
    }

    /// Gives the rows filled so far and starts a new batch.
    ///
    /// Returns the number of rows, the features' arrays and, by kept feature, lists by row.
    fn take<'py>(&self, py: Python<'py>) -> PyResult<(usize, Vec<Bound<'py, PyTuple>>, Vec<Kept>)> {
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
        self.check_lengths(batch, lengths)?;
        let kept = self.kept_values(element)?;
        let begin =
            |feature: usize, size| Rows::like(&arrays[feature], &self.features, feature, size);
        let bin =
            place(batch, lengths, begin, |feature, rows, to| rows.write(&arrays[feature], 0, to))?;
        let Some(bin) = bin else { return Ok(false) };
        let num_bins = batch.bins.layout().num_bins;
        batch.kept.resize_with(kept.len(), || (0..num_bins).map(|_| Vec::new()).collect());
        for (rows, value) in batch.kept.iter_mut().zip(kept) {
            rows[bin].push(value);
        }
        Ok(true)
    }

    fn check_lengths(&self, batch: &Batch, lengths: &[usize]) -> PyResult<()> {
        let checked = batch.bins.check_lengths(lengths, &self.features.names, self.subject());
        Ok(checked.map_err(Raised)?)
    }

    fn subject(&self) -> &'static str {
        if self.best_fit { "packer" } else { "PackedBatch" }
    }

    fn kept_values(&self, element: &Bound<'_, PyAny>) -> PyResult<Vec<Py<PyAny>>> {
        self.kept.iter().map(|key| element.get_item(key).map(Bound::unbind)).collect()
    }
}

/// Counts the elements that `add` takes, until it returns `false`; a failure is one of the first.
fn take_each(
    elements: Range<usize>,
    mut add: impl FnMut(usize) -> PyResult<bool>,
) -> PyResult<usize> {
    let first = elements.start;
    for element in elements.clone() {
        match add(element) {
            Ok(true) => {}
            Err(failure) if element == first => return Err(failure),
            Ok(false) | Err(_) => return Ok(element - first),
        }
    }
    Ok(elements.len())
}

/// Puts a sequence into the bin chosen for it, which is returned; None if none has room.
///
/// `begin` makes a feature's rows, of the size it is given, where the batch has none yet; `write`
/// copies a feature's cells to their place.
fn place(
    batch: &mut Batch,
    lengths: &[usize],
    begin: impl Fn(usize, (usize, usize)) -> PyResult<Rows>,
    write: impl Fn(usize, &mut Rows, Placement) -> PyResult<()>,
) -> PyResult<Option<usize>> {
    let Some(bin) = batch.bins.choose(lengths) else {
        batch.full = true;
        return Ok(None);
    };
    if batch.rows.is_empty() {
        let layout = batch.bins.layout();
        let sizes = layout.capacities.iter().map(|&cells| (layout.num_bins, cells));
        batch.rows = sizes
            .enumerate()
            .map(|(feature, size)| begin(feature, size))
            .collect::<PyResult<_>>()?;
    }
    let segment = i32::try_from(batch.bins.num_sequences(bin) + 1)?;
    for (feature, rows) in batch.rows.iter_mut().enumerate() {
        let (start, len) = (batch.bins.starts(bin)[feature], lengths[feature]);
        write(feature, rows, Placement { row: bin, start, len, segment })?;
    }
    batch.bins.put(bin, lengths);
    Ok(Some(bin))
}
