//! The data of a chunk read from its file piece by piece, every checksum on the way checked.

use std::ops::Range;

use super::super::riegeli::FormatError;
use super::super::riegeli::block::{BLOCK_LEN, HEADER_BYTES};
use super::super::riegeli::chunk::{self, ChunkHeader, Opened, check_inner_block, mismatch};
use super::super::riegeli::hash::Hasher;
use super::super::riegeli::inflate::{ChunkSource, StreamError};
use super::ranges::{Ranges, room};

/// How much of the file is read at once.
const WINDOW_LEN: u64 = 4 * BLOCK_LEN;

/// A chunk of which a part is in memory.
#[derive(Debug)]
pub(super) struct ChunkPieces<'a, R> {
    ranges: &'a R,
    opened: Opened,
    begin: u64,
    /// Where the data end in the file.
    data_end: u64,
    /// The bytes of the file from `window_at` on.
    window: Vec<u8>,
    window_at: u64,
    /// Which bytes of the window come next.
    piece: Range<usize>,
    hasher: Hasher,
}

impl<'a, R: Ranges> ChunkPieces<'a, R> {
    /// Begins to read the chunk that begins and must end in `extent`.
    pub(super) fn open(ranges: &'a R, extent: &Range<u64>) -> Result<Self, StreamError> {
        let begin = extent.start;
        let mut window = Vec::new();
        let bytes = room(&mut window, window_end(begin, extent.end) - begin)?;
        ranges.read_at(bytes, begin)?;
        let opened = chunk::open(bytes, begin, extent.end)?;
        let data_end = begin + opened.span(begin);
        window.truncate(usize::try_from(data_end - begin).unwrap_or(usize::MAX));
        Ok(Self {
            ranges,
            opened,
            begin,
            data_end,
            window,
            window_at: begin,
            piece: opened.data_at..opened.data_at,
            hasher: Hasher::default(),
        })
    }

    pub(super) fn header(&self) -> &ChunkHeader {
        &self.opened.header
    }

    /// Checks the hash of the data, whatever of them has not been read yet.
    pub(super) fn finish(mut self) -> Result<(), StreamError> {
        while !self.fill()?.is_empty() {
            self.piece.start = self.piece.end;
        }
        let (stored, computed) = (self.opened.header.data_hash, self.hasher.finish());
        if stored == computed {
            Ok(())
        } else {
            Err(mismatch("chunk data", stored, computed).into())
        }
    }

    /// Goes to the next piece, up to a block header, the end of the window or that of the data.
    fn advance(&mut self) -> Result<(), StreamError> {
        let mut at = self.piece.end;
        let mut pos = self.window_at + at as u64;
        if pos >= self.data_end {
            return Ok(());
        }
        if at >= self.window.len() {
            let len = window_end(pos, self.data_end) - pos;
            room(&mut self.window, len)?;
            self.window.truncate(usize::try_from(len).unwrap_or(usize::MAX));
            self.ranges.read_at(&mut self.window, pos)?;
            (self.window_at, at) = (pos, 0);
        }
        if pos.is_multiple_of(BLOCK_LEN) {
            check_inner_block(&self.window, at, &(self.begin..self.opened.end), pos)?;
            at += HEADER_BYTES;
            pos += HEADER_BYTES as u64;
        }
        let to_block = usize::try_from(BLOCK_LEN - pos % BLOCK_LEN).unwrap_or(usize::MAX);
        self.piece = at..self.window.len().min(at + to_block);
        let Some(piece) = self.window.get(self.piece.clone()) else {
            return Err(FormatError::fixed("cut short").into());
        };
        self.hasher.update(piece);
        Ok(())
    }
}

impl<R: Ranges> ChunkSource for ChunkPieces<'_, R> {
    fn fill(&mut self) -> Result<&[u8], StreamError> {
        if self.piece.is_empty() {
            self.advance()?;
        }
        Ok(&self.window[self.piece.clone()])
    }

    fn consume(&mut self, len: usize) {
        self.piece.start += len;
    }
}

/// Where a window from `pos` on ends: at a block header, so that none is cut, or at `end`.
fn window_end(pos: u64, end: u64) -> u64 {
    let far = pos + WINDOW_LEN;
    if far < end { far - far % BLOCK_LEN } else { end }
}
