//! `bytes` objects that the engine fills after they have been made, so that records are not copied
//! once more on their way to Python.
#![expect(unsafe_code, reason = "Python has no safe way to make a `bytes` before its content")]

use std::mem::MaybeUninit;
use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// The memory of one `bytes` object that nobody else has seen yet, not initialised at first.
#[derive(Debug)]
pub(crate) struct BytesSlot {
    begin: *mut MaybeUninit<u8>,
    len: usize,
}

// SAFETY: a slot is the only way to its memory until its `bytes` is handed to Python. `object` in
// `records.rs` does that, after reading has ended, and only where `Records` says that the record is
// in its slot: then all of it has been written. A `bytes` that was not written is freed unseen.
unsafe impl Send for BytesSlot {}

impl AsMut<[MaybeUninit<u8>]> for BytesSlot {
    fn as_mut(&mut self) -> &mut [MaybeUninit<u8>] {
        // SAFETY: `new_slot` made `begin` with room for `len` bytes. The `bytes` is kept alive as
        // long as the slot is used: by `Made` in the caller's frame, by `InFlight`, or in
        // `ABANDONED`.
        unsafe { slice::from_raw_parts_mut(self.begin, self.len) }
    }
}

/// Large `bytes` live in memory of the C heap. Until a block this large has been freed once, glibc
/// asks the system for fresh pages for each and gives them back at once, which costs more than the
/// reading; afterwards it keeps blocks up to this size, and twice as much, for the next.
const KEPT_LEN: usize = 16 << 20;

/// Has the C heap keep blocks of up to 16 MiB that are freed, instead of giving their pages back: makes
/// and frees one block without touching it. Elements of a megabyte cost a quarter then.
#[pyfunction]
pub(crate) fn keep_large_blocks() {
    // Not a `Once`: a child that is forked off while it runs would wait for it for ever.
    static IS_WARM: AtomicBool = AtomicBool::new(false);
    if !IS_WARM.swap(true, Ordering::Relaxed) {
        drop(std::hint::black_box(Vec::<u8>::with_capacity(KEPT_LEN)));
    }
}

/// A `bytes` of `len` bytes, not yet to be shown to anybody, and its memory.
pub(crate) fn new_slot(py: Python<'_>, len: usize) -> PyResult<(Bound<'_, PyBytes>, BytesSlot)> {
    keep_large_blocks();
    let size = ffi::Py_ssize_t::try_from(len)?;
    // SAFETY: a null pointer asks for memory that is not initialised, of `size` bytes.
    let object = unsafe { ffi::PyBytes_FromStringAndSize(std::ptr::null(), size) };
    // SAFETY: the call above gave a new reference, or null with an exception set.
    let object = unsafe { Bound::from_owned_ptr_or_err(py, object) }?.cast_into::<PyBytes>()?;
    // SAFETY: `object` is a `bytes`.
    let begin = unsafe { ffi::PyBytes_AsString(object.as_ptr()) };
    Ok((object, BytesSlot { begin: begin.cast(), len }))
}
