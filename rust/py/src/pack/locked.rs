//! The lock of a packer.

use std::sync::{Mutex, MutexGuard, TryLockError};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

/// Locks the state of a packer, which one thread may use at a time.
pub(crate) fn locked<T>(state: &Mutex<T>) -> PyResult<MutexGuard<'_, T>> {
    state.try_lock().map_err(|refused| {
        PyRuntimeError::new_err(match refused {
            TryLockError::WouldBlock => "a packing iterator was advanced by two threads at once",
            TryLockError::Poisoned(_) => {
                "a packing iterator cannot continue after a panic of the engine, which was raised as \
                 `PanicException`; create a new iterator"
            }
        })
    })
}
