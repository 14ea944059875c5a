//! The interface of a file of records: how many there are, where each is stored, and its bytes.
//!
//! Users of this trait do not know the layout of a file. Records that can only be decoded
//! together are in the same chunk; a chunk may hold any number of records.

use std::any::Any;
use std::fmt::Debug;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::checksum::UnverifiedRecord;
use super::chunk_records::ChunkRecords;
use super::decode_scratch::{DecodeScratch, FormatScratch};
use super::format_error::FormatError;
use super::offsets::Offsets;
use super::raw_bytes::grow_to;
use crate::io::storage::{Reader, StoredFile};
use crate::io::storage_latency::StorageLatency;
use crate::{Error, Result};

/// A file of records whose index has been read.
pub trait RecordFile: Any + Debug + Send + Sync {
    /// The file in its storage.
    fn stored(&self) -> &dyn StoredFile;

    /// How many records it holds.
    fn num_records(&self) -> u64;

    /// How many of its bytes hold records.
    fn stored_len(&self) -> u64;

    /// Whether chunks may hold several records, so that a decoded chunk may be needed again.
    fn has_groups(&self) -> bool {
        false
    }

    /// Sets where the records of `picks`, which are of this file and in rising order, are stored.
    /// If the index is not in memory, reads it and measures `latency`; without that, returns false.
    ///
    /// # Errors
    /// If the index cannot be read.
    fn locate(&self, picks: &mut [Pick], latency: Option<&StorageLatency>) -> Result<bool>;

    /// Whether the file behind `reader`, which has the length and time of this one but another id,
    /// has the same content; it has if nothing in the bytes of a format identifies them.
    ///
    /// # Errors
    /// If it cannot be read.
    fn is_same(&self, _reader: Reader<'_>) -> Result<bool> {
        Ok(true)
    }

    /// Decodes in place the chunk of `pick` from `raw`, the bytes of its extent: without chunks, a record
    /// stored as it is.
    ///
    /// # Errors
    /// If the chunk is damaged.
    fn decode<'a>(
        &self,
        _pick: &Pick,
        raw: &'a mut [u8],
        scratch: &'a mut DecodeScratch,
    ) -> Result<ChunkRecords<'a>> {
        let End(ends) = scratch.of();
        *ends = [raw.len()];
        Ok(ChunkRecords::new(raw, ends))
    }

    /// Reads the chunk of `pick`, of any length, into `raw` and decodes it. Where the length in the index
    /// may exceed what the file has, it is not trusted before the chunk's header confirms it.
    ///
    /// # Errors
    /// If the chunk cannot be read or is damaged.
    fn read_chunk<'a>(
        &self,
        reader: Reader<'_>,
        pick: &Pick,
        raw: &'a mut Vec<u8>,
        scratch: &'a mut DecodeScratch,
    ) -> Result<ChunkRecords<'a>> {
        let bytes = grow_to(raw, pick.end - pick.begin);
        let bytes = bytes.map_err(|problem| self.damaged(pick, &problem))?;
        reader.read_at(bytes, pick.begin)?;
        self.decode(pick, bytes, scratch)
    }

    /// Tries to read the only record of the chunk of `pick` into `out`, which has the predicted
    /// length; its checksum has yet to be verified. A record that is not as expected is no error:
    /// [`read_chunk`](Self::read_chunk) finds out what is wrong.
    ///
    /// # Errors
    /// If the file cannot be read.
    fn read_direct<'a>(
        &self,
        _reader: Reader<'_>,
        _pick: &Pick,
        out: &'a mut [MaybeUninit<u8>],
    ) -> Result<DirectRead<'a>> {
        Ok(Err(out))
    }

    /// The error for `problem` in the chunk of `pick`.
    #[cold]
    fn damaged(&self, pick: &Pick, problem: &FormatError) -> Error {
        let place = format!("record {} at byte {}", pick.record, pick.begin);
        Error::corrupt(self.stored().path(), place, problem)
    }
}

/// A requested record and where it is stored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pick {
    /// The record's number in its file.
    pub record: u64,
    /// Where its chunk begins, which identifies the chunk in its file if several may be in a chunk.
    pub begin: u64,
    /// Where its chunk ends, or a later bound.
    pub end: u64,
    /// The record's number in its chunk.
    pub within: u64,
    /// The number of the file in the plan.
    pub file: u32,
    /// The index of the record among the requested positions.
    pub out: u32,
    /// The length of the record if known from the index, else 0. Only a hint: a damaged or unusual
    /// file may hold another length.
    pub predicted_len: u32,
}

impl Pick {
    /// The bytes of the file that hold the chunk.
    pub fn extent(&self) -> Range<u64> {
        self.begin..self.end
    }

    /// Whether both are in the same chunk.
    pub(crate) fn is_same_chunk(&self, other: &Self) -> bool {
        // An empty record of a format without chunks begins where the next one does.
        self.begin == other.begin && self.end == other.end && self.file == other.file
    }
}

/// Sets where the records of `picks` are if each reaches from its offset to the next one; `is_plain` if its
/// bytes are stored as they are. Returns true, as [`RecordFile::locate`] does then.
///
/// # Errors
/// If the offsets cannot be read.
pub(super) fn locate_between(
    offsets: &Offsets,
    picks: &mut [Pick],
    is_plain: bool,
) -> Result<bool> {
    let mut offsets = offsets.reader();
    for pick in picks {
        let at = usize::try_from(pick.record).expect("the number of a record");
        let extent = offsets.get(at)?.zip(offsets.get(at + 1)?);
        (pick.begin, pick.end) = extent.expect("the number of a record");
        (pick.within, pick.predicted_len) = (0, 0);
        if is_plain {
            pick.predicted_len = u32::try_from(pick.end - pick.begin).unwrap_or(0);
        }
    }
    Ok(true)
}

/// Where the only record of a chunk ends.
#[derive(Debug, Default)]
struct End([usize; 1]);

impl FormatScratch for End {
    fn trim(&mut self) {}
}

/// The result of a direct read: the record, or its destination if the record is not as expected.
pub type DirectRead<'a, T = UnverifiedRecord<'a>> =
    std::result::Result<T, &'a mut [MaybeUninit<u8>]>;
