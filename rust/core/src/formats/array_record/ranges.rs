//! Reads ranges of a file's bytes, and whole chunks.

use std::cell::RefCell;
use std::ops::Range;

use super::super::raw_bytes::{WHOLE_READ_LEN, grow_to};
use super::super::riegeli::FormatError;
use super::super::riegeli::chunk::{self, MAX_DATA_AT, Opened};
use crate::Result;
use crate::io::buffer_pool;
use crate::io::forward_reads::ForwardReads;
use crate::io::storage::Reader;

/// Random-access reads of a file.
pub(super) trait RangeReader {
    /// Fills `out` from position `at`.
    fn read_at(&self, out: &mut [u8], at: u64) -> Result<()>;

    /// Whether the header of a chunk at `at` is in memory, so that its length costs no read.
    fn has_header(&self, _at: u64) -> bool {
        false
    }
}

impl RangeReader for Reader<'_> {
    fn read_at(&self, out: &mut [u8], at: u64) -> Result<()> {
        Reader::read_at(self, out, at)
    }
}

/// A file of which one part is read after the other.
#[derive(Debug)]
pub(super) struct Forward<'a> {
    reader: Reader<'a>,
    byte_len: u64,
    reads: RefCell<ForwardReads>,
}

impl<'a> Forward<'a> {
    pub(super) fn new(reader: Reader<'a>, byte_len: u64) -> Self {
        Self { reader, byte_len, reads: RefCell::default() }
    }
}

impl RangeReader for Forward<'_> {
    fn read_at(&self, out: &mut [u8], at: u64) -> Result<()> {
        self.reads.borrow_mut().read(self.reader, out, at, self.byte_len)
    }
}

/// A file of which the bytes at its end are in memory, and of whose others an index is read.
#[derive(Debug)]
pub(super) struct FileTail<'a> {
    before: Forward<'a>,
    /// Bytes from `begin` on.
    bytes: Vec<u8>,
    begin: u64,
}

impl<'a> FileTail<'a> {
    /// Reads the bytes in `range` at once.
    pub(super) fn read(reader: Reader<'a>, range: Range<u64>) -> Result<Self> {
        let begin = range.start;
        let mut bytes = buffer_pool::take();
        bytes.resize(usize::try_from(range.end - begin).unwrap_or(usize::MAX), 0);
        reader.read_at(&mut bytes, begin)?;
        Ok(Self { before: Forward::new(reader, begin), bytes, begin })
    }

    /// With none of the file in memory, of which nothing from `end` on is used.
    pub(super) fn empty(reader: Reader<'a>, end: u64) -> Self {
        Self { before: Forward::new(reader, end), bytes: Vec::new(), begin: u64::MAX }
    }
}

impl Drop for FileTail<'_> {
    fn drop(&mut self) {
        buffer_pool::put(std::mem::take(&mut self.bytes));
    }
}

impl RangeReader for FileTail<'_> {
    fn read_at(&self, out: &mut [u8], at: u64) -> Result<()> {
        let missing = usize::try_from(self.begin.saturating_sub(at)).unwrap_or(usize::MAX);
        let (before, rest) = out.split_at_mut(missing.min(out.len()));
        if (1..=MAX_DATA_AT).contains(&before.len()) {
            self.before.reader.read_at(before, at)?; // a header may be all that is needed
        } else if !before.is_empty() {
            self.before.read_at(before, at)?;
        }
        if rest.is_empty() {
            return Ok(());
        }
        let from = usize::try_from(at.saturating_sub(self.begin)).unwrap_or(usize::MAX);
        match self.bytes.get(from..).and_then(|bytes| bytes.get(..rest.len())) {
            Some(bytes) => {
                rest.copy_from_slice(bytes);
                Ok(())
            }
            None => self.before.reader.read_at(rest, at.max(self.begin)),
        }
    }

    fn has_header(&self, at: u64) -> bool {
        let from = usize::try_from(at.wrapping_sub(self.begin)).unwrap_or(usize::MAX);
        self.bytes.get(from..).is_some_and(|bytes| bytes.len() >= MAX_DATA_AT)
    }
}

/// Reads the chunk that begins and must end in `extent` into `raw`; returns its data's range there.
pub(super) fn read_chunk(
    source: &impl RangeReader,
    extent: Range<u64>,
    raw: &mut Vec<u8>,
) -> Result<Result<(Opened, Range<usize>), FormatError>> {
    let begin = extent.start;
    let mut first_len = extent.end - begin;
    if first_len > WHOLE_READ_LEN || source.has_header(begin) {
        first_len = first_len.min(MAX_DATA_AT as u64);
    }
    let bytes = match grow_to(raw, first_len) {
        Ok(bytes) => bytes,
        Err(problem) => return Ok(Err(problem)),
    };
    source.read_at(bytes, begin)?;
    let opened = match chunk::open(bytes, begin, extent.end) {
        Ok(opened) => opened,
        Err(problem) => return Ok(Err(problem)),
    };
    let span = opened.span(begin);
    let bytes = match grow_to(raw, span) {
        Ok(bytes) => bytes,
        Err(problem) => return Ok(Err(problem)),
    };
    if let Some(rest) = bytes.get_mut(usize::try_from(first_len).unwrap_or(usize::MAX)..) {
        source.read_at(rest, begin + first_len)?;
    }
    Ok(opened.data(bytes, begin).map(|data| (opened, data)))
}

/// Reads the header of the chunk that begins and must end in `extent`.
pub(super) fn read_header(
    source: &impl RangeReader,
    extent: Range<u64>,
) -> Result<Result<Opened, FormatError>> {
    let mut bytes = [0; MAX_DATA_AT];
    let len = usize::try_from(extent.end - extent.start).unwrap_or(usize::MAX);
    let bytes = &mut bytes[..len.min(MAX_DATA_AT)];
    source.read_at(bytes, extent.start)?;
    Ok(chunk::open(bytes, extent.start, extent.end))
}
