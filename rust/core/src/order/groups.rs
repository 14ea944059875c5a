//! Shuffles groups of consecutive records as wholes: the records of a group stay together, in order.
//!
//! The order of an epoch is a table with an entry for each group, computed when a position of that
//! epoch is first resolved. So it is a function of seed and position, and nothing of it is saved.

use std::sync::{Arc, Mutex};

use super::floor::FloorDivisor;
use super::orders::overflow_error;
use super::permute::{Permutation, SHUFFLE_ROUNDS};
use crate::try_alloc::try_with_capacity;
use crate::{Error, Result};

/// The orders of this many epochs are kept; a block may reach from one epoch into the next.
const MAX_KEPT: usize = 2;

/// Groups of consecutive records, which are shuffled.
#[derive(Debug, Clone)]
pub(crate) struct Groups {
    num_records: FloorDivisor,
    epoch_len: i64,
    seed: u32,
    /// Where each group starts, and the number of records.
    starts: Arc<[i64]>,
    /// Those of the epochs that were last used.
    recent: Arc<Mutex<Vec<Arc<EpochOrder>>>>,
}

/// The order of the groups in one epoch.
#[derive(Debug)]
struct EpochOrder {
    epoch: i64,
    /// The position in the epoch after the last record of each group, in order.
    ends: Vec<i64>,
    /// The number of each group, in order.
    groups: Vec<usize>,
}

impl Groups {
    /// Groups with `lens` records each; epoch `e` has the seed `seed + e`.
    pub(crate) fn new(lens: &[u64], seed: u32) -> Result<Self> {
        let mut starts = try_with_capacity(lens.len() + 1, || format!("{} groups", lens.len()))?;
        let mut end = 0_i64;
        starts.push(end);
        for &len in lens {
            let next = i64::try_from(len).ok().and_then(|len| end.checked_add(len));
            end = next.ok_or_else(|| {
                Error::InvalidArgument("groups must have less than 2^63 records".to_owned())
            })?;
            starts.push(end);
        }
        Ok(Self {
            num_records: FloorDivisor::new(end.cast_unsigned()),
            epoch_len: end,
            seed,
            starts: starts.into(),
            recent: Arc::default(),
        })
    }

    /// Replaces positions by those of the records there.
    pub(crate) fn apply(&self, index: &mut [i64]) -> Result<()> {
        if let (true, Some(position)) = (self.num_records.is_zero(), index.first()) {
            let text = format!("`shuffle` of an empty dataset has no position {position}");
            return Err(Error::OutOfRange(text));
        }
        let mut order: Option<Arc<EpochOrder>> = None;
        // The group of the last position: where it starts in the epoch, where it ends, and how far
        // its records are moved.
        let mut group = (0, 0, 0);
        for position in index {
            let (epoch, offset) = self.num_records.div_mod(*position);
            let of_epoch = match order.take() {
                Some(order) if order.epoch == epoch => order,
                _ => {
                    group = (0, 0, 0);
                    self.order(epoch)?
                }
            };
            if !(group.0..group.1).contains(&offset) {
                group = self.group_at(&of_epoch, offset);
            }
            order = Some(of_epoch);
            let record = epoch.checked_mul(self.epoch_len);
            let record = record.and_then(|start| start.checked_add(offset + group.2));
            *position = record.ok_or_else(|| overflow_error("shuffle", *position))?;
        }
        Ok(())
    }

    /// The number of records in an epoch.
    pub(crate) fn num_records(&self) -> u64 {
        self.num_records.divisor()
    }

    /// The record, in its epoch, that `offset` of `epoch` is replaced by.
    pub(crate) fn record_at(&self, epoch: i64, offset: i64) -> Result<i64> {
        Ok(offset + self.group_at(&*self.order(epoch)?, offset).2)
    }

    fn group_at(&self, order: &EpochOrder, offset: i64) -> (i64, i64, i64) {
        let number = order.ends.partition_point(|&end| end <= offset);
        let start = if number == 0 { 0 } else { order.ends[number - 1] };
        (start, order.ends[number], self.starts[order.groups[number]] - start)
    }

    /// The order of `epoch`.
    fn order(&self, epoch: i64) -> Result<Arc<EpochOrder>> {
        // Never waits: in a forked child, a thread of the parent may hold the lock.
        if let Ok(recent) = self.recent.try_lock()
            && let Some(order) = recent.iter().find(|order| order.epoch == epoch)
        {
            return Ok(Arc::clone(order));
        }
        let order = Arc::new(self.new_order(epoch)?);
        if let Ok(mut recent) = self.recent.try_lock() {
            if recent.len() == MAX_KEPT {
                recent.remove(0);
            }
            recent.push(Arc::clone(&order));
        }
        Ok(order)
    }

    fn new_order(&self, epoch: i64) -> Result<EpochOrder> {
        let num_groups = self.starts.len() - 1;
        let mut order: Vec<i64> =
            try_with_capacity(num_groups, || format!("the order of {num_groups} groups"))?;
        order.extend(0..i64::try_from(num_groups).unwrap_or(i64::MAX));
        let [a, b, c, d, ..] = i64::from(self.seed).wrapping_add(epoch).to_le_bytes();
        let seed = u32::from_le_bytes([a, b, c, d]);
        Permutation::new(num_groups as u64, seed, SHUFFLE_ROUNDS)?.apply_block(&mut order)?;
        let groups: Vec<usize> =
            order.iter().map(|&group| usize::try_from(group).unwrap_or(usize::MAX)).collect();
        let mut end = 0;
        let ends = groups.iter().map(|&group| {
            end += self.starts[group + 1] - self.starts[group];
            end
        });
        Ok(EpochOrder { epoch, ends: ends.collect(), groups })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn applied(lens: &[u64], seed: u32, positions: impl Iterator<Item = i64>) -> Vec<i64> {
        let mut index: Vec<i64> = positions.collect();
        Groups::new(lens, seed).unwrap().apply(&mut index).unwrap();
        index
    }

    /// The order, written out: shuffled groups, each with its records.
    fn slow(lens: &[u64], seed: u32, epoch: i64) -> Vec<i64> {
        let mut numbers: Vec<i64> = (0..lens.len().cast_signed() as i64).collect();
        let seed = u32::try_from(i64::from(seed) + epoch).unwrap();
        Permutation::new(lens.len() as u64, seed, SHUFFLE_ROUNDS)
            .unwrap()
            .apply_block(&mut numbers)
            .unwrap();
        let num_records: u64 = lens.iter().sum();
        let mut order = Vec::new();
        for number in numbers {
            let number = usize::try_from(number).unwrap();
            let start: u64 = lens[..number].iter().sum();
            let records = (start..start + lens[number])
                .map(|record| i64::try_from(record + num_records * epoch.unsigned_abs()).unwrap());
            order.extend(records);
        }
        order
    }

    proptest! {
        #[test]
        fn the_order_is_the_one_written_out(
            lens in prop::collection::vec(0..20_u64, 1..30),
            seed in 0..1000_u32,
            places in prop::collection::vec((0..3_i64, any::<u32>()), 0..100),
        ) {
            let len = lens.iter().sum::<u64>().cast_signed();
            prop_assume!(len > 0);
            for epoch in 0..3 {
                let found = applied(&lens, seed, epoch * len..(epoch + 1) * len);
                prop_assert_eq!(&found, &slow(&lens, seed, epoch));
            }
            // In any order, and across epochs.
            let all = applied(&lens, seed, 0..3 * len);
            let mut backwards = applied(&lens, seed, (0..3 * len).rev());
            backwards.reverse();
            prop_assert_eq!(&all, &backwards);
            let any_order: Vec<i64> =
                places.iter().map(|&(epoch, at)| epoch * len + i64::from(at) % len).collect();
            let found = applied(&lens, seed, any_order.iter().copied());
            let expected = any_order.iter().map(|&at| all[usize::try_from(at).unwrap()]);
            prop_assert_eq!(found, expected.collect::<Vec<_>>());
        }
    }

    #[test]
    fn epochs_have_orders_of_their_own_and_no_records_are_refused() {
        let lens = [1; 100];
        let first = applied(&lens, 7, 0..100);
        let second: Vec<i64> = applied(&lens, 7, 100..200).iter().map(|at| at - 100).collect();
        assert_ne!(first, second);
        assert_ne!(first, (0..100).collect::<Vec<_>>());
        let empty = Groups::new(&[], 7).unwrap();
        assert!(empty.apply(&mut [0]).is_err());
        assert!(Groups::new(&[u64::MAX], 7).is_err());
        assert!(Groups::new(&[3], 7).unwrap().apply(&mut [i64::MAX]).is_ok());
    }
}
