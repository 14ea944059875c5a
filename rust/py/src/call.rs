//! Calls of Python code that may be in progress during interpreter shutdown.
#![expect(unsafe_code, reason = "PyO3 declares no C functions that may unwind")]

use std::{mem, thread};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

unsafe extern "C-unwind" {
    #[link_name = "PyObject_CallObject"]
    fn call_object(callable: *mut ffi::PyObject, args: *mut ffi::PyObject) -> *mut ffi::PyObject;
}

/// Calls `callable(*args)`; never returns on a thread that remains at interpreter shutdown.
pub(crate) fn call<'py>(
    callable: &Bound<'py, PyAny>,
    args: impl IntoPyObject<'py, Target = PyTuple, Output = Bound<'py, PyTuple>, Error: Into<PyErr>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = callable.py();
    let args = args.into_pyobject(py).map_err(Into::into)?;
    let guard = ParkOnUnwind;
    // SAFETY: a callable and its arguments, both alive, and this thread holds the GIL.
    let outcome = unsafe { call_object(callable.as_ptr(), args.as_ptr()) };
    mem::forget(guard);
    // SAFETY: a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, outcome) }
}

/// Parks a thread forever instead of unwinding it.
///
/// `CPython` before 3.14 calls `pthread_exit` on a thread that requests the GIL after shutdown, and
/// unwinding Rust frames that way aborts the process. `PyO3` parks the thread, too, where it acquires
/// the GIL itself.
struct ParkOnUnwind;

impl Drop for ParkOnUnwind {
    fn drop(&mut self) {
        loop {
            thread::park();
        }
    }
}
