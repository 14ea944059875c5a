//! What a format offers: how many records a file has, where each lies, and what its bytes are.
//!
//! Nothing above this trait knows how a file is laid out. Records that can only be decoded
//! together lie in the same chunk; chunks may hold as many records as they like.

use std::any::Any;
use std::fmt::Debug;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::Arc;

use super::riegeli::hash::{Hasher, finish_together};
use super::riegeli::{ChunkRecords, Decoder, FormatError};
use super::storage::{ReadAt, Reader, StoredFile};
use super::storage_latency::StorageLatency;
use crate::write_prefetcher::WritePrefetcher;
use crate::{Error, Result};

/// A file of records whose index has been read.
pub trait RecordFile: Any + Debug + Send + Sync {
    /// Where its bytes are.
    fn stored(&self) -> &dyn StoredFile;

    /// How many records it holds.
    fn num_records(&self) -> u64;

    /// How many bytes of it hold records.
    fn stored_len(&self) -> u64;

    /// Whether chunks may hold several records, so that one that has been decoded may be wanted
    /// again.
    fn has_groups(&self) -> bool;

    /// Says of `picks`, which are of this file and in rising order, where their records lie. False
    /// if that would have to be read first, and `reading` is not given.
    ///
    /// # Errors
    /// If it has to be read and cannot be.
    fn locate(&self, picks: &mut [Pick], reading: Option<&StorageLatency>) -> Result<bool>;

    /// Whether the file read by `reader`, whose length and time are those of this one though its
    /// number is not, holds what this one does.
    ///
    /// # Errors
    /// If it cannot be read.
    fn is_same(&self, reader: Reader<'_>) -> Result<bool>;

    /// Decodes the chunk of `pick` from `raw`, the bytes of its extent, in place.
    ///
    /// # Errors
    /// If the chunk is damaged.
    fn decode<'a>(
        &self,
        pick: &Pick,
        raw: &'a mut [u8],
        decoder: &'a mut Decoder,
    ) -> Result<ChunkRecords<'a>>;

    /// Reads the chunk of `pick`, however long, into `raw`, and decodes it. What the index says of
    /// its length is not believed before the chunk says the same.
    ///
    /// # Errors
    /// If the chunk cannot be read or is damaged.
    fn read_chunk<'a>(
        &self,
        reader: Reader<'_>,
        pick: &Pick,
        raw: &'a mut Vec<u8>,
        decoder: &'a mut Decoder,
    ) -> Result<ChunkRecords<'a>>;

    /// Reads the only record of the chunk of `pick` into `out`, which is as long as the pick
    /// says, if that works; its checksum is still to be compared. Nothing is reported of a record
    /// that is not as expected: [`read_chunk`](Self::read_chunk) finds out what is wrong.
    ///
    /// # Errors
    /// If the file cannot be read.
    fn read_straight<'a>(
        &self,
        reader: Reader<'_>,
        pick: &Pick,
        out: &'a mut [MaybeUninit<u8>],
    ) -> Result<Straight<'a>>;

    /// The error that `problem` in the chunk of `pick` is.
    fn damaged(&self, pick: &Pick, problem: &FormatError) -> Error;
}

/// One record that is asked for, and where it lies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pick {
    /// The record's number in its file.
    pub record: u64,
    /// Where its chunk begins; no two chunks of a file begin at the same place.
    pub begin: u64,
    /// Where its chunk ends, or something that comes after it begins.
    pub end: u64,
    /// Which record of the chunk it is.
    pub within: u64,
    /// Which file of the plan.
    pub file: u32,
    /// Where in the list of positions it stands.
    pub out: u32,
    /// How long the record is, if it can be told before it is read; else 0. A hint: a damaged or
    /// unusual file may hold something else.
    pub predicted_len: u32,
}

impl Pick {
    /// The bytes of the file in which the chunk lies.
    pub fn extent(&self) -> Range<u64> {
        self.begin..self.end
    }

    /// Whether both are of the same chunk.
    pub(crate) fn is_beside(&self, other: &Self) -> bool {
        self.begin == other.begin && self.file == other.file
    }
}

/// What came of reading a record straight to where it goes: the record, or, if that is not as
/// expected, the memory that it was to go to.
pub type Straight<'a, T = Unchecked<'a>> = std::result::Result<T, &'a mut [MaybeUninit<u8>]>;

/// A record that was read, except that its bytes may not be those that were written.
#[derive(Debug)]
pub struct Unchecked<'a> {
    record: &'a mut [u8],
    hasher: Hasher,
    stored: u64,
}

impl<'a> Unchecked<'a> {
    /// `record`, which is intact if `hasher` comes to `stored` with it.
    pub(crate) fn new(record: &'a mut [u8], hasher: Hasher, stored: u64) -> Self {
        Self { record, hasher, stored }
    }

    /// The memory of each record that is not what was written, `None` for one that is. A few
    /// together take less time than one by one.
    pub(crate) fn damaged(
        all: Vec<Self>,
        prefetcher: &mut WritePrefetcher,
    ) -> Vec<Option<&'a mut [u8]>> {
        let (mut hashers, mut rest) =
            (Vec::with_capacity(all.len()), Vec::with_capacity(all.len()));
        for Self { record, hasher, stored } in all {
            hashers.push(hasher);
            rest.push((record, stored));
        }
        let records: Vec<&[u8]> = rest.iter().map(|(record, _)| &**record).collect();
        let computed = finish_together(hashers, &records, prefetcher);
        let of_one = |(computed, (record, stored))| (computed != stored).then_some(record);
        computed.into_iter().zip(rest).map(of_one).collect()
    }
}

/// A file that is held for some reads, after a look whether it is still the same.
#[derive(Debug, Clone)]
pub struct Holding(Arc<dyn ReadAt>);

impl Holding {
    /// Holds `file`, of which it is known that it `was_checked` a moment ago, or not.
    pub(crate) fn of(
        file: &dyn RecordFile,
        latency: &StorageLatency,
        was_checked: bool,
    ) -> Result<Self> {
        let held = file.stored().hold(was_checked)?;
        if let Some(number) = held.renumbered {
            if !file.is_same(Reader::new(&*held.bytes, latency))? {
                let path = file.stored().path().display().to_string();
                return Err(Error::Changed { path });
            }
            file.stored().accept(number);
        }
        Ok(Self(held.bytes))
    }

    /// Reads from it.
    pub(crate) fn reader<'a>(&'a self, latency: &'a StorageLatency) -> Reader<'a> {
        Reader::new(&*self.0, latency)
    }
}
