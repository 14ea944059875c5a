//! Memory in amounts that an argument decides: an error where there is none, not the process's end.

use std::hint::black_box;

use crate::error::{Error, Result};

/// An empty vector with room for `len` values.
///
/// # Errors
///
/// If there is no memory for them, which the message calls `what`.
pub fn try_with_capacity<T>(len: usize, what: impl FnOnce() -> String) -> Result<Vec<T>> {
    let mut values = Vec::new();
    values
        .try_reserve_exact(len)
        .map_err(|_| Error::OutOfMemory(format!("{} do not fit into memory", what())))?;
    Ok(values)
}

/// Makes sure that there is memory for `len` values of type `T`.
///
/// # Errors
///
/// As [`try_with_capacity`].
pub fn check_available<T>(len: usize, what: impl FnOnce() -> String) -> Result<()> {
    try_with_capacity::<T>(len, what).map(|values| drop(black_box(values)))
}

/// `len` times the default value, which is left untouched where the system has cleared it.
///
/// # Errors
///
/// As [`try_with_capacity`].
pub fn try_defaults<T: Clone + Default>(
    len: usize,
    what: impl FnOnce() -> String,
) -> Result<Vec<T>> {
    // `vec!` alone asks for cleared memory, but ends the process where it gets none.
    check_available::<T>(len, what)?;
    Ok(vec![T::default(); len])
}
