//! Windows: everything except memory shared between processes.
#![expect(unsafe_code, reason = "on other systems these functions take an address")]

use std::convert::Infallible;
use std::ffi::c_int;
use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::os::windows::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::ptr::NonNull;
use std::time::Duration;

use super::metadata::{FileKind, FileMetadata};
use crate::bytes::ScatterBuffers;

/// 1970-01-01 as a `FILETIME`, in units of 100 ns since 1601.
const UNIX_EPOCH: i64 = 116_444_736_000_000_000;
/// `ERROR_TOO_MANY_OPEN_FILES`.
const TOO_MANY_OPEN_FILES: i32 = 4;

/// A file that is open for reading.
#[derive(Debug)]
pub(crate) struct ReadFile(File);

impl ReadFile {
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        File::open(path).map(Self)
    }

    pub(crate) fn metadata(&self) -> io::Result<FileMetadata> {
        let metadata = self.0.metadata()?;
        let ticks = i64::try_from(metadata.last_write_time()).unwrap_or(i64::MAX);
        Ok(FileMetadata {
            kind: match (metadata.is_file(), metadata.is_dir()) {
                (true, _) => FileKind::Regular,
                (_, true) => FileKind::Directory,
                _ => FileKind::Other,
            },
            byte_len: metadata.file_size(),
            modified_ns: ticks.wrapping_sub(UNIX_EPOCH).wrapping_mul(100),
            number: (0, 0),
        })
    }

    /// Reads up to `out.len()` bytes from `at` on; 0 at the end of the file.
    pub(crate) fn read_at(&self, out: &mut [u8], at: u64) -> io::Result<usize> {
        self.0.seek_read(out, at)
    }

    /// Reads into `pieces`, all of them unfilled, in order from `at` on, as many bytes as one call
    /// reads.
    pub(crate) fn read_scattered(
        &self,
        pieces: &mut ScatterBuffers<'_>,
        at: u64,
    ) -> io::Result<()> {
        let mut bytes = vec![0; pieces.byte_len()];
        let len = self.read_at(&mut bytes, at)?;
        pieces.fill(&bytes[..len]);
        Ok(())
    }
}

/// A file without a name, which cannot exist here.
#[derive(Debug)]
pub(crate) struct TemporaryFile(Infallible);

impl TemporaryFile {
    pub(crate) fn create() -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(crate) fn write_at(&self, _: &[u8], _: u64) -> io::Result<()> {
        match self.0 {}
    }

    pub(crate) fn read_at(&self, _: &mut [u8], _: u64) -> io::Result<()> {
        match self.0 {}
    }
}

/// The error for reading a directory as a file.
pub(crate) fn is_a_directory() -> io::Error {
    io::ErrorKind::IsADirectory.into()
}

/// Whether `error` says that too many files are open.
pub(crate) fn is_out_of_files(error: &io::Error) -> bool {
    error.raw_os_error() == Some(TOO_MANY_OPEN_FILES)
}

/// Whether `error` of a sync call says that the file cannot be synced, such as a pipe.
pub(crate) fn is_not_syncable(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::Unsupported
}

/// The limit on open files of the process, if any.
pub(crate) fn max_files() -> Option<u64> {
    None
}

/// A file to be passed to another process, which cannot exist here.
#[derive(Debug)]
pub struct OwnedFile(Infallible);

/// The same, borrowed.
#[derive(Clone, Copy, Debug)]
pub struct BorrowedFile<'a>(Infallible, PhantomData<&'a OwnedFile>);

/// Never called, since there is no such file.
pub fn borrowed(file: &OwnedFile) -> BorrowedFile<'_> {
    match file.0 {}
}

/// Never called, since there is no such file.
pub fn into_descriptor(file: OwnedFile) -> c_int {
    match file.0 {}
}

/// Always an error.
///
/// # Safety
///
/// There are no requirements here.
///
/// # Errors
///
/// Always.
pub unsafe fn from_descriptor(_: c_int) -> io::Result<OwnedFile> {
    unsupported()
}

fn unsupported<T>() -> io::Result<T> {
    let problem = "this system shares no memory between processes";
    Err(io::Error::new(io::ErrorKind::Unsupported, problem))
}

/// Always an error.
///
/// # Errors
///
/// Always.
pub fn shared_file(_: &str, _: u64) -> io::Result<OwnedFile> {
    unsupported()
}

/// Always an error.
///
/// # Errors
///
/// Always.
pub fn process_file(_: u32) -> io::Result<OwnedFile> {
    unsupported()
}

/// Whether a process with this id may exist; never called without shared memory.
pub(crate) fn is_alive(_: u32) -> bool {
    true
}

/// Never called, since there is no such file.
pub(crate) fn fixed_len(file: BorrowedFile<'_>, _: u64) -> io::Result<(u64, bool)> {
    match file.0 {}
}

/// Never called, since there is no such file.
pub(crate) fn map_file(file: BorrowedFile<'_>, _: usize) -> io::Result<NonNull<u8>> {
    match file.0 {}
}

/// Always an error.
pub(crate) fn map_anonymous(_: usize) -> io::Result<NonNull<u8>> {
    unsupported()
}

/// Never called, since there is no mapping.
///
/// # Safety
///
/// There are no requirements here.
pub(crate) unsafe fn unmap(_: NonNull<u8>, _: usize) -> io::Result<()> {
    Ok(())
}

/// Never called, since there is no mapping.
///
/// # Safety
///
/// There are no requirements here.
pub(crate) unsafe fn discard_pages(_: NonNull<u8>, _: usize) {}

/// Not supported: workers exit when they find their connection closed.
///
/// # Errors
///
/// Always.
pub fn die_with_parent(_: u32) -> io::Result<bool> {
    unsupported()
}

/// Always `None`: there is no portable number of a thread.
#[must_use]
pub(crate) fn thread_number() -> Option<u64> {
    None
}

/// Always `None`: there is no call here that counts waits for a core.
#[must_use]
pub fn thread_times(_: u32) -> Option<(Duration, Duration)> {
    None
}

/// Nothing: files of a user are the user's only.
pub fn make_private(_: &mut std::fs::OpenOptions) {}

/// Creates a directory, and those it is in.
///
/// # Errors
/// If that fails.
pub fn create_private_dirs(path: &std::path::Path) -> std::io::Result<()> {
    std::fs::create_dir_all(path)
}
