//! The layer `records` of the engine, for Python.

use std::any::Any;
use std::ffi::c_int;
use std::os::fd::{AsFd, FromRawFd, IntoRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use grainmill_core::pipeline::{self, Pending, ReadQueue, open};
use grainmill_core::process::PerProcess;
use grainmill_core::records::array_record::{index_cache, shared_index};
use grainmill_core::records::riegeli::decompress;
use grainmill_core::records::{
    ArrayRecordFile, FileSet, Files, Noted, Plan, Records, Source, chunk_cache, storage_latency,
};
use grainmill_core::{Error, Result};
use numpy::PyReadonlyArray1;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::bytes_slot::{BytesSlot, keep_large_blocks, new_slot};
use crate::error::Raised;

/// Longer records are read before their `bytes` is made, since an index may claim anything.
const MAX_SLOT_LEN: usize = 64 << 20;

/// The `bytes` that are made ahead for records whose length is known, in the order asked for.
type Made = Vec<Option<Py<PyBytes>>>;

/// How many records a file holds, how many bytes, and when it was written.
type NotedTuple = (u64, u64, i64);

/// Reads of which threads of the engine may still write into `bytes`, though nobody waits.
static ABANDONED: PerProcess<Mutex<Vec<InFlight>>> = PerProcess::new(Mutex::default);

struct InFlight {
    pending: Pending<BytesSlot>,
    made: Made,
}

/// How many reads are in flight at a time, for all those who share it.
#[pyclass(frozen, name = "ReadQueue", module = "grainmill._native")]
pub(crate) struct PyReadQueue(ReadQueue);

#[pymethods]
impl PyReadQueue {
    #[new]
    fn new(max_in_flight: usize) -> Result<Self, Raised> {
        if max_in_flight == 0 {
            let message = "`max_in_flight` must be at least 1, got 0".to_owned();
            return Err(Raised(Error::InvalidArgument(message)));
        }
        Ok(Self(ReadQueue::new(max_in_flight)))
    }

    #[getter]
    fn max_in_flight(&self) -> usize {
        self.0.max_in_flight()
    }
}

/// Many `ArrayRecord` files, or parts of them, as one sequence of records.
#[pyclass(frozen, name = "RecordFiles", module = "grainmill._native")]
pub(crate) struct PyRecordFiles(Arc<Files>);

#[pymethods]
impl PyRecordFiles {
    /// Opens `(path, skip, take)` files: `take` records (all, if None) after `skip` records.
    ///
    /// With `lazy`, those whose number of records is given are opened when they are first read.
    /// `noted` says of each file how many records and bytes it has and when it was written, which
    /// is checked when it is opened.
    #[new]
    #[pyo3(signature = (paths, *, lazy = false, noted = None))]
    fn new(
        py: Python<'_>,
        paths: Vec<(PathBuf, u64, Option<u64>)>,
        lazy: bool,
        noted: Option<Vec<NotedTuple>>,
    ) -> Result<Self, Raised> {
        let mut noted = noted.into_iter().flatten().map(|(num_records, byte_len, modified_ns)| {
            Noted { byte_len, modified_ns, num_records }
        });
        let source = |(path, skip, take)| Source { path, skip, take, noted: noted.next() };
        let set = FileSet::new(paths.into_iter().map(source).collect::<Vec<_>>());
        let opened = py.detach(|| {
            if !lazy {
                return open::open_all(set);
            }
            open::open(set)
        });
        opened.map(|files| Self(Arc::new(files))).map_err(Raised::from)
    }

    /// The records of all `parts`, one part after the other; files that are open are shared.
    #[staticmethod]
    fn joined(parts: Vec<PyRef<'_, Self>>) -> Result<Self, Raised> {
        let files = Files::joined(parts.iter().map(|part| &*part.0))?;
        Ok(Self(Arc::new(files)))
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(usize::try_from(self.0.len())?)
    }

    /// How many records of each file there are.
    #[getter]
    fn num_records(&self) -> Vec<u64> {
        self.0.num_records().collect()
    }

    /// The files.
    #[getter]
    fn paths(&self) -> Vec<String> {
        self.0.paths().map(|path| path.display().to_string()).collect()
    }

    /// The options of each file's writer, as it noted them; opens all files.
    #[getter]
    fn writer_options(&self) -> Result<Vec<Option<String>>, Raised> {
        self.of_each(|file| file.writer_options().map(str::to_owned))
    }

    /// How many records the chunks of each file hold; opens all files.
    #[getter]
    fn group_sizes(&self) -> Result<Vec<u64>, Raised> {
        self.of_each(ArrayRecordFile::group_size)
    }

    /// About how many bytes a record takes where it is stored.
    #[getter]
    fn mean_byte_len(&self, py: Python<'_>) -> f64 {
        py.detach(|| self.0.mean_byte_len())
    }

    /// Whether what was read lately had to be waited for.
    #[getter]
    fn is_far(&self) -> bool {
        self.0.is_far()
    }

    /// How many records each file holds, how many bytes, and when it was written; opens files of
    /// which that is not known.
    fn noted(&self, py: Python<'_>) -> Result<Vec<NotedTuple>, Raised> {
        let noted = py.detach(|| self.0.noted()).map_err(Raised::from)?;
        let tuple = |noted: Noted| (noted.num_records, noted.byte_len, noted.modified_ns);
        Ok(noted.into_iter().map(tuple).collect())
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
        let (records, mut made) = self.read_made(py, &[position(index)?])?;
        object(py, records.iter_unslotted().next().flatten(), made.pop().flatten())
    }

    /// Begins to read the records at `indices` on threads of the engine. All reads that are given
    /// the same `queue` share its bound; those that are given none share one of the program.
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
        let (files, begun) = (&self.0, || {
            let sorted = self.0.sort(&positions)?;
            Ok(match self.0.plan_at_hand(&sorted)? {
                Ok(plan) => Begun::Planned(with_lens(plan)),
                Err(unready) => Begun::Unready(sorted, unready),
            })
        });
        let in_flight = match py.detach(begun).map_err(|error: Error| Raised::from(error))? {
            Begun::Planned((plan, lens)) => {
                let (made, slots) = slots(py, lens)?;
                InFlight { pending: py.detach(|| pipeline::start(plan, slots, queue)), made }
            }
            Begun::Unready(sorted, unready) => {
                let made = std::iter::repeat_with(|| None).take(positions.len()).collect();
                let start = || pipeline::start_unready(files, sorted, unready, queue);
                InFlight { pending: py.detach(start), made }
            }
        };
        Ok(PyPendingRead(Mutex::new(Some(in_flight))))
    }
}

/// What a read begins with.
enum Begun {
    Planned((Plan, Vec<Option<usize>>)),
    Unready(grainmill_core::records::Sorted, Vec<usize>),
}

impl PyRecordFiles {
    /// The records at `positions`, in that order.
    pub(crate) fn read_at<'py>(
        &self,
        py: Python<'py>,
        positions: &[u64],
    ) -> PyResult<Bound<'py, PyList>> {
        let (records, made) = self.read_made(py, positions)?;
        list(py, &records, made)
    }

    /// Whether what was read lately had to be waited for.
    pub(crate) fn are_far(&self) -> bool {
        self.0.is_far()
    }

    /// The records at `positions`, in `bytes` made ahead for those whose length is known.
    fn read_made(&self, py: Python<'_>, positions: &[u64]) -> PyResult<(Records, Made)> {
        let planned = py.detach(|| open::plan(&self.0, positions).map(with_lens));
        let (plan, lens) = planned.map_err(Raised::from)?;
        let (made, slots) = slots(py, lens)?;
        let records = py.detach(|| pipeline::read(plan, slots, ReadQueue::of_program()));
        Ok((records.map_err(Raised::from)?, made))
    }

    fn of_each<T>(&self, what: impl Fn(&ArrayRecordFile) -> T) -> Result<Vec<T>, Raised> {
        let set = self.0.set();
        let of_one = |at| {
            let file: &dyn Any = &**set.open(at, false)?;
            let file = file.downcast_ref::<ArrayRecordFile>();
            file.map(&what).ok_or_else(|| Error::Panicked("a file of another format".to_owned()))
        };
        (0..set.len()).map(of_one).collect::<Result<_>>().map_err(Raised::from)
    }
}

fn with_lens(plan: Plan) -> (Plan, Vec<Option<usize>>) {
    let lens = plan.predicted_lens();
    (plan, lens)
}

/// `bytes` for those records whose length is known.
fn slots(py: Python<'_>, lens: Vec<Option<usize>>) -> PyResult<(Made, Vec<Option<BytesSlot>>)> {
    let (mut made, mut slots) = (Vec::with_capacity(lens.len()), Vec::with_capacity(lens.len()));
    for len in lens {
        if let Some(len @ 1..=MAX_SLOT_LEN) = len {
            let (object, slot) = new_slot(py, len)?;
            made.push(Some(object.unbind()));
            slots.push(Some(slot));
        } else {
            made.push(None);
            slots.push(None);
        }
    }
    Ok((made, slots))
}

/// How many seconds the calling thread has waited for storage since it began.
#[pyfunction]
fn waited_s() -> f64 {
    storage_latency::waited().as_secs_f64()
}

/// Has this process keep no more than `byte_len` bytes of the indices of files.
#[pyfunction]
fn set_index_budget(byte_len: usize) {
    index_cache::set_budget(byte_len);
}

/// How many bytes of the indices of files this process may keep.
#[pyfunction]
fn index_budget() -> usize {
    index_cache::budget()
}

/// How many bytes of the indices of files this process keeps.
#[pyfunction]
fn index_bytes() -> usize {
    index_cache::kept_bytes()
}

/// Has this process keep no more than `byte_len` bytes of decoded chunks, or one chunk.
#[pyfunction]
fn set_chunk_budget(byte_len: usize) {
    chunk_cache::set_budget(byte_len);
}

/// How many bytes of decoded chunks this process keeps.
#[pyfunction]
fn chunk_bytes() -> usize {
    chunk_cache::kept_bytes()
}

/// A descriptor, which the caller closes, of memory in which processes share the indices of files.
#[pyfunction]
fn create_shared_index(byte_len: usize) -> Result<c_int, Raised> {
    Ok(shared_index::create(byte_len)?.into_raw_fd())
}

/// Has this process share the indices of files with all that are given the same memory. The
/// descriptor is closed.
#[pyfunction]
#[expect(unsafe_code, reason = "descriptors come from Python as bare numbers")]
fn share_index(file: c_int, byte_len: usize) -> Result<(), Raised> {
    // SAFETY: the caller received the descriptor from its maker and hands it over.
    let file = unsafe { OwnedFd::from_raw_fd(file) };
    Ok(shared_index::share(file.as_fd(), byte_len)?)
}

/// How many bytes of indices the processes share that this one shares them with.
#[pyfunction]
fn shared_index_bytes() -> u64 {
    shared_index::shared_bytes()
}

/// Records that are being read while Python does something else.
#[pyclass(frozen, name = "PendingRead", module = "grainmill._native")]
pub(crate) struct PyPendingRead(Mutex<Option<InFlight>>);

#[pymethods]
impl PyPendingRead {
    /// Waits for the records and returns them in the order asked for; can be called once.
    fn finish<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let taken = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(InFlight { pending, made }) = taken else {
            let message = "the records of this read have been taken already".to_owned();
            return Err(Raised::from(Error::InvalidArgument(message)).into());
        };
        let records = py.detach(|| pending.finish()).map_err(Raised::from)?;
        list(py, &records, made)
    }
}

impl Drop for PyPendingRead {
    fn drop(&mut self) {
        let taken = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(in_flight) = taken {
            in_flight.pending.abandon();
            if in_flight.pending.is_running() {
                ABANDONED.get().lock().unwrap_or_else(PoisonError::into_inner).push(in_flight);
            }
        }
    }
}

/// Lets go of abandoned reads that no thread is at any more.
fn reap() {
    let mut abandoned = ABANDONED.get().lock().unwrap_or_else(PoisonError::into_inner);
    let done: Vec<_> =
        abandoned.extract_if(.., |in_flight| !in_flight.pending.is_running()).collect();
    drop(abandoned);
    drop(done);
}

pub(crate) fn positions(indices: &PyReadonlyArray1<'_, i64>) -> PyResult<Vec<u64>> {
    indices.as_array().iter().map(|&index| position(index)).collect()
}

fn position(index: i64) -> PyResult<u64> {
    u64::try_from(index).map_err(|_| {
        let message = format!("record {index} was asked for; indices begin at 0");
        Raised::from(Error::OutOfRange(message)).into()
    })
}

fn list<'py>(py: Python<'py>, records: &Records, made: Made) -> PyResult<Bound<'py, PyList>> {
    let objects = records
        .iter_unslotted()
        .zip(made)
        .map(|(record, made)| object(py, record, made))
        .collect::<PyResult<Vec<_>>>()?;
    PyList::new(py, objects)
}

/// The `bytes` of a record: the one made ahead if the record is in it, else a new one.
fn object<'py>(
    py: Python<'py>,
    record: Option<&[u8]>,
    made: Option<Py<PyBytes>>,
) -> PyResult<Bound<'py, PyBytes>> {
    match (record, made) {
        (Some(record), _) => Ok(PyBytes::new(py, record)),
        (None, Some(made)) => Ok(made.into_bound(py)),
        (None, None) => {
            let message = "a record is neither in its slot nor elsewhere".to_owned();
            Err(Raised::from(Error::Panicked(message)).into())
        }
    }
}

/// The environment variable with the most bytes that a chunk may decode to.
const MAX_CHUNK_BYTES: &str = "GRAINMILL_MAX_CHUNK_BYTES";

fn read_max_chunk_len() -> PyResult<()> {
    let Some(text) = std::env::var_os(MAX_CHUNK_BYTES) else { return Ok(()) };
    let byte_len = text.to_str().and_then(|text| text.trim().parse().ok()).ok_or_else(|| {
        let found = text.display();
        PyValueError::new_err(format!("`{MAX_CHUNK_BYTES}` must be a number of bytes, got {found}"))
    })?;
    decompress::set_max_chunk_len(byte_len);
    Ok(())
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    // Here, since this thread holds the interpreter lock: no other changes the environment.
    read_max_chunk_len()?;
    module.add_class::<PyRecordFiles>()?;
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
