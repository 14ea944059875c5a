//! Memory that two processes see: anonymous files, mapped.
//!
//! They have no name in any directory, so nothing is left behind when the last process that maps
//! them ends, however it ends, and no limit of a file system applies.
#![expect(unsafe_code, reason = "two processes see the same bytes only through a mapping")]

use std::io;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use crate::platform::{self, BorrowedFile, OwnedFile};
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
    pub fn create(byte_len: usize) -> Result<(Self, OwnedFile)> {
        let file = file("grainmill-slot", byte_len)?;
        Ok((Self::of(platform::borrowed(&file), byte_len)?, file))
    }

    /// The bytes of a file made by [`Mapping::create`], in any process. The file may be closed
    /// afterwards.
    ///
    /// # Errors
    ///
    /// If the file is not `byte_len` bytes long or can still be cut, or cannot be mapped.
    pub fn open(file: BorrowedFile<'_>, byte_len: usize) -> Result<Self> {
        let (found, fits) = platform::fixed_len(file, byte_len as u64)
            .map_err(|error| refused(byte_len, &error))?;
        if !fits {
            return Err(Error::InvalidArgument(format!(
                "shared memory must be {byte_len} bytes of fixed length, got {found}"
            )));
        }
        Self::of(file, byte_len)
    }

    fn of(file: BorrowedFile<'_>, byte_len: usize) -> Result<Self> {
        let start = platform::mapped(file, byte_len).map_err(|error| refused(byte_len, &error))?;
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

    /// Gives the pages back where the system can; what they held is lost to every process.
    pub fn empty(&mut self) {
        // SAFETY: `of` mapped exactly these bytes, and `&mut self` keeps other users here away.
        unsafe { platform::give_back(self.start, self.byte_len) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `of` mapped exactly these bytes, and their owner is gone.
        let unmapped = unsafe { platform::unmapped(self.start, self.byte_len) };
        debug_assert!(unmapped.is_ok(), "a mapping of ours can be taken back: {unmapped:?}");
    }
}

/// Numbers that several processes see, all of which use them as atomic ones only.
#[derive(Debug)]
pub struct Words {
    mapping: Mapping,
    len: usize,
}

impl Words {
    /// A new file of `len` zeros and its mapping.
    ///
    /// # Errors
    ///
    /// As for [`Mapping::create`].
    pub fn create(len: usize) -> Result<(Self, OwnedFile)> {
        let file = Self::file(len)?;
        Ok((Self::open(platform::borrowed(&file), len)?, file))
    }

    /// A new file of `len` zeros, for others to open.
    ///
    /// # Errors
    ///
    /// If the system has no memory or no descriptor left for it.
    pub fn file(len: usize) -> Result<OwnedFile> {
        file("grainmill-words", len * size_of::<AtomicU64>())
    }

    /// The numbers of a file made by [`Words::create`], in any process.
    ///
    /// # Errors
    ///
    /// As for [`Mapping::open`].
    pub fn open(file: BorrowedFile<'_>, len: usize) -> Result<Self> {
        Ok(Self { mapping: Mapping::open(file, len * size_of::<AtomicU64>())?, len })
    }
}

impl Deref for Words {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: the mapping has so many words, begins at a page, lives as long as `self` and is
        // given out in no other way; the file it is of was made for this, in `create`.
        unsafe { std::slice::from_raw_parts(self.mapping.as_ptr().cast(), self.len) }
    }
}

fn file(name: &str, byte_len: usize) -> Result<OwnedFile> {
    platform::shared_file(name, byte_len as u64).map_err(|error| refused(byte_len, &error))
}

fn refused(byte_len: usize, error: &io::Error) -> Error {
    Error::InvalidArgument(format!("no shared memory for a slot of {byte_len} bytes: {error}"))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn two_mappings_see_the_same_bytes() {
        let (ours, file) = Mapping::create(10_000).unwrap();
        let theirs = Mapping::open(file.as_fd(), 10_000).unwrap();
        drop(file);
        assert_eq!(ours.as_ptr().addr() % 4096, 0);
        assert_ne!(ours.as_ptr(), theirs.as_ptr());
        // SAFETY: byte 9,999 of 10,000, and nobody else uses the mapping.
        unsafe { ours.as_ptr().wrapping_add(9_999).write(7) };
        // SAFETY: as above.
        assert_eq!(unsafe { theirs.as_ptr().wrapping_add(9_999).read() }, 7);
    }

    #[cfg(all(target_os = "linux", not(grainmill_portable)))]
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
}
