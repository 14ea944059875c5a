//! Memory-mapped files, on all systems with file descriptors.
#![expect(unsafe_code, reason = "processes share memory only through a mapping")]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags};

/// Borrows `file`.
pub(crate) fn borrowed(file: &OwnedFd) -> BorrowedFd<'_> {
    file.as_fd()
}

/// The first `byte_len` bytes of `file`, readable and writable by all processes that map them.
pub(crate) fn map_file(file: BorrowedFd<'_>, byte_len: usize) -> io::Result<NonNull<u8>> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: no address is requested, so the system picks one that nothing else uses.
    let start = unsafe {
        rustix::mm::mmap(std::ptr::null_mut(), byte_len, access, MapFlags::SHARED, file, 0)
    }?;
    NonNull::new(start.cast::<u8>()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

/// `byte_len` zero bytes on separate private pages.
pub(crate) fn map_anonymous(byte_len: usize) -> io::Result<NonNull<u8>> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: no address is requested, so the system picks one that nothing else uses.
    let start = unsafe {
        rustix::mm::mmap_anonymous(std::ptr::null_mut(), byte_len, access, MapFlags::PRIVATE)
    }?;
    NonNull::new(start.cast::<u8>()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

/// Unmaps what [`map_file`] or [`map_anonymous`] returned.
///
/// # Safety
///
/// `start` and `byte_len` are those of a mapping that nothing uses from now on.
pub(crate) unsafe fn unmap(start: NonNull<u8>, byte_len: usize) -> io::Result<()> {
    // SAFETY: as the caller promises.
    Ok(unsafe { rustix::mm::munmap(start.as_ptr().cast(), byte_len) }?)
}

/// Whether a process with this id may exist.
pub(crate) fn is_alive(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
    pid.is_none_or(|pid| rustix::process::test_kill_process(pid) != Err(rustix::io::Errno::SRCH))
}
