//! Files on disk, of which only a bounded number is held open at a time.

use std::collections::HashMap;
use std::io::IoSliceMut;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{Mode, OFlags, Stat};
use rustix::io::Errno;

use crate::process::PerProcess;
use crate::{Error, Result};

/// How many files are held open in a process; common limits begin at 1,024.
const MAX_OPEN: usize = 256;

/// A file that has been opened once and is opened again whenever needed.
#[derive(Debug)]
pub(crate) struct OnDisk {
    id: u64,
    path: PathBuf,
    identity: Identity,
}

/// What tells that a path still leads to the same, unchanged file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    len: u64,
    modified: (i64, u64),
}

impl Identity {
    #[expect(clippy::cast_sign_loss, reason = "lengths and fractions are not negative")]
    #[expect(clippy::unnecessary_cast, reason = "the types of `stat` differ between platforms")]
    fn of(stat: &Stat) -> Self {
        Self {
            device: stat.st_dev as u64,
            inode: stat.st_ino as u64,
            len: stat.st_size as u64,
            modified: (stat.st_mtime as i64, stat.st_mtime_nsec as u64),
        }
    }
}

/// The open files of a process and when each was last used.
#[derive(Debug, Default)]
struct Open {
    files: HashMap<u64, (Arc<OwnedFd>, u64)>,
    clock: u64,
}

static OPEN: PerProcess<Mutex<Open>> = PerProcess::new(|| Mutex::new(Open::default()));
static NEXT_ID: AtomicU64 = AtomicU64::new(0);

impl Open {
    fn get(&mut self, id: u64) -> Option<Arc<OwnedFd>> {
        self.clock += 1;
        let (file, last_used) = self.files.get_mut(&id)?;
        *last_used = self.clock;
        Some(Arc::clone(file))
    }

    fn insert(&mut self, id: u64, file: Arc<OwnedFd>) {
        if self.files.len() >= MAX_OPEN {
            self.close_oldest(1);
        }
        self.clock += 1;
        self.files.insert(id, (file, self.clock));
    }

    /// Forgets the `count` files whose last use is longest ago.
    fn close_oldest(&mut self, count: usize) -> bool {
        let mut uses: Vec<(u64, u64)> =
            self.files.iter().map(|(&id, &(_, last_used))| (last_used, id)).collect();
        uses.sort_unstable();
        for (_, id) in uses.iter().take(count) {
            self.files.remove(id);
        }
        !uses.is_empty()
    }
}

fn with_open<T>(work: impl FnOnce(&mut Open) -> T) -> T {
    work(&mut OPEN.get().lock().unwrap_or_else(PoisonError::into_inner))
}

impl OnDisk {
    /// Opens the file at `path` and remembers what it looks like.
    pub(crate) fn open(path: &Path) -> Result<Self> {
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
        with_open(|open| open.insert(id, Arc::new(file)));
        Ok(Self { id, path: path.to_owned(), identity: Identity::of(&stat) })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn len(&self) -> u64 {
        self.identity.len
    }

    /// The file, open, after a look whether it is still the one that was opened first.
    pub(crate) fn file(&self) -> Result<Arc<OwnedFd>> {
        let held = with_open(|open| open.get(self.id));
        let file = if let Some(file) = held {
            file
        } else {
            let file = Arc::new(open_fd(&self.path)?);
            with_open(|open| open.insert(self.id, Arc::clone(&file)));
            file
        };
        let stat = rustix::fs::fstat(&file).map_err(|errno| failed(&self.path, "stat", errno))?;
        if Identity::of(&stat) == self.identity {
            return Ok(file);
        }
        with_open(|open| open.files.remove(&self.id));
        Err(Error::Changed { path: self.path.display().to_string() })
    }

    /// Fills `out` from position `at` of `file`, which [`Self::file`] gave.
    pub(crate) fn read_at(&self, file: &OwnedFd, mut out: &mut [u8], mut at: u64) -> Result<()> {
        while !out.is_empty() {
            match rustix::io::pread(file, &mut *out, at) {
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

    /// Fills `pieces` from position `at` of `file`; says whether one call gave enough.
    pub(crate) fn read_pieces_at(
        &self,
        file: &OwnedFd,
        pieces: &mut [IoSliceMut<'_>],
        at: u64,
    ) -> Result<bool> {
        let wanted: usize = pieces.iter().map(|piece| piece.len()).sum();
        match rustix::io::preadv(file, pieces, at) {
            Ok(len) => Ok(len == wanted),
            Err(Errno::INTR) => Ok(false),
            Err(errno) => Err(failed(&self.path, "read", errno)),
        }
    }
}

impl Drop for OnDisk {
    fn drop(&mut self) {
        with_open(|open| open.files.remove(&self.id));
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
                    open.close_oldest(half)
                }) => {}
            Err(errno) => return Err(failed(path, "open", errno)),
        }
    }
}

fn failed(path: &Path, action: &'static str, errno: Errno) -> Error {
    Error::io(path, action, errno.into())
}
