//! One `ArrayRecord` file: its index, and its chunks by number.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::super::record_file::{Holding, Pick, RecordFile, Straight};
use super::super::riegeli::block::BLOCK_LEN;
use super::super::riegeli::chunk::{self, ChunkHeader, Opened};
use super::super::riegeli::inflate::StreamError;
use super::super::riegeli::{ChunkRecords, Decoder, FormatError};
use super::super::single_flight::InWork;
use super::super::storage::{Reader, StoredFile};
use super::super::storage_latency::StorageLatency;
use super::footer::{self, Footer};
use super::index::{self, Index};
use super::offsets::Offsets;
use super::ranges::{Ending, Ranges, read_chunk, read_header};
use super::shared_index::{Found, Key};
use super::{diagnose, direct, index_cache, shared_index};
use crate::{Error, Result};

/// Where chunks begin is kept from the start in files of up to this many, or where the file is
/// about to be read; in others it is read again when the first record is.
const KEPT_CHUNKS: u64 = 4096;
/// What is read of a file at once when it is opened: its last block, and the one before it, in
/// which the footer of a file of a few thousand chunks lies with the padding after it.
const ENDING_LEN: usize = 2 << 16;

static LOADING: InWork = InWork::new();
static NEXT_ID: AtomicU64 = AtomicU64::new(0);

/// An open `ArrayRecord` file.
#[derive(Debug)]
pub struct ArrayRecordFile {
    id: u64,
    stored: Box<dyn StoredFile>,
    footer: Footer,
    /// Where the footer lies.
    footer_extent: Range<u64>,
    footer_header: ChunkHeader,
    /// Where the first chunk begins that has been read, and its header.
    seen: OnceLock<(u64, ChunkHeader)>,
    /// Whether each chunk holds one record that is not compressed, as far as the writer's options
    /// tell; the length of a record then follows from the extent of its chunk.
    plain: bool,
}

impl ArrayRecordFile {
    /// Reads the index of a file, of which records are about to be read if `is_wanted`.
    ///
    /// # Errors
    /// If the file cannot be read, or has no sound index.
    pub fn open(stored: Box<dyn StoredFile>, reader: Reader<'_>, is_wanted: bool) -> Result<Self> {
        let ending = Ending::read(reader, stored.byte_len(), ENDING_LEN)?;
        let footer_extent = find_footer(&ending, stored.byte_len())?
            .map_err(|problem| diagnose::no_index(&*stored, reader, problem))?;
        let footer_offset = footer_extent.start;
        if footer_offset >= footer_extent.end {
            let text = format!("lies past the postscript at byte {}", footer_extent.end);
            return Err(in_footer(&*stored, footer_offset, FormatError::new(text).into()));
        }
        let most = if is_wanted { u64::MAX } else { KEPT_CHUNKS };
        let Index { header, footer, offsets } = read_index(&ending, &footer_extent, most)
            .map_err(|halt| in_footer(&*stored, footer_offset, halt))?;
        let plain = is_plain(&footer);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        if let Some(offsets) = offsets {
            index_cache::keep(id, &Arc::new(offsets));
        }
        Ok(Self {
            id,
            stored,
            footer,
            footer_extent,
            footer_header: header,
            seen: OnceLock::new(),
            plain,
        })
    }

    /// How many chunks it holds.
    pub fn num_chunks(&self) -> u64 {
        self.footer.num_chunks
    }

    /// How many records each chunk holds, but for the last, which may hold fewer; 0 in a file
    /// without records.
    pub fn group_size(&self) -> u64 {
        self.footer.group_size
    }

    /// The options of the writer as it noted them.
    pub fn writer_options(&self) -> Option<&str> {
        self.footer.writer_options.as_deref()
    }

    /// Reads where the chunks begin: four bytes each.
    #[cold]
    fn load(&self, latency: &StorageLatency) -> Result<Arc<Offsets>> {
        let _alone = LOADING.alone(self.id);
        if let Some(offsets) = index_cache::get(self.id) {
            return Ok(offsets);
        }
        let holding = Holding::of(self, latency, false)?;
        let ending = Ending::unread(holding.reader(latency));
        let index = read_index(&ending, &self.footer_extent, u64::MAX)
            .map_err(|halt| in_footer(&*self.stored, self.footer_extent.start, halt))?;
        match index.offsets {
            Some(offsets) if index.footer == self.footer => {
                let offsets = Arc::new(offsets);
                index_cache::keep(self.id, &offsets);
                Ok(offsets)
            }
            _ => Err(Error::Changed { path: self.stored.path().display().to_string() }),
        }
    }

    fn place(&self, record: u64) -> (u64, u64) {
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
        let (chunk, _) = self.place(pick.record);
        let expected = self.records_of(chunk).end - self.records_of(chunk).start;
        if opened.header.num_records != expected {
            return Err(FormatError::new(format!(
                "{} records where the index of the file has {expected}",
                opened.header.num_records
            )));
        }
        self.note_seen(pick.begin, opened.header);
        decoder.decode(&opened.header, data)
    }

    fn note_seen(&self, begin: u64, header: ChunkHeader) {
        self.seen.get_or_init(|| (begin, header));
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

    fn locate(&self, picks: &mut [Pick], reading: Option<&StorageLatency>) -> Result<bool> {
        let offsets = match (index_cache::get(self.id), reading) {
            (Some(offsets), _) => offsets,
            (None, Some(latency)) => self.load(latency)?,
            (None, None) => return Ok(false),
        };
        for pick in picks {
            let (chunk, within) = self.place(pick.record);
            let at = usize::try_from(chunk).expect("the number of a chunk");
            pick.begin = offsets.get(at).expect("the number of a chunk");
            pick.end = offsets.get(at + 1).unwrap_or(self.footer_extent.start);
            pick.within = within;
            if self.plain {
                let len = direct::record_len(&pick.extent());
                pick.predicted_len = len.and_then(|len| u32::try_from(len).ok()).unwrap_or(0);
            }
        }
        Ok(true)
    }

    fn is_same(&self, reader: Reader<'_>) -> Result<bool> {
        let ending = Ending::unread(reader);
        let footer = find_footer(&ending, self.stored.byte_len())?;
        if footer != Ok(self.footer_extent.clone()) {
            return Ok(false);
        }
        let header = read_header(&ending, self.footer_extent.clone())?.map(|opened| opened.header);
        let seen_again = match self.seen.get() {
            Some(&(begin, header)) => {
                let found = read_header(&ending, begin..self.footer_extent.start)?;
                found.map(|opened| opened.header) == Ok(header)
            }
            None => true,
        };
        Ok(header == Ok(self.footer_header) && seen_again)
    }

    fn decode<'a>(
        &self,
        pick: &Pick,
        raw: &'a mut [u8],
        decoder: &'a mut Decoder,
    ) -> Result<ChunkRecords<'a>> {
        let found = chunk::open(raw, pick.begin, pick.end)
            .and_then(|opened| Ok((opened, opened.data(raw, pick.begin)?)));
        found
            .and_then(|(opened, data)| self.decode_data(pick, &opened, &raw[data], decoder))
            .map_err(|problem| self.damaged(pick, &problem))
    }

    fn read_chunk<'a>(
        &self,
        reader: Reader<'_>,
        pick: &Pick,
        raw: &'a mut Vec<u8>,
        decoder: &'a mut Decoder,
    ) -> Result<ChunkRecords<'a>> {
        let found = read_chunk(&reader, pick.extent(), raw)?;
        found
            .and_then(|(opened, data)| self.decode_data(pick, &opened, &raw[data], decoder))
            .map_err(|problem| self.damaged(pick, &problem))
    }

    fn read_straight<'a>(
        &self,
        reader: Reader<'_>,
        pick: &Pick,
        out: &'a mut [MaybeUninit<u8>],
    ) -> Result<Straight<'a>> {
        let read = direct::read(reader, &pick.extent(), out)?;
        Ok(read.map(|(header, unchecked)| {
            self.note_seen(pick.begin, header);
            unchecked
        }))
    }

    #[cold]
    fn damaged(&self, pick: &Pick, problem: &FormatError) -> Error {
        let (chunk, _) = self.place(pick.record);
        let records = self.records_of(chunk);
        let records = if records.end - records.start == 1 {
            format!("record {}", records.start)
        } else {
            format!("records {} to {}", records.start, records.end - 1)
        };
        Error::Corrupt {
            path: self.stored.path().display().to_string(),
            place: format!("chunk {chunk} at byte {} ({records})", pick.begin),
            problem: problem.to_string(),
        }
    }
}

impl Drop for ArrayRecordFile {
    fn drop(&mut self) {
        index_cache::forget(self.id);
    }
}

/// As [`index::read`]; where processes share indices, only by the first of them.
fn read_index(ranges: &impl Ranges, extent: &Range<u64>, most: u64) -> Result<Index, StreamError> {
    let Some(shared) = shared_index::shared() else { return index::read(ranges, extent, most) };
    let header = read_header(ranges, extent.clone())??.header;
    match shared.find(Key::of(&header, extent.start)) {
        Found::Index(footer, offsets) => Ok(Index { header, footer, offsets: Some(offsets) }),
        Found::Claim(claim) => {
            let mut index = index::read(ranges, extent, u64::MAX)?;
            index.offsets = index.offsets.map(|offsets| claim.tell(&index.footer, offsets));
            Ok(index)
        }
        Found::Nothing => index::read(ranges, extent, most),
    }
}

/// Where the footer lies in a file of `byte_len`: up to the postscript, which may be damaged, or
/// have no room.
fn find_footer(
    ranges: &impl Ranges,
    byte_len: u64,
) -> Result<Result<Range<u64>, Option<FormatError>>> {
    let Some(postscript_at) = byte_len.checked_sub(BLOCK_LEN) else { return Ok(Err(None)) };
    let (mut raw, mut decoder) = (Vec::new(), Decoder::default());
    let footer_offset = read_chunk(ranges, postscript_at..byte_len, &mut raw)?
        .and_then(|(opened, data)| {
            // A record of some twenty bytes, so whatever has more than its block is none.
            let decoded_len = opened.header.decoded_len;
            if decoded_len > BLOCK_LEN {
                return Err(FormatError::new(format!(
                    "{decoded_len} decoded bytes of a postscript"
                )));
            }
            decoder.decode(&opened.header, &raw[data])
        })
        .and_then(footer::footer_offset);
    Ok(footer_offset.map(|offset| offset..postscript_at).map_err(Some))
}

/// The error that `halt` in the footer at `footer_offset` is.
#[cold]
fn in_footer(stored: &dyn StoredFile, footer_offset: u64, halt: StreamError) -> Error {
    match halt {
        StreamError::File(error) => error,
        StreamError::Data(problem) => Error::Corrupt {
            path: stored.path().display().to_string(),
            place: format!("footer at byte {footer_offset}"),
            problem: problem.to_string(),
        },
    }
}

/// Whether the writer's options say: one record per chunk, as it stands, nothing in between.
fn is_plain(footer: &Footer) -> bool {
    let options = footer.writer_options.as_deref().unwrap_or_default();
    let has = |option| options.split(',').any(|item| item == option);
    footer.group_size == 1
        && has("uncompressed")
        && !has("transpose:true")
        && !has("pad_to_block_boundary:true")
}
