//! One pass over a file that finds its records.
//!
//! Of a file that is not compressed only what the framing asks for is read: a scanner that says where
//! the next record begins skips what is before it, unless records are short, or storage is slow, where
//! reading on is faster than many reads.

use std::sync::Arc;

use super::super::format_error::{FormatError, StreamError};
use super::super::offsets::Offsets;
use super::super::raw_bytes::grow_to;
use super::compression::Compression;
use super::framing::{Framing, Scanner};
use super::index::Index;
use super::inflate::{Boundary, Inflate, Input};
use super::stream::PointsBuilder;
use crate::Error;
use crate::io::forward_reads::ForwardReads;
use crate::io::storage::Reader;

/// How many bytes are looked at at once: at first, where records are long, and at most where they are
/// short.
const FIRST_LEN: u64 = 64 << 10;
const MIN_LEN: u64 = 4 << 10;
const MAX_LEN: u64 = 512 << 10;
/// Records are long if the mean is above this.
const LONG_RECORD_LEN: u64 = 32 << 10;

/// Why a file cannot be scanned.
#[derive(Debug)]
pub(super) enum ScanError {
    /// It cannot be read.
    File(Error),
    /// It is damaged: the number of the record, the position, and the problem.
    Damaged(u64, u64, FormatError),
}

impl From<Error> for ScanError {
    fn from(error: Error) -> Self {
        Self::File(error)
    }
}

/// The number of the record at `at`, which is the last one found or the one after it.
fn damaged(begins: &Offsets, (at, problem): (u64, FormatError)) -> ScanError {
    let is_last = begins.len().checked_sub(1).and_then(|last| begins.get(last)) == Some(at);
    let record = begins.len() as u64 - u64::from(is_last);
    ScanError::Damaged(record, at, problem)
}

/// Scans a file of `byte_len` bytes.
pub(super) fn scan<F: Framing>(
    framing: &F,
    compression: Compression,
    reader: Reader<'_>,
    byte_len: u64,
) -> Result<Index, ScanError> {
    match compression {
        Compression::None => scan_plain(framing, reader, byte_len),
        _ => scan_stream(framing, compression, reader, byte_len),
    }
}

fn scan_plain<F: Framing>(
    framing: &F,
    reader: Reader<'_>,
    byte_len: u64,
) -> Result<Index, ScanError> {
    let mut scanner = framing.scanner();
    let (mut begins, mut raw) = (Offsets::default(), Vec::new());
    let mut reads = ForwardReads::default();
    let (mut at, mut len) = (0, FIRST_LEN);
    while at < byte_len {
        let read_len = len.min(byte_len - at);
        let bytes = grow_to(&mut raw, read_len)
            .map_err(|problem| ScanError::Damaged(begins.len() as u64, at, problem))?;
        reads.read(reader, bytes, at, byte_len)?;
        let num_before = begins.len();
        let next = scanner.scan(at, bytes, &mut begins).map_err(|error| damaged(&begins, error))?;
        let num_found = (begins.len() - num_before) as u64;
        if next == at {
            if at + read_len == byte_len {
                break;
            }
            len *= 2;
            continue;
        }
        let is_long = num_found > 0 && (next - at) / num_found >= LONG_RECORD_LEN;
        len = if is_long { MIN_LEN } else { (len * 2).min(MAX_LEN) };
        at = next;
    }
    scanner.finish(at, byte_len, &mut begins).map_err(|error| damaged(&begins, error))?;
    begins.shrink();
    Ok(Index { begins: Arc::new(begins), end: byte_len, points: None })
}

fn scan_stream<F: Framing>(
    framing: &F,
    compression: Compression,
    reader: Reader<'_>,
    byte_len: u64,
) -> Result<Index, ScanError> {
    let mut scanner = framing.scanner();
    let (mut begins, mut points) = (Offsets::default(), PointsBuilder::new(compression));
    let input = Input::of_file(reader, byte_len);
    let mut inflate = Inflate::new(input, compression, Boundary::Header, &[])
        .map_err(|problem| ScanError::Damaged(0, 0, problem))?;
    // Where the scanner continues, the bytes from there on that it has seen, and the stream's end.
    let (mut at, mut kept, mut end) = (0_u64, Vec::new(), 0_u64);
    loop {
        let piece = match inflate.next() {
            Ok(Some(piece)) => piece,
            Ok(None) => break,
            Err(StreamError::File(error)) => return Err(ScanError::File(error)),
            Err(StreamError::Data(problem)) => {
                return Err(ScanError::Damaged(begins.len() as u64, end, problem));
            }
        };
        let begin = end;
        end += piece.len() as u64;
        points
            .update(piece, end)
            .map_err(|problem| ScanError::Damaged(begins.len() as u64, end, problem))?;
        let skipped = usize::try_from(at.saturating_sub(begin)).unwrap_or(usize::MAX);
        let new = piece.get(skipped..).unwrap_or_default();
        if !new.is_empty() {
            let bytes = if kept.is_empty() {
                new
            } else {
                kept.extend_from_slice(new);
                &kept
            };
            let next =
                scanner.scan(at, bytes, &mut begins).map_err(|error| damaged(&begins, error))?;
            let used = usize::try_from(next - at).unwrap_or(usize::MAX).min(bytes.len());
            kept = bytes[used..].to_vec();
            at = next;
        }
        // A record of which only the first bytes were seen would begin before the point.
        if kept.is_empty() && !scanner.is_undecided(end) {
            points
                .offer(&inflate, end, begins.len() as u64)
                .map_err(|problem| ScanError::Damaged(begins.len() as u64, end, problem))?;
        }
    }
    scanner.finish(at, end, &mut begins).map_err(|error| damaged(&begins, error))?;
    begins.shrink();
    let points = points.finish(byte_len, end);
    Ok(Index { begins: Arc::new(begins), end, points: Some(Arc::new(points)) })
}
