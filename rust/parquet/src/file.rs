//! One Parquet file: its footer, its columns, and where their pages are.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use arrow_schema::FieldRef;
use grainmill_core::process::PerProcess;
use grainmill_core::records::storage::{ReadAt, Storage, StoredFile};
use grainmill_core::records::storage_latency::StorageLatency;
use grainmill_core::{Error, Result};
use parquet::file::metadata::{ParquetMetaData, ParquetMetaDataReader};

use crate::fetch::OpenFile;
use crate::layout::{self, Layout, Place};
use crate::schema::{self, Column, corrupt};

/// The end of a file that is read to get its footer, which is often shorter.
const TAIL: u64 = 64 << 10;
/// The length of the footer, and four bytes that identify the format.
const TRAILER: u64 = 8;
const MAGIC: &[u8] = b"PAR1";
const ENCRYPTED_MAGIC: &[u8] = b"PARE";

type Layouts = HashMap<(usize, usize), Arc<Placed>>;

/// A file whose footer has been read.
#[derive(Debug)]
pub(crate) struct ParquetFile {
    stored: Box<dyn StoredFile>,
    path: String,
    metadata: Arc<ParquetMetaData>,
    footer_hash: u64,
    columns: Vec<Column>,
    /// The first row of each row group, and the number of rows.
    starts: Vec<u64>,
    layouts: PerProcess<Mutex<Layouts>>,
    hint: OnceLock<f64>,
}

/// Where one column of a row group is stored, and in which units it is decoded.
#[derive(Debug)]
pub(crate) struct Placed {
    /// One for each leaf of the column.
    pub(crate) layouts: Vec<Arc<Layout>>,
    /// The first row of each unit.
    pub(crate) starts: Vec<u64>,
    /// The bytes of a row once decoded, about.
    pub(crate) row_byte_len: f64,
}

impl ParquetFile {
    /// Opens the file at `path` for the columns called `names`, or all.
    pub(crate) fn open(
        storage: &dyn Storage,
        path: &Path,
        names: Option<&[String]>,
        latency: &Arc<StorageLatency>,
    ) -> Result<Self> {
        let (stored, bytes) = storage.open(path)?;
        let path = stored.path().display().to_string();
        let file = OpenFile { bytes, latency: Arc::clone(latency), byte_len: stored.byte_len() };
        let footer = footer(&file, &path)?;
        let footer_hash = hash(&footer);
        let place = "footer";
        // The crate returns errors for all damage that is known; this is for what is not.
        let decoded = catch_unwind(AssertUnwindSafe(|| {
            let metadata = ParquetMetaDataReader::decode_metadata(&footer)
                .map_err(|error| schema::raised(&path, place, error))?;
            let metadata = Arc::new(metadata);
            let starts = starts(&metadata, &path)?;
            let columns = schema::columns(&metadata, names, &path)?;
            Ok((metadata, starts, columns))
        }));
        let (metadata, starts, columns) =
            decoded.unwrap_or_else(|_| Err(corrupt(&path, place, &"it cannot be decoded")))?;
        let layouts = PerProcess::new(Default::default);
        let hint = OnceLock::new();
        Ok(Self { stored, path, metadata, footer_hash, columns, starts, layouts, hint })
    }

    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    pub(crate) fn metadata(&self) -> &ParquetMetaData {
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
            let byte_len: f64 = groups
                .iter()
                .flat_map(|group| leaves().map(|&leaf| group.column(leaf).uncompressed_size()))
                .map(|len| f64::from(i32::try_from(len.max(0) >> 10).unwrap_or(i32::MAX)) * 1024.0)
                .sum();
            #[expect(clippy::cast_precision_loss, reason = "an estimate")]
            let num_rows = self.num_rows().max(1) as f64;
            byte_len / num_rows
        })
    }

    /// Opens the file for some reads, and checks that it has not changed.
    pub(crate) fn reopen(&self, latency: &Arc<StorageLatency>) -> Result<OpenFile> {
        let reopened = self.stored.reopen(false)?;
        let file = self.open_file(reopened.bytes, latency);
        if let Some(id) = reopened.new_id {
            if hash(&footer(&file, &self.path)?) != self.footer_hash {
                return Err(Error::Changed { path: self.path.clone() });
            }
            self.stored.accept_id(id);
        }
        Ok(file)
    }

    fn open_file(&self, bytes: Arc<dyn ReadAt>, latency: &Arc<StorageLatency>) -> OpenFile {
        OpenFile { bytes, latency: Arc::clone(latency), byte_len: self.stored.byte_len() }
    }

    /// Where column number `column` of `row_group` is stored, if that is known.
    pub(crate) fn placed(&self, row_group: usize, column: usize) -> Option<Arc<Placed>> {
        let layouts = self.layouts.get().lock().unwrap_or_else(PoisonError::into_inner);
        layouts.get(&(row_group, column)).cloned()
    }

    /// Finds out where column number `column` of `row_group` is stored.
    pub(crate) fn place(
        &self,
        row_group: usize,
        column: usize,
        file: &OpenFile,
    ) -> Result<Arc<Placed>> {
        let group = self.metadata.row_group(row_group);
        let num_rows = self.group_len(row_group);
        let mut layouts = Vec::new();
        let mut lens = Vec::new();
        for &leaf in &self.columns[column].leaves {
            let place = Place { path: &self.path, row_group, column: group.column(leaf) };
            layouts.push(Arc::new(Layout::read(place, num_rows, file)?));
            lens.push(u64::try_from(group.column(leaf).uncompressed_size()).unwrap_or(0));
        }
        let leaves: Vec<_> = layouts.iter().map(|layout| &**layout).zip(lens.clone()).collect();
        let starts = layout::units(&leaves, num_rows);
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let row_byte_len = lens.iter().sum::<u64>() as f64 / num_rows.max(1) as f64;
        let placed = Arc::new(Placed { layouts, starts, row_byte_len });
        let mut layouts = self.layouts.get().lock().unwrap_or_else(PoisonError::into_inner);
        layouts.insert((row_group, column), Arc::clone(&placed));
        Ok(placed)
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

/// The encoded footer.
fn footer(file: &OpenFile, path: &str) -> Result<Vec<u8>> {
    let whole = |problem: &str| Err(corrupt(path, "whole file", &problem));
    if file.byte_len == 0 {
        return whole("the file is empty");
    }
    if file.byte_len < TRAILER + MAGIC.len() as u64 {
        return whole("not a Parquet file: it is too short");
    }
    let tail_start = file.byte_len.saturating_sub(TAIL);
    let tail = file.read(tail_start..file.byte_len)?;
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
    let end = file.byte_len - TRAILER;
    let Some(start) = end.checked_sub(len).filter(|&start| start >= MAGIC.len() as u64) else {
        let text = format!("its length is {len} bytes, but the file has {}", file.byte_len);
        return Err(corrupt(path, "footer", &text));
    };
    let held = usize::try_from(len).ok().and_then(|len| rest.len().checked_sub(len));
    match held {
        Some(at) => Ok(rest[at..].to_vec()),
        None => Ok(file.read(start..end)?.to_vec()),
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
        let len = u64::try_from(group.num_rows()).ok().filter(|&len| len < 1 << 48);
        let next = len.and_then(|len| starts.last()?.checked_add(len));
        let next = next.filter(|&next| usize::try_from(next).is_ok());
        let Some(next) = next else {
            let text = format!("it has {} rows", group.num_rows());
            return Err(corrupt(path, &place(), &text));
        };
        if let Some(other) = group.columns().iter().find_map(|column| column.file_path()) {
            let text = format!("a column is stored in another file, `{other}`");
            return Err(corrupt(path, &place(), &text));
        }
        starts.push(next);
    }
    Ok(starts)
}
