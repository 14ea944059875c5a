//! Files of the local system, of which only a bounded number is held open at a time.

use std::collections::HashMap;
use std::io::IoSliceMut;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{Mode, OFlags, Stat};
use rustix::io::Errno;

use super::single::InWork;
use super::storage::{FileNumber, Held, ReadAt, Storage, StoredFile};
use crate::process::PerProcess;
use crate::{Error, Result};

/// The part of the files a process may open that is held open, and the least and the most of it.
/// To open one again takes three times as long as to read a record of it.
const SHARE_OF_LIMIT: u64 = 4;
const LEAST_OPEN: u64 = 64;
const MOST_OPEN: u64 = 8192;

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
    file: OwnedFd,
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
    #[expect(clippy::cast_sign_loss, reason = "lengths are not negative")]
    #[expect(clippy::unnecessary_cast, reason = "the types of `stat` differ between platforms")]
    #[expect(clippy::cast_possible_wrap, reason = "nanoseconds are below 10^9")]
    fn of(stat: &Stat) -> Self {
        let (seconds, nanos) = (stat.st_mtime as i64, stat.st_mtime_nsec as i64);
        Self {
            byte_len: stat.st_size as u64,
            modified_ns: seconds.wrapping_mul(1_000_000_000).wrapping_add(nanos),
            number: (stat.st_dev as u64, stat.st_ino as u64),
        }
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
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let most = limit.map_or(MOST_OPEN, |limit| limit / SHARE_OF_LIMIT);
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
        let file = open_fd(path)?;
        let stat = rustix::fs::fstat(&file).map_err(|errno| failed(path, "stat", errno))?;
        match rustix::fs::FileType::from_raw_mode(stat.st_mode) {
            rustix::fs::FileType::RegularFile => {}
            rustix::fs::FileType::Directory => {
                return Err(failed(path, "open as a file of records", Errno::ISDIR));
            }
            _ => {
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
        let Identity { byte_len, modified_ns, number: (device, inode) } = Identity::of(&stat);
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
        let file = open_fd(&self.path)?;
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
        let stat =
            rustix::fs::fstat(&bytes.file).map_err(|errno| failed(&self.path, "stat", errno))?;
        let Identity { byte_len, modified_ns, number } = Identity::of(&stat);
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
            match rustix::io::pread(&self.file, &mut *out, at) {
                Ok(0) => return Err(Error::Changed { path: self.path.display().to_string() }),
                Ok(len) => {
                    out = &mut out[len..];
                    at += len as u64;
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(failed(&self.path, "read", errno)),
            }
        }
        Ok(())
    }

    fn read_pieces(&self, pieces: &mut [IoSliceMut<'_>], at: u64) -> Result<bool> {
        let wanted: usize = pieces.iter().map(|piece| piece.len()).sum();
        match rustix::io::preadv(&self.file, pieces, at) {
            Ok(len) => Ok(len == wanted),
            Err(Errno::INTR) => Ok(false),
            Err(errno) => Err(failed(&self.path, "read", errno)),
        }
    }
}

impl Drop for LocalFile {
    fn drop(&mut self) {
        drop(with_open(|open| open.files.remove(&self.id)));
    }
}

fn open_fd(path: &Path) -> Result<OwnedFd> {
    loop {
        // Without `NONBLOCK`, opening a pipe would wait for its writer.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(file) => return Ok(file),
            Err(Errno::INTR) => {}
            // The limit is lower than ours: make do with fewer.
            Err(Errno::MFILE | Errno::NFILE)
                if with_open(|open| {
                    let half = open.files.len().div_ceil(2);
                    !open.take_oldest(half).is_empty()
                }) => {}
            Err(errno) => return Err(failed(path, "open", errno)),
        }
    }
}

fn failed(path: &Path, action: &'static str, errno: Errno) -> Error {
    Error::io(path, action, errno.into())
}
