//! Memory that two processes see: anonymous files, mapped.
//!
//! They have no name in any directory, so nothing is left behind when the last process that maps
//! them ends, however it ends, and no limit of a file system applies.
#![expect(unsafe_code, reason = "two processes see the same bytes only through a mapping")]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::{Error, Result};

/// Bytes of an anonymous file, readable and writable by every process that maps it.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    byte_len: usize,
}

// SAFETY: the mapping belongs to this value alone and is tied to no thread.
unsafe impl Send for Mapping {}
// SAFETY: a shared reference gives out a bare pointer only.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// A new file of `byte_len` zero bytes and its mapping. The file can no longer be resized,
    /// so that no process can take bytes away from another that reads them.
    ///
    /// # Errors
    ///
    /// If the system has no memory or no descriptor left for it.
    pub fn create(byte_len: usize) -> Result<(Self, OwnedFd)> {
        let refused = |error| refused(byte_len, error);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("grainmill-slot", flags).map_err(refused)?;
        let len = u64::try_from(byte_len).unwrap_or(u64::MAX);
        rustix::fs::ftruncate(&file, len).map_err(refused)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals).map_err(refused)?;
        Ok((Self::of(file.as_fd(), byte_len)?, file))
    }

    /// The bytes of a file made by [`Mapping::create`], in any process. The file may be closed
    /// afterwards.
    ///
    /// # Errors
    ///
    /// If the file is not `byte_len` bytes long or can still be cut, or cannot be mapped.
    pub fn open(file: BorrowedFd<'_>, byte_len: usize) -> Result<Self> {
        let refused = |error| refused(byte_len, error);
        let found = rustix::fs::fstat(file).map_err(refused)?.st_size;
        let sealed = rustix::fs::fcntl_get_seals(file).map_err(refused)?;
        if usize::try_from(found) != Ok(byte_len) || !sealed.contains(SealFlags::SHRINK) {
            return Err(Error::InvalidArgument(format!(
                "shared memory must be {byte_len} bytes of fixed length, got {found}"
            )));
        }
        Self::of(file, byte_len)
    }

    fn of(file: BorrowedFd<'_>, byte_len: usize) -> Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: no address is asked for, so the system picks one that nothing else uses.
        let start = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), byte_len, access, MapFlags::SHARED, file, 0)
        };
        let start = start.map_err(|error| refused(byte_len, error))?.cast::<u8>();
        let start =
            NonNull::new(start).ok_or_else(|| refused(byte_len, rustix::io::Errno::NOMEM))?;
        Ok(Self { start, byte_len })
    }

    /// How many bytes there are.
    pub fn byte_len(&self) -> usize {
        self.byte_len
    }

    /// Where they begin: at a page.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Makes all bytes zero for every process that maps them, by giving their pages back.
    pub fn empty(&mut self) {
        let start = self.start.as_ptr().cast();
        // SAFETY: `of` mapped exactly these bytes, and `&mut self` keeps other users here away.
        // What fails costs memory until the file goes, and no more.
        let _ = unsafe { rustix::mm::madvise(start, self.byte_len, Advice::LinuxRemove) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `of` mapped exactly these bytes, and their owner is gone.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.byte_len) };
        debug_assert_eq!(unmapped, Ok(()), "a mapping of ours can be taken back");
    }
}

fn refused(byte_len: usize, error: rustix::io::Errno) -> Error {
    Error::InvalidArgument(format!("no shared memory for a slot of {byte_len} bytes: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::ALIGNMENT;

    #[test]
    fn two_mappings_see_the_same_bytes() {
        let (ours, file) = Mapping::create(10_000).unwrap();
        let theirs = Mapping::open(file.as_fd(), 10_000).unwrap();
        drop(file);
        assert_eq!(ours.as_ptr().addr() % ALIGNMENT, 0);
        assert_ne!(ours.as_ptr(), theirs.as_ptr());
        // SAFETY: byte 9,999 of 10,000, and nobody else uses the mapping.
        unsafe { ours.as_ptr().wrapping_add(9_999).write(7) };
        // SAFETY: as above.
        assert_eq!(unsafe { theirs.as_ptr().wrapping_add(9_999).read() }, 7);
    }

    #[test]
    fn emptied_bytes_are_zero_in_both_mappings() {
        let (mut ours, file) = Mapping::create(10_000).unwrap();
        let theirs = Mapping::open(file.as_fd(), 10_000).unwrap();
        // SAFETY: a byte of the mapping, which nobody else uses.
        unsafe { ours.as_ptr().wrapping_add(9_999).write(7) };
        ours.empty();
        // SAFETY: as above.
        assert_eq!(unsafe { theirs.as_ptr().wrapping_add(9_999).read() }, 0);
    }

    #[test]
    fn file_of_another_length_is_refused() {
        let (_, file) = Mapping::create(10_000).unwrap();
        let told = Mapping::open(file.as_fd(), 20_000).unwrap_err().to_string();
        assert!(told.contains("20000 bytes of fixed length, got 10000"), "{told}");
    }

    #[test]
    fn file_that_can_be_cut_is_refused() {
        let file = rustix::fs::memfd_create("loose", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 4096).unwrap();
        assert!(Mapping::open(file.as_fd(), 4096).is_err());
    }
}
