//! The 64-bit `HighwayHash` with which everything in a Riegeli file is protected.

use highway::{HighwayHash, HighwayHasher, Key};

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
}
