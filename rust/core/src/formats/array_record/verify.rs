//! Verifies a whole file: every chunk from the first byte to the last, and the index against them.

use std::path::Path;

use super::super::format_error::{FormatError, StreamError};
use super::super::offsets::Offsets;
use super::super::riegeli::Decoder;
use super::super::riegeli::block::{BLOCK_LEN, BlockHeader};
use super::super::riegeli::chunk::{Opened, kind};
use super::footer::Footer;
use super::ranges::{Forward, RangeReader, read_chunk, read_header};
use super::reader::find_footer;
use super::{diagnose, index};
use crate::Result;
use crate::io::storage::{Reader, Storage, StoredFile};
use crate::io::storage_latency::StorageLatency;

/// What is wrong at one place of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The place in the file, in bytes.
    pub offset: u64,
    /// The number of the chunk in the index, for one that holds records.
    pub chunk: Option<u64>,
    /// What is wrong.
    pub problem: String,
}

/// What a file holds, as far as it could be read.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Report {
    /// The length of the file in bytes.
    pub byte_len: u64,
    /// Intact chunks with records, and their records.
    pub num_chunks: u64,
    /// The records of these chunks.
    pub num_records: u64,
    /// The lengths of these records together.
    pub record_bytes: u64,
    /// The records that the index states, if it can be read.
    pub indexed_records: Option<u64>,
    /// What is wrong, in the order of the file.
    pub problems: Vec<Problem>,
}

/// About how many bytes are verified between two calls of the function that is told.
const TOLD_LEN: u64 = 1 << 20;

/// Verifies the file at `path`, up to `max_problems`.
///
/// Every chunk is read, its checksums are verified and its records are decoded. After a damaged chunk,
/// the next one is found by the index, or by the header of a block of 64 KiB. `tell` is told now and
/// then how many bytes and records were verified.
///
/// # Errors
/// If the file cannot be opened or read, or of `tell`.
pub fn verify(
    storage: &dyn Storage,
    path: &Path,
    max_problems: usize,
    tell: &mut dyn FnMut(u64, u64) -> Result<()>,
) -> Result<Report> {
    let (stored, bytes) = storage.open(path)?;
    let latency = StorageLatency::default();
    if storage.is_remote(path) {
        latency.expect_slow();
    }
    verify_stored(&*stored, Reader::new(&*bytes, &latency), max_problems, tell)
}

fn verify_stored(
    stored: &dyn StoredFile,
    reader: Reader<'_>,
    max: usize,
    tell: &mut dyn FnMut(u64, u64) -> Result<()>,
) -> Result<Report> {
    let byte_len = stored.byte_len();
    let source = Forward::new(reader, byte_len);
    let mut walk = Walk {
        source: &source,
        byte_len,
        offsets: None,
        footer: Footer::default(),
        index_end: byte_len,
        raw: Vec::new(),
        decoder: Decoder::default(),
        report: Report { byte_len, ..Report::default() },
    };
    match find_footer(&source, byte_len)? {
        Err(problem) => {
            let offset = byte_len.saturating_sub(BLOCK_LEN);
            let error = diagnose::no_index(stored, reader, problem).to_string();
            let shown = error.split_once(": ").map_or(error.as_str(), |(_, rest)| rest);
            walk.add(offset, None, shown.to_owned());
        }
        Ok(extent) if extent.start >= extent.end => {
            let text = format!("footer must begin before byte {}", extent.end);
            walk.add(extent.start, None, text);
        }
        Ok(extent) => match index::read(&source, &extent, u64::MAX) {
            Ok(index) => {
                walk.report.indexed_records = Some(index.footer.num_records);
                walk.offsets = index.offsets;
                walk.footer = index.footer;
                walk.index_end = extent.start;
            }
            Err(StreamError::File(error)) => return Err(error),
            Err(StreamError::Data(problem)) => {
                walk.add(extent.start, None, format!("footer: {problem}"));
                walk.index_end = extent.start;
            }
        },
    }
    walk.run(max, tell)?;
    let mut report = walk.report;
    report.problems.sort_by_key(|problem| problem.offset);
    report.problems.truncate(max);
    Ok(report)
}

struct Walk<'a, S> {
    source: &'a S,
    byte_len: u64,
    offsets: Option<Offsets>,
    footer: Footer,
    /// Where the footer begins, or the end of the file.
    index_end: u64,
    raw: Vec<u8>,
    decoder: Decoder,
    report: Report,
}

impl<S: RangeReader> Walk<'_, S> {
    fn add(&mut self, offset: u64, chunk: Option<u64>, problem: String) {
        self.report.problems.push(Problem { offset, chunk, problem });
    }

    fn run(
        &mut self,
        max_problems: usize,
        tell: &mut dyn FnMut(u64, u64) -> Result<()>,
    ) -> Result<()> {
        let mut at = 0;
        let mut told = 0;
        let mut chunk = 0; // the number of the next chunk in the index
        while at < self.byte_len && self.report.problems.len() < max_problems {
            while self.offset_of(chunk).is_some_and(|offset| offset < at) {
                let offset = self.offset_of(chunk).unwrap_or_default();
                let text = "the index states a chunk here, where there is none".to_owned();
                self.add(offset, Some(chunk), text);
                chunk += 1;
            }
            let is_indexed = self.offset_of(chunk) == Some(at);
            let number = is_indexed.then_some(chunk);
            chunk += u64::from(is_indexed);
            let found = match read_header(self.source, at..self.byte_len)? {
                Ok(opened) => opened,
                Err(problem) => {
                    self.add(at, number, problem.to_string());
                    at = self.next_chunk(at, chunk)?;
                    continue;
                }
            };
            self.check(at, &found, number)?;
            at = found.end;
            if at - told >= TOLD_LEN {
                told = at;
                tell(at, self.report.num_records)?;
            }
        }
        while let Some(offset) = self.offset_of(chunk) {
            if self.report.problems.len() >= max_problems {
                break;
            }
            self.add(offset, Some(chunk), "the index states a chunk after the end".to_owned());
            chunk += 1;
        }
        Ok(())
    }

    fn offset_of(&self, chunk: u64) -> Option<u64> {
        self.offsets.as_ref()?.get(usize::try_from(chunk).ok()?)
    }

    /// Verifies the chunk at `at`, whose header is intact.
    fn check(&mut self, at: u64, found: &Opened, number: Option<u64>) -> Result<()> {
        let header = found.header;
        let data = match read_chunk(self.source, at..found.end, &mut self.raw)? {
            Ok((_, data)) => &self.raw[data],
            Err(problem) => {
                self.add(at, number, problem.to_string());
                return Ok(());
            }
        };
        let holds_records = matches!(header.kind, kind::SIMPLE | kind::TRANSPOSED);
        let result = match header.kind {
            kind::SIMPLE | kind::TRANSPOSED => self.decoder.decode(&header, data).map(drop),
            kind::SIGNATURE if at == 0 => Ok(()),
            kind::SIGNATURE => Err(FormatError::fixed("a signature inside the file")),
            _ => Ok(()),
        };
        if let Err(problem) = result {
            self.add(at, number, problem.to_string());
            return Ok(());
        }
        if !holds_records || at >= self.index_end {
            return Ok(());
        }
        self.report.num_chunks += 1;
        self.report.num_records += header.num_records;
        self.report.record_bytes += header.decoded_len;
        if let Some(chunk) = number {
            let Footer { group_size, num_records, .. } = self.footer;
            let before = chunk.saturating_mul(group_size);
            let expected = group_size.min(num_records.saturating_sub(before));
            if header.num_records != expected {
                let found = header.num_records;
                let text = format!("chunk has {found} records, the index states {expected}");
                self.add(at, number, text);
            }
        } else if self.offsets.is_some() {
            let text = format!("{} records that the index does not have", header.num_records);
            self.add(at, None, text);
        }
        Ok(())
    }

    /// Where to go on after a damaged header at `at`.
    fn next_chunk(&mut self, at: u64, chunk: u64) -> Result<u64> {
        if let Some(offset) = self.offset_of(chunk) {
            return Ok(offset.max(at + 1));
        }
        if at < self.index_end && self.index_end < self.byte_len {
            return Ok(self.index_end);
        }
        let mut block = (at + 1).next_multiple_of(BLOCK_LEN);
        while block + BLOCK_LEN <= self.byte_len {
            let mut bytes = [0; 24];
            self.source.read_at(&mut bytes, block)?;
            let next = match BlockHeader::from_bytes(&bytes) {
                Ok(BlockHeader { previous_chunk: 0, .. }) => Some(block),
                Ok(header) => block.checked_add(header.next_chunk),
                Err(_) => None,
            };
            match next {
                Some(next) if next > at && next <= self.byte_len => return Ok(next),
                _ => block += BLOCK_LEN,
            }
        }
        Ok(self.byte_len)
    }
}
