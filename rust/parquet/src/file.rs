//! One Parquet file: its footer, its columns, and where their pages are.

use std::hash::{DefaultHasher, Hasher};
use std::iter;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use arrow_schema::FieldRef;
use grainmill_core::formats::index_cache::{CachedIndex, IndexHandle};
use grainmill_core::io::SingleFlight;
use grainmill_core::io::storage::{FileHandle, Reader, Storage, StoredFile};
use grainmill_core::io::storage_latency::StorageLatency;
use grainmill_core::{Error, Result};
use parquet::errors::ParquetError;
use parquet::file::metadata::{ParquetMetaData, ParquetMetaDataReader};

use crate::fetch::{Fetched, JoinLimits, OpenFile, joined, read};
use crate::footer::{self, Footer};
use crate::layout::{self, Layout, MAX_SLOW_WHOLE, Place};
use crate::room::{Held, MAX_TAKEN, Room};
use crate::schema::{self, Choice, Column};

/// The end of a file that is read to get its footer, which is often shorter.
const TAIL: u64 = 64 << 10;
/// The length of the footer, and four bytes that identify the format.
const TRAILER: u64 = 8;
const MAGIC: &[u8] = b"PAR1";
/// A row group with more rows is taken for damaged.
const MAX_GROUP_ROWS: u64 = 1 << 40;
const ENCRYPTED_MAGIC: &[u8] = b"PARE";

/// What an index takes beside its content, about.
const HANDLE_LEN: usize = 128;

/// A file whose footer has been read.
#[derive(Debug)]
pub(crate) struct ParquetFile {
    stored: Box<dyn StoredFile>,
    path: String,
    latency: Arc<StorageLatency>,
    metadata: Arc<ParquetMetaData>,
    footer_hash: u64,
    /// Shared by files with the same schema.
    columns: Arc<[Column]>,
    /// The first row of each row group, and the number of rows.
    starts: Vec<u64>,
    /// Of each column of each row group.
    placed: Vec<IndexHandle<Placed>>,
    /// The columns that threads are finding.
    finding: SingleFlight,
    hint: OnceLock<f64>,
    max_page_bytes: u64,
}

/// Where one column of a row group is stored, and in which units it is decoded.
#[derive(Debug)]
pub(crate) struct Placed {
    /// One for each leaf of the column.
    pub(crate) layouts: Vec<Layout>,
    /// The first row of each unit.
    pub(crate) starts: Vec<u64>,
    /// The bytes of a row once decoded, about.
    pub(crate) row_byte_len: f64,
    /// Whether they may be many more.
    pub(crate) is_rough: bool,
}

impl ParquetFile {
    /// Opens the file at `path` for some of its columns, as `like` has been opened.
    pub(crate) fn open(
        storage: &dyn Storage,
        path: &Path,
        choice: &Choice,
        like: Option<&Self>,
        latency: &Arc<StorageLatency>,
    ) -> Result<Self> {
        let (stored, bytes) = storage.open(path)?;
        let path = stored.path().display().to_string();
        let footer = footer(Reader::new(&*bytes, latency), stored.byte_len(), &path)?;
        let footer_hash = hash(&footer);
        let place = "footer";
        let Ok(Footer { parts, encrypted }) = footer::rewritten(&footer) else {
            return Err(Error::corrupt(&path, place, "it is damaged"));
        };
        // The crate returns errors for all damage that is known; this is for what is not.
        let decoded = catch_unwind(AssertUnwindSafe(|| {
            let damaged = |error| Error::corrupt(&path, place, error);
            let metadata = metadata(&parts).map_err(damaged)?;
            let metadata = Arc::new(metadata);
            let starts = starts(&metadata, &path)?;
            let like = like.filter(|like| schema::is_same(&like.metadata, &metadata));
            let columns = match like {
                Some(like) => Arc::clone(&like.columns),
                None => schema::columns(&metadata, choice, &path)?.into(),
            };
            schema::check_not_encrypted(&metadata, &columns, &encrypted, &path)?;
            Ok((metadata, starts, columns))
        }));
        let (metadata, starts, columns) = decoded
            .unwrap_or_else(|_| Err(Error::corrupt(&path, place, "it cannot be decoded")))?;
        if storage.is_remote(stored.path()) {
            latency.expect_slow();
        }
        let num_chunks = metadata.num_row_groups() * columns.len();
        let placed = iter::repeat_with(IndexHandle::default).take(num_chunks).collect();
        let finding = SingleFlight::new();
        let hint = OnceLock::new();
        let max_page_bytes = choice.max_page_bytes;
        Ok(Self {
            stored,
            path,
            latency: Arc::clone(latency),
            metadata,
            footer_hash,
            columns,
            starts,
            placed,
            finding,
            hint,
            max_page_bytes,
        })
    }

    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// Pages of up to this length may be compressed as much as they like.
    pub(crate) fn max_page_bytes(&self) -> u64 {
        self.max_page_bytes
    }

    pub(crate) fn metadata(&self) -> &Arc<ParquetMetaData> {
        &self.metadata
    }

    pub(crate) fn columns(&self) -> &[Column] {
        &self.columns
    }

    pub(crate) fn fields(&self) -> impl Iterator<Item = &FieldRef> {
        self.columns.iter().map(|column| &column.field)
    }

    pub(crate) fn num_rows(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// The first row of each row group, and the number of rows.
    pub(crate) fn starts(&self) -> &[u64] {
        &self.starts
    }

    /// The row group of `row`, which must be below the number of rows, and the row's number in it.
    pub(crate) fn locate(&self, row: u64) -> (usize, u64) {
        let group = self.starts.partition_point(|&start| start <= row) - 1;
        (group, row - self.starts[group])
    }

    /// The number of rows of a row group.
    pub(crate) fn group_len(&self, row_group: usize) -> u64 {
        self.starts[row_group + 1] - self.starts[row_group]
    }

    /// The bytes of a row in memory, about.
    pub(crate) fn row_byte_len(&self) -> f64 {
        *self.hint.get_or_init(|| {
            let groups = self.metadata.row_groups();
            let leaves = || self.columns.iter().flat_map(|column| &column.leaves);
            let byte_len = groups
                .iter()
                .flat_map(|group| leaves().map(|&leaf| group.column(leaf).uncompressed_size()))
                .fold(0_u64, |sum, len| sum.saturating_add(u64::try_from(len).unwrap_or(0)));
            #[expect(clippy::cast_precision_loss, reason = "an estimate")]
            let mean = byte_len as f64 / self.num_rows().max(1) as f64;
            mean
        })
    }

    /// Opens the file for some reads, and checks that it has not changed.
    pub(crate) fn reopen(&self) -> Result<OpenFile> {
        let (latency, byte_len) = (&self.latency, self.stored.byte_len());
        let handle = FileHandle::open(&*self.stored, latency, false, |reader| {
            Ok(hash(&footer(reader, byte_len, &self.path)?) == self.footer_hash)
        })?;
        Ok(OpenFile { handle, latency: Arc::clone(latency), byte_len })
    }

    /// Where column number `column` of `row_group` is stored, if that is known.
    pub(crate) fn placed(&self, row_group: usize, column: usize) -> Option<Arc<Placed>> {
        self.handle(row_group, column).cached()
    }

    fn handle(&self, row_group: usize, column: usize) -> &IndexHandle<Placed> {
        &self.placed[row_group * self.columns.len() + column]
    }

    /// Whether a column has an offset index in `row_group`.
    pub(crate) fn has_index(&self, row_group: usize, column: usize) -> bool {
        let group = self.metadata.row_group(row_group);
        let mut leaves = self.columns[column].leaves.iter().map(|&leaf| group.column(leaf));
        leaves.all(|leaf| {
            leaf.offset_index_offset().is_some() && leaf.offset_index_length().is_some()
        })
    }

    /// Finds out where a column of `row_group` is stored, or all of `columns` that have an offset
    /// index, unless that is known or another thread does.
    ///
    /// Returns it, and the column chunks that had to be read whole for it, as far as there is room for
    /// them.
    pub(crate) fn place(
        &self,
        row_group: usize,
        column: Option<usize>,
        columns: &[usize],
        room: &Arc<Room>,
    ) -> Result<(Vec<Arc<Placed>>, Vec<Held>)> {
        // Those with an offset index are found together.
        let number = (row_group as u64) << 32 | column.map_or(u64::MAX >> 32, |at| at as u64);
        let _finding = self.finding.enter(number)?;
        let mut columns: Vec<usize> = match column {
            Some(column) => vec![column],
            None => columns.iter().copied().filter(|&at| self.has_index(row_group, at)).collect(),
        };
        let mut placed = Vec::new();
        columns.retain(|&column| {
            let known = self.placed(row_group, column);
            let is_unknown = known.is_none();
            placed.extend(known);
            is_unknown
        });
        if columns.is_empty() {
            return Ok((placed, Vec::new()));
        }
        let file = self.reopen()?;
        let group = self.metadata.row_group(row_group);
        let (mut indexes, mut chunks) = (Vec::new(), Vec::new());
        for &leaf in columns.iter().flat_map(|&column| &self.columns[column].leaves) {
            let place = Place { path: &self.path, row_group, column: group.column(leaf) };
            match layout::index_range(place, file.byte_len)? {
                Some(range) => indexes.push((range, ())),
                None => chunks.push(layout::chunk(place, file.byte_len)?),
            }
        }
        let (mut parts, mut held) = (Vec::new(), Vec::new());
        for (range, _) in joined(indexes, JoinLimits::INDEXES) {
            parts.push((range.start, file.read(range)?));
        }
        if self.latency.is_slow() {
            // The others are read one after another, and not kept.
            let mut left = MAX_TAKEN;
            chunks.retain(|chunk| {
                let len = chunk.end - chunk.start;
                let is_whole = len <= MAX_SLOW_WHOLE.min(left);
                left -= if is_whole { len } else { 0 };
                is_whole
            });
            let taken = Arc::new(room.take(MAX_TAKEN - left)?);
            for chunk in chunks {
                let bytes = file.read(chunk.clone())?;
                parts.push((chunk.start, bytes.clone()));
                held.push(Held { at: chunk.start, bytes, taken: Arc::clone(&taken) });
            }
        }
        let fetched = Fetched::with(file, parts);
        for column in columns {
            let found = Arc::new(self.found(row_group, column, &fetched)?);
            self.handle(row_group, column).keep(&found);
            placed.push(found);
        }
        held.retain(|held| held.taken.may_stay());
        Ok((placed, held))
    }

    /// Where column number `column` of `row_group` is stored.
    fn found(&self, row_group: usize, column: usize, fetched: &Fetched) -> Result<Placed> {
        let group = self.metadata.row_group(row_group);
        let num_rows = self.group_len(row_group);
        let mut layouts = Vec::new();
        let mut lens = Vec::new();
        let (mut byte_len, mut is_rough) = (0_u64, false);
        for &leaf in &self.columns[column].leaves {
            let place = Place { path: &self.path, row_group, column: group.column(leaf) };
            layouts.push(Layout::read(place, num_rows, fetched)?);
            lens.push(u64::try_from(group.column(leaf).uncompressed_size()).unwrap_or(0));
            let decoded = layout::decoded_len(group.column(leaf));
            byte_len = byte_len.saturating_add(decoded.0);
            is_rough |= decoded.1;
        }
        let leaves: Vec<_> = layouts.iter().zip(lens).collect();
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let row_byte_len = byte_len as f64 / num_rows.max(1) as f64;
        let starts = layout::units(&leaves, num_rows, row_byte_len);
        Ok(Placed { layouts, starts, row_byte_len, is_rough })
    }
}

impl CachedIndex for Placed {
    fn byte_len(&self) -> usize {
        let starts = self.starts.capacity() * size_of::<u64>();
        let layouts = self.layouts.capacity() * size_of::<Layout>();
        let pages: usize = self.layouts.iter().map(Layout::pages_len).sum();
        size_of::<Self>() + HANDLE_LEN + starts + layouts + pages
    }
}

impl Placed {
    /// The unit of `row` in a row group of `num_rows` rows: its first row and the one after its last.
    pub(crate) fn unit(&self, row: u64, num_rows: u64) -> (u64, u64) {
        let after = self.starts.partition_point(|&start| start <= row);
        let end = self.starts.get(after).copied().unwrap_or(num_rows);
        (self.starts[after.saturating_sub(1)], end)
    }
}

/// The footer of which these are the parts, which differ in their row groups.
fn metadata(parts: &[Vec<u8>]) -> parquet::errors::Result<ParquetMetaData> {
    let mut decoded = Vec::new();
    for part in parts {
        decoded.push(ParquetMetaDataReader::decode_metadata(part)?);
    }
    let file_metadata = decoded.first().map(|first| first.file_metadata().clone());
    let file_metadata = file_metadata.ok_or_else(|| ParquetError::General("no footer".into()))?;
    let row_groups = match &mut decoded[..] {
        [_] => return Ok(decoded.remove(0)),
        several => several.iter().flat_map(|part| part.row_groups().to_vec()).collect(),
    };
    Ok(ParquetMetaData::new(file_metadata, row_groups))
}

/// The encoded footer.
fn footer(reader: Reader<'_>, byte_len: u64, path: &str) -> Result<Vec<u8>> {
    let whole = |problem: &str| Err(Error::corrupt(path, "whole file", problem));
    if byte_len == 0 {
        return whole("the file is empty");
    }
    if byte_len < TRAILER + MAGIC.len() as u64 {
        return whole("not a Parquet file: it is too short");
    }
    let tail_start = byte_len.saturating_sub(TAIL);
    let tail = read(reader, tail_start..byte_len)?;
    let Some((rest, magic)) = tail.split_last_chunk::<4>() else {
        return whole("not a Parquet file: it is too short");
    };
    if magic == ENCRYPTED_MAGIC {
        return whole("encrypted Parquet files cannot be read");
    }
    if magic != MAGIC {
        return whole("not a Parquet file, or its end is missing: the last bytes are not `PAR1`");
    }
    let Some((rest, len)) = rest.split_last_chunk::<4>() else {
        return whole("not a Parquet file: it is too short");
    };
    let len = u64::from(u32::from_le_bytes(*len));
    let end = byte_len - TRAILER;
    let Some(start) = end.checked_sub(len).filter(|&start| start >= MAGIC.len() as u64) else {
        let text = format!("its length is {len} bytes, but the file has {byte_len}");
        return Err(Error::corrupt(path, "footer", text));
    };
    let held = usize::try_from(len).ok().and_then(|len| rest.len().checked_sub(len));
    match held {
        Some(at) => Ok(rest[at..].to_vec()),
        None => Ok(read(reader, start..end)?.to_vec()),
    }
}

fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

/// The first row of each row group, and the number of rows.
fn starts(metadata: &ParquetMetaData, path: &str) -> Result<Vec<u64>> {
    let mut starts = vec![0_u64];
    for (number, group) in metadata.row_groups().iter().enumerate() {
        let place = || format!("footer, row group {number}");
        let len = u64::try_from(group.num_rows()).ok().filter(|&len| len < MAX_GROUP_ROWS);
        let next = len.and_then(|len| starts.last()?.checked_add(len));
        let next = next.filter(|&next| usize::try_from(next).is_ok());
        let Some(next) = next else {
            let text = format!("it has {} rows", group.num_rows());
            return Err(Error::corrupt(path, place(), text));
        };
        if let Some(other) = group.columns().iter().find_map(|column| column.file_path()) {
            let text = format!("a column is stored in another file, `{other}`");
            return Err(Error::corrupt(path, place(), text));
        }
        starts.push(next);
    }
    Ok(starts)
}
