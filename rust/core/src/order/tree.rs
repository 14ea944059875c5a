//! The index stages of a plan, as they are described.

/// The index stages of a plan, from the output down to its sources.
///
/// A position `i` of a stage with epochs of `n` records is record `i % n` of epoch `i / n`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tree {
    /// A source; its column is the result.
    Leaf {
        /// Names the column. Leaves and taps may share one if no position comes to two of them.
        id: u32,
        /// Tells this leaf from the others of its column.
        part: u32,
    },
    /// The numbers of a range, over and over; they are its column.
    Numbers {
        /// Names the column.
        id: u32,
        /// Tells these numbers from the others of their column.
        part: u32,
        /// The first number.
        start: i64,
        /// Distance between numbers.
        step: i64,
        /// How many there are.
        num_records: u64,
    },
    /// Records the positions seen here in a column and passes them on.
    Tap {
        /// Names the column.
        id: u32,
        /// Tells this tap from the others of its column.
        part: u32,
        /// What follows.
        child: Box<Tree>,
    },
    /// Each epoch in its own random order; epoch `e` is ordered by `seed + e`.
    Shuffle {
        /// Records of an epoch.
        num_records: u64,
        /// Chooses the orders.
        seed: u32,
        /// What follows.
        child: Box<Tree>,
    },
    /// Each window in its own random order; see [`window`](super::window).
    WindowShuffle {
        /// Records of an epoch.
        num_records: u64,
        /// Records of a window.
        window_size: u64,
        /// Chooses the orders; window `w` is ordered by `seed + w`.
        seed: u32,
        /// What follows.
        child: Box<Tree>,
    },
    /// Every `step`-th record from `start` on.
    Slice {
        /// First record taken of an epoch of the parent.
        start: i64,
        /// Distance between records taken.
        step: i64,
        /// Records taken of an epoch.
        num_records: u64,
        /// Records of an epoch of the parent.
        parent_len: u64,
        /// What follows.
        child: Box<Tree>,
    },
    /// The first epoch over and over.
    Wrap {
        /// Records of an epoch.
        num_records: u64,
        /// What follows.
        child: Box<Tree>,
    },
    /// The records at `indices`, in that order; negative ones are of the epoch before.
    Take {
        /// Which records of an epoch of the parent.
        indices: Vec<i64>,
        /// Records of an epoch of the parent.
        parent_len: u64,
        /// What follows.
        child: Box<Tree>,
    },
    /// Every index of the parent `by` times in a row.
    Divide {
        /// How often.
        by: u64,
        /// What follows.
        child: Box<Tree>,
    },
    /// Several datasets by weight; see [`MixSchedule`](super::MixSchedule).
    Mix {
        /// One per child.
        proportions: Vec<u64>,
        /// The datasets.
        children: Vec<Tree>,
    },
    /// One dataset after the other, in each epoch anew.
    Concatenate {
        /// Records of an epoch of each child.
        lengths: Vec<u64>,
        /// The datasets.
        children: Vec<Tree>,
    },
}
