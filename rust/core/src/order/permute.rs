//! A keyed bijection of `0..num_records`: shuffles an epoch without storing its order.
//!
//! Saved states depend on every bit of it, so `tests/golden/order.json` pins it. It is Grain's
//! `index_shuffle`, except where that is no bijection: at 4^k+1 records, k >= 8, its blocks do
//! not hold the largest index, and two indices map to one. Here blocks always hold it.

use super::seed::{fill_seed_seq, seed_seq};
use crate::{Error, Result};

/// The number of rounds of every shuffle of a pipeline.
pub const SHUFFLE_ROUNDS: u32 = 4;

/// The most records of a permutation: every non-negative `i64` is an index.
pub const MAX_RECORDS: u64 = 1 << 63;

/// Blocks are encrypted in multiples of this number, to fill vector registers.
const LANES: usize = 16;

/// Indices in flight at once; those that keep walking are compacted, so that lanes stay full.
const POOL_LEN: usize = 256;

/// A bijection of `0..num_records` that depends on a seed.
#[derive(Clone, Debug)]
pub struct Permutation {
    num_records: u64,
    half_bits: u32,
    round_keys: Box<[u32]>,
}

impl Permutation {
    /// The permutation of `0..num_records` for `seed`.
    ///
    /// # Errors
    ///
    /// If `num_records` is 0 or above [`MAX_RECORDS`], or `rounds` is odd or outside 4 to 1024.
    pub fn new(num_records: u64, seed: u32, rounds: u32) -> Result<Self> {
        if num_records == 0 || num_records > MAX_RECORDS {
            let text = format!("`num_records` must be in [1, 2**63], got {num_records}");
            return Err(Error::InvalidArgument(text));
        }
        if !(4..=1024).contains(&rounds) || rounds % 2 == 1 {
            return Err(Error::InvalidArgument(format!(
                "rounds must be an even integer between 4 and 1024, but got rounds = {rounds}"
            )));
        }
        let round_keys = seed_seq(seed, rounds as usize).into_boxed_slice();
        Ok(Self { num_records, half_bits: half_bits(num_records - 1), round_keys })
    }

    /// The number of records.
    pub fn num_records(&self) -> u64 {
        self.num_records
    }

    /// The permuted `index`.
    ///
    /// # Errors
    ///
    /// If `index` is not less than the number of records.
    pub fn apply(&self, index: u64) -> Result<u64> {
        if index >= self.num_records {
            return Err(self.out_of_range_error(index));
        }
        if self.num_records == 1 {
            return Ok(0);
        }
        let mut left = [index >> self.half_bits];
        let mut right = [index & ((1 << self.half_bits) - 1)];
        loop {
            encrypt_wide(&mut left, &mut right, &self.round_keys, self.half_bits);
            let value = (left[0] << self.half_bits) | right[0];
            if value < self.num_records {
                return Ok(value);
            }
        }
    }

    /// Replaces every index by the permuted one.
    ///
    /// # Errors
    ///
    /// If an index is negative or not less than the number of records; `index` is unchanged then.
    pub fn apply_block(&self, index: &mut [i64]) -> Result<()> {
        // Negative indices are huge as `u64`, so one comparison finds both kinds.
        let outside = index.iter().find(|index| index.cast_unsigned() >= self.num_records);
        if let Some(&index) = outside {
            return Err(self.out_of_range_error(index));
        }
        if self.num_records == 1 {
            index.fill(0);
        } else if self.half_bits <= 16 {
            permute_narrow(index, self.num_records - 1, &self.round_keys, self.half_bits);
        } else {
            permute_wide(index, self.num_records - 1, &self.round_keys, self.half_bits);
        }
        Ok(())
    }

    fn out_of_range_error(&self, index: impl std::fmt::Display) -> Error {
        let max_index = self.num_records - 1;
        Error::InvalidArgument(format!(
            "index must be in [0, max_index], but got index = {index} and max_index = {max_index}"
        ))
    }
}

/// The round keys of a shuffle of a pipeline.
pub(super) fn round_keys(seed: u32) -> [u32; SHUFFLE_ROUNDS as usize] {
    let mut keys = [0; SHUFFLE_ROUNDS as usize];
    fill_seed_seq(seed, &mut keys);
    keys
}

/// Half the bits of the block that holds every index up to `max_index`, at least 8.
///
/// Grain takes `ceil(log2(max_index))` bits, rounded up to even, which differs only where it is
/// too few.
fn half_bits(max_index: u64) -> u32 {
    let bits = u64::BITS - max_index.leading_zeros();
    bits.max(16).div_ceil(2)
}

/// Defines the encryption of a group of blocks in words of one width, and the walk of a block
/// of indices with it.
macro_rules! cipher {
    ($encrypt:ident, $walk:ident, $word:ty, $word_of:path) => {
        /// Encrypts blocks given as their halves, round by round: each round is a loop over
        /// slices that the compiler vectorizes.
        #[inline]
        fn $encrypt(left: &mut [$word], right: &mut [$word], round_keys: &[u32], half_bits: u32) {
            let mask: $word = (1 << half_bits) - 1;
            let round = |into: &mut [$word], from: &[$word], key: u32| {
                let key = <$word>::from(key);
                for (into, &half) in into.iter_mut().zip(from) {
                    // Concatenated with itself, a half is rotated by one shift.
                    let twice = half | (half << half_bits);
                    let (once, eight) = (twice >> (half_bits - 1), twice >> (half_bits - 8));
                    *into = (*into ^ (once & eight) ^ (twice >> (half_bits - 2)) ^ key) & mask;
                }
            };
            for keys in round_keys.chunks_exact(2) {
                round(left, right, keys[0]);
                round(right, left, keys[1]);
            }
        }

        /// Encrypts every index until it is at most `max_index` again (cycle walking).
        fn $walk(index: &mut [i64], max_index: u64, round_keys: &[u32], half_bits: u32) {
            let max_index = $word_of(max_index);
            let mask: $word = (1 << half_bits) - 1;
            let mut left: [$word; POOL_LEN] = [0; POOL_LEN];
            let mut right: [$word; POOL_LEN] = [0; POOL_LEN];
            let mut offsets = [0_usize; POOL_LEN];
            let (mut num_inserted, mut live) = (0, 0);
            while live > 0 || num_inserted < index.len() {
                let num_new = (POOL_LEN - live).min(index.len() - num_inserted);
                for (lane, offset) in (live..).zip(num_inserted..num_inserted + num_new) {
                    let value = $word_of(index[offset].cast_unsigned());
                    left[lane] = value >> half_bits;
                    right[lane] = value & mask;
                    offsets[lane] = offset;
                }
                num_inserted += num_new;
                live += num_new;
                // Whole vectors: the contents of lanes that are not live do not matter.
                let lanes = live.next_multiple_of(LANES);
                $encrypt(&mut left[..lanes], &mut right[..lanes], round_keys, half_bits);
                let mut walking = 0;
                for lane in 0..live {
                    let (high, low, offset) = (left[lane], right[lane], offsets[lane]);
                    let value = (high << half_bits) | low;
                    // Stored without a branch: a value out of range is overwritten later.
                    index[offset] = u64::from(value).cast_signed();
                    left[walking] = high;
                    right[walking] = low;
                    offsets[walking] = offset;
                    walking += usize::from(value > max_index);
                }
                live = walking;
            }
        }
    };
}

cipher!(encrypt_narrow, permute_narrow, u32, narrow);
cipher!(encrypt_wide, permute_wide, u64, std::convert::identity);

#[expect(clippy::cast_possible_truncation, reason = "blocks of at most 32 bits hold the index")]
fn narrow(index: u64) -> u32 {
    index as u32
}

#[cfg(test)]
mod tests {
    use super::{Permutation, SHUFFLE_ROUNDS, half_bits};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn apply_block_matches_apply(
            num_records in prop_oneof![1..300_000_u64, 1..=1_u64 << 63],
            seed: u32,
            rounds in prop_oneof![Just(4_u32), Just(6), Just(40)],
            picks in prop::collection::vec(any::<u64>(), 0..40),
        ) {
            // Walks below 4000 records are long; the test of whole epochs covers them.
            prop_assume!(num_records > 4000);
            let permutation = Permutation::new(num_records, seed, rounds).unwrap();
            let picks: Vec<u64> = picks.iter().map(|pick| pick % num_records).collect();
            let mut block: Vec<i64> = picks.iter().map(|pick| pick.cast_signed()).collect();
            permutation.apply_block(&mut block).unwrap();
            for (pick, moved) in picks.into_iter().zip(block) {
                prop_assert_eq!(permutation.apply(pick).unwrap().cast_signed(), moved);
            }
        }
    }

    #[test]
    fn every_epoch_visits_every_record_once() {
        for num_records in [1, 3, 1000, 65_535, 65_536, 65_537, 262_145] {
            for seed in [7, u32::MAX] {
                let permutation = Permutation::new(num_records, seed, SHUFFLE_ROUNDS).unwrap();
                let mut order: Vec<i64> = (0..num_records.cast_signed()).collect();
                permutation.apply_block(&mut order).unwrap();
                assert_eq!(
                    order[order.len() / 2].cast_unsigned(),
                    permutation.apply(num_records / 2).unwrap()
                );
                order.sort_unstable();
                assert!(order.into_iter().eq(0..num_records.cast_signed()), "{num_records} {seed}");
            }
        }
    }

    #[test]
    fn blocks_hold_the_largest_index_and_are_grains_elsewhere() {
        let mut differing = Vec::new();
        for max_index in (1..300_000_u64).chain((19..48).map(|bits| 1 << bits)) {
            assert!(max_index >> (2 * half_bits(max_index)) == 0);
            #[expect(
                clippy::cast_precision_loss,
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "as Grain"
            )]
            let grain = ((max_index as f64).log2().ceil() as u32).max(16).div_ceil(2);
            if half_bits(max_index) != grain {
                differing.push(max_index);
            }
        }
        // Sizes 4^k + 1.
        let powers: Vec<u64> = (8..24).map(|k| 1 << (2 * k)).collect();
        assert_eq!(differing, powers);
    }

    #[test]
    fn indices_outside_are_refused_and_left_alone() {
        let permutation = Permutation::new(10, 42, 4).unwrap();
        for outside in [-1, 10, i64::MAX, i64::MIN] {
            let mut block = [3, outside];
            assert!(permutation.apply_block(&mut block).is_err());
            assert_eq!(block, [3, outside]);
        }
        assert!(permutation.apply(10).is_err());
    }

    #[test]
    fn rounds_and_sizes_outside_their_range_are_refused() {
        for rounds in [0, 2, 5, 1026] {
            assert!(Permutation::new(10, 0, rounds).is_err(), "{rounds}");
        }
        assert!(Permutation::new(0, 0, 4).is_err());
        assert!(Permutation::new((1 << 63) + 1, 0, 4).is_err());
        assert!(Permutation::new(1 << 63, 0, 1024).is_ok());
    }
}
