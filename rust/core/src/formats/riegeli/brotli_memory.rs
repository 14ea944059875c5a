//! The memory of a Brotli decoder: a window of up to 1 GiB, whose length the stream sets.

use brotli::enc::StandardAlloc;
use brotli::{Allocator, SliceWrapper, SliceWrapperMut};

use super::FormatError;
use crate::try_alloc;

/// A Brotli decoder.
pub(crate) type BrotliState = brotli::BrotliState<WindowMemory, StandardAlloc, StandardAlloc>;

/// A new decoder.
pub(crate) fn brotli_state() -> BrotliState {
    // `new` and not `new_strict`: windows above 2^24 are allowed in these files.
    BrotliState::new(WindowMemory::default(), StandardAlloc::default(), StandardAlloc::default())
}

/// The error for a stream that `state` failed to decode.
#[cold]
pub(crate) fn brotli_problem(state: &BrotliState) -> FormatError {
    match state.alloc_u8.failed_len {
        0 => FormatError::fixed("brotli stream is damaged"),
        len => FormatError::new(format!("no memory for a brotli window of {len} bytes")),
    }
}

/// An allocator of windows that reports failure instead of aborting the process. The system maps a
/// window's pages only when they are written, so a window takes as much as was decoded.
#[derive(Debug, Default)]
pub(crate) struct WindowMemory {
    /// The length of the failed allocation, or 0.
    failed_len: usize,
}

impl Allocator<u8> for WindowMemory {
    type AllocatedMemory = Window;

    fn alloc_cell(&mut self, len: usize) -> Window {
        Window(try_alloc::try_defaults(len, String::new).unwrap_or_else(|_| {
            self.failed_len = len;
            Vec::new()
        }))
    }

    fn free_cell(&mut self, _: Window) {}
}

/// Zeroed memory whose pages are mapped when written.
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
