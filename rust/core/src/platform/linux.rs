//! Linux: anonymous files whose length is sealed, a signal when the parent ends, and the times of
//! single threads. Workers use them from here: a Python that was built for an old Linux lacks some of
//! these calls on every Linux.
#![expect(unsafe_code, reason = "pages of a mapping are discarded by address")]

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::Advice;
use rustix::process::{
    Pid, PidfdFlags, Signal, getppid, pidfd_open, set_parent_process_death_signal,
};

/// An anonymous file of `byte_len` zero bytes that cannot be resized; `/proc/*/maps` shows `name`.
///
/// # Errors
///
/// If the system is out of memory or file descriptors.
pub fn shared_file(name: &str, byte_len: u64) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create(name, flags)?;
    rustix::fs::ftruncate(&file, byte_len)?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(file)
}

/// A file that becomes readable when the process `pid` ends.
///
/// # Errors
///
/// If there is no such process, or the system is out of file descriptors.
pub fn process_file(pid: u32) -> io::Result<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

/// The length of `file`, and whether it is `byte_len` and cannot shrink.
pub(crate) fn fixed_len(file: BorrowedFd<'_>, byte_len: u64) -> io::Result<(u64, bool)> {
    let found = u64::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(0);
    let is_sealed = rustix::fs::fcntl_get_seals(file)?.contains(SealFlags::SHRINK);
    Ok((found, is_sealed && found == byte_len))
}

/// Discards the pages of a mapping, which makes them zero in every process that maps them.
///
/// # Safety
///
/// `start` and `byte_len` are those of a mapping that nothing uses during the call.
pub(crate) unsafe fn discard_pages(start: NonNull<u8>, byte_len: usize) {
    // SAFETY: as the caller promises. On failure the memory is only freed later, with the file.
    let _ = unsafe { rustix::mm::madvise(start.as_ptr().cast(), byte_len, Advice::LinuxRemove) };
}

/// Asks the system to kill this process as soon as the thread that forked it ends.
///
/// False if `parent` is not, or no longer, the parent: no signal will arrive then.
///
/// # Errors
///
/// If the system does not support it.
pub fn die_with_parent(parent: u32) -> io::Result<bool> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // The parent may have ended before the call.
    let current = getppid().map(Pid::as_raw_pid);
    Ok(current.and_then(|pid| u32::try_from(pid).ok()) == Some(parent))
}

/// The number by which the system knows the calling thread.
#[must_use]
pub(crate) fn thread_number() -> Option<u64> {
    u64::try_from(rustix::thread::gettid().as_raw_nonzero().get()).ok()
}

/// How long the thread `id` of this process has run, and how long it has waited for a core; `None`
/// if there is no such thread, or the system does not count it.
#[must_use]
pub fn thread_times(id: u32) -> Option<(Duration, Duration)> {
    let statistics = std::fs::read_to_string(format!("/proc/self/task/{id}/schedstat")).ok()?;
    let mut times =
        statistics.split_ascii_whitespace().map(|ns| ns.parse().map(Duration::from_nanos));
    Some((times.next()?.ok()?, times.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd};

    use super::*;

    #[test]
    fn process_file_is_readable_once_the_process_has_ended() {
        let mut child =
            std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let file = process_file(child.id()).unwrap();
        let has_ended = |wait_ms: i32| {
            let mut polled =
                libc::pollfd { fd: file.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one descriptor, which lives through the call.
            unsafe { libc::poll(&raw mut polled, 1, wait_ms) == 1 }
        };
        assert!(!has_ended(0));
        drop(child.stdin.take());
        assert!(has_ended(60_000));
        child.wait().unwrap();
        assert!(process_file(0).is_err());
    }

    fn own_id() -> u32 {
        // SAFETY: it takes nothing and cannot fail.
        u32::try_from(unsafe { libc::gettid() }).unwrap()
    }

    fn own_cpu() -> Duration {
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: one value, which lives through the call.
        assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut now) }, 0);
        Duration::new(now.tv_sec.try_into().unwrap(), now.tv_nsec.try_into().unwrap())
    }

    #[test]
    fn thread_has_the_number_of_the_system() {
        assert_eq!(thread_number(), Some(own_id().into()));
    }

    #[test]
    fn times_are_those_of_one_thread() {
        let least = Duration::from_millis(100);
        let [busy, idle] = [least, Duration::ZERO].map(|burnt| {
            let thread = std::thread::spawn(move || {
                while own_cpu() < burnt {}
                (thread_times(own_id()).unwrap(), own_cpu())
            });
            let ((cpu, _), by_clock) = thread.join().unwrap();
            assert!(cpu <= by_clock);
            cpu
        });
        // What has passed since the scheduler's last tick is not in it.
        assert!(busy > least / 2, "{busy:?}");
        assert!(idle < least / 2, "{idle:?}");
        assert_eq!(thread_times(0), None);
        assert_eq!(thread_times(u32::MAX), None);
    }

    #[test]
    fn file_that_can_be_truncated_has_no_fixed_length() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("loose", flags).unwrap();
        rustix::fs::ftruncate(&file, 4096).unwrap();
        assert_eq!(fixed_len(file.as_fd(), 4096).unwrap(), (4096, false));
        assert!(rustix::fs::ftruncate(shared_file("tested", 4096).unwrap(), 1).is_err());
    }
}
