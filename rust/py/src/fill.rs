//! Fills a batch from records, a few at a time, so that each element is in cache when copied.
//!
//! This loop joins the layers `read` and `batch`; Python only computes the elements.

use numpy::PyReadonlyArray1;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::call::call;
use crate::records::{PyRecordFiles, positions};
use crate::rows::PyRows;

/// Reads the records at `indices`, `part_len` at a time, calls `make` to turn each list of records
/// into a list of elements, and copies these to `rows` from row `at` on.
///
/// `make` returns `(elements, failure)`, or None if it has written the elements to their rows itself.
/// With `as_they_are`, it takes a `Records` in place of a list of `bytes`, unless one cannot be read.
///
/// Returns the number of elements copied, and the result of `make` for the records after them if
/// its elements have another structure or are fewer than the records. If a record could not be read,
/// the failure is that of reading it. The result is None if all elements were copied, or if storage
/// is slow, so that records are better read many at a time.
/// Nothing else may read or write the rows meanwhile.
#[pyfunction]
fn fill_columns<'py>(
    files: &PyRecordFiles,
    indices: PyReadonlyArray1<'py, i64>,
    part_len: usize,
    make: Bound<'py, PyAny>,
    rows: &PyRows,
    at: usize,
    as_they_are: bool,
) -> PyResult<(usize, Option<Bound<'py, PyAny>>)> {
    let py = make.py();
    rows.prefetch_for_write(py, at, part_len)?;
    let mut filled = 0;
    for chunk in positions(&indices)?.chunks(part_len.max(1)) {
        if files.are_slow() {
            return Ok((filled, None));
        }
        let (records, read_error) = read_chunk(py, files, chunk, as_they_are)?;
        let mut outcome = call(&make, (records,))?;
        if outcome.is_none() && read_error.is_none() {
            filled += chunk.len();
            continue;
        }
        let (elements, failure) = unpacked(&outcome)?;
        let complete = failure.is_none() && elements.len() == chunk.len();
        if let Some(error) = read_error
            && failure.is_none()
        {
            outcome = outcome.get_type().call1((&elements, error))?;
        }
        if !complete || !rows.put(&elements, at + filled, true)? {
            return Ok((filled, Some(outcome)));
        }
        filled += chunk.len();
    }
    Ok((filled, None))
}

/// The records at `positions`, up to the first that cannot be read, and its error.
fn read_chunk<'py>(
    py: Python<'py>,
    files: &PyRecordFiles,
    positions: &[u64],
    as_they_are: bool,
) -> PyResult<(Bound<'py, PyAny>, Option<PyErr>)> {
    let read = if as_they_are {
        let records = files.read_as_they_are(py, positions);
        records.and_then(|records| Ok(Bound::new(py, records)?.into_any()))
    } else {
        files.read_at(py, positions).map(Bound::into_any)
    };
    let error = match read {
        Ok(records) => return Ok((records, None)),
        Err(error) => error,
    };
    let records = PyList::empty(py);
    if positions.len() == 1 {
        return Ok((records.into_any(), Some(error)));
    }
    // Reading one by one finds the record that failed.
    for &position in positions {
        match files.read_at(py, &[position]) {
            Ok(record) => records.append(record.get_item(0)?)?,
            Err(error) => return Ok((records.into_any(), Some(error))),
        }
    }
    Ok((records.into_any(), None))
}

fn unpacked<'py>(outcome: &Bound<'py, PyAny>) -> PyResult<(Bound<'py, PyList>, Bound<'py, PyAny>)> {
    let outcome = outcome.cast::<PyTuple>()?;
    Ok((outcome.get_item(0)?.cast_into()?, outcome.get_item(1)?))
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(fill_columns, module)?)
}
