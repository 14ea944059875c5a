//! Python bindings of Parquet files: rows as dicts, and columns as arrays.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use grainmill_core::Error;
use grainmill_core::io::ReadQueue;
use grainmill_core::process::PerProcess;
use grainmill_core::url::shown;
use grainmill_parquet::arrow_array::ArrayRef;
use grainmill_parquet::arrow_schema::TimeUnit;
use grainmill_parquet::{Ahead, Choice, ParquetFiles};
use numpy::PyReadonlyArray1;
use pyo3::exceptions::PyNotImplementedError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};

use crate::arrow::{Gathered, NullTree, Nulls, batch_of, may_misfit, misfit, rows_of_cells};
use crate::error::Raised;
use crate::records::{PyReadQueue, positions, read_byte_len};
use crate::storage::storage_of;
use crate::waiting::{wait_for, waiting};

/// As many rows are read at a time to look for nulls.
const MAX_SCANNED_ROWS: u64 = 1 << 16;

/// The first of some rows, their number, and the nulls of each column.
type NullsOf = (u64, u64, Arc<Vec<NullTree>>);

/// Many Parquet files as one sequence of rows.
#[pyclass(frozen, name = "ParquetFiles", module = "grainmill._native")]
pub(crate) struct PyParquetFiles {
    files: Arc<ParquetFiles>,
    /// The names of the columns.
    names: Vec<Py<PyString>>,
    /// Those of the range of rows that was last converted as pandas does it.
    nulls: PerProcess<Mutex<Option<NullsOf>>>,
}

#[pymethods]
impl PyParquetFiles {
    /// Opens `(path, num_rows)` files; those whose number of rows is given when they are first read.
    /// `int96_unit` is `s`, `ms`, `us` or `ns`; without, the one that the writer states, or `ns`.
    #[new]
    #[pyo3(signature = (paths, columns, cache_bytes, *, int96_unit = None, max_page_bytes = None))]
    fn new(
        py: Python<'_>,
        paths: Vec<(PathBuf, Option<u64>)>,
        columns: Option<Vec<String>>,
        cache_bytes: usize,
        int96_unit: Option<&str>,
        max_page_bytes: Option<u64>,
    ) -> PyResult<Self> {
        let int96_unit = int96_unit.map(unit_of).transpose()?;
        let mut default = Choice::default().max_page_bytes;
        read_byte_len("GRAINMILL_MAX_PAGE_BYTES", |found| default = found)?;
        let max_page_bytes = max_page_bytes.unwrap_or(default);
        let choice = Choice { columns, int96_unit, max_page_bytes };
        let storage = storage_of(paths.iter().map(|(path, _)| path)).map_err(Raised::from)?;
        let (files, fields) = wait_for(py, || {
            let files = Arc::new(ParquetFiles::open(&storage, paths, choice, cache_bytes)?);
            let fields = files.fields()?;
            Ok((files, fields))
        })?;
        let name = |name: &String| PyString::intern(py, name).unbind();
        let names = fields.iter().map(|field| name(field.name())).collect();
        Ok(Self { files, names, nulls: PerProcess::new(Default::default) })
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(usize::try_from(self.files.len())?)
    }

    /// The number of rows of each file.
    #[getter]
    fn num_rows(&self) -> Vec<u64> {
        self.files.num_rows().collect()
    }

    /// The number of rows of each row group of each file; opens all files.
    fn row_group_lens(&self, py: Python<'_>) -> PyResult<Vec<Vec<u64>>> {
        wait_for(py, || self.files.row_group_lens())
    }

    /// The name and type of each column.
    fn column_types(&self, py: Python<'_>) -> PyResult<Vec<(String, String)>> {
        let fields = wait_for(py, || self.files.fields())?;
        let column = |field: &grainmill_parquet::arrow_schema::FieldRef| {
            (field.name().clone(), field.data_type().to_string())
        };
        Ok(fields.iter().map(column).collect())
    }

    /// The names of the codecs that compress the columns of the first file.
    fn codecs(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        wait_for(py, || self.files.codecs())
    }

    /// The approximate size of a row in memory, in bytes.
    #[getter]
    fn mean_byte_len(&self, py: Python<'_>) -> PyResult<f64> {
        waiting(py, || self.files.mean_byte_len())
    }

    /// The bytes of decoded pages that are kept.
    #[getter]
    fn cached_bytes(&self) -> usize {
        self.files.cached_bytes()
    }

    /// Whether recent reads had to wait for storage.
    #[getter]
    fn is_slow(&self) -> bool {
        self.files.is_slow()
    }

    /// Whether there is memory for rows that are not asked for yet; otherwise `start` does little.
    #[getter]
    fn has_room(&self) -> bool {
        self.files.has_room()
    }

    /// Whether there is memory for rows that are asked for after those that are needed next.
    #[getter]
    fn has_room_beyond(&self) -> bool {
        self.files.has_room_beyond()
    }

    /// Starts to read and decode the rows at `indices` on threads of the engine. Reading them later
    /// finds what is decoded as long as the result is held, and raises what failed.
    #[pyo3(signature = (indices, queue = None))]
    fn start<'py>(
        &self,
        py: Python<'py>,
        indices: PyReadonlyArray1<'py, i64>,
        queue: Option<&PyReadQueue>,
    ) -> PyResult<PyRowsAhead> {
        let positions = positions(&indices)?;
        Ok(PyRowsAhead(py.detach(|| self.files.start(positions, false, of(queue)))))
    }

    /// As `start`, for rows that are asked for much later: nothing is decoded unless half of the
    /// memory has room for all of them.
    #[pyo3(signature = (indices, queue = None))]
    fn start_beyond<'py>(
        &self,
        py: Python<'py>,
        indices: PyReadonlyArray1<'py, i64>,
        queue: Option<&PyReadQueue>,
    ) -> PyResult<PyRowsAhead> {
        let positions = positions(&indices)?;
        Ok(PyRowsAhead(py.detach(|| self.files.start(positions, true, of(queue)))))
    }

    /// Reads so far, their bytes, how many of them were timed, and the seconds those took.
    fn read_totals(&self) -> (u64, u64, u64, f64) {
        let totals = self.files.read_totals();
        (totals.reads, totals.bytes, totals.timed_reads, totals.timed.as_secs_f64())
    }

    /// The path of the file of row `index`, and the row's number in it.
    fn locate(&self, index: u64) -> Option<(String, u64)> {
        let (path, row) = self.files.locate(index)?;
        Some((shown(&path.display().to_string()).into_owned(), row))
    }

    /// The rows at `indices`, in that order, as dicts.
    #[pyo3(signature = (indices, queue = None))]
    fn read<'py>(
        &self,
        py: Python<'py>,
        indices: PyReadonlyArray1<'py, i64>,
        queue: Option<&PyReadQueue>,
    ) -> PyResult<Bound<'py, PyList>> {
        let positions = positions(&indices)?;
        self.read_at(py, &positions, None, of(queue))
    }

    /// The rows at `index`, as a dict.
    #[pyo3(signature = (index, queue = None))]
    fn read_one<'py>(
        &self,
        py: Python<'py>,
        index: u64,
        queue: Option<&PyReadQueue>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.read_at(py, &[index], None, of(queue))?.get_item(0)
    }

    /// The `count` rows from `start` on as pandas has them, in which nulls decide how the other values
    /// of a column are converted: those in the row group of `group_len` rows from `group_start` on.
    fn read_like_pandas<'py>(
        &self,
        py: Python<'py>,
        group_start: u64,
        group_len: u64,
        start: u64,
        count: u64,
    ) -> PyResult<Bound<'py, PyList>> {
        let positions: Vec<u64> = (start..start.saturating_add(count)).collect();
        let nulls = wait_for(py, || self.nulls_of(group_start, group_len))?;
        self.read_at(py, &positions, Some(&nulls), of(None))
    }

    /// Reads the `count` rows from `start` on, of columns with these numbers, and checks that they can be
    /// values of Python. Returns what cannot be read: the column, the first row, how many there are,
    /// with those after the `count`, and why.
    fn check(
        &self,
        py: Python<'_>,
        start: u64,
        count: u64,
        columns: Vec<usize>,
    ) -> PyResult<Vec<(usize, u64, u64, String)>> {
        wait_for(py, || {
            let rows = start..start.saturating_add(count);
            let ahead = if self.files.is_slow() {
                let ahead = self.files.start(rows.clone().collect(), false, of(None));
                ahead.wait()?;
                Some(ahead)
            } else {
                None
            };
            let mut problems = Vec::new();
            let fields = self.files.fields()?;
            for (number, field) in columns.iter().filter_map(|&at| Some((at, fields.get(at)?))) {
                self.files.scan(rows.clone(), number, of(None), |rows, values| {
                    match values {
                        Err(error) => {
                            let len = rows.end - rows.start;
                            problems.push((number, rows.start, len, error.to_string()));
                        }
                        Ok(values) if may_misfit(field.data_type()) => {
                            let found = (rows.clone().zip(0..))
                                .filter(|&(_, at)| misfit(&values, at).is_some());
                            problems.extend(found.filter_map(|(row, at)| {
                                let checked = self.check_value(row, field.name(), &values, at);
                                Some((number, row, 1, checked.err()?.to_string()))
                            }));
                        }
                        Ok(_) => {}
                    }
                    Ok(())
                })?;
            }
            drop(ahead);
            Ok(problems)
        })
    }

    /// The rows at `indices` as a batch: a dict of arrays, each allocated by a call of
    /// `allocate(shape, dtype)`. None if a column is not of numbers or of lists of equally many
    /// numbers, or if it has nulls.
    #[pyo3(signature = (indices, allocate, queue = None))]
    fn read_batch<'py>(
        &self,
        py: Python<'py>,
        indices: PyReadonlyArray1<'py, i64>,
        allocate: Bound<'py, PyAny>,
        queue: Option<&PyReadQueue>,
    ) -> PyResult<Option<Bound<'py, PyDict>>> {
        let positions = positions(&indices)?;
        let rows = wait_for(py, || self.files.read(&positions, of(queue)))?;
        batch_of(py, &self.names, &rows.columns, &allocate)
    }
}

impl PyParquetFiles {
    /// Whether the columns have nulls in these rows, as far as that matters.
    fn nulls_of(&self, start: u64, len: u64) -> grainmill_core::Result<Arc<Vec<NullTree>>> {
        let last = || self.nulls.lock();
        if let Some((of_start, of_len, nulls)) = &*last()
            && (*of_start, *of_len) == (start, len)
        {
            return Ok(Arc::clone(nulls));
        }
        let fields = self.files.fields()?;
        let matter: Vec<usize> =
            (0..fields.len()).filter(|&at| NullTree::matters(fields[at].data_type())).collect();
        let mut trees: Vec<NullTree> = fields.iter().map(|_| NullTree::default()).collect();
        if !self.files.is_slow() {
            for &number in &matter {
                self.files.scan(start..start + len, number, of(None), |_, values| {
                    trees[number].add(&values?);
                    Ok(())
                })?;
            }
        }
        let mut at = start;
        while self.files.is_slow() && at < start + len && !matter.is_empty() {
            let end = (start + len).min(at + MAX_SCANNED_ROWS);
            let positions: Vec<u64> = (at..end).collect();
            let rows = self.files.read_columns(&positions, &matter, of(None))?;
            for (&number, parts) in matter.iter().zip(&rows.columns) {
                trees[number].add(&parts.joined()?);
            }
            at = end;
        }
        let trees = Arc::new(trees);
        *last() = Some((start, len, Arc::clone(&trees)));
        Ok(trees)
    }

    /// Checks that the value of a column at `position`, which is number `at` of `values`, can be one of
    /// Python.
    fn check_value(
        &self,
        position: u64,
        name: &str,
        values: &ArrayRef,
        at: usize,
    ) -> grainmill_core::Result<()> {
        let Some(problem) = misfit(values, at) else { return Ok(()) };
        let (path, row) = self.place(position);
        let place = format!("row {row}, column `{name}`");
        Err(Error::Corrupt { path, place, problem })
    }

    /// The path of the file of a row, and its number there.
    fn place(&self, position: u64) -> (String, u64) {
        let place = self.files.locate(position);
        place.map_or_else(Default::default, |(path, row)| (path.display().to_string(), row))
    }

    /// `error`, or what is known of why a column was not converted.
    fn not_converted(
        &self,
        py: Python<'_>,
        positions: &[u64],
        number: usize,
        column: &Gathered,
        error: PyErr,
    ) -> PyErr {
        let name = self.names[number].to_string();
        let mut checked = positions.iter().enumerate();
        if let Gathered::Joined(array) = column
            && let Err(found) =
                checked.try_for_each(|(at, &position)| self.check_value(position, &name, array, at))
        {
            return PyErr::from(Raised::from(found));
        }
        if error.is_instance_of::<PyNotImplementedError>(py) {
            let path = positions.first().map_or_else(String::new, |&row| self.place(row).0);
            let text = format!("{path}: column `{name}`: {}", error.value(py));
            return PyNotImplementedError::new_err(text);
        }
        error
    }

    fn read_at<'py>(
        &self,
        py: Python<'py>,
        positions: &[u64],
        nulls: Option<&[NullTree]>,
        queue: &ReadQueue,
    ) -> PyResult<Bound<'py, PyList>> {
        let columns = wait_for(py, || {
            let rows = self.files.read(positions, queue)?;
            rows.columns.into_iter().map(Gathered::of).collect::<Result<Vec<_>, _>>()
        })?;
        let columns = columns
            .iter()
            .enumerate()
            .map(|(number, column)| {
                let tree = nulls.and_then(|nulls| nulls.get(number));
                let nulls = tree.map_or(Nulls::None, |tree| Nulls::AsPandas(tree, false));
                let cells = column.cells(py, nulls);
                cells.map_err(|error| self.not_converted(py, positions, number, column, error))
            })
            .collect::<PyResult<Vec<_>>>();
        rows_of_cells(py, &self.names, columns?, positions.len())
    }
}

fn unit_of(name: &str) -> Result<TimeUnit, Raised> {
    Ok(match name {
        "s" => TimeUnit::Second,
        "ms" => TimeUnit::Millisecond,
        "us" => TimeUnit::Microsecond,
        "ns" => TimeUnit::Nanosecond,
        _ => {
            let message = format!(
                "`coerce_int96_timestamp_unit` must be one of `s`, `ms`, `us`, `ns`, got `{name}`"
            );
            return Err(Raised(Error::InvalidArgument(message)));
        }
    })
}

/// `queue`, or the default of the program.
fn of(queue: Option<&PyReadQueue>) -> &ReadQueue {
    queue.map_or(ReadQueue::of_program(), PyReadQueue::queue)
}

/// Rows of Parquet files that are being read and decoded; dropping it abandons what is left.
#[pyclass(frozen, name = "RowsAhead", module = "grainmill._native")]
pub(crate) struct PyRowsAhead(Ahead);

#[pymethods]
impl PyRowsAhead {
    /// Waits until all rows are decoded, or cannot be.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        wait_for(py, || self.0.wait())
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyRowsAhead>()?;
    module.add_class::<PyParquetFiles>()
}
