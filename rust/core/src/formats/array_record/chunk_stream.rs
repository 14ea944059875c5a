//! Reads the data of a chunk as a stream and verifies every checksum on the way.

use std::ops::Range;

use super::super::raw_bytes::grow_to;
use super::super::riegeli::block::{BLOCK_LEN, HEADER_BYTES};
use super::super::riegeli::chunk::{self, ChunkHeader, Opened, check_inner_block, mismatch};
use super::super::riegeli::hash::Hasher;
use super::super::riegeli::stream_decoder::ChunkSource;
use super::super::riegeli::{FormatError, StreamError};
use super::ranges::{RangeReader, read_header};

/// How many bytes of the file are read at once.
const WINDOW_LEN: u64 = 4 * BLOCK_LEN;

/// A chunk of which only a window is in memory.
#[derive(Debug)]
pub(super) struct ChunkStream<'a, R> {
    source: &'a R,
    opened: Opened,
    begin: u64,
    /// The offset in the file at which the data end.
    data_end: u64,
    /// The bytes of the file from `window_at` on.
    window: Vec<u8>,
    window_at: u64,
    /// The next bytes of the data, as a range of the window.
    next: Range<usize>,
    hasher: Hasher,
}

impl<'a, R: RangeReader> ChunkStream<'a, R> {
    /// Opens the chunk that begins and must end in `extent`.
    pub(super) fn open(source: &'a R, extent: &Range<u64>) -> Result<Self, StreamError> {
        let begin = extent.start;
        let mut window = Vec::new();
        // What follows the chunk may be long: padding.
        let known = if source.has_header(begin) {
            begin + read_header(source, extent.clone())??.span(begin)
        } else {
            extent.end
        };
        let bytes = grow_to(&mut window, window_end(begin, known) - begin)?;
        source.read_at(bytes, begin)?;
        let opened = chunk::open(bytes, begin, extent.end)?;
        let data_end = begin + opened.span(begin);
        window.truncate(usize::try_from(data_end - begin).unwrap_or(usize::MAX));
        Ok(Self {
            source,
            opened,
            begin,
            data_end,
            window,
            window_at: begin,
            next: opened.data_at..opened.data_at,
            hasher: Hasher::default(),
        })
    }

    pub(super) fn header(&self) -> &ChunkHeader {
        &self.opened.header
    }

    /// Reads the rest of the data and verifies its hash.
    pub(super) fn finish(mut self) -> Result<(), StreamError> {
        while !self.fill()?.is_empty() {
            self.next.start = self.next.end;
        }
        let (stored, computed) = (self.opened.header.data_hash, self.hasher.finish());
        if stored == computed {
            Ok(())
        } else {
            Err(mismatch("chunk data", stored, computed).into())
        }
    }

    /// Moves to the next bytes, up to a block header, the end of the window or the end of the data.
    fn advance(&mut self) -> Result<(), StreamError> {
        let mut at = self.next.end;
        let mut pos = self.window_at + at as u64;
        if pos >= self.data_end {
            return Ok(());
        }
        if at >= self.window.len() {
            let len = window_end(pos, self.data_end) - pos;
            grow_to(&mut self.window, len)?;
            self.window.truncate(usize::try_from(len).unwrap_or(usize::MAX));
            self.source.read_at(&mut self.window, pos)?;
            (self.window_at, at) = (pos, 0);
        }
        if pos.is_multiple_of(BLOCK_LEN) {
            check_inner_block(&self.window, at, &(self.begin..self.opened.end), pos)?;
            at += HEADER_BYTES;
            pos += HEADER_BYTES as u64;
        }
        let to_block = usize::try_from(BLOCK_LEN - pos % BLOCK_LEN).unwrap_or(usize::MAX);
        self.next = at..self.window.len().min(at + to_block);
        let Some(bytes) = self.window.get(self.next.clone()) else {
            return Err(FormatError::fixed("truncated").into());
        };
        self.hasher.update(bytes);
        Ok(())
    }
}

impl<R: RangeReader> ChunkSource for ChunkStream<'_, R> {
    fn fill(&mut self) -> Result<&[u8], StreamError> {
        if self.next.is_empty() {
            self.advance()?;
        }
        Ok(&self.window[self.next.clone()])
    }

    fn consume(&mut self, len: usize) {
        self.next.start += len;
    }
}

/// The end of a window from `pos` on: `end`, or a block boundary, so that no block header is split.
fn window_end(pos: u64, end: u64) -> u64 {
    let max_end = pos + WINDOW_LEN;
    if max_end < end { max_end - max_end % BLOCK_LEN } else { end }
}
