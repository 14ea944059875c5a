//! Opening files, and reading their indices, in parallel.

use std::sync::Arc;

use super::{FileSet, Files, Plan};
use crate::Result;
use crate::io::for_each_parallel;

/// Opens those files of `set` whose number of records is not known.
///
/// # Errors
/// If a file cannot be opened, or has fewer records than its range needs.
pub fn open(set: FileSet) -> Result<Files> {
    let set = Arc::new(set);
    set.open_each(set.uncounted())?;
    Files::of(set)
}

/// Plans how to read the records at `positions` of `files`, after reading the indices that this
/// needs.
///
/// # Errors
/// If a position is out of range, or a file or its index cannot be read.
pub fn plan(files: &Arc<Files>, positions: &[u64]) -> Result<Plan> {
    let sorted = files.sort(positions)?;
    match files.plan_if_indexed(&sorted)? {
        Ok(plan) => Ok(plan),
        Err(unready) => {
            prepare(files, unready)?;
            files.plan_sorted(&sorted)
        }
    }
}

/// Opens the `unready` files and reads their indices.
fn prepare(files: &Arc<Files>, unready: Vec<usize>) -> Result<()> {
    let (files, limits) = (Arc::clone(files), Arc::clone(files));
    let limit_of = move |at| limits.limit(at);
    for_each_parallel(unready, limit_of, move |at| files.prepare(at))
}

/// Opens all files of `set`.
///
/// # Errors
/// If a file cannot be opened, or has fewer records than its range needs.
pub fn open_all(set: FileSet) -> Result<Files> {
    let set = Arc::new(set);
    set.open_all()?;
    Files::of(set)
}
