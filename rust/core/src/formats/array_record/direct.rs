//! Reads the only, uncompressed record of a chunk directly into its destination.
//!
//! The record's length follows from the chunk's extent. If that guess, a checksum or anything else
//! is wrong, this reports no error: the general path reads the chunk again and finds out what is
//! wrong.
#![expect(unsafe_code, reason = "a record is read into uninitialised memory")]

use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::checksum::{Checksum, UnverifiedRecord};
use super::super::record_file::DirectRead;
use super::super::riegeli::block::{
    BLOCK_HEADER_LEN, BLOCK_LEN, BlockHeader, HEADER_BYTES, headers_between,
};
use super::super::riegeli::chunk::{self, CHUNK_HEADER_LEN, ChunkHeader, kind};
use super::super::riegeli::hash::Hasher;
use crate::Result;
use crate::bytes::{self, ScatterBuffers};
use crate::io::storage::Reader;
use crate::varint::{push_varint, varint_len};

/// Bytes before the record's length: the compression type, and the length of that length.
const PREFIX_LEN: u64 = 2;
/// The maximum number of block headers inside a record; a system call takes 1,024 buffers.
const MAX_BLOCK_HEADERS: usize = 400;
/// The bytes between two block headers.
const BETWEEN_HEADERS: usize = (1 << 16) - HEADER_BYTES;

/// The length of the only record of an uncompressed chunk with this extent.
pub(super) fn record_len(extent: &Range<u64>) -> Option<u64> {
    let headers = headers_between(extent.start, extent.end) * BLOCK_HEADER_LEN;
    let with_len =
        (extent.end - extent.start).checked_sub(headers + CHUNK_HEADER_LEN as u64 + PREFIX_LEN)?;
    (1..=10)
        .filter_map(|len_len| with_len.checked_sub(len_len).map(|len| (len_len, len)))
        .find(|&(len_len, len)| varint_len(len) as u64 == len_len)
        .map(|(_, len)| len)
}

/// Tries to read the record of the chunk with this extent into `out`, whose length is
/// [`record_len`]; else returns `out`. The record's checksum has yet to be verified.
pub(super) fn read<'a>(
    reader: Reader<'_>,
    extent: &Range<u64>,
    out: &'a mut [MaybeUninit<u8>],
) -> Result<DirectRead<'a, (ChunkHeader, UnverifiedRecord<'a>)>> {
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
        || num_headers > MAX_BLOCK_HEADERS
    {
        return Ok(Err(out));
    }
    let mut head = [0; CHUNK_HEADER_LEN + 12];
    let head = &mut head[..head_len];
    let mut block_headers = vec![[0; HEADER_BYTES]; num_headers];
    let mut buffers = buffers(head, &mut block_headers, out, at);
    reader.read_scattered(&mut buffers, begin)?;
    let (is_all_read, byte_len) = (buffers.are_full(), buffers.byte_len());
    if !is_all_read || byte_len != head_len + num_headers * HEADER_BYTES + out.len() {
        return Ok(Err(out));
    }
    let Ok(opened) = chunk::open(head, begin, extent.end) else { return Ok(Err(out)) };
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
    if !as_expected {
        return Ok(Err(out));
    }
    let mut hasher = Hasher::default();
    hasher.update(&prefix);
    // SAFETY: the buffers are full, and by their total length they cover all of `out`.
    let record = unsafe { bytes::initialised(out) };
    Ok(Ok((header, UnverifiedRecord::new(record, Checksum::Highway(hasher, header.data_hash)))))
}

/// The buffers for the bytes of the file: the head of the chunk, then the record from `at` on with
/// the block headers that interrupt it.
fn buffers<'a>(
    head: &'a mut [u8],
    block_headers: &'a mut [[u8; HEADER_BYTES]],
    mut out: &'a mut [MaybeUninit<u8>],
    at: u64,
) -> ScatterBuffers<'a> {
    let mut buffers = ScatterBuffers::with_capacity(2 * block_headers.len() + 2);
    buffers.push_initialised(head);
    let to_block = usize::try_from(at.next_multiple_of(BLOCK_LEN) - at).unwrap_or(usize::MAX);
    let (part, rest) = out.split_at_mut(to_block.min(out.len()));
    buffers.push(part);
    out = rest;
    for header in block_headers {
        buffers.push_initialised(header);
        let len = out.len().min(BETWEEN_HEADERS);
        let (part, rest) = out.split_at_mut(len);
        buffers.push(part);
        out = rest;
    }
    buffers
}

#[cfg(test)]
mod tests {
    use super::super::super::riegeli::block::end_after;
    use super::*;

    #[test]
    fn lengths_of_records_follow_from_extents() {
        for begin in [64, 65_000, 65_495, 65_536, 70_000, 1 << 40] {
            for len in [0, 1, 127, 128, 200, 16_383, 16_384, 65_420, 65_450, 65_536, 1 << 22] {
                let data = PREFIX_LEN + varint_len(len) as u64 + len;
                let end = end_after(begin, CHUNK_HEADER_LEN as u64 + data).unwrap();
                assert_eq!(record_len(&(begin..end)), Some(len), "begin {begin}");
            }
        }
        assert_eq!(record_len(&(64..100)), None, "too short for a chunk");
    }
}
