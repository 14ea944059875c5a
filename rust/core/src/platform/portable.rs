//! Systems with file descriptors but without Linux's extensions, such as macOS.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::Mode;
use rustix::process::{Pid, Signal, getpid, getppid, kill_process};
use rustix::shm;

/// How often a process checks that its parent still exists: soon enough after the parent's end, and
/// of negligible cost.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Shared memory of `byte_len` zero bytes, already unlinked.
///
/// # Errors
///
/// If the system is out of memory or file descriptors.
pub fn shared_file(_: &str, byte_len: u64) -> io::Result<OwnedFd> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        // macOS allows 31 bytes.
        let name = format!("/grainmill-{:x}-{number:x}", std::process::id());
        let flags = shm::OFlags::CREATE | shm::OFlags::EXCL | shm::OFlags::RDWR;
        match shm::open(&name, flags, Mode::RUSR | Mode::WUSR) {
            Ok(file) => {
                shm::unlink(&name)?;
                rustix::fs::ftruncate(&file, byte_len)?;
                return Ok(file);
            }
            // Left by a process that had this id and ended between `open` and `unlink`.
            Err(rustix::io::Errno::EXIST) => {}
            Err(refused) => return Err(refused.into()),
        }
    }
}

/// Always an error: these systems have no files for processes.
///
/// # Errors
///
/// Always.
pub fn process_file(_: u32) -> io::Result<OwnedFd> {
    Err(io::ErrorKind::Unsupported.into())
}

/// The length of `file`, and whether `byte_len` bytes of it can be mapped.
///
/// Another process could truncate it, but only those of a pool have it. Some systems round the
/// length up to whole pages.
pub(crate) fn fixed_len(file: BorrowedFd<'_>, byte_len: u64) -> io::Result<(u64, bool)> {
    let found = u64::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(0);
    let page = rustix::param::page_size() as u64;
    Ok((found, byte_len <= found && found <= byte_len.next_multiple_of(page)))
}

/// Does nothing: there is no portable call that discards pages, so they are freed with the file.
///
/// # Safety
///
/// There are no requirements here.
#[expect(unsafe_code, reason = "on Linux this takes an address")]
pub(crate) unsafe fn discard_pages(_: NonNull<u8>, _: usize) {}

/// Kills this process soon after its parent has ended.
///
/// False if `parent` is not, or no longer, the parent: the process is not killed then.
///
/// # Errors
///
/// If the thread that watches the parent cannot be started.
pub fn die_with_parent(parent: u32) -> io::Result<bool> {
    let is_parent =
        move || getppid().and_then(|pid| u32::try_from(Pid::as_raw_pid(pid)).ok()) == Some(parent);
    if !is_parent() {
        return Ok(false);
    }
    std::thread::Builder::new().name("grainmill-parent".to_owned()).spawn(move || {
        while is_parent() {
            std::thread::sleep(POLL_INTERVAL);
        }
        let _ = kill_process(getpid(), Signal::KILL);
    })?;
    Ok(true)
}

/// Always `None`: there is no portable number of a thread.
#[must_use]
pub(crate) fn thread_number() -> Option<u64> {
    None
}

/// Always `None`: there is no portable call that counts waits for a core.
#[must_use]
pub fn thread_times(_: u32) -> Option<(Duration, Duration)> {
    None
}
