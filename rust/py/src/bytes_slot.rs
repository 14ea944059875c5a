//! `bytes` objects that the engine fills after their allocation, which saves a copy of each record.
#![expect(
    unsafe_code,
    reason = "Python has no safe way to allocate a `bytes` before its content is known"
)]

use std::mem::MaybeUninit;
use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// The memory, at first uninitialised, of a `bytes` object that is not shared yet.
#[derive(Debug)]
pub(crate) struct BytesSlot {
    start: *mut MaybeUninit<u8>,
    len: usize,
}

// SAFETY: a slot is the only access to its memory until its `bytes` is returned to Python. `object` in
// `records.rs` does that, after reading has finished, and only if `Records` reports the record in
// its slot: then all of it has been written. A `bytes` that was not written is freed unread.
unsafe impl Send for BytesSlot {}

impl AsMut<[MaybeUninit<u8>]> for BytesSlot {
    fn as_mut(&mut self) -> &mut [MaybeUninit<u8>] {
        // SAFETY: `new_slot` allocated `len` bytes at `start`. The `bytes` is alive as long as the
        // slot is used: in the caller's `Preallocated`, in `InFlight`, or in `ABANDONED`.
        unsafe { slice::from_raw_parts_mut(self.start, self.len) }
    }
}

/// Large `bytes` are allocated on the C heap. Until a block of this size has been freed once, glibc
/// maps fresh pages for each and unmaps them when freed, which costs more than reading them;
/// afterwards it retains blocks up to this size, and up to twice this size of free memory.
const RETAINED_LEN: usize = 16 << 20;

/// Makes the C heap retain freed blocks of up to 16 MiB instead of unmapping them, by allocating and
/// freeing such a block without touching it. Elements of a megabyte then cost a quarter.
#[pyfunction]
pub(crate) fn keep_large_blocks() {
    // Not a `Once`: a child forked while it runs would wait for it forever.
    static IS_WARM: AtomicBool = AtomicBool::new(false);
    if !IS_WARM.swap(true, Ordering::Relaxed) {
        drop(std::hint::black_box(Vec::<u8>::with_capacity(RETAINED_LEN)));
    }
}

/// Allocates a `bytes` of `len` bytes, not to be shared yet, and returns it with its memory.
pub(crate) fn new_slot(py: Python<'_>, len: usize) -> PyResult<(Bound<'_, PyBytes>, BytesSlot)> {
    keep_large_blocks();
    let size = ffi::Py_ssize_t::try_from(len)?;
    // SAFETY: a null pointer requests `size` bytes of uninitialised memory.
    let object = unsafe { ffi::PyBytes_FromStringAndSize(std::ptr::null(), size) };
    // SAFETY: the call above returned a new reference, or null with an exception set.
    let object = unsafe { Bound::from_owned_ptr_or_err(py, object) }?.cast_into::<PyBytes>()?;
    // SAFETY: `object` is a `bytes`.
    let start = unsafe { ffi::PyBytes_AsString(object.as_ptr()) };
    Ok((object, BytesSlot { start: start.cast(), len }))
}
