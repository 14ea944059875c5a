//! Python bindings of the layer `pack`: elements in, rows of arrays out.

use std::sync::{Mutex, MutexGuard, TryLockError};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

mod bins;
mod concat_split;
mod rows;

/// Locks the state of a packer, which one thread may use at a time.
fn locked<T>(state: &Mutex<T>) -> PyResult<MutexGuard<'_, T>> {
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

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<bins::BinPacker>()?;
    module.add_class::<concat_split::RowPacker>()
}
