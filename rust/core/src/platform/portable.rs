//! Systems with descriptors that lack what Linux has, such as macOS.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::Mode;
use rustix::process::{Pid, Signal, getpid, getppid, kill_process};
use rustix::shm;

/// How often a process looks whether its parent is still there: a moment to whoever waits for a
/// pool to be gone, and nothing to the processor.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Shared memory of `byte_len` zero bytes, whose name is gone again.
///
/// # Errors
///
/// If the system has no memory or no descriptor left for it.
pub(crate) fn shared_file(_: &str, byte_len: u64) -> io::Result<OwnedFd> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        // macOS takes 31 bytes.
        let name = format!("/grainmill-{:x}-{number:x}", std::process::id());
        let flags = shm::OFlags::CREATE | shm::OFlags::EXCL | shm::OFlags::RDWR;
        match shm::open(&name, flags, Mode::RUSR | Mode::WUSR) {
            Ok(file) => {
                shm::unlink(&name)?;
                rustix::fs::ftruncate(&file, byte_len)?;
                return Ok(file);
            }
            // Of a process that had this number, and ended between the two calls.
            Err(rustix::io::Errno::EXIST) => {}
            Err(refused) => return Err(refused.into()),
        }
    }
}

/// The length of `file`, and whether `byte_len` bytes of it can be mapped.
///
/// Nothing keeps another process from cutting it; that only those of a pool have it must do.
/// Some systems round the length up to whole pages.
pub(crate) fn fixed_len(file: BorrowedFd<'_>, byte_len: u64) -> io::Result<(u64, bool)> {
    let found = u64::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(0);
    let page = rustix::param::page_size() as u64;
    Ok((found, byte_len <= found && found <= byte_len.next_multiple_of(page)))
}

/// Keeps the pages of a mapping until the file goes: no call that all systems have gives them back.
///
/// # Safety
///
/// None is asked for here.
#[expect(unsafe_code, reason = "on Linux this takes an address")]
pub(crate) unsafe fn give_back(_: NonNull<u8>, _: usize) {}

/// Kills this process soon after its parent has ended.
///
/// False where `parent` is not, or no longer, the parent: then there is nothing to wait for.
///
/// # Errors
///
/// If no thread can be started.
pub fn die_with_parent(parent: u32) -> io::Result<bool> {
    let is_parent =
        move || getppid().and_then(|pid| u32::try_from(Pid::as_raw_pid(pid)).ok()) == Some(parent);
    if !is_parent() {
        return Ok(false);
    }
    std::thread::Builder::new().name("grainmill-parent".to_owned()).spawn(move || {
        while is_parent() {
            std::thread::sleep(LOOK_EVERY);
        }
        let _ = kill_process(getpid(), Signal::KILL);
    })?;
    Ok(true)
}
