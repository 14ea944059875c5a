//! Python bindings of the layer `read`.

use std::any::Any;
use std::ffi::{c_int, c_void};
use std::path::PathBuf;
use std::ptr;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use grainmill_core::bytes::Bytes;
use grainmill_core::formats::array_record::shared_index;
use grainmill_core::formats::{ArrayRecordFile, index_cache, record_limit};
use grainmill_core::io::storage::Storage;
use grainmill_core::io::{ReadQueue, storage_latency};
use grainmill_core::process::PerProcess;
use grainmill_core::read::{
    self, FileInfo, FileSet, Files, Pending, Plan, Reading, Records, SourceFile, chunk_cache, open,
};
use grainmill_core::url::shown;
use grainmill_core::{Error, Result, platform};
use numpy::{PyReadonlyArray1, PyUntypedArray};
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::array::RowBytes;
use crate::bytes_slot::{BytesSlot, keep_large_blocks, new_slot};
use crate::error::Raised;
use crate::format::PyFormat;
use crate::python_storage::PythonFiles;
use crate::storage::storage_of;
use crate::waiting::{wait_for, waiting};

/// Longer records are read before their `bytes` is allocated: a damaged index may claim any length.
const MAX_SLOT_LEN: usize = 64 << 20;

/// `bytes` allocated before reading, for records whose length is known, in the order requested.
type Preallocated = Vec<Option<Py<PyBytes>>>;

/// The number of records of a file, its size in bytes, and its modification time in nanoseconds.
type FileInfoTuple = (u64, u64, i64);

/// Abandoned reads, whose threads may still write into `bytes`.
static ABANDONED: PerProcess<Mutex<Vec<Abandoned>>> = PerProcess::new(Mutex::default);

type Abandoned = (Arc<Pending<BytesSlot>>, Preallocated);

/// A read and its `bytes`, which are kept until no thread writes into them any more.
struct InFlight {
    pending: Arc<Pending<BytesSlot>>,
    preallocated: Preallocated,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if !self.pending.is_running() {
            return;
        }
        let abandoned = (Arc::clone(&self.pending), std::mem::take(&mut self.preallocated));
        ABANDONED.get().lock().unwrap_or_else(PoisonError::into_inner).push(abandoned);
        if self.pending.abandon(reap_soon) {
            reap();
        }
    }
}

impl InFlight {
    /// Waits for the records.
    fn finish(&self, py: Python<'_>) -> PyResult<Records> {
        wait_for(py, || self.pending.finish())
    }

    /// The `bytes` that were read into. If a wait was interrupted and threads still write, none is, and
    /// they are kept as long.
    fn end(mut self) -> Preallocated {
        if self.pending.is_running() {
            return self.preallocated.iter().map(|_| None).collect();
        }
        std::mem::take(&mut self.preallocated)
    }
}

fn check_limit(max_in_flight: usize) -> Result<(), Raised> {
    if max_in_flight == 0 {
        let message = "`max_in_flight` must be at least 1, got 0".to_owned();
        return Err(Raised(Error::InvalidArgument(message)));
    }
    Ok(())
}

/// A limit on the reads in flight, common to all that share the queue.
#[pyclass(frozen, name = "ReadQueue", module = "grainmill._native")]
pub(crate) struct PyReadQueue(ReadQueue);

#[cfg(feature = "parquet")]
impl PyReadQueue {
    pub(crate) fn queue(&self) -> &ReadQueue {
        &self.0
    }
}

#[pymethods]
impl PyReadQueue {
    #[new]
    fn new(max_in_flight: usize) -> Result<Self, Raised> {
        check_limit(max_in_flight)?;
        Ok(Self(ReadQueue::new(max_in_flight)))
    }

    #[getter]
    fn max_in_flight(&self) -> usize {
        self.0.max_in_flight()
    }

    /// Holds for all owners of the queue from now on.
    #[setter]
    fn set_max_in_flight(&self, py: Python<'_>, max_in_flight: usize) -> Result<(), Raised> {
        check_limit(max_in_flight)?;
        py.detach(|| self.0.set_max_in_flight(max_in_flight));
        Ok(())
    }

    fn for_another_owner(&self) -> Self {
        Self(self.0.for_another_owner())
    }
}

/// Records that were read and of which no `bytes` were made: functions of the engine take them as they
/// are, others as a sequence.
#[pyclass(frozen, name = "Records", module = "grainmill._native")]
pub(crate) struct PyRecords(Records);

#[pymethods]
impl PyRecords {
    fn __len__(&self) -> usize {
        self.0.iter().len()
    }

    fn __getitem__<'py>(&self, py: Python<'py>, index: isize) -> PyResult<Bound<'py, PyBytes>> {
        let count = self.0.iter().len();
        let at = if index < 0 { index.saturating_add_unsigned(count) } else { index };
        let record = usize::try_from(at).ok().and_then(|at| self.0.iter().nth(at));
        let missing = || PyIndexError::new_err(format!("record {index} of {count}"));
        Ok(PyBytes::new(py, record.ok_or_else(missing)?))
    }
}

impl PyRecords {
    /// Each record.
    pub(crate) fn slices(&self) -> Vec<&[u8]> {
        self.0.iter().collect()
    }
}

/// Many files of one format, or ranges of them, as one sequence of records.
#[pyclass(frozen, name = "RecordFiles", module = "grainmill._native")]
pub(crate) struct PyRecordFiles(Arc<Files>);

#[pymethods]
impl PyRecordFiles {
    /// Opens `(path, skip, take)` files: `take` records (all, if None) after `skip` records.
    ///
    /// With `lazy`, files whose number of records is given are opened when they are first read.
    /// `file_infos` has the number of records, the size and the modification time of each file, which are
    /// checked when it is opened. Without a `file_format` they are `ArrayRecord` files.
    #[new]
    #[pyo3(signature = (paths, *, lazy = false, file_infos = None, file_format = None))]
    fn new(
        py: Python<'_>,
        paths: Vec<(PathBuf, u64, Option<u64>)>,
        lazy: bool,
        file_infos: Option<Vec<FileInfoTuple>>,
        file_format: Option<PyRef<'_, PyFormat>>,
    ) -> PyResult<Self> {
        let mut expected =
            file_infos.into_iter().flatten().map(|(num_records, byte_len, modified_ns)| FileInfo {
                byte_len,
                modified_ns,
                num_records,
            });
        let file = |(path, skip, take)| SourceFile { path, skip, take, expected: expected.next() };
        let format =
            file_format.map_or_else(PyFormat::array_record, |format| Arc::clone(&format.0));
        let storage = storage_of(paths.iter().map(|(path, ..)| path)).map_err(Raised::from)?;
        let sources = paths.into_iter().map(file).collect::<Vec<_>>();
        let set = FileSet::in_storage(&storage, &format, sources);
        let open = || if lazy { open::open(set) } else { open::open_all(set) };
        Ok(Self(Arc::new(wait_for(py, open)?)))
    }

    /// Opens files of a storage of Python: `open_file` takes a path and returns the length in bytes, the
    /// time of the last change in nanoseconds since 1970, and a function that takes a position and a
    /// length and returns `bytes`. That is called on any thread, on several at once.
    #[staticmethod]
    fn opened_by(py: Python<'_>, open_file: Py<PyAny>, paths: Vec<PathBuf>) -> PyResult<Self> {
        let storage: Arc<dyn Storage> = Arc::new(PythonFiles(open_file));
        let format = PyFormat::array_record();
        let set = FileSet::in_storage(&storage, &format, paths.into_iter().map(SourceFile::from));
        Ok(Self(Arc::new(wait_for(py, || open::open_all(set))?)))
    }

    /// The records of all `parts` in order; open files are shared.
    #[staticmethod]
    fn joined(parts: Vec<PyRef<'_, Self>>) -> Result<Self, Raised> {
        let files = Files::joined(parts.iter().map(|part| &*part.0))?;
        Ok(Self(Arc::new(files)))
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(usize::try_from(self.0.len())?)
    }

    /// The number of records of each file.
    #[getter]
    fn num_records(&self) -> Vec<u64> {
        self.0.num_records().collect()
    }

    /// The paths of the files.
    #[getter]
    fn paths(&self) -> Vec<String> {
        self.0.paths().map(|path| shown(&path.display().to_string()).into_owned()).collect()
    }

    /// The options that each file was written with, if it has them; opens all files.
    #[getter]
    fn writer_options(&self, py: Python<'_>) -> PyResult<Vec<Option<String>>> {
        self.for_each_file(py, |file| file.writer_options().map(str::to_owned))
    }

    /// The number of records per chunk of each file; opens all files.
    #[getter]
    fn group_sizes(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        self.for_each_file(py, ArrayRecordFile::group_size)
    }

    /// The approximate stored size of a record in bytes.
    #[getter]
    fn mean_byte_len(&self, py: Python<'_>) -> PyResult<f64> {
        waiting(py, || self.0.mean_byte_len())
    }

    /// Whether recent reads had to wait for storage.
    #[getter]
    fn is_slow(&self) -> bool {
        self.0.is_slow()
    }

    /// Reads so far, their bytes, how many of them were timed, and the seconds those took.
    fn read_totals(&self) -> (u64, u64, u64, f64) {
        let totals = self.0.read_totals();
        (totals.reads, totals.bytes, totals.timed_reads, totals.timed.as_secs_f64())
    }

    /// The number of records, the size and the modification time of each file; opens files where these
    /// are not known.
    fn file_infos(&self, py: Python<'_>) -> PyResult<Vec<FileInfoTuple>> {
        let infos = wait_for(py, || self.0.file_infos())?;
        let tuple = |info: FileInfo| (info.num_records, info.byte_len, info.modified_ns);
        Ok(infos.into_iter().map(tuple).collect())
    }

    /// Reads the records at `indices`, in that order.
    fn read<'py>(
        &self,
        py: Python<'py>,
        indices: PyReadonlyArray1<'py, i64>,
    ) -> PyResult<Bound<'py, PyList>> {
        self.read_at(py, &positions(&indices)?)
    }

    /// Reads the record at `index`.
    fn read_one<'py>(&self, py: Python<'py>, index: i64) -> PyResult<Bound<'py, PyBytes>> {
        let (records, mut preallocated) =
            self.read_preallocated(py, &[position(index)?], Plan::predicted_lens)?;
        object(py, records.iter_unslotted().next().flatten(), preallocated.pop().flatten())
    }

    /// Reads the records at `indices` into the rows of `target`; returns whether each has the length of
    /// one. The rows have any content if not, or after an error. Nothing else may use them meanwhile.
    fn read_rows<'py>(
        &self,
        py: Python<'py>,
        indices: PyReadonlyArray1<'py, i64>,
        target: Bound<'py, PyUntypedArray>,
    ) -> PyResult<bool> {
        let positions = positions(&indices)?;
        let mut rows = RowBytes::of(target, 0)?;
        if rows.num_rows != positions.len() {
            return Ok(false);
        }
        let PyRecords(records) = self.read_as_they_are(py, &positions)?;
        let row_len = rows.row_len;
        let mut out = rows.destination(0, positions.len());
        Ok(py.detach(|| {
            records.iter().all(|record| {
                let fits = record.len() == row_len;
                if fits {
                    Bytes::from(record).copy_to(&mut out.take_front(row_len));
                }
                fits
            })
        }))
    }

    /// Starts reading the records at `indices` on threads of the engine. All reads with the same
    /// `queue` share its limit; those without one share the default queue of the program.
    #[pyo3(signature = (indices, queue = None))]
    fn start<'py>(
        &self,
        py: Python<'py>,
        indices: PyReadonlyArray1<'py, i64>,
        queue: Option<&PyReadQueue>,
    ) -> PyResult<PyPendingRead> {
        reap();
        let queue = queue.map_or(ReadQueue::of_program(), |queue| &queue.0);
        let positions = positions(&indices)?;
        let (files, plan) = (&self.0, || {
            let sorted = self.0.sort(&positions)?;
            Ok(match self.0.plan_if_indexed(&sorted)? {
                Ok(plan) => Prepared::Planned(with_lens(plan)),
                Err(unready) => Prepared::Unready(sorted, unready),
            })
        });
        let (in_flight, num_reads) = match wait_for(py, plan)? {
            Prepared::Planned((plan, lens)) => {
                let (preallocated, slots) = slots(py, lens)?;
                let num_reads = plan.num_slow_reads();
                let pending = py.detach(|| read::start(plan, slots, queue));
                (InFlight { pending: Arc::new(pending), preallocated }, num_reads)
            }
            Prepared::Unready(sorted, unready) => {
                let preallocated = std::iter::repeat_with(|| None).take(positions.len()).collect();
                let start = || read::start_unready(files, sorted, unready, queue);
                (InFlight { pending: Arc::new(py.detach(start)), preallocated }, positions.len())
            }
        };
        Ok(PyPendingRead { in_flight: Mutex::new(Some(in_flight)), num_reads })
    }
}

/// What is known before a read starts: its plan, or the files that are not prepared yet.
enum Prepared {
    Planned((Plan, Vec<Option<usize>>)),
    Unready(grainmill_core::read::SortedPositions, Vec<usize>),
}

impl PyRecordFiles {
    /// The files.
    pub(crate) fn files(&self) -> &Arc<Files> {
        &self.0
    }

    /// The records at `positions`, in that order.
    pub(crate) fn read_at<'py>(
        &self,
        py: Python<'py>,
        positions: &[u64],
    ) -> PyResult<Bound<'py, PyList>> {
        let (records, preallocated) =
            self.read_preallocated(py, positions, Plan::predicted_lens)?;
        list(py, &records, preallocated)
    }

    /// The records at `positions`, in that order, for functions of the engine.
    pub(crate) fn read_as_they_are(
        &self,
        py: Python<'_>,
        positions: &[u64],
    ) -> PyResult<PyRecords> {
        let (records, _) =
            self.read_preallocated(py, positions, |_| vec![None; positions.len()])?;
        Ok(PyRecords(records))
    }

    /// Whether recent reads had to wait for storage.
    pub(crate) fn are_slow(&self) -> bool {
        self.0.is_slow()
    }

    /// Reads the records at `positions`, into preallocated `bytes` where `lens_of` knows their length.
    fn read_preallocated(
        &self,
        py: Python<'_>,
        positions: &[u64],
        lens_of: impl Fn(&Plan) -> Vec<Option<usize>> + Send + Sync,
    ) -> PyResult<(Records, Preallocated)> {
        let (plan, lens) = wait_for(py, || {
            let plan = open::plan(&self.0, positions)?;
            let lens = lens_of(&plan);
            Ok((plan, lens))
        })?;
        let (preallocated, slots) = slots(py, lens)?;
        let begin = || read::begin(plan, slots, ReadQueue::of_program());
        let pending = match wait_for(py, begin)? {
            Reading::Done(records) => return Ok((records, preallocated)),
            Reading::Pending(pending) => pending,
        };
        let in_flight = InFlight { pending: pending.into(), preallocated };
        let result = in_flight.finish(py);
        let preallocated = in_flight.end();
        Ok((result?, preallocated))
    }

    fn for_each_file<T: Send>(
        &self,
        py: Python<'_>,
        value_of: impl Fn(&ArrayRecordFile) -> T + Send + Sync,
    ) -> PyResult<Vec<T>> {
        let set = self.0.set();
        let of_file = |at| {
            let file: &dyn Any = &**set.open(at, false)?;
            let file = file.downcast_ref::<ArrayRecordFile>();
            file.map(&value_of).ok_or_else(|| {
                Error::InvalidArgument("these files are not `ArrayRecord` files".to_owned())
            })
        };
        wait_for(py, || {
            set.open_all()?;
            (0..set.len()).map(of_file).collect()
        })
    }
}

fn with_lens(plan: Plan) -> (Plan, Vec<Option<usize>>) {
    let lens = plan.predicted_lens();
    (plan, lens)
}

/// Allocates `bytes` for the records whose length is known.
fn slots(
    py: Python<'_>,
    lens: Vec<Option<usize>>,
) -> PyResult<(Preallocated, Vec<Option<BytesSlot>>)> {
    let mut preallocated = Vec::with_capacity(lens.len());
    let mut slots = Vec::with_capacity(lens.len());
    for len in lens {
        if let Some(len @ 1..=MAX_SLOT_LEN) = len {
            let (object, slot) = new_slot(py, len)?;
            preallocated.push(Some(object.unbind()));
            slots.push(Some(slot));
        } else {
            preallocated.push(None);
            slots.push(None);
        }
    }
    Ok((preallocated, slots))
}

/// The number of seconds that the calling thread has waited for storage since it started.
#[pyfunction]
fn waited_s() -> f64 {
    storage_latency::waited().as_secs_f64()
}

/// Limits the file indices that this process caches to `byte_len` bytes.
#[pyfunction]
fn set_index_budget(byte_len: usize) {
    index_cache::set_budget(byte_len);
}

/// The limit on the file indices that this process caches, in bytes.
#[pyfunction]
fn index_budget() -> usize {
    index_cache::budget()
}

/// The number of bytes of file indices that this process caches.
#[pyfunction]
fn index_bytes() -> usize {
    index_cache::cached_bytes()
}

/// Limits the decoded chunks that this process caches to `byte_len` bytes, or one chunk.
#[pyfunction]
fn set_chunk_budget(byte_len: usize) {
    chunk_cache::set_budget(byte_len);
}

/// The number of bytes of decoded chunks that this process caches.
#[pyfunction]
fn chunk_bytes() -> usize {
    chunk_cache::cached_bytes()
}

/// Creates memory in which processes share file indices; returns a file descriptor, which the caller
/// closes.
#[pyfunction]
fn create_shared_index(byte_len: usize) -> Result<c_int, Raised> {
    Ok(platform::into_descriptor(shared_index::create(byte_len)?))
}

/// Makes this process share file indices with all processes that map the same memory. Closes the
/// descriptor.
#[pyfunction]
#[expect(unsafe_code, reason = "Python passes file descriptors as integers")]
fn share_index(file: c_int, byte_len: usize) -> PyResult<()> {
    // SAFETY: the caller received the descriptor from another process and transfers its ownership.
    let file = unsafe { platform::from_descriptor(file) }?;
    Ok(shared_index::share(platform::borrowed(&file), byte_len).map_err(Raised)?)
}

/// The number of bytes of indices in the memory that this process shares with others.
#[pyfunction]
fn shared_index_bytes() -> u64 {
    shared_index::shared_bytes()
}

/// Records that are being read in the background.
#[pyclass(frozen, name = "PendingRead", module = "grainmill._native")]
pub(crate) struct PyPendingRead {
    in_flight: Mutex<Option<InFlight>>,
    /// How many reads of slow storage were started; as many as records where that is not planned yet.
    #[pyo3(get)]
    num_reads: usize,
}

#[pymethods]
impl PyPendingRead {
    /// Waits for the records and returns them in the order requested; can be called once, or again if
    /// that was interrupted.
    fn finish<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let lock = || self.in_flight.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(in_flight) = lock().take() else {
            let message =
                "`finish` returns the records of a read once, but was called again".to_owned();
            return Err(Raised::from(Error::InvalidArgument(message)).into());
        };
        match in_flight.finish(py) {
            Ok(records) => list(py, &records, in_flight.end()),
            Err(error) => {
                if in_flight.pending.is_abandoned() {
                    *lock() = Some(in_flight); // whoever has interrupted it may call again
                }
                Err(error)
            }
        }
    }
}

/// Drops abandoned reads whose threads have finished.
fn reap() {
    IS_REAP_REQUESTED.store(false, Ordering::Relaxed);
    let mut abandoned = ABANDONED.get().lock().unwrap_or_else(PoisonError::into_inner);
    let done: Vec<_> = abandoned.extract_if(.., |(pending, _)| !pending.is_running()).collect();
    drop(abandoned);
    drop(done);
}

static IS_REAP_REQUESTED: AtomicBool = AtomicBool::new(false);

/// Makes the main thread of Python call [`reap`] when it runs Python code; on any thread.
#[expect(unsafe_code, reason = "the engine's threads free no object of Python")]
fn reap_soon() {
    extern "C" fn call(_: *mut c_void) -> c_int {
        Python::attach(|_| reap());
        0
    }
    if IS_REAP_REQUESTED.swap(true, Ordering::Relaxed) {
        return;
    }
    // SAFETY: it may be called on any thread, attached or not.
    let is_alive = unsafe { ffi::Py_IsInitialized() } != 0;
    // SAFETY: as above, while the interpreter is alive.
    let is_added = is_alive && unsafe { ffi::Py_AddPendingCall(Some(call), ptr::null_mut()) } == 0;
    if !is_added {
        // Whoever starts the next read reaps.
        IS_REAP_REQUESTED.store(false, Ordering::Relaxed);
    }
}

pub(crate) fn positions(indices: &PyReadonlyArray1<'_, i64>) -> PyResult<Vec<u64>> {
    indices.as_array().iter().map(|&index| position(index)).collect()
}

fn position(index: i64) -> PyResult<u64> {
    u64::try_from(index).map_err(|_| {
        let message = format!("record {index} was requested, but indices start at 0");
        Raised::from(Error::OutOfRange(message)).into()
    })
}

fn list<'py>(
    py: Python<'py>,
    records: &Records,
    preallocated: Preallocated,
) -> PyResult<Bound<'py, PyList>> {
    let objects = records
        .iter_unslotted()
        .zip(preallocated)
        .map(|(record, preallocated)| object(py, record, preallocated))
        .collect::<PyResult<Vec<_>>>()?;
    PyList::new(py, objects)
}

/// The `bytes` of a record: the preallocated one if the record is in it, else a new one.
fn object<'py>(
    py: Python<'py>,
    record: Option<&[u8]>,
    preallocated: Option<Py<PyBytes>>,
) -> PyResult<Bound<'py, PyBytes>> {
    match (record, preallocated) {
        (Some(record), _) => Ok(PyBytes::new(py, record)),
        (None, Some(preallocated)) => Ok(preallocated.into_bound(py)),
        (None, None) => {
            let message = "a record was read neither into its slot nor elsewhere".to_owned();
            Err(Raised::from(Error::Panicked(message)).into())
        }
    }
}

/// Passes the number of bytes in the environment variable `name` on to `set`, if it is set.
pub(crate) fn read_byte_len<T: FromStr>(name: &str, set: impl FnOnce(T)) -> PyResult<()> {
    let Some(text) = std::env::var_os(name) else { return Ok(()) };
    let byte_len = text.to_str().and_then(|text| text.trim().parse().ok()).ok_or_else(|| {
        let found = text.display();
        PyValueError::new_err(format!("`{name}` must be a number of bytes, got {found}"))
    })?;
    set(byte_len);
    Ok(())
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    // Read here, since this thread holds the GIL: no other thread changes the environment.
    read_byte_len("GRAINMILL_MAX_RECORD_BYTES", record_limit::set_max_record_bytes)?;
    read_byte_len("GRAINMILL_INDEX_BYTES", index_cache::set_budget)?;
    module.add_class::<PyRecordFiles>()?;
    module.add_class::<PyRecords>()?;
    module.add_class::<PyPendingRead>()?;
    module.add_class::<PyReadQueue>()?;
    module.add_function(wrap_pyfunction!(keep_large_blocks, module)?)?;
    module.add_function(wrap_pyfunction!(waited_s, module)?)?;
    module.add_function(wrap_pyfunction!(set_index_budget, module)?)?;
    module.add_function(wrap_pyfunction!(index_budget, module)?)?;
    module.add_function(wrap_pyfunction!(set_chunk_budget, module)?)?;
    module.add_function(wrap_pyfunction!(chunk_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(create_shared_index, module)?)?;
    module.add_function(wrap_pyfunction!(share_index, module)?)?;
    module.add_function(wrap_pyfunction!(shared_index_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(index_bytes, module)?)
}
