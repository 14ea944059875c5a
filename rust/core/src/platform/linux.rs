//! Linux: anonymous files whose length is sealed, and a signal when the parent ends.
#![expect(unsafe_code, reason = "pages of a mapping are given back by their address")]

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::Advice;
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

/// A file of `byte_len` zero bytes in no directory, which no process can cut; maps of memory show
/// it as `name`.
///
/// # Errors
///
/// If the system has no memory or no descriptor left for it.
pub(crate) fn shared_file(name: &str, byte_len: u64) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create(name, flags)?;
    rustix::fs::ftruncate(&file, byte_len)?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(file)
}

/// The length of `file`, and whether that is `byte_len` for as long as it is open anywhere.
pub(crate) fn fixed_len(file: BorrowedFd<'_>, byte_len: u64) -> io::Result<(u64, bool)> {
    let found = u64::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(0);
    let is_sealed = rustix::fs::fcntl_get_seals(file)?.contains(SealFlags::SHRINK);
    Ok((found, is_sealed && found == byte_len))
}

/// Gives the pages of a mapping back, which makes them zero for every process that maps them.
///
/// # Safety
///
/// `start` and `byte_len` are those of a mapping that nobody uses meanwhile.
pub(crate) unsafe fn give_back(start: NonNull<u8>, byte_len: usize) {
    // SAFETY: as the caller promises. What fails costs memory until the file goes, and no more.
    let _ = unsafe { rustix::mm::madvise(start.as_ptr().cast(), byte_len, Advice::LinuxRemove) };
}

/// Has the system kill this process as soon as the thread that made it ends.
///
/// False where `parent` is not, or no longer, the parent: then there is nothing to wait for.
///
/// # Errors
///
/// If the system does not offer this.
pub fn die_with_parent(parent: u32) -> io::Result<bool> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // The parent may have gone before the system was asked.
    let current = getppid().map(Pid::as_raw_pid);
    Ok(current.and_then(|pid| u32::try_from(pid).ok()) == Some(parent))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn file_that_can_be_cut_has_no_fixed_length() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("loose", flags).unwrap();
        rustix::fs::ftruncate(&file, 4096).unwrap();
        assert_eq!(fixed_len(file.as_fd(), 4096).unwrap(), (4096, false));
        assert!(rustix::fs::ftruncate(shared_file("tested", 4096).unwrap(), 1).is_err());
    }
}
