//! Locks that stay usable after a panic: what they protect is consistent whenever they are free.

use std::sync::PoisonError;

use crate::sync::{Mutex, MutexGuard};

/// Locks `mutex`.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
