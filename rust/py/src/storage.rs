//! Which storage a path is in.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use grainmill_core::io::LocalFiles;
use grainmill_core::io::storage::Storage;
use grainmill_core::{Error, Result, url};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::buckets;
use crate::error::Raised;
use crate::waiting::wait_for;

/// The storage of all `paths`. The environment is read here, where the interpreter lock is held:
/// Python may change it otherwise.
pub(crate) fn storage_of<'a>(
    mut paths: impl Iterator<Item = &'a PathBuf>,
) -> Result<Arc<dyn Storage>> {
    match paths.find_map(|path| url(path)) {
        Some(url) => buckets::storage_of(url),
        None => Ok(Arc::new(LocalFiles)),
    }
}

/// `path`, if it is a URL.
pub(crate) fn url(path: &Path) -> Option<&str> {
    path.to_str().filter(|path| buckets::is_url(path))
}

/// `path` as messages, files and logs may have it: of a URL, no user, password and query.
#[pyfunction]
fn shown_path(path: &str) -> Cow<'_, str> {
    url::shown(path)
}

/// `text` with its URLs as `shown_path` has them.
#[pyfunction]
fn redacted(text: &str) -> Cow<'_, str> {
    url::redacted(text)
}

/// The bytes of the file or object at `path`.
#[pyfunction]
fn read_object(py: Python<'_>, path: PathBuf) -> PyResult<Bound<'_, PyBytes>> {
    let storage = storage_of(std::iter::once(&path)).map_err(Raised::from)?;
    let bytes = wait_for(py, || {
        let (stored, bytes) = storage.open(&path)?;
        let len = usize::try_from(stored.byte_len()).unwrap_or(usize::MAX);
        let mut out = Vec::new();
        let no_memory =
            |_| Error::OutOfMemory(format!("{}: no memory for {len} bytes", path.display()));
        out.try_reserve_exact(len).map_err(no_memory)?;
        out.resize(len, 0);
        bytes.read_at(&mut out, 0)?;
        Ok(out)
    });
    Ok(PyBytes::new(py, &bytes?))
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(shown_path, module)?)?;
    module.add_function(wrap_pyfunction!(redacted, module)?)?;
    module.add_function(wrap_pyfunction!(read_object, module)?)
}
