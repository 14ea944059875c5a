//! Positional reads of files, on systems with file descriptors.
#![expect(unsafe_code, reason = "only the C library reads into uninitialized memory")]

use std::env;
use std::ffi::c_int;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

use super::metadata::{FileKind, FileMetadata};
use crate::bytes::ScatterBuffers;

/// A file that is open for reading.
#[derive(Debug)]
pub(crate) struct ReadFile(OwnedFd);

impl ReadFile {
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        // Without `NONBLOCK`, opening a pipe would wait for its writer.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        Ok(Self(rustix::io::retry_on_intr(|| rustix::fs::open(path, flags, Mode::empty()))?))
    }

    #[expect(clippy::cast_sign_loss, reason = "lengths are not negative")]
    #[expect(clippy::cast_possible_wrap, reason = "nanoseconds are below 10^9")]
    pub(crate) fn metadata(&self) -> io::Result<FileMetadata> {
        let stat = rustix::fs::fstat(&self.0)?;
        let (seconds, nanos) = (stat.st_mtime as i64, stat.st_mtime_nsec as i64);
        Ok(FileMetadata {
            kind: match FileType::from_raw_mode(stat.st_mode) {
                FileType::RegularFile => FileKind::Regular,
                FileType::Directory => FileKind::Directory,
                _ => FileKind::Other,
            },
            byte_len: stat.st_size as u64,
            modified_ns: seconds.wrapping_mul(1_000_000_000).wrapping_add(nanos),
            number: (stat.st_dev as u64, stat.st_ino as u64),
        })
    }

    /// Reads up to `out.len()` bytes from `at` on; 0 at the end of the file.
    pub(crate) fn read_at(&self, out: &mut [u8], at: u64) -> io::Result<usize> {
        Ok(rustix::io::retry_on_intr(|| rustix::io::pread(&self.0, &mut *out, at))?)
    }

    /// Reads into `pieces`, all of them unfilled, in order from `at` on, as many bytes as one call
    /// reads.
    pub(crate) fn read_scattered(
        &self,
        pieces: &mut ScatterBuffers<'_>,
        at: u64,
    ) -> io::Result<()> {
        let invalid = |_| io::Error::from(io::ErrorKind::InvalidInput);
        let at = libc::off_t::try_from(at).map_err(invalid)?;
        let unfilled = pieces.unfilled();
        let count = c_int::try_from(unfilled.len()).map_err(invalid)?;
        let iovecs = unfilled.as_mut_ptr().cast::<libc::iovec>();
        loop {
            // SAFETY: `count` buffers with the layout of `iovec`, whose memory `pieces` borrows.
            let read = unsafe { libc::preadv(self.0.as_raw_fd(), iovecs, count, at) };
            if let Ok(len) = usize::try_from(read) {
                // SAFETY: the system has filled `len` bytes of them.
                unsafe { pieces.advance(len) };
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }
}

/// A file without a name, for what would take too much memory.
#[derive(Debug)]
pub(crate) struct TemporaryFile(File);

impl TemporaryFile {
    /// A new file in the directory of `TMPDIR`, or where temporary files are not kept in memory.
    pub(crate) fn create() -> io::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let name = format!(".grainmill-{}-{number}-{}", std::process::id(), now.as_nanos());
        let given = env::var_os("TMPDIR").filter(|dir| !dir.is_empty()).map(PathBuf::from);
        let usual = ["/var/tmp", "/tmp"].map(PathBuf::from);
        let mut result = Err(io::ErrorKind::NotFound.into());
        for dir in given.into_iter().chain(usual) {
            let path = dir.join(&name);
            // A new file, so no link is followed.
            let options =
                OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path);
            result = options.and_then(|file| fs::remove_file(&path).map(|()| Self(file)));
            if result.is_ok() {
                break;
            }
        }
        result
    }

    pub(crate) fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.0.write_all_at(bytes, at)
    }

    pub(crate) fn read_at(&self, out: &mut [u8], at: u64) -> io::Result<()> {
        self.0.read_exact_at(out, at)
    }
}

/// The error for reading a directory as a file.
pub(crate) fn is_a_directory() -> io::Error {
    Errno::ISDIR.into()
}

/// Whether `error` says that too many files are open.
pub(crate) fn is_out_of_files(error: &io::Error) -> bool {
    Errno::from_io_error(error).is_some_and(|errno| matches!(errno, Errno::MFILE | Errno::NFILE))
}

/// Whether `error` of a sync call says that the file cannot be synced, such as a pipe.
pub(crate) fn is_not_syncable(error: &io::Error) -> bool {
    Errno::from_io_error(error)
        .is_some_and(|errno| matches!(errno, Errno::INVAL | Errno::ROFS | Errno::NOTSUP))
}

/// The limit on open files of the process, if any.
pub(crate) fn max_files() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).current
}

/// Makes a file that `options` create readable for its user only; a link in place of the file is not
/// followed.
pub fn make_private(options: &mut OpenOptions) {
    #[expect(clippy::cast_possible_wrap, reason = "the type of flags in C")]
    let no_follow = OFlags::NOFOLLOW.bits() as i32;
    options.mode(0o600).custom_flags(no_follow);
}

/// Creates a directory, and those it is in, for the user only.
///
/// # Errors
/// If that fails.
pub fn create_private_dirs(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}
