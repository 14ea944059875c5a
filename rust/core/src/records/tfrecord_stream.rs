//! The records of a `TFRecord` file from any byte on, one after the other, without an index.

use std::path::Path;
use std::sync::Arc;

use super::format_error::FormatError;
use super::raw_bytes::grow_to;
use super::storage::{Reader, Storage, StoredFile};
use super::storage_latency::StorageLatency;
use super::tfrecord::{HEAD_LEN, TAIL_LEN, check_record, record_len};
use crate::{Error, Result};

/// How many bytes are read at once, unless a record is longer.
const BLOCK_LEN: u64 = 256 << 10;

/// A file that is read from begin to end.
#[derive(Debug)]
pub struct TfRecordStream {
    stored: Box<dyn StoredFile>,
    latency: StorageLatency,
    /// Where the next record begins.
    at: u64,
    /// The bytes of the file from `begin` to `end`.
    buffer: Vec<u8>,
    begin: u64,
    end: u64,
}

impl TfRecordStream {
    /// Opens the file at `path`.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub fn open(storage: &Arc<dyn Storage>, path: &Path) -> Result<Self> {
        let (stored, _) = storage.open(path)?;
        let latency = StorageLatency::default();
        Ok(Self { stored, latency, at: 0, buffer: Vec::new(), begin: 0, end: 0 })
    }

    /// Where the next record begins.
    pub fn tell(&self) -> u64 {
        self.at
    }

    /// Makes the record that begins at `at` the next one.
    pub fn seek(&mut self, at: u64) {
        self.at = at;
    }

    /// The next record, if that needs no I/O.
    ///
    /// # Errors
    /// If it is damaged.
    pub fn buffered(&mut self) -> Result<Option<&[u8]>> {
        let begin = self.at;
        let Some(head) = self.bytes(begin, HEAD_LEN as u64).and_then(<[u8]>::first_chunk) else {
            return Ok(None);
        };
        let len = record_len(head).map_err(|problem| self.damaged(&problem))?;
        let frame_len = len.saturating_add((HEAD_LEN + TAIL_LEN) as u64);
        let Some(frame) = self.bytes(begin, frame_len) else { return Ok(None) };
        let Some((record, tail)) = frame[HEAD_LEN..].split_last_chunk() else { return Ok(None) };
        check_record(record, *tail).map_err(|problem| self.damaged(&problem))?;
        self.at = begin + frame_len;
        let from = usize::try_from(begin - self.begin).unwrap_or(usize::MAX) + HEAD_LEN;
        let to = from + usize::try_from(len).unwrap_or(usize::MAX);
        Ok(self.buffer.get(from..to))
    }

    /// Reads the next record and what follows it into the buffer; returns whether there is one.
    ///
    /// # Errors
    /// If the file cannot be read, was changed, or ends inside of the record.
    pub fn fill(&mut self) -> Result<bool> {
        let file_len = self.stored.byte_len();
        let left = file_len.saturating_sub(self.at);
        if left == 0 {
            return Ok(false);
        }
        let short = |needed: u64| {
            FormatError::new(format!("record is cut short: takes {needed} bytes, {left} are left"))
        };
        let mut needed = HEAD_LEN as u64;
        if self.bytes(self.at, needed).is_none() {
            if left < needed {
                return Err(self.damaged(&short(needed)));
            }
            self.read(BLOCK_LEN.min(left))?;
        }
        let head = self.bytes(self.at, needed).and_then(<[u8]>::first_chunk);
        if let Some(head) = head {
            let len = record_len(head).map_err(|problem| self.damaged(&problem))?;
            needed = len.saturating_add((HEAD_LEN + TAIL_LEN) as u64);
        }
        if left < needed {
            return Err(self.damaged(&short(needed)));
        }
        if self.bytes(self.at, needed).is_none() {
            self.read(needed.max(BLOCK_LEN).min(left))?;
        }
        Ok(true)
    }

    /// `len` bytes at `at`, if they are in the buffer.
    fn bytes(&self, at: u64, len: u64) -> Option<&[u8]> {
        let end = at.checked_add(len)?;
        if at < self.begin || end > self.end {
            return None;
        }
        let from = usize::try_from(at - self.begin).ok()?;
        self.buffer.get(from..)?.get(..usize::try_from(len).ok()?)
    }

    /// Reads the next `len` bytes into the buffer.
    fn read(&mut self, len: u64) -> Result<()> {
        let reopened = self.stored.reopen(false)?;
        (self.begin, self.end) = (self.at, self.at);
        let mut buffer = std::mem::take(&mut self.buffer);
        if buffer.len() as u64 > BLOCK_LEN.max(len) {
            buffer = Vec::new();
        }
        let bytes = grow_to(&mut buffer, len).map_err(|problem| self.damaged(&problem))?;
        Reader::new(&*reopened.bytes, &self.latency).read_at(bytes, self.at)?;
        self.buffer = buffer;
        self.end = self.at + len;
        Ok(())
    }

    #[cold]
    fn damaged(&self, problem: &FormatError) -> Error {
        Error::Corrupt {
            path: self.stored.path().display().to_string(),
            place: format!("record at byte {}", self.at),
            problem: problem.to_string(),
        }
    }
}
