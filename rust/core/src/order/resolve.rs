//! The index stages of a plan over a block of positions: columns in, columns out.
//!
//! However many stages there are, one call resolves them all; a stage is one loop over a column.
//! Everything follows Python's floor division, so negative positions belong to epochs before
//! the first, and an index that leaves the 64-bit range is an error.

use std::collections::HashSet;

use super::floor::Floor;
use super::mix::MixSchedule;
use super::stage::Stage;
use super::window::Windows;
use crate::{Error, Result};

/// The index stages of a plan, from the output down to its sources.
///
/// A position `i` of a stage with epochs of `n` records is record `i % n` of epoch `i / n`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tree {
    /// A source; its column is the result.
    Leaf {
        /// Names the column.
        id: u32,
    },
    /// Records the positions seen here as a column of its own and passes them on.
    Tap {
        /// Names the column.
        id: u32,
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
    /// Several datasets by weight; see [`MixSchedule`].
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

/// What reaches one leaf or tap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    /// The leaf or tap.
    pub id: u32,
    /// Places within the block whose positions come here, ascending; none where all do.
    pub rows: Option<Vec<i64>>,
    /// For each of those places, the index here.
    pub index: Vec<i64>,
}

/// The index stages of a plan, ready for blocks of positions.
///
/// It remembers the permutations of the epochs used last; results do not depend on that.
#[derive(Clone, Debug)]
pub struct Resolver {
    root: Stage,
    num_columns: usize,
}

impl Resolver {
    /// Prepares the stages of `tree`.
    ///
    /// # Errors
    ///
    /// If a parameter of a stage lies outside its range, a mixture or concatenation has not as
    /// many children as parameters, or two leaves or taps share an id.
    pub fn new(tree: Tree) -> Result<Self> {
        let mut ids = HashSet::new();
        let root = prepared(tree, &mut ids)?;
        Ok(Self { root, num_columns: ids.len() })
    }

    /// What the positions `index` are at every leaf and tap.
    ///
    /// # Errors
    ///
    /// If an index leaves the 64-bit range on the way, or a stage without records is asked.
    pub fn resolve(&mut self, index: &[i64]) -> Result<Vec<Column>> {
        self.resolve_owned(index.to_vec())
    }

    /// What `count` positions from `start` on are at every leaf and tap.
    ///
    /// # Errors
    ///
    /// As [`Resolver::resolve`]; also if the positions leave the 64-bit range.
    pub fn resolve_range(&mut self, start: i64, count: usize) -> Result<Vec<Column>> {
        self.resolve_owned(range(start, count)?)
    }

    fn resolve_owned(&mut self, index: Vec<i64>) -> Result<Vec<Column>> {
        let mut columns = Vec::with_capacity(self.num_columns);
        self.root.resolve(index, None, &mut columns)?;
        Ok(columns)
    }
}

/// The positions `start`, `start + 1`, and so on.
///
/// # Errors
///
/// If they leave the 64-bit range.
pub fn range(start: i64, count: usize) -> Result<Vec<i64>> {
    Ok((start..range_end(start, count)?).collect())
}

/// The position after `count` positions from `start` on.
///
/// # Errors
///
/// If it lies outside the 64-bit range.
pub fn range_end(start: i64, count: usize) -> Result<i64> {
    let end = i64::try_from(count).ok().and_then(|count| start.checked_add(count));
    end.ok_or_else(|| {
        Error::OutOfRange(format!("{count} positions from {start} on leave the 64-bit range"))
    })
}

fn prepared(tree: Tree, ids: &mut HashSet<u32>) -> Result<Stage> {
    let mut below = |child: Box<Tree>| prepared(*child, ids).map(Box::new);
    Ok(match tree {
        Tree::Leaf { id } => Stage::Leaf { id: fresh(id, ids)? },
        Tree::Tap { id, child } => {
            let child = below(child)?;
            Stage::Tap { id: fresh(id, ids)?, child }
        }
        Tree::Shuffle { num_records, seed, child } => {
            length("num_records", num_records)?;
            Stage::shuffle(num_records, seed, below(child)?)
        }
        Tree::WindowShuffle { num_records, window_size, seed, child } => {
            let num_records = length("num_records", num_records)?;
            // A window longer than any epoch is the epoch.
            let window_size = i64::try_from(window_size).unwrap_or(i64::MAX);
            Stage::window_shuffle(Windows::new(num_records, window_size)?, seed, below(child)?)
        }
        Tree::Slice { start, step, num_records, parent_len, child } => Stage::Slice {
            start,
            step,
            num_records: Floor::new(length("num_records", num_records)?.cast_unsigned()),
            parent_len: length("parent_len", parent_len)?,
            child: below(child)?,
        },
        Tree::Wrap { num_records, child } => {
            length("num_records", num_records)?;
            Stage::Wrap { num_records: Floor::new(num_records), child: below(child)? }
        }
        Tree::Take { indices, parent_len, child } => Stage::Take {
            num_records: Floor::new(indices.len() as u64),
            indices: indices.into_boxed_slice(),
            parent_len: length("parent_len", parent_len)?,
            child: below(child)?,
        },
        Tree::Divide { by, child } => {
            if length("by", by)? == 0 {
                return Err(Error::InvalidArgument("`by` must be at least 1, got 0".into()));
            }
            Stage::Divide { by: Floor::new(by), child: below(child)? }
        }
        Tree::Mix { proportions, children } => {
            same_count("proportions", proportions.len(), children.len())?;
            let schedule = MixSchedule::new(&proportions)?;
            Stage::Mix { schedule, children: all_prepared(children, ids)? }
        }
        Tree::Concatenate { lengths, children } => {
            same_count("lengths", lengths.len(), children.len())?;
            let mut ends = Vec::with_capacity(lengths.len());
            let mut end = 0_u64;
            for len in lengths {
                end = end.saturating_add(length("lengths", len)?.cast_unsigned());
                ends.push(length("the sum of `lengths`", end)?);
            }
            Stage::Concatenate {
                total: Floor::new(end),
                ends: ends.into_boxed_slice(),
                children: all_prepared(children, ids)?,
            }
        }
    })
}

fn all_prepared(children: Vec<Tree>, ids: &mut HashSet<u32>) -> Result<Box<[Stage]>> {
    children.into_iter().map(|child| prepared(child, ids)).collect()
}

fn fresh(id: u32, ids: &mut HashSet<u32>) -> Result<u32> {
    if ids.insert(id) {
        return Ok(id);
    }
    Err(Error::InvalidArgument(format!("two leaves or taps have the id {id}")))
}

fn length(name: &str, value: u64) -> Result<i64> {
    i64::try_from(value).map_err(|_| {
        Error::InvalidArgument(format!("`{name}` must be less than 2**63, got {value}"))
    })
}

fn same_count(name: &str, num_parameters: usize, num_children: usize) -> Result<()> {
    if num_parameters == num_children && num_children > 0 {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!(
        "`{name}` must have one entry per child, got {num_parameters} for {num_children}"
    )))
}
