//! Rows of Arrow files: what Python has gathered as a stream of record batches, as dicts and arrays.

use grainmill_core::Error;
use grainmill_parquet::arrow_array::Array;
use grainmill_parquet::{Rows, rows_of_stream};
use pyo3::exceptions::PyNotImplementedError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};

use crate::arrow::{Gathered, Nulls, batch_of, misfit, rows_of_cells};
use crate::error::Raised;

/// The rows of the record batches in `stream`, those at `order` in that order, as dicts. Messages name the
/// row as number `row` of the file at `path`.
#[pyfunction]
fn arrow_rows<'py>(
    py: Python<'py>,
    stream: &[u8],
    order: Vec<usize>,
    path: &str,
    row: u64,
) -> PyResult<Bound<'py, PyList>> {
    let rows = py.detach(|| rows_of_stream(stream, &order)).map_err(Raised::from)?;
    let names = names(py, &rows);
    let mut columns = Vec::with_capacity(names.len());
    for (parts, name) in rows.columns.into_iter().zip(&names) {
        let column = py.detach(|| Gathered::of(parts)).map_err(Raised::from)?;
        let failed = |error| not_converted(py, &column, name, path, row, error);
        columns.push(column.cells(py, Nulls::None).map_err(failed)?);
    }
    rows_of_cells(py, &names, columns, rows.len)
}

/// The rows as of `arrow_rows` as a batch: a dict of arrays, each allocated by a call of
/// `allocate(shape, dtype)`. None if a column is not of numbers or of lists of equally many numbers, or if
/// it has nulls.
#[pyfunction]
fn arrow_batch<'py>(
    py: Python<'py>,
    stream: &[u8],
    order: Vec<usize>,
    allocate: Bound<'py, PyAny>,
) -> PyResult<Option<Bound<'py, PyDict>>> {
    let rows = py.detach(|| rows_of_stream(stream, &order)).map_err(Raised::from)?;
    batch_of(py, &names(py, &rows), &rows.columns, &allocate)
}

fn names(py: Python<'_>, rows: &Rows) -> Vec<Py<PyString>> {
    rows.fields.iter().map(|field| PyString::intern(py, field.name()).unbind()).collect()
}

/// `error`, or what is known of why a column was not converted.
fn not_converted(
    py: Python<'_>,
    column: &Gathered,
    name: &Py<PyString>,
    path: &str,
    row: u64,
    error: PyErr,
) -> PyErr {
    if let Gathered::Joined(array) = column
        && let Some(problem) = (0..array.len()).find_map(|at| misfit(array, at))
    {
        let place = format!("row {row}, column `{name}`");
        return PyErr::from(Raised::from(Error::corrupt(path, place, problem)));
    }
    if error.is_instance_of::<PyNotImplementedError>(py) {
        let text = format!("{path}: column `{name}`: {}", error.value(py));
        return PyNotImplementedError::new_err(text);
    }
    error
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(arrow_rows, module)?)?;
    module.add_function(wrap_pyfunction!(arrow_batch, module)?)
}
