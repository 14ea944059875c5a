//! The writer of `ArrayRecord` files, for Python.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use grainmill_core::records::array_record::options::WriterOptions;
use grainmill_core::records::array_record::writer::RecordWriter;
use grainmill_core::{Error, Result};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyType};

use crate::error::{GrainmillError, Raised};

/// Records up to this length are gathered without letting go of the interpreter.
const SHORT: usize = 64 << 10;

/// Writes records into an `ArrayRecord` file; a `with` block closes it.
///
/// A path that cannot be opened shows in `ok()` and in the first `write` or `close`, as it
/// does with `array_record`; options that make no sense raise `ValueError` here.
///
/// Args:
///     path: The file, which is written anew.
///     options: Items separated by commas, as `group_size:1` (records in a chunk that is read as a
///         whole), `uncompressed`, `brotli:N`, `zstd:N` or `snappy`, `window_log:N`,
///         `transpose:true`; where nothing is said, chunks are compressed by zstd, level 3.
///
/// Raises:
///     `ValueError`: `options` make no sense.
///     `GrainmillError`: From `write` and `close`: the file could not be opened, written or synced.
#[pyclass(frozen, module = "grainmill._native", name = "ArrayRecordWriter")]
pub(crate) struct PyArrayRecordWriter {
    path: PathBuf,
    state: Mutex<State>,
}

enum State {
    Open(Box<RecordWriter>),
    /// The file could not be opened; what the system said.
    Refused(String),
    Closed,
    /// The file was closed, or was to be, after this had gone wrong.
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
        let state = match py.detach(|| RecordWriter::create(&path, options)) {
            Ok(writer) => State::Open(Box::new(writer)),
            Err(error) => State::Refused(error.to_string()),
        };
        Ok(Self { path, state: Mutex::new(state) })
    }

    /// Appends a record.
    #[pyo3(signature = (record, /))]
    fn write(&self, py: Python<'_>, record: &Bound<'_, PyBytes>) -> PyResult<()> {
        let record = record.as_bytes();
        if let Some(mut state) = self.try_lock()
            && let State::Open(writer) = &mut *state
            && record.len() <= SHORT
            && !writer.next_completes_chunk()
        {
            return writer.write(record).map_err(|error| raised(&error));
        }
        py.detach(|| match &mut *self.lock() {
            State::Open(writer) => writer.write(record).map_err(|error| error.to_string()),
            State::Closed => Err("Object closed".to_owned()),
            State::Refused(message) | State::Failed(message) => Err(message.clone()),
        })
        .map_err(GrainmillError::new_err)
    }

    /// Writes what is left and the index, without which the file cannot be read, and syncs it.
    ///
    /// What a file system reports only then, as that the disk was full, is raised here; pipes and
    /// devices that cannot be synced are closed without. The file is closed also where this
    /// fails. Closing twice is fine; where the first time failed, its error is raised again.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| {
            let mut state = self.lock();
            let (next, done) = match std::mem::replace(&mut *state, State::Closed) {
                State::Open(writer) => match writer.close() {
                    Ok(()) => (State::Closed, Ok(())),
                    Err(error) => failed(error.to_string()),
                },
                State::Refused(message) | State::Failed(message) => failed(message),
                State::Closed => (State::Closed, Ok(())),
            };
            *state = next;
            done
        })
        .map_err(GrainmillError::new_err)
    }

    /// Whether the writer is open and nothing has failed.
    fn ok(&self, py: Python<'_>) -> bool {
        py.detach(|| matches!(&*self.lock(), State::Open(writer) if writer.is_ok()))
    }

    /// Whether `close` has not been called yet.
    fn is_open(&self, py: Python<'_>) -> bool {
        py.detach(|| matches!(&*self.lock(), State::Open(_) | State::Refused(_)))
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// Closes the file, unless an exception is on its way: then the file must not look whole.
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
        let mut dropped = py.detach(|| std::mem::replace(&mut *self.lock(), State::Closed));
        if let State::Refused(message) | State::Failed(message) = &mut dropped {
            *self.lock() = State::Failed(std::mem::take(message));
        }
        Ok(())
    }

    fn __repr__(&self) -> String {
        format!("ArrayRecordWriter({:?})", self.path.display().to_string())
    }
}

impl PyArrayRecordWriter {
    /// The state; a thread that panicked while it held it left it whole.
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
    GrainmillError::new_err(error.to_string())
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyArrayRecordWriter>()
}
