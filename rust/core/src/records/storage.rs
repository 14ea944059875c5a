//! The interface of a storage: files by path, and any range of their bytes. It knows no format.

use std::fmt::Debug;
use std::io::Write;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::storage_latency::StorageLatency;
use crate::Result;
use crate::bytes::ScatterBuffers;

/// Where files are. Every call may block: slow storage is read by many threads.
pub trait Storage: Debug + Send + Sync {
    /// Opens the file at `path` and records its length and the time it was last written.
    ///
    /// # Errors
    /// If there is no such file, or it cannot be opened.
    fn open(&self, path: &Path) -> Result<(Box<dyn StoredFile>, Arc<dyn ReadAt>)>;

    /// Whether each read of the file at `path` is a request to another machine, so that reads should
    /// be concurrent before one has been measured.
    fn is_remote(&self, _path: &Path) -> bool {
        false
    }
}

/// A file that has been opened once, with the length and time that it had then.
pub trait StoredFile: Debug + Send + Sync {
    /// The path of the file.
    fn path(&self) -> &Path;

    /// The length in bytes.
    fn byte_len(&self) -> u64;

    /// When it was last written, in nanoseconds since 1970.
    fn modified_ns(&self) -> i64;

    /// What else tells its content from that at other times, such as the tag of an object.
    fn tag(&self) -> Option<&str> {
        None
    }

    /// Opens the file for some reads and checks that it is still the same file, except if it
    /// `was_checked` for the same plan and is still open.
    ///
    /// # Errors
    /// If it was changed or removed.
    fn reopen(&self, was_checked: bool) -> Result<ReopenedFile>;

    /// Records that the file with this `id` is the same file.
    fn accept_id(&self, id: FileId);
}

/// The numbers by which a system identifies a file: device and inode.
pub type FileId = (u64, u64);

/// A file that has been opened for reads.
#[derive(Debug)]
pub struct ReopenedFile {
    /// Reads its bytes.
    pub bytes: Arc<dyn ReadAt>,
    /// Its id, if that has changed. Length and time have not, but the content should be checked.
    pub new_id: Option<FileId>,
}

/// Random-access reads.
pub trait ReadAt: Debug + Send + Sync {
    /// Fills `out` from position `at`.
    ///
    /// # Errors
    /// If the file cannot be read or ends too early.
    fn read_at(&self, out: &mut [u8], at: u64) -> Result<()>;

    /// Fills `buffers` from position `at`; the read may be partial.
    ///
    /// # Errors
    /// If the file cannot be read.
    fn read_scattered(&self, buffers: &mut ScatterBuffers<'_>, at: u64) -> Result<()>;

    /// Starts reading the bytes of `range`, which the file has, if a read needs no thread that waits
    /// for it. Reads that are slow for another reason are not started but made.
    fn start(&self, _range: Range<u64>) -> Option<Box<dyn StartedRead>> {
        None
    }
}

/// A read in flight. Dropping it abandons it.
pub trait StartedRead: Send {
    /// Waits for all bytes that were asked for.
    ///
    /// # Errors
    /// If the file cannot be read or ends too early.
    fn wait(self: Box<Self>) -> Result<Vec<u8>>;
}

/// A file that is being written, from its start to its end.
///
/// It is complete once it is closed. What becomes of a file that is dropped instead is up to its
/// storage; a bucket shows nothing of it.
pub trait WriteFile: Debug + Send + Write {
    /// Writes what is still in memory, and makes the file durable.
    ///
    /// # Errors
    /// If that fails.
    fn close(self: Box<Self>) -> Result<()>;
}

/// Reads a file and measures the latency of its storage.
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
    ///
    /// # Errors
    /// If the file cannot be read or ends too early.
    pub fn read_at(&self, out: &mut [u8], at: u64) -> Result<()> {
        self.latency.measure(out.len(), || self.bytes.read_at(out, at))
    }

    /// Whether the storage is slow.
    pub(crate) fn is_slow(&self) -> bool {
        self.latency.is_slow()
    }

    /// Starts a read; see [`ReadAt::start`].
    pub(crate) fn start(&self, range: Range<u64>) -> Option<Box<dyn StartedRead>> {
        self.bytes.start(range)
    }

    /// Fills `buffers` from position `at`; the read may be partial.
    pub(crate) fn read_scattered(&self, buffers: &mut ScatterBuffers<'_>, at: u64) -> Result<()> {
        self.latency.measure(buffers.byte_len(), || self.bytes.read_scattered(buffers, at))
    }
}
