//! Python bindings of object stores: what a bucket holds, and objects that are written.

use std::io::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use grainmill_core::io::storage::{Storage, WriteFile};
use grainmill_core::{Error, Result};
pub(crate) use grainmill_object_store::is_url;
use grainmill_object_store::{self as object_store, Buckets, Settings, Upload, UploadControl};
use grainmill_object_store::{ObjectIdentity, identities, list};
use pyo3::prelude::*;

use crate::error::Raised;
use crate::waiting::{lock, wait_for};

/// The storage of `_url` and all others.
pub(crate) fn storage_of(_url: &str) -> Result<Arc<dyn Storage>> {
    Ok(Arc::new(Buckets::new(Settings::from_env()?)))
}

/// Creates objects at `url`; the environment is read here, where the interpreter lock is held.
pub(crate) fn creator_of(url: &str) -> Result<impl FnOnce() -> Result<Box<dyn WriteFile>> + Send> {
    let settings = Settings::from_env()?;
    Ok(move || Ok(Box::new(Upload::new(url, settings, true)?) as Box<dyn WriteFile>))
}

/// The object that `writer`, an `ObjectWriter`, has begun, for what writes it from now on.
pub(crate) fn object_of(writer: &Bound<'_, PyAny>) -> PyResult<Box<dyn WriteFile>> {
    let upload = writer.cast::<PyObjectWriter>()?.get().lock().take();
    Ok(upload.ok_or_else(closed).map_err(Raised)?)
}

/// The URLs of objects that somebody who has waited for `waited_s` may wait for, with the seconds of
/// the longest wait of a request and how many attempts have failed in it; the longest first.
#[pyfunction]
fn pending_requests(waited_s: f64) -> Vec<(String, f64, u32)> {
    let waited = Duration::try_from_secs_f64(waited_s).unwrap_or_default();
    let requests = object_store::pending_requests(waited).into_iter();
    requests.map(|each| (each.url, each.waited.as_secs_f64(), each.num_retries)).collect()
}

/// The URL and size in bytes of each object whose URL starts with `url_prefix`, in order of URLs.
#[pyfunction]
fn list_objects(py: Python<'_>, url_prefix: &str) -> PyResult<Vec<(String, u64)>> {
    let settings = Arc::new(Settings::from_env().map_err(Raised)?);
    wait_for(py, || list(&settings, url_prefix))
}

/// The length, the time in nanoseconds since 1970 and the tag of each object.
#[pyfunction]
fn object_identities(py: Python<'_>, urls: Vec<String>) -> PyResult<Vec<ObjectIdentity>> {
    let settings = Arc::new(Settings::from_env().map_err(Raised)?);
    wait_for(py, || identities(&settings, &urls))
}

/// Removes the object at `url`, if there is one.
#[pyfunction]
fn remove_object(py: Python<'_>, url: &str) -> PyResult<()> {
    let settings = Settings::from_env().map_err(Raised)?;
    wait_for(py, || object_store::remove(url, settings))
}

/// Removes the parts of an upload whose process has ended.
#[pyfunction]
fn abort_upload(py: Python<'_>, url: &str, upload_id: &str) -> PyResult<()> {
    let settings = Settings::from_env().map_err(Raised)?;
    wait_for(py, || object_store::abort(url, settings, upload_id))
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
    fn new(py: Python<'_>, url: &str, replaces: bool) -> PyResult<Self> {
        let settings = Settings::from_env().map_err(Raised)?;
        let upload = wait_for(py, || Upload::new(url, settings, replaces))?;
        let control = upload.control();
        Ok(Self { upload: Mutex::new(Some(Box::new(upload))), control })
    }

    /// Appends bytes.
    fn write(&self, py: Python<'_>, data: &[u8]) -> PyResult<()> {
        let write = || {
            let mut guard = lock(&self.upload)?;
            let upload = guard.as_mut().ok_or_else(closed)?;
            upload.write_all(data).map_err(|error| Error::io(upload.shown(), "write", error))
        };
        wait_for(py, write)
    }

    /// Sends the rest and makes the object visible.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        wait_for(py, || lock(&self.upload)?.take().ok_or_else(closed)?.close())
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
}

fn closed() -> Error {
    Error::InvalidArgument("the object is closed".to_owned())
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyObjectWriter>()?;
    module.add_function(wrap_pyfunction!(pending_requests, module)?)?;
    module.add_function(wrap_pyfunction!(remove_object, module)?)?;
    module.add_function(wrap_pyfunction!(abort_upload, module)?)?;
    module.add_function(wrap_pyfunction!(list_objects, module)?)?;
    module.add_function(wrap_pyfunction!(object_identities, module)?)
}
