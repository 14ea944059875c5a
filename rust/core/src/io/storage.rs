//! The interface of a storage: files by path, and any range of their bytes. It knows no format.

use std::fmt::Debug;
use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::read_queue::{Permit, StorageLimit};
use super::storage_latency::StorageLatency;
use crate::bytes::ScatterBuffers;
use crate::{Error, Result};

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

    /// The limit of the reads in flight of the storage of the file at `path`: one for all files of a bucket,
    /// say. None has only that of the process.
    fn limit(&self, _path: &Path) -> Option<Arc<StorageLimit>> {
        None
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

    /// Whether it can be opened without waiting, and [`ReadAt::request`] may return requests. It is
    /// opened while others wait for a task, so then [`reopen`](Self::reopen) has no new id to check.
    fn has_requests(&self) -> bool {
        false
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
    /// for it; it keeps `permit` until they have arrived. Reads that are slow for another reason are not
    /// started but made.
    fn start(&self, _range: Range<u64>, _permit: Permit) -> Option<Box<dyn StartedRead>> {
        None
    }

    /// A request for the bytes of `range`, which the file has, if nobody needs to wait for them.
    fn request(&self, _range: Range<u64>) -> Option<Box<dyn ReadRequest>> {
        None
    }
}

/// A read whose bytes are passed on by a thread of the storage when they have arrived.
pub trait ReadRequest: Send {
    /// Starts the read. Returns at once, and before `when_read` is called.
    fn send(self: Box<Self>, when_read: WhenRead);
}

/// Takes the bytes that were read, in parts, or the error. It must not wait.
pub type WhenRead = Box<dyn FnOnce(Result<&[&[u8]]>) + Send>;

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

/// A part of a file that has been read.
#[derive(Debug)]
pub(crate) struct ReadPart<'a> {
    /// The path of the file, for errors.
    pub(crate) path: &'a Path,
    /// Where in the file the bytes begin.
    pub(crate) begin: u64,
    /// The bytes, in pieces.
    pub(crate) pieces: &'a [&'a [u8]],
}

impl ReadPart<'_> {
    /// Passes at most `len` bytes from position `at` on to `sink`, in order; returns how many.
    fn copy(&self, at: u64, len: usize, mut sink: impl FnMut(&[u8])) -> usize {
        let Some(skipped) = at.checked_sub(self.begin) else { return 0 };
        let mut skipped = usize::try_from(skipped).unwrap_or(usize::MAX);
        let mut left = len;
        for piece in self.pieces {
            let begin = skipped.min(piece.len());
            skipped -= begin;
            let piece = &piece[begin..piece.len().min(begin.saturating_add(left))];
            left -= piece.len();
            sink(piece);
        }
        len - left
    }
}

impl ReadAt for ReadPart<'_> {
    fn read_at(&self, out: &mut [u8], at: u64) -> Result<()> {
        let mut filled = 0;
        let copied = self.copy(at, out.len(), |bytes| {
            out[filled..filled + bytes.len()].copy_from_slice(bytes);
            filled += bytes.len();
        });
        if copied < out.len() {
            return Err(Error::io(self.path, "read", io::ErrorKind::UnexpectedEof.into()));
        }
        Ok(())
    }

    fn read_scattered(&self, buffers: &mut ScatterBuffers<'_>, at: u64) -> Result<()> {
        self.copy(at, buffers.byte_len(), |bytes| buffers.fill(bytes));
        Ok(())
    }
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
        if out.is_empty() {
            return Ok(()); // a bucket refuses to read nothing
        }
        self.latency.measure(out.len(), || self.bytes.read_at(out, at))
    }

    /// The limit of its storage.
    pub(crate) fn limit(&self) -> Option<Arc<StorageLimit>> {
        self.latency.limit()
    }

    /// Whether the storage is slow.
    pub(crate) fn is_slow(&self) -> bool {
        self.latency.is_slow()
    }

    /// Starts a read; see [`ReadAt::start`].
    pub(crate) fn start(&self, range: Range<u64>, permit: Permit) -> Option<Box<dyn StartedRead>> {
        if range.is_empty() { None } else { self.bytes.start(range, permit) }
    }

    /// Fills `buffers` from position `at`; the read may be partial.
    pub(crate) fn read_scattered(&self, buffers: &mut ScatterBuffers<'_>, at: u64) -> Result<()> {
        if buffers.byte_len() == 0 {
            return Ok(());
        }
        self.latency.measure(buffers.byte_len(), || self.bytes.read_scattered(buffers, at))
    }
}

/// A handle for some reads of a file that was checked to be unchanged.
#[derive(Debug, Clone)]
pub struct FileHandle(Arc<dyn ReadAt>);

impl FileHandle {
    /// For a file that was opened by its [`Storage`].
    pub fn new(bytes: Arc<dyn ReadAt>) -> Self {
        Self(bytes)
    }

    /// Opens `file` and checks it, except if it `was_checked` for the same plan. If it has another id,
    /// `is_same` tells whether it has the same content.
    ///
    /// # Errors
    /// If it was changed or removed, and those of `is_same`.
    pub fn open(
        file: &dyn StoredFile,
        latency: &StorageLatency,
        was_checked: bool,
        is_same: impl FnOnce(Reader<'_>) -> Result<bool>,
    ) -> Result<Self> {
        let ReopenedFile { bytes, new_id } = file.reopen(was_checked)?;
        if let Some(id) = new_id {
            if !is_same(Reader::new(&*bytes, latency))? {
                return Err(Error::Changed { path: file.path().display().to_string() });
            }
            file.accept_id(id);
        }
        Ok(Self(bytes))
    }

    /// A request for the bytes of `extent`; see [`ReadAt::request`].
    pub(crate) fn request(&self, extent: Range<u64>) -> Option<Box<dyn ReadRequest>> {
        if extent.is_empty() { None } else { self.0.request(extent) }
    }

    /// A reader that measures `latency`.
    pub fn reader<'a>(&'a self, latency: &'a StorageLatency) -> Reader<'a> {
        Reader::new(&*self.0, latency)
    }
}

/// The file that was opened last, for reads of which neighbours are often of one file. Closed before
/// another one is opened, or threads that have one each would wait for each other where no more may be
/// open.
#[derive(Debug)]
pub struct LastOpened<T>(Option<(u32, T)>);

impl<T> Default for LastOpened<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<T> LastOpened<T> {
    /// File `number`, which `open` opens unless it is the last one.
    ///
    /// # Errors
    /// Those of `open`.
    pub fn get(&mut self, number: u32, open: impl FnOnce() -> Result<T>) -> Result<&T> {
        let file = match self.0.take() {
            Some((of, file)) if of == number => file,
            other => {
                drop(other);
                open()?
            }
        };
        Ok(&self.0.insert((number, file)).1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn part_is_read_like_the_file() {
        let file: Vec<u8> = (0..40).collect();
        let pieces: [&[u8]; 4] = [&file[10..13], &[], &file[13..14], &file[14..30]];
        let part = ReadPart { path: Path::new("file"), begin: 10, pieces: &pieces };
        for begin in 5..35_usize {
            for len in 0..30 {
                let wanted = begin..begin + len;
                let is_there = begin >= 10 && wanted.end <= 30 || len == 0;
                let mut out = vec![0; len];
                let read = part.read_at(&mut out, begin as u64);
                assert_eq!(read.is_ok(), is_there, "{wanted:?}");
                if is_there {
                    assert_eq!(out, file[wanted.clone()]);
                }
                let mut head = [0; 2];
                let mut out = vec![0; len];
                let mut buffers = ScatterBuffers::with_capacity(2);
                buffers.push_initialised(&mut head);
                buffers.push_initialised(&mut out);
                part.read_scattered(&mut buffers, begin as u64).unwrap();
                let num_there = if begin < 10 { 0 } else { 30_usize.saturating_sub(begin) };
                assert_eq!(buffers.are_full(), num_there >= len + 2, "{wanted:?}");
                drop(buffers);
                if num_there >= len + 2 {
                    assert_eq!([&head[..], &out].concat(), file[begin..begin + len + 2]);
                }
            }
        }
    }
}
