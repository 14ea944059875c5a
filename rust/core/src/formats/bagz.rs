//! Bagz: records back to back, and where each ends, at the end of the file or in one of its own.

use std::path::Path;
use std::sync::Arc;

use zstd_safe::zstd_sys::ZSTD_ErrorCode;
use zstd_safe::{DCtx, DDict};

use super::chunk_records::ChunkRecords;
use super::decode_scratch::{DecodeScratch, FormatScratch, MAX_RETAINED_LEN};
use super::format::{Format, OpenedFile};
use super::format_error::FormatError;
use super::index_cache::IndexHandle;
use super::offsets::Offsets;
use super::raw_bytes::grow_to;
use super::record_file::{Pick, RecordFile, locate_between};
use super::record_limit::{check_decoded_len, max_decoded_len};
use super::riegeli::decompress::{ZSTD_MAGIC, zstd_context};
use crate::io::storage::{FileHandle, Reader, StoredFile};
use crate::io::storage_latency::StorageLatency;
use crate::{Error, Result};

/// The length of a limit: where a record ends.
const LIMIT_LEN: u64 = 8;
/// How many bytes of limits are read at once, and from slow storage.
const LIMITS_STEP: u64 = 1 << 20;
const SLOW_LIMITS_STEP: u64 = 4 << 20;
/// The initial capacity for a frame that does not state its length.
const UNSTATED_LEN: u64 = 64 << 10;
/// What libzstd returns for a buffer that is too short.
const TOO_SMALL: usize = (ZSTD_ErrorCode::ZSTD_error_dstSize_tooSmall as usize).wrapping_neg();

/// Where the limits are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limits {
    /// After the records.
    Tail,
    /// In a file of the same name with `limits.` before it.
    Separate,
}

/// How records are compressed.
#[derive(Debug, Clone)]
pub enum BagzCompression {
    /// By zstd in files whose name ends with `.bagz`, else not.
    ByName,
    /// Not at all.
    None,
    /// By zstd, each record for itself.
    Zstd(Option<Dictionary>),
}

/// A zstd dictionary.
#[derive(Clone)]
pub struct Dictionary(Arc<DDict<'static>>);

impl std::fmt::Debug for Dictionary {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Dictionary").finish_non_exhaustive()
    }
}

impl Dictionary {
    /// The dictionary of these bytes.
    ///
    /// # Errors
    /// If zstd does not accept them.
    pub fn new(bytes: &[u8]) -> Result<Self> {
        let dictionary = DDict::try_create(bytes);
        dictionary.map(|dictionary| Self(Arc::new(dictionary))).ok_or_else(|| {
            Error::InvalidArgument("`dictionary` is not a valid zstd dictionary".to_owned())
        })
    }
}

/// The format Bagz.
#[derive(Debug, Clone)]
pub struct Bagz {
    /// How records are compressed.
    pub compression: BagzCompression,
    /// Where the limits are.
    pub limits: Limits,
}

impl Format for Bagz {
    fn open(&self, file: OpenedFile<'_>) -> Result<Arc<dyn RecordFile>> {
        let OpenedFile { stored, reader, bytes, storage, latency, .. } = file;
        let is_zstd = match self.compression {
            BagzCompression::ByName => stored.path().extension().is_some_and(|end| end == "bagz"),
            BagzCompression::None => false,
            BagzCompression::Zstd(_) => true,
        };
        let dictionary = match &self.compression {
            BagzCompression::Zstd(dictionary) => dictionary.clone(),
            _ => None,
        };
        let (limits, limits_bytes, begin, end) = match self.limits {
            Limits::Tail => {
                let split = tail_begin(reader, stored.byte_len())?
                    .map_err(|problem| in_limits(stored.path(), &problem))?;
                (None, Arc::clone(bytes), split, stored.byte_len())
            }
            Limits::Separate => {
                let path = stored.path();
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                let path = path.with_file_name(format!("limits.{name}"));
                let (limits, limits_bytes) = storage.open(&path)?;
                let byte_len = limits.byte_len();
                (Some(limits), limits_bytes, 0, byte_len)
            }
        };
        if !(end - begin).is_multiple_of(LIMIT_LEN) {
            let text = format!("{} bytes of limits are no multiple of {LIMIT_LEN}", end - begin);
            return Err(in_limits(stored.path(), &FormatError::new(text)));
        }
        let records_len = if limits.is_some() { stored.byte_len() } else { begin };
        let num_records = (end - begin) / LIMIT_LEN;
        let offsets = IndexHandle::default();
        let file = BagzFile {
            offsets,
            stored,
            limits,
            begin,
            num_records,
            records_len,
            is_zstd,
            dictionary,
        };
        if num_records == 0 && records_len > 0 {
            let text = format!("has no limits, but {records_len} bytes of records");
            return Err(in_limits(file.stored.path(), &FormatError::new(text)));
        }
        if num_records > 0 && num_records <= LIMITS_STEP / LIMIT_LEN {
            // A damaged file is found at once, unless that takes long.
            let found = file.read_limits(Reader::new(&*limits_bytes, latency))?;
            file.offsets.keep(&Arc::new(found));
        }
        Ok(Arc::new(file))
    }
}

/// Where the limits begin in a file that ends with them.
fn tail_begin(reader: Reader<'_>, byte_len: u64) -> Result<Result<u64, FormatError>> {
    if byte_len == 0 {
        return Ok(Ok(0));
    }
    let Some(last) = byte_len.checked_sub(LIMIT_LEN) else {
        let text = format!("{byte_len} bytes are too few for a limit");
        return Ok(Err(FormatError::new(text)));
    };
    let mut limit = [0; size_of::<u64>()];
    reader.read_at(&mut limit, last)?;
    let split = u64::from_le_bytes(limit);
    if split > last {
        let text = format!("limits begin at byte {split}, after the last one at byte {last}");
        return Ok(Err(FormatError::new(text)));
    }
    if !(byte_len - split).is_multiple_of(LIMIT_LEN) {
        let text = format!("{} bytes of limits are no multiple of {LIMIT_LEN}", byte_len - split);
        return Ok(Err(FormatError::new(text)));
    }
    Ok(Ok(split))
}

fn in_limits(path: &Path, problem: &FormatError) -> Error {
    let problem = format!("{problem}; it is not a Bagz file, or was cut short");
    Error::corrupt(path, "limits", problem)
}

/// An open Bagz file.
#[derive(Debug)]
struct BagzFile {
    offsets: IndexHandle,
    stored: Box<dyn StoredFile>,
    /// The file of the limits, if it is another one.
    limits: Option<Box<dyn StoredFile>>,
    /// Where the limits begin in their file.
    begin: u64,
    num_records: u64,
    /// How many bytes hold records.
    records_len: u64,
    is_zstd: bool,
    dictionary: Option<Dictionary>,
}

/// A decompressor and memory for a record.
#[derive(Default)]
struct Scratch {
    context: Option<DCtx<'static>>,
    record: Vec<u8>,
    ends: Vec<usize>,
}

impl std::fmt::Debug for Scratch {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Scratch").finish_non_exhaustive()
    }
}

impl FormatScratch for Scratch {
    fn trim(&mut self) {
        if self.record.capacity() > MAX_RETAINED_LEN {
            self.record = Vec::new();
        }
    }
}

impl BagzFile {
    /// Where records begin, and where the last one ends.
    #[cold]
    fn load(&self, latency: &StorageLatency) -> Result<Arc<Offsets>> {
        let offsets = match &self.limits {
            None => {
                let handle =
                    FileHandle::open(&*self.stored, latency, false, |reader| self.is_same(reader))?;
                self.read_limits(handle.reader(latency))?
            }
            Some(limits) => {
                let reopened = limits.reopen(false)?;
                self.read_limits(Reader::new(&*reopened.bytes, latency))?
            }
        };
        Ok(Arc::new(offsets))
    }

    fn read_limits(&self, reader: Reader<'_>) -> Result<Offsets> {
        let (mut offsets, mut raw, mut before) = (Offsets::default(), Vec::new(), 0);
        offsets.push(0);
        let end = self.begin + self.num_records * LIMIT_LEN;
        let mut at = self.begin;
        while at < end {
            let step = if reader.is_slow() { SLOW_LIMITS_STEP } else { LIMITS_STEP };
            let len = step.min(end - at);
            let bytes = grow_to(&mut raw, len)
                .map_err(|problem| in_limits(self.stored.path(), &problem))?;
            reader.read_at(bytes, at)?;
            for limit in bytes.as_chunks().0 {
                let limit = u64::from_le_bytes(*limit);
                if limit < before || limit > self.records_len {
                    let place = format!("record {} at byte {before}", offsets.len() - 1);
                    let end = self.records_len;
                    let problem = format!("its limit is {limit}, expected {before} to {end}");
                    return Err(Error::corrupt(self.stored.path(), place, problem));
                }
                offsets.push(limit);
                before = limit;
            }
            at += len;
        }
        offsets.shrink();
        if before != self.records_len {
            let text = format!("records end at byte {before} of {}", self.records_len);
            return Err(in_limits(self.stored.path(), &FormatError::new(text)));
        }
        Ok(offsets)
    }

    fn decompressed<'a>(
        &self,
        frame: &[u8],
        scratch: &'a mut Scratch,
    ) -> Result<ChunkRecords<'a>, FormatError> {
        let damaged = |code| {
            FormatError::new(format!("zstd frame is damaged: {}", zstd_safe::get_error_name(code)))
        };
        let Scratch { context, record, ends } = scratch;
        record.clear();
        if !frame.is_empty() {
            if !frame.starts_with(&ZSTD_MAGIC) {
                return Err(FormatError::fixed(
                    "does not begin with a zstd frame: it is damaged, or not compressed",
                ));
            }
            if zstd_safe::find_frame_compressed_size(frame).map_err(damaged)? != frame.len() {
                return Err(FormatError::fixed("zstd frame does not end at the end of the record"));
            }
            let context = zstd_context(context)?;
            let stated = zstd_safe::get_frame_content_size(frame)
                .map_err(|_| FormatError::fixed("zstd frame has a damaged header"))?;
            // A block of 4 bytes holds at most 128 KiB.
            let most = (frame.len() as u64).saturating_mul(32 << 10);
            let (mut capacity, limit) = match stated {
                Some(stated) => {
                    check_decoded_len(stated, frame.len() as u64)?;
                    if stated > most {
                        let text = format!("{} bytes cannot decode to {stated}", frame.len());
                        return Err(FormatError::new(text));
                    }
                    (stated, stated)
                }
                None => (UNSTATED_LEN, most.min(max_decoded_len(frame.len() as u64))),
            };
            loop {
                let reserved = usize::try_from(capacity).unwrap_or(usize::MAX);
                record.try_reserve_exact(reserved).map_err(|_| {
                    FormatError::new(format!("no memory for {capacity} decoded bytes"))
                })?;
                let result = match &self.dictionary {
                    Some(Dictionary(dictionary)) => {
                        context.decompress_using_ddict(record, frame, dictionary)
                    }
                    None => context.decompress(record, frame),
                };
                match result {
                    Ok(_) => break,
                    Err(code) if code != TOO_SMALL || stated.is_some() => {
                        return Err(damaged(code));
                    }
                    Err(_) if capacity >= limit => {
                        check_decoded_len(capacity + 1, frame.len() as u64)?;
                        return Err(FormatError::new(format!(
                            "{} bytes cannot decode to more than {capacity}",
                            frame.len()
                        )));
                    }
                    Err(_) => {
                        record.clear();
                        capacity = (capacity * 4).min(limit);
                    }
                }
            }
        }
        ends.clear();
        ends.push(record.len());
        Ok(ChunkRecords::new(record, ends))
    }
}

impl RecordFile for BagzFile {
    fn stored(&self) -> &dyn StoredFile {
        &*self.stored
    }

    fn num_records(&self) -> u64 {
        self.num_records
    }

    fn stored_len(&self) -> u64 {
        self.records_len
    }

    fn locate(&self, picks: &mut [Pick], latency: Option<&StorageLatency>) -> Result<bool> {
        let offsets = self.offsets.get(latency, |latency| self.load(latency))?;
        offsets.map_or(Ok(false), |offsets| locate_between(&offsets, picks, !self.is_zstd))
    }

    fn is_same(&self, reader: Reader<'_>) -> Result<bool> {
        // Nothing in the file identifies its content but where its limits begin.
        let split = tail_begin(reader, self.stored.byte_len())?;
        Ok(self.limits.is_some() || split == Ok(self.begin))
    }

    fn decode<'a>(
        &self,
        pick: &Pick,
        raw: &'a mut [u8],
        scratch: &'a mut DecodeScratch,
    ) -> Result<ChunkRecords<'a>> {
        let scratch: &mut Scratch = scratch.of();
        if self.is_zstd {
            let record = self.decompressed(raw, scratch);
            return record.map_err(|problem| self.damaged(pick, &problem));
        }
        scratch.ends.clear();
        scratch.ends.push(raw.len());
        Ok(ChunkRecords::new(raw, &scratch.ends))
    }
}
