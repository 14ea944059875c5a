//! Python bindings of the writer of `ArrayRecord` files.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use grainmill_core::formats::array_record::options::WriterOptions;
use grainmill_core::formats::array_record::writer::RecordWriter;
use grainmill_core::url::shown;
use grainmill_core::{Error, Result};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyType};

use crate::buckets;
use crate::error::{GrainmillError, Raised, text_of};
use crate::storage::url;
use crate::waiting::{lock, waiting};

/// Records up to this length are buffered without releasing the GIL.
const MAX_SHORT_LEN: usize = 64 << 10;

/// Writes an ArrayRecord file.
///
/// Use it in a `with` block, which closes the file, or call `close`: a file that is not closed cannot
/// be read. If the block raises an exception, the file stays incomplete. As in the `array_record`
/// package, a file that cannot be opened does not raise here: `ok()` is False, and `write` and `close`
/// raise the error. Several threads may use one writer.
///
/// A file in a bucket (`s3://`, `gs://` or `az://`) is uploaded while it is written, and visible once
/// it is closed; if it is not, nothing of it is left.
///
/// Args:
///     path: The file to write, or its URL; an existing file is replaced.
///     options: `key:value` items separated by commas: `group_size:N` (records per chunk, by default
///         1; a chunk is read and decompressed as a whole), one of `zstd:LEVEL` (the default, level
///         3), `brotli:LEVEL`, `snappy` and `uncompressed`, `window_log:N` (the logarithm to base 2 of
///         the compressor's window in bytes) and `transpose:true` (stores the fields of protocol
///         buffers by column).
///
/// Raises:
///     ValueError: An option is unknown, given twice, has an invalid value or conflicts with another.
///
/// Example:
///     >>> from grainmill.array_record import ArrayRecordReader, ArrayRecordWriter
///     >>> with ArrayRecordWriter("words.array_record", "group_size:2,zstd:5") as writer:
///     ...     for word in (b"one", b"two", b"three"):
///     ...         writer.write(word)
///     >>> with ArrayRecordReader("words.array_record") as reader:
///     ...     reader.read_all()
///     [b'one', b'two', b'three']
#[expect(clippy::doc_markdown, reason = "it becomes a Python docstring")]
#[pyclass(frozen, module = "grainmill._native", name = "ArrayRecordWriter")]
pub(crate) struct PyArrayRecordWriter {
    path: PathBuf,
    state: Mutex<State>,
}

enum State {
    Open(Box<RecordWriter>),
    /// The file could not be opened, with this error.
    Refused(String),
    Closed,
    /// The file was closed after this error, or closing it failed.
    Failed(String),
}

#[pymethods]
impl PyArrayRecordWriter {
    #[new]
    #[pyo3(signature = (path, options = "", **_kwargs))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        options: &str,
        _kwargs: Option<Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let options: WriterOptions = options.parse().map_err(Raised)?;
        let create_object = url(&path).map(buckets::creator_of);
        let create = || match create_object {
            None => RecordWriter::create(&path, options),
            Some(create) => {
                let create = create?;
                RecordWriter::create_in(&path, options, |_: &Path| create())
            }
        };
        let state = match waiting(py, create)? {
            Ok(writer) => State::Open(Box::new(writer)),
            Err(error) => State::Refused(text_of(&error)),
        };
        Ok(Self { path, state: Mutex::new(state) })
    }

    /// Appends a record.
    ///
    /// Records are collected into chunks of `group_size`, so an error of the file system may be raised
    /// by a later `write` or by `close`.
    ///
    /// Args:
    ///     record: The bytes of the record, possibly none.
    ///
    /// Raises:
    ///     GrainmillError: The file could not be opened or written, or it is closed. It is a
    ///         RuntimeError.
    ///
    /// Example:
    ///     >>> from grainmill.array_record import ArrayRecordWriter
    ///     >>> with ArrayRecordWriter("numbers.array_record") as writer:
    ///     ...     writer.write(b"1")
    #[expect(clippy::doc_markdown, reason = "it becomes a Python docstring")]
    #[pyo3(signature = (record, /))]
    fn write(&self, py: Python<'_>, record: &Bound<'_, PyBytes>) -> PyResult<()> {
        let record = record.as_bytes();
        if let Some(mut state) = self.try_lock()
            && let State::Open(writer) = &mut *state
            && record.len() <= MAX_SHORT_LEN
            && !writer.next_completes_chunk()
        {
            return writer.write(record).map_err(|error| raised(&error));
        }
        let write = || match &mut *lock(&self.state).map_err(|error| text_of(&error))? {
            State::Open(writer) => writer.write(record).map_err(|error| text_of(&error)),
            State::Closed => Err("Object closed".to_owned()),
            State::Refused(message) | State::Failed(message) => Err(message.clone()),
        };
        waiting(py, write)?.map_err(GrainmillError::new_err)
    }

    /// Writes the last chunk and the index, syncs the file to storage and closes it.
    ///
    /// The file cannot be read without its index. Errors that the file system reports late, such as a
    /// full disk, are raised here. Pipes and devices that do not support syncing are not synced. The
    /// file is closed even if this fails. Calling `close` again does nothing, except that it raises
    /// the error of a first call that failed.
    ///
    /// Raises:
    ///     GrainmillError: The file could not be opened, written or synced. It is a RuntimeError.
    ///
    /// Example:
    ///     >>> from grainmill.array_record import ArrayRecordWriter
    ///     >>> writer = ArrayRecordWriter("numbers.array_record")
    ///     >>> writer.write(b"1")
    ///     >>> writer.close()
    ///     >>> writer.is_open()
    ///     False
    #[expect(clippy::doc_markdown, reason = "it becomes a Python docstring")]
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let close = || {
            let mut state = lock(&self.state).map_err(|error| text_of(&error))?;
            let (next, result) = match std::mem::replace(&mut *state, State::Closed) {
                State::Open(writer) => match writer.close() {
                    Ok(()) => (State::Closed, Ok(())),
                    Err(error) => failed(text_of(&error)),
                },
                State::Refused(message) | State::Failed(message) => failed(message),
                State::Closed => (State::Closed, Ok(())),
            };
            *state = next;
            result
        };
        waiting(py, close)?.map_err(GrainmillError::new_err)
    }

    /// Whether the file is open and no operation on it has failed.
    ///
    /// Returns:
    ///     False if the file could not be opened, a `write` failed, or `close` was called.
    ///
    /// Example:
    ///     >>> from grainmill.array_record import ArrayRecordWriter
    ///     >>> with ArrayRecordWriter("numbers.array_record") as writer:
    ///     ...     writer.ok()
    ///     True
    #[expect(clippy::doc_markdown, reason = "it becomes a Python docstring")]
    fn ok(&self, py: Python<'_>) -> bool {
        py.detach(|| matches!(&*self.lock(), State::Open(writer) if writer.is_ok()))
    }

    /// Whether `close` has not been called yet.
    ///
    /// Returns:
    ///     True until `close` is called or the `with` block ends, even if the file could not be opened.
    ///
    /// Example:
    ///     >>> from grainmill.array_record import ArrayRecordWriter
    ///     >>> with ArrayRecordWriter("numbers.array_record") as writer:
    ///     ...     writer.is_open()
    ///     True
    ///     >>> writer.is_open()
    ///     False
    #[expect(clippy::doc_markdown, reason = "it becomes a Python docstring")]
    fn is_open(&self, py: Python<'_>) -> bool {
        py.detach(|| matches!(&*self.lock(), State::Open(_) | State::Refused(_)))
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// Closes the file; after an exception, without an index, so that it does not look complete.
    #[pyo3(signature = (exc_type, exc_value, traceback))]
    fn __exit__(
        &self,
        py: Python<'_>,
        exc_type: Option<Bound<'_, PyType>>,
        exc_value: Option<Bound<'_, PyAny>>,
        traceback: Option<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        drop((exc_value, traceback));
        if exc_type.is_none() {
            return self.close(py);
        }
        py.detach(|| {
            let mut state = self.lock();
            let dropped = std::mem::replace(&mut *state, State::Closed);
            if let State::Refused(message) | State::Failed(message) = dropped {
                *state = State::Failed(message);
            }
        });
        Ok(())
    }

    fn __repr__(&self) -> String {
        format!("ArrayRecordWriter({:?})", shown(&self.path.display().to_string()))
    }
}

impl Drop for PyArrayRecordWriter {
    /// Removing the parts of an upload waits for the server, so other threads run meanwhile.
    fn drop(&mut self) {
        let state = std::mem::replace(&mut *self.lock(), State::Closed);
        let mut open = Some(state);
        Python::try_attach(|py| py.detach(|| drop(open.take())));
    }
}

impl PyArrayRecordWriter {
    /// The state, which stays consistent even if a thread panicked while it held the lock.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state, if no other thread is writing.
    fn try_lock(&self) -> Option<MutexGuard<'_, State>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

fn failed(message: String) -> (State, Result<(), String>) {
    (State::Failed(message.clone()), Err(message))
}

/// `RuntimeError` for everything, as programs that use `array_record` expect.
fn raised(error: &Error) -> PyErr {
    GrainmillError::new_err(text_of(error))
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyArrayRecordWriter>()
}
