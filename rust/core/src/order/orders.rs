//! The orders of epochs and windows, applied to all positions of a block together.

use std::collections::HashMap;

use super::lanes::{self, Lane};
use super::permute::{Permutation, SHUFFLE_ROUNDS, round_keys};
use crate::{Error, Result};

/// Fewer lanes than this are filled up, with what is likely asked for next.
const FEW_LANES: usize = 64;

/// Lanes that cost hardly more than a single one.
const FULL_LANES: u32 = 128;

/// The most records of an epoch whose order is kept when few positions of it are asked for: a
/// walk is 256 blocks and more then.
const MAX_KEPT_LEN: u64 = 256;

/// Bytes of orders kept, half of them at least of those used last.
const KEPT_BYTES: usize = 16 << 20;

/// What an order takes besides its records.
const ORDER_BYTES: usize = 64;

/// A run of positions in one epoch or window, which is shuffled on its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// Chooses the order.
    pub(crate) seed: u32,
    /// The position of the first record.
    pub(crate) start: i64,
    /// How many records there are.
    pub(crate) len: i64,
    /// Where the run is in the block: its first place, and that after its last.
    pub(crate) from: usize,
    pub(crate) to: usize,
}

/// Orders of small epochs that were asked for in small blocks; results do not depend on them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Orders {
    recent: Kept,
    recent_bytes: usize,
    older: Kept,
}

/// For a number of records and a seed, where each record goes.
type Kept = HashMap<(u64, u32), Box<[u16]>>;

impl Orders {
    /// Moves every position of `index` within its run's span, as that span's order says.
    pub(crate) fn apply(&mut self, runs: &[Run], index: &mut [i64]) -> Result<()> {
        let is_small = |run: &Run| run.len.cast_unsigned() <= lanes::MAX_RECORDS;
        let num_small: usize =
            runs.iter().filter(|run| is_small(run)).map(|run| run.to - run.from).sum();
        let are_few = num_small < FEW_LANES;
        let mut walking = Vec::new();
        let mut places = Vec::new();
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
                moved(num_records, run.seed, block)?;
                settled(run, block)?;
            } else if block.len() as u64 > num_records || (are_few && num_records <= MAX_KEPT_LEN) {
                let order = self.order(num_records, run.seed);
                for position in &mut *block {
                    *position = usize::try_from(*position).map_or(0, |at| order[at].into());
                }
                settled(run, block)?;
            } else {
                let keys = narrow_keys(run.seed);
                let last = narrow(run.len - 1);
                for (place, &position) in (run.from..run.to).zip(&*block) {
                    walking.push(Lane { keys, index: narrow(position), last });
                    places.push((place, run.start));
                }
            }
        }
        let mut is_outside = None;
        lanes::walk(&walking, |number, moved| {
            let (place, start) = places[number];
            match start.checked_add(moved.into()) {
                Some(position) => index[place] = position,
                None => is_outside = Some(start),
            }
        });
        is_outside.map_or(Ok(()), |start| Err(leaves_range("shuffle", start)))
    }

    /// The order of a small epoch, kept for the next block.
    fn order(&mut self, num_records: u64, seed: u32) -> &[u16] {
        let key = (num_records, seed);
        if !self.recent.contains_key(&key) {
            match self.older.remove(&key) {
                Some(order) => self.keep(key, order),
                None => self.make_orders(num_records, seed),
            }
        }
        self.recent.get(&key).map_or(&[], |order| order)
    }

    /// Makes the order that `seed` chooses, and those of the next epochs while that costs little.
    fn make_orders(&mut self, num_records: u64, seed: u32) {
        let len = usize::try_from(num_records).unwrap_or(1);
        let last = narrow(num_records.cast_signed() - 1);
        let num_orders = (FULL_LANES / (u32::from(last) + 1)).max(1);
        let seeds = (0..num_orders).map(|epoch| seed.wrapping_add(epoch));
        let lanes_of = |seed| {
            let keys = narrow_keys(seed);
            (0..=last).map(move |index| Lane { keys, index, last })
        };
        let walking: Vec<Lane> = seeds.clone().flat_map(lanes_of).collect();
        let mut moved = vec![0; walking.len()];
        lanes::walk(&walking, |number, index| moved[number] = index);
        for (seed, order) in seeds.zip(moved.chunks(len)).rev() {
            self.keep((num_records, seed), order.into());
        }
    }

    fn keep(&mut self, key: (u64, u32), order: Box<[u16]>) {
        let byte_len = ORDER_BYTES + size_of_val(&*order);
        if self.recent_bytes + byte_len > KEPT_BYTES / 2 {
            self.older = std::mem::take(&mut self.recent);
            self.recent_bytes = 0;
        }
        self.recent_bytes += byte_len;
        self.recent.insert(key, order);
    }
}

/// Replaces every position of a large epoch by where its record goes.
fn moved(num_records: u64, seed: u32, block: &mut [i64]) -> Result<()> {
    let permutation = Permutation::new(num_records, seed, SHUFFLE_ROUNDS)?;
    if let [position] = block {
        *position = permutation.apply(position.cast_unsigned())?.cast_signed();
        return Ok(());
    }
    permutation.apply_block(block)
}

/// Makes places in the span of `run` positions again.
fn settled(run: &Run, block: &mut [i64]) -> Result<()> {
    // Only a span that begins right before the end of the range can lead out of it.
    let fits = run.start.checked_add(run.len - 1).is_some();
    if !fits && block.iter().any(|place| place.checked_add(run.start).is_none()) {
        return Err(leaves_range("shuffle", run.start));
    }
    for place in block {
        *place += run.start;
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

pub(crate) fn leaves_range(name: &str, position: i64) -> Error {
    Error::OutOfRange(format!("`{name}`: position {position} leads outside the 64-bit range"))
}

#[cfg(test)]
mod tests {
    use super::{KEPT_BYTES, Orders, Run, lanes};
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
                    let places: Vec<i64> = (0..len).cycle().step_by(7).take(count).collect();
                    let from = index.len();
                    index.extend(places.iter().map(|place| place + start));
                    runs.push(Run { seed, start, len, from, to: index.len() });
                    let permutation = Permutation::new(len.cast_unsigned(), seed, 4).unwrap();
                    for place in places {
                        let moved = permutation.apply(place.cast_unsigned()).unwrap();
                        expected.push(start + moved.cast_signed());
                    }
                }
                orders.apply(&runs, &mut index).unwrap();
                prop_assert_eq!(index, expected);
            }
        }
    }

    #[test]
    fn orders_kept_are_bounded() {
        let mut orders = Orders::default();
        for seed in 0..1500 {
            let len = orders.order(lanes::MAX_RECORDS, seed).len();
            assert_eq!(len as u64, lanes::MAX_RECORDS);
            let kept: usize = orders
                .recent
                .values()
                .chain(orders.older.values())
                .map(|order| size_of_val(&**order))
                .sum();
            assert!(kept <= KEPT_BYTES);
        }
    }

    #[test]
    fn a_span_that_leads_out_of_the_range_is_refused() {
        let mut orders = Orders::default();
        let start = i64::MAX - 5;
        for len in [10, 1000, 100_000] {
            let run = Run { seed: 1, start, len, from: 0, to: 6 };
            let mut index: Vec<i64> = (start..=i64::MAX).collect();
            let places: Vec<i64> = (0..6)
                .map(|place| {
                    let permutation = Permutation::new(len.cast_unsigned(), 1, 4).unwrap();
                    permutation.apply(place).unwrap().cast_signed()
                })
                .collect();
            let fits = places.iter().all(|place| place.checked_add(start).is_some());
            assert_eq!(orders.apply(&[run], &mut index).is_ok(), fits, "{len}");
        }
    }
}
