//! Fallible allocation: an error, not an abort, if a caller-sized buffer does not fit into memory.

use std::hint::black_box;

use crate::error::{Error, Result};

/// An empty vector with capacity for `len` values.
///
/// # Errors
///
/// If they do not fit into memory; the message calls them `what`.
pub fn try_with_capacity<T>(len: usize, what: impl FnOnce() -> String) -> Result<Vec<T>> {
    let mut values = Vec::new();
    values
        .try_reserve_exact(len)
        .map_err(|_| Error::OutOfMemory(format!("{} do not fit into memory", what())))?;
    Ok(values)
}

/// Checks that `len` values of type `T` can be allocated.
///
/// # Errors
///
/// As [`try_with_capacity`].
pub fn check_available<T>(len: usize, what: impl FnOnce() -> String) -> Result<()> {
    try_with_capacity::<T>(len, what).map(|values| drop(black_box(values)))
}

/// `len` default values; pages that the system has zeroed are not written.
///
/// # Errors
///
/// As [`try_with_capacity`].
pub fn try_defaults<T: Clone + Default>(
    len: usize,
    what: impl FnOnce() -> String,
) -> Result<Vec<T>> {
    // `vec!` alone allocates zeroed memory, but aborts the process if it cannot.
    check_available::<T>(len, what)?;
    Ok(vec![T::default(); len])
}
