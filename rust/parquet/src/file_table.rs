//! The files that a source reads, each opened on first use, on any thread.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_schema::FieldRef;
use grainmill_core::io::storage::Storage;
use grainmill_core::io::storage_latency::{SharedLatency, StorageLatency};
use grainmill_core::io::{TryOnce, for_each_parallel};
use grainmill_core::{Error, Result};

use crate::file::ParquetFile;
use crate::schema::Choice;

/// Files with the same columns.
#[derive(Debug)]
pub(crate) struct FileTable {
    storage: Arc<dyn Storage>,
    choice: Choice,
    latency: Arc<StorageLatency>,
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    path: PathBuf,
    num_rows: Option<u64>,
    file: TryOnce<ParquetFile>,
}

impl FileTable {
    /// The `files`, each a path and its number of rows if known; none is open.
    pub(crate) fn new(
        storage: &Arc<dyn Storage>,
        files: Vec<(PathBuf, Option<u64>)>,
        choice: Choice,
    ) -> Self {
        let entry = |(path, num_rows)| Entry { path, num_rows, file: TryOnce::default() };
        // Files of several storages, which is rare, count as of the first.
        let limit = files.first().and_then(|(path, _)| storage.limit(path));
        let entries = files.into_iter().map(entry).collect();
        let latency = Arc::new(StorageLatency::of(&SharedLatency::of(limit)));
        Self { storage: Arc::clone(storage), choice, latency, entries }
    }

    /// How many files there are.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn path(&self, number: usize) -> &Path {
        &self.entries[number].path
    }

    /// The reads so far, and how long they take.
    pub(crate) fn latency(&self) -> &Arc<StorageLatency> {
        &self.latency
    }

    /// The files that must be opened to know their number of rows.
    pub(crate) fn uncounted(&self) -> Vec<usize> {
        (0..self.len()).filter(|&at| self.entries[at].num_rows.is_none()).collect()
    }

    /// The number of rows of a file, 0 if it is not known.
    pub(crate) fn num_rows(&self, number: usize) -> u64 {
        let Entry { num_rows, file, .. } = &self.entries[number];
        file.get().map(ParquetFile::num_rows).or(*num_rows).unwrap_or(0)
    }

    pub(crate) fn is_open(&self, number: usize) -> bool {
        self.entries[number].file.get().is_some()
    }

    /// The first file that is open.
    pub(crate) fn first_opened(&self) -> Option<&ParquetFile> {
        self.entries.iter().find_map(|entry| entry.file.get())
    }

    /// File number `number`, opened if it is not open.
    pub(crate) fn file(&self, number: usize) -> Result<&ParquetFile> {
        let Entry { path, num_rows, file } = &self.entries[number];
        file.get_or_make(|| {
            let first = if number > 0 { Some(self.file(0)?) } else { None };
            let Self { storage, choice, latency, .. } = self;
            let file = ParquetFile::open(&**storage, path, choice, first, latency)?;
            if num_rows.is_some_and(|expected| expected != file.num_rows()) {
                return Err(Error::Changed { path: file.path().to_owned() });
            }
            first.map_or(Ok(()), |first| check_same_columns(first, &file))?;
            Ok(file)
        })
    }

    /// Opens the files of these numbers, many at a time where that helps. Of several errors, that of the
    /// first file is returned.
    pub(crate) fn open_all(self: &Arc<Self>, numbers: Vec<usize>) -> Result<()> {
        let table = Arc::clone(self);
        let limit = self.latency.limit();
        for_each_parallel(
            numbers,
            move |_| limit.clone(),
            move |number| table.file(number).map(drop),
        )
    }
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
