//! `TFRecord`: each record after its length, both with a CRC.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::path::Path;

use super::checksum::{Checksum, UnverifiedRecord, crc32c};
use super::format_error::FormatError;
use super::offsets::Offsets;
use super::record_file::DirectRead;
use super::scanned::{Compression, Framing, MayBeCompressed, Scanner};
use super::sequential::{Frame, Frames};
use crate::Result;
use crate::bytes::{self, ScatterBuffers};
use crate::io::storage::Reader;

/// The bytes before a record: its length, and the masked CRC of these bytes.
pub const HEAD_LEN: usize = 12;
/// The bytes after it: its masked CRC.
pub const TAIL_LEN: usize = 4;
const FRAME_LEN: u64 = (HEAD_LEN + TAIL_LEN) as u64;

/// The framing of `TFRecord` files.
#[derive(Debug, Clone, Copy, Default)]
pub struct TfRecord;

/// The length of the record that `head` precedes.
///
/// # Errors
/// If it does not match its CRC.
pub fn record_len(head: &[u8; HEAD_LEN]) -> Result<u64, FormatError> {
    let [l0, l1, l2, l3, l4, l5, l6, l7, crc @ ..] = *head;
    let len = [l0, l1, l2, l3, l4, l5, l6, l7];
    let (stored, computed) = (u32::from_le_bytes(crc), crc32c::masked(&len));
    if stored == computed {
        return Ok(u64::from_le_bytes(len));
    }
    Err(mismatch("length", stored, computed))
}

/// Checks a record against its stored CRC.
///
/// # Errors
/// If they do not match.
pub fn check_record(record: &[u8], stored: [u8; TAIL_LEN]) -> Result<(), FormatError> {
    let (stored, computed) = (u32::from_le_bytes(stored), crc32c::masked(record));
    if stored == computed { Ok(()) } else { Err(mismatch("data", stored, computed)) }
}

#[cold]
fn mismatch(of: &str, stored: u32, computed: u32) -> FormatError {
    FormatError::new(format!(
        "checksum mismatch of the {of} (stored {stored:#010x}, computed {computed:#010x})"
    ))
}

/// That a record has `needed` bytes in the file, of which only so many are `left`.
#[cold]
fn cut_short(needed: u64, left: u64) -> FormatError {
    FormatError::new(format!("record is cut short: takes {needed} bytes, {left} are left"))
}

#[cold]
fn too_long(len: u64) -> FormatError {
    FormatError::new(format!("states a length of {len} bytes"))
}

/// Finds records by their lengths.
#[derive(Debug, Default)]
pub struct TfRecordScanner {
    /// Where the last record begins.
    last: u64,
}

impl Scanner for TfRecordScanner {
    fn scan(
        &mut self,
        at: u64,
        bytes: &[u8],
        begins: &mut Offsets,
    ) -> Result<u64, (u64, FormatError)> {
        let mut next = at;
        while let Some(head) = usize::try_from(next - at)
            .ok()
            .and_then(|from| bytes.get(from..))
            .and_then(<[u8]>::first_chunk)
        {
            let begin = next;
            let len = record_len(head).map_err(|problem| (begin, problem))?;
            next = len
                .checked_add(FRAME_LEN)
                .and_then(|len| begin.checked_add(len))
                .ok_or_else(|| (begin, too_long(len)))?;
            begins.push(begin);
            self.last = begin;
        }
        Ok(next)
    }

    fn finish(&mut self, at: u64, end: u64, _: &mut Offsets) -> Result<(), (u64, FormatError)> {
        if at > end {
            return Err((self.last, cut_short(at - self.last, end - self.last)));
        }
        if at < end {
            return Err((at, cut_short(HEAD_LEN as u64, end - at)));
        }
        Ok(())
    }
}

impl Frames for TfRecord {
    #[inline]
    fn frame(
        &self,
        bytes: &[u8],
        at: usize,
        _: usize,
        left: Option<u64>,
    ) -> Result<Frame, FormatError> {
        let rest = &bytes[at..];
        let incomplete = |needed: u64| match left {
            Some(left) if left < needed => Err(cut_short(needed, left)),
            _ => Ok(Frame::Incomplete(needed)),
        };
        let Some((head, data)) = rest.split_first_chunk::<HEAD_LEN>() else {
            return incomplete(HEAD_LEN as u64);
        };
        let len = record_len(head)?;
        let whole = len.checked_add(FRAME_LEN).ok_or_else(|| too_long(len))?;
        let parts = usize::try_from(len).ok().and_then(|len| data.split_at_checked(len));
        let Some((record, tail)) =
            parts.and_then(|(record, rest)| Some((record, rest.first_chunk()?)))
        else {
            return incomplete(whole);
        };
        let begin = at + HEAD_LEN;
        let end = begin + record.len();
        let next = end + TAIL_LEN;
        Ok(match check_record(record, *tail) {
            Ok(()) => Frame::Record(begin..end, next),
            Err(problem) => Frame::Damaged(problem, next),
        })
    }
}

impl MayBeCompressed for TfRecord {
    fn detect(&self, _: &Path, head: &[u8]) -> Compression {
        let is_plain = head.first_chunk().is_some_and(|head| record_len(head).is_ok());
        match Compression::detected(head) {
            _ if is_plain => Compression::None,
            Compression::None if Compression::is_zlib(head) => Compression::Zlib,
            detected => detected,
        }
    }
}

impl Framing for TfRecord {
    type Scanner = TfRecordScanner;

    fn name(&self) -> String {
        "TFRecord".to_owned()
    }

    fn scanner(&self) -> TfRecordScanner {
        TfRecordScanner::default()
    }

    fn record_len(&self, byte_len: u64) -> u64 {
        byte_len.saturating_sub(FRAME_LEN)
    }

    fn record<'a>(&self, bytes: &'a [u8], _: &'a mut Vec<u8>) -> Result<&'a [u8], FormatError> {
        let short = || FormatError::fixed("record is cut short");
        let (head, rest) = bytes.split_first_chunk::<HEAD_LEN>().ok_or_else(short)?;
        let (record, tail) = rest.split_last_chunk().ok_or_else(short)?;
        self.check_head(head, bytes.len() as u64)?;
        check_record(record, *tail)?;
        Ok(record)
    }

    fn head_len(&self) -> usize {
        HEAD_LEN
    }

    fn check_head(&self, head: &[u8], byte_len: u64) -> Result<(), FormatError> {
        let head = head.first_chunk().ok_or(FormatError::fixed("record is cut short"))?;
        let (stated, indexed) = (record_len(head)?, self.record_len(byte_len));
        if stated == indexed {
            return Ok(());
        }
        Err(FormatError::new(format!("states {stated} bytes, the index has {indexed}")))
    }

    #[expect(unsafe_code, reason = "a record is read into uninitialised memory")]
    fn read_direct<'a>(
        &self,
        reader: Reader<'_>,
        extent: Range<u64>,
        out: &'a mut [MaybeUninit<u8>],
    ) -> Result<DirectRead<'a, UnverifiedRecord<'a>>> {
        let (mut head, mut tail) = ([0; HEAD_LEN], [0; TAIL_LEN]);
        let len = extent.end - extent.start;
        let mut buffers = ScatterBuffers::with_capacity(3);
        buffers.push_initialised(&mut head);
        buffers.push(&mut *out);
        buffers.push_initialised(&mut tail);
        reader.read_scattered(&mut buffers, extent.start)?;
        let is_all_read = buffers.are_full() && buffers.byte_len() as u64 == len;
        drop(buffers);
        if !is_all_read || self.check_head(&head, len).is_err() {
            return Ok(Err(out));
        }
        // SAFETY: the buffers were full, and `out` was one of them.
        let record = unsafe { bytes::initialised(out) };
        let checksum = Checksum::MaskedCrc32c(u32::from_le_bytes(tail));
        Ok(Ok(UnverifiedRecord::new(record, checksum)))
    }
}
