//! Small permutations of many epochs side by side: each index is a lane with keys of its own.
//!
//! A permutation of fewer records than its blocks of 16 bits hold walks on from block to block
//! until it is back among them, 6,500 blocks for each of ten records. One walk waits for itself at
//! every step; hundreds of them, of one epoch or of many, fill vector registers. What comes out
//! is that of [`Permutation`](super::permute::Permutation), bit for bit.

/// The most records whose indices are walked in lanes: beyond, a walk is a few blocks long.
pub(crate) const MAX_RECORDS: u64 = 1 << 14;

/// Lanes in a vector of bytes.
const WIDTH: usize = 16;

/// Lanes under way at once.
const POOL_LEN: usize = 512;

/// Steps after which lanes that arrived make room, at most.
const MAX_STEPS: u32 = 256;

/// One index to move.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lane {
    /// The keys of the four rounds, as far as blocks of 16 bits need them.
    pub(crate) keys: [u8; 4],
    /// Where the index is, at most `last`.
    pub(crate) index: u16,
    /// The largest index of its epoch.
    pub(crate) last: u16,
}

/// Calls `arrived` with the place in `lanes` and the new index of every lane, in any order.
pub(crate) fn walk(lanes: &[Lane], mut arrived: impl FnMut(usize, u16)) {
    let widest = lanes.iter().map(|lane| lane.last).max().unwrap_or(0);
    // So few steps that most lanes are still on their way after them.
    let steps = ((1 << 14) / (u32::from(widest) + 1)).clamp(1, MAX_STEPS);
    let mut pool = Pool::new(lanes.len());
    let (mut entered, mut live) = (0, 0);
    loop {
        let entering = (pool.capacity() - live).min(lanes.len() - entered);
        for (at, number) in (live..).zip(entered..entered + entering) {
            pool.enter(at, number, lanes[number]);
        }
        entered += entering;
        live += entering;
        if live == 0 {
            return;
        }
        pool.advance(live, steps);
        let mut walking = 0;
        for at in 0..live {
            if pool.is_walking(at) {
                pool.shift(at, walking);
                walking += 1;
            } else {
                arrived(pool.numbers[at], pool.index(at));
            }
        }
        live = walking;
    }
}

/// The lanes under way, in groups that are moved together.
struct Pool {
    groups: Vec<Group>,
    numbers: Vec<usize>,
}

/// What [`WIDTH`] lanes hold, each field a vector.
#[derive(Clone)]
struct Group {
    left: [u8; WIDTH],
    right: [u8; WIDTH],
    keys: [[u8; WIDTH]; 4],
    last_left: [u8; WIDTH],
    last_right: [u8; WIDTH],
    /// All bits while the lane is on its way.
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

    /// Encrypts the block of every lane that is on its way; one back in range has arrived.
    ///
    /// All in bytes, without a branch: then a vector holds a byte of every lane.
    #[inline]
    fn step(&mut self) {
        let Self { left, right, keys, last_left, last_right, walking } = self;
        for lane in 0..WIDTH {
            let (mut high, mut low) = (left[lane], right[lane]);
            high ^= mixed(low) ^ keys[0][lane];
            low ^= mixed(high) ^ keys[1][lane];
            high ^= mixed(low) ^ keys[2][lane];
            low ^= mixed(high) ^ keys[3][lane];
            let moves = walking[lane];
            left[lane] ^= (left[lane] ^ high) & moves;
            right[lane] ^= (right[lane] ^ low) & moves;
            let is_beyond = all_bits(high > last_left[lane]);
            let is_level = all_bits(high == last_left[lane]);
            walking[lane] = moves & (is_beyond | (is_level & all_bits(low > last_right[lane])));
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
        Self { groups: vec![Group::EMPTY; num_groups], numbers: vec![0; num_groups * WIDTH] }
    }

    fn capacity(&self) -> usize {
        self.numbers.len()
    }

    fn enter(&mut self, at: usize, number: usize, lane: Lane) {
        let (group, place) = (&mut self.groups[at / WIDTH], at % WIDTH);
        [group.left[place], group.right[place]] = lane.index.to_be_bytes();
        for (keys, key) in group.keys.iter_mut().zip(lane.keys) {
            keys[place] = key;
        }
        [group.last_left[place], group.last_right[place]] = lane.last.to_be_bytes();
        group.walking[place] = u8::MAX;
        self.numbers[at] = number;
    }

    /// Moves the first `live` lanes by `steps` blocks, those that arrive on the way by fewer.
    fn advance(&mut self, live: usize, steps: u32) {
        let groups = &mut self.groups[..live.div_ceil(WIDTH)];
        // A group would wait for itself from step to step; in between, others have their turn.
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
        let (group, place) = (&self.groups[at / WIDTH], at % WIDTH);
        u16::from_be_bytes([group.left[place], group.right[place]])
    }

    /// Moves what the lane at `from` holds to `to`, at or before it.
    fn shift(&mut self, from: usize, to: usize) {
        if from == to {
            return;
        }
        let (group, place) = (&self.groups[from / WIDTH], from % WIDTH);
        let lane = Lane {
            keys: [0, 1, 2, 3].map(|round| group.keys[round][place]),
            index: self.index(from),
            last: u16::from_be_bytes([group.last_left[place], group.last_right[place]]),
        };
        self.enter(to, self.numbers[from], lane);
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
            asked in prop::collection::vec(
                (any::<u32>(), prop_oneof![40..2000_u64, 1..=MAX_RECORDS, Just(65_536)], any::<u64>()),
                0..200,
            ),
            copies in 1..12_usize,
        ) {
            // More lanes than are under way at once, of epochs of all sizes.
            let asked: Vec<_> = asked.into_iter().cycle().take(copies * 60).collect();
            let lanes: Vec<Lane> = asked
                .iter()
                .map(|&(seed, num_records, pick)| Lane {
                    keys: round_keys(seed).map(|key| key.to_le_bytes()[0]),
                    index: u16::try_from(pick % num_records).unwrap(),
                    last: u16::try_from(num_records - 1).unwrap(),
                })
                .collect();
            let mut moved = vec![None; lanes.len()];
            walk(&lanes, |number, index| {
                assert_eq!(moved[number].replace(u64::from(index)), None);
            });
            for ((seed, num_records, pick), index) in asked.into_iter().zip(moved) {
                let permutation = Permutation::new(num_records, seed, 4).unwrap();
                prop_assert_eq!(index, Some(permutation.apply(pick % num_records).unwrap()));
            }
        }
    }
}
