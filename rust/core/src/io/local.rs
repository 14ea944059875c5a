//! Files of the local file system, of which a bounded number is kept open.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use super::lru::Lru;
use super::read_queue::StorageLimit;
use super::single_flight::SingleFlight;
use super::storage::{FileId, ReadAt, ReopenedFile, Storage, StoredFile};
use crate::bytes::ScatterBuffers;
use crate::platform::{self, FileKind, FileMetadata, ReadFile};
use crate::process::PerProcess;
use crate::timeline::{self, Activity};
use crate::{Error, Result, interrupt};

/// The system's limit of open files is divided by this and clamped to bound the files kept open.
/// Opening a file again takes three times as long as reading a record of it.
const LIMIT_DIVISOR: u64 = 2;
const MIN_OPEN: u64 = 64;
const MAX_OPEN: u64 = 1 << 16;
/// How long a file waits to be opened for other threads, which use as many as may be open.
const MAX_WAIT: Duration = Duration::from_secs(10);

/// Files by their path, on any mounted file system.
#[derive(Debug, Default)]
pub struct LocalFiles;

impl Storage for LocalFiles {
    fn open(&self, path: &Path) -> Result<(Box<dyn StoredFile>, Arc<dyn ReadAt>)> {
        let (file, open) = LocalFile::open(path)?;
        Ok((Box::new(file), open))
    }

    fn limit(&self, _path: &Path) -> Option<Arc<StorageLimit>> {
        static LIMIT: LazyLock<Arc<StorageLimit>> = LazyLock::new(Arc::default);
        Some(Arc::clone(&LIMIT))
    }
}

/// A file that has been opened once and is reopened when needed.
#[derive(Debug)]
struct LocalFile {
    id: u64,
    path: Arc<Path>,
    byte_len: u64,
    modified_ns: i64,
    device: AtomicU64,
    inode: AtomicU64,
}

/// A file that is open.
#[derive(Debug)]
struct OpenFile {
    file: ReadFile,
    path: Arc<Path>,
    _counted: Arc<()>,
}

/// Identifies a file and its content: equal if the path still leads to the same, unchanged file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    byte_len: u64,
    modified_ns: i64,
    id: FileId,
}

impl Identity {
    fn of(metadata: &FileMetadata) -> Self {
        let &FileMetadata { byte_len, modified_ns, number, .. } = metadata;
        Self { byte_len, modified_ns, id: number }
    }
}

/// The open files of a process.
#[derive(Debug)]
struct OpenFiles {
    files: Lru<u64, Arc<OpenFile>>,
    max_open: usize,
    /// Shared by all that are open, also those that were evicted while a thread reads them.
    counted: Arc<()>,
}

static OPEN_FILES: PerProcess<RwLock<OpenFiles>> =
    PerProcess::new(|| RwLock::new(OpenFiles::within_limit()));
static REOPENS: SingleFlight = SingleFlight::new();
static NEXT_ID: AtomicU64 = AtomicU64::new(0);

impl OpenFiles {
    fn within_limit() -> Self {
        let max_open = platform::max_files().map_or(MAX_OPEN, |limit| limit / LIMIT_DIVISOR);
        let max_open = max_open.clamp(MIN_OPEN, MAX_OPEN) as usize;
        Self { files: Lru::default(), max_open, counted: Arc::default() }
    }

    fn get(&self, id: u64) -> Option<Arc<OpenFile>> {
        self.files.get(&id).cloned()
    }

    /// Adds `file`; returns an evicted one, which the caller closes after releasing the lock.
    fn insert(&mut self, id: u64, file: Arc<OpenFile>) -> Vec<Arc<OpenFile>> {
        let evicted = self.files.make_room(1, self.max_open);
        self.files.insert(id, file, 1);
        evicted
    }

    /// Removes the half that was used longest ago.
    fn evict_half(&mut self) -> Vec<Arc<OpenFile>> {
        let count = self.files.len().div_ceil(2);
        (0..count).map_while(|_| Some(self.files.pop_oldest()?.1)).collect()
    }
}

fn with_open_files<T>(work: impl FnOnce(&mut OpenFiles) -> T) -> T {
    work(&mut OPEN_FILES.write())
}

impl LocalFile {
    fn open(path: &Path) -> Result<(Self, Arc<OpenFile>)> {
        let open = Arc::new(OpenFile::open(&path.into())?);
        let metadata = open.file.metadata().map_err(|error| Error::io(path, "stat", error))?;
        match metadata.kind {
            FileKind::Regular => {}
            FileKind::Directory => {
                let error = platform::is_a_directory();
                return Err(Error::io(path, "open as a file of records", error));
            }
            FileKind::Other => {
                return Err(Error::corrupt(path, "whole file", "not a regular file"));
            }
        }
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let path = Arc::clone(&open.path);
        drop(with_open_files(|files| files.insert(id, Arc::clone(&open))));
        let Identity { byte_len, modified_ns, id: (device, inode) } = Identity::of(&metadata);
        let found =
            Self { id, path, byte_len, modified_ns, device: device.into(), inode: inode.into() };
        Ok((found, open))
    }

    /// Opens the file again, on one thread at a time.
    fn open_again(&self) -> Result<Arc<OpenFile>> {
        let _guard = REOPENS.enter(self.id)?;
        if let Some(open) = OPEN_FILES.read().get(self.id) {
            return Ok(open);
        }
        let open = Arc::new(OpenFile::open(&self.path)?);
        drop(with_open_files(|files| files.insert(self.id, Arc::clone(&open))));
        Ok(open)
    }
}

impl StoredFile for LocalFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn byte_len(&self) -> u64 {
        self.byte_len
    }

    fn modified_ns(&self) -> i64 {
        self.modified_ns
    }

    fn reopen(&self, was_checked: bool) -> Result<ReopenedFile> {
        let open = OPEN_FILES.read().get(self.id);
        let bytes = match open {
            Some(bytes) if was_checked => return Ok(ReopenedFile { bytes, new_id: None }),
            Some(bytes) => bytes,
            None => self.open_again()?,
        };
        let metadata =
            bytes.file.metadata().map_err(|error| Error::io(&*self.path, "stat", error))?;
        let Identity { byte_len, modified_ns, id } = Identity::of(&metadata);
        if (byte_len, modified_ns) != (self.byte_len, self.modified_ns) {
            drop(with_open_files(|open| open.files.remove(&self.id)));
            return Err(Error::Changed { path: self.path.display().to_string() });
        }
        let found = (self.device.load(Ordering::Relaxed), self.inode.load(Ordering::Relaxed));
        Ok(ReopenedFile { bytes, new_id: (id != found).then_some(id) })
    }

    fn accept_id(&self, (device, inode): FileId) {
        // Concurrent stores may mix two ids; the next check then sees a new id and checks again.
        self.device.store(device, Ordering::Relaxed);
        self.inode.store(inode, Ordering::Relaxed);
    }
}

impl OpenFile {
    /// Opens a file. Where the process has too many open, closes some of ours first, and waits for
    /// those that other threads read.
    fn open(path: &Arc<Path>) -> Result<Self> {
        let started = Instant::now();
        loop {
            let counted = Arc::clone(&OPEN_FILES.read().counted);
            let error = match ReadFile::open(path) {
                Ok(file) => return Ok(Self { file, path: Arc::clone(path), _counted: counted }),
                Err(error) => error,
            };
            drop(counted);
            let is_out_of_files = platform::is_out_of_files(&error);
            // Other code has used up the limit: keep fewer files open.
            if is_out_of_files && !with_open_files(OpenFiles::evict_half).is_empty() {
                continue;
            }
            let are_in_use = || Arc::strong_count(&OPEN_FILES.read().counted) > 1;
            if !is_out_of_files || !are_in_use() || started.elapsed() >= MAX_WAIT {
                return Err(Error::io(&**path, "open", error));
            }
            interrupt::check()?;
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl ReadAt for OpenFile {
    fn read_at(&self, mut out: &mut [u8], mut at: u64) -> Result<()> {
        let (began, start) = (timeline::begin(), at);
        while !out.is_empty() {
            match self.file.read_at(out, at) {
                Ok(0) => return Err(Error::Changed { path: self.path.display().to_string() }),
                Ok(len) => {
                    out = &mut out[len..];
                    at += len as u64;
                }
                Err(error) => return Err(Error::io(&*self.path, "read", error)),
            }
        }
        timeline::add(began, Activity::Read, &self.path, start..at);
        Ok(())
    }

    fn read_scattered(&self, buffers: &mut ScatterBuffers<'_>, at: u64) -> Result<()> {
        let (began, end) = (timeline::begin(), at + buffers.byte_len() as u64);
        let read = self.file.read_scattered(buffers, at);
        timeline::add(began, Activity::Read, &self.path, at..end);
        read.map_err(|error| Error::io(&*self.path, "read", error))
    }
}

impl Drop for LocalFile {
    fn drop(&mut self) {
        drop(with_open_files(|open| open.files.remove(&self.id)));
    }
}
