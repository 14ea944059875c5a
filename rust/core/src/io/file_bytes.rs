//! The bytes of files of any storage: from a position on, or ranges of many files at once.

use std::io::{self, Read};
use std::mem;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use super::forward_reads::ForwardReads;
use super::parallel::for_each_parallel;
use super::read_queue::StorageLimit;
use super::storage::{ReadAt, Reader, Storage, StoredFile};
use super::storage_latency::{SharedLatency, StorageLatency};
use crate::lock::lock;
use crate::try_alloc::try_defaults;
use crate::{Error, Result};

/// A file that is open.
#[derive(Debug)]
struct OpenFile {
    stored: Box<dyn StoredFile>,
    /// The object as it was opened: its storage may have sent a part of it along.
    remote: Option<Arc<dyn ReadAt>>,
    latency: StorageLatency,
}

impl OpenFile {
    fn open(storage: &dyn Storage, path: &Path) -> Result<Self> {
        let (stored, bytes) = storage.open(path)?;
        let latency = StorageLatency::of(&SharedLatency::of(storage.limit(path)));
        let remote = storage.is_remote(path).then_some(bytes);
        if remote.is_some() {
            latency.expect_slow();
        }
        Ok(Self { stored, remote, latency })
    }

    fn buffer(&self, range: &Range<u64>) -> Result<Vec<u8>> {
        let len = range.end.saturating_sub(range.start).min(self.byte_len());
        let what = || format!("{len} bytes of {}", self.path().display());
        try_defaults(usize::try_from(len).unwrap_or(usize::MAX), what)
    }

    fn read(&self, range: &Range<u64>) -> Result<Vec<u8>> {
        let mut bytes = self.buffer(range)?;
        Reader::new(&*self.bytes()?, &self.latency).read_at(&mut bytes, range.start)?;
        Ok(bytes)
    }

    fn path(&self) -> &Path {
        self.stored.path()
    }

    fn byte_len(&self) -> u64 {
        self.stored.byte_len()
    }

    fn bytes(&self) -> Result<Arc<dyn ReadAt>> {
        match &self.remote {
            Some(bytes) => Ok(Arc::clone(bytes)),
            None => Ok(self.stored.reopen(false)?.bytes),
        }
    }
}

/// A file that is read forwards.
#[derive(Debug)]
pub struct FileBytes {
    file: Arc<OpenFile>,
    reads: ForwardReads,
    at: u64,
}

impl FileBytes {
    /// Opens the file at `path`.
    ///
    /// # Errors
    /// If it cannot be opened, or is not a regular file.
    pub fn open(storage: &dyn Storage, path: &Path) -> Result<Self> {
        let file = Arc::new(OpenFile::open(storage, path)?);
        Ok(Self { file, reads: ForwardReads::default(), at: 0 })
    }

    /// Opens the file at `path`, of which perhaps only some places are read: nothing is read ahead
    /// before reads go on behind each other.
    ///
    /// # Errors
    /// As for `open`.
    pub fn open_anywhere(storage: &dyn Storage, path: &Path) -> Result<Self> {
        Ok(Self { reads: ForwardReads::anywhere(), ..Self::open(storage, path)? })
    }

    /// Opens files as `open_anywhere` does, many at a time where that helps.
    ///
    /// # Errors
    /// That of the first file that cannot be opened.
    pub fn open_all(storage: &Arc<dyn Storage>, paths: Vec<PathBuf>) -> Result<Vec<Self>> {
        let num = paths.len();
        let shared = Arc::new((Arc::clone(storage), paths));
        let limits = Arc::clone(&shared);
        collect_parallel(
            num,
            move |at| limits.0.limit(&limits.1[at]),
            move |at| Self::open_anywhere(&*shared.0, &shared.1[at]),
        )
    }

    /// The bytes of ranges, each of a file, many at a time where that helps. The ranges of a file are
    /// beside each other: where there is one, it is read as by `next`, so that what calls ask for in
    /// turn may be read ahead.
    ///
    /// # Errors
    /// That of the first range that cannot be read.
    pub fn read_all(ranges: Vec<(Arc<Mutex<Self>>, Range<u64>)>) -> Result<Vec<Vec<u8>>> {
        // A thread that reads forwards holds the lock.
        let files: Vec<_> = ranges.iter().map(|(file, _)| Arc::clone(&lock(file).file)).collect();
        let num = ranges.len();
        let shared = Arc::new((files, ranges));
        let limits = Arc::clone(&shared);
        collect_parallel(
            num,
            move |at| limits.0[at].latency.limit(),
            move |at| {
                let (files, ranges) = &*shared;
                let is_same = |other: usize| {
                    files.get(other).is_some_and(|beside| Arc::ptr_eq(&files[at], beside))
                };
                let (forwards, range) = &ranges[at];
                if is_same(at + 1) || is_same(at.wrapping_sub(1)) {
                    files[at].read(range)
                } else {
                    lock(forwards).next_range(range)
                }
            },
        )
    }

    fn next_range(&mut self, range: &Range<u64>) -> Result<Vec<u8>> {
        let mut bytes = self.file.buffer(range)?;
        self.seek(range.start);
        if self.next(&mut bytes)? < bytes.len() {
            return self.file.read(range); // which says what is wrong
        }
        Ok(bytes)
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// The length of the file in bytes.
    pub fn byte_len(&self) -> u64 {
        self.file.byte_len()
    }

    /// How many bytes follow.
    pub fn left(&self) -> u64 {
        self.byte_len().saturating_sub(self.at)
    }

    /// Goes on at position `at`, which may be behind the end.
    pub fn seek(&mut self, at: u64) {
        self.at = at;
    }

    /// Fills `out` with the next bytes, or with those that are left; returns how many.
    ///
    /// # Errors
    /// If the file cannot be read or was changed. The next call tries again.
    pub fn next(&mut self, out: &mut [u8]) -> Result<usize> {
        let byte_len = self.byte_len();
        let len = out.len().min(usize::try_from(self.left()).unwrap_or(usize::MAX));
        let bytes = self.file.bytes()?;
        let reader = Reader::new(&*bytes, &self.file.latency);
        self.reads.read(reader, &mut out[..len], self.at, byte_len)?;
        self.at += len as u64;
        Ok(len)
    }
}

/// What `make` returns for each number below `num`, in their order; see [`for_each_parallel`].
fn collect_parallel<T: Send + 'static>(
    num: usize,
    limit_of: impl Fn(usize) -> Option<Arc<StorageLimit>> + Send + Sync + 'static,
    make: impl Fn(usize) -> Result<T> + Send + Sync + 'static,
) -> Result<Vec<T>> {
    let results = Arc::new(Mutex::new((0..num).map(|_| None).collect::<Vec<_>>()));
    let target = Arc::clone(&results);
    for_each_parallel((0..num).collect(), limit_of, move |at| {
        let value = make(at)?;
        lock(&target)[at] = Some(value);
        Ok(())
    })?;
    let results = mem::take(&mut *lock(&results));
    Ok(results.into_iter().flatten().collect())
}

/// Errors have the engine's as their source; `error_of` returns it.
impl Read for FileBytes {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.next(out).map_err(io::Error::other)
    }
}

/// The error of the engine in `error`, or else `error`.
///
/// # Errors
/// If there is none in it.
pub(crate) fn error_of(error: io::Error) -> Result<Error, io::Error> {
    error.downcast::<Error>()
}
