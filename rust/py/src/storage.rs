//! Python bindings of object stores: which storage a path is in, and what a bucket holds.

use std::path::PathBuf;
use std::sync::Arc;

use grainmill_core::Result;
use grainmill_core::records::LocalFiles;
use grainmill_core::records::storage::Storage;
use grainmill_object_store::{Buckets, Settings, is_url, list};
use pyo3::prelude::*;

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

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(list_objects, module)?)
}
