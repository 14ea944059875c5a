//! The only table that maps errors of the engine to Python exceptions.

use std::io::ErrorKind;

use grainmill_core::Error;
use grainmill_core::url::redacted;
use pyo3::PyErr;
use pyo3::exceptions::{
    PyException, PyFileExistsError, PyFileNotFoundError, PyIndexError, PyMemoryError, PyOSError,
    PyPermissionError, PyValueError,
};
use pyo3::prelude::*;

pyo3::create_exception!(
    grainmill._native,
    GrainmillError,
    pyo3::exceptions::PyRuntimeError,
    "A failure that no built-in exception describes, such as a damaged file."
);

/// The message of `error`, without the secrets of a URL.
pub(crate) fn text_of(error: &Error) -> String {
    redacted(&error.to_string()).into_owned()
}

/// An error of the engine, to be raised in Python.
pub(crate) struct Raised(pub(crate) Error);

impl From<Error> for Raised {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

impl From<Raised> for PyErr {
    fn from(Raised(error): Raised) -> Self {
        let message = text_of(&error);
        match error {
            Error::InvalidArgument(_) => PyValueError::new_err(message),
            Error::OutOfRange(_) => PyIndexError::new_err(message),
            Error::OutOfMemory(_) => PyMemoryError::new_err(message),
            Error::Io { source, path, .. } => match source.raw_os_error() {
                // With an errno and a path, Python selects `FileNotFoundError` and similar subclasses.
                // Its text begins with the number and ends with the path, so the message has neither.
                Some(errno) => {
                    let path = redacted(&path).into_owned();
                    let text = message.strip_prefix(&format!("{path}: ")).unwrap_or(&message);
                    let number = format!(" (os error {errno})");
                    let text = text.strip_suffix(&number).unwrap_or(text).to_owned();
                    PyOSError::new_err((errno, text, path))
                }
                // What a server said has a kind, but no errno.
                None => match source.kind() {
                    ErrorKind::NotFound => PyFileNotFoundError::new_err(message),
                    ErrorKind::AlreadyExists => PyFileExistsError::new_err(message),
                    ErrorKind::PermissionDenied => PyPermissionError::new_err(message),
                    _ => PyOSError::new_err(message),
                },
            },
            _ => GrainmillError::new_err(message),
        }
    }
}

/// Whether a signal handler raised `error`, so that it says nothing about what was being computed.
pub(crate) fn is_interrupt(py: Python<'_>, error: &PyErr) -> bool {
    let ask = || {
        py.import("grainmill._interrupts")?
            .call_method1("is_interrupt", (error.clone_ref(py).into_value(py),))
    };
    !error.is_instance_of::<PyException>(py)
        || ask().is_ok_and(|answer| answer.is_truthy().unwrap_or(false))
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("GrainmillError", module.py().get_type::<GrainmillError>())
}
