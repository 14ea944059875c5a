//! Memory-mapped files, on all systems with file descriptors.
#![expect(unsafe_code, reason = "processes share memory only through a mapping")]

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags};

/// Borrows `file`.
pub fn borrowed(file: &OwnedFd) -> BorrowedFd<'_> {
    file.as_fd()
}

/// The descriptor of `file`, which the caller closes.
pub fn into_descriptor(file: OwnedFd) -> c_int {
    file.into_raw_fd()
}

/// The file with this descriptor, which closes it when dropped.
///
/// # Safety
///
/// The descriptor is open, and the caller transfers its ownership.
///
/// # Errors
///
/// None on this system.
pub unsafe fn from_descriptor(descriptor: c_int) -> io::Result<OwnedFd> {
    // SAFETY: as the caller promises.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
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
