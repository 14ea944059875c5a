//! Memory shared between processes: mapped anonymous files.
//!
//! They have no name in any directory, so nothing is left behind when the last process that maps
//! them exits or crashes, and no limit of a file system applies.
#![expect(unsafe_code, reason = "processes share memory only through a mapping")]

use std::io;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use crate::platform::{self, BorrowedFile, OwnedFile};
use crate::{Error, Result};

/// A mapped anonymous file, readable and writable by every process that maps it.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    byte_len: usize,
}

// SAFETY: the mapping belongs to this value alone and is tied to no thread.
unsafe impl Send for Mapping {}
// SAFETY: a shared reference returns a raw pointer only.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// A new file of `byte_len` zero bytes and its mapping. The file cannot be resized, so that no
    /// process can truncate it while another reads it.
    ///
    /// # Errors
    ///
    /// If the system is out of memory or file descriptors.
    pub fn create(byte_len: usize) -> Result<(Self, OwnedFile)> {
        let file = file("grainmill-slot", byte_len)?;
        Ok((Self::map(platform::borrowed(&file), byte_len)?, file))
    }

    /// Maps a file created by [`Mapping::create`] in any process. It may be closed afterwards.
    ///
    /// # Errors
    ///
    /// If the file is not `byte_len` bytes long, can be truncated, or cannot be mapped.
    pub fn open(file: BorrowedFile<'_>, byte_len: usize) -> Result<Self> {
        let (found, fits) = platform::fixed_len(file, byte_len as u64)
            .map_err(|error| shared_memory_error(byte_len, &error))?;
        if !fits {
            return Err(Error::InvalidArgument(format!(
                "shared memory must be {byte_len} bytes of fixed length, got {found}"
            )));
        }
        Self::map(file, byte_len)
    }

    fn map(file: BorrowedFile<'_>, byte_len: usize) -> Result<Self> {
        let start = platform::map_file(file, byte_len)
            .map_err(|error| shared_memory_error(byte_len, &error))?;
        Ok(Self { start, byte_len })
    }

    /// The length in bytes.
    pub fn byte_len(&self) -> usize {
        self.byte_len
    }

    /// The first byte, which starts a page.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Frees the pages, if the system supports it; their contents are lost in every process.
    pub fn empty(&mut self) {
        // SAFETY: `map` mapped exactly these bytes, and `&mut self` excludes other users here.
        unsafe { platform::discard_pages(self.start, self.byte_len) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `map` mapped exactly these bytes, and their owner is being dropped.
        let unmapped = unsafe { platform::unmap(self.start, self.byte_len) };
        debug_assert!(unmapped.is_ok(), "our own mapping cannot be unmapped: {unmapped:?}");
    }
}

/// Atomic integers shared between processes, all of which use them as atomics only.
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

    /// A new file of `len` zeros, to be opened with [`Words::open`].
    ///
    /// # Errors
    ///
    /// If the system is out of memory or file descriptors.
    pub fn file(len: usize) -> Result<OwnedFile> {
        file("grainmill-words", len * size_of::<AtomicU64>())
    }

    /// Maps a file created by [`Words::create`] or [`Words::file`] in any process.
    ///
    /// # Errors
    ///
    /// As for [`Mapping::open`].
    pub fn open(file: BorrowedFile<'_>, len: usize) -> Result<Self> {
        Ok(Self { mapping: Mapping::open(file, len * size_of::<AtomicU64>())?, len })
    }

    /// `len` words from `at` on, if there are as many.
    pub(crate) fn part(&self, at: usize, len: usize) -> Option<&[AtomicU64]> {
        self.get(at..at.checked_add(len)?)
    }
}

impl Deref for Words {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: the mapping has `len` words, starts at a page boundary, lives as long as `self`
        // and is accessible only here; its file was created for this by `Words::file`.
        unsafe { std::slice::from_raw_parts(self.mapping.as_ptr().cast(), self.len) }
    }
}

fn file(name: &str, byte_len: usize) -> Result<OwnedFile> {
    platform::shared_file(name, byte_len as u64)
        .map_err(|error| shared_memory_error(byte_len, &error))
}

fn shared_memory_error(byte_len: usize, error: &io::Error) -> Error {
    Error::InvalidArgument(format!(
        "cannot create or map {byte_len} bytes of shared memory: {error}"
    ))
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
        // SAFETY: byte 9,999 of 10,000, and nothing else uses the mapping.
        unsafe { ours.as_ptr().wrapping_add(9_999).write(7) };
        // SAFETY: as above.
        assert_eq!(unsafe { theirs.as_ptr().wrapping_add(9_999).read() }, 7);
    }

    #[cfg(all(target_os = "linux", not(feature = "portable")))]
    #[test]
    fn emptied_bytes_are_zero_in_both_mappings() {
        let (mut ours, file) = Mapping::create(10_000).unwrap();
        let theirs = Mapping::open(file.as_fd(), 10_000).unwrap();
        // SAFETY: a byte of the mapping, which nothing else uses.
        unsafe { ours.as_ptr().wrapping_add(9_999).write(7) };
        ours.empty();
        // SAFETY: as above.
        assert_eq!(unsafe { theirs.as_ptr().wrapping_add(9_999).read() }, 0);
    }

    #[test]
    fn file_of_another_length_is_refused() {
        let (_, file) = Mapping::create(10_000).unwrap();
        let error = Mapping::open(file.as_fd(), 20_000).unwrap_err().to_string();
        assert!(error.contains("20000 bytes of fixed length, got 10000"), "{error}");
    }
}
