//! The index stages of a plan, as data.

use std::sync::Arc;

/// The index stages of a plan, from the output to its sources.
///
/// A position `i` of a stage with epochs of `n` records is record `i % n` of epoch `i / n`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tree {
    /// A source; its column holds the record indices.
    Leaf {
        /// The id of the column. Leaves and taps may share one if no position reaches two of them.
        id: u32,
        /// Distinguishes this leaf from others with the same column.
        part: u32,
    },
    /// The numbers of a range, repeated; its column holds them.
    Numbers {
        /// The id of the column.
        id: u32,
        /// Distinguishes this range from others with the same column.
        part: u32,
        /// The first number.
        start: i64,
        /// The difference between consecutive numbers.
        step: i64,
        /// How many numbers the range has.
        num_records: u64,
    },
    /// Records the positions that pass through in a column.
    Tap {
        /// The id of the column.
        id: u32,
        /// Distinguishes this tap from others with the same column.
        part: u32,
        /// The parent stage.
        child: Box<Tree>,
    },
    /// Each epoch in its own random order; epoch `e` has the seed `seed + e`.
    Shuffle {
        /// Records of an epoch.
        num_records: u64,
        /// The seed of epoch 0.
        seed: u32,
        /// The parent stage.
        child: Box<Tree>,
    },
    /// Each window in its own random order; see [`window`](super::window).
    WindowShuffle {
        /// Records of an epoch.
        num_records: u64,
        /// Records of a window.
        window_size: u64,
        /// The seed of window 0; window `w` has the seed `seed + w`.
        seed: u32,
        /// The parent stage.
        child: Box<Tree>,
    },
    /// Groups of consecutive records in random order, each in its own order; epoch `e` has the seed
    /// `seed + e`.
    GroupShuffle {
        /// Records of each group.
        lens: Vec<u64>,
        /// The seed of epoch 0.
        seed: u32,
        /// The parent stage.
        child: Box<Tree>,
    },
    /// Every `step`-th record from `start` on.
    Slice {
        /// The first record taken from an epoch of the parent.
        start: i64,
        /// The distance between records taken.
        step: i64,
        /// Records taken from an epoch.
        num_records: u64,
        /// Records of an epoch of the parent.
        parent_len: u64,
        /// The parent stage.
        child: Box<Tree>,
    },
    /// The first epoch, repeated.
    Wrap {
        /// Records of an epoch.
        num_records: u64,
        /// The parent stage.
        child: Box<Tree>,
    },
    /// The records at `indices`, in that order; negative ones belong to the previous epoch.
    Take {
        /// Indices in an epoch of the parent.
        indices: Vec<i64>,
        /// Records of an epoch of the parent.
        parent_len: u64,
        /// The parent stage.
        child: Box<Tree>,
    },
    /// A weighted mixture of datasets; see [`MixSchedule`](super::MixSchedule).
    Mix {
        /// One per child.
        proportions: Vec<u64>,
        /// The datasets.
        children: Vec<Tree>,
    },
    /// A stage that several mixtures or concatenations read, or one several times.
    Shared(Arc<Tree>),
    /// The datasets in order, in each epoch.
    Concatenate {
        /// Records of an epoch of each child.
        lengths: Vec<u64>,
        /// The datasets.
        children: Vec<Tree>,
    },
}
