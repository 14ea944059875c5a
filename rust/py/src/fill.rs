//! Records that become rows of a batch, a few at a time, so that each is in cache when copied.
//!
//! This is the loop around the layers `records` and `batch`, in which Python only makes elements.

use grainmill_core::batch::Warmth;
use grainmill_core::warm;
use numpy::{PyReadonlyArray1, PyUntypedArray};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::array::RowBytes;
use crate::batch::copy_list;
use crate::records::{PyRecordFiles, positions};

/// Reads the records at `indices`, `part_len` at once, has `make` turn each list of them into one
/// of elements, and copies these into the rows of `array` from row `at` on.
///
/// `make` returns `(elements, failure)`. Returns how many rows were filled, and what `make` gave
/// for the records after them where that is not as many rows; None where all is done, or where
/// records could not be read. Nobody else may read or write these rows meanwhile.
#[pyfunction]
fn fill_rows<'py>(
    py: Python<'py>,
    files: &PyRecordFiles,
    indices: PyReadonlyArray1<'py, i64>,
    part_len: usize,
    make: Bound<'py, PyAny>,
    array: Bound<'py, PyUntypedArray>,
    at: usize,
) -> PyResult<(usize, Option<Bound<'py, PyAny>>)> {
    expect_rows(array.clone(), at, part_len)?;
    let mut filled = 0;
    for part in positions(&indices)?.chunks(part_len.max(1)) {
        let Ok(records) = files.read_at(py, part) else { return Ok((filled, None)) };
        let outcome = make.call1((records,))?;
        let (elements, failure) = parts_of(&outcome)?;
        if !failure.is_none() || elements.len() != part.len() {
            return Ok((filled, Some(outcome)));
        }
        let num_copied = copy_list(py, array.clone(), &elements, at + filled, Warmth::Hot)?;
        drop(elements);
        if num_copied < part.len() {
            return Ok((filled, Some(outcome)));
        }
        filled += num_copied;
    }
    Ok((filled, None))
}

/// Has the first rows fetched while their records are read.
fn expect_rows(array: Bound<'_, PyUntypedArray>, at: usize, num_rows: usize) -> PyResult<()> {
    let mut rows = RowBytes::of(array, at)?;
    let num_rows = num_rows.min(rows.num_rows);
    warm::expect_writes(rows.bytes_mut(0, num_rows));
    Ok(())
}

fn parts_of<'py>(outcome: &Bound<'py, PyAny>) -> PyResult<(Bound<'py, PyList>, Bound<'py, PyAny>)> {
    let outcome = outcome.cast::<PyTuple>()?;
    Ok((outcome.get_item(0)?.cast_into()?, outcome.get_item(1)?))
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(fill_rows, module)?)
}
