//! The 64-bit `HighwayHash` with which everything in a Riegeli file is protected.

use highway::{HighwayHash, HighwayHasher, Key};

#[cfg(target_arch = "x86_64")]
use super::hash_lanes;
use crate::write_prefetcher::WritePrefetcher;

/// How many hashes are computed at once at most.
pub const MAX_TOGETHER: usize = 3;
/// Pieces below this length are hashed alone: to do it together has to be set up.
#[cfg(target_arch = "x86_64")]
const SHORT_LEN: usize = 1 << 10;

/// The bytes `Riegeli/records\n`, twice.
const KEY: Key = Key([
    0x2f69_6c65_6765_6952,
    0x0a73_6472_6f63_6572,
    0x2f69_6c65_6765_6952,
    0x0a73_6472_6f63_6572,
]);

/// The hash of `bytes`.
pub fn hash(bytes: &[u8]) -> u64 {
    HighwayHasher::new(KEY).hash64(bytes)
}

/// A hash of bytes that come in pieces; how they were cut does not matter.
#[derive(Debug)]
pub struct Hasher(HighwayHasher);

impl Default for Hasher {
    fn default() -> Self {
        Self(HighwayHasher::new(KEY))
    }
}

impl Hasher {
    /// Takes the next piece.
    pub fn update(&mut self, piece: &[u8]) {
        self.0.append(piece);
    }

    /// The hash of all pieces.
    pub fn finish(self) -> u64 {
        self.0.finalize64()
    }
}

/// The hashes that hashers come to with a last piece each.
///
/// For long pieces of like length, up to [`MAX_TOGETHER`] of them take hardly longer than one
/// where the processor has AVX2; what this thread is about to write is brought into the cache
/// meanwhile.
///
/// # Panics
///
/// If there are not as many pieces as hashers.
pub fn finish_together(
    hashers: Vec<Hasher>,
    pieces: &[&[u8]],
    prefetcher: &mut WritePrefetcher,
) -> Vec<u64> {
    assert_eq!(hashers.len(), pieces.len(), "each hasher has its piece");
    let mut lanes: Vec<Lane<'_>> =
        hashers.into_iter().zip(pieces).map(|(hasher, rest)| Lane { hasher, rest }).collect();
    take_together(&mut lanes, prefetcher);
    let finish = |Lane { mut hasher, rest }| {
        hasher.update(rest);
        hasher.finish()
    };
    lanes.into_iter().map(finish).collect()
}

/// A hasher and what it has not taken in yet.
struct Lane<'a> {
    hasher: Hasher,
    rest: &'a [u8],
}

/// Has lanes take in what they have in common of length, while that is worth it.
#[cfg(target_arch = "x86_64")]
fn take_together(lanes: &mut [Lane<'_>], prefetcher: &mut WritePrefetcher) {
    if !hash_lanes::is_possible() {
        return;
    }
    loop {
        let mut long: Vec<_> =
            lanes.iter_mut().filter(|lane| lane.rest.len() >= SHORT_LEN).collect();
        match &mut long[..] {
            [] => return,
            [first] => advance([first], prefetcher),
            [first, second] => advance([first, second], prefetcher),
            [first, second, third, ..] => advance([first, second, third], prefetcher),
        }
    }
}

/// Advances all lanes by as many packets as the shortest still has.
#[cfg(target_arch = "x86_64")]
fn advance<const LANES: usize>(
    mut lanes: [&mut Lane<'_>; LANES],
    prefetcher: &mut WritePrefetcher,
) {
    for lane in &mut lanes {
        lane.fill_packet();
    }
    let packets = lanes.each_ref().map(|lane| lane.rest.as_chunks().0);
    let count = packets.iter().map(|lane| lane.len()).min().unwrap_or(0);
    let packets = packets.map(|lane| &lane[..count]);
    let mut states = lanes.each_ref().map(|lane| lane.hasher.0.checkpoint());
    hash_lanes::advance(states.each_mut(), packets, prefetcher);
    for (lane, state) in lanes.iter_mut().zip(states) {
        lane.hasher.0 = HighwayHasher::from_checkpoint(state);
        lane.rest = &lane.rest[count * hash_lanes::PACKET_LEN..];
    }
}

#[cfg(target_arch = "x86_64")]
impl Lane<'_> {
    /// Takes in so much that no packet is begun: a checkpoint says how many bytes wait for the
    /// rest of theirs. One that is full is hashed with the next one only.
    fn fill_packet(&mut self) {
        let checkpoint = self.hasher.0.checkpoint();
        let (_, num_waiting) = checkpoint.split_last_chunk().unwrap_or((&[], &[0; 4]));
        let num_waiting = u32::from_le_bytes(*num_waiting) as usize;
        if num_waiting > 0 {
            let (begin, rest) = self.rest.split_at(2 * hash_lanes::PACKET_LEN - num_waiting);
            self.hasher.update(begin);
            self.rest = rest;
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn take_together(_: &mut [Lane<'_>], _: &mut WritePrefetcher) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_the_format_description() {
        let ramp: Vec<u8> = (0..100).collect();
        for (input, expected) in [
            (&b""[..], 0x72c3_b1e9_c013_9fe1),
            (b"a", 0x2479_3c7d_a388_949f),
            (b"abc", 0x672f_e946_c18d_0ed9),
            (b"hello world", 0x3417_62bc_386e_85fe),
            (&ramp[..16], 0x3e13_be3a_4140_f4a7),
            (&ramp[..31], 0x4d26_2a70_9c34_ae7d),
            (&ramp[..32], 0xb73f_6df5_50f9_dce4),
            (&ramp[..33], 0xec2f_9200_14ea_a741),
            (&ramp[..64], 0xe34b_1e10_0f13_22af),
            (&ramp[..], 0xe809_4874_65a4_4f74),
        ] {
            assert_eq!(hash(input), expected, "of {} bytes", input.len());
        }
    }

    #[test]
    fn pieces_hash_like_the_whole() {
        let ramp: Vec<u8> = (0..=255).collect();
        for cut in 0..=ramp.len() {
            let mut hasher = Hasher::default();
            hasher.update(&ramp[..cut]);
            hasher.update(&ramp[cut..]);
            assert_eq!(hasher.finish(), hash(&ramp), "cut at {cut}");
        }
    }

    #[test]
    fn hashes_of_several_are_those_of_each() {
        let mixed = |at: u32| at.wrapping_mul(0x9e37_79b1).to_le_bytes()[3];
        let bytes: Vec<u8> = (0..70_000).map(mixed).collect();
        let lens = [0, 31, 1023, 1024, 1025, 1100, 4096, 65_537, 69_000];
        let begun_with = |len: usize| {
            let mut hasher = Hasher::default();
            hasher.update(&bytes[..len]);
            hasher
        };
        let triples = (0..lens.len().pow(3)).map(|at| {
            let [first, second, third] = [at, at / lens.len(), at / lens.len().pow(2)];
            [first, second, third].map(|digit| lens[digit % lens.len()])
        });
        for lens @ [first, second, third] in triples {
            let pieces = [&bytes[7..7 + first], &bytes[900..900 + second], &bytes[2..2 + third]];
            for (begun, count) in [(0, 1), (5, 2), (32, 3), (40, 2), (63, 3), (64, 1)] {
                let begun = &[begun, 3, 0][..count];
                let hashers = begun.iter().map(|&len| begun_with(len)).collect();
                let found =
                    finish_together(hashers, &pieces[..count], &mut WritePrefetcher::default());
                let expected: Vec<u64> = begun
                    .iter()
                    .zip(pieces)
                    .map(|(&len, piece)| hash(&[&bytes[..len], piece].concat()))
                    .collect();
                assert_eq!(found, expected, "{begun:?} before {lens:?}");
            }
        }
    }
}
