//! `TFRecord`: each record after its length, both with a CRC.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::path::Path;

use super::checksum::{Checksum, UnverifiedRecord, crc32c};
use super::format_error::FormatError;
use super::offsets::Offsets;
use super::record_file::DirectRead;
use super::scanned::{Compression, Framing, Scanner};
use super::storage::Reader;
use crate::Result;
use crate::bytes::{self, ScatterBuffers};

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
            next = len.checked_add(FRAME_LEN).and_then(|len| begin.checked_add(len)).ok_or_else(
                || (begin, FormatError::new(format!("states a length of {len} bytes"))),
            )?;
            begins.push(begin);
            self.last = begin;
        }
        Ok(next)
    }

    fn finish(&mut self, at: u64, end: u64) -> Result<(), (u64, FormatError)> {
        if at > end {
            let (stated, found) = (at - self.last, end - self.last);
            let text = format!("record is cut short: takes {stated} bytes, {found} are left");
            return Err((self.last, FormatError::new(text)));
        }
        if at < end {
            let text = format!("record is cut short: {} bytes are left for its length", end - at);
            return Err((at, FormatError::new(text)));
        }
        Ok(())
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

    fn detected(&self, _: &Path, head: &[u8]) -> Compression {
        let is_plain = head.first_chunk().is_some_and(|head| record_len(head).is_ok());
        match Compression::gzip_or_none(head) {
            _ if is_plain => Compression::None,
            Compression::None if Compression::is_zlib(head) => Compression::Zlib,
            gzip_or_none => gzip_or_none,
        }
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
