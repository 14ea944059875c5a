//! Memory that slices cannot describe: uninitialised memory, and memory that others may write.
//!
//! A slice promises that its bytes are initialised and that nobody else writes them. The memory of
//! a new `bytes` object is not initialised, and another thread of the user may write an array
//! while it is copied. So these types copy by address, and no slice is created of memory that has
//! not been filled.
#![expect(
    unsafe_code,
    reason = "memory without the promises of a slice is an address and a length"
)]

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::{ptr, slice};

/// Initialised bytes that another thread may write while they are copied, such as an array that the
/// user holds: the copy then mixes old and new bytes.
#[derive(Clone, Copy, Debug)]
pub struct Bytes<'a> {
    start: *const u8,
    len: usize,
    memory: PhantomData<&'a [u8]>,
}

// SAFETY: the caller of `new` promised that the memory is valid for `'a`, on any thread.
unsafe impl Send for Bytes<'_> {}
// SAFETY: it is `Copy`, so sharing it is sending it.
unsafe impl Sync for Bytes<'_> {}

impl Bytes<'_> {
    /// The `len` bytes from `start` on.
    ///
    /// # Safety
    ///
    /// They are initialised and valid for the lifetime. They are written meanwhile only if a user
    /// breaks the rule in ARCHITECTURE.md; then the only guarantee is what the processor does: a
    /// copy reads each byte before or after it is written.
    pub unsafe fn new(start: *const u8, len: usize) -> Self {
        Self { start, len, memory: PhantomData }
    }

    /// The number of bytes.
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The bytes in `range`.
    ///
    /// # Panics
    ///
    /// If `range` exceeds the length.
    #[must_use]
    pub fn slice(self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "range {range:?} exceeds {} bytes",
            self.len
        );
        let start = self.start.wrapping_add(range.start);
        Self { start, len: range.len(), memory: PhantomData }
    }

    /// Copies them to `out`, which may overlap them.
    ///
    /// # Panics
    ///
    /// If the lengths differ.
    pub fn copy_to(self, out: &mut Destination<'_>) {
        assert_eq!(self.len, out.len, "source and destination must have the same length");
        // SAFETY: both are `len` bytes long, as promised to their `new`.
        unsafe { ptr::copy(self.start, out.start, self.len) }
    }
}

impl<'a> From<&'a [u8]> for Bytes<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self { start: bytes.as_ptr(), len: bytes.len(), memory: PhantomData }
    }
}

/// Memory to copy bytes to, initialised or not.
#[derive(Debug)]
pub struct Destination<'a> {
    start: *mut u8,
    len: usize,
    memory: PhantomData<&'a mut [MaybeUninit<u8>]>,
}

// SAFETY: as for `Bytes`; a `Destination` is the only one for its memory.
unsafe impl Send for Destination<'_> {}

impl Destination<'_> {
    /// The `len` bytes of memory from `start` on.
    ///
    /// # Safety
    ///
    /// The memory is valid for the lifetime, and no slice of it is in use meanwhile.
    pub unsafe fn new(start: *mut u8, len: usize) -> Self {
        Self { start, len, memory: PhantomData }
    }

    /// The size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the size is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Splits off the first `len` bytes.
    ///
    /// # Panics
    ///
    /// If it is shorter.
    #[must_use]
    pub fn take_front(&mut self, len: usize) -> Self {
        assert!(len <= self.len, "{len} bytes exceed the {} that are left", self.len);
        let front = Self { start: self.start, len, memory: PhantomData };
        self.start = self.start.wrapping_add(len);
        self.len -= len;
        front
    }
}

impl<'a> From<&'a mut [u8]> for Destination<'a> {
    fn from(memory: &'a mut [u8]) -> Self {
        // Only initialised bytes are copied to a `Destination`, so the slice stays initialised.
        Self { start: memory.as_mut_ptr(), len: memory.len(), memory: PhantomData }
    }
}

/// Copies `bytes` to `memory` and returns it as initialised.
///
/// # Panics
///
/// If the lengths differ.
pub fn filled<'a>(memory: &'a mut [MaybeUninit<u8>], bytes: &[u8]) -> &'a mut [u8] {
    assert_eq!(bytes.len(), memory.len(), "source and destination must have the same length");
    // SAFETY: the lengths are equal, and `memory` is borrowed exclusively.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), memory.as_mut_ptr().cast(), bytes.len()) };
    // SAFETY: all of it has just been written.
    unsafe { initialised(memory) }
}

/// `memory` as initialised bytes.
///
/// # Safety
///
/// All of it has been written.
pub(crate) unsafe fn initialised(memory: &mut [MaybeUninit<u8>]) -> &mut [u8] {
    // SAFETY: a byte has the layout of a `MaybeUninit` of one, and is initialised, as the caller
    // promises.
    unsafe { slice::from_raw_parts_mut(memory.as_mut_ptr().cast(), memory.len()) }
}

/// A buffer, laid out like the system's `iovec`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct IoVec {
    start: *mut MaybeUninit<u8>,
    len: usize,
}

/// Buffers, initialised or not, that are filled in order.
#[derive(Debug)]
pub struct ScatterBuffers<'a> {
    buffers: Vec<IoVec>,
    byte_len: usize,
    num_filled: usize,
    memory: PhantomData<&'a mut [MaybeUninit<u8>]>,
}

impl<'a> ScatterBuffers<'a> {
    /// No buffers yet; about `count` will be added.
    pub(crate) fn with_capacity(count: usize) -> Self {
        let buffers = Vec::with_capacity(count);
        Self { buffers, byte_len: 0, num_filled: 0, memory: PhantomData }
    }

    /// Adds a buffer that may be uninitialised.
    pub(crate) fn push(&mut self, buffer: &'a mut [MaybeUninit<u8>]) {
        self.byte_len += buffer.len();
        self.buffers.push(IoVec { start: buffer.as_mut_ptr(), len: buffer.len() });
    }

    /// Adds an initialised buffer.
    pub(crate) fn push_initialised(&mut self, buffer: &'a mut [u8]) {
        self.byte_len += buffer.len();
        // Only initialised bytes are written to it.
        self.buffers.push(IoVec { start: buffer.as_mut_ptr().cast(), len: buffer.len() });
    }

    /// The total size of the buffers in bytes.
    pub fn byte_len(&self) -> usize {
        self.byte_len
    }

    /// Whether all buffers are filled.
    pub(crate) fn are_full(&self) -> bool {
        self.num_filled == self.byte_len
    }

    /// Copies `bytes` to the next bytes that are not filled.
    ///
    /// # Panics
    ///
    /// If `bytes` is longer than what is left.
    pub fn fill(&mut self, mut bytes: &[u8]) {
        assert!(bytes.len() <= self.byte_len - self.num_filled, "more bytes than the buffers hold");
        let mut filled = self.num_filled;
        self.num_filled += bytes.len();
        for buffer in &self.buffers {
            let skipped = filled.min(buffer.len);
            filled -= skipped;
            let (now, later) = bytes.split_at(bytes.len().min(buffer.len - skipped));
            let start = buffer.start.wrapping_add(skipped).cast();
            // SAFETY: `now` is no longer than what is left of the buffer, which is borrowed
            // exclusively for `'a`, so `now` does not overlap it.
            unsafe { ptr::copy_nonoverlapping(now.as_ptr(), start, now.len()) };
            bytes = later;
        }
    }

    /// The buffers, for a system call that fills them in order. None may be filled yet.
    #[cfg(unix)]
    pub(crate) fn unfilled(&mut self) -> &mut [IoVec] {
        assert_eq!(self.num_filled, 0, "the buffers are filled by one call");
        &mut self.buffers
    }

    /// Records that the next `len` bytes are filled.
    ///
    /// # Safety
    ///
    /// They are initialised.
    #[cfg(unix)]
    pub(crate) unsafe fn advance(&mut self, len: usize) {
        self.num_filled += len;
        assert!(self.num_filled <= self.byte_len, "more bytes than the buffers hold");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_bytes_are_copied_as_they_were() {
        let mut memory: Vec<u8> = (0..100).collect();
        let start = memory.as_mut_ptr();
        // SAFETY: 90 of 100 bytes, which outlive the copy.
        let bytes = unsafe { Bytes::new(start, 90) };
        // SAFETY: 90 bytes from the tenth on, and `memory` is not used meanwhile.
        let mut out = unsafe { Destination::new(start.wrapping_add(10), 90) };
        bytes.slice(0..50).copy_to(&mut out.take_front(50));
        assert_eq!((bytes.slice(0..40).len(), out.len()), (40, 40));
        assert_eq!(memory, (0..10).chain(0..50).chain(60..100).collect::<Vec<u8>>());
    }

    #[test]
    fn buffers_are_filled_in_order_by_bytes_of_any_lengths() {
        let mut memory = [const { MaybeUninit::uninit() }; 10];
        let mut head = [0; 3];
        let (first, second) = memory.split_at_mut(4);
        let mut buffers = ScatterBuffers::with_capacity(4);
        buffers.push(first);
        buffers.push_initialised(&mut head);
        buffers.push(&mut []);
        buffers.push(second);
        for bytes in [&[1, 2, 3, 4, 5][..], &[], &[6], &[7, 8, 9, 10, 11, 12, 13]] {
            assert!(!buffers.are_full());
            buffers.fill(bytes);
        }
        assert!(buffers.are_full() && buffers.byte_len() == 13);
        // SAFETY: all of `memory` is filled.
        assert_eq!(unsafe { initialised(&mut memory) }, [1, 2, 3, 4, 8, 9, 10, 11, 12, 13]);
        assert_eq!(head, [5, 6, 7]);
    }
}
