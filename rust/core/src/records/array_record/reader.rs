//! One `ArrayRecord` file: its index, and its chunks by number.

use std::io::IoSliceMut;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::super::descriptors::OnDisk;
use super::super::riegeli::block::BLOCK_LEN;
use super::super::riegeli::chunk::{self, MAX_DATA_AT, Opened};
use super::super::riegeli::inflate::Halt;
use super::super::riegeli::{ChunkRecords, Decoder, Problem};
use super::footer::{self, Footer};
use super::offsets::Offsets;
use super::{diagnose, direct, index};
use crate::process::PerProcess;
use crate::{Error, Result};

/// Chunks up to this length are read in one go; of longer ones the header comes first, so that
/// memory is asked for only once a checked header says that it is needed.
pub(crate) const WHOLE_READ_LEN: u64 = 1 << 20;

/// Where chunks begin is kept from the start in files of up to this many; in others it is read
/// again when the first record is.
const KEPT_CHUNKS: u64 = 4096;

/// Held while the offsets of a file are read, lest two threads do that at once.
static LOADING: PerProcess<Mutex<()>> = PerProcess::new(|| Mutex::new(()));

/// An open `ArrayRecord` file.
#[derive(Debug)]
pub struct ArrayRecordFile {
    disk: OnDisk,
    footer: Footer,
    /// Where the footer lies.
    footer_extent: Range<u64>,
    /// Where the chunks begin, once that is needed.
    offsets: OnceLock<Offsets>,
    /// Whether each chunk holds one record that is not compressed, as far as the writer's options
    /// tell; the length of a record then follows from the extent of its chunk.
    plain: bool,
}

/// A file that is held open for some reads.
#[derive(Debug, Clone)]
pub(crate) struct Lease(pub(super) Arc<OwnedFd>);

impl ArrayRecordFile {
    /// Opens the file at `path` and reads its index.
    ///
    /// # Errors
    /// If the file cannot be read, or has no sound index.
    pub fn open(path: &Path) -> Result<Self> {
        let disk = OnDisk::open(path)?;
        let lease = Lease(disk.file()?);
        let (mut raw, mut decoder) = (Vec::new(), Decoder::default());
        let Some(postscript_at) = disk.len().checked_sub(BLOCK_LEN) else {
            return Err(diagnose::no_index(&disk, &lease.0, None));
        };
        let unreadable = |problem| diagnose::no_index(&disk, &lease.0, Some(problem));
        let footer_offset = read_chunk(&disk, &lease, postscript_at..disk.len(), &mut raw)?
            .and_then(|(opened, data)| decoder.decode(&opened.header, &raw[data]))
            .and_then(footer::footer_offset)
            .map_err(unreadable)?;
        if footer_offset >= postscript_at {
            let text = format!("lies past the postscript at byte {postscript_at}");
            return Err(in_footer(&disk, footer_offset, Problem::new(text).into()));
        }
        let footer_extent = footer_offset..postscript_at;
        let (footer, offsets) = index::read(&disk, &lease, &footer_extent, KEPT_CHUNKS)
            .map_err(|halt| in_footer(&disk, footer_offset, halt))?;
        let plain = is_plain(&footer);
        let offsets = offsets.map_or_else(OnceLock::new, OnceLock::from);
        Ok(Self { disk, footer, footer_extent, offsets, plain })
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        self.disk.path()
    }

    /// How many records it holds.
    pub fn num_records(&self) -> u64 {
        self.footer.num_records
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

    /// How many bytes of the file hold records.
    pub fn stored_len(&self) -> u64 {
        self.footer_extent.start - self.footer.first_offset
    }

    /// The bytes of the file in which `chunk` lies, up to the next chunk.
    ///
    /// # Errors
    /// If this is the first chunk asked for, and where chunks begin cannot be read.
    ///
    /// # Panics
    /// If there is no such chunk.
    #[inline]
    pub fn extent(&self, chunk: u64) -> Result<Range<u64>> {
        let offsets = match self.offsets.get() {
            Some(offsets) => offsets,
            None => self.load()?,
        };
        let at = usize::try_from(chunk).expect("the number of a chunk");
        let begin = offsets.get(at).expect("the number of a chunk");
        Ok(begin..offsets.get(at + 1).unwrap_or(self.footer_extent.start))
    }

    /// Reads where the chunks begin: four bytes each, which the file keeps from then on.
    #[cold]
    fn load(&self) -> Result<&Offsets> {
        let _alone = LOADING.get().lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(offsets) = self.offsets.get() {
            return Ok(offsets);
        }
        let (footer, offsets) =
            index::read(&self.disk, &self.lease()?, &self.footer_extent, u64::MAX)
                .map_err(|halt| in_footer(&self.disk, self.footer_extent.start, halt))?;
        match offsets {
            Some(offsets) if footer == self.footer => Ok(self.offsets.get_or_init(|| offsets)),
            _ => Err(Error::Changed { path: self.path().display().to_string() }),
        }
    }

    /// How long the one record of `chunk` is, if it can be told from the index. A hint: the chunk
    /// may hold something else.
    #[inline]
    pub(crate) fn predicted_len(&self, chunk: u64) -> Option<usize> {
        self.plain
            .then(|| direct::record_len(&self.extent(chunk).ok()?))
            .flatten()
            .and_then(|len| usize::try_from(len).ok())
    }

    /// Holds the file open, after a look whether it is still the same.
    pub(crate) fn lease(&self) -> Result<Lease> {
        self.disk.file().map(Lease)
    }

    /// Fills `out` from position `at`.
    pub(crate) fn read_at(&self, lease: &Lease, out: &mut [u8], at: u64) -> Result<()> {
        self.disk.read_at(&lease.0, out, at)
    }

    /// Fills `pieces` from position `at`; says whether the file had enough to give at once.
    pub(crate) fn read_pieces(
        &self,
        lease: &Lease,
        pieces: &mut [IoSliceMut<'_>],
        at: u64,
    ) -> Result<bool> {
        self.disk.read_pieces_at(&lease.0, pieces, at)
    }

    /// Reads `chunk`, however long, into `raw`, and decodes it.
    pub(crate) fn read_chunk<'a>(
        &self,
        lease: &Lease,
        chunk: u64,
        raw: &'a mut Vec<u8>,
        decoder: &'a mut Decoder,
    ) -> Result<ChunkRecords<'a>> {
        let found = read_chunk(&self.disk, lease, self.extent(chunk)?, raw)?;
        found
            .and_then(|(opened, data)| self.decode(chunk, &opened, &raw[data], decoder))
            .map_err(|problem| self.damaged(chunk, &problem))
    }

    /// Decodes `chunk` from `raw`, the bytes of its extent, whose block headers it takes out.
    #[inline]
    pub(crate) fn decode_chunk<'a>(
        &self,
        chunk: u64,
        raw: &'a mut [u8],
        decoder: &'a mut Decoder,
    ) -> Result<ChunkRecords<'a>> {
        let extent = self.extent(chunk)?;
        let found = chunk::open(raw, extent.start, extent.end)
            .and_then(|opened| Ok((opened, opened.data(raw, extent.start)?)));
        found
            .and_then(|(opened, data)| self.decode(chunk, &opened, &raw[data], decoder))
            .map_err(|problem| self.damaged(chunk, &problem))
    }

    fn decode<'a>(
        &self,
        chunk: u64,
        opened: &Opened,
        data: &'a [u8],
        decoder: &'a mut Decoder,
    ) -> Result<ChunkRecords<'a>, Problem> {
        let expected = self.records_of(chunk).end - self.records_of(chunk).start;
        if opened.header.num_records != expected {
            return Err(Problem::new(format!(
                "{} records where the index of the file has {expected}",
                opened.header.num_records
            )));
        }
        decoder.decode(&opened.header, data)
    }

    /// The records that `chunk` holds.
    pub fn records_of(&self, chunk: u64) -> Range<u64> {
        let begin = chunk * self.footer.group_size;
        begin..begin.saturating_add(self.footer.group_size).min(self.footer.num_records)
    }

    /// The error that `problem` in `chunk` is.
    #[cold]
    pub(crate) fn damaged(&self, chunk: u64, problem: &Problem) -> Error {
        let records = self.records_of(chunk);
        let records = if records.end - records.start == 1 {
            format!("record {}", records.start)
        } else {
            format!("records {} to {}", records.start, records.end - 1)
        };
        let begin = self.extent(chunk).map_or(0, |extent| extent.start);
        Error::Corrupt {
            path: self.path().display().to_string(),
            place: format!("chunk {chunk} at byte {begin} ({records})"),
            problem: problem.to_string(),
        }
    }
}

/// The error that `halt` in the footer at `footer_offset` is.
#[cold]
fn in_footer(disk: &OnDisk, footer_offset: u64, halt: Halt) -> Error {
    match halt {
        Halt::File(error) => error,
        Halt::Data(problem) => Error::Corrupt {
            path: disk.path().display().to_string(),
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

/// Reads the chunk that begins and must end in `extent` into `raw`; its data lie in the range.
pub(super) fn read_chunk(
    disk: &OnDisk,
    lease: &Lease,
    extent: Range<u64>,
    raw: &mut Vec<u8>,
) -> Result<Result<(Opened, Range<usize>), Problem>> {
    let begin = extent.start;
    let extent_len = extent.end - begin;
    let first_len =
        if extent_len <= WHOLE_READ_LEN { extent_len } else { extent_len.min(MAX_DATA_AT as u64) };
    let bytes = match room(raw, first_len) {
        Ok(bytes) => bytes,
        Err(problem) => return Ok(Err(problem)),
    };
    disk.read_at(&lease.0, bytes, begin)?;
    let opened = match chunk::open(bytes, begin, extent.end) {
        Ok(opened) => opened,
        Err(problem) => return Ok(Err(problem)),
    };
    let span = opened.span(begin);
    let bytes = match room(raw, span) {
        Ok(bytes) => bytes,
        Err(problem) => return Ok(Err(problem)),
    };
    if let Some(rest) = bytes.get_mut(usize::try_from(first_len).unwrap_or(usize::MAX)..) {
        disk.read_at(&lease.0, rest, begin + first_len)?;
    }
    Ok(opened.data(bytes, begin).map(|data| (opened, data)))
}

/// The first `len` bytes of `raw`, which grows if it must and never shrinks.
pub(crate) fn room(raw: &mut Vec<u8>, len: u64) -> Result<&mut [u8], Problem> {
    let short = || Problem::new(format!("no memory for {len} bytes"));
    let len = usize::try_from(len).map_err(|_| short())?;
    if raw.len() < len {
        raw.try_reserve_exact(len - raw.len()).map_err(|_| short())?;
        raw.resize(len, 0);
    }
    Ok(&mut raw[..len])
}
