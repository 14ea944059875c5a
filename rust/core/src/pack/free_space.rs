//! What all structures that know which bin is next have in common.

use std::fmt::Debug;

/// Which of the bins that have room a sequence goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fit {
    /// The first one.
    First,
    /// The one with most cells used over all features; the first of equals.
    Best,
}

/// Bins by the room they have, arranged for one fit.
pub(crate) trait FreeSpace: Debug + Send + Sync {
    /// Makes all bins empty.
    fn clear(&mut self);

    /// The bin for a sequence with these lengths by feature; `None` if none has room.
    fn choose(&self, lengths: &[usize]) -> Option<usize>;

    /// Sets the room of `bin` by feature, which only falls; a closed bin has -1 in all.
    ///
    /// Bins come into use in order.
    fn update(&mut self, bin: usize, room: &[i64]);
}

/// A number of cells that may be subtracted from; memory ends long before `i64` does.
pub(crate) fn cell_count(cells: usize) -> i64 {
    i64::try_from(cells).unwrap_or(i64::MAX)
}
