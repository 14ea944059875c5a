//! Records in the order of a file, in blocks, for formats without an index of their own.
//!
//! A [`Framing`] finds records in bytes; a [`RecordStream`] supplies the bytes, decompressed, and keeps
//! no more of them than a block and the record that follows it.

mod lines;
mod tfrecord;

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use flate2::read::{MultiGzDecoder, ZlibDecoder};

use crate::{Error, Result};

pub use lines::Lines;
pub use tfrecord::TfRecords;

/// About how many bytes a block has.
pub const BLOCK_BYTES: usize = 256 << 10;

/// Records that are handled together.
#[derive(Debug, Default)]
pub struct RecordBlock {
    bytes: Vec<u8>,
    /// Where each record is in `bytes`.
    records: Vec<Range<usize>>,
    /// The number of the first record.
    first: u64,
}

impl RecordBlock {
    /// Removes the records but keeps the memory for the next ones.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.records.clear();
    }

    /// Appends a record.
    pub fn push(&mut self, record: &[u8]) {
        let begin = self.bytes.len();
        self.bytes.extend_from_slice(record);
        self.records.push(begin..self.bytes.len());
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

    /// The bytes in memory, including what lies between records.
    pub fn byte_len(&self) -> usize {
        self.bytes.len()
    }

    /// The records, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        self.records.iter().map(|range| &self.bytes[range.clone()])
    }
}

/// What a [`Framing`] finds at a position.
#[derive(Debug, PartialEq, Eq)]
pub enum Frame {
    /// A record, and where the next frame begins.
    Record(Range<usize>, usize),
    /// Nothing, up to where the next frame begins.
    Skipped(usize),
    /// A damaged record; the frame after it begins here.
    Damaged(String, usize),
    /// The frame has at least this many bytes.
    Incomplete(usize),
}

/// How a format separates records.
pub trait Framing: Send {
    /// The frame that begins at `at` in `bytes`, which are not empty from there on; with `is_end`,
    /// nothing follows them.
    ///
    /// # Errors
    /// What is wrong, if no record can be found after this.
    fn frame(&self, bytes: &[u8], at: usize, is_end: bool) -> Result<Frame, String>;
}

/// How a file is compressed as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Not at all.
    None,
    /// One or more gzip members.
    Gzip,
    /// One zlib stream.
    Zlib,
}

impl Compression {
    /// The compression of a file that begins with `first`.
    ///
    /// Bytes that look like the header of a zlib stream are the length of a record in a `TFRecord`
    /// file, if its checksum says so.
    pub fn of(first: &[u8]) -> Self {
        match first {
            _ if tfrecord::begins_with(first) => Self::None,
            [0x1f, 0x8b, 8, ..] => Self::Gzip,
            [0x78, 0x01 | 0x5e | 0x9c | 0xda, ..] => Self::Zlib,
            _ => Self::None,
        }
    }
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
pub struct RecordStream {
    path: PathBuf,
    input: Box<dyn Read + Send>,
    compression: Compression,
    framing: Box<dyn Framing>,
    /// Bytes that follow the last block.
    carry: Vec<u8>,
    /// The position of `carry` in the decompressed file.
    offset: u64,
    num_records: u64,
    is_end: bool,
}

impl fmt::Debug for RecordStream {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("RecordStream")
            .field("path", &self.path)
            .field("offset", &self.offset)
            .field("num_records", &self.num_records)
            .finish_non_exhaustive()
    }
}

impl RecordStream {
    /// Opens the file at `path`, compressed as its first bytes say.
    ///
    /// # Errors
    /// If it cannot be opened or read, or is not a regular file.
    pub fn open(path: impl Into<PathBuf>, framing: Box<dyn Framing>) -> Result<Self> {
        let path = path.into();
        let metadata = std::fs::metadata(&path).map_err(|error| Error::io(&path, "open", error))?;
        if metadata.is_dir() {
            return Err(Error::io(&path, "open", io::ErrorKind::IsADirectory.into()));
        }
        if !metadata.is_file() {
            return Err(corrupt(&path, "whole file".to_owned(), "not a regular file".to_owned()));
        }
        let file = File::open(&path).map_err(|error| Error::io(&path, "open", error))?;
        Self::of(path, file, framing)
    }

    /// The records of what `input` reads, the content of a file at `path`.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn of(
        path: PathBuf,
        mut input: impl Read + Send + 'static,
        framing: Box<dyn Framing>,
    ) -> Result<Self> {
        let mut first = Vec::new();
        let head = (&mut input).take(16).read_to_end(&mut first);
        head.map_err(|error| Error::io(&path, "read", error))?;
        let compression = Compression::of(&first);
        let whole = io::Cursor::new(first).chain(input);
        let input: Box<dyn Read + Send> = match compression {
            Compression::None => Box::new(whole),
            Compression::Gzip => {
                Box::new(MultiGzDecoder::new(io::BufReader::with_capacity(BLOCK_BYTES / 4, whole)))
            }
            Compression::Zlib => {
                Box::new(ZlibDecoder::new(io::BufReader::with_capacity(BLOCK_BYTES / 4, whole)))
            }
        };
        Ok(Self {
            path,
            input,
            compression,
            framing,
            carry: Vec::new(),
            offset: 0,
            num_records: 0,
            is_end: false,
        })
    }

    /// How the file is compressed.
    pub fn compression(&self) -> Compression {
        self.compression
    }

    /// How many records have been read.
    pub fn num_records(&self) -> u64 {
        self.num_records
    }

    /// How many bytes of the decompressed file have been read.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Replaces the records of `block` by the next ones: those of about [`BLOCK_BYTES`], at least one
    /// and at most `max_records`. Returns whether there were any.
    ///
    /// # Errors
    /// If the file cannot be read, is truncated, or the next record is damaged.
    pub fn read(&mut self, block: &mut RecordBlock, max_records: usize) -> Result<bool> {
        let mut damages = Vec::new();
        let result = self.read_some(block, max_records, &mut damages, 0);
        match damages.pop() {
            Some(damage) => Err(self.damaged(damage)),
            None => result,
        }
    }

    /// Reads to the end of the file; returns up to `max_damages` damaged places.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn verify(&mut self, block: &mut RecordBlock, max_damages: usize) -> Result<Vec<Damage>> {
        let mut damages = Vec::new();
        while damages.len() < max_damages
            && self.read_some(block, usize::MAX, &mut damages, max_damages)?
        {}
        damages.truncate(max_damages);
        Ok(damages)
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

    /// As [`read`](Self::read), but stops only after more than `max_damages` damaged records.
    fn read_some(
        &mut self,
        block: &mut RecordBlock,
        max_records: usize,
        damages: &mut Vec<Damage>,
        max_damages: usize,
    ) -> Result<bool> {
        block.clear();
        if max_records == 0 {
            return Ok(false);
        }
        let begin = self.offset;
        std::mem::swap(&mut block.bytes, &mut self.carry);
        let mut at = 0;
        let first_record = self.num_records;
        let mut num_damaged = 0;
        loop {
            let mut needed = 1;
            while block.records.len() < max_records && at < block.bytes.len() {
                let place = |problem| Damage {
                    record: first_record + block.records.len() as u64 + num_damaged,
                    offset: begin + at as u64,
                    problem,
                };
                match self.framing.frame(&block.bytes, at, self.is_end) {
                    Ok(Frame::Record(record, next)) => {
                        block.records.push(record);
                        at = next;
                    }
                    Ok(Frame::Skipped(next)) => at = next,
                    Ok(Frame::Damaged(problem, next)) => {
                        damages.push(place(problem));
                        num_damaged += 1;
                        at = next;
                        if damages.len() > max_damages {
                            self.is_end = true;
                            block.bytes.truncate(at);
                            break;
                        }
                    }
                    Ok(Frame::Incomplete(len)) => {
                        needed = len - (block.bytes.len() - at).min(len);
                        break;
                    }
                    Err(problem) => {
                        damages.push(place(problem));
                        self.is_end = true;
                        block.bytes.truncate(at);
                        break;
                    }
                }
            }
            let is_full = block.records.len() >= max_records
                || !block.records.is_empty() && at + needed > BLOCK_BYTES
                || num_damaged > 0 && block.records.is_empty() && at > BLOCK_BYTES;
            if is_full || self.is_end {
                self.carry.clear();
                self.carry.extend_from_slice(&block.bytes[at..]);
                block.bytes.truncate(at);
                self.offset = begin + at as u64;
                self.num_records = first_record + block.records.len() as u64 + num_damaged;
                return Ok(!block.records.is_empty() || is_full);
            }
            self.fill(&mut block.bytes, needed)?;
        }
    }

    /// Appends at least `needed` bytes to `bytes`, except at the end of the file.
    ///
    /// Memory grows with what the file delivers, not with what a length in it claims.
    fn fill(&mut self, bytes: &mut Vec<u8>, needed: usize) -> Result<()> {
        let mut missing = needed.max(BLOCK_BYTES);
        while missing > 0 {
            let step = missing.min((bytes.len() / 2).max(BLOCK_BYTES));
            let begin = bytes.len();
            if bytes.try_reserve(step).is_err() {
                let text =
                    format!("{}: no memory for a record of {needed} bytes", self.path.display());
                return Err(Error::OutOfMemory(text));
            }
            bytes.resize(begin + step, 0);
            let mut filled = 0;
            while filled < step {
                match self.input.read(&mut bytes[begin + filled..]) {
                    Ok(0) => {
                        bytes.truncate(begin + filled);
                        self.is_end = true;
                        return Ok(());
                    }
                    Ok(len) => filled += len,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(self.unreadable(begin + filled, error)),
                }
            }
            missing -= step;
        }
        Ok(())
    }

    fn unreadable(&self, buffered: usize, error: io::Error) -> Error {
        let is_damage = matches!(
            error.kind(),
            io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput | io::ErrorKind::UnexpectedEof
        );
        if self.compression == Compression::None || !is_damage {
            return Error::io(&self.path, "read", error);
        }
        let place = format!("byte {} of the decompressed file", self.offset + buffered as u64);
        corrupt(&self.path, place, format!("damaged compressed data: {error}"))
    }

    fn damaged(&self, damage: Damage) -> Error {
        let Damage { record, offset, problem } = damage;
        let of =
            if self.compression == Compression::None { "" } else { " of the decompressed file" };
        corrupt(&self.path, format!("record {record} at byte {offset}{of}"), problem)
    }
}

fn corrupt(path: &Path, place: String, problem: String) -> Error {
    Error::Corrupt { path: path.display().to_string(), place, problem }
}
