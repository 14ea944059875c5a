//! The formats of record files, as Python passes them to the engine.

use std::sync::Arc;

use grainmill_core::records::{ArrayRecord, Format};
use pyo3::prelude::*;

/// A format of record files, with the options for reading them.
#[pyclass(frozen, name = "Format", module = "grainmill._native")]
pub(crate) struct PyFormat(pub(crate) Arc<dyn Format>);

impl PyFormat {
    /// The format of files for which none is given.
    pub(crate) fn array_record() -> Arc<dyn Format> {
        Arc::new(ArrayRecord)
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyFormat>()
}
