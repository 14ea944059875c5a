//! Fills a batch from records, a few at a time, so that each element is in cache when copied.
//!
//! This loop joins the layers `records` and `batch`; Python only computes the elements.

use numpy::{PyReadonlyArray1, PyUntypedArray};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple, PyType};

use crate::array::RowBytes;
use crate::batch::copy_list;
use crate::call::call;
use crate::error::is_interrupt;
use crate::records::{PyRecordFiles, positions};

/// Reads the records at `indices`, `part_len` at a time, calls `make` to turn each list of records
/// into a list of elements, and copies these into `columns` from row `at` on.
///
/// `make` returns `(elements, failure)`, or None if it has written the elements to their rows itself.
/// `container` is the type of the elements: dict, tuple or
/// list. `columns` has a pair for each of its keys: the key, and the array to whose rows its values
/// are copied, or the list to which they are appended. If elements are arrays, `container` and the
/// key of the only column are None.
///
/// Returns the number of elements copied, and the result of `make` for the records after them if
/// its elements have another structure or are fewer than the records. If a record could not be read,
/// the failure is that of reading it. The result is None if all elements were copied, or if storage
/// is slow, so that records are better read many at a time.
/// Nothing else may read or write the columns meanwhile.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "Python passes the arguments of two layers")]
fn fill_columns<'py>(
    py: Python<'py>,
    files: &PyRecordFiles,
    indices: PyReadonlyArray1<'py, i64>,
    part_len: usize,
    make: Bound<'py, PyAny>,
    container: Option<Bound<'py, PyType>>,
    columns: Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)>,
    at: usize,
) -> PyResult<(usize, Option<Bound<'py, PyAny>>)> {
    let columns = columns
        .into_iter()
        .map(|(key, target)| Ok(FilledColumn { key, target: Target::of(target)? }))
        .collect::<PyResult<Vec<_>>>()?;
    for column in &columns {
        column.target.prefetch_rows(at, part_len)?;
    }
    let mut filled = 0;
    for chunk in positions(&indices)?.chunks(part_len.max(1)) {
        if files.are_slow() {
            return Ok((filled, None));
        }
        let (records, read_error) = read_chunk(py, files, chunk)?;
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
        if !complete || !put(&columns, container.as_ref(), &elements, at + filled)? {
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
) -> PyResult<(Bound<'py, PyList>, Option<PyErr>)> {
    let error = match files.read_at(py, positions) {
        Ok(records) => return Ok((records, None)),
        Err(error) => error,
    };
    let records = PyList::empty(py);
    if positions.len() == 1 {
        return Ok((records, Some(error)));
    }
    // Reading one by one finds the record that failed.
    for &position in positions {
        match files.read_at(py, &[position]) {
            Ok(record) => records.append(record.get_item(0)?)?,
            Err(error) => return Ok((records, Some(error))),
        }
    }
    Ok((records, None))
}

struct FilledColumn<'py> {
    key: Bound<'py, PyAny>,
    target: Target<'py>,
}

/// The destination of the values of a column.
enum Target<'py> {
    Rows(Bound<'py, PyUntypedArray>),
    Values(Bound<'py, PyList>),
}

impl<'py> Target<'py> {
    fn of(target: Bound<'py, PyAny>) -> PyResult<Self> {
        match target.cast_into::<PyList>() {
            Ok(values) => Ok(Self::Values(values)),
            Err(other) => Ok(Self::Rows(other.into_inner().cast_into()?)),
        }
    }

    /// Prefetches `num_rows` rows from `at` on while the records for them are read.
    fn prefetch_rows(&self, at: usize, num_rows: usize) -> PyResult<()> {
        if let Self::Rows(array) = self {
            RowBytes::of(array.clone(), at)?.prefetch_for_write(0, num_rows);
        }
        Ok(())
    }
}

/// Copies `elements` into `columns` from row `at` on, unless the structure of one differs; returns
/// whether it did.
fn put<'py>(
    columns: &[FilledColumn<'py>],
    container: Option<&Bound<'py, PyType>>,
    elements: &Bound<'py, PyList>,
    at: usize,
) -> PyResult<bool> {
    let py = elements.py();
    if let Some(container) = container {
        for element in elements {
            if !element.get_type().is(container) || element.len()? != columns.len() {
                return Ok(false);
            }
        }
    }
    let mut added = Vec::new();
    for column in columns {
        let Some(values) = column.of_elements(container.is_some(), elements)? else {
            return Ok(false);
        };
        match &column.target {
            Target::Rows(array) => {
                if copy_list(py, array.clone(), &values, at, true)? < elements.len() {
                    return Ok(false);
                }
            }
            Target::Values(target) => added.push((target, values)),
        }
    }
    for (target, values) in added {
        target.set_slice(target.len(), target.len(), &values)?;
    }
    Ok(true)
}

impl<'py> FilledColumn<'py> {
    /// The values of `elements` for the key of this column, or `elements` if they have no keys; None
    /// if one lacks the key.
    fn of_elements(
        &self,
        have_keys: bool,
        elements: &Bound<'py, PyList>,
    ) -> PyResult<Option<Bound<'py, PyList>>> {
        if !have_keys {
            return Ok(Some(elements.clone()));
        }
        let values: PyResult<Vec<_>> =
            elements.iter().map(|element| element.get_item(&self.key)).collect();
        match values {
            Ok(values) => PyList::new(elements.py(), values).map(Some),
            Err(error) if is_interrupt(elements.py(), &error) => Err(error),
            Err(_) => Ok(None),
        }
    }
}

fn unpacked<'py>(outcome: &Bound<'py, PyAny>) -> PyResult<(Bound<'py, PyList>, Bound<'py, PyAny>)> {
    let outcome = outcome.cast::<PyTuple>()?;
    Ok((outcome.get_item(0)?.cast_into()?, outcome.get_item(1)?))
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(fill_columns, module)?)
}
