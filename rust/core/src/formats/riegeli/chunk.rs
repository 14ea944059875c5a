//! The 40-byte header of a chunk, the chunk's end, and its data without block headers.

use std::ops::Range;

use super::FormatError;
use super::block::{
    BLOCK_LEN, BlockHeader, HEADER_BYTES, end_after, headers_between, is_boundary, round_up,
};
use super::hash::hash;

/// The length of a chunk header.
pub const CHUNK_HEADER_LEN: usize = 40;

/// What kind of data a chunk holds.
pub mod kind {
    /// The signature at the start of a file.
    pub const SIGNATURE: u8 = b's';
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

/// A verified chunk header and the chunk's layout in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opened {
    /// The header, its hash checked.
    pub header: ChunkHeader,
    /// Where the chunk ends in the file.
    pub end: u64,
    /// The bytes between the chunk's begin and its data.
    pub data_at: usize,
}

/// The maximum of [`Opened::data_at`].
pub const MAX_DATA_AT: usize = CHUNK_HEADER_LEN + 2 * HEADER_BYTES;

/// Reads the header of the chunk at `begin` from `raw`, the bytes of the file from there on, of
/// which [`MAX_DATA_AT`] are enough. The chunk must end by `limit`.
///
/// # Errors
/// If a hash differs, a block header belongs to another chunk, or the chunk ends past `limit`.
#[inline]
pub fn open(raw: &[u8], begin: u64, limit: u64) -> Result<Opened, FormatError> {
    let in_block = begin % BLOCK_LEN;
    let whole = in_block != 0 && in_block + CHUNK_HEADER_LEN as u64 <= BLOCK_LEN;
    match raw.first_chunk::<CHUNK_HEADER_LEN>() {
        Some(bytes) if whole => {
            let (header, end) = checked(bytes, begin, limit)?;
            Ok(Opened { header, end, data_at: CHUNK_HEADER_LEN })
        }
        _ => open_interrupted(raw, begin, limit),
    }
}

fn checked(
    bytes: &[u8; CHUNK_HEADER_LEN],
    begin: u64,
    limit: u64,
) -> Result<(ChunkHeader, u64), FormatError> {
    let header = ChunkHeader::from_bytes(bytes)
        .map_err(|(stored, computed)| mismatch("chunk header", stored, computed))?;
    match header.end(begin) {
        Some(end) if end <= limit => Ok((header, end)),
        Some(end) => Err(FormatError::new(format!("ends at byte {end}, expected at most {limit}"))),
        None => Err(FormatError::fixed("ends past the largest file position")),
    }
}

/// Reads a chunk header that a block header precedes or interrupts.
#[cold]
fn open_interrupted(raw: &[u8], begin: u64, limit: u64) -> Result<Opened, FormatError> {
    if !is_boundary(begin) {
        return Err(FormatError::new(format!("a chunk cannot begin at byte {begin}")));
    }
    let mut bytes = [0; CHUNK_HEADER_LEN];
    let (mut filled, mut at) = (0, 0_usize);
    let mut block = None;
    while filled < CHUNK_HEADER_LEN {
        let pos = begin + at as u64;
        if pos.is_multiple_of(BLOCK_LEN) {
            block = Some((pos, block_header(raw, at, pos)?));
            at += HEADER_BYTES;
        }
        let left = BLOCK_LEN - (begin + at as u64) % BLOCK_LEN;
        let step = (CHUNK_HEADER_LEN - filled).min(usize::try_from(left).unwrap_or(usize::MAX));
        let part = raw.get(at..at + step).ok_or(FormatError::fixed("truncated"))?;
        bytes[filled..filled + step].copy_from_slice(part);
        filled += step;
        at += step;
    }
    let (header, end) = checked(&bytes, begin, limit)?;
    if let Some((pos, found)) = block {
        expect_block(found, begin, end, pos)?;
    }
    Ok(Opened { header, end, data_at: at })
}

fn block_header(raw: &[u8], at: usize, pos: u64) -> Result<BlockHeader, FormatError> {
    let bytes =
        raw.get(at..).and_then(<[u8]>::first_chunk).ok_or(FormatError::fixed("truncated"))?;
    check_block(bytes, pos)
}

/// Reads the block header `bytes` of the block at `pos`.
fn check_block(bytes: &[u8; 24], pos: u64) -> Result<BlockHeader, FormatError> {
    BlockHeader::from_bytes(bytes).map_err(|(stored, computed)| {
        mismatch(&format!("header of the block at byte {pos}"), stored, computed)
    })
}

/// Checks the block header at `at` in `raw`, which is at `pos` in the file and inside `chunk`.
///
/// # Errors
/// If it is truncated, its hash differs or it belongs to another chunk.
pub(crate) fn check_inner_block(
    raw: &[u8],
    at: usize,
    chunk: &Range<u64>,
    pos: u64,
) -> Result<(), FormatError> {
    expect_block(block_header(raw, at, pos)?, chunk.start, chunk.end, pos)
}

fn expect_block(found: BlockHeader, begin: u64, end: u64, pos: u64) -> Result<(), FormatError> {
    let expected = BlockHeader::inside(begin, end, pos);
    if found == expected {
        return Ok(());
    }
    Err(FormatError::new(format!(
        "header of the block at byte {pos} belongs to a chunk {}..{}, expected {begin}..{end}",
        i128::from(pos) - i128::from(found.previous_chunk),
        i128::from(pos) + i128::from(found.next_chunk),
    )))
}

/// The error for a hash that differs.
pub(crate) fn mismatch(what: &str, stored: u64, computed: u64) -> FormatError {
    FormatError::new(format!(
        "{what}: checksum mismatch (stored {stored:#018x}, computed {computed:#018x})"
    ))
}

impl Opened {
    /// How many bytes the file holds from the chunk's begin to the end of its data.
    #[inline]
    pub fn span(&self, begin: u64) -> u64 {
        let len = self.header.data_len + CHUNK_HEADER_LEN as u64;
        end_after(begin, len).map_or(u64::MAX, |end| end - begin)
    }

    /// Removes the block headers from the data in `raw`, the bytes of the file from the chunk's begin
    /// on, verifies them and the data's hash, and returns the data's range in `raw`.
    ///
    /// # Errors
    /// If `raw` is too short, a hash differs or a block header belongs to another chunk.
    #[inline]
    pub fn data(&self, raw: &mut [u8], begin: u64) -> Result<Range<usize>, FormatError> {
        let span = self.span(begin);
        let span = usize::try_from(span)
            .ok()
            .filter(|&span| span <= raw.len())
            .ok_or(FormatError::fixed("truncated"))?;
        let at = begin + self.data_at as u64;
        let end = if headers_between(at, begin + span as u64) == 0 {
            span
        } else {
            self.strip_block_headers(&mut raw[..span], begin)?
        };
        let range = self.data_at..end;
        let computed = hash(&raw[range.clone()]);
        if computed != self.header.data_hash {
            return Err(mismatch("chunk data", self.header.data_hash, computed));
        }
        Ok(range)
    }

    /// Removes the block headers from the data; returns the new end of the data.
    #[cold]
    fn strip_block_headers(&self, raw: &mut [u8], begin: u64) -> Result<usize, FormatError> {
        let (mut from, mut to) = (self.data_at, self.data_at);
        while from < raw.len() {
            let pos = begin + from as u64;
            if pos.is_multiple_of(BLOCK_LEN) {
                expect_block(block_header(raw, from, pos)?, begin, self.end, pos)?;
                from += HEADER_BYTES;
            }
            let left = BLOCK_LEN - (begin + from as u64) % BLOCK_LEN;
            let part_end =
                usize::try_from(left).map_or(raw.len(), |left| raw.len().min(from + left));
            raw.copy_within(from..part_end, to);
            to += part_end - from;
            from = part_end;
        }
        Ok(to)
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
