//! Many Parquet files as one sequence of rows, read by lists of positions.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_schema::FieldRef;
use grainmill_core::io::StorageLimit;
use grainmill_core::io::storage::Storage;
use grainmill_core::io::storage_latency::ReadTotals;
use grainmill_core::process::PerProcess;
use grainmill_core::{Error, Result};
use parquet::file::metadata::RowGroupMetaData;

use crate::cache::Cache;
use crate::file::ParquetFile;
use crate::file_table::FileTable;
use crate::placings::Placings;
use crate::room::Room;
use crate::schema::Choice;

/// The limits of what is decoded before it is asked for; between them it is half of the cache's.
const MIN_AHEAD_BYTES: usize = 64 << 20;
const MAX_AHEAD_BYTES: usize = 256 << 20;

/// Files, each opened on first use, on any thread.
#[derive(Debug)]
pub struct ParquetFiles {
    table: Arc<FileTable>,
    /// The first row of each file, and the number of rows.
    starts: Vec<u64>,
    cache: Cache,
    room: PerProcess<Arc<Room>>,
    placings: PerProcess<Placings>,
}

/// A requested row: its file, row group, and number in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Pick {
    pub(crate) file: u32,
    pub(crate) row_group: u32,
    pub(crate) row: u64,
}

impl ParquetFiles {
    /// The rows of `files`, each a path and its number of rows if known. Decoded arrays are kept up to
    /// `cache_bytes`.
    ///
    /// # Errors
    /// If a file cannot be opened, or its columns differ from those of the first.
    pub fn open(
        storage: &Arc<dyn Storage>,
        files: Vec<(PathBuf, Option<u64>)>,
        choice: Choice,
        cache_bytes: usize,
    ) -> Result<Self> {
        if u32::try_from(files.len()).is_err() {
            let message = "cannot read more than 2^32 files at once".to_owned();
            return Err(Error::InvalidArgument(message));
        }
        let table = Arc::new(FileTable::new(storage, files, choice));
        table.open_all(table.uncounted())?;
        let mut starts = vec![0_u64];
        for number in 0..table.len() {
            let next = starts.last().and_then(|start| start.checked_add(table.num_rows(number)));
            let next = next.filter(|&next| i64::try_from(next).is_ok());
            let Some(next) = next else {
                let message = "the files have more than 2^63 rows".to_owned();
                return Err(Error::InvalidArgument(message));
            };
            starts.push(next);
        }
        let cache = Cache::new(cache_bytes);
        let (room, placings) =
            (PerProcess::new(Default::default), PerProcess::new(Default::default));
        Ok(Self { table, starts, cache, room, placings })
    }

    /// How many rows there are.
    pub fn len(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of rows of each file.
    pub fn num_rows(&self) -> impl Iterator<Item = u64> + '_ {
        self.starts.windows(2).map(|pair| pair[1] - pair[0])
    }

    /// The number of rows of each row group of each file; opens all files.
    ///
    /// # Errors
    /// If a file cannot be opened.
    pub fn row_group_lens(&self) -> Result<Vec<Vec<u64>>> {
        self.table.open_all((0..self.table.len()).collect())?;
        let lens = |number| {
            let file = self.file(number)?;
            Ok(file.starts().windows(2).map(|pair| pair[1] - pair[0]).collect())
        };
        (0..self.table.len()).map(lens).collect()
    }

    /// The name and type of each column.
    ///
    /// # Errors
    /// If the first file cannot be opened.
    pub fn fields(&self) -> Result<Vec<FieldRef>> {
        if self.table.len() == 0 {
            return Ok(Vec::new());
        }
        Ok(self.file(0)?.fields().cloned().collect())
    }

    /// The codecs that compress the columns of the first file, as `zstd` or `uncompressed`.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub fn codecs(&self) -> Result<Vec<String>> {
        if self.table.len() == 0 {
            return Ok(Vec::new());
        }
        let groups = self.file(0)?.metadata().row_groups();
        let chunks = groups.iter().flat_map(RowGroupMetaData::columns);
        let mut codecs: Vec<String> = Vec::new();
        for chunk in chunks {
            let codec = chunk.compression().to_string().to_lowercase(); // `zstd(...)` with a level
            let name = codec.split('(').next().unwrap_or(&codec);
            if !codecs.iter().any(|known| known == name) {
                codecs.push(name.to_owned());
            }
        }
        Ok(codecs)
    }

    /// The bytes of a row in memory, about: those of the first file that is open.
    pub fn mean_byte_len(&self) -> f64 {
        let first = self.table.first_opened().or_else(|| self.file(0).ok());
        first.map_or(0.0, ParquetFile::row_byte_len)
    }

    /// The reads so far.
    pub fn read_totals(&self) -> ReadTotals {
        self.table.latency().totals()
    }

    /// Bytes of the decoded arrays that are kept.
    pub fn cached_bytes(&self) -> usize {
        self.cache.byte_len()
    }

    /// The file of `position`, and the number of the row in it.
    pub fn locate(&self, position: u64) -> Option<(&Path, u64)> {
        let (file, row) = self.file_of(position)?;
        Some((self.table.path(file), row))
    }

    fn file_of(&self, position: u64) -> Option<(usize, u64)> {
        if position >= self.len() {
            return None;
        }
        let file = self.starts.partition_point(|&start| start <= position) - 1;
        Some((file, position - self.starts[file]))
    }

    pub(crate) fn file(&self, number: usize) -> Result<&ParquetFile> {
        self.table.file(number)
    }

    /// The number of rows of a file.
    pub(crate) fn file_len(&self, number: usize) -> u64 {
        self.starts[number + 1] - self.starts[number]
    }

    /// The numbers of the files of `positions` that have not been opened.
    pub(crate) fn unopened(&self, positions: &[u64]) -> impl Iterator<Item = usize> {
        let files = positions.iter().filter_map(|&position| Some(self.file_of(position)?.0));
        let mut unopened: Vec<usize> = files.filter(|&file| !self.table.is_open(file)).collect();
        unopened.sort_unstable();
        unopened.dedup();
        unopened.into_iter()
    }

    /// The limit on what is read to find pages.
    pub(crate) fn room(&self) -> &Arc<Room> {
        self.room.get()
    }

    /// What is being found by jobs.
    pub(crate) fn placings(&self) -> &Placings {
        self.placings.get()
    }

    pub(crate) fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Whether recent reads had to wait for storage.
    pub fn is_slow(&self) -> bool {
        self.table.latency().is_slow()
    }

    /// The limit of the storage of its files.
    pub(crate) fn limit(&self) -> Option<Arc<StorageLimit>> {
        self.table.latency().limit()
    }

    /// How many bytes may be reserved before reads are no longer started ahead.
    pub(crate) fn max_ahead(&self) -> usize {
        (self.cache.budget() / 2).clamp(MIN_AHEAD_BYTES, MAX_AHEAD_BYTES)
    }

    /// Whether there is memory for rows that are not asked for yet. Otherwise [`start`](Self::start)
    /// only opens files and finds pages.
    pub fn has_room(&self) -> bool {
        self.cache.reserved() < self.max_ahead()
    }

    /// Whether half of that memory is left; otherwise nothing is decoded for rows that are asked for much
    /// later.
    pub fn has_room_beyond(&self) -> bool {
        self.cache.reserved() < self.max_ahead() / 2
    }

    /// The row group and row of each position.
    pub(crate) fn picks(&self, positions: &[u64]) -> Result<Vec<Pick>> {
        let mut picks = Vec::with_capacity(positions.len());
        for &position in positions {
            let Some((number, row)) = self.file_of(position) else {
                return Err(Error::OutOfRange(format!(
                    "row {position} requested, but the files have {}",
                    self.len()
                )));
            };
            let (row_group, row) = self.file(number)?.locate(row);
            picks.push(Pick { file: small(number), row_group: small(row_group), row });
        }
        Ok(picks)
    }
}

/// Numbers of files, row groups and columns fit into 32 bits.
pub(crate) fn small(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}
