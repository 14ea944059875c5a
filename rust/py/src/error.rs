//! Which Python exception each failure of the engine becomes; the only such table.

use grainmill_core::Error;
use pyo3::PyErr;
use pyo3::exceptions::{PyIndexError, PyMemoryError, PyOSError, PyValueError};
use pyo3::prelude::*;

pyo3::create_exception!(
    grainmill._native,
    GrainmillError,
    pyo3::exceptions::PyRuntimeError,
    "A failure that no built-in exception describes, such as a damaged file."
);

/// A failure of the engine on its way into Python.
pub(crate) struct Raised(pub(crate) Error);

impl From<Error> for Raised {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

impl From<Raised> for PyErr {
    fn from(Raised(error): Raised) -> Self {
        let message = error.to_string();
        match error {
            Error::InvalidArgument(_) => PyValueError::new_err(message),
            Error::OutOfRange(_) => PyIndexError::new_err(message),
            Error::OutOfMemory(_) => PyMemoryError::new_err(message),
            Error::Io { source, path, .. } => match source.raw_os_error() {
                // With an errno and a path, Python picks `FileNotFoundError` and its like.
                Some(errno) => PyOSError::new_err((errno, message, path)),
                None => PyOSError::new_err(message),
            },
            _ => GrainmillError::new_err(message),
        }
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("GrainmillError", module.py().get_type::<GrainmillError>())
}
