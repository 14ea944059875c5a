//! The 64-bit `HighwayHash` that protects everything in a Riegeli file.

use highway::{HighwayHash, HighwayHasher, Key};

#[cfg(target_arch = "x86_64")]
use super::highway_lanes;
use crate::write_prefetcher::WritePrefetcher;

/// The maximum number of hashes that are computed together.
pub const MAX_LANES: usize = 3;
/// Shorter inputs are hashed one by one, since interleaving has a setup cost.
#[cfg(target_arch = "x86_64")]
const MIN_INTERLEAVED_LEN: usize = 1 << 10;

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

/// A hash of bytes that arrive in parts, however they were split.
#[derive(Debug)]
pub struct Hasher(HighwayHasher);

impl Default for Hasher {
    fn default() -> Self {
        Self(HighwayHasher::new(KEY))
    }
}

impl Hasher {
    /// Adds the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.append(bytes);
    }

    /// The hash of all bytes.
    pub fn finish(self) -> u64 {
        self.0.finalize64()
    }
}

/// Updates each hasher with its last input and returns the hashes.
///
/// With AVX2, up to [`MAX_LANES`] long inputs of similar length take hardly longer than one; the
/// memory that this thread is about to write is prefetched meanwhile.
///
/// # Panics
///
/// If there are not as many inputs as hashers.
pub fn finish_interleaved(
    hashers: Vec<Hasher>,
    inputs: &[&[u8]],
    prefetcher: &mut WritePrefetcher,
) -> Vec<u64> {
    assert_eq!(hashers.len(), inputs.len(), "each hasher has its input");
    let mut lanes: Vec<Lane<'_>> =
        hashers.into_iter().zip(inputs).map(|(hasher, rest)| Lane { hasher, rest }).collect();
    update_interleaved(&mut lanes, prefetcher);
    let finish = |Lane { mut hasher, rest }| {
        hasher.update(rest);
        hasher.finish()
    };
    lanes.into_iter().map(finish).collect()
}

/// A hasher and the input that it has not processed yet.
struct Lane<'a> {
    hasher: Hasher,
    rest: &'a [u8],
}

/// Updates lanes together over their common length, while that is long enough to pay.
#[cfg(target_arch = "x86_64")]
fn update_interleaved(lanes: &mut [Lane<'_>], prefetcher: &mut WritePrefetcher) {
    if !highway_lanes::is_supported() {
        return;
    }
    loop {
        let mut long: Vec<_> =
            lanes.iter_mut().filter(|lane| lane.rest.len() >= MIN_INTERLEAVED_LEN).collect();
        match &mut long[..] {
            [] => return,
            [first] => advance([first], prefetcher),
            [first, second] => advance([first, second], prefetcher),
            [first, second, third, ..] => advance([first, second, third], prefetcher),
        }
    }
}

/// Advances all lanes by as many packets as the shortest has left.
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
    highway_lanes::advance(states.each_mut(), packets, prefetcher);
    for (lane, state) in lanes.iter_mut().zip(states) {
        lane.hasher.0 = HighwayHasher::from_checkpoint(state);
        lane.rest = &lane.rest[count * highway_lanes::PACKET_LEN..];
    }
}

#[cfg(target_arch = "x86_64")]
impl Lane<'_> {
    /// Processes input until the hasher holds no partial packet; a checkpoint ends with the number of
    /// its buffered bytes. A full buffer is hashed only with the next packet.
    fn fill_packet(&mut self) {
        let checkpoint = self.hasher.0.checkpoint();
        let (_, num_buffered) = checkpoint.split_last_chunk().unwrap_or((&[], &[0; 4]));
        let num_buffered = u32::from_le_bytes(*num_buffered) as usize;
        if num_buffered > 0 {
            let (begin, rest) = self.rest.split_at(2 * highway_lanes::PACKET_LEN - num_buffered);
            self.hasher.update(begin);
            self.rest = rest;
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn update_interleaved(_: &mut [Lane<'_>], _: &mut WritePrefetcher) {}

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
    fn split_input_hashes_like_the_whole() {
        let ramp: Vec<u8> = (0..=255).collect();
        for cut in 0..=ramp.len() {
            let mut hasher = Hasher::default();
            hasher.update(&ramp[..cut]);
            hasher.update(&ramp[cut..]);
            assert_eq!(hasher.finish(), hash(&ramp), "cut at {cut}");
        }
    }

    #[test]
    fn interleaved_hashes_match_single_ones() {
        let mixed = |at: u32| at.wrapping_mul(0x9e37_79b1).to_le_bytes()[3];
        let bytes: Vec<u8> = (0..70_000).map(mixed).collect();
        let lens = [0, 31, 1023, 1024, 1025, 1100, 4096, 65_537, 69_000];
        let started_with = |len: usize| {
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
            for (started, count) in [(0, 1), (5, 2), (32, 3), (40, 2), (63, 3), (64, 1)] {
                let started = &[started, 3, 0][..count];
                let hashers = started.iter().map(|&len| started_with(len)).collect();
                let found =
                    finish_interleaved(hashers, &pieces[..count], &mut WritePrefetcher::default());
                let expected: Vec<u64> = started
                    .iter()
                    .zip(pieces)
                    .map(|(&len, piece)| hash(&[&bytes[..len], piece].concat()))
                    .collect();
                assert_eq!(found, expected, "{started:?} before {lens:?}");
            }
        }
    }
}
