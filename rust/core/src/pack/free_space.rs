//! The interface of the structures that search for a bin.

use std::fmt::Debug;

/// The rule that chooses among the bins into which a sequence fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fit {
    /// The first one.
    First,
    /// The one with the least free space in total over all features; the first of equals.
    Best,
}

/// The free space of bins, indexed for one kind of fit.
pub(crate) trait FreeSpace: Debug + Send + Sync {
    /// Empties all bins.
    fn clear(&mut self);

    /// The bin for a sequence with these lengths by feature; `None` if it fits into no bin.
    fn choose(&self, lengths: &[usize]) -> Option<usize>;

    /// Sets the free space of `bin` by feature, which only decreases; a closed bin has -1 in all.
    ///
    /// Bins are opened in order.
    fn update(&mut self, bin: usize, free: &[i64]);
}

/// A length as a signed integer; lengths in memory fit into `i64`.
pub(crate) fn signed_len(len: usize) -> i64 {
    i64::try_from(len).unwrap_or(i64::MAX)
}
