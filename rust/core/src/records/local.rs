//! Files of the local system, of which only a bounded number is held open at a time.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::single_flight::InWork;
use super::storage::{FileNumber, Held, ReadAt, Storage, StoredFile};
use crate::bytes::ScatterBuffers;
use crate::platform::{self, FileFacts, FileKind, ReadFile};
use crate::process::PerProcess;
use crate::{Error, Result};

/// The part of the files a process may open that is held open, and the least and the most of it.
/// To open one again takes three times as long as to read a record of it.
const SHARE_OF_LIMIT: u64 = 2;
const LEAST_OPEN: u64 = 64;
const MOST_OPEN: u64 = 1 << 16;

/// The files that the system knows by path, on whatever it has mounted.
#[derive(Debug, Default)]
pub(super) struct LocalFiles;

impl Storage for LocalFiles {
    fn find(&self, path: &Path) -> Result<(Box<dyn StoredFile>, Arc<dyn ReadAt>)> {
        let (file, open) = LocalFile::find(path)?;
        Ok((Box::new(file), open))
    }
}

/// A file that has been opened once and is opened again whenever needed.
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
}

/// What tells that a path still leads to the same, unchanged file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    byte_len: u64,
    modified_ns: i64,
    number: FileNumber,
}

impl Identity {
    fn of(facts: &FileFacts) -> Self {
        let &FileFacts { byte_len, modified_ns, number, .. } = facts;
        Self { byte_len, modified_ns, number }
    }
}

/// The open files of a process and when each was last used.
#[derive(Debug)]
struct Open {
    files: HashMap<u64, (Arc<OpenFile>, u64)>,
    clock: u64,
    most: usize,
}

static OPEN: PerProcess<Mutex<Open>> = PerProcess::new(|| Mutex::new(Open::within_limit()));
static OPENING: InWork = InWork::new();
static NEXT_ID: AtomicU64 = AtomicU64::new(0);

impl Open {
    fn within_limit() -> Self {
        let most = platform::max_files().map_or(MOST_OPEN, |limit| limit / SHARE_OF_LIMIT);
        Self { files: HashMap::new(), clock: 0, most: most.clamp(LEAST_OPEN, MOST_OPEN) as usize }
    }

    fn get(&mut self, id: u64) -> Option<Arc<OpenFile>> {
        self.clock += 1;
        let (file, last_used) = self.files.get_mut(&id)?;
        *last_used = self.clock;
        Some(Arc::clone(file))
    }

    /// Keeps `file`; returns those that are no longer kept, to be closed once nobody waits.
    fn insert(&mut self, id: u64, file: Arc<OpenFile>) -> Vec<Arc<OpenFile>> {
        // Several at once: to find them takes a look at all.
        let closed = if self.files.len() >= self.most {
            self.take_oldest(self.most / 16)
        } else {
            Vec::new()
        };
        self.clock += 1;
        self.files.insert(id, (file, self.clock));
        closed
    }

    /// Forgets the `count` files whose last use is longest ago.
    fn take_oldest(&mut self, count: usize) -> Vec<Arc<OpenFile>> {
        let mut uses: Vec<(u64, u64)> =
            self.files.iter().map(|(&id, &(_, last_used))| (last_used, id)).collect();
        uses.sort_unstable();
        let oldest = uses.iter().take(count);
        oldest.filter_map(|(_, id)| self.files.remove(id)).map(|(file, _)| file).collect()
    }
}

fn with_open<T>(work: impl FnOnce(&mut Open) -> T) -> T {
    work(&mut OPEN.get().lock().unwrap_or_else(PoisonError::into_inner))
}

impl LocalFile {
    fn find(path: &Path) -> Result<(Self, Arc<OpenFile>)> {
        let file = opened(path)?;
        let facts = file.facts().map_err(|error| Error::io(path, "stat", error))?;
        match facts.kind {
            FileKind::Regular => {}
            FileKind::Directory => {
                let error = platform::is_a_directory();
                return Err(Error::io(path, "open as a file of records", error));
            }
            FileKind::Other => {
                return Err(Error::Corrupt {
                    path: path.display().to_string(),
                    place: "whole file".to_owned(),
                    problem: "not a regular file".to_owned(),
                });
            }
        }
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let path: Arc<Path> = path.into();
        let open = Arc::new(OpenFile { file, path: Arc::clone(&path) });
        drop(with_open(|files| files.insert(id, Arc::clone(&open))));
        let Identity { byte_len, modified_ns, number: (device, inode) } = Identity::of(&facts);
        let found =
            Self { id, path, byte_len, modified_ns, device: device.into(), inode: inode.into() };
        Ok((found, open))
    }

    /// Opens the file once more; of several threads that want it, one does.
    fn open_again(&self) -> Result<Arc<OpenFile>> {
        let _alone = OPENING.alone(self.id);
        if let Some(open) = with_open(|open| open.get(self.id)) {
            return Ok(open);
        }
        let file = opened(&self.path)?;
        let open = Arc::new(OpenFile { file, path: Arc::clone(&self.path) });
        drop(with_open(|files| files.insert(self.id, Arc::clone(&open))));
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

    fn hold(&self, was_checked: bool) -> Result<Held> {
        let bytes = match with_open(|open| open.get(self.id)) {
            Some(bytes) if was_checked => return Ok(Held { bytes, renumbered: None }),
            Some(bytes) => bytes,
            None => self.open_again()?,
        };
        let facts = bytes.file.facts().map_err(|error| Error::io(&*self.path, "stat", error))?;
        let Identity { byte_len, modified_ns, number } = Identity::of(&facts);
        if (byte_len, modified_ns) != (self.byte_len, self.modified_ns) {
            drop(with_open(|open| open.files.remove(&self.id)));
            return Err(Error::Changed { path: self.path.display().to_string() });
        }
        let found = (self.device.load(Ordering::Relaxed), self.inode.load(Ordering::Relaxed));
        Ok(Held { bytes, renumbered: (number != found).then_some(number) })
    }

    fn accept(&self, (device, inode): FileNumber) {
        // Of two threads at once each has seen the same file, or the next look sees the other.
        self.device.store(device, Ordering::Relaxed);
        self.inode.store(inode, Ordering::Relaxed);
    }
}

impl ReadAt for OpenFile {
    fn read_at(&self, mut out: &mut [u8], mut at: u64) -> Result<()> {
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
        Ok(())
    }

    fn read_pieces(&self, pieces: &mut ScatterBuffers<'_>, at: u64) -> Result<()> {
        let read = self.file.read_pieces(pieces, at);
        read.map_err(|error| Error::io(&*self.path, "read", error))
    }
}

impl Drop for LocalFile {
    fn drop(&mut self) {
        drop(with_open(|open| open.files.remove(&self.id)));
    }
}

fn opened(path: &Path) -> Result<ReadFile> {
    loop {
        match ReadFile::open(path) {
            Ok(file) => return Ok(file),
            // The limit is lower than ours: make do with fewer.
            Err(error)
                if platform::is_out_of_files(&error)
                    && with_open(|open| {
                        let half = open.files.len().div_ceil(2);
                        !open.take_oldest(half).is_empty()
                    }) => {}
            Err(error) => return Err(Error::io(path, "open", error)),
        }
    }
}
