//! One `ArrayRecord` file: its index and its chunks.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use super::super::decode_scratch::DecodeScratch;
use super::super::format::{Format, OpenedFile};
use super::super::index_cache::{self, IndexHandle};
use super::super::offsets::Offsets;
use super::super::record_file::{DirectRead, Pick, RecordFile};
use super::super::riegeli::block::BLOCK_LEN;
use super::super::riegeli::chunk::{self, ChunkHeader, Opened};
use super::super::riegeli::{ChunkRecords, Decoder, FormatError, StreamError};
use super::footer::{self, Footer};
use super::index::{self, Index};
use super::ranges::{FileTail, RangeReader, read_chunk, read_header};
use super::shared_index::{Found, Key};
use super::{diagnose, direct, shared_index};
use crate::io::storage::{FileHandle, Reader, StoredFile};
use crate::io::storage_latency::StorageLatency;
use crate::{Error, Result};

/// Opening a file of up to this many chunks caches their offsets, as does opening one that is read
/// next, and on slow storage one with more while there is [room](index_cache::room); in others they are
/// loaded with the first record.
const MAX_EAGER_CHUNKS: u64 = 4096;
/// How much of the last block, which is padded, is read when a file is opened: its postscript is shorter.
/// With it the block before comes, which holds the footer of a file of a few thousand chunks and the
/// padding after it.
const POSTSCRIPT_LEN: u64 = 512;

/// The format `ArrayRecord`.
#[derive(Debug, Clone, Copy, Default)]
pub struct ArrayRecord;

impl Format for ArrayRecord {
    fn open(&self, file: OpenedFile<'_>) -> Result<Arc<dyn RecordFile>> {
        let OpenedFile { stored, reader, load_index, .. } = file;
        Ok(Arc::new(ArrayRecordFile::open(stored, reader, load_index)?))
    }
}

/// An open `ArrayRecord` file.
#[derive(Debug)]
pub struct ArrayRecordFile {
    offsets: IndexHandle,
    stored: Box<dyn StoredFile>,
    footer: Footer,
    /// The extent of the footer.
    footer_extent: Range<u64>,
    footer_header: ChunkHeader,
    /// The offset and header of the first chunk that was read.
    first_read: OnceLock<(u64, ChunkHeader)>,
    /// Whether each chunk holds one uncompressed record, according to the writer's options; the
    /// length of a record then follows from the extent of its chunk.
    is_plain: bool,
}

impl ArrayRecordFile {
    /// Reads the index of a file; `load_index` caches its chunk offsets, however many.
    ///
    /// # Errors
    /// If the file cannot be read, or has no valid index.
    pub fn open(stored: Box<dyn StoredFile>, reader: Reader<'_>, load_index: bool) -> Result<Self> {
        let byte_len = stored.byte_len();
        let end = byte_len.min(byte_len.saturating_sub(BLOCK_LEN) + POSTSCRIPT_LEN);
        let tail = FileTail::read(reader, byte_len.saturating_sub(2 * BLOCK_LEN)..end)?;
        let footer_extent = find_footer(&tail, byte_len)?
            .map_err(|problem| diagnose::no_index(&*stored, reader, problem))?;
        let footer_offset = footer_extent.start;
        if footer_offset >= footer_extent.end {
            let text = format!("must begin before the postscript at byte {}", footer_extent.end);
            return Err(in_footer(&*stored, footer_offset, FormatError::new(text).into()));
        }
        let max_offsets = match load_index {
            true => u64::MAX,
            false if reader.is_slow() => MAX_EAGER_CHUNKS.max(index_cache::room()),
            false => MAX_EAGER_CHUNKS,
        };
        let Index { header, footer, offsets: found } =
            read_index(&tail, &footer_extent, max_offsets)
                .map_err(|error| in_footer(&*stored, footer_offset, error))?;
        let is_plain = is_plain(&footer);
        let offsets = IndexHandle::default();
        if let Some(found) = found {
            offsets.keep(&Arc::new(found));
        }
        Ok(Self {
            offsets,
            stored,
            footer,
            footer_extent,
            footer_header: header,
            first_read: OnceLock::new(),
            is_plain,
        })
    }

    /// How many chunks it holds.
    pub fn num_chunks(&self) -> u64 {
        self.footer.num_chunks
    }

    /// How many records each chunk holds, except the last, which may hold fewer; 0 in a file
    /// without records.
    pub fn group_size(&self) -> u64 {
        self.footer.group_size
    }

    /// The text of the writer's options, as stored in the file.
    pub fn writer_options(&self) -> Option<&str> {
        self.footer.writer_options.as_deref()
    }

    /// Reads the chunk offsets.
    #[cold]
    fn load(&self, latency: &StorageLatency) -> Result<Arc<Offsets>> {
        let handle =
            FileHandle::open(&*self.stored, latency, false, |reader| self.is_same(reader))?;
        let tail = FileTail::empty(handle.reader(latency), self.footer_extent.end);
        let index = read_index(&tail, &self.footer_extent, u64::MAX)
            .map_err(|error| in_footer(&*self.stored, self.footer_extent.start, error))?;
        match index.offsets {
            Some(offsets) if index.footer == self.footer => Ok(Arc::new(offsets)),
            _ => Err(Error::Changed { path: self.stored.path().display().to_string() }),
        }
    }

    /// The chunk of `record` and its number there.
    fn chunk_of(&self, record: u64) -> (u64, u64) {
        match self.footer.group_size {
            1 => (record, 0),
            group_size => (record / group_size, record % group_size),
        }
    }

    /// The records that `chunk` holds.
    fn records_of(&self, chunk: u64) -> Range<u64> {
        let begin = chunk * self.footer.group_size;
        begin..begin.saturating_add(self.footer.group_size).min(self.footer.num_records)
    }

    fn decode_data<'a>(
        &self,
        pick: &Pick,
        opened: &Opened,
        data: &'a [u8],
        decoder: &'a mut Decoder,
    ) -> Result<ChunkRecords<'a>, FormatError> {
        let (chunk, _) = self.chunk_of(pick.record);
        let expected = self.records_of(chunk).end - self.records_of(chunk).start;
        if opened.header.num_records != expected {
            return Err(FormatError::new(format!(
                "chunk has {} records, the index of the file states {expected}",
                opened.header.num_records
            )));
        }
        self.record_first_read(pick.begin, opened.header);
        decoder.decode(&opened.header, data)
    }

    fn record_first_read(&self, begin: u64, header: ChunkHeader) {
        self.first_read.get_or_init(|| (begin, header));
    }
}

impl RecordFile for ArrayRecordFile {
    fn stored(&self) -> &dyn StoredFile {
        &*self.stored
    }

    fn num_records(&self) -> u64 {
        self.footer.num_records
    }

    fn stored_len(&self) -> u64 {
        self.footer_extent.start - self.footer.first_offset
    }

    fn has_groups(&self) -> bool {
        self.footer.group_size > 1
    }

    fn locate(&self, picks: &mut [Pick], latency: Option<&StorageLatency>) -> Result<bool> {
        let Some(offsets) = self.offsets.get(latency, |latency| self.load(latency))? else {
            return Ok(false);
        };
        let mut offsets = offsets.reader();
        for pick in picks {
            let (chunk, within) = self.chunk_of(pick.record);
            let at = usize::try_from(chunk).expect("the number of a chunk");
            pick.begin = offsets.get(at)?.expect("the number of a chunk");
            pick.end = offsets.get(at + 1)?.unwrap_or(self.footer_extent.start);
            pick.within = within;
            if self.is_plain {
                let len = direct::record_len(&pick.extent());
                pick.predicted_len = len.and_then(|len| u32::try_from(len).ok()).unwrap_or(0);
            }
        }
        Ok(true)
    }

    fn is_same(&self, reader: Reader<'_>) -> Result<bool> {
        let footer = find_footer(&reader, self.stored.byte_len())?;
        if footer != Ok(self.footer_extent.clone()) {
            return Ok(false);
        }
        let header = read_header(&reader, self.footer_extent.clone())?.map(|opened| opened.header);
        let same_chunk = match self.first_read.get() {
            Some(&(begin, header)) => {
                let found = read_header(&reader, begin..self.footer_extent.start)?;
                found.map(|opened| opened.header) == Ok(header)
            }
            None => true,
        };
        Ok(header == Ok(self.footer_header) && same_chunk)
    }

    fn decode<'a>(
        &self,
        pick: &Pick,
        raw: &'a mut [u8],
        scratch: &'a mut DecodeScratch,
    ) -> Result<ChunkRecords<'a>> {
        let found = chunk::open(raw, pick.begin, pick.end)
            .and_then(|opened| Ok((opened, opened.data(raw, pick.begin)?)));
        found
            .and_then(|(opened, data)| self.decode_data(pick, &opened, &raw[data], scratch.of()))
            .map_err(|problem| self.damaged(pick, &problem))
    }

    fn read_chunk<'a>(
        &self,
        reader: Reader<'_>,
        pick: &Pick,
        raw: &'a mut Vec<u8>,
        scratch: &'a mut DecodeScratch,
    ) -> Result<ChunkRecords<'a>> {
        let found = read_chunk(&reader, pick.extent(), raw)?;
        found
            .and_then(|(opened, data)| self.decode_data(pick, &opened, &raw[data], scratch.of()))
            .map_err(|problem| self.damaged(pick, &problem))
    }

    fn read_direct<'a>(
        &self,
        reader: Reader<'_>,
        pick: &Pick,
        out: &'a mut [MaybeUninit<u8>],
    ) -> Result<DirectRead<'a>> {
        let read = direct::read(reader, &pick.extent(), out)?;
        Ok(read.map(|(header, unverified)| {
            self.record_first_read(pick.begin, header);
            unverified
        }))
    }

    #[cold]
    fn damaged(&self, pick: &Pick, problem: &FormatError) -> Error {
        let (chunk, _) = self.chunk_of(pick.record);
        let records = self.records_of(chunk);
        let records = if records.end - records.start == 1 {
            format!("record {}", records.start)
        } else {
            format!("records {} to {}", records.start, records.end - 1)
        };
        let place = format!("chunk {chunk} at byte {} ({records})", pick.begin);
        Error::corrupt(self.stored.path(), place, problem)
    }
}

/// As [`index::read`]; where processes share indices, only the first of them reads it.
fn read_index(
    source: &impl RangeReader,
    extent: &Range<u64>,
    max_offsets: u64,
) -> Result<Index, StreamError> {
    let Some(shared) = shared_index::shared() else {
        return index::read(source, extent, max_offsets);
    };
    let header = read_header(source, extent.clone())??.header;
    match shared.find(Key::of(&header, extent.start)) {
        Found::Index(footer, offsets) => Ok(Index { header, footer, offsets: Some(offsets) }),
        Found::Unpublished(publisher) => {
            let mut index = index::read(source, extent, u64::MAX)?;
            index.offsets = index.offsets.map(|offsets| publisher.publish(&index.footer, offsets));
            Ok(index)
        }
        Found::Unavailable => index::read(source, extent, max_offsets),
    }
}

/// The extent of the footer in a file of `byte_len`: up to the postscript, which may be damaged, or
/// missing in a short file.
pub(super) fn find_footer(
    source: &impl RangeReader,
    byte_len: u64,
) -> Result<Result<Range<u64>, Option<FormatError>>> {
    let Some(postscript_at) = byte_len.checked_sub(BLOCK_LEN) else { return Ok(Err(None)) };
    let (mut raw, mut decoder) = (Vec::new(), Decoder::default());
    let footer_offset = read_chunk(source, postscript_at..byte_len, &mut raw)?
        .and_then(|(opened, data)| {
            // Its record has some twenty bytes, so anything longer than a block is invalid.
            let decoded_len = opened.header.decoded_len;
            if decoded_len > BLOCK_LEN {
                return Err(FormatError::new(format!(
                    "postscript decodes to {decoded_len} bytes, expected at most {BLOCK_LEN}"
                )));
            }
            decoder.decode(&opened.header, &raw[data])
        })
        .and_then(footer::footer_offset);
    Ok(footer_offset.map(|offset| offset..postscript_at).map_err(Some))
}

/// Adds the file and the footer's offset to `error`.
#[cold]
fn in_footer(stored: &dyn StoredFile, footer_offset: u64, error: StreamError) -> Error {
    match error {
        StreamError::File(error) => error,
        StreamError::Data(problem) => {
            Error::corrupt(stored.path(), format!("footer at byte {footer_offset}"), problem)
        }
    }
}

/// Whether the writer's options mean one uncompressed record per chunk, without padding.
fn is_plain(footer: &Footer) -> bool {
    let options = footer.writer_options.as_deref().unwrap_or_default();
    let has = |option| options.split(',').any(|item| item == option);
    footer.group_size == 1
        && has("uncompressed")
        && !has("transpose:true")
        && !has("pad_to_block_boundary:true")
}
