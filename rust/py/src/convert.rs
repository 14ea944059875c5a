//! Python bindings of what converts and verifies files.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use grainmill_core::formats::array_record::verify;
use grainmill_core::formats::json_lines::JsonLines;
use grainmill_core::formats::outputs;
use grainmill_core::formats::scanned::Compression;
use grainmill_core::formats::sequential::{
    Damage, Frames, RecordBlock, RecordStream, RecordStreams,
};
use grainmill_core::formats::tfrecord::TfRecord;
use grainmill_core::io::FileBytes;
use grainmill_core::read::copy::{BlockSource, CopyTarget, InMemory, Indexed};
use grainmill_core::{Error, Result};
use numpy::PyReadonlyArray1;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::buckets::object_of;
use crate::error::Raised;
use crate::python_input::{PythonInput, RaisedByFunction};
use crate::records::{PyRecordFiles, positions};
use crate::storage::storage_of;
use crate::waiting::{lock, wait_for, waiting};

/// The bytes of a file of any storage; what follows is read ahead once reads go on behind each other.
#[pyclass(frozen, name = "FileBytes", module = "grainmill._native")]
pub(crate) struct PyFileBytes(Arc<Mutex<FileBytes>>);

#[pymethods]
impl PyFileBytes {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let storage = storage_of(std::iter::once(&path)).map_err(Raised)?;
        let opened = wait_for(py, || FileBytes::open_anywhere(&*storage, &path))?;
        Ok(Self(Arc::new(Mutex::new(opened))))
    }

    /// Opens files, many at a time.
    #[staticmethod]
    fn open_all(py: Python<'_>, paths: Vec<PathBuf>) -> PyResult<Vec<Self>> {
        let storage = storage_of(paths.iter()).map_err(Raised)?;
        let opened = wait_for(py, || FileBytes::open_all(&storage, paths))?;
        Ok(opened.into_iter().map(|file| Self(Arc::new(Mutex::new(file)))).collect())
    }

    /// The bytes of ranges, each of the file at the same place of its list, many at a time.
    #[staticmethod]
    fn read_all<'py>(
        py: Python<'py>,
        files: Vec<PyRef<'py, Self>>,
        ranges: Vec<[u64; 2]>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let pairs = files.iter().zip(ranges);
        let ranges = pairs.map(|(file, [begin, end])| (Arc::clone(&file.0), begin..end)).collect();
        let read = wait_for(py, || FileBytes::read_all(ranges))?;
        Ok(read.iter().map(|bytes| PyBytes::new(py, bytes)).collect())
    }

    /// The length of the file.
    fn __len__(&self, py: Python<'_>) -> Result<usize, Raised> {
        let len = py.detach(|| self.0.lock().unwrap_or_else(PoisonError::into_inner).byte_len());
        let problem = |_| Error::OutOfMemory(format!("a file of {len} bytes"));
        Ok(usize::try_from(len).map_err(problem)?)
    }

    /// Makes byte `at`, which may be behind the end, the next one.
    fn seek(&self, py: Python<'_>, at: u64) -> PyResult<()> {
        wait_for(py, || {
            lock(&self.0)?.seek(at);
            Ok(())
        })
    }

    /// The next `max_len` bytes; fewer at the end only.
    fn read<'py>(&self, py: Python<'py>, max_len: usize) -> PyResult<Bound<'py, PyBytes>> {
        let read = || -> Result<Vec<u8>> {
            let mut file = lock(&self.0)?;
            let mut bytes = vec![0; max_len.min(usize::try_from(file.left()).unwrap_or(max_len))];
            file.next(&mut bytes)?;
            Ok(bytes)
        };
        Ok(PyBytes::new(py, &wait_for(py, read)?))
    }
}

/// The records of a `TFRecord` file, or the lines of a text file, in order.
#[pyclass(frozen, name = "RecordStream", module = "grainmill._native")]
pub(crate) struct PyRecordStream {
    stream: Mutex<(RecordStream, RecordBlock)>,
    raised: RaisedByFunction,
}

pub(crate) fn frames(format_name: &str) -> Result<Box<dyn Frames>> {
    frames_of(format_name).map(|frames| frames())
}

fn frames_of(format_name: &str) -> Result<fn() -> Box<dyn Frames>> {
    match format_name {
        "tfrecord" => Ok(|| Box::new(TfRecord)),
        "jsonl" => Ok(|| Box::new(JsonLines)),
        _ => {
            let text = format!("files of format `{format_name}` are not read in order");
            Err(Error::InvalidArgument(text))
        }
    }
}

/// Streams of files, one after the other; the next ones are opened ahead where that takes long.
#[pyclass(frozen, name = "RecordStreams", module = "grainmill._native")]
pub(crate) struct PyRecordStreams(Mutex<RecordStreams>);

#[pymethods]
impl PyRecordStreams {
    /// The files at `paths` of format `format_name`, `tfrecord` or `jsonl`.
    #[new]
    fn new(paths: Vec<PathBuf>, format_name: &str) -> Result<Self, Raised> {
        let frames = frames_of(format_name)?;
        let storage = storage_of(paths.iter())?;
        Ok(Self(Mutex::new(RecordStreams::new(storage, paths, frames))))
    }

    fn __iter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<PyRecordStream>> {
        let stream = wait_for(py, || lock(&self.0)?.next_stream())?;
        Ok(stream.map(|stream| PyRecordStream {
            stream: Mutex::new((stream, RecordBlock::default())),
            raised: RaisedByFunction::default(),
        }))
    }
}

/// Records of files at positions, whose reads begin before they are needed where storage is slow.
#[pyclass(frozen, name = "IndexedRecords", module = "grainmill._native")]
pub(crate) struct PyIndexedRecords(Mutex<(Indexed, RecordBlock)>);

#[pymethods]
impl PyIndexedRecords {
    /// Records of `files`, at no position yet.
    #[new]
    fn new(py: Python<'_>, files: &PyRecordFiles) -> PyResult<Self> {
        let indexed = waiting(py, || Indexed::new(files.files()))?;
        Ok(Self(Mutex::new((indexed, RecordBlock::default()))))
    }

    /// About how many records are read at once.
    #[getter]
    fn block_len(&self, py: Python<'_>) -> PyResult<usize> {
        wait_for(py, || Ok(lock(&self.0)?.0.block_len()))
    }

    /// Adds the records at `indices`, in that order.
    fn add(&self, py: Python<'_>, indices: PyReadonlyArray1<'_, i64>) -> PyResult<()> {
        let positions = positions(&indices)?;
        wait_for(py, || lock(&self.0)?.0.add(positions))
    }

    /// Reads some of the next records, at most `max_records`; none at the end.
    fn read<'py>(&self, py: Python<'py>, max_records: usize) -> PyResult<Bound<'py, PyList>> {
        let records: Vec<Vec<u8>> = wait_for(py, || {
            let (indexed, block) = &mut *lock(&self.0)?;
            indexed.next(block, max_records)?;
            Ok(block.iter().map(<[u8]>::to_vec).collect())
        })?;
        PyList::new(py, records.iter().map(|record| PyBytes::new(py, record)))
    }
}

#[pymethods]
impl PyRecordStream {
    /// Opens a file of format `format_name`, `tfrecord` or `jsonl`, compressed as its first bytes say.
    #[new]
    fn new(py: Python<'_>, path: PathBuf, format_name: &str) -> PyResult<Self> {
        let frames = frames(format_name).map_err(Raised)?;
        let storage = storage_of(std::iter::once(&path)).map_err(Raised)?;
        let stream = wait_for(py, || RecordStream::open(&*storage, &path, frames))?;
        let stream = Mutex::new((stream, RecordBlock::default()));
        Ok(Self { stream, raised: RaisedByFunction::default() })
    }

    /// The records of what `read` returns: it takes the maximum number of bytes and returns the next
    /// ones of the file, which is not compressed, and none at the end. The first record begins at byte
    /// `offset` of the file and has number `num_records`.
    #[staticmethod]
    #[pyo3(signature = (path, read, format_name, offset = 0, num_records = 0))]
    fn pulled(
        path: PathBuf,
        read: Py<PyAny>,
        format_name: &str,
        offset: u64,
        num_records: u64,
    ) -> Result<Self, Raised> {
        let (input, raised) = PythonInput::new(read);
        let (input, frames) = (Box::new(input), frames(format_name)?);
        let stream = RecordStream::plain_from(path, input, frames, offset, num_records)?;
        Ok(Self { stream: Mutex::new((stream, RecordBlock::default())), raised })
    }

    /// The number of records read or skipped so far.
    #[getter]
    fn num_records(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.lock().0.num_records())
    }

    /// The number of bytes of the decompressed file read so far.
    #[getter]
    fn offset(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.lock().0.offset())
    }

    /// The number of bytes of the file, as it is stored, read so far; about, if it is compressed.
    #[getter]
    fn stored_offset(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.lock().0.stored_offset())
    }

    /// `gzip`, `zlib`, `zstd`, `xz`, `bzip2` or None.
    #[getter]
    fn compression(&self, py: Python<'_>) -> Option<&'static str> {
        let compression = py.detach(|| self.lock().0.compression());
        (compression != Compression::None).then(|| compression.name())
    }

    /// Reads some of the next records, at least one and at most `max_records`; none at the end.
    fn read<'py>(&self, py: Python<'py>, max_records: usize) -> PyResult<Bound<'py, PyList>> {
        let records: Vec<Vec<u8>> = self.detached(py, |stream, block| {
            stream.read(block, max_records)?;
            Ok(block.iter().map(<[u8]>::to_vec).collect())
        })?;
        PyList::new(py, records.iter().map(|record| PyBytes::new(py, record)))
    }

    /// Skips records; returns how many there were, fewer than `count` at the end.
    fn skip(&self, py: Python<'_>, count: u64) -> PyResult<u64> {
        self.detached(py, |stream, block| stream.skip(block, count))
    }

    /// Skips the records that begin before byte `until` of the decompressed file.
    fn skip_until(&self, py: Python<'_>, until: u64) -> PyResult<()> {
        self.detached(py, |stream, block| stream.skip_until(block, until))
    }

    /// Reads to the end; returns the record, offset and problem of up to `max_damages` places. `tell` is
    /// called now and then with the numbers of bytes, as `stored_offset`, and of records read so far.
    #[pyo3(signature = (max_damages, tell = None))]
    fn verify(
        &self,
        py: Python<'_>,
        max_damages: usize,
        tell: Option<Py<PyAny>>,
    ) -> PyResult<Vec<(u64, u64, String)>> {
        let mut tell = |len, count| self.raised.tell(tell.as_ref(), len, count);
        let damages =
            self.detached(py, |stream, block| stream.verify(block, max_damages, &mut tell))?;
        let tuple = |damage: Damage| (damage.record, damage.offset, damage.problem);
        Ok(damages.into_iter().map(tuple).collect())
    }
}

impl PyRecordStream {
    fn lock(&self) -> MutexGuard<'_, (RecordStream, RecordBlock)> {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `work` without the interpreter.
    fn detached<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut RecordStream, &mut RecordBlock) -> Result<T> + Send,
    ) -> PyResult<T> {
        let work = || {
            let (stream, block) = &mut *lock(&self.stream)?;
            work(stream, block)
        };
        let done = waiting(py, work)?.map_err(|error| self.raised.or(error))?;
        self.raised.raise_interruption(py)?;
        Ok(done)
    }
}

/// A file of any writable format that records are copied to.
#[pyclass(frozen, name = "RecordOutput", module = "grainmill._native")]
pub(crate) struct PyRecordOutput(Mutex<Option<CopyTarget>>);

#[pymethods]
impl PyRecordOutput {
    /// Creates the file, of format `array_record`, `tfrecord`, `jsonl` or `bagz`; or writes to
    /// `writer`, which is an object at `path` then.
    #[new]
    #[pyo3(signature = (path, format_name, options = "", writer = None))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        format_name: &str,
        options: &str,
        writer: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let output = match writer {
            None => waiting(py, || outputs::create(format_name, &path, options))?,
            Some(writer) => {
                let mut object = Some(object_of(writer)?);
                let mut open = |_: &Path| object.take().ok_or_else(closed);
                outputs::create_in(format_name, &path, options, &mut open)
            }
        };
        let output = output.map_err(Raised)?;
        Ok(Self(Mutex::new(Some(CopyTarget::new(output)))))
    }

    /// Copies up to `max_records` next records of `stream`; returns how many there were.
    #[pyo3(signature = (stream, max_records, num_threads = 1))]
    fn copy_stream(
        &self,
        py: Python<'_>,
        stream: &PyRecordStream,
        max_records: u64,
        num_threads: usize,
    ) -> PyResult<u64> {
        self.copying(py, |target| {
            target.copy(&mut lock(&stream.stream)?.0, max_records, num_threads)
        })
    }

    /// Copies up to `max_records` next records of `indexed`; returns how many there were.
    #[pyo3(signature = (indexed, max_records, num_threads = 1))]
    fn copy_indexed(
        &self,
        py: Python<'_>,
        indexed: &PyIndexedRecords,
        max_records: u64,
        num_threads: usize,
    ) -> PyResult<u64> {
        self.copying(py, |target| target.copy(&mut lock(&indexed.0)?.0, max_records, num_threads))
    }

    /// Copies the `bytes` of `records`.
    #[pyo3(signature = (records, num_threads = 1))]
    fn copy_list(
        &self,
        py: Python<'_>,
        records: Vec<Bound<'_, PyBytes>>,
        num_threads: usize,
    ) -> PyResult<u64> {
        let records: Vec<&[u8]> =
            records.iter().map(pyo3::types::PyBytesMethods::as_bytes).collect();
        self.copying(py, |target| {
            target.copy(&mut InMemory(records.into_iter()), u64::MAX, num_threads)
        })
    }

    /// Closes the file as it is.
    fn abort(&self, py: Python<'_>) {
        py.detach(|| drop(self.lock().take()));
    }

    /// Writes what follows the records, and syncs and closes the file.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        wait_for(py, || match lock(&self.0)?.take() {
            Some(target) => target.close(),
            None => Err(closed()),
        })
    }
}

impl PyRecordOutput {
    fn lock(&self) -> MutexGuard<'_, Option<CopyTarget>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `copy` without the interpreter; after an error, the file is closed.
    fn copying(
        &self,
        py: Python<'_>,
        copy: impl FnOnce(&mut CopyTarget) -> Result<u64> + Send,
    ) -> PyResult<u64> {
        wait_for(py, || {
            let mut guard = lock(&self.0)?;
            let result = copy(guard.as_mut().ok_or_else(closed)?);
            if result.is_err() {
                *guard = None;
            }
            result
        })
    }
}

fn closed() -> Error {
    Error::InvalidArgument("the file is closed".to_owned())
}

/// Verifies an `ArrayRecord` file: every chunk, and the index against them; returns what was found.
/// `tell` is called about once a mebibyte with the numbers of bytes and records verified so far.
#[pyfunction]
#[pyo3(signature = (path, max_problems, tell = None))]
fn verify_array_record(
    py: Python<'_>,
    path: PathBuf,
    max_problems: usize,
    tell: Option<Py<PyAny>>,
) -> PyResult<Bound<'_, PyDict>> {
    let storage = storage_of(std::iter::once(&path)).map_err(Raised)?;
    let raised = RaisedByFunction::default();
    let mut tell = |len, count| raised.tell(tell.as_ref(), len, count);
    let verify = || verify::verify(&*storage, &path, max_problems, &mut tell);
    let report = waiting(py, verify)?.map_err(|error| raised.or(error))?;
    let found = PyDict::new(py);
    found.set_item("byte_len", report.byte_len)?;
    found.set_item("num_chunks", report.num_chunks)?;
    found.set_item("num_records", report.num_records)?;
    found.set_item("record_bytes", report.record_bytes)?;
    found.set_item("indexed_records", report.indexed_records)?;
    let problems = report.problems.into_iter();
    let problems = problems.map(|problem| (problem.offset, problem.chunk, problem.problem));
    found.set_item("problems", problems.collect::<Vec<_>>())?;
    Ok(found)
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyFileBytes>()?;
    module.add_class::<PyIndexedRecords>()?;
    module.add_class::<PyRecordStream>()?;
    module.add_class::<PyRecordStreams>()?;
    module.add_class::<PyRecordOutput>()?;
    module.add_function(wrap_pyfunction!(verify_array_record, module)?)
}
