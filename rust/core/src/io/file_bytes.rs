//! The bytes of a file of any storage, from a position on.

use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

use super::forward_reads::ForwardReads;
use super::storage::{ReadAt, Reader, Storage, StoredFile};
use super::storage_latency::{SharedLatency, StorageLatency};
use crate::{Error, Result};

/// A file that is read forwards.
#[derive(Debug)]
pub struct FileBytes {
    stored: Box<dyn StoredFile>,
    /// The object as it was opened: its storage may have sent a part of it along.
    remote: Option<Arc<dyn ReadAt>>,
    latency: StorageLatency,
    reads: ForwardReads,
    at: u64,
}

impl FileBytes {
    /// Opens the file at `path`.
    ///
    /// # Errors
    /// If it cannot be opened, or is not a regular file.
    pub fn open(storage: &dyn Storage, path: &Path) -> Result<Self> {
        let (stored, bytes) = storage.open(path)?;
        let latency = StorageLatency::of(&SharedLatency::of(storage.limit(path)));
        let remote = storage.is_remote(path).then_some(bytes);
        if remote.is_some() {
            latency.expect_slow();
        }
        Ok(Self { stored, remote, latency, reads: ForwardReads::default(), at: 0 })
    }

    /// Opens the file at `path`, of which perhaps only some places are read: nothing is read ahead
    /// before reads go on behind each other.
    ///
    /// # Errors
    /// As for `open`.
    pub fn open_anywhere(storage: &dyn Storage, path: &Path) -> Result<Self> {
        Ok(Self { reads: ForwardReads::anywhere(), ..Self::open(storage, path)? })
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        self.stored.path()
    }

    /// The length of the file in bytes.
    pub fn byte_len(&self) -> u64 {
        self.stored.byte_len()
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
        let byte_len = self.stored.byte_len();
        let len = out.len().min(usize::try_from(self.left()).unwrap_or(usize::MAX));
        let bytes = match &self.remote {
            Some(bytes) => Arc::clone(bytes),
            None => self.stored.reopen(false)?.bytes,
        };
        let reader = Reader::new(&*bytes, &self.latency);
        self.reads.read(reader, &mut out[..len], self.at, byte_len)?;
        self.at += len as u64;
        Ok(len)
    }
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
