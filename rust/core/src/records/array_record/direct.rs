//! Reads the one uncompressed record of a chunk from the file straight to where it is wanted.
//!
//! The record's length follows from how far apart chunks are. If that guess, a checksum or
//! anything else is not as expected, nothing is reported here: the ordinary way reads the chunk
//! again and says what is wrong.

use std::io::IoSliceMut;
use std::ops::Range;

use super::super::riegeli::block::{
    BLOCK_HEADER_LEN, BLOCK_LEN, BlockHeader, HEADER_BYTES, headers_between,
};
use super::super::riegeli::chunk::{self, CHUNK_HEADER_LEN, kind};
use super::super::riegeli::hash::{Hasher, finish_together};
use super::super::riegeli::varint::{push_varint, varint_len};
use super::reader::{ArrayRecordFile, Lease};
use crate::Result;
use crate::warm::Warming;

/// The compression byte and the length of the lengths, which is one byte.
const BEFORE_LEN: u64 = 2;
/// The most pieces a record may be in; the system takes 1,024.
const MAX_PIECES: usize = 400;
/// How many bytes lie between two block headers.
const BETWEEN_HEADERS: usize = (1 << 16) - HEADER_BYTES;

/// How long the one record of an uncompressed chunk with this extent is.
pub(crate) fn record_len(extent: &Range<u64>) -> Option<u64> {
    let headers = headers_between(extent.start, extent.end) * BLOCK_HEADER_LEN;
    let with_len =
        (extent.end - extent.start).checked_sub(headers + CHUNK_HEADER_LEN as u64 + BEFORE_LEN)?;
    (1..=10)
        .filter_map(|len_len| with_len.checked_sub(len_len).map(|len| (len_len, len)))
        .find(|&(len_len, len)| varint_len(len) as u64 == len_len)
        .map(|(_, len)| len)
}

/// A record that was read, except that its bytes may not be those that were written.
#[derive(Debug)]
pub(crate) struct Unchecked {
    hasher: Hasher,
    stored: u64,
}

impl Unchecked {
    /// Of each record, where it was read to, whether it is what was written. A few together take
    /// less time than one by one.
    ///
    /// # Panics
    /// If there are not as many of both.
    pub(crate) fn are_intact(
        all: Vec<Self>,
        records: &[&[u8]],
        warming: &mut Warming,
    ) -> Vec<bool> {
        let (hashers, stored): (Vec<_>, Vec<_>) =
            all.into_iter().map(|unchecked| (unchecked.hasher, unchecked.stored)).unzip();
        let computed = finish_together(hashers, records, warming);
        computed.iter().zip(stored).map(|(&computed, stored)| computed == stored).collect()
    }
}

/// Reads the record of the chunk with this extent into `out`, whose length is [`record_len`], if
/// that works. Its checksum is still to be compared.
pub(crate) fn read(
    file: &ArrayRecordFile,
    lease: &Lease,
    extent: &Range<u64>,
    out: &mut [u8],
) -> Result<Option<Unchecked>> {
    let begin = extent.start;
    let mut prefix = Vec::with_capacity(16);
    prefix.push(0);
    push_varint(&mut prefix, varint_len(out.len() as u64) as u64);
    push_varint(&mut prefix, out.len() as u64);
    let head_len = CHUNK_HEADER_LEN + prefix.len();
    let at = begin + head_len as u64;
    let num_headers = usize::try_from(headers_between(at, extent.end)).unwrap_or(usize::MAX);
    if begin.is_multiple_of(BLOCK_LEN)
        || at / BLOCK_LEN != begin / BLOCK_LEN
        || num_headers > MAX_PIECES
    {
        return Ok(None);
    }
    let mut head = [0; CHUNK_HEADER_LEN + 12];
    let head = &mut head[..head_len];
    let mut block_headers = vec![[0; HEADER_BYTES]; num_headers];
    if !file.read_pieces(lease, &mut pieces(head, &mut block_headers, out, at), begin)? {
        return Ok(None);
    }
    let Ok(opened) = chunk::open(head, begin, extent.end) else { return Ok(None) };
    let header = opened.header;
    let first_block = at.next_multiple_of(BLOCK_LEN);
    let blocks_agree = block_headers.iter().zip(0_u64..).all(|(bytes, number)| {
        let pos = first_block + number * BLOCK_LEN;
        BlockHeader::from_bytes(bytes) == Ok(BlockHeader::inside(begin, opened.end, pos))
    });
    let as_expected = blocks_agree
        && header.kind == kind::SIMPLE
        && header.num_records == 1
        && header.decoded_len == out.len() as u64
        && header.data_len == (prefix.len() + out.len()) as u64
        && head[CHUNK_HEADER_LEN..] == prefix;
    let mut hasher = Hasher::default();
    hasher.update(&prefix);
    Ok(as_expected.then_some(Unchecked { hasher, stored: header.data_hash }))
}

/// Where the bytes of the file go: the head of the chunk, then the record from `at` on, with a
/// block header wherever one interrupts it.
fn pieces<'a>(
    head: &'a mut [u8],
    block_headers: &'a mut [[u8; HEADER_BYTES]],
    mut out: &'a mut [u8],
    at: u64,
) -> Vec<IoSliceMut<'a>> {
    let mut pieces = Vec::with_capacity(2 * block_headers.len() + 2);
    pieces.push(IoSliceMut::new(head));
    let to_block = usize::try_from(at.next_multiple_of(BLOCK_LEN) - at).unwrap_or(usize::MAX);
    let (piece, rest) = out.split_at_mut(to_block.min(out.len()));
    pieces.push(IoSliceMut::new(piece));
    out = rest;
    for header in block_headers {
        pieces.push(IoSliceMut::new(header));
        let len = out.len().min(BETWEEN_HEADERS);
        let (piece, rest) = out.split_at_mut(len);
        pieces.push(IoSliceMut::new(piece));
        out = rest;
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::super::super::riegeli::block::end_after;
    use super::*;

    #[test]
    fn lengths_of_records_follow_from_extents() {
        for begin in [64, 65_000, 65_495, 65_536, 70_000, 1 << 40] {
            for len in [0, 1, 127, 128, 200, 16_383, 16_384, 65_420, 65_450, 65_536, 1 << 22] {
                let data = BEFORE_LEN + varint_len(len) as u64 + len;
                let end = end_after(begin, CHUNK_HEADER_LEN as u64 + data).unwrap();
                assert_eq!(record_len(&(begin..end)), Some(len), "begin {begin}");
            }
        }
        assert_eq!(record_len(&(64..100)), None, "too short for a chunk");
    }
}
