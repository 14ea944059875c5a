//! The interface of a framing: where records begin in a stream, and what is in their bytes.

use std::fmt::Debug;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::format_error::FormatError;
use super::super::offsets::Offsets;
use super::super::record_file::DirectRead;
use super::compression::MayBeCompressed;
use crate::Result;
use crate::formats::checksum::UnverifiedRecord;
use crate::io::storage::Reader;

/// How records follow each other. The bytes of a record reach from where it begins to where the next
/// one begins.
pub trait Framing: Debug + Clone + MayBeCompressed + Send + Sync + 'static {
    /// Finds records.
    type Scanner: Scanner;

    /// Identifies the framing, with the options that decide what a record is, in index files.
    fn name(&self) -> String;

    /// A scanner at the begin of a stream.
    fn scanner(&self) -> Self::Scanner;

    /// The length of a record with `byte_len` bytes in the file, if that follows; 0 if not.
    fn record_len(&self, byte_len: u64) -> u64;

    /// The record in its bytes; `out` is for one that is not stored as it is.
    ///
    /// # Errors
    /// If the bytes are damaged.
    fn record<'a>(&self, bytes: &'a [u8], out: &'a mut Vec<u8>) -> Result<&'a [u8], FormatError>;

    /// How many bytes before a record show that one begins there; with 0, the record itself does.
    fn lead_len(&self) -> u64 {
        0
    }

    /// The bytes of a record out of those that begin at `begin`, up to [`lead_len`](Self::lead_len) before
    /// it. `is_last` if they end with the file.
    ///
    /// # Errors
    /// If they are not those of one record: the file has changed.
    fn after_lead<'a>(
        &self,
        bytes: &'a [u8],
        _begin: u64,
        _is_last: bool,
    ) -> Result<&'a [u8], FormatError> {
        Ok(bytes)
    }

    /// How many of the first bytes of a record confirm its length; with 0, nothing in a record does.
    fn head_len(&self) -> usize {
        0
    }

    /// Whether a record of `byte_len` bytes in the file may have this head.
    ///
    /// # Errors
    /// If it is damaged.
    fn check_head(&self, _head: &[u8], _byte_len: u64) -> Result<(), FormatError> {
        Ok(())
    }

    /// Tries to read the record at `extent` into `out`, which has its length; see
    /// [`RecordFile::read_direct`](super::super::RecordFile::read_direct).
    ///
    /// # Errors
    /// If the file cannot be read.
    fn read_direct<'a>(
        &self,
        _reader: Reader<'_>,
        _extent: Range<u64>,
        out: &'a mut [MaybeUninit<u8>],
    ) -> Result<DirectRead<'a, UnverifiedRecord<'a>>> {
        Ok(Err(out))
    }
}

/// Finds the records of a stream that it sees in pieces.
pub trait Scanner {
    /// Looks at `bytes`, which are at position `at` of the stream, where the last call said it
    /// continues, and appends where records begin. Returns where it continues: after these bytes, or
    /// further, or inside them if it needs more from there on.
    ///
    /// # Errors
    /// If the stream is damaged: the position, and the problem.
    fn scan(
        &mut self,
        at: u64,
        bytes: &[u8],
        begins: &mut Offsets,
    ) -> Result<u64, (u64, FormatError)>;

    /// Checks that a stream may end at `end`, where the last call said it continues at `at`, and
    /// appends where a record begins that only the end decides.
    ///
    /// # Errors
    /// If it is cut short: the position, and the problem.
    fn finish(&mut self, at: u64, end: u64, begins: &mut Offsets)
    -> Result<(), (u64, FormatError)>;

    /// Whether a record may be found later that begins before `at`, where the last call said it
    /// continues.
    fn is_undecided(&self, _at: u64) -> bool {
        false
    }
}
