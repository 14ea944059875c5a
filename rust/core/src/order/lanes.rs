//! Small permutations of many epochs in SIMD lanes, one index with its own keys per lane.
//!
//! A permutation of fewer than 2^16 records encrypts blocks of 16 bits repeatedly until the result
//! is in range (cycle walking): about 6,500 times per record for an epoch of ten records. Each step
//! of a walk depends on the one before; hundreds of walks, of any epochs, fill vector registers.
//! Results equal those of [`Permutation`](super::permute::Permutation) bit for bit.

/// The largest epoch that is permuted in lanes; with more records a walk takes a few steps only.
pub(crate) const MAX_RECORDS: u64 = 1 << 14;

/// Lanes in a vector of bytes.
const WIDTH: usize = 16;

/// Lanes in flight at once.
const POOL_LEN: usize = 512;

/// The most steps before finished lanes are replaced by new ones.
const MAX_STEPS: u32 = 256;

/// One index to permute.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lane {
    /// The low bytes of the keys of the four rounds, all that blocks of 16 bits need.
    pub(crate) keys: [u8; 4],
    /// The index, at most `last`.
    pub(crate) index: u16,
    /// The largest index of its epoch.
    pub(crate) last: u16,
}

/// Calls `finished` with the offset in `lanes` and the new index of every lane, in any order.
pub(crate) fn walk(lanes: &[Lane], mut finished: impl FnMut(usize, u16)) {
    let widest = lanes.iter().map(|lane| lane.last).max().unwrap_or(0);
    // So few steps that most lanes are still walking after them.
    let steps = ((1 << 14) / (u32::from(widest) + 1)).clamp(1, MAX_STEPS);
    let mut pool = Pool::new(lanes.len());
    let (mut num_inserted, mut live) = (0, 0);
    loop {
        let num_new = (pool.capacity() - live).min(lanes.len() - num_inserted);
        for (at, lane_index) in (live..).zip(num_inserted..num_inserted + num_new) {
            pool.insert(at, lane_index, lanes[lane_index]);
        }
        num_inserted += num_new;
        live += num_new;
        if live == 0 {
            return;
        }
        pool.advance(live, steps);
        let mut walking = 0;
        for at in 0..live {
            if pool.is_walking(at) {
                pool.move_lane(at, walking);
                walking += 1;
            } else {
                finished(pool.lane_indices[at], pool.index(at));
            }
        }
        live = walking;
    }
}

/// The lanes in flight, in groups of one vector each.
struct Pool {
    groups: Vec<Group>,
    lane_indices: Vec<usize>,
}

/// The state of [`WIDTH`] lanes, one vector per field.
#[derive(Clone)]
struct Group {
    left: [u8; WIDTH],
    right: [u8; WIDTH],
    keys: [[u8; WIDTH]; 4],
    last_left: [u8; WIDTH],
    last_right: [u8; WIDTH],
    /// All bits set while the lane is walking.
    walking: [u8; WIDTH],
}

impl Group {
    const EMPTY: Self = Self {
        left: [0; WIDTH],
        right: [0; WIDTH],
        keys: [[0; WIDTH]; 4],
        last_left: [0; WIDTH],
        last_right: [0; WIDTH],
        walking: [0; WIDTH],
    };

    /// Encrypts the block of every lane that is walking; a lane in range stops.
    ///
    /// Bytes only and no branch, so that the compiler vectorizes the loop.
    #[inline]
    fn step(&mut self) {
        let Self { left, right, keys, last_left, last_right, walking } = self;
        for lane in 0..WIDTH {
            let (mut high, mut low) = (left[lane], right[lane]);
            high ^= mixed(low) ^ keys[0][lane];
            low ^= mixed(high) ^ keys[1][lane];
            high ^= mixed(low) ^ keys[2][lane];
            low ^= mixed(high) ^ keys[3][lane];
            let mask = walking[lane];
            left[lane] ^= (left[lane] ^ high) & mask;
            right[lane] ^= (right[lane] ^ low) & mask;
            let is_above = all_bits(high > last_left[lane]);
            let is_equal = all_bits(high == last_left[lane]);
            walking[lane] = mask & (is_above | (is_equal & all_bits(low > last_right[lane])));
        }
    }
}

#[inline]
fn all_bits(is_set: bool) -> u8 {
    if is_set { u8::MAX } else { 0 }
}

/// The round function of [`Permutation`](super::permute::Permutation) for halves of 8 bits.
#[inline]
fn mixed(half: u8) -> u8 {
    (half.rotate_left(1) & half) ^ half.rotate_left(2)
}

impl Pool {
    fn new(num_lanes: usize) -> Self {
        let num_groups = num_lanes.min(POOL_LEN).div_ceil(WIDTH);
        Self { groups: vec![Group::EMPTY; num_groups], lane_indices: vec![0; num_groups * WIDTH] }
    }

    fn capacity(&self) -> usize {
        self.lane_indices.len()
    }

    fn insert(&mut self, at: usize, lane_index: usize, lane: Lane) {
        let (group, offset) = (&mut self.groups[at / WIDTH], at % WIDTH);
        [group.left[offset], group.right[offset]] = lane.index.to_be_bytes();
        for (keys, key) in group.keys.iter_mut().zip(lane.keys) {
            keys[offset] = key;
        }
        [group.last_left[offset], group.last_right[offset]] = lane.last.to_be_bytes();
        group.walking[offset] = u8::MAX;
        self.lane_indices[at] = lane_index;
    }

    /// Advances the first `live` lanes by `steps` blocks, or until they are in range.
    fn advance(&mut self, live: usize, steps: u32) {
        let groups = &mut self.groups[..live.div_ceil(WIDTH)];
        // Interleave the groups: the steps of one group depend on each other.
        for _ in 0..steps {
            for group in &mut *groups {
                group.step();
            }
        }
    }

    fn is_walking(&self, at: usize) -> bool {
        self.groups[at / WIDTH].walking[at % WIDTH] != 0
    }

    fn index(&self, at: usize) -> u16 {
        let (group, offset) = (&self.groups[at / WIDTH], at % WIDTH);
        u16::from_be_bytes([group.left[offset], group.right[offset]])
    }

    /// Moves the lane at `from` to `to`, at or before it.
    fn move_lane(&mut self, from: usize, to: usize) {
        if from == to {
            return;
        }
        let (group, offset) = (&self.groups[from / WIDTH], from % WIDTH);
        let lane = Lane {
            keys: [0, 1, 2, 3].map(|round| group.keys[round][offset]),
            index: self.index(from),
            last: u16::from_be_bytes([group.last_left[offset], group.last_right[offset]]),
        };
        self.insert(to, self.lane_indices[from], lane);
    }
}

#[cfg(test)]
mod tests {
    use super::{Lane, MAX_RECORDS, walk};
    use crate::order::permute::{Permutation, round_keys};
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn lanes_match_single_walks(
            cases in prop::collection::vec(
                (any::<u32>(), prop_oneof![40..2000_u64, 1..=MAX_RECORDS, Just(65_536)], any::<u64>()),
                0..200,
            ),
            copies in 1..12_usize,
        ) {
            // More lanes than are in flight at once, of epochs of all sizes.
            let cases: Vec<_> = cases.into_iter().cycle().take(copies * 60).collect();
            let lanes: Vec<Lane> = cases
                .iter()
                .map(|&(seed, num_records, pick)| Lane {
                    keys: round_keys(seed).map(|key| key.to_le_bytes()[0]),
                    index: u16::try_from(pick % num_records).unwrap(),
                    last: u16::try_from(num_records - 1).unwrap(),
                })
                .collect();
            let mut found = vec![None; lanes.len()];
            walk(&lanes, |lane, index| {
                assert_eq!(found[lane].replace(u64::from(index)), None);
            });
            for ((seed, num_records, pick), index) in cases.into_iter().zip(found) {
                let permutation = Permutation::new(num_records, seed, 4).unwrap();
                prop_assert_eq!(index, Some(permutation.apply(pick % num_records).unwrap()));
            }
        }
    }
}
