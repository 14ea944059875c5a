//! Memory that the compiler cannot say whose it is: of lent slots, and lent to readers.
#![expect(unsafe_code, reason = "a lent slot gives out a bare pointer only")]

use std::mem::MaybeUninit;

use grainmill_core::batch::BorrowedSlot;

/// Whether every byte of `lent` is `byte`.
pub(crate) fn all_are(lent: &BorrowedSlot, byte: u8) -> bool {
    // SAFETY: `lent` keeps this many bytes mapped, and nobody writes what is lent; that this is so
    // is what these tests look for, by other means.
    let bytes = unsafe { std::slice::from_raw_parts(lent.as_ptr(), lent.byte_len()) };
    bytes.iter().all(|&found| found == byte)
}

/// Memory that a reader writes while its owner waits.
#[derive(Debug)]
pub(crate) struct Borrowed {
    start: *mut u8,
    byte_len: usize,
}

// SAFETY: its owner touches the memory again only when `Pending` says that nobody writes it, which
// is what the tests look for.
unsafe impl Send for Borrowed {}

impl AsMut<[MaybeUninit<u8>]> for Borrowed {
    fn as_mut(&mut self) -> &mut [MaybeUninit<u8>] {
        // SAFETY: `borrowed` made it of this many bytes, which the owner keeps.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast(), self.byte_len) }
    }
}

/// `memory` as pieces of `byte_len` bytes; the caller keeps it, untouched, until they are written.
pub(crate) fn borrowed(memory: &mut [u8], byte_len: usize) -> Vec<Option<Borrowed>> {
    let pieces = memory.chunks_exact_mut(byte_len);
    pieces.map(|piece| Some(Borrowed { start: piece.as_mut_ptr(), byte_len })).collect()
}
