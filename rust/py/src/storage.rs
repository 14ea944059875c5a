//! Python bindings of object stores: which storage a path is in, and what a bucket holds.

use std::path::PathBuf;
use std::sync::Arc;

use grainmill_core::records::LocalFiles;
use grainmill_core::records::storage::Storage;
use grainmill_core::{Error, Result};
use grainmill_object_store::{Buckets, Settings, is_url, list};
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

/// The bytes of the file or object at `path`.
#[pyfunction]
fn read_object<'py>(py: Python<'py>, path: PathBuf) -> Result<Bound<'py, PyBytes>, Raised> {
    let storage = storage_of(std::iter::once(&path))?;
    let bytes = py.detach(|| {
        let (stored, bytes) = storage.open(&path)?;
        let len = usize::try_from(stored.byte_len()).unwrap_or(usize::MAX);
        let mut out = Vec::new();
        let no_memory = |_| Error::OutOfMemory(format!("no memory for {len} bytes of a file"));
        out.try_reserve_exact(len).map_err(no_memory)?;
        out.resize(len, 0);
        bytes.read_at(&mut out, 0)?;
        Ok::<_, Error>(out)
    });
    Ok(PyBytes::new(py, &bytes?))
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(read_object, module)?)?;
    module.add_function(wrap_pyfunction!(list_objects, module)?)
}
