//! Calls of Python code that may be under way when the interpreter goes down.
#![expect(unsafe_code, reason = "PyO3 takes no notice of what may unwind through a call")]

use std::{mem, thread};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

unsafe extern "C-unwind" {
    #[link_name = "PyObject_CallObject"]
    fn call_object(callable: *mut ffi::PyObject, args: *mut ffi::PyObject) -> *mut ffi::PyObject;
}

/// `callable(*args)`; does not return on a thread that is left when the interpreter goes down.
pub(crate) fn call<'py>(
    callable: &Bound<'py, PyAny>,
    args: impl IntoPyObject<'py, Target = PyTuple, Output = Bound<'py, PyTuple>, Error: Into<PyErr>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = callable.py();
    let args = args.into_pyobject(py).map_err(Into::into)?;
    let stay = Stay;
    // SAFETY: a callable and its arguments, both alive, and the interpreter is held.
    let outcome = unsafe { call_object(callable.as_ptr(), args.as_ptr()) };
    mem::forget(stay);
    // SAFETY: a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, outcome) }
}

/// Keeps a thread where it is instead of being unwound.
///
/// `CPython` before 3.14 ends a thread that asks for the interpreter lock too late by
/// `pthread_exit`, and to unwind frames of Rust aborts the process. `PyO3` does the same as this
/// where it asks for the lock itself.
struct Stay;

impl Drop for Stay {
    fn drop(&mut self) {
        loop {
            thread::park();
        }
    }
}
