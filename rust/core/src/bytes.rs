//! Bytes that slices cannot describe: memory that is not initialised yet, and memory of others.
//!
//! A slice promises that its bytes are initialised and that nobody else writes them. The memory of
//! a new `bytes` object is not initialised, and another thread of the user's may write an array
//! while it is copied. So what is here is copied by address, and never seen as a slice before it
//! has been filled.
#![expect(
    unsafe_code,
    reason = "memory without the promises of a slice is an address and a length"
)]

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::{ptr, slice};

/// Initialised bytes that somebody else may write while they are copied, as those of arrays that a
/// user holds: the copy then has some old bytes and some new ones.
#[derive(Clone, Copy, Debug)]
pub struct Bytes<'a> {
    start: *const u8,
    len: usize,
    memory: PhantomData<&'a [u8]>,
}

// SAFETY: whoever made it promised that the memory is there for `'a`, on whatever thread.
unsafe impl Send for Bytes<'_> {}
// SAFETY: it is `Copy`, so to share it is to send it.
unsafe impl Sync for Bytes<'_> {}

impl Bytes<'_> {
    /// `len` bytes from `start` on.
    ///
    /// # Safety
    ///
    /// They are initialised and stay where they are for the lifetime. They may be written
    /// meanwhile only while a user breaks the promise that is asked of them (see ARCHITECTURE.md),
    /// for which nothing can be said but what the processor does: a copy takes each byte before or
    /// after it is written.
    pub unsafe fn new(start: *const u8, len: usize) -> Self {
        Self { start, len, memory: PhantomData }
    }

    /// How many there are.
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Those in `range`.
    ///
    /// # Panics
    ///
    /// If there are not as many.
    #[must_use]
    pub fn part(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "a part beyond the end");
        let start = self.start.wrapping_add(range.start);
        Self { start, len: range.len(), memory: PhantomData }
    }

    /// Copies them to `out`, which may overlap them.
    ///
    /// # Panics
    ///
    /// If `out` is not as long.
    pub fn copy_to(self, out: &mut Destination<'_>) {
        assert_eq!(self.len, out.len, "as many bytes as there is room for");
        // SAFETY: both are `len` bytes long, as those promised who made them.
        unsafe { ptr::copy(self.start, out.start, self.len) }
    }
}

impl<'a> From<&'a [u8]> for Bytes<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self { start: bytes.as_ptr(), len: bytes.len(), memory: PhantomData }
    }
}

/// Memory that bytes are copied to, initialised or not.
#[derive(Debug)]
pub struct Destination<'a> {
    start: *mut u8,
    len: usize,
    memory: PhantomData<&'a mut [MaybeUninit<u8>]>,
}

// SAFETY: as for `Bytes`; there is one `Destination` for its memory.
unsafe impl Send for Destination<'_> {}

impl Destination<'_> {
    /// Room for `len` bytes from `start` on.
    ///
    /// # Safety
    ///
    /// The memory stays where it is for the lifetime, and no slice of it is in use meanwhile.
    pub unsafe fn new(start: *mut u8, len: usize) -> Self {
        Self { start, len, memory: PhantomData }
    }

    /// For how many bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether for none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first `len` bytes of the room, which is left without them.
    ///
    /// # Panics
    ///
    /// If there are not as many.
    #[must_use]
    pub fn take_front(&mut self, len: usize) -> Self {
        assert!(len <= self.len, "a part beyond the end");
        let front = Self { start: self.start, len, memory: PhantomData };
        self.start = self.start.wrapping_add(len);
        self.len -= len;
        front
    }
}

impl<'a> From<&'a mut [u8]> for Destination<'a> {
    fn from(room: &'a mut [u8]) -> Self {
        // A `Destination` is only ever filled with initialised bytes, so the slice is whole afterwards.
        Self { start: room.as_mut_ptr(), len: room.len(), memory: PhantomData }
    }
}

/// Copies `bytes` to `room`, which is initialised then.
///
/// # Panics
///
/// If `room` is not as long.
pub fn filled<'a>(room: &'a mut [MaybeUninit<u8>], bytes: &[u8]) -> &'a mut [u8] {
    assert_eq!(bytes.len(), room.len(), "as many bytes as there is room for");
    // SAFETY: both are as long, and no other reference leads into `room`.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), room.as_mut_ptr().cast(), bytes.len()) };
    // SAFETY: all of it has just been written.
    unsafe { initialised(room) }
}

/// `room` as the bytes that were written there.
///
/// # Safety
///
/// All of it has been written.
pub(crate) unsafe fn initialised(room: &mut [MaybeUninit<u8>]) -> &mut [u8] {
    // SAFETY: a byte has the layout of a `MaybeUninit` of one, and is initialised, as the caller
    // promises.
    unsafe { slice::from_raw_parts_mut(room.as_mut_ptr().cast(), room.len()) }
}

/// A piece of memory, laid out as the systems' `iovec`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct IoVec {
    start: *mut MaybeUninit<u8>,
    len: usize,
}

/// Pieces of memory, initialised or not, that are filled one after another.
#[derive(Debug)]
pub struct ScatterBuffers<'a> {
    all: Vec<IoVec>,
    byte_len: usize,
    num_filled: usize,
    memory: PhantomData<&'a mut [MaybeUninit<u8>]>,
}

impl<'a> ScatterBuffers<'a> {
    /// None yet; about `count` will be added.
    pub(crate) fn with_capacity(count: usize) -> Self {
        let all = Vec::with_capacity(count);
        Self { all, byte_len: 0, num_filled: 0, memory: PhantomData }
    }

    /// Adds a piece that may not be initialised.
    pub(crate) fn push(&mut self, piece: &'a mut [MaybeUninit<u8>]) {
        self.byte_len += piece.len();
        self.all.push(IoVec { start: piece.as_mut_ptr(), len: piece.len() });
    }

    /// Adds a piece.
    pub(crate) fn push_initialised(&mut self, piece: &'a mut [u8]) {
        self.byte_len += piece.len();
        // Only initialised bytes are written there.
        self.all.push(IoVec { start: piece.as_mut_ptr().cast(), len: piece.len() });
    }

    /// How many bytes go into all of them.
    pub fn byte_len(&self) -> usize {
        self.byte_len
    }

    /// Whether all of them are filled.
    pub(crate) fn are_full(&self) -> bool {
        self.num_filled == self.byte_len
    }

    /// Fills the next bytes with `bytes`.
    ///
    /// # Panics
    ///
    /// If that is more than there is room for.
    pub fn fill(&mut self, mut bytes: &[u8]) {
        assert!(bytes.len() <= self.byte_len - self.num_filled, "more bytes than room");
        let mut filled = self.num_filled;
        self.num_filled += bytes.len();
        for piece in &self.all {
            let skipped = filled.min(piece.len);
            filled -= skipped;
            let (now, later) = bytes.split_at(bytes.len().min(piece.len - skipped));
            let start = piece.start.wrapping_add(skipped).cast();
            // SAFETY: `now` is no longer than what is left of the piece, to which nothing else
            // leads for `'a`, so not `now` either.
            unsafe { ptr::copy_nonoverlapping(now.as_ptr(), start, now.len()) };
            bytes = later;
        }
    }

    /// The pieces, for a system that fills them from the first one on. None is filled yet.
    #[cfg(unix)]
    pub(crate) fn unfilled(&mut self) -> &mut [IoVec] {
        assert_eq!(self.num_filled, 0, "pieces are filled by one call");
        &mut self.all
    }

    /// Notes that the next `len` bytes are filled.
    ///
    /// # Safety
    ///
    /// They are.
    #[cfg(unix)]
    pub(crate) unsafe fn note_filled(&mut self, len: usize) {
        self.num_filled += len;
        assert!(self.num_filled <= self.byte_len, "more bytes than room");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_bytes_are_copied_as_they_were() {
        let mut memory: Vec<u8> = (0..100).collect();
        let start = memory.as_mut_ptr();
        // SAFETY: 90 of 100 bytes, which stay until the end.
        let bytes = unsafe { Bytes::new(start, 90) };
        // SAFETY: 90 bytes from the tenth on, and `memory` is not used meanwhile.
        let mut room = unsafe { Destination::new(start.wrapping_add(10), 90) };
        bytes.part(0..50).copy_to(&mut room.take_front(50));
        assert_eq!((bytes.part(0..40).len(), room.len()), (40, 40));
        assert_eq!(memory, (0..10).chain(0..50).chain(60..100).collect::<Vec<u8>>());
    }

    #[test]
    fn pieces_are_filled_one_after_another_however_their_bytes_come() {
        let mut room = [const { MaybeUninit::uninit() }; 10];
        let mut head = [0; 3];
        let (first, second) = room.split_at_mut(4);
        let mut pieces = ScatterBuffers::with_capacity(4);
        pieces.push(first);
        pieces.push_initialised(&mut head);
        pieces.push(&mut []);
        pieces.push(second);
        for bytes in [&[1, 2, 3, 4, 5][..], &[], &[6], &[7, 8, 9, 10, 11, 12, 13]] {
            assert!(!pieces.are_full());
            pieces.fill(bytes);
        }
        assert!(pieces.are_full() && pieces.byte_len() == 13);
        // SAFETY: both pieces of `room` are filled.
        assert_eq!(unsafe { initialised(&mut room) }, [1, 2, 3, 4, 8, 9, 10, 11, 12, 13]);
        assert_eq!(head, [5, 6, 7]);
    }
}
