//! Resolves positions whose indices leave the 64-bit range, one by one, in 128 bits.
//!
//! Epochs of a slice of an endless dataset are 2^63 - 1 positions apart upstream. Stages that end
//! such a detour (a repetition, a range) bring indices back into 64 bits.

use super::column::Column;
use super::mix::MixSchedule;
use super::permute::{Permutation, SHUFFLE_ROUNDS};
use super::stage::Stage;
use crate::try_alloc::try_with_capacity;
use crate::{Error, Result};

/// The entries of one column: rows, indices and parts.
#[derive(Default)]
struct Entries {
    rows: Vec<i64>,
    index: Vec<i128>,
    parts: Vec<u32>,
}

/// The columns of `positions`, as `Resolver::resolve` has them.
pub(super) fn resolve(
    root: &Stage,
    columns: &[(u32, bool)],
    positions: impl ExactSizeIterator<Item = i128>,
) -> Result<Vec<Column>> {
    let block_len = positions.len();
    drop(try_with_capacity::<i128>(block_len, || format!("{block_len} positions"))?);
    let mut found: Vec<Entries> = columns.iter().map(|_| Entries::default()).collect();
    for (row, position) in (0..).zip(positions) {
        resolve_one(root, position, |column, index, part| {
            found[column].rows.push(row);
            found[column].index.push(index);
            found[column].parts.push(part);
        })?;
    }
    let found = columns.iter().zip(found).filter(|(_, entries)| !entries.rows.is_empty());
    Ok(found
        .map(|(&(id, has_parts), Entries { rows, index, parts })| {
            let narrow: std::result::Result<Vec<i64>, _> =
                index.iter().map(|&index| i64::try_from(index)).collect();
            let rows = (rows.len() < block_len).then_some(rows);
            let parts = has_parts.then_some(parts);
            let (index, wide) = match narrow {
                Ok(index) => (index, None),
                Err(_) => (Vec::new(), Some(index)),
            };
            Column { id, rows, index, wide, parts }
        })
        .collect())
}

/// Calls `reach` with each column that `position` reaches, its index there and the part.
fn resolve_one(
    mut stage: &Stage,
    mut position: i128,
    mut reach: impl FnMut(usize, i128, u32),
) -> Result<()> {
    loop {
        let at = position;
        let overflow = || {
            Error::OutOfRange(format!(
                "position {at} of the dataset leads outside the 128-bit range"
            ))
        };
        let split = |len: u64| {
            let empty = || Error::OutOfRange(format!("an empty dataset has no position {at}"));
            let len = i128::from(len);
            Ok::<_, Error>((
                at.checked_div_euclid(len).ok_or_else(empty)?,
                at.checked_rem_euclid(len).ok_or_else(empty)?,
            ))
        };
        (stage, position) = match stage {
            Stage::Leaf { column, part } => {
                reach(*column, position, *part);
                return Ok(());
            }
            Stage::Numbers { column, part, start, step, num_records } => {
                let offset = split(num_records.divisor())?.1;
                reach(*column, i128::from(*start) + offset * i128::from(*step), *part);
                return Ok(());
            }
            Stage::Tap { column, part, child } => {
                reach(*column, position, *part);
                (&**child, position)
            }
            Stage::Shuffle { num_records, seed, child, .. } => {
                let len = num_records.divisor();
                let (epoch, offset) = split(len)?;
                (&**child, position - offset + shuffled(offset, len, *seed, epoch)?)
            }
            Stage::WindowShuffle { windows, seed, child } => {
                let (epoch_len, per_epoch) = windows.of_epoch();
                let (epoch, offset) = split(epoch_len)?;
                let window = windows.at(narrow(offset)).ok_or_else(overflow)?;
                let number = epoch.checked_mul(per_epoch.into()).ok_or_else(overflow)?;
                let number = number + i128::from(window.number);
                let start = i128::from(window.start);
                let len = window.len.cast_unsigned();
                let moved = shuffled(offset - start, len, *seed, number)?;
                (&**child, position - offset + start + moved)
            }
            Stage::GroupShuffle { groups, child } => {
                let (epoch, offset) = split(groups.num_records())?;
                let record = groups.record_at(low_bits(epoch), narrow(offset))?;
                (&**child, position - offset + i128::from(record))
            }
            Stage::Slice { start, step, num_records, parent_len, child } => {
                let (epoch, offset) = split(num_records.divisor())?;
                let first = epoch.checked_mul(i128::from(*parent_len)).ok_or_else(overflow)?;
                let record = i128::from(*start) + offset * i128::from(*step);
                (&**child, first.checked_add(record).ok_or_else(overflow)?)
            }
            Stage::Wrap { num_records, child } => (&**child, split(num_records.divisor())?.1),
            Stage::Take { indices, num_records, parent_len, child } => {
                let (epoch, offset) = split(num_records.divisor())?;
                let first = epoch.checked_mul(i128::from(*parent_len)).ok_or_else(overflow)?;
                let record = usize::try_from(offset).ok().and_then(|at| indices.get(at));
                let record = i128::from(*record.ok_or_else(overflow)?);
                (&**child, first.checked_add(record).ok_or_else(overflow)?)
            }
            Stage::Shared(child) => (&**child, position),
            Stage::Mix { schedule, children, .. } => {
                let (part, key) = mixed(schedule, position);
                (&children[part as usize], key)
            }
            Stage::Concatenate { total, ends, children } => {
                let (epoch, record) = split(total.divisor())?;
                let part = ends.partition_point(|&end| i128::from(end) <= record);
                let start = if part == 0 { 0 } else { i128::from(ends[part - 1]) };
                let len = i128::from(ends[part]) - start;
                let first = epoch.checked_mul(len).ok_or_else(overflow)?;
                (&children[part], first + record - start)
            }
        };
    }
}

/// Where `offset` of an epoch or window goes in its order.
fn shuffled(offset: i128, num_records: u64, seed: u32, number: i128) -> Result<i128> {
    let [a, b, c, d, ..] = (i128::from(seed) + number).to_le_bytes();
    let permutation =
        Permutation::new(num_records, u32::from_le_bytes([a, b, c, d]), SHUFFLE_ROUNDS)?;
    Ok(i128::from(permutation.apply(narrow(offset).cast_unsigned())?))
}

/// The dataset of a mixture at `position`, and the position in it: `choose` of the first period.
fn mixed(schedule: &MixSchedule, position: i128) -> (u32, i128) {
    let len = i128::from(schedule.period_len());
    let (period, offset) = (position.div_euclid(len), position.rem_euclid(len));
    let (part, key) = schedule.choose(narrow(offset));
    // No overflow: a dataset has no more positions than the mixture.
    (part, i128::from(key) + period * i128::from(schedule.proportion(part)))
}

/// An offset within a dataset, which has less than 2^63 records.
fn narrow(offset: i128) -> i64 {
    i64::try_from(offset).unwrap_or(i64::MAX)
}

/// The number of an epoch, of which only the lower 32 bits count.
fn low_bits(epoch: i128) -> i64 {
    i64::try_from(epoch.rem_euclid(1 << 32)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use crate::order::{Resolver, Tree};

    #[test]
    fn epochs_of_slices_of_an_endless_dataset_go_on() {
        let endless = |child| Tree::Slice {
            start: 2,
            step: 1,
            num_records: 4,
            parent_len: i64::MAX.cast_unsigned(),
            child: Box::new(child),
        };
        let wrapped = Tree::Wrap { num_records: 5, child: Box::new(Tree::Leaf { id: 0, part: 0 }) };
        let mut resolver = Resolver::new(endless(endless(wrapped))).unwrap();
        let index = &resolver.resolve_range(0, 12).unwrap()[0].index;
        // 2^63 - 1 is 2 modulo 5, and position p of the inner slice is 4 * (p // 4) epochs on.
        let expected: Vec<i64> = (0..12_i128)
            .map(|at| {
                let outer = 2 + at % 4 + at / 4 * i128::from(i64::MAX);
                let inner = 2 + outer % 4 + outer / 4 * i128::from(i64::MAX);
                i64::try_from(inner % 5).unwrap()
            })
            .collect();
        assert_eq!(*index, expected);
    }
}
