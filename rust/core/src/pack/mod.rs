//! Packs sequences into bins: chooses a bin for each, and copies its values into the bin's row.
//!
//! [`Bins`] chooses among many open bins, from lengths alone; [`RowFill`] fills one row at a time
//! and may cut sequences. [`FeatureRows`] holds the values of one feature of all rows.

mod best_fit;
mod bins;
mod bit_rows;
mod choice;
mod column;
mod concat_split;
mod first_fit;
mod free_space;

pub use bins::{BinShape, Bins};
pub use column::{FeatureRows, Placement};
pub use concat_split::{FeatureSlice, Limits, RowFill, Taken};
pub use free_space::Fit;

/// Counts the blocks of bins that a search probes, for tests of its complexity.
#[cfg(test)]
mod probes {
    use std::cell::Cell;

    thread_local!(static PROBES: Cell<usize> = const { Cell::new(0) });

    pub(super) fn add(count: usize) {
        PROBES.set(PROBES.get() + count);
    }

    /// The count since the last call.
    pub(super) fn take() -> usize {
        PROBES.take()
    }
}
