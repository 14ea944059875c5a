//! Many files of records as one index space, read by lists of positions.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::path::PathBuf;
use std::sync::Arc;

use super::chunk_cache::ChunkCache;
use super::plan::{Plan, PlannedFile};
use super::records::{Records, Scratch};
use crate::formats::format::{Format, OpenedFile};
use crate::formats::record_file::{Pick, RecordFile};
use crate::io::storage::{Reader, Storage};
use crate::io::storage_latency::{ReadTotals, SharedLatency, StorageLatency};
use crate::io::{LocalFiles, StorageLimit, TryOnce, for_each_parallel};
use crate::{Error, Result};

/// A file and the range of its records that is used.
#[derive(Debug, Clone, Default)]
pub struct SourceFile {
    /// The path of the file.
    pub path: PathBuf,
    /// How many records at its start are skipped.
    pub skip: u64,
    /// How many records follow; all, if `None`.
    pub take: Option<u64>,
    /// The recorded state of the file, if known; the file is checked against it when opened.
    pub expected: Option<FileInfo>,
}

/// The state of a file, which identifies its content among files of the same path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileInfo {
    /// The length in bytes.
    pub byte_len: u64,
    /// When it was last written, in nanoseconds since 1970.
    pub modified_ns: i64,
    /// How many records it holds.
    pub num_records: u64,
}

impl From<PathBuf> for SourceFile {
    fn from(path: PathBuf) -> Self {
        Self { path, ..Self::default() }
    }
}

/// Files, each opened on first use, on any thread.
#[derive(Debug)]
pub struct FileSet {
    /// Shared with the sets that this one was joined from.
    entries: Vec<Arc<Entry>>,
    /// The reads from each storage, and which of these each entry is in.
    latencies: Vec<Arc<StorageLatency>>,
    latency_of: Vec<u32>,
    cache: Arc<ChunkCache>,
}

#[derive(Debug)]
struct Entry {
    source: SourceFile,
    storage: Arc<dyn Storage>,
    /// The latency of the files of this storage that it was created with.
    latency: Arc<SharedLatency>,
    format: Arc<dyn Format>,
    file: TryOnce<Arc<dyn RecordFile>>,
}

impl FileSet {
    /// Files of the local file system in `format`.
    pub fn new(format: &Arc<dyn Format>, sources: impl IntoIterator<Item = SourceFile>) -> Self {
        let storage: Arc<dyn Storage> = Arc::new(LocalFiles);
        Self::in_storage(&storage, format, sources)
    }

    /// Files of any storage in `format`.
    pub fn in_storage(
        storage: &Arc<dyn Storage>,
        format: &Arc<dyn Format>,
        sources: impl IntoIterator<Item = SourceFile>,
    ) -> Self {
        let mut latencies: HashMap<_, Arc<SharedLatency>> = HashMap::new();
        let entry = |source: SourceFile| {
            let limit = storage.limit(&source.path);
            let key = (storage.is_remote(&source.path), limit.as_ref().map(Arc::as_ptr));
            let latency = latencies.entry(key).or_insert_with(|| SharedLatency::of(limit.clone()));
            let latency = Arc::clone(latency);
            let (storage, format) = (Arc::clone(storage), Arc::clone(format));
            Arc::new(Entry { source, storage, latency, format, file: TryOnce::default() })
        };
        Self::with(sources.into_iter().map(entry).collect())
    }

    fn with(entries: Vec<Arc<Entry>>) -> Self {
        let mut numbers = HashMap::new();
        let (mut latencies, mut latency_of) = (Vec::new(), Vec::with_capacity(entries.len()));
        for entry in &entries {
            let number = *numbers.entry(Arc::as_ptr(&entry.latency)).or_insert_with(|| {
                latencies.push(Arc::new(StorageLatency::of(&entry.latency)));
                u32::try_from(latencies.len() - 1).expect("sets have at most 2^32 files")
            });
            latency_of.push(number);
        }
        Self { entries, latencies, latency_of, cache: Arc::default() }
    }

    /// The reads from the storage of file number `at`.
    fn latency(&self, at: usize) -> &Arc<StorageLatency> {
        &self.latencies[self.latency_of[at] as usize]
    }

    /// How many files there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The files that must be opened to know their number of records.
    pub fn uncounted(&self) -> Vec<usize> {
        (0..self.len()).filter(|&at| self.entries[at].count().is_none()).collect()
    }

    /// File number `at`, opened if it is not open. `load_index` keeps its chunk offsets in memory,
    /// for records that are read next.
    ///
    /// # Errors
    /// If it cannot be opened, differs from its recorded state, or has too few records.
    pub fn open(&self, at: usize, load_index: bool) -> Result<&Arc<dyn RecordFile>> {
        let entry = &self.entries[at];
        entry.file.get_or_make(|| entry.open(self.latency(at), load_index))
    }

    /// Opens the files of these numbers, many at a time where that helps. Of several errors, that of the
    /// first file is returned.
    ///
    /// # Errors
    /// Those of [`open`](Self::open).
    pub fn open_each(self: &Arc<Self>, numbers: Vec<usize>) -> Result<()> {
        let set = Arc::clone(self);
        let limits = Arc::clone(self);
        for_each_parallel(
            numbers,
            move |at| limits.latency(at).limit(),
            move |at| set.open(at, false).map(drop),
        )
    }

    /// Opens all files.
    ///
    /// # Errors
    /// Those of [`open`](Self::open).
    pub fn open_all(self: &Arc<Self>) -> Result<()> {
        self.open_each((0..self.len()).collect())
    }

    /// The files opened so far, in order.
    fn opened(&self) -> impl Iterator<Item = &Arc<dyn RecordFile>> {
        self.entries.iter().filter_map(|entry| entry.file.get())
    }
}

impl Entry {
    fn open(&self, latency: &StorageLatency, load_index: bool) -> Result<Arc<dyn RecordFile>> {
        let (stored, bytes) = self.storage.open(&self.source.path)?;
        if let Some(expected) = self.source.expected {
            let found = FileInfo {
                byte_len: stored.byte_len(),
                modified_ns: stored.modified_ns(),
                num_records: expected.num_records,
            };
            self.source.compare(expected, found)?;
        }
        let (storage, bytes) = (&self.storage, &bytes);
        let is_remote = storage.is_remote(&self.source.path);
        if is_remote {
            latency.expect_slow(); // opening may read all of it
        }
        let reader = Reader::new(&**bytes, latency);
        let file = OpenedFile { stored, reader, bytes, storage, latency, load_index };
        let file = self.format.open(file)?;
        self.source.check(file.num_records())?;
        if is_remote {
            latency.expect_slow(); // what came with the opening was fast
        }
        Ok(file)
    }

    /// How many records are used, if that is known.
    fn count(&self) -> Option<u64> {
        let SourceFile { skip, take, expected, .. } = self.source;
        let num_records = self.file.get().map(|file| file.num_records());
        let num_records = num_records.or(expected.map(|expected| expected.num_records));
        take.or_else(|| num_records?.checked_sub(skip))
    }
}

impl SourceFile {
    fn compare(&self, expected: FileInfo, found: FileInfo) -> Result<()> {
        if expected == found {
            return Ok(());
        }
        Err(Error::Outdated {
            path: self.path.display().to_string(),
            expected: expected.to_string(),
            found: found.to_string(),
        })
    }

    /// Checks that the range of records lies within the `num_records` of the file.
    fn check(&self, num_records: u64) -> Result<()> {
        if let Some(expected) = self.expected {
            self.compare(expected, FileInfo { num_records, ..expected })?;
        }
        let end = self.skip.saturating_add(self.take.unwrap_or(0));
        if end <= num_records {
            return Ok(());
        }
        let end = self.take.map_or_else(String::new, |_| end.to_string());
        Err(Error::OutOfRange(format!(
            "{}: records [{}:{end}] requested, but the file has {num_records}",
            self.path.display(),
            self.skip
        )))
    }
}

impl std::fmt::Display for FileInfo {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { byte_len, modified_ns, num_records } = self;
        write!(out, "{num_records} records in {byte_len} bytes written at {modified_ns} ns")
    }
}

/// Many files as one index space.
#[derive(Debug)]
pub struct Files {
    set: Arc<FileSet>,
    /// The position of each file's first record; then the number of all records.
    starts: Vec<u64>,
}

/// Positions in the order in which they are read: by file and record.
#[derive(Debug)]
pub struct SortedPositions(Vec<u128>);

impl Files {
    /// Opens files in `format` and reads their indices.
    ///
    /// # Errors
    /// If one cannot be opened, or has too few records.
    pub fn open(
        format: impl Format + 'static,
        sources: impl IntoIterator<Item = SourceFile>,
    ) -> Result<Self> {
        let format: Arc<dyn Format> = Arc::new(format);
        let set = FileSet::new(&format, sources);
        for at in 0..set.len() {
            set.open(at, false)?;
        }
        Self::of(Arc::new(set))
    }

    /// The records of `set`; opens files whose number of records is not known.
    ///
    /// # Errors
    /// If one cannot be opened, or has too few records.
    pub fn of(set: Arc<FileSet>) -> Result<Self> {
        let mut starts = Vec::with_capacity(set.len() + 1);
        let mut total = 0_u64;
        starts.push(total);
        for (at, entry) in set.entries.iter().enumerate() {
            if let Some(expected) = entry.source.expected {
                entry.source.check(expected.num_records)?;
            }
            let count = match entry.count() {
                Some(count) => count,
                None => set.open(at, false)?.num_records().saturating_sub(entry.source.skip),
            };
            total = total
                .checked_add(count)
                .ok_or_else(|| Error::OutOfRange("files have more than 2^64 records".to_owned()))?;
            starts.push(total);
        }
        Ok(Self { set, starts })
    }

    /// The records of all `datasets`, in order.
    ///
    /// # Errors
    /// If they are more than 2^64.
    pub fn joined<'a>(datasets: impl IntoIterator<Item = &'a Self>) -> Result<Self> {
        let (mut entries, mut starts) = (Vec::new(), vec![0_u64]);
        for dataset in datasets {
            let begin = starts.last().copied().unwrap_or(0);
            if begin.checked_add(dataset.len()).is_none() {
                return Err(Error::OutOfRange("files have more than 2^64 records".to_owned()));
            }
            entries.extend(dataset.set.entries.iter().cloned());
            starts.extend(dataset.starts[1..].iter().map(|start| begin + start));
        }
        Ok(Self { set: Arc::new(FileSet::with(entries)), starts })
    }

    /// How many records there are.
    pub fn len(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many records of each file are used.
    pub fn num_records(&self) -> impl Iterator<Item = u64> {
        self.starts.windows(2).map(|ends| ends[1] - ends[0])
    }

    /// The paths of the files.
    pub fn paths(&self) -> impl Iterator<Item = &PathBuf> {
        self.set.entries.iter().map(|entry| &entry.source.path)
    }

    /// The files, opened on first use.
    pub fn set(&self) -> &Arc<FileSet> {
        &self.set
    }

    /// The limit of the storage of file number `at`.
    pub(super) fn limit(&self, at: usize) -> Option<Arc<StorageLimit>> {
        self.set.latency(at).limit()
    }

    /// Whether recent reads from a storage of theirs had to wait.
    pub fn is_slow(&self) -> bool {
        self.set.latencies.iter().any(|latency| latency.is_slow())
    }

    /// The reads so far of these files, by all users of their [`set`](Self::set).
    pub fn read_totals(&self) -> ReadTotals {
        self.set.latencies.iter().map(|latency| latency.totals()).fold(
            ReadTotals::default(),
            |a, b| ReadTotals {
                reads: a.reads + b.reads,
                bytes: a.bytes + b.bytes,
                timed_reads: a.timed_reads + b.timed_reads,
                timed: a.timed + b.timed,
            },
        )
    }

    /// The state of each file; files without a recorded state are opened.
    ///
    /// # Errors
    /// If a file cannot be opened.
    pub fn file_infos(&self) -> Result<Vec<FileInfo>> {
        let unknown = |&at: &usize| self.set.entries[at].source.expected.is_none();
        self.set.open_each((0..self.set.len()).filter(unknown).collect())?;
        let expected = |at: usize| match self.set.entries[at].source.expected {
            Some(expected) => Ok(expected),
            None => self.set.open(at, false).map(|file| FileInfo {
                byte_len: file.stored().byte_len(),
                modified_ns: file.stored().modified_ns(),
                num_records: file.num_records(),
            }),
        };
        (0..self.set.len()).map(expected).collect()
    }

    /// About how many stored bytes a record has, from the files opened so far and the recorded
    /// states of others; opens a file if there is neither.
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    pub fn mean_byte_len(&self) -> f64 {
        if self.set.opened().next().is_none()
            && self.set.entries.iter().all(|entry| entry.source.expected.is_none())
            && let Some(at) = self.num_records().position(|num_records| num_records > 0)
        {
            // The error is reported when the file is read.
            let _ = self.set.open(at, false);
        }
        let (mut stored, mut records) = (0_u64, 0_u64);
        for entry in &self.set.entries {
            let (byte_len, num_records) = match (entry.file.get(), entry.source.expected) {
                (Some(file), _) => (file.stored_len(), file.num_records()),
                (None, Some(expected)) => (expected.byte_len, expected.num_records),
                (None, None) => continue,
            };
            stored = stored.saturating_add(byte_len);
            records = records.saturating_add(num_records);
        }
        stored as f64 / records.max(1) as f64
    }

    /// The file of `position` and the record in it; `position` must be below [`Self::len`].
    fn locate(&self, position: u64) -> (usize, u64) {
        let file = match self.set.entries.len() {
            1 => 0,
            _ => self.starts.partition_point(|&start| start <= position) - 1,
        };
        (file, self.set.entries[file].source.skip + (position - self.starts[file]))
    }

    /// Sorts `positions` by file and record.
    ///
    /// # Errors
    /// If a position is not below [`Self::len`].
    pub fn sort(&self, positions: &[u64]) -> Result<SortedPositions> {
        if u32::try_from(positions.len().max(self.set.len())).is_err() {
            let message = "cannot read more than 2^32 records or files at once".to_owned();
            return Err(Error::InvalidArgument(message));
        }
        let mut keys = Vec::with_capacity(positions.len());
        for (out, &position) in positions.iter().enumerate() {
            if position >= self.len() {
                return Err(Error::OutOfRange(format!(
                    "record {position} requested, but the files have {}",
                    self.len()
                )));
            }
            let (file, record) = self.locate(position);
            keys.push((file as u128) << 96 | u128::from(record) << 32 | out as u128);
        }
        if !keys.is_sorted() {
            keys.sort_unstable();
        }
        Ok(SortedPositions(keys))
    }

    /// Opens file number `file` and loads its index, for planning.
    ///
    /// # Errors
    /// If it cannot be opened, or its index cannot be read.
    pub fn prepare(&self, file: usize) -> Result<()> {
        let latency = self.set.latency(file);
        let file = self.set.open(file, true)?;
        if file.num_records() > 0 {
            file.locate(&mut [Pick::default()], Some(latency))?;
        }
        Ok(())
    }

    /// Plans how to read the records of `sorted`, if that needs no I/O; else returns the files that
    /// must be opened or whose index must be loaded first.
    ///
    /// # Errors
    /// Those of [`plan_sorted`](Self::plan_sorted).
    pub fn plan_if_indexed(&self, sorted: &SortedPositions) -> Result<Result<Plan, Vec<usize>>> {
        let mut unready = Vec::new();
        let plan = self.plan_with(sorted, |at, picks| {
            if let Some(file) = self.set.entries[at].file.get()
                && file.locate(picks, None)?
            {
                return Ok(Some(file));
            }
            unready.push(at);
            Ok(None)
        })?;
        Ok(plan.ok_or(unready))
    }

    /// Plans how to read the records of `sorted`; opens files and loads indices as needed.
    ///
    /// # Errors
    /// If a file cannot be opened, or its index cannot be read.
    ///
    /// # Panics
    /// If a file that was opened is missing, which is a defect.
    pub fn plan_sorted(&self, sorted: &SortedPositions) -> Result<Plan> {
        let plan = self.plan_with(sorted, |at, picks| {
            let file = self.set.open(at, true)?;
            file.locate(picks, Some(self.set.latency(at)))?;
            Ok(Some(file))
        })?;
        Ok(plan.expect("every file has been located"))
    }

    /// Plans how to read the records at `positions`.
    ///
    /// # Errors
    /// If a position is not below [`Self::len`], or a file cannot be opened or its index cannot be
    /// read.
    pub fn plan(&self, positions: &[u64]) -> Result<Plan> {
        self.plan_sorted(&self.sort(positions)?)
    }

    /// The plan for `sorted`, if `locate` returns every file with its picks located.
    #[expect(clippy::cast_possible_truncation, reason = "bit fields of a key, as `sort` packs it")]
    fn plan_with<'a>(
        &self,
        sorted: &SortedPositions,
        mut locate: impl FnMut(usize, &mut [Pick]) -> Result<Option<&'a Arc<dyn RecordFile>>>,
    ) -> Result<Option<Plan>> {
        let pick = |&key: &u128| Pick {
            file: (key >> 96) as u32,
            record: (key >> 32) as u64,
            out: key as u32,
            ..Pick::default()
        };
        let mut picks: Vec<Pick> = sorted.0.iter().map(pick).collect();
        let (mut files, mut is_complete) = (Vec::new(), true);
        for picks in picks.chunk_by_mut(|a, b| a.file == b.file) {
            let at = picks[0].file as usize;
            let Some(file) = locate(at, picks)? else {
                is_complete = false;
                continue;
            };
            let latency = Arc::clone(self.set.latency(at));
            files.push(PlannedFile::new(picks[0].file, Arc::clone(file), latency));
            let number = (files.len() - 1) as u32;
            if picks[0].file != number {
                for pick in picks {
                    pick.file = number;
                }
            }
        }
        Ok(is_complete.then(|| Plan::new(files, picks, Arc::clone(&self.set.cache))))
    }

    /// Reads the records at `positions`, in that order.
    ///
    /// # Errors
    /// If a position is out of range, or a file cannot be read or is damaged.
    pub fn read(&self, positions: &[u64]) -> Result<Records> {
        let plan = self.plan(positions)?;
        let whole = plan.whole::<Vec<MaybeUninit<u8>>>(Vec::new());
        let outcome = plan.read(whole, &mut Scratch::default(), false)?;
        Ok(plan.gather(vec![outcome.records]))
    }
}
