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
use crate::reserve::with_room;
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
    /// As [`Resolver::resolve`]; also if the positions leave the 64-bit range or do not fit into
    /// memory.
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
/// If they leave the 64-bit range or do not fit into memory.
pub fn range(start: i64, count: usize) -> Result<Vec<i64>> {
    let end = range_end(start, count)?;
    let mut positions = with_room(count, || format!("{count} positions"))?;
    positions.extend(start..end);
    Ok(positions)
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
            indices: indices.into(),
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

#[cfg(test)]
mod tests {
    use super::{Column, Resolver, Tree};
    use crate::order::{MixSchedule, Permutation};
    use proptest::prelude::*;

    /// Follows one position down, a division at a time: the slow twin of [`Resolver`].
    fn follow(tree: &Tree, position: i64, reached: &mut Vec<(u32, i64)>) {
        let split = |len: u64| {
            let len = len.cast_signed();
            (position.div_euclid(len), position.rem_euclid(len))
        };
        let moved = |len: u64, seed: u32, number: i64, place: i64| {
            let seed = (i64::from(seed) + number).rem_euclid(1 << 32).try_into().unwrap();
            let permutation = Permutation::new(len, seed, 4).unwrap();
            permutation.apply(place.try_into().unwrap()).unwrap().cast_signed()
        };
        let (child, below) = match tree {
            Tree::Leaf { id } => return reached.push((*id, position)),
            Tree::Tap { id, child } => {
                reached.push((*id, position));
                (&**child, position)
            }
            Tree::Shuffle { num_records, seed, child } => {
                let (epoch, place) = split(*num_records);
                (&**child, position - place + moved(*num_records, *seed, epoch, place))
            }
            Tree::WindowShuffle { num_records, window_size, seed, child } => {
                let is_grains = num_records.is_multiple_of(*window_size);
                let (epoch, in_epoch) = if is_grains { (0, position) } else { split(*num_records) };
                let size = window_size.cast_signed();
                let (window, place) = (in_epoch.div_euclid(size), in_epoch.rem_euclid(size));
                let left = num_records.cast_signed() - window * size;
                let len = if is_grains { size } else { size.min(left) };
                let number = epoch * num_records.div_ceil(*window_size).cast_signed() + window;
                let place_now = moved(len.cast_unsigned(), *seed, number, place);
                (&**child, position - place + place_now)
            }
            Tree::Slice { start, step, num_records, parent_len, child } => {
                let (epoch, place) = split(*num_records);
                (&**child, start + place * step + epoch * parent_len.cast_signed())
            }
            Tree::Wrap { num_records, child } => (&**child, split(*num_records).1),
            Tree::Take { indices, parent_len, child } => {
                let (epoch, place) = split(indices.len() as u64);
                let index = indices[usize::try_from(place).unwrap()];
                (&**child, index + epoch * parent_len.cast_signed())
            }
            Tree::Divide { by, child } => (&**child, split(*by).0),
            Tree::Mix { proportions, children } => {
                let (part, key) = MixSchedule::new(proportions).unwrap().choose(position);
                (&children[part as usize], key)
            }
            Tree::Concatenate { lengths, children } => {
                let (epoch, mut record) = split(lengths.iter().sum());
                let mut part = 0;
                while record >= lengths[part].cast_signed() {
                    record -= lengths[part].cast_signed();
                    part += 1;
                }
                (&children[part], record + epoch * lengths[part].cast_signed())
            }
        };
        follow(child, below, reached);
    }

    fn follow_all(tree: &Tree, positions: &[i64], num_ids: u32) -> Vec<Column> {
        let mut reached = vec![(Vec::new(), Vec::new()); num_ids as usize];
        for (row, &position) in (0..).zip(positions) {
            let mut here = Vec::new();
            follow(tree, position, &mut here);
            for (id, index) in here {
                reached[id as usize].0.push(row);
                reached[id as usize].1.push(index);
            }
        }
        let column = |(id, (rows, index))| Column { id, rows: Some(rows), index };
        (0..).zip(reached).map(column).collect()
    }

    /// Gives every leaf and tap its own id, in the order in which columns come.
    fn number(tree: &mut Tree, next: &mut u32) {
        match tree {
            Tree::Leaf { id } | Tree::Tap { id, .. } => {
                *id = *next;
                *next += 1;
            }
            _ => {}
        }
        match tree {
            Tree::Leaf { .. } => {}
            Tree::Mix { children, .. } | Tree::Concatenate { children, .. } => {
                for child in children {
                    number(child, next);
                }
            }
            Tree::Tap { child, .. }
            | Tree::Shuffle { child, .. }
            | Tree::WindowShuffle { child, .. }
            | Tree::Slice { child, .. }
            | Tree::Wrap { child, .. }
            | Tree::Take { child, .. }
            | Tree::Divide { child, .. } => number(child, next),
        }
    }

    fn trees() -> impl Strategy<Value = Tree> {
        let leaf = Just(Tree::Leaf { id: 0 });
        leaf.prop_recursive(4, 12, 3, |inner| {
            let child = inner.clone().prop_map(Box::new);
            let len = prop_oneof![Just(1_u64), 700..800_u64, 9000..70_000_u64];
            let parts = prop::collection::vec((1..2000_u64, inner), 1..4);
            let lengths = (child.clone(), len.clone(), len, -90..90_i64, any::<u32>());
            prop_oneof![
                child.clone().prop_map(|child| Tree::Tap { id: 0, child }),
                (1..9_u64, child.clone()).prop_map(|(by, child)| Tree::Divide { by, child }),
                lengths.prop_flat_map(|(child, n, m, step, seed)| {
                    let indices = vec![step, 3, -1];
                    prop::sample::select(vec![
                        Tree::Shuffle { num_records: n, seed, child: child.clone() },
                        Tree::WindowShuffle {
                            num_records: n,
                            window_size: m,
                            seed,
                            child: child.clone(),
                        },
                        Tree::WindowShuffle {
                            num_records: 3 * m,
                            window_size: m,
                            seed,
                            child: child.clone(),
                        },
                        Tree::Slice {
                            start: 5,
                            step,
                            num_records: n,
                            parent_len: m,
                            child: child.clone(),
                        },
                        Tree::Wrap { num_records: n, child: child.clone() },
                        Tree::Take { indices, parent_len: m, child },
                    ])
                }),
                (parts.clone(), any::<bool>()).prop_map(|(parts, is_mix)| {
                    let (numbers, children) = parts.into_iter().unzip();
                    if is_mix {
                        Tree::Mix { proportions: numbers, children }
                    } else {
                        Tree::Concatenate { lengths: numbers, children }
                    }
                }),
            ]
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn resolve_matches_follow(
            mut tree in trees(),
            start in -100_000..100_000_i64,
            jumps in prop::collection::vec(-1_000_000..1_000_000_i64, 0..60),
        ) {
            let mut num_ids = 0;
            number(&mut tree, &mut num_ids);
            let mut resolver = Resolver::new(tree.clone()).unwrap();
            let run: Vec<i64> = (start..start + 80).collect();
            let ranged = resolver.resolve_range(start, 80).unwrap();
            prop_assert_eq!(ranged, resolver.resolve(&run).unwrap());
            for positions in [run, jumps] {
                let mut columns = resolver.resolve(&positions).unwrap();
                let all: Vec<i64> = (0..).take(positions.len()).collect();
                for column in &mut columns {
                    column.rows.get_or_insert_with(|| all.clone());
                }
                columns.sort_by_key(|column| column.id);
                prop_assert_eq!(columns, follow_all(&tree, &positions, num_ids));
            }
        }
    }

    fn leaf(id: u32) -> Tree {
        Tree::Leaf { id }
    }

    #[test]
    fn indices_beyond_the_range_are_errors() {
        let n = 1 << 40;
        let outside = [
            Tree::Slice {
                start: 0,
                step: 1,
                num_records: 1,
                parent_len: n,
                child: Box::new(leaf(0)),
            },
            Tree::Take { indices: vec![0], parent_len: n, child: Box::new(leaf(0)) },
            Tree::Shuffle { num_records: (1 << 62) + 1, seed: 0, child: Box::new(leaf(0)) },
        ];
        for tree in outside {
            let mut resolver = Resolver::new(tree).unwrap();
            assert!(resolver.resolve(&[i64::MIN]).is_err());
            assert!(resolver.resolve(&[0]).is_ok());
        }
        let mut resolver = Resolver::new(leaf(0)).unwrap();
        assert!(resolver.resolve_range(i64::MAX, 2).is_err());
    }

    #[test]
    fn a_stage_without_records_has_no_positions_but_an_empty_block() {
        let empty = [
            Tree::Shuffle { num_records: 0, seed: 0, child: Box::new(leaf(0)) },
            Tree::WindowShuffle {
                num_records: 0,
                window_size: 3,
                seed: 0,
                child: Box::new(leaf(0)),
            },
            Tree::Slice {
                start: 0,
                step: 1,
                num_records: 0,
                parent_len: 5,
                child: Box::new(leaf(0)),
            },
            Tree::Wrap { num_records: 0, child: Box::new(leaf(0)) },
            Tree::Take { indices: Vec::new(), parent_len: 5, child: Box::new(leaf(0)) },
            Tree::Concatenate { lengths: vec![0], children: vec![leaf(0)] },
        ];
        for tree in empty {
            let mut resolver = Resolver::new(tree).unwrap();
            assert!(resolver.resolve(&[0]).is_err());
            assert_eq!(resolver.resolve(&[]).unwrap()[0].index, []);
        }
    }

    #[test]
    fn unfitting_parameters_are_refused() {
        let unfitting = [
            Tree::Tap { id: 1, child: Box::new(leaf(1)) },
            Tree::Divide { by: 0, child: Box::new(leaf(0)) },
            Tree::Shuffle { num_records: 1 << 63, seed: 0, child: Box::new(leaf(0)) },
            Tree::WindowShuffle {
                num_records: 5,
                window_size: 0,
                seed: 0,
                child: Box::new(leaf(0)),
            },
            Tree::Mix { proportions: vec![1, 2], children: vec![leaf(0)] },
            Tree::Mix { proportions: vec![0], children: vec![leaf(0)] },
            Tree::Concatenate { lengths: Vec::new(), children: Vec::new() },
            Tree::Concatenate { lengths: vec![1 << 62; 2], children: vec![leaf(0), leaf(1)] },
        ];
        for tree in unfitting {
            assert!(Resolver::new(tree.clone()).is_err(), "{tree:?}");
        }
    }
}
