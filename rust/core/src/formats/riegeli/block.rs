//! Computes where the 24-byte headers of the 64 KiB blocks interrupt a chunk.

use super::hash::hash;

/// The distance between block headers.
pub const BLOCK_LEN: u64 = 1 << 16;
/// The length of a block header.
pub const BLOCK_HEADER_LEN: u64 = 24;
/// The same as `usize`.
pub(crate) const HEADER_BYTES: usize = 24;
/// What a block holds besides its header.
pub const USABLE_LEN: u64 = BLOCK_LEN - BLOCK_HEADER_LEN;

/// Whether a chunk may begin or end at file position `pos`.
pub fn is_boundary(pos: u64) -> bool {
    !(1..=BLOCK_HEADER_LEN).contains(&(pos % BLOCK_LEN))
}

/// The first position from `pos` on where a chunk may begin or end; `None` past 2^64.
pub fn round_up(pos: u64) -> Option<u64> {
    if is_boundary(pos) {
        Some(pos)
    } else {
        (pos - pos % BLOCK_LEN).checked_add(BLOCK_HEADER_LEN + 1)
    }
}

/// The file position after `len` bytes of a chunk that begins at `begin`; `None` past 2^64.
pub fn end_after(begin: u64, len: u64) -> Option<u64> {
    let in_block = (begin % BLOCK_LEN + USABLE_LEN - 1) % BLOCK_LEN;
    let headers = len.checked_add(in_block)? / USABLE_LEN;
    begin.checked_add(len)?.checked_add(headers.checked_mul(BLOCK_HEADER_LEN)?)
}

/// The number of block headers in `begin..end`.
pub fn headers_between(begin: u64, end: u64) -> u64 {
    end.div_ceil(BLOCK_LEN).saturating_sub(begin.div_ceil(BLOCK_LEN))
}

/// A block header: its distances to both ends of the chunk that it interrupts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockHeader {
    /// The block's position less the chunk's begin.
    pub previous_chunk: u64,
    /// The chunk's end less the block's position.
    pub next_chunk: u64,
}

impl BlockHeader {
    /// The header of the block at `block` inside the chunk `begin..end`.
    pub fn inside(begin: u64, end: u64, block: u64) -> Self {
        Self { previous_chunk: block - begin, next_chunk: end - block }
    }

    /// The bytes of the header, its own hash first.
    pub fn to_bytes(self) -> [u8; 24] {
        let mut bytes = [0; 24];
        bytes[8..16].copy_from_slice(&self.previous_chunk.to_le_bytes());
        bytes[16..].copy_from_slice(&self.next_chunk.to_le_bytes());
        let sum = hash(&bytes[8..]);
        bytes[..8].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Reads a header; the error is the pair of hashes that differ, stored and computed.
    ///
    /// # Errors
    /// If the stored hash is not that of the bytes.
    pub fn from_bytes(bytes: &[u8; 24]) -> Result<Self, (u64, u64)> {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]));
        let (stored, computed) = (word(0), hash(&bytes[8..]));
        if stored != computed {
            return Err((stored, computed));
        }
        Ok(Self { previous_chunk: word(8), next_chunk: word(16) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Walks byte by byte, as the format describes it.
    fn slow_end_after(begin: u64, len: u64) -> u64 {
        let mut pos = begin;
        for _ in 0..len {
            if pos.is_multiple_of(BLOCK_LEN) {
                pos += BLOCK_HEADER_LEN;
            }
            pos += 1;
        }
        pos
    }

    #[test]
    fn end_after_matches_a_walk_over_bytes() {
        for begin in [0, 64, 65511, 65535, 65536, 65561, 65600, 131_071, 131_072] {
            for len in [1, 40, 41, 65_470, 65_471, 65_472, 65_511, 65_512, 65_513, 200_000] {
                let end = end_after(begin, len).unwrap();
                assert_eq!(end, slow_end_after(begin, len), "begin {begin}, len {len}");
                assert_eq!(end - begin, len + BLOCK_HEADER_LEN * headers_between(begin, end));
            }
        }
    }

    #[test]
    fn positions_past_the_largest_number_are_none() {
        assert_eq!(end_after(u64::MAX - 10, 11), None);
        assert_eq!(end_after(64, u64::MAX), None);
        assert_eq!(round_up(u64::MAX - 65_530), Some(u64::MAX - 65_510));
    }

    #[test]
    fn block_headers_round_trip_and_detect_a_flipped_bit() {
        let header = BlockHeader::inside(65_000, 200_000, 131_072);
        let mut bytes = header.to_bytes();
        assert_eq!(BlockHeader::from_bytes(&bytes), Ok(header));
        bytes[20] ^= 1;
        assert!(BlockHeader::from_bytes(&bytes).is_err());
    }
}
