//! The memory of a Brotli decoder: a window of up to 1 GiB, whose length the stream decides.

use brotli::enc::StandardAlloc;
use brotli::{Allocator, SliceWrapper, SliceWrapperMut};

use super::FormatError;
use crate::try_alloc;

/// A Brotli decoder in the middle of its work.
pub(crate) type BrotliState = brotli::BrotliState<WindowMemory, StandardAlloc, StandardAlloc>;

/// A decoder at the begin of a stream.
pub(crate) fn brotli_state() -> BrotliState {
    // `new` and not `new_strict`: windows above 2^24 are allowed in these files.
    BrotliState::new(WindowMemory::default(), StandardAlloc::default(), StandardAlloc::default())
}

/// What is wrong with the stream that `state` has refused to decode further.
#[cold]
pub(crate) fn brotli_problem(state: &BrotliState) -> FormatError {
    match state.alloc_u8.missing {
        0 => FormatError::fixed("brotli stream is damaged"),
        len => FormatError::new(format!("no memory for a brotli window of {len} bytes")),
    }
}

/// Asks for windows in a way that may fail: the usual one ends the process where memory is short.
/// Of a window only what has been decoded takes memory, since nobody has written the rest.
#[derive(Debug, Default)]
pub(crate) struct WindowMemory {
    /// How many bytes it could not get.
    missing: usize,
}

impl Allocator<u8> for WindowMemory {
    type AllocatedMemory = Window;

    fn alloc_cell(&mut self, len: usize) -> Window {
        Window(try_alloc::try_defaults(len, String::new).unwrap_or_else(|_| {
            self.missing = len;
            Vec::new()
        }))
    }

    fn free_cell(&mut self, _: Window) {}
}

/// Memory that is cleared by the system, so that it is there only once it is written.
#[derive(Debug, Default)]
pub(crate) struct Window(Vec<u8>);

impl SliceWrapper<u8> for Window {
    fn slice(&self) -> &[u8] {
        &self.0
    }
}

impl SliceWrapperMut<u8> for Window {
    fn slice_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl std::ops::Index<usize> for Window {
    type Output = u8;

    fn index(&self, at: usize) -> &u8 {
        &self.0[at]
    }
}

impl std::ops::IndexMut<usize> for Window {
    fn index_mut(&mut self, at: usize) -> &mut u8 {
        &mut self.0[at]
    }
}
