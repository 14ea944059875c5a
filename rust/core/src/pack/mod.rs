//! Sequences into bins: which bin each one goes to, and its cells into the row of that bin.
//!
//! [`RowFill`] decides for rows filled one after another, where sequences may be cut.
//! [`Bins`] decides, from lengths alone; [`FeatureRows`] holds one feature of all rows and copies.

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

/// Counts the blocks of bins that choosing looks at, for tests of how their number grows.
#[cfg(test)]
mod looks {
    use std::cell::Cell;

    thread_local!(static LOOKS: Cell<usize> = const { Cell::new(0) });

    pub(super) fn add(count: usize) {
        LOOKS.set(LOOKS.get() + count);
    }

    /// The count since the last call.
    pub(super) fn take() -> usize {
        LOOKS.take()
    }
}
