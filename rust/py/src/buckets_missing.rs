//! What stands in for `buckets` in a build without that feature.

use std::sync::Arc;

use grainmill_core::Result;
use grainmill_core::io::storage::{Storage, WriteFile};
use grainmill_core::url::shown;
use pyo3::prelude::*;

use crate::error::Raised;
use crate::optional::{missing, stand_in};

const FEATURE: &str = "buckets";

pub(crate) fn is_url(path: &str) -> bool {
    path.contains("://")
}

pub(crate) fn storage_of(url: &str) -> Result<Arc<dyn Storage>> {
    Err(missing(&shown(url), FEATURE))
}

pub(crate) fn creator_of(url: &str) -> Result<impl FnOnce() -> Result<Box<dyn WriteFile>> + Send> {
    Err::<fn() -> _, _>(missing(&shown(url), FEATURE))
}

pub(crate) fn object_of(_writer: &Bound<'_, PyAny>) -> PyResult<Box<dyn WriteFile>> {
    Err(Raised(missing("`ObjectWriter`", FEATURE)).into())
}

/// No request is ever sent.
#[pyfunction]
fn pending_requests(_waited_s: f64) -> Vec<(String, f64, u32)> {
    Vec::new()
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(pending_requests, module)?)?;
    let names =
        [c"ObjectWriter", c"abort_upload", c"list_objects", c"object_identities", c"remove_object"];
    stand_in(module, FEATURE, &names)
}
