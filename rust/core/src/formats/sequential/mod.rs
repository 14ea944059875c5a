//! Records in the order of a file of any storage, in blocks, for formats without an index of their own.
//!
//! [`Frames`] finds records in bytes; a [`RecordStream`] supplies the bytes, decompressed, and keeps
//! no more of them than a block and the record that follows it.

mod cursor;
mod input;
mod opened_ahead;

use std::fmt::Debug;
use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::format_error::FormatError;
use super::record_limit::check_decoded_len;
use super::scanned::{Compression, HEAD_LEN, MayBeCompressed};
use crate::io::file_bytes::{FileBytes, error_of};
use crate::io::storage::Storage;
use crate::{Error, Result};
use input::{ByteSource, Input};

pub use cursor::RecordCursor;
pub use input::Start;
pub use opened_ahead::RecordStreams;

/// About how many bytes a block has.
pub const BLOCK_BYTES: usize = 256 << 10;

/// Records that are handled together.
#[derive(Debug, Default)]
pub struct RecordBlock {
    /// The first `byte_len` of them count.
    bytes: Vec<u8>,
    byte_len: usize,
    /// Where each record is in `bytes`.
    records: Vec<Range<usize>>,
    /// The number of the first record.
    first: u64,
}

impl RecordBlock {
    /// Removes the records but keeps the memory for the next ones.
    pub fn clear(&mut self) {
        self.byte_len = 0;
        self.records.clear();
    }

    /// Appends a record.
    pub fn push(&mut self, record: &[u8]) {
        let begin = self.byte_len;
        self.bytes.truncate(begin);
        self.bytes.extend_from_slice(record);
        self.byte_len = self.bytes.len();
        self.records.push(begin..self.byte_len);
    }

    /// The number of the first record, for messages.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// Sets the number of the first record.
    pub fn set_first(&mut self, first: u64) {
        self.first = first;
    }

    /// Moves the records from number `first` on to the end of `other`.
    pub fn move_from(&mut self, first: usize, other: &mut Self) {
        for range in self.records.drain(first.min(self.records.len())..) {
            other.push(&self.bytes[range]);
        }
    }

    /// How many records.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Record `at` of the block.
    pub fn get(&self, at: usize) -> Option<&[u8]> {
        self.records.get(at).map(|range| &self.bytes[range.clone()])
    }

    /// The bytes in memory, including what lies between records.
    pub fn byte_len(&self) -> usize {
        self.byte_len
    }

    /// The records, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        self.records.iter().map(|range| &self.bytes[range.clone()])
    }
}

/// What [`Frames`] finds at a position.
#[derive(Debug, PartialEq, Eq)]
pub enum Frame {
    /// A record, and where the next frame begins.
    Record(Range<usize>, usize),
    /// Nothing, up to where the next frame begins.
    Skipped(usize),
    /// A damaged record; the frame after it begins here.
    Damaged(FormatError, usize),
    /// The frame has at least this many bytes.
    Incomplete(u64),
}

/// How a format separates records.
pub trait Frames: Debug + MayBeCompressed + Send {
    /// The frame that begins at `at` in `bytes`, which are not empty from there on. In the first
    /// `searched` bytes of it an earlier call has found that it is incomplete; `left` is how many bytes
    /// the stream has from `at` on, if that is known.
    ///
    /// # Errors
    /// What is wrong, if no record can be found after this.
    fn frame(
        &self,
        bytes: &[u8],
        at: usize,
        searched: usize,
        left: Option<u64>,
    ) -> Result<Frame, FormatError>;
}

/// A damaged record, or the place from which on no record can be found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// The number of the record.
    pub record: u64,
    /// Where it begins, in the decompressed file.
    pub offset: u64,
    /// What is wrong.
    pub problem: String,
}

/// The records of a file, in order.
#[derive(Debug)]
pub struct RecordStream {
    path: PathBuf,
    frames: Box<dyn Frames>,
    input: Input,
    /// What is wrong with the compressed data, from the end of `carry` on.
    broken: Option<String>,
    /// Where the input must be moved before it is read.
    moved: Option<u64>,
    /// Bytes that follow the last block.
    carry: Vec<u8>,
    /// The position of `carry` in the decompressed file.
    offset: u64,
    /// The position of the last block, and where its frames end in it.
    block_begin: u64,
    ends: Vec<usize>,
    num_records: u64,
    /// Whether `num_records` counts from the first record of the file.
    is_numbered: bool,
    /// Whether no record can be found after `carry`.
    is_over: bool,
    /// Whether the input has ended.
    is_end: bool,
}

/// The state of reading a block.
struct Taking<'a> {
    records: &'a mut Vec<Range<usize>>,
    /// Where the next frame begins.
    at: usize,
    max_records: usize,
    until: u64,
    /// How many bytes the next frame needs at least, and in how many that was found.
    needed: usize,
    searched: usize,
    num_damaged: u64,
    /// The places that are damaged, if reading goes on behind them.
    damages: Option<&'a mut Damages>,
    failure: Option<Error>,
}

/// The first damaged places of a file.
struct Damages {
    found: Vec<Damage>,
    max: usize,
}

impl Taking<'_> {
    /// Whether the block, which begins at `offset`, should not grow.
    fn is_full(&self, offset: u64) -> bool {
        self.is_enough(offset) || !self.records.is_empty() && self.at + self.needed > BLOCK_BYTES
    }

    /// Whether what was asked for has been found.
    fn is_enough(&self, offset: u64) -> bool {
        self.records.len() >= self.max_records
            || offset + self.at as u64 >= self.until
            || self.damages.as_ref().is_some_and(|damages| damages.found.len() >= damages.max)
    }
}

impl RecordStream {
    /// Opens the file at `path`, compressed as its first bytes say.
    ///
    /// # Errors
    /// If it cannot be opened or read, is not a regular file, or is a file of another kind.
    pub fn open(storage: &dyn Storage, path: &Path, frames: Box<dyn Frames>) -> Result<Self> {
        let mut file = FileBytes::open(storage, path)?;
        let mut head = [0; HEAD_LEN];
        let len = file.next(&mut head)?;
        let compression = frames.compression(path, &head[..len])?;
        file.seek(0);
        Self::new(file.path().to_owned(), ByteSource::File(file), compression, frames)?.checked()
    }

    /// The records of what `input` reads, the content of a file at `path`.
    ///
    /// # Errors
    /// If it cannot be read, or is that of a file of another kind.
    pub fn of(
        path: PathBuf,
        mut input: impl Read + Send + 'static,
        frames: Box<dyn Frames>,
    ) -> Result<Self> {
        let mut head = Vec::new();
        let read = (&mut input).take(HEAD_LEN as u64).read_to_end(&mut head);
        read.map_err(|error| Error::io(&path, "read", error))?;
        let compression = frames.compression(&path, &head)?;
        let whole = Box::new(io::Cursor::new(head).chain(input));
        Self::new(path, ByteSource::Other(whole), compression, frames)?.checked()
    }

    /// The records of what `input` reads, a part of a file at `path`: it begins at byte `offset`, with
    /// record number `num_records`, and is not compressed.
    ///
    /// # Errors
    /// Never.
    pub fn plain_from(
        path: PathBuf,
        input: Box<dyn Read + Send>,
        frames: Box<dyn Frames>,
        offset: u64,
        num_records: u64,
    ) -> Result<Self> {
        let stream = Self::new(path, ByteSource::Other(input), Compression::None, frames)?;
        Ok(Self { offset, num_records, ..stream })
    }

    fn new(
        path: PathBuf,
        source: ByteSource,
        compression: Compression,
        frames: Box<dyn Frames>,
    ) -> Result<Self> {
        let input = Input::new(source, compression);
        let input = input.map_err(|error| Error::io(&path, "decompress", error))?;
        Ok(Self {
            path,
            frames,
            input,
            broken: None,
            moved: None,
            carry: Vec::new(),
            offset: 0,
            block_begin: 0,
            ends: Vec::new(),
            num_records: 0,
            is_numbered: true,
            is_over: false,
            is_end: false,
        })
    }

    /// This stream, of which what it decompresses to is not of another kind.
    fn checked(mut self) -> Result<Self> {
        if self.compression() != Compression::None {
            let (mut bytes, mut len) = (Vec::new(), 0);
            self.fill(&mut bytes, &mut len, HEAD_LEN)?;
            bytes.truncate(len);
            self.frames.check_content(&self.path, &bytes[..len.min(HEAD_LEN)])?;
            self.carry = bytes;
        }
        Ok(self)
    }

    /// How the file is compressed.
    pub fn compression(&self) -> Compression {
        self.input.compression()
    }

    /// How many records have been read or skipped.
    pub fn num_records(&self) -> u64 {
        self.num_records
    }

    /// How many bytes of the decompressed file have been read.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// How many bytes of the file, as it is stored, have been read: if it is compressed, those that
    /// the decompressor has asked for.
    pub fn stored_offset(&self) -> u64 {
        self.input.compressed_offset().unwrap_or(self.offset)
    }

    /// Where the last block begins.
    fn block_begin(&self) -> u64 {
        self.block_begin
    }

    /// Where the frame of record `at` of the last block ends.
    fn end_of(&self, at: usize) -> u64 {
        self.block_begin + self.ends.get(at).map_or(0, |&end| end as u64)
    }

    /// The same stream, whose errors do not name the numbers of records.
    fn without_numbers(self) -> Self {
        Self { is_numbered: false, ..self }
    }

    /// A place before byte `at` of the decompressed file, of the last block or later, where decompression
    /// can start.
    fn start_before(&self, at: u64) -> Start {
        self.input.start_before(at)
    }

    /// Goes on at byte `at` of the decompressed file, where a frame begins. The input must be a file. It
    /// is decompressed from `start` on, which is before `at`, or else from the last start that is known.
    pub fn seek(&mut self, at: u64, start: Option<Start>) {
        if let Some(start) = start {
            self.input.set_start(start);
        }
        self.carry.clear();
        (self.broken, self.moved) = (None, Some(at));
        (self.offset, self.block_begin) = (at, at);
        self.ends.clear();
        (self.is_numbered, self.is_over) = (false, false);
    }

    /// Replaces the records of `block` by the next ones: those of about [`BLOCK_BYTES`], at least one
    /// and at most `max_records`. Returns whether there were any.
    ///
    /// # Errors
    /// If the file cannot be read, is truncated, or the next record is damaged; those before it have
    /// been returned, and the next call tries again.
    pub fn read(&mut self, block: &mut RecordBlock, max_records: usize) -> Result<bool> {
        self.read_some(block, max_records, u64::MAX, None)?;
        Ok(!block.is_empty())
    }

    /// Reads to the end of the file, or behind the last of `max_damages` damaged places, which it
    /// returns. `tell` is told after each block how many bytes of the file, as it is stored, and records
    /// were read.
    ///
    /// # Errors
    /// If the file cannot be read, or of `tell`.
    pub fn verify(
        &mut self,
        block: &mut RecordBlock,
        max_damages: usize,
        tell: &mut dyn FnMut(u64, u64) -> Result<()>,
    ) -> Result<Vec<Damage>> {
        let mut damages = Damages { found: Vec::new(), max: max_damages };
        while damages.found.len() < max_damages
            && self.read_some(block, usize::MAX, u64::MAX, Some(&mut damages))?
        {
            tell(self.stored_offset(), self.num_records)?;
        }
        Ok(damages.found)
    }

    /// Skips `count` records; returns how many there were.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn skip(&mut self, block: &mut RecordBlock, count: u64) -> Result<u64> {
        let before = self.num_records;
        loop {
            let missing = count - (self.num_records - before);
            let max = usize::try_from(missing).unwrap_or(usize::MAX);
            if max == 0 || !self.read(block, max)? {
                return Ok(self.num_records - before);
            }
        }
    }

    /// Skips the records that begin before byte `until` of the decompressed file.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn skip_until(&mut self, block: &mut RecordBlock, until: u64) -> Result<()> {
        while self.read_some(block, usize::MAX, until, None)? {}
        Ok(())
    }

    /// Replaces the records of `block` by the next ones that begin before `until`; returns whether
    /// there may be more. With `damages`, adds what is wrong there and goes on if possible, until
    /// these are enough.
    fn read_some(
        &mut self,
        block: &mut RecordBlock,
        max_records: usize,
        until: u64,
        damages: Option<&mut Damages>,
    ) -> Result<bool> {
        block.clear();
        self.ends.clear();
        self.block_begin = self.offset;
        if max_records == 0 || self.offset >= until || self.is_over {
            return Ok(false);
        }
        self.move_input()?;
        self.input.forget_starts_before(self.offset);
        let mut bytes = std::mem::take(&mut block.bytes);
        let mut len = self.carry.len();
        match bytes.get_mut(..len) {
            Some(begin) => begin.copy_from_slice(&self.carry),
            None => bytes.clone_from(&self.carry),
        }
        let mut taking = Taking {
            records: &mut block.records,
            at: 0,
            max_records,
            until,
            needed: 1,
            searched: 0,
            num_damaged: 0,
            damages,
            failure: None,
        };
        loop {
            self.take_frames(&bytes[..len], &mut taking);
            let is_over = self.is_end || self.is_over || taking.failure.is_some();
            if is_over || taking.is_full(self.offset) {
                break;
            }
            if let Some(problem) = self.broken.clone() {
                self.is_over = taking.damages.is_some();
                self.found_damage(&mut taking, len, problem);
                break;
            }
            if taking.records.is_empty() && taking.at > 0 {
                // What was skipped is not kept.
                bytes.copy_within(taking.at..len, 0);
                self.offset += taking.at as u64;
                (self.block_begin, len) = (self.offset, len - taking.at);
                taking.at = 0;
            }
            if let Err(error) = self.fill(&mut bytes, &mut len, taking.needed) {
                taking.failure = Some(error);
                break;
            }
        }
        let is_full = taking.is_full(self.offset);
        let Taking { at, num_damaged, failure, .. } = taking;
        self.carry.clear();
        self.carry.extend_from_slice(&bytes[at..len]);
        (block.bytes, block.byte_len) = (bytes, at);
        self.offset += at as u64;
        self.num_records += block.records.len() as u64 + num_damaged;
        match failure {
            Some(error) if block.is_empty() => Err(error),
            // After records, the next call fails in the same way.
            Some(_) => Ok(true),
            None => Ok(is_full || !block.is_empty()),
        }
    }

    /// Takes the frames of `bytes` that are complete.
    fn take_frames(&mut self, bytes: &[u8], taking: &mut Taking<'_>) {
        let follow = if self.is_end { Some(0) } else { self.input.left() };
        taking.needed = 1;
        let mut searched = std::mem::take(&mut taking.searched);
        while taking.at < bytes.len() && !taking.is_enough(self.offset) {
            let available = bytes.len() - taking.at;
            let left = follow.map(|follow| follow + available as u64);
            let frame = self.frames.frame(bytes, taking.at, std::mem::take(&mut searched), left);
            let (problem, next) = match frame {
                Ok(Frame::Record(record, next)) => {
                    taking.records.push(record);
                    self.ends.push(next);
                    taking.at = next;
                    continue;
                }
                Ok(Frame::Skipped(next)) => {
                    taking.at = next;
                    continue;
                }
                Ok(Frame::Incomplete(len)) => match self.limited(len) {
                    Ok(len) => {
                        taking.needed = len - available.min(len);
                        taking.searched = available;
                        return;
                    }
                    Err(problem) => (problem, None),
                },
                Ok(Frame::Damaged(problem, next)) => (problem, Some(next)),
                Err(problem) => (problem, None),
            };
            let at = taking.at;
            self.found_damage(taking, at, problem.to_string());
            match next {
                Some(next) if taking.failure.is_none() => {
                    taking.num_damaged += 1;
                    taking.at = next;
                }
                _ => {
                    self.is_over = taking.failure.is_none();
                    return;
                }
            }
        }
    }

    /// Notes `problem` at position `at` of the block, or makes it the failure.
    fn found_damage(&self, taking: &mut Taking<'_>, at: usize, problem: String) {
        let record = self.num_records + taking.records.len() as u64 + taking.num_damaged;
        let damage = Damage { record, offset: self.offset + at as u64, problem };
        match &mut taking.damages {
            Some(damages) => damages.found.push(damage),
            None => taking.failure = Some(self.damaged(damage)),
        }
    }

    /// Moves the input to where it should be.
    fn move_input(&mut self) -> Result<()> {
        if let Some(at) = self.moved {
            match self.input.seek(at).map_err(error_of) {
                Err(Ok(error)) => return Err(error),
                Err(Err(error)) if is_damage(&error) => {
                    let problem = format!("damaged compressed data: {error}");
                    let record = self.num_records;
                    return Err(self.damaged(Damage { record, offset: at, problem }));
                }
                Err(Err(error)) => return Err(Error::io(&self.path, "decompress", error)),
                Ok(()) => (self.moved, self.is_end) = (None, false),
            }
        }
        Ok(())
    }

    /// A length that a frame states, checked against what may be in memory. A file that is not
    /// compressed is as long as it says.
    fn limited(&self, len: u64) -> Result<usize, FormatError> {
        if self.input.left().is_none() {
            check_decoded_len(len, self.input.compressed_offset().unwrap_or(0))?;
        }
        usize::try_from(len).map_err(|_| FormatError::new(format!("no memory for {len} bytes")))
    }

    /// Reads at least `needed` bytes, except at the end of the file, behind the first `len` of `bytes`.
    ///
    /// Memory grows with what the file has or delivers, not with what a length in it claims.
    fn fill(&mut self, bytes: &mut Vec<u8>, len: &mut usize, needed: usize) -> Result<()> {
        let mut missing = needed.max(BLOCK_BYTES);
        while missing > 0 {
            let mut step = missing.min((*len / 2).max(BLOCK_BYTES));
            if let Some(left) = self.input.left() {
                step = missing.min(usize::try_from(left).unwrap_or(usize::MAX)).max(1);
            }
            let end = *len + step;
            if bytes.len() < end {
                if bytes.try_reserve(end - bytes.len()).is_err() {
                    let path = self.path.display();
                    let text = format!("{path}: no memory for a record of {needed} bytes");
                    return Err(Error::OutOfMemory(text));
                }
                bytes.resize(end, 0);
            }
            while *len < end {
                match self.input.read(&mut bytes[*len..end]) {
                    Ok(0) => {
                        self.is_end = true;
                        return Ok(());
                    }
                    Ok(read) => *len += read,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return self.failed(error, *len),
                }
            }
            missing -= step;
        }
        Ok(())
    }

    /// Notes an error of the input, behind `buffered` bytes, if it is one of the data; otherwise
    /// returns it.
    fn failed(&mut self, error: io::Error, buffered: usize) -> Result<()> {
        let is_compressed = self.compression() != Compression::None;
        let error = match error_of(error) {
            Ok(error) => error,
            Err(error) if is_compressed && is_damage(&error) => {
                self.broken = Some(format!("damaged compressed data: {error}"));
                return Ok(());
            }
            Err(error) => Error::io(&self.path, "read", error),
        };
        if is_compressed {
            // A decompressor cannot go on after an error.
            self.moved = Some(self.offset + buffered as u64);
        }
        Err(error)
    }

    fn damaged(&self, Damage { record, offset, problem }: Damage) -> Error {
        let place = self.compression().place(self.is_numbered.then_some(record), offset);
        Error::corrupt(&self.path, place, problem)
    }
}

/// Whether a decompressor says by `error` that its data are damaged.
fn is_damage(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidData, InvalidInput, UnexpectedEof};
    matches!(error.kind(), InvalidData | InvalidInput | UnexpectedEof)
}
