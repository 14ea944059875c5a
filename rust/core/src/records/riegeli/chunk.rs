//! The 40-byte header of a chunk, and where the chunk ends.

use super::block::{end_after, round_up};
use super::hash::hash;

/// The length of a chunk header.
pub const CHUNK_HEADER_LEN: usize = 40;

/// What kind of data a chunk holds.
pub mod kind {
    /// The signature a file begins with.
    pub const SIGNATURE: u8 = b's';
    /// Metadata of the file.
    pub const METADATA: u8 = b'm';
    /// Nothing, up to a block boundary.
    pub const PADDING: u8 = b'p';
    /// Simple records.
    pub const SIMPLE: u8 = b'r';
    /// Transposed records.
    pub const TRANSPOSED: u8 = b't';
}

/// A chunk header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkHeader {
    /// The length of the data, without block headers and filler.
    pub data_len: u64,
    /// The hash of the data.
    pub data_hash: u64,
    /// One of [`kind`], or unknown.
    pub kind: u8,
    /// How many records, below 2^56.
    pub num_records: u64,
    /// The lengths of all records together.
    pub decoded_len: u64,
}

impl ChunkHeader {
    /// The header of a chunk that holds `data`.
    pub fn of(kind: u8, data: &[u8], num_records: u64, decoded_len: u64) -> Self {
        Self { data_len: data.len() as u64, data_hash: hash(data), kind, num_records, decoded_len }
    }

    /// The bytes of the header, its own hash first.
    pub fn to_bytes(self) -> [u8; CHUNK_HEADER_LEN] {
        let mut bytes = [0; CHUNK_HEADER_LEN];
        bytes[8..16].copy_from_slice(&self.data_len.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.data_hash.to_le_bytes());
        bytes[24..32].copy_from_slice(&(self.num_records << 8).to_le_bytes());
        bytes[24] = self.kind;
        bytes[32..].copy_from_slice(&self.decoded_len.to_le_bytes());
        let sum = hash(&bytes[8..]);
        bytes[..8].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Reads a header; the error is the pair of hashes that differ, stored and computed.
    ///
    /// # Errors
    /// If the stored hash is not that of the bytes.
    #[inline]
    pub fn from_bytes(bytes: &[u8; CHUNK_HEADER_LEN]) -> Result<Self, (u64, u64)> {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]));
        let (stored, computed) = (word(0), hash(&bytes[8..]));
        if stored != computed {
            return Err((stored, computed));
        }
        Ok(Self {
            data_len: word(8),
            data_hash: word(16),
            kind: bytes[24],
            num_records: word(24) >> 8,
            decoded_len: word(32),
        })
    }

    /// Where a chunk with this header ends if it begins at `begin`; `None` past 2^64.
    ///
    /// A chunk spans at least as many bytes as it has records, since record `r` has the
    /// position `begin + r` and those are unique in a file.
    #[inline]
    pub fn end(&self, begin: u64) -> Option<u64> {
        let after_data = end_after(begin, self.data_len.checked_add(CHUNK_HEADER_LEN as u64)?)?;
        Some(after_data.max(round_up(begin.checked_add(self.num_records)?)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_signature_is_that_of_every_file() {
        let header = ChunkHeader::of(kind::SIGNATURE, b"", 0, 0);
        let expected = [
            0x91, 0xba, 0xc2, 0x3c, 0x92, 0x87, 0xe1, 0xa9, 0, 0, 0, 0, 0, 0, 0, 0, 0xe1, 0x9f,
            0x13, 0xc0, 0xe9, 0xb1, 0xc3, 0x72, 0x73, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        ];
        assert_eq!(header.to_bytes(), expected);
        assert_eq!(ChunkHeader::from_bytes(&expected), Ok(header));
        assert_eq!(header.end(0), Some(64));
    }

    #[test]
    fn a_chunk_of_empty_records_spans_a_byte_each() {
        let header = ChunkHeader::of(kind::SIMPLE, b"0123", 1000, 0);
        assert_eq!(header.end(64), Some(1064));
        assert_eq!(header.end(65_536 - 995), Some(65_536 + 25), "not inside a block header");
    }
}
