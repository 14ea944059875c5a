//! Sequences into bins: which bin each one goes to, and its cells into the row of that bin.
//!
//! [`RowFill`] decides for rows filled one after another, where sequences may be cut.
//! [`Bins`] decides, from lengths alone; [`Column`] holds one feature of all rows and copies.

mod best_fit;
mod bins;
mod choice;
mod column;
mod concat_split;
mod first_fit;
mod room_rows;
mod rooms;

pub use bins::{Bins, Layout};
pub use column::{Column, Placement};
pub use concat_split::{Limits, Piece, RowFill, Taken};
pub use rooms::Fit;

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
