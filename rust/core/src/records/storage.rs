//! What a storage offers: files by path, and any range of their bytes. No format is known here.

use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;

use super::storage_latency::StorageLatency;
use crate::Result;
use crate::bytes::ScatterBuffers;

/// Where files are. Every call may wait for as long as it takes: those who read far storage do
/// it on many threads.
pub trait Storage: Debug + Send + Sync {
    /// Finds the file at `path` and notes how long it is and when it was written; it is ready to be
    /// read.
    ///
    /// # Errors
    /// If there is no such file.
    fn find(&self, path: &Path) -> Result<(Box<dyn StoredFile>, Arc<dyn ReadAt>)>;
}

/// A file that has been found.
pub trait StoredFile: Debug + Send + Sync {
    /// Where it is.
    fn path(&self) -> &Path;

    /// How many bytes it has.
    fn byte_len(&self) -> u64;

    /// When it was last written, in nanoseconds since 1970.
    fn modified_ns(&self) -> i64;

    /// Makes the file ready for some reads, after a look whether it is still the one that was
    /// found; that may be left out if it `was_checked` a moment ago and has been kept ready since.
    ///
    /// # Errors
    /// If it is another one, or is not there any more.
    fn hold(&self, was_checked: bool) -> Result<Held>;

    /// Takes the file held as `number` for the one that was found.
    fn accept(&self, number: FileNumber);
}

/// What a system numbers files by: a device and a number there.
pub type FileNumber = (u64, u64);

/// A file that is ready to be read.
#[derive(Debug)]
pub struct Held {
    /// Reads its bytes.
    pub bytes: Arc<dyn ReadAt>,
    /// Its number, if that is not the one it was found under. Length and time are those of then,
    /// but what it holds should be looked at.
    pub renumbered: Option<FileNumber>,
}

/// Bytes by their position.
pub trait ReadAt: Debug + Send + Sync {
    /// Fills `out` from position `at`.
    ///
    /// # Errors
    /// If the file cannot be read or ends before.
    fn read_at(&self, out: &mut [u8], at: u64) -> Result<()>;

    /// Fills `pieces` from position `at`, or some of them if not all comes at once.
    ///
    /// # Errors
    /// If the file cannot be read.
    fn read_pieces(&self, pieces: &mut ScatterBuffers<'_>, at: u64) -> Result<()>;
}

/// Bytes of a file; how long each read takes adds to what is known of its storage.
#[derive(Debug, Clone, Copy)]
pub struct Reader<'a> {
    bytes: &'a dyn ReadAt,
    latency: &'a StorageLatency,
}

impl<'a> Reader<'a> {
    /// Reads from `bytes`.
    pub fn new(bytes: &'a dyn ReadAt, latency: &'a StorageLatency) -> Self {
        Self { bytes, latency }
    }

    /// Fills `out` from position `at`.
    pub(crate) fn read_at(&self, out: &mut [u8], at: u64) -> Result<()> {
        self.latency.observed(out.len(), || self.bytes.read_at(out, at))
    }

    /// Fills `pieces` from position `at`, or some of them if not all comes at once.
    pub(crate) fn read_pieces(&self, pieces: &mut ScatterBuffers<'_>, at: u64) -> Result<()> {
        self.latency.observed(pieces.byte_len(), || self.bytes.read_pieces(pieces, at))
    }
}
