//! The 64-bit `HighwayHash` with which everything in a Riegeli file is protected.

use highway::{HighwayHash, HighwayHasher, Key};

#[cfg(target_arch = "x86_64")]
use super::hash_pair;

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

/// The hashes that two hashers come to with a last piece each. For long pieces of like length,
/// this takes a good deal less time than one after the other where the processor has AVX2.
pub fn finish_both(mut hashers: [Hasher; 2], mut pieces: [&[u8]; 2]) -> [u64; 2] {
    take_together(&mut hashers, &mut pieces);
    let [first, second] = hashers;
    [(first, pieces[0]), (second, pieces[1])].map(|(mut hasher, piece)| {
        hasher.update(piece);
        hasher.finish()
    })
}

/// Has both hashers take in what two pieces have in common of length, if that is worth it.
#[cfg(target_arch = "x86_64")]
fn take_together(hashers: &mut [Hasher; 2], pieces: &mut [&[u8]; 2]) {
    /// Bytes that a checkpoint says are waiting for the rest of their packet.
    fn num_waiting(checkpoint: &hash_pair::Checkpoint) -> usize {
        let (_, len) = checkpoint.split_last_chunk().unwrap_or((&[], &[0; 4]));
        u32::from_le_bytes(*len) as usize
    }

    if pieces.iter().any(|piece| piece.len() < SHORT_LEN) || !hash_pair::is_possible() {
        return;
    }
    for (hasher, piece) in hashers.iter_mut().zip(&mut *pieces) {
        // A packet that is full is taken in with the next one only.
        let missing = 2 * hash_pair::PACKET_LEN - num_waiting(&hasher.0.checkpoint());
        let (begin, rest) = piece.split_at(missing);
        hasher.update(begin);
        *piece = rest;
    }
    let [mut first, mut second] = [hashers[0].0.checkpoint(), hashers[1].0.checkpoint()];
    if num_waiting(&first) + num_waiting(&second) > 0 {
        return;
    }
    let packets = pieces.map(|piece| piece.as_chunks::<{ hash_pair::PACKET_LEN }>().0);
    let count = packets[0].len().min(packets[1].len());
    hash_pair::advance([&mut first, &mut second], packets.map(|packets| &packets[..count]));
    for ((hasher, piece), checkpoint) in hashers.iter_mut().zip(pieces).zip([first, second]) {
        hasher.0 = HighwayHasher::from_checkpoint(checkpoint);
        *piece = &piece[count * hash_pair::PACKET_LEN..];
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn take_together(_: &mut [Hasher; 2], _: &mut [&[u8]; 2]) {}

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
    fn hashes_of_two_are_those_of_each() {
        let mixed = |at: u32| at.wrapping_mul(0x9e37_79b1).to_le_bytes()[3];
        let bytes: Vec<u8> = (0..70_000).map(mixed).collect();
        let lens = [0, 1, 31, 32, 1023, 1024, 1025, 1100, 4096, 65_537, 69_000];
        for (begun, first, second) in lens.iter().flat_map(|&first| {
            let seconds = lens.iter().map(move |&second| (first, second));
            seconds.flat_map(|(first, second)| [0, 5, 32, 40].map(|begun| (begun, first, second)))
        }) {
            let pieces = [&bytes[7..7 + first], &bytes[900..900 + second]];
            let begin = |len: usize| {
                let mut hasher = Hasher::default();
                hasher.update(&bytes[..len]);
                hasher
            };
            let [expected_first, expected_second] = [(begun, pieces[0]), (3, pieces[1])]
                .map(|(len, piece)| hash(&[&bytes[..len], piece].concat()));
            let found = finish_both([begin(begun), begin(3)], pieces);
            assert_eq!(found, [expected_first, expected_second], "{begun}, {first}, {second}");
        }
    }
}
