//! Files that Python objects read: any storage that a program has and the engine has not.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use grainmill_core::bytes::ScatterBuffers;
use grainmill_core::io::storage::{FileId, ReadAt, ReopenedFile, Storage, StoredFile};
use grainmill_core::{Error, Result};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::call::call;

/// Files that a function of Python opens: it takes a path and returns the length in bytes, the time
/// of the last change in nanoseconds since 1970, and a function that reads.
pub(crate) struct PythonFiles(pub(crate) Py<PyAny>);

/// A file and the function that reads it: it takes a position and a length, and returns `bytes`,
/// fewer only at the end of the file. Several threads may call it.
#[derive(Clone)]
struct PythonFile {
    path: PathBuf,
    byte_len: u64,
    modified_ns: i64,
    read: Arc<Py<PyAny>>,
}

impl Storage for PythonFiles {
    fn open(&self, path: &Path) -> Result<(Box<dyn StoredFile>, Arc<dyn ReadAt>)> {
        let (byte_len, modified_ns, read) = Python::attach(|py| {
            call(self.0.bind(py), (path.as_os_str(),))?.extract::<(u64, i64, Py<PyAny>)>()
        })
        .map_err(|error| raised(path, "open", error))?;
        let path = path.to_owned();
        let file = PythonFile { path, byte_len, modified_ns, read: Arc::new(read) };
        Ok((Box::new(file.clone()), Arc::new(file)))
    }
}

impl StoredFile for PythonFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn byte_len(&self) -> u64 {
        self.byte_len
    }

    fn modified_ns(&self) -> i64 {
        self.modified_ns
    }

    /// Such a file is open as long as its source, and is not compared again.
    fn reopen(&self, _: bool) -> Result<ReopenedFile> {
        Ok(ReopenedFile { bytes: Arc::new(self.clone()), new_id: None })
    }

    fn accept_id(&self, _: FileId) {}
}

impl PythonFile {
    /// Calls `with` with the `len` bytes from position `at` on.
    fn read(&self, at: u64, len: usize, with: impl FnOnce(&[u8])) -> Result<()> {
        let is_whole = Python::attach(|py| -> PyResult<bool> {
            let read = call(self.read.bind(py), (at, len))?;
            let bytes = read.cast::<PyBytes>()?.as_bytes();
            let is_whole = bytes.len() == len;
            if is_whole {
                with(bytes);
            }
            Ok(is_whole)
        })
        .map_err(|error| raised(&self.path, "read", error))?;
        if is_whole {
            Ok(())
        } else {
            Err(Error::Changed { path: self.path.display().to_string() })
        }
    }
}

impl ReadAt for PythonFile {
    fn read_at(&self, out: &mut [u8], at: u64) -> Result<()> {
        self.read(at, out.len(), |bytes| out.copy_from_slice(bytes))
    }

    fn read_scattered(&self, buffers: &mut ScatterBuffers<'_>, at: u64) -> Result<()> {
        self.read(at, buffers.byte_len(), |bytes| buffers.fill(bytes))
    }
}

/// The error of the engine for an exception of the storage.
fn raised(path: &Path, action: &'static str, error: PyErr) -> Error {
    Error::io(path, action, io::Error::other(error))
}

impl fmt::Debug for PythonFiles {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("PythonFiles")
    }
}

impl fmt::Debug for PythonFile {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "PythonFile({})", self.path.display())
    }
}
