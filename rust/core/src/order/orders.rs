//! Shuffles the positions of a block within their epochs or windows, all runs in one pass.

use std::collections::HashMap;

use super::lanes::{self, Lane};
use super::permute::{Permutation, SHUFFLE_ROUNDS, round_keys};
use crate::{Error, Result};

/// With fewer lanes than this, whole orders are computed and cached for the next blocks.
const MIN_LANES: usize = 64;

/// Lanes that cost hardly more than one.
const FULL_LANES: u32 = 128;

/// The most records of an epoch whose order is cached when few positions are requested: a walk
/// then takes 256 steps or more.
const MAX_CACHED_LEN: u64 = 256;

/// Bytes of cached orders; at least half of them hold those used last.
const MAX_CACHED_BYTES: usize = 16 << 20;

/// The overhead of a cached order.
const ORDER_BYTES: usize = 64;

/// A run of positions in one epoch or window, which has its own order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// The seed of the order.
    pub(crate) seed: u32,
    /// The position of the first record.
    pub(crate) start: i64,
    /// How many records there are.
    pub(crate) len: i64,
    /// The run's range of offsets in the block, `from..to`.
    pub(crate) from: usize,
    pub(crate) to: usize,
}

/// Shuffles blocks; caches the orders of small epochs, which does not affect results.
#[derive(Clone, Debug, Default)]
pub(crate) struct Orders {
    recent: OrderCache,
    recent_bytes: usize,
    older: OrderCache,
}

/// By number of records and seed, the new index of each record.
type OrderCache = HashMap<(u64, u32), Box<[u16]>>;

impl Orders {
    /// Replaces every position of `index` by the one that its run's order puts there.
    pub(crate) fn apply(&mut self, runs: &[Run], index: &mut [i64]) -> Result<()> {
        let is_small = |run: &Run| run.len.cast_unsigned() <= lanes::MAX_RECORDS;
        let num_small: usize =
            runs.iter().filter(|run| is_small(run)).map(|run| run.to - run.from).sum();
        let is_small_block = num_small < MIN_LANES;
        let mut lanes_to_walk = Vec::new();
        let mut offsets = Vec::new();
        for run in runs {
            let block = &mut index[run.from..run.to];
            let num_records = run.len.cast_unsigned();
            if num_records == 1 {
                continue;
            }
            for position in &mut *block {
                *position -= run.start;
            }
            if !is_small(run) {
                permute(num_records, run.seed, block)?;
                add_start(run, block)?;
            } else if block.len() as u64 > num_records
                || (is_small_block && num_records <= MAX_CACHED_LEN)
            {
                let order = self.order(num_records, run.seed);
                for position in &mut *block {
                    *position = usize::try_from(*position).map_or(0, |at| order[at].into());
                }
                add_start(run, block)?;
            } else {
                let keys = narrow_keys(run.seed);
                let last = narrow(run.len - 1);
                for (offset, &position) in (run.from..run.to).zip(&*block) {
                    lanes_to_walk.push(Lane { keys, index: narrow(position), last });
                    offsets.push((offset, run.start));
                }
            }
        }
        let mut overflowing = None;
        lanes::walk(&lanes_to_walk, |number, new_index| {
            let (offset, start) = offsets[number];
            match start.checked_add(new_index.into()) {
                Some(position) => index[offset] = position,
                None => overflowing = Some(start),
            }
        });
        overflowing.map_or(Ok(()), |start| Err(overflow_error("shuffle", start)))
    }

    /// The order of a small epoch, from the cache if possible.
    fn order(&mut self, num_records: u64, seed: u32) -> &[u16] {
        let key = (num_records, seed);
        if !self.recent.contains_key(&key) {
            match self.older.remove(&key) {
                Some(order) => self.insert(key, order),
                None => self.compute_orders(num_records, seed),
            }
        }
        self.recent.get(&key).map_or(&[], |order| order)
    }

    /// Computes the order for `seed`, and those of the next epochs if they are cheap.
    fn compute_orders(&mut self, num_records: u64, seed: u32) {
        let len = usize::try_from(num_records).unwrap_or(1);
        let last = narrow(num_records.cast_signed() - 1);
        let num_orders = (FULL_LANES / (u32::from(last) + 1)).max(1);
        let seeds = (0..num_orders).map(|epoch| seed.wrapping_add(epoch));
        let lanes_of = |seed| {
            let keys = narrow_keys(seed);
            (0..=last).map(move |index| Lane { keys, index, last })
        };
        let lanes_to_walk: Vec<Lane> = seeds.clone().flat_map(lanes_of).collect();
        let mut orders = vec![0; lanes_to_walk.len()];
        lanes::walk(&lanes_to_walk, |number, index| orders[number] = index);
        for (seed, order) in seeds.zip(orders.chunks(len)).rev() {
            self.insert((num_records, seed), order.into());
        }
    }

    fn insert(&mut self, key: (u64, u32), order: Box<[u16]>) {
        let byte_len = ORDER_BYTES + size_of_val(&*order);
        if self.recent_bytes + byte_len > MAX_CACHED_BYTES / 2 {
            self.older = std::mem::take(&mut self.recent);
            self.recent_bytes = 0;
        }
        self.recent_bytes += byte_len;
        self.recent.insert(key, order);
    }
}

/// Permutes offsets in a large epoch.
fn permute(num_records: u64, seed: u32, block: &mut [i64]) -> Result<()> {
    let permutation = Permutation::new(num_records, seed, SHUFFLE_ROUNDS)?;
    if let [position] = block {
        *position = permutation.apply(position.cast_unsigned())?.cast_signed();
        return Ok(());
    }
    permutation.apply_block(block)
}

/// Turns offsets in the span of `run` back into positions.
fn add_start(run: &Run, block: &mut [i64]) -> Result<()> {
    // Only a span that starts near `i64::MAX` can overflow.
    let fits = run.start.checked_add(run.len - 1).is_some();
    if !fits && block.iter().any(|offset| offset.checked_add(run.start).is_none()) {
        return Err(overflow_error("shuffle", run.start));
    }
    for offset in block {
        *offset += run.start;
    }
    Ok(())
}

/// Blocks of 16 bits use the low 8 bits of each round's key.
fn narrow_keys(seed: u32) -> [u8; 4] {
    round_keys(seed).map(|key| key.to_le_bytes()[0])
}

fn narrow(index: i64) -> u16 {
    u16::try_from(index).unwrap_or(u16::MAX)
}

pub(crate) fn overflow_error(name: &str, position: i64) -> Error {
    Error::OutOfRange(format!("`{name}`: position {position} maps to one outside the 64-bit range"))
}

#[cfg(test)]
mod tests {
    use super::{MAX_CACHED_BYTES, Orders, Run, lanes};
    use crate::order::Permutation;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn orders_of_a_block_match_single_permutations(
            blocks in prop::collection::vec(
                prop::collection::vec(
                    (
                        0..6_u32,
                        prop_oneof![Just(1_i64), 30..40_i64, 250..20_000_i64, 65_000..90_000_i64],
                        -1_000_000..1_000_000_i64,
                        1..90_usize,
                    ),
                    0..6,
                ),
                1..6,
            ),
        ) {
            let mut orders = Orders::default();
            for spans in blocks {
                let (mut index, mut runs, mut expected) = (Vec::new(), Vec::new(), Vec::new());
                for (seed, len, start, count) in spans {
                    let offsets: Vec<i64> = (0..len).cycle().step_by(7).take(count).collect();
                    let from = index.len();
                    index.extend(offsets.iter().map(|offset| offset + start));
                    runs.push(Run { seed, start, len, from, to: index.len() });
                    let permutation = Permutation::new(len.cast_unsigned(), seed, 4).unwrap();
                    for offset in offsets {
                        let moved = permutation.apply(offset.cast_unsigned()).unwrap();
                        expected.push(start + moved.cast_signed());
                    }
                }
                orders.apply(&runs, &mut index).unwrap();
                prop_assert_eq!(index, expected);
            }
        }
    }

    #[test]
    fn cached_orders_are_bounded() {
        let mut orders = Orders::default();
        for seed in 0..1500 {
            let len = orders.order(lanes::MAX_RECORDS, seed).len();
            assert_eq!(len as u64, lanes::MAX_RECORDS);
            let cached: usize = orders
                .recent
                .values()
                .chain(orders.older.values())
                .map(|order| size_of_val(&**order))
                .sum();
            assert!(cached <= MAX_CACHED_BYTES);
        }
    }

    #[test]
    fn a_span_that_overflows_is_refused() {
        let mut orders = Orders::default();
        let start = i64::MAX - 5;
        for len in [10, 1000, 100_000] {
            let run = Run { seed: 1, start, len, from: 0, to: 6 };
            let mut index: Vec<i64> = (start..=i64::MAX).collect();
            let offsets: Vec<i64> = (0..6)
                .map(|offset| {
                    let permutation = Permutation::new(len.cast_unsigned(), 1, 4).unwrap();
                    permutation.apply(offset).unwrap().cast_signed()
                })
                .collect();
            let fits = offsets.iter().all(|offset| offset.checked_add(start).is_some());
            assert_eq!(orders.apply(&[run], &mut index).is_ok(), fits, "{len}");
        }
    }
}
