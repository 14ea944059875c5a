//! Many Parquet files as one sequence of rows, read by lists of positions.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use arrow_array::{Array, ArrayRef, new_empty_array};
use arrow_schema::{FieldRef, TimeUnit};
use arrow_select::interleave::interleave;
use grainmill_core::pipeline::{ReadQueue, pool};
use grainmill_core::process::PerProcess;
use grainmill_core::records::storage::Storage;
use grainmill_core::records::storage_latency::{ReadTotals, StorageLatency};
use grainmill_core::{Error, Result, interrupt};
use parquet::file::metadata::RowGroupMetaData;

use crate::ahead::Ahead;
use crate::cache::{Cache, Claim, Key, Slot};
use crate::decode::Unit;
use crate::fetch::{Fetched, OpenFile};
use crate::file::{ParquetFile, Placed};
use crate::room::{Held, Room};

/// How many files are opened at a time where storage is slow.
const MAX_OPENING: usize = 128;
/// Not less is decoded before rows are gathered, whatever the limit of the cache.
const MIN_PASS_BYTES: f64 = 64.0 * 1024.0 * 1024.0;
/// The limits of what is decoded before it is asked for; between them it is half of the cache's.
const MIN_AHEAD_BYTES: usize = 64 << 20;
const MAX_AHEAD_BYTES: usize = 256 << 20;

/// Files, each opened on first use, on any thread.
#[derive(Debug)]
pub struct ParquetFiles {
    entries: Arc<Vec<Entry>>,
    opener: Arc<Opener>,
    /// The first row of each file, and the number of rows.
    starts: Vec<u64>,
    cache: Cache,
    room: PerProcess<Arc<Room>>,
}

/// What is read of files, and how.
#[derive(Debug, Clone)]
pub struct Choice {
    /// The names of the columns to read; all if there are none. A dotted name selects a field.
    pub columns: Option<Vec<String>>,
    /// What times of the type INT96 count; without, what the writer states, or nanoseconds.
    pub int96_unit: Option<TimeUnit>,
    /// Pages of up to this length may be compressed as much as they like; longer ones must be
    /// compressed as data are.
    pub max_page_bytes: u64,
}

impl Default for Choice {
    fn default() -> Self {
        Self { columns: None, int96_unit: None, max_page_bytes: 16 << 20 }
    }
}

#[derive(Debug)]
struct Opener {
    storage: Arc<dyn Storage>,
    choice: Choice,
    latency: Arc<StorageLatency>,
}

#[derive(Debug)]
struct Entry {
    path: PathBuf,
    num_rows: Option<u64>,
    file: OnceLock<ParquetFile>,
}

/// Rows, column by column.
#[derive(Debug)]
pub struct Rows {
    /// The name and type of each column.
    pub fields: Vec<FieldRef>,
    /// The values of each column.
    pub columns: Vec<Parts>,
    /// How many rows there are.
    pub len: usize,
}

/// The values of a column for some rows, in the arrays that they were decoded into.
#[derive(Debug)]
pub struct Parts {
    /// The arrays.
    pub arrays: Vec<ArrayRef>,
    /// The array of each row, and the row's index in it.
    pub places: Vec<(usize, usize)>,
}

impl Parts {
    /// One array of all rows.
    ///
    /// # Errors
    /// If it would be too large.
    pub fn joined(&self) -> Result<ArrayRef> {
        interleaved(&self.arrays, &self.places)
    }
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
        let latency = Arc::default();
        let opener = Arc::new(Opener { storage: Arc::clone(storage), choice, latency });
        let entry = |(path, num_rows)| Entry { path, num_rows, file: OnceLock::new() };
        let entries: Arc<Vec<Entry>> = Arc::new(files.into_iter().map(entry).collect());
        let uncounted: Vec<usize> =
            (0..entries.len()).filter(|&at| entries[at].num_rows.is_none()).collect();
        open_all(&entries, &opener, uncounted)?;
        let mut starts = vec![0_u64];
        for entry in &*entries {
            let num_rows = entry.file.get().map(ParquetFile::num_rows).or(entry.num_rows);
            let next = starts.last().and_then(|start| start.checked_add(num_rows.unwrap_or(0)));
            let next = next.filter(|&next| i64::try_from(next).is_ok());
            let Some(next) = next else {
                let message = "the files have more than 2^63 rows".to_owned();
                return Err(Error::InvalidArgument(message));
            };
            starts.push(next);
        }
        let cache = Cache::new(cache_bytes);
        Ok(Self { entries, opener, starts, cache, room: PerProcess::new(Default::default) })
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
        open_all(&self.entries, &self.opener, (0..self.entries.len()).collect())?;
        let lens = |number| {
            let file = self.file(number)?;
            Ok(file.starts().windows(2).map(|pair| pair[1] - pair[0]).collect())
        };
        (0..self.entries.len()).map(lens).collect()
    }

    /// The name and type of each column.
    ///
    /// # Errors
    /// If the first file cannot be opened.
    pub fn fields(&self) -> Result<Vec<FieldRef>> {
        if self.entries.is_empty() {
            return Ok(Vec::new());
        }
        Ok(self.file(0)?.fields().cloned().collect())
    }

    /// The codecs that compress the columns of the first file, as `zstd` or `uncompressed`.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub fn codecs(&self) -> Result<Vec<String>> {
        if self.entries.is_empty() {
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
        let opened = self.entries.iter().find_map(|entry| entry.file.get());
        let first = opened.or_else(|| self.file(0).ok());
        first.map_or(0.0, ParquetFile::row_byte_len)
    }

    /// The reads so far.
    pub fn read_totals(&self) -> ReadTotals {
        self.opener.latency.totals()
    }

    /// Bytes of the decoded arrays that are kept.
    pub fn cached_bytes(&self) -> usize {
        self.cache.byte_len()
    }

    /// The file of `position`, and the number of the row in it.
    pub fn locate(&self, position: u64) -> Option<(&std::path::Path, u64)> {
        let (file, row) = self.file_of(position)?;
        Some((&self.entries[file].path, row))
    }

    fn file_of(&self, position: u64) -> Option<(usize, u64)> {
        if position >= self.len() {
            return None;
        }
        let file = self.starts.partition_point(|&start| start <= position) - 1;
        Some((file, position - self.starts[file]))
    }

    pub(crate) fn file(&self, number: usize) -> Result<&ParquetFile> {
        open_entry(&self.entries, number, &self.opener)
    }

    /// The number of rows of a file.
    pub(crate) fn file_len(&self, number: usize) -> u64 {
        self.starts[number + 1] - self.starts[number]
    }

    /// The numbers of the files of `positions` that have not been opened.
    pub(crate) fn unopened(&self, positions: &[u64]) -> impl Iterator<Item = usize> {
        let files = positions.iter().filter_map(|&position| Some(self.file_of(position)?.0));
        let mut unopened: Vec<usize> =
            files.filter(|&file| self.entries[file].file.get().is_none()).collect();
        unopened.sort_unstable();
        unopened.dedup();
        unopened.into_iter()
    }

    /// A file, opened for some reads.
    pub(crate) fn reopened(&self, number: u32) -> Result<OpenFile> {
        self.file(number as usize)?.reopen(&self.opener.latency)
    }

    /// See [`ParquetFile::place`].
    pub(crate) fn place(
        &self,
        file: &ParquetFile,
        row_group: usize,
        column: Option<usize>,
        columns: &[usize],
    ) -> Result<Vec<Held>> {
        file.place(row_group, column, columns, &self.opener.latency, self.room.get())
    }

    pub(crate) fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Whether recent reads had to wait for storage.
    pub fn is_slow(&self) -> bool {
        self.opener.latency.is_slow()
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

    /// Whether half of that memory is left; otherwise [`start_beyond`](Self::start_beyond) decodes
    /// nothing.
    pub fn has_room_beyond(&self) -> bool {
        self.cache.reserved() < self.max_ahead() / 2
    }

    /// Starts to read and decode the rows at `positions`, on threads of the engine. What fails is raised
    /// when the rows are read; while the result is held, that finds what is decoded.
    pub fn start(self: &Arc<Self>, positions: Vec<u64>, queue: &ReadQueue) -> Ahead {
        let columns = self.fields().map_or(0, |fields| fields.len());
        Ahead::start(self, positions, (0..columns).collect(), false, queue)
    }

    /// As [`start`](Self::start), for rows that are asked for much later, and do not take the place of
    /// others: nothing is decoded unless half of the memory has room for all of them.
    pub fn start_beyond(self: &Arc<Self>, positions: Vec<u64>, queue: &ReadQueue) -> Ahead {
        let columns = self.fields().map_or(0, |fields| fields.len());
        Ahead::start(self, positions, (0..columns).collect(), true, queue)
    }

    /// Reads the rows at `positions`, in that order, with as many reads in flight as `queue` allows.
    ///
    /// # Errors
    /// If a position is out of range, or a file cannot be read or is damaged.
    pub fn read(self: &Arc<Self>, positions: &[u64], queue: &ReadQueue) -> Result<Rows> {
        let all: Vec<usize> = (0..self.fields()?.len()).collect();
        self.read_columns(positions, &all, queue)
    }

    /// As [`read`](Self::read), of the columns with these numbers.
    ///
    /// # Errors
    /// Those of [`read`](Self::read).
    pub fn read_columns(
        self: &Arc<Self>,
        positions: &[u64],
        columns: &[usize],
        queue: &ReadQueue,
    ) -> Result<Rows> {
        let fields = self.fields()?;
        let fields: Vec<FieldRef> =
            columns.iter().filter_map(|&column| fields.get(column).cloned()).collect();
        if positions.is_empty() {
            let none = |field: &FieldRef| Parts {
                arrays: vec![new_empty_array(field.data_type())],
                places: Vec::new(),
            };
            let columns = fields.iter().map(none).collect();
            return Ok(Rows { fields, columns, len: 0 });
        }
        // Held until the rows are gathered.
        let ahead = self.is_slow().then(|| {
            let ahead = Ahead::start(self, positions.to_vec(), columns.to_vec(), false, queue);
            ahead.wait().map(|()| ahead)
        });
        let _ahead = ahead.transpose()?;
        let picks = self.picks(positions)?;
        let columns = self.parts(&picks, columns, queue).map_err(|error| {
            // What was found first depends on timing and on the order in storage.
            self.first_error(&picks, columns, queue).unwrap_or(error)
        })?;
        Ok(Rows { fields, columns, len: positions.len() })
    }

    /// Calls `look` with the values of a column in `rows`, in order: what is decoded at once at a time, with
    /// the rows that it has, or why these cannot be read, to their end beyond `rows`. Takes no memory for
    /// each row.
    ///
    /// # Errors
    /// If a row is out of range, a file cannot be opened, or those of `look`.
    pub fn scan(
        &self,
        rows: Range<u64>,
        column: usize,
        queue: &ReadQueue,
        mut look: impl FnMut(Range<u64>, Result<ArrayRef>) -> Result<()>,
    ) -> Result<()> {
        let mut opened = Opened { files: HashMap::new(), queue };
        let mut at = rows.start;
        while at < rows.end {
            let Some(&pick) = self.picks(&[at])?.first() else { break };
            let (file, row_group) = (self.file(pick.file as usize)?, pick.row_group as usize);
            let num_rows = file.group_len(row_group);
            let placed = self.placed(file, row_group, column);
            let unit = placed.as_ref().map(|placed| placed.unit(pick.row, num_rows));
            let (first_row, end) = unit.unwrap_or((pick.row, num_rows));
            let next = rows.end.min(at.saturating_add(end - pick.row));
            let Pick { file, row_group, row } = pick;
            let key = Key { file, row_group, column: small(column), first_row };
            let arrays = placed.and_then(|placed| self.arrays(&[(key, end, placed)], &mut opened));
            let index = |row: u64| usize::try_from(row).unwrap_or(usize::MAX);
            let values = arrays.and_then(|arrays| match arrays.first() {
                Some(array) => Ok(array.slice(index(row - first_row), index(next - at))),
                None => Err(Error::Panicked("nothing was decoded".to_owned())),
            });
            let end = if values.is_ok() { next } else { at.saturating_add(end - pick.row) };
            look(at..end, values)?;
            at = next;
        }
        Ok(())
    }

    /// What is wrong with the first of the picks that cannot be read; reads one unit after another.
    fn first_error(&self, picks: &[Pick], columns: &[usize], queue: &ReadQueue) -> Option<Error> {
        let mut opened = Opened { files: HashMap::new(), queue };
        let mut units = HashSet::new();
        let mut read = |pick: &Pick, column: usize| {
            let (file, row_group) = (self.file(pick.file as usize)?, pick.row_group as usize);
            let placed = self.placed(file, row_group, column)?;
            let (first_row, end) = placed.unit(pick.row, file.group_len(row_group));
            let Pick { file, row_group, .. } = *pick;
            let key = Key { file, row_group, column: small(column), first_row };
            if units.insert(key) {
                self.arrays(&[(key, end, placed)], &mut opened)?;
            }
            Ok(())
        };
        picks.iter().find_map(|pick| columns.iter().find_map(|&column| read(pick, column).err()))
    }

    /// The values of `picks` in each column.
    fn parts(&self, picks: &[Pick], columns: &[usize], queue: &ReadQueue) -> Result<Vec<Parts>> {
        let mut opened = Opened { files: HashMap::new(), queue };
        let passes = self.passes(picks, columns)?;
        if let [_] = &passes[..] {
            return self.gather(picks, columns, &mut opened);
        }
        // Too much to decode at once: gather the rows of some units, then of others.
        let mut pieces: Vec<Vec<ArrayRef>> = vec![Vec::new(); columns.len()];
        let mut places = vec![(0, 0); picks.len()];
        for (number, pass) in passes.iter().enumerate() {
            for (within, &at) in pass.iter().enumerate() {
                places[at] = (number, within);
            }
            let picks: Vec<Pick> = pass.iter().map(|&at| picks[at]).collect();
            let gathered = self.gather(&picks, columns, &mut opened)?;
            for (pieces, column) in pieces.iter_mut().zip(gathered) {
                pieces.push(column.joined()?);
            }
        }
        let column = |arrays| Parts { arrays, places: places.clone() };
        Ok(pieces.into_iter().map(column).collect())
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

    /// Divides the picks so that the units of each part, decoded, fit into half of the cache.
    fn passes(&self, picks: &[Pick], columns: &[usize]) -> Result<Vec<Vec<usize>>> {
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let limit = (self.cache.budget() as f64 / 2.0).max(MIN_PASS_BYTES);
        // A unit is at most a row group.
        let mut groups: Vec<(u32, u32)> =
            picks.iter().map(|pick| (pick.file, pick.row_group)).collect();
        groups.sort_unstable();
        groups.dedup();
        let mut most = 0.0;
        let known = |column: &usize| self.cache.row_byte_len(small(*column));
        let known: Vec<f64> = columns.iter().map(known).collect();
        let known_sum: f64 = known.iter().sum();
        for &(file, row_group) in &groups {
            let file = self.file(file as usize)?;
            #[expect(clippy::cast_precision_loss, reason = "an estimate")]
            let num_rows = file.group_len(row_group as usize) as f64;
            most += num_rows * file.row_byte_len().max(known_sum);
        }
        if most <= limit {
            return Ok(vec![(0..picks.len()).collect()]);
        }
        let mut order: Vec<usize> = (0..picks.len()).collect();
        order.sort_unstable_by_key(|&at| picks[at]);
        let mut passes = vec![Vec::new()];
        let mut byte_len = 0.0;
        let mut last: HashMap<usize, (u32, u32, u64)> = HashMap::new();
        for at in order {
            let Pick { file: number, row_group, row } = picks[at];
            let file = self.file(number as usize)?;
            let group = row_group as usize;
            let mut added = 0.0;
            for (&column, known) in columns.iter().zip(&known) {
                let placed = self.placed(file, group, column)?;
                let (start, end) = placed.unit(row, file.group_len(group));
                let unit = (number, row_group, start);
                if last.insert(column, unit) != Some(unit) {
                    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
                    let num_rows = (end - start) as f64;
                    added += num_rows * placed.row_byte_len.max(*known);
                }
            }
            if byte_len > 0.0 && byte_len + added > limit {
                passes.push(Vec::new());
                byte_len = 0.0;
            }
            byte_len += added;
            if let Some(pass) = passes.last_mut() {
                pass.push(at);
            }
        }
        Ok(passes)
    }

    fn placed(&self, file: &ParquetFile, row_group: usize, column: usize) -> Result<Arc<Placed>> {
        if let Some(placed) = file.placed(row_group, column) {
            return Ok(placed);
        }
        self.place(file, row_group, Some(column), &[])?;
        file.placed(row_group, column)
            .ok_or_else(|| Error::Panicked("the pages of a column were not found".to_owned()))
    }

    /// The rows of `picks`, for each column.
    fn gather(
        &self,
        picks: &[Pick],
        columns: &[usize],
        opened: &mut Opened<'_>,
    ) -> Result<Vec<Parts>> {
        let mut units: Vec<(Key, u64, Arc<Placed>)> = Vec::new();
        let mut numbers: HashMap<Key, usize> = HashMap::new();
        let mut places_by_column = Vec::with_capacity(columns.len());
        for &column in columns {
            let mut of_column = Vec::with_capacity(picks.len());
            let mut group: Option<(u32, u32, Arc<Placed>, u64)> = None;
            let mut unit: Option<(usize, u64, u64)> = None;
            for pick in picks {
                if group.as_ref().is_none_or(|&(file, row_group, ..)| {
                    (file, row_group) != (pick.file, pick.row_group)
                }) {
                    let file = self.file(pick.file as usize)?;
                    let row_group = pick.row_group as usize;
                    let placed = self.placed(file, row_group, column)?;
                    group = Some((pick.file, pick.row_group, placed, file.group_len(row_group)));
                    unit = None;
                }
                let Some((.., placed, num_rows)) = &group else { continue };
                if unit.is_none_or(|(_, start, end)| !(start..end).contains(&pick.row)) {
                    let (start, end) = placed.unit(pick.row, *num_rows);
                    let Pick { file, row_group, .. } = *pick;
                    let key = Key { file, row_group, column: small(column), first_row: start };
                    let number = *numbers.entry(key).or_insert_with(|| {
                        units.push((key, end, Arc::clone(placed)));
                        units.len() - 1
                    });
                    unit = Some((number, start, end));
                }
                let Some((number, start, _)) = unit else { continue };
                of_column.push((number, usize::try_from(pick.row - start).unwrap_or(usize::MAX)));
            }
            places_by_column.push(of_column);
        }
        let arrays = self.arrays(&units, opened)?;
        Ok(places_by_column.iter().map(|places| parts_of(&arrays, places)).collect())
    }

    /// The decoded units, from the cache or the files.
    fn arrays(
        &self,
        units: &[(Key, u64, Arc<Placed>)],
        opened: &mut Opened<'_>,
    ) -> Result<Vec<ArrayRef>> {
        let estimate = |(key, end, placed): &(Key, u64, Arc<Placed>)| {
            (*key, placed.estimate(key.first_row..*end))
        };
        let claims = self.cache.claim(units.iter().map(estimate));
        let mut arrays: Vec<Option<ArrayRef>> = vec![None; units.len()];
        let (mut missing, mut waiting) = (Vec::new(), Vec::new());
        let mut claimed = Claimed { cache: &self.cache, slots: HashMap::new() };
        for (number, claim) in claims.into_iter().enumerate() {
            match claim {
                Claim::Found(array) => arrays[number] = Some(array),
                Claim::Wait(slot) => waiting.push((number, slot)),
                Claim::Decode(slot) => {
                    claimed.slots.insert(units[number].0, slot);
                    missing.push(number);
                }
            }
        }
        if !missing.is_empty() {
            let decoded = self.decoded(&missing, units, opened, &mut claimed)?;
            for (number, array) in missing.into_iter().zip(decoded) {
                arrays[number] = Some(array);
            }
        }
        for (number, slot) in waiting {
            let array = if let Some(array) = slot.wait()? {
                array
            } else {
                // Another thread could not decode it: this one finds out why.
                let array = self
                    .decoded(&[number], units, opened, &mut claimed)?
                    .pop()
                    .ok_or_else(|| Error::Panicked("nothing was decoded".to_owned()))?;
                // As long as the slot is held, others find it.
                self.cache.finish(units[number].0, &slot, Some(Arc::clone(&array)));
                array
            };
            arrays[number] = Some(array);
        }
        Ok(arrays.into_iter().flatten().collect())
    }

    /// Decodes the units of these numbers, and ends the claims to them.
    fn decoded(
        &self,
        numbers: &[usize],
        units: &[(Key, u64, Arc<Placed>)],
        opened: &mut Opened<'_>,
        claimed: &mut Claimed<'_>,
    ) -> Result<Vec<ArrayRef>> {
        // In the order of the files, each with its units.
        let mut by_file: Vec<(u32, Vec<Unit<'_>>)> = Vec::new();
        let mut at_file: HashMap<u32, usize> = HashMap::new();
        let mut order = Vec::with_capacity(numbers.len());
        for &number in numbers {
            let (key, end, placed) = &units[number];
            let file = self.file(key.file as usize)?;
            let unit = Unit::of(file, *key, *end, placed);
            let at = *at_file.entry(key.file).or_insert_with(|| {
                by_file.push((key.file, Vec::new()));
                by_file.len() - 1
            });
            order.push((at, by_file[at].1.len(), *key));
            by_file[at].1.push(unit);
        }
        let mut requests = Vec::with_capacity(by_file.len());
        for (number, units) in &by_file {
            let handle = match opened.files.get(number) {
                Some(handle) => handle.clone(),
                None => self.reopened(*number)?,
            };
            opened.files.insert(*number, handle.clone());
            requests.push((handle, units.iter().flat_map(Unit::ranges).collect()));
        }
        let fetched = Fetched::of(requests, opened.queue)?;
        let mut arrays = Vec::with_capacity(order.len());
        for (at, unit, key) in order {
            let array = by_file[at].1[unit].decode(&fetched[at])?;
            claimed.finish(key, &array);
            arrays.push(array);
        }
        Ok(arrays)
    }
}

/// The files that a thread has opened for its reads, and the queue of these.
struct Opened<'a> {
    files: HashMap<u32, OpenFile>,
    queue: &'a ReadQueue,
}

/// Claims of a thread, which end even if it fails.
struct Claimed<'a> {
    cache: &'a Cache,
    slots: HashMap<Key, Arc<Slot>>,
}

impl Claimed<'_> {
    fn finish(&mut self, key: Key, array: &ArrayRef) {
        if let Some(slot) = self.slots.remove(&key) {
            self.cache.finish(key, &slot, Some(Arc::clone(array)));
        }
    }
}

impl Drop for Claimed<'_> {
    fn drop(&mut self) {
        for (key, slot) in self.slots.drain() {
            self.cache.finish(key, &slot, None);
        }
    }
}

/// The rows at `places` of `arrays`, of which only some belong to the column.
fn parts_of(arrays: &[ArrayRef], places: &[(usize, usize)]) -> Parts {
    let mut numbers = HashMap::new();
    let mut of_column = Vec::new();
    let mut last = (usize::MAX, 0);
    let places: Vec<(usize, usize)> = places
        .iter()
        .map(|&(array, row)| {
            if last.0 != array {
                let number = *numbers.entry(array).or_insert_with(|| {
                    of_column.push(Arc::clone(&arrays[array]));
                    of_column.len() - 1
                });
                last = (array, number);
            }
            (last.1, row)
        })
        .collect();
    Parts { arrays: of_column, places }
}

fn interleaved(arrays: &[ArrayRef], places: &[(usize, usize)]) -> Result<ArrayRef> {
    // Consecutive rows of one array need no copy.
    if let Some(&(array, first)) = places.first()
        && places.iter().zip(first..).all(|(&place, row)| place == (array, row))
    {
        return Ok(arrays[array].slice(first, places.len()));
    }
    let arrays: Vec<&dyn Array> = arrays.iter().map(|array| &**array).collect();
    let gathered = interleave(&arrays, places);
    gathered.map_err(|error| Error::InvalidArgument(format!("the rows cannot be joined: {error}")))
}

fn open_entry<'a>(entries: &'a [Entry], number: usize, opener: &Opener) -> Result<&'a ParquetFile> {
    let entry = &entries[number];
    if let Some(file) = entry.file.get() {
        return Ok(file);
    }
    let file = ParquetFile::open(&*opener.storage, &entry.path, &opener.choice, &opener.latency)?;
    if let Some(expected) = entry.num_rows
        && expected != file.num_rows()
    {
        return Err(Error::Changed { path: file.path().to_owned() });
    }
    if number > 0 {
        let first = open_entry(entries, 0, opener)?;
        check_same_columns(first, &file)?;
    }
    Ok(entry.file.get_or_init(|| file))
}

fn check_same_columns(first: &ParquetFile, file: &ParquetFile) -> Result<()> {
    let same = |a: &FieldRef, b: &FieldRef| a.name() == b.name() && a.data_type() == b.data_type();
    if first.columns().len() == file.columns().len()
        && first.fields().zip(file.fields()).all(|(a, b)| same(a, b))
    {
        return Ok(());
    }
    let shown = |file: &ParquetFile| {
        let column = |field: &FieldRef| format!("{}: {}", field.name(), field.data_type());
        file.fields().map(column).collect::<Vec<_>>().join(", ")
    };
    Err(Error::InvalidArgument(format!(
        "all files must have the same columns, but {} has ({}) and {} has ({}); select columns that \
         they share with `columns`",
        first.path(),
        shown(first),
        file.path(),
        shown(file)
    )))
}

/// Opens the files of these numbers, in order, many at a time where that helps. Of several errors, that
/// of the first file is returned.
fn open_all(entries: &Arc<Vec<Entry>>, opener: &Arc<Opener>, numbers: Vec<usize>) -> Result<()> {
    // The first two show how fast the storage is.
    let mut rest = numbers.into_iter();
    for number in rest.by_ref().take(2) {
        open_entry(entries, number, opener)?;
    }
    let rest: Vec<usize> = rest.collect();
    let num_threads = if opener.latency.is_slow() { MAX_OPENING } else { pool::max_busy() };
    if rest.len() < 8 || num_threads < 2 {
        return rest.iter().try_for_each(|&number| open_entry(entries, number, opener).map(drop));
    }
    let num_jobs = num_threads.min(rest.len());
    let (sender, receiver) = mpsc::channel();
    // Empty once a file could not be opened: those before it are being opened then.
    let rest = Arc::new(Mutex::new(rest.into_iter()));
    pool::submit(num_jobs, || {
        let (rest, sender) = (Arc::clone(&rest), sender.clone());
        let (entries, opener) = (Arc::clone(entries), Arc::clone(opener));
        Box::new(move || {
            let lock = || rest.lock().unwrap_or_else(PoisonError::into_inner);
            loop {
                let Some(number) = lock().next() else { break };
                if let Err(error) = open_entry(&entries, number, &opener) {
                    *lock() = Vec::new().into_iter();
                    drop(sender.send((number, error)));
                    break;
                }
            }
        })
    });
    drop(sender);
    let mut first: Option<(usize, Error)> = None;
    loop {
        let next = interrupt::wait(|interval| match receiver.recv_timeout(interval) {
            Err(RecvTimeoutError::Timeout) => None,
            next => Some(next),
        });
        match next? {
            Err(_) => return first.map_or(Ok(()), |(_, error)| Err(error)),
            Ok((number, _)) if first.as_ref().is_some_and(|&(earlier, _)| earlier < number) => {}
            Ok(failed) => first = Some(failed),
        }
    }
}

/// Numbers of files, row groups and columns fit into 32 bits.
pub(crate) fn small(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}
