//! Python bindings of object stores: which storage a path is in, what a bucket holds, and objects that
//! are written.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use grainmill_core::records::LocalFiles;
use grainmill_core::records::storage::{Storage, WriteFile};
use grainmill_core::{Error, Result};
use grainmill_object_store::{self as object_store, Buckets, Settings, Upload, UploadControl};
use grainmill_object_store::{ObjectIdentity, identities, is_url, list};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::Raised;

/// The storage of all `paths`. The environment is read here, where the interpreter lock is held:
/// Python may change it otherwise.
pub(crate) fn storage_of<'a>(
    mut paths: impl Iterator<Item = &'a PathBuf>,
) -> Result<Arc<dyn Storage>> {
    if paths.any(|path| path.to_str().is_some_and(is_url)) {
        return Ok(Arc::new(Buckets::new(Settings::from_env()?)));
    }
    Ok(Arc::new(LocalFiles))
}

/// The URL and size in bytes of each object whose URL starts with `url_prefix`, in order of URLs.
#[pyfunction]
fn list_objects(py: Python<'_>, url_prefix: &str) -> Result<Vec<(String, u64)>, Raised> {
    let settings = Arc::new(Settings::from_env()?);
    py.detach(|| list(&settings, url_prefix)).map_err(Raised::from)
}

/// The length, the time in nanoseconds since 1970 and the tag of each object.
#[pyfunction]
fn object_identities(py: Python<'_>, urls: Vec<String>) -> Result<Vec<ObjectIdentity>, Raised> {
    let settings = Arc::new(Settings::from_env()?);
    py.detach(|| identities(&settings, &urls)).map_err(Raised::from)
}

/// The bytes of the file or object at `path`.
#[pyfunction]
fn read_object(py: Python<'_>, path: PathBuf) -> Result<Bound<'_, PyBytes>, Raised> {
    let storage = storage_of(std::iter::once(&path))?;
    let bytes = py.detach(|| {
        let (stored, bytes) = storage.open(&path)?;
        let len = usize::try_from(stored.byte_len()).unwrap_or(usize::MAX);
        let mut out = Vec::new();
        let no_memory =
            |_| Error::OutOfMemory(format!("{}: no memory for {len} bytes", path.display()));
        out.try_reserve_exact(len).map_err(no_memory)?;
        out.resize(len, 0);
        bytes.read_at(&mut out, 0)?;
        Ok::<_, Error>(out)
    });
    Ok(PyBytes::new(py, &bytes?))
}

/// Removes the object at `url`, if there is one.
#[pyfunction]
fn remove_object(py: Python<'_>, url: &str) -> Result<(), Raised> {
    let settings = Settings::from_env()?;
    py.detach(|| object_store::remove(url, settings)).map_err(Raised)
}

/// Removes the parts of an upload whose process has ended.
#[pyfunction]
fn abort_upload(py: Python<'_>, url: &str, upload_id: &str) -> Result<(), Raised> {
    let settings = Settings::from_env()?;
    py.detach(|| object_store::abort(url, settings, upload_id)).map_err(Raised)
}

/// How the object at `path` is reached, if that is a URL; the environment is read here, where the
/// interpreter lock is held.
pub(crate) fn settings_of(path: &Path) -> Result<Option<(&str, Settings)>> {
    match path.to_str().filter(|path| is_url(path)) {
        Some(url) => Ok(Some((url, Settings::from_env()?))),
        None => Ok(None),
    }
}

/// An object in a bucket that is being written; nothing is visible before it is closed.
#[pyclass(frozen, name = "ObjectWriter", module = "grainmill._native")]
pub(crate) struct PyObjectWriter {
    upload: Mutex<Option<Box<Upload>>>,
    control: UploadControl,
}

#[pymethods]
impl PyObjectWriter {
    /// The object at `url`; it does not replace an existing one unless it `replaces`.
    #[new]
    #[pyo3(signature = (url, *, replaces = true))]
    fn new(py: Python<'_>, url: &str, replaces: bool) -> Result<Self, Raised> {
        let settings = Settings::from_env()?;
        let upload = py.detach(|| Upload::new(url, settings, replaces))?;
        let control = upload.control();
        Ok(Self { upload: Mutex::new(Some(Box::new(upload))), control })
    }

    /// Appends bytes.
    fn write(&self, py: Python<'_>, data: &[u8]) -> Result<(), Raised> {
        let write = || {
            let mut guard = self.lock();
            let upload = guard.as_mut().ok_or_else(closed)?;
            upload.write_all(data).map_err(|error| Error::io(upload.shown(), "write", error))
        };
        py.detach(write).map_err(Raised)
    }

    /// Sends the rest and makes the object visible.
    fn close(&self, py: Python<'_>) -> Result<(), Raised> {
        let close = || self.lock().take().ok_or_else(closed)?.close();
        py.detach(close).map_err(Raised)
    }

    /// Makes every call in progress fail, and all that follow, without waiting: a dropped or aborted
    /// writer removes what was sent.
    fn cancel(&self) {
        self.control.cancel();
    }

    /// Cancels the upload and waits until its parts are removed.
    fn abort(&self, py: Python<'_>) {
        self.control.cancel();
        py.detach(|| drop(self.lock().take()));
    }

    /// What the service calls the upload; None as long as it has no parts.
    #[getter]
    fn upload_id(&self) -> Option<&str> {
        self.control.id()
    }

    /// Whether the object may be visible: the request that makes it so has been sent.
    #[getter]
    fn may_be_visible(&self) -> bool {
        self.control.may_be_visible()
    }

    /// The number of bytes written.
    #[getter]
    fn num_written(&self) -> u64 {
        self.control.num_written()
    }

    /// The number of bytes that the server has received.
    #[getter]
    fn num_sent(&self) -> u64 {
        self.control.num_sent()
    }
}

impl PyObjectWriter {
    fn lock(&self) -> MutexGuard<'_, Option<Box<Upload>>> {
        self.upload.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The object, for what writes it from now on.
    pub(crate) fn take(&self) -> Result<Box<Upload>> {
        self.lock().take().ok_or_else(closed)
    }
}

fn closed() -> Error {
    Error::InvalidArgument("the object is closed".to_owned())
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyObjectWriter>()?;
    module.add_function(wrap_pyfunction!(read_object, module)?)?;
    module.add_function(wrap_pyfunction!(remove_object, module)?)?;
    module.add_function(wrap_pyfunction!(abort_upload, module)?)?;
    module.add_function(wrap_pyfunction!(list_objects, module)?)?;
    module.add_function(wrap_pyfunction!(object_identities, module)?)
}
