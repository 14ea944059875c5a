//! Python bindings for packing into batches of bins.

use std::sync::Mutex;

use grainmill_core::pack::{BinShape, Bins, Fit, Placement};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::error::{Raised, is_interrupt};
use crate::pack::locked::locked;
use crate::pack::rows::{Array, Features, Rows};

/// By row, the unpacked values of its sequences.
type ObjectRows = Vec<Vec<Py<PyAny>>>;

struct Batch {
    bins: Bins,
    rows: Vec<Rows>,
    /// By feature that is not packed.
    kept: Vec<ObjectRows>,
    is_full: bool,
}

/// Packs the features of elements into a batch of bins.
#[pyclass(module = "grainmill._native", frozen)]
pub(crate) struct BinPacker {
    features: Features,
    /// Keys of features that are not packed.
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
        let layout = BinShape { capacities, alignments, num_bins, max_sequences };
        let bins = Bins::new(layout, if best_fit { Fit::Best } else { Fit::First })?;
        let batch = Batch { bins, rows: Vec::new(), kept: Vec::new(), is_full: false };
        let features = Features { paths, names, marked, exact: false, cells };
        Ok(Self { features, kept, best_fit, batch: Mutex::new(batch) })
    }

    /// Packs `elements` from `start` on into bins, until one fits into none.
    ///
    /// Returns the number packed, and whether the next one fits into no bin. An invalid element raises
    /// only if it is the first, so that those before it are not lost.
    fn push(&self, elements: &Bound<'_, PyList>, start: usize) -> PyResult<(usize, bool)> {
        let mut batch = locked(&self.batch)?;
        let (mut arrays, mut lengths) = (Vec::new(), Vec::new());
        let mut num_packed = 0;
        for index in start..elements.len() {
            let element = elements.get_item(index)?;
            match self.add(&mut batch, &element, &mut arrays, &mut lengths) {
                Ok(true) => num_packed += 1,
                Ok(false) => break,
                Err(failure) if num_packed == 0 || is_interrupt(elements.py(), &failure) => {
                    return Err(failure);
                }
                Err(_) => return Ok((num_packed, false)),
            }
        }
        Ok((num_packed, batch.is_full))
    }

    /// Returns the rows filled so far and starts a new batch.
    ///
    /// Returns the number of rows, the arrays of the packed features, and, by feature that is not
    /// packed, lists by row.
    fn take<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<(usize, Vec<Bound<'py, PyTuple>>, Vec<ObjectRows>)> {
        let mut batch = locked(&self.batch)?;
        let num_rows = batch.bins.num_opened();
        let mut kept = std::mem::take(&mut batch.kept);
        for rows in &mut kept {
            rows.truncate(num_rows);
        }
        let rows = std::mem::take(&mut batch.rows);
        batch.bins.clear();
        batch.is_full = false;
        let columns = rows.into_iter().map(|rows| rows.into_python(py)).collect::<PyResult<_>>()?;
        Ok((num_rows, columns, kept))
    }
}

impl BinPacker {
    /// Packs one element into a bin; returns `false` if it fits into none.
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
            batch.is_full = true;
            return Ok(false);
        };
        if batch.rows.is_empty() {
            self.allocate_rows(batch, arrays)?;
        }
        self.features.fit(&mut batch.rows, arrays)?;
        let segment = i32::try_from(batch.bins.num_sequences(bin) + 1)?;
        for (feature, (array, rows)) in arrays.iter().zip(&mut batch.rows).enumerate() {
            let start = batch.bins.starts(bin)[feature];
            let to = Placement { row: bin, start, len: lengths[feature], segment };
            rows.write(array, 0, to)?;
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

    /// Allocates rows for a batch whose first element has these arrays.
    fn allocate_rows(&self, batch: &mut Batch, arrays: &[Array<'_>]) -> PyResult<()> {
        let layout = batch.bins.layout();
        let rows = arrays.iter().enumerate().map(|(feature, array)| {
            let size = (layout.num_bins, layout.capacities[feature]);
            Rows::for_array(array, &self.features, feature, size)
        });
        let rows = rows.collect::<PyResult<_>>()?;
        let num_bins = layout.num_bins;
        let lists = || (0..num_bins).map(|_| Vec::new()).collect();
        batch.kept = self.kept.iter().map(|_| lists()).collect();
        batch.rows = rows;
        Ok(())
    }
}
