//! Memory behind raw pointers: that of borrowed slots, and memory that readers write into.
#![expect(unsafe_code, reason = "a borrowed slot returns a raw pointer only")]

use std::mem::MaybeUninit;

use grainmill_core::batch::BorrowedSlot;

/// Whether every byte of `slot` is `byte`.
pub(crate) fn all_are(slot: &BorrowedSlot, byte: u8) -> bool {
    // SAFETY: `slot` keeps this many bytes mapped, and nothing writes a borrowed slot, which these
    // tests verify.
    let bytes = unsafe { std::slice::from_raw_parts(slot.as_ptr(), slot.byte_len()) };
    bytes.iter().all(|&found| found == byte)
}

/// Memory that a reader writes into while its owner waits.
#[derive(Debug)]
pub(crate) struct Borrowed {
    start: *mut u8,
    byte_len: usize,
}

// SAFETY: its owner uses the memory again only when `Pending` says that nothing writes into it,
// which is what the tests verify.
unsafe impl Send for Borrowed {}

impl AsMut<[MaybeUninit<u8>]> for Borrowed {
    fn as_mut(&mut self) -> &mut [MaybeUninit<u8>] {
        // SAFETY: `borrowed` created it with this length, and the owner keeps the memory.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast(), self.byte_len) }
    }
}

/// `memory` in chunks of `byte_len` bytes; the caller must not use it until they are written.
pub(crate) fn borrowed(memory: &mut [u8], byte_len: usize) -> Vec<Option<Borrowed>> {
    let chunks = memory.chunks_exact_mut(byte_len);
    chunks.map(|chunk| Some(Borrowed { start: chunk.as_mut_ptr(), byte_len })).collect()
}
