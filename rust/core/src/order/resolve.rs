//! Applies the index stages of a plan to a block of positions.
//!
//! One call resolves all stages for a whole block. Each stage is one loop over the positions that
//! reach it; subtrees that no position reaches cost nothing. Division is Python's floor division,
//! so negative positions belong to epochs before the first. Where an index leaves the 64-bit range,
//! `wide` resolves the block.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::column::{Column, ColumnBuilder};
use super::floor::FloorDivisor;
use super::groups::Groups;
use super::mix::{MixSchedule, RecentChoices};
use super::orders::{Orders, Run};
use super::stage::{self, Stage};
use super::tree::Tree;
use super::wide;
use super::window::Windows;
use crate::try_alloc::try_with_capacity;
use crate::{Error, Result};

/// The compiled index stages of a plan.
///
/// It caches recently used orders and choices, which does not affect results. A clone shares the
/// stages and starts with empty caches.
#[derive(Debug)]
pub struct Resolver {
    plan: Arc<CompiledPlan>,
    caches: Caches,
}

#[derive(Debug)]
struct CompiledPlan {
    root: Stage,
    /// Per column, its id and whether it has `parts`.
    columns: Vec<(u32, bool)>,
    num_mixtures: usize,
}

#[derive(Debug)]
struct Caches {
    orders: Orders,
    /// One per mixture.
    choices: Vec<RecentChoices>,
}

impl Caches {
    fn of(plan: &CompiledPlan) -> Self {
        let choices = (0..plan.num_mixtures).map(|_| RecentChoices::default()).collect();
        Self { orders: Orders::default(), choices }
    }
}

impl Clone for Resolver {
    fn clone(&self) -> Self {
        Self { plan: Arc::clone(&self.plan), caches: Caches::of(&self.plan) }
    }
}

impl Resolver {
    /// Compiles `tree`.
    ///
    /// # Errors
    ///
    /// If a parameter of a stage is out of range, a mixture or concatenation does not have one
    /// parameter per child, or a position would reach two leaves or taps with the same id.
    pub fn new(tree: Tree) -> Result<Self> {
        let mut compiler = Compiler::default();
        let root = compiler.compile(tree)?;
        let Compiler { columns, num_mixtures, .. } = compiler;
        let plan = Arc::new(CompiledPlan { root, columns, num_mixtures });
        Ok(Self { caches: Caches::of(&plan), plan })
    }

    /// The columns of all leaves and taps that one of the positions `index` reaches.
    ///
    /// # Errors
    ///
    /// If an index overflows 128 bits, or a position reaches a stage without records.
    pub fn resolve(&mut self, index: &[i64]) -> Result<Vec<Column>> {
        let resolved = self.resolve_owned(index.to_vec());
        self.or_wide(resolved, index.iter().map(|&position| position.into()))
    }

    /// The columns of all leaves and taps that one of `count` positions from `start` on reaches.
    ///
    /// # Errors
    ///
    /// As [`Resolver::resolve`]; also if the positions do not fit into memory.
    pub fn resolve_range(&mut self, start: i128, count: usize) -> Result<Vec<Column>> {
        let wide = (0..count).map(|at| start.saturating_add(at as i128));
        match i64::try_from(start) {
            Ok(start) if range_end(start, count).is_ok() => {
                let resolved = self.resolve_owned(range(start, count)?);
                self.or_wide(resolved, wide)
            }
            _ => wide::resolve(&self.plan.root, &self.plan.columns, wide),
        }
    }

    /// As [`Resolver::resolve`], for positions of any size; slower.
    ///
    /// # Errors
    ///
    /// As [`Resolver::resolve`].
    pub fn resolve_wide(&self, index: &[i128]) -> Result<Vec<Column>> {
        wide::resolve(&self.plan.root, &self.plan.columns, index.iter().copied())
    }

    /// `resolved`, or the columns of `positions` in 128 bits if 64 did not do.
    fn or_wide(
        &self,
        resolved: Result<Vec<Column>>,
        positions: impl ExactSizeIterator<Item = i128>,
    ) -> Result<Vec<Column>> {
        match resolved {
            Err(error @ Error::OutOfRange(_)) => {
                wide::resolve(&self.plan.root, &self.plan.columns, positions).or(Err(error))
            }
            resolved => resolved,
        }
    }

    fn resolve_owned(&mut self, index: Vec<i64>) -> Result<Vec<Column>> {
        let Self { plan, caches } = self;
        let block_len = index.len();
        let mut block = Block::new(index, plan.columns.len(), &plan.root);
        block.resolve(&plan.columns, caches)?;
        let columns = plan.columns.iter().zip(block.columns);
        Ok(columns
            .filter_map(|(&(id, has_parts), column)| column.into_column(id, has_parts, block_len))
            .collect())
    }
}

/// A block of positions that is being resolved, in segments that have reached one stage each.
struct Block<'a> {
    index: Vec<i64>,
    /// The offset of each position in the original block; empty while they are in that order.
    rows: Vec<i64>,
    pending: Vec<Segment<'a>>,
    /// Segments at a shuffle; all of them are shuffled together.
    to_shuffle: Vec<Segment<'a>>,
    columns: Vec<ColumnBuilder>,
}

/// Positions of a block that have reached `stage`.
#[derive(Clone, Copy)]
struct Segment<'a> {
    stage: &'a Stage,
    from: usize,
    to: usize,
}

impl<'a> Block<'a> {
    fn new(index: Vec<i64>, num_columns: usize, root: &'a Stage) -> Self {
        let pending = vec![Segment { stage: root, from: 0, to: index.len() }];
        let mut columns = Vec::new();
        columns.resize_with(num_columns, ColumnBuilder::default);
        Self { index, rows: Vec::new(), pending, to_shuffle: Vec::new(), columns }
    }

    /// Resolves all positions to the leaves.
    fn resolve(&mut self, columns: &[(u32, bool)], caches: &mut Caches) -> Result<()> {
        while !self.pending.is_empty() {
            while let Some(segment) = self.pending.pop() {
                self.resolve_segment(segment, columns, caches)?;
            }
            self.shuffle(&mut caches.orders)?;
        }
        Ok(())
    }

    /// Resolves a segment to a leaf, to a stage with several children, or to a shuffle.
    fn resolve_segment(
        &mut self,
        segment: Segment<'a>,
        columns: &[(u32, bool)],
        caches: &mut Caches,
    ) -> Result<()> {
        let Segment { mut stage, from, to } = segment;
        loop {
            let index = &mut self.index[from..to];
            stage = match stage {
                Stage::Leaf { column, part } => {
                    self.add_to_column(*column, columns[*column].1.then_some(*part), from, to);
                    return Ok(());
                }
                Stage::Numbers { column, part, start, step, num_records } => {
                    stage::range(index, *start, *step, *num_records)?;
                    self.add_to_column(*column, columns[*column].1.then_some(*part), from, to);
                    return Ok(());
                }
                Stage::Tap { column, part, child } => {
                    let rows = self.rows.get(from..to).unwrap_or(&[]);
                    self.columns[*column].add(rows, index, columns[*column].1.then_some(*part));
                    child
                }
                Stage::Shuffle { .. } | Stage::WindowShuffle { .. } => {
                    self.to_shuffle.push(Segment { stage, from, to });
                    return Ok(());
                }
                Stage::Mix { number, schedule, children } => {
                    let mut parts = Vec::with_capacity(to - from);
                    stage::mix(index, schedule, &mut caches.choices[*number], &mut parts);
                    self.distribute(children, &parts, from);
                    return Ok(());
                }
                Stage::Concatenate { total, ends, children } => {
                    let mut parts = Vec::with_capacity(to - from);
                    stage::concatenate(index, *total, ends, &mut parts)?;
                    self.distribute(children, &parts, from);
                    return Ok(());
                }
                Stage::Shared(child) => child,
                Stage::GroupShuffle { groups, child } => {
                    groups.apply(index)?;
                    child
                }
                Stage::Slice { start, step, num_records, parent_len, child } => {
                    stage::slice(index, *start, *step, *num_records, *parent_len)?;
                    child
                }
                Stage::Wrap { num_records, child } => {
                    stage::wrap(index, *num_records)?;
                    child
                }
                Stage::Take { indices, num_records, parent_len, child } => {
                    stage::take(index, indices, *num_records, *parent_len)?;
                    child
                }
            };
        }
    }

    /// Shuffles all segments that have reached a shuffle, and passes them to its child.
    fn shuffle(&mut self, orders: &mut Orders) -> Result<()> {
        let mut runs: Vec<Run> = Vec::new();
        for Segment { stage, from, to } in std::mem::take(&mut self.to_shuffle) {
            let index = &self.index[from..to];
            let child = match stage {
                Stage::Shuffle { num_records, epoch_len, seed, child } => {
                    stage::epochs(index, from, *num_records, *epoch_len, *seed, &mut runs)?;
                    child
                }
                Stage::WindowShuffle { windows, seed, child } => {
                    stage::windows(index, from, windows, *seed, &mut runs)?;
                    child
                }
                _ => continue,
            };
            self.pending.push(Segment { stage: child, from, to });
        }
        orders.apply(&runs, &mut self.index)
    }

    /// Adds the indices of a segment to a column.
    fn add_to_column(&mut self, column: usize, part: Option<u32>, from: usize, to: usize) {
        let builder = &mut self.columns[column];
        match self.rows.get(from..to) {
            Some(rows) if !rows.is_empty() => builder.add(rows, &self.index[from..to], part),
            _ => builder.set(std::mem::take(&mut self.index), part),
        }
    }

    /// Distributes the positions from `from` on among the children that `parts` selects.
    fn distribute(&mut self, children: &'a [Stage], parts: &[u32], from: usize) {
        let (Some(&first), to) = (parts.first(), from + parts.len()) else { return };
        if parts.iter().all(|&part| part == first) {
            self.pending.push(Segment { stage: &children[first as usize], from, to });
            return;
        }
        if self.rows.is_empty() {
            self.rows = (0..).take(self.index.len()).collect();
        }
        let order = sort_by_part(parts, children.len());
        let in_order = |values: &mut [i64]| {
            let before = values.to_vec();
            for (value, &offset) in values.iter_mut().zip(&order) {
                *value = before[offset];
            }
        };
        in_order(&mut self.index[from..to]);
        in_order(&mut self.rows[from..to]);
        let mut start = 0;
        for run in order.chunk_by(|&a, &b| parts[a] == parts[b]) {
            let stage = &children[parts[run[0]] as usize];
            let end = start + run.len();
            self.pending.push(Segment { stage, from: from + start, to: from + end });
            start = end;
        }
    }
}

/// The offsets in `parts`, stably sorted by part.
fn sort_by_part(parts: &[u32], num_parts: usize) -> Vec<usize> {
    let mut offsets: Vec<usize> = (0..parts.len()).collect();
    if num_parts > parts.len() {
        offsets.sort_unstable_by_key(|&offset| (parts[offset], offset));
        return offsets;
    }
    let mut ends = vec![0; num_parts];
    for &part in parts {
        ends[part as usize] += 1;
    }
    let mut next = 0;
    for end in &mut ends {
        next += std::mem::replace(end, next);
    }
    for (offset, &part) in parts.iter().enumerate() {
        let end = &mut ends[part as usize];
        offsets[*end] = offset;
        *end += 1;
    }
    offsets
}

/// The positions `start`, `start + 1`, and so on.
///
/// # Errors
///
/// If they overflow 64 bits or do not fit into memory.
pub fn range(start: i64, count: usize) -> Result<Vec<i64>> {
    let end = range_end(start, count)?;
    let mut positions = try_with_capacity(count, || format!("{count} positions"))?;
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

/// A shared tree, what became of it, and the ids of columns in it.
type CompiledShared = (Arc<Tree>, Arc<Stage>, HashSet<u32>);

/// Compiles a tree into stages.
#[derive(Default)]
struct Compiler {
    columns: Vec<(u32, bool)>,
    column_numbers: HashMap<u32, usize>,
    /// The ids of taps between the root and the current stage.
    ancestor_ids: HashSet<u32>,
    num_mixtures: usize,
    /// The shared trees until now.
    shared: HashMap<*const Tree, CompiledShared>,
    /// The ids of columns since the innermost shared tree began.
    ids: HashSet<u32>,
}

impl Compiler {
    fn compile(&mut self, tree: Tree) -> Result<Stage> {
        Ok(match tree {
            Tree::Leaf { id, part } => Stage::Leaf { column: self.column(id, part)?, part },
            Tree::Numbers { id, part, start, step, num_records } => {
                length("num_records", num_records)?;
                let (column, num_records) =
                    (self.column(id, part)?, FloorDivisor::new(num_records));
                Stage::Numbers { column, part, start, step, num_records }
            }
            Tree::Tap { id, part, child } => {
                let column = self.column(id, part)?;
                self.ancestor_ids.insert(id);
                let child = self.compile_child(*child)?;
                self.ancestor_ids.remove(&id);
                Stage::Tap { column, part, child }
            }
            Tree::Shuffle { num_records, seed, child } => Stage::Shuffle {
                epoch_len: length("num_records", num_records)?,
                num_records: FloorDivisor::new(num_records),
                seed,
                child: self.compile_child(*child)?,
            },
            Tree::WindowShuffle { num_records, window_size, seed, child } => {
                let num_records = length("num_records", num_records)?;
                // Longer than any epoch: one window per epoch.
                let window_size = i64::try_from(window_size).unwrap_or(i64::MAX);
                let windows = Windows::new(num_records, window_size)?;
                Stage::WindowShuffle { windows, seed, child: self.compile_child(*child)? }
            }
            Tree::GroupShuffle { lens, seed, child } => {
                let groups = Groups::new(&lens, seed)?;
                Stage::GroupShuffle { groups, child: self.compile_child(*child)? }
            }
            Tree::Slice { start, step, num_records, parent_len, child } => Stage::Slice {
                start,
                step,
                num_records: FloorDivisor::new(length("num_records", num_records)?.cast_unsigned()),
                parent_len: length("parent_len", parent_len)?,
                child: self.compile_child(*child)?,
            },
            Tree::Wrap { num_records, child } => {
                length("num_records", num_records)?;
                Stage::Wrap {
                    num_records: FloorDivisor::new(num_records),
                    child: self.compile_child(*child)?,
                }
            }
            Tree::Take { indices, parent_len, child } => Stage::Take {
                num_records: FloorDivisor::new(indices.len() as u64),
                indices: indices.into(),
                parent_len: length("parent_len", parent_len)?,
                child: self.compile_child(*child)?,
            },
            Tree::Shared(tree) => Stage::Shared(self.compile_shared(tree)?),
            Tree::Mix { proportions, children } => {
                same_count("proportions", proportions.len(), children.len())?;
                let schedule = MixSchedule::new(&proportions)?;
                let number = self.num_mixtures;
                self.num_mixtures += 1;
                Stage::Mix { number, schedule, children: self.compile_children(children)? }
            }
            Tree::Concatenate { lengths, children } => {
                same_count("lengths", lengths.len(), children.len())?;
                let mut ends = Vec::with_capacity(lengths.len());
                let mut end = 0_u64;
                for len in lengths {
                    end = end.saturating_add(length("lengths", len)?.cast_unsigned());
                    ends.push(length("the sum of `lengths`", end)?);
                }
                let (total, ends) = (FloorDivisor::new(end), ends.into_boxed_slice());
                Stage::Concatenate { total, ends, children: self.compile_children(children)? }
            }
        })
    }

    fn compile_shared(&mut self, tree: Arc<Tree>) -> Result<Arc<Stage>> {
        let key = Arc::as_ptr(&tree);
        if let Some((_, stage, ids)) = self.shared.get(&key) {
            if let Some(&id) = self.ancestor_ids.intersection(ids).next() {
                return Err(reached_twice(id));
            }
            self.ids.extend(ids);
            return Ok(Arc::clone(stage));
        }
        let outer = std::mem::take(&mut self.ids);
        let stage = Arc::new(self.compile((*tree).clone())?);
        let ids = std::mem::replace(&mut self.ids, outer);
        self.ids.extend(&ids);
        self.shared.insert(key, (tree, Arc::clone(&stage), ids));
        Ok(stage)
    }

    fn compile_child(&mut self, child: Tree) -> Result<Box<Stage>> {
        self.compile(child).map(Box::new)
    }

    fn compile_children(&mut self, children: Vec<Tree>) -> Result<Box<[Stage]>> {
        children.into_iter().map(|child| self.compile(child)).collect()
    }

    /// The number of the column `id`; records that it has `part`.
    fn column(&mut self, id: u32, part: u32) -> Result<usize> {
        if self.ancestor_ids.contains(&id) {
            return Err(reached_twice(id));
        }
        self.ids.insert(id);
        let column = *self.column_numbers.entry(id).or_insert_with(|| {
            self.columns.push((id, false));
            self.columns.len() - 1
        });
        self.columns[column].1 |= part > 0;
        Ok(column)
    }
}

fn reached_twice(id: u32) -> Error {
    Error::InvalidArgument(format!("a position reaches two leaves or taps with the id {id}"))
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
    use std::sync::Arc;

    use super::{Column, Resolver};
    use crate::order::{MixSchedule, Permutation, Tree};
    use proptest::prelude::*;

    /// Resolves one position recursively: the reference for [`Resolver`].
    fn resolve_one(tree: &Tree, position: i64, reached: &mut Vec<(u32, u32, i64)>) {
        let split = |len: u64| {
            let len = len.cast_signed();
            (position.div_euclid(len), position.rem_euclid(len))
        };
        let moved = |len: u64, seed: u32, number: i64, offset: i64| {
            let seed = (i64::from(seed) + number).rem_euclid(1 << 32).try_into().unwrap();
            let permutation = Permutation::new(len, seed, 4).unwrap();
            permutation.apply(offset.try_into().unwrap()).unwrap().cast_signed()
        };
        let (child, position) = match tree {
            Tree::Leaf { id, part } => return reached.push((*id, *part, position)),
            Tree::Numbers { id, part, start, step, num_records } => {
                return reached.push((*id, *part, start + step * split(*num_records).1));
            }
            Tree::Tap { id, part, child } => {
                reached.push((*id, *part, position));
                (&**child, position)
            }
            Tree::Shuffle { num_records, seed, child } => {
                let (epoch, offset) = split(*num_records);
                (&**child, position - offset + moved(*num_records, *seed, epoch, offset))
            }
            Tree::WindowShuffle { num_records, window_size, seed, child } => {
                let divides_epoch = num_records.is_multiple_of(*window_size);
                let (epoch, in_epoch) =
                    if divides_epoch { (0, position) } else { split(*num_records) };
                let size = window_size.cast_signed();
                let (window, offset) = (in_epoch.div_euclid(size), in_epoch.rem_euclid(size));
                let left = num_records.cast_signed() - window * size;
                let len = if divides_epoch { size } else { size.min(left) };
                let number = epoch * num_records.div_ceil(*window_size).cast_signed() + window;
                let new_offset = moved(len.cast_unsigned(), *seed, number, offset);
                (&**child, position - offset + new_offset)
            }
            Tree::GroupShuffle { lens, seed, child } => {
                let (epoch, mut offset) = split(lens.iter().sum());
                let mut numbers: Vec<i64> = (0..lens.len() as u64).map(u64::cast_signed).collect();
                for number in &mut numbers {
                    *number = moved(lens.len() as u64, *seed, epoch, *number);
                }
                let start = position - offset;
                let mut found = 0;
                for number in numbers {
                    let number = usize::try_from(number).unwrap();
                    if offset < lens[number].cast_signed() {
                        found = lens[..number].iter().sum::<u64>().cast_signed() + offset;
                        break;
                    }
                    offset -= lens[number].cast_signed();
                }
                (&**child, start + found)
            }
            Tree::Slice { start, step, num_records, parent_len, child } => {
                let (epoch, offset) = split(*num_records);
                (&**child, start + offset * step + epoch * parent_len.cast_signed())
            }
            Tree::Wrap { num_records, child } => (&**child, split(*num_records).1),
            Tree::Take { indices, parent_len, child } => {
                let (epoch, offset) = split(indices.len() as u64);
                let index = indices[usize::try_from(offset).unwrap()];
                (&**child, index + epoch * parent_len.cast_signed())
            }
            Tree::Shared(child) => (&**child, position),
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
        resolve_one(child, position, reached);
    }

    fn resolve_each(tree: &Tree, positions: &[i64], num_ids: u32) -> Vec<Column> {
        let mut reached = vec![(Vec::new(), Vec::new(), Vec::new()); num_ids as usize];
        for (row, &position) in (0..).zip(positions) {
            let mut here = Vec::new();
            resolve_one(tree, position, &mut here);
            for (id, part, index) in here {
                reached[id as usize].0.push(row);
                reached[id as usize].1.push(index);
                reached[id as usize].2.push(part);
            }
        }
        let column = |(id, (rows, index, parts))| {
            let (rows, parts) = (Some(rows), Some(parts));
            Column { id, rows, index, wide: None, parts }
        };
        let columns = (0..).zip(reached).map(column);
        columns.filter(|column| !column.index.is_empty()).collect()
    }

    /// Gives every leaf and tap its own id, in the order of the columns.
    fn number(tree: &mut Tree, next: &mut u32) {
        match tree {
            Tree::Leaf { id, .. } | Tree::Numbers { id, .. } | Tree::Tap { id, .. } => {
                *id = *next;
                *next += 1;
            }
            _ => {}
        }
        match tree {
            Tree::Leaf { .. } | Tree::Numbers { .. } | Tree::Shared(_) => {}
            Tree::Mix { children, .. } | Tree::Concatenate { children, .. } => {
                for child in children {
                    number(child, next);
                }
            }
            Tree::Tap { child, .. }
            | Tree::Shuffle { child, .. }
            | Tree::WindowShuffle { child, .. }
            | Tree::GroupShuffle { child, .. }
            | Tree::Slice { child, .. }
            | Tree::Wrap { child, .. }
            | Tree::Take { child, .. } => number(child, next),
        }
    }

    /// Gives all leaves the id 0 and each tap its depth among taps, with different parts.
    fn share(tree: &mut Tree, num_ancestors: u32, next_part: &mut u32) {
        let mut new_part = || {
            *next_part += 1;
            *next_part - 1
        };
        match tree {
            Tree::Leaf { id, part } | Tree::Numbers { id, part, .. } => {
                (*id, *part) = (0, new_part());
            }
            Tree::Tap { id, part, child } => {
                (*id, *part) = (num_ancestors + 1, new_part());
                share(child, num_ancestors + 1, next_part);
            }
            Tree::Shared(_) => {}
            Tree::Mix { children, .. } | Tree::Concatenate { children, .. } => {
                for child in children {
                    share(child, num_ancestors, next_part);
                }
            }
            Tree::Shuffle { child, .. }
            | Tree::WindowShuffle { child, .. }
            | Tree::GroupShuffle { child, .. }
            | Tree::Slice { child, .. }
            | Tree::Wrap { child, .. }
            | Tree::Take { child, .. } => share(child, num_ancestors, next_part),
        }
    }

    /// Makes every join read its first child twice.
    fn repeat_children(tree: &mut Tree) {
        match tree {
            Tree::Leaf { .. } | Tree::Numbers { .. } | Tree::Shared(_) => {}
            Tree::Mix { children, .. } | Tree::Concatenate { children, .. } => {
                children.iter_mut().for_each(repeat_children);
                let first = Tree::Shared(Arc::new(children[0].clone()));
                for child in children.iter_mut().take(2) {
                    *child = first.clone();
                }
            }
            Tree::Tap { child, .. }
            | Tree::Shuffle { child, .. }
            | Tree::WindowShuffle { child, .. }
            | Tree::GroupShuffle { child, .. }
            | Tree::Slice { child, .. }
            | Tree::Wrap { child, .. }
            | Tree::Take { child, .. } => repeat_children(child),
        }
    }

    fn trees() -> impl Strategy<Value = Tree> {
        let leaf = prop_oneof![
            3 => Just(Tree::Leaf { id: 0, part: 0 }),
            1 => (1..9000_u64, -9..9_i64).prop_map(|(num_records, step)| Tree::Numbers {
                id: 0,
                part: 0,
                start: 5,
                step,
                num_records,
            }),
        ];
        leaf.prop_recursive(4, 20, 5, |inner| {
            let child = inner.clone().prop_map(Box::new);
            let len = prop_oneof![Just(1_u64), 700..800_u64, 9000..70_000_u64];
            let parts = prop::collection::vec((1..2000_u64, inner), 1..9);
            let lengths = (child.clone(), len.clone(), len, -90..90_i64, any::<u32>());
            prop_oneof![
                child.clone().prop_map(|child| Tree::Tap { id: 0, part: 0, child }),
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
                        Tree::GroupShuffle { lens: vec![n, 3, m, 1], seed, child: child.clone() },
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
        fn resolve_matches_resolve_each(
            mut tree in trees(),
            start in -100_000..100_000_i64,
            jumps in prop::collection::vec(-1_000_000..1_000_000_i64, 0..60),
            is_shared: bool,
            repeats_children: bool,
        ) {
            let mut num_ids = 0;
            if is_shared {
                share(&mut tree, 0, &mut 0);
                num_ids = 10;
            } else {
                number(&mut tree, &mut num_ids);
            }
            if repeats_children {
                repeat_children(&mut tree);
            }
            let mut resolver = Resolver::new(tree.clone()).unwrap();
            let run: Vec<i64> = (start..start + 80).collect();
            let ranged = resolver.resolve_range(start.into(), 80).unwrap();
            prop_assert_eq!(&ranged, &resolver.resolve(&run).unwrap());
            let wide: Vec<i128> = run.iter().map(|&position| position.into()).collect();
            prop_assert_eq!(ranged, resolver.resolve_wide(&wide).unwrap());
            for positions in [run, jumps] {
                let mut columns = resolver.resolve(&positions).unwrap();
                let all: Vec<i64> = (0..).take(positions.len()).collect();
                for column in &mut columns {
                    column.rows.get_or_insert_with(|| all.clone());
                    let all_one = vec![0; column.index.len()];
                    column.parts.get_or_insert(all_one);
                }
                columns.retain(|column| !column.index.is_empty());
                columns.sort_by_key(|column| column.id);
                prop_assert_eq!(columns, resolve_each(&tree, &positions, num_ids));
            }
        }
    }

    fn leaf(id: u32) -> Tree {
        Tree::Leaf { id, part: 0 }
    }

    #[test]
    fn shared_stages_are_compiled_once() {
        let mut tree = Arc::new(leaf(0));
        for _ in 0..100 {
            let children = vec![Tree::Shared(Arc::clone(&tree)), Tree::Shared(tree)];
            tree = Arc::new(Tree::Mix { proportions: vec![1, 1], children });
        }
        let mut resolver = Resolver::new(Tree::Shared(Arc::clone(&tree))).unwrap();
        assert_eq!(resolver.resolve(&[5]).unwrap()[0].index, [0]);
        let tap = |child| Tree::Tap { id: 0, part: 0, child: Box::new(child) };
        let shared = Tree::Shared(Arc::new(leaf(0)));
        let children = vec![shared.clone(), tap(shared)];
        assert!(Resolver::new(Tree::Mix { proportions: vec![1, 1], children }).is_err());
    }

    #[test]
    fn indices_beyond_64_bits_are_wide() {
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
        ];
        for tree in outside {
            let mut resolver = Resolver::new(tree).unwrap();
            assert!(resolver.resolve(&[i64::MIN]).unwrap()[0].wide.is_some());
            assert!(resolver.resolve(&[0]).unwrap()[0].wide.is_none());
        }
        let mut resolver = Resolver::new(leaf(0)).unwrap();
        let columns = resolver.resolve_range(i64::MAX.into(), 2).unwrap();
        assert_eq!(columns[0].wide, Some(vec![(1 << 63) - 1, 1 << 63]));
    }

    #[test]
    fn a_stage_without_records_accepts_only_an_empty_block() {
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
            Tree::Numbers { id: 0, part: 0, start: 1, step: 1, num_records: 0 },
        ];
        for tree in empty {
            let mut resolver = Resolver::new(tree).unwrap();
            assert!(resolver.resolve(&[0]).is_err());
            let columns = resolver.resolve(&[]).unwrap();
            assert!(columns.iter().all(|column| column.index.is_empty()));
        }
    }

    #[test]
    fn leaves_that_share_an_id_share_a_column() {
        let leaf = |part| Tree::Leaf { id: 7, part };
        let parts = vec![leaf(0), Tree::Leaf { id: 8, part: 0 }, leaf(5)];
        let tree = Tree::Concatenate { lengths: vec![2, 1, 1], children: parts };
        let columns = Resolver::new(tree).unwrap().resolve(&[3, 2, 0, 1]).unwrap();
        let expected = Column {
            id: 7,
            rows: Some(vec![0, 2, 3]),
            index: vec![0, 0, 1],
            wide: None,
            parts: Some(vec![5, 0, 0]),
        };
        assert_eq!(columns[0], expected);
        assert_eq!((columns[1].id, &columns[1].parts), (8, &None));
    }

    #[test]
    fn leaves_that_no_position_reaches_have_no_column() {
        let children = (0..1000).map(leaf).collect();
        let tree = Tree::Concatenate { lengths: vec![10; 1000], children };
        let columns = Resolver::new(tree).unwrap().resolve_range(95, 10).unwrap();
        let found: Vec<_> = columns.iter().map(|column| (column.id, column.index.len())).collect();
        assert_eq!(found, [(9, 5), (10, 5)]);
    }

    #[test]
    fn invalid_parameters_are_refused() {
        let invalid = [
            Tree::Tap { id: 1, part: 2, child: Box::new(leaf(1)) },
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
        for tree in invalid {
            assert!(Resolver::new(tree.clone()).is_err(), "{tree:?}");
        }
    }
}
