//! Reuses buffers: writing to pages that are already mapped costs a fraction of writing to new ones.
//!
//! A thread that finds another one here goes without: with many cores, to sleep costs more than a buffer.

use std::sync::Mutex;

use crate::process::PerProcess;

/// How many buffers the pool holds.
const MAX_BUFFERS: usize = 16;
/// Larger buffers are freed.
const MAX_BUFFER_LEN: usize = 4 << 20;

static POOL: PerProcess<Mutex<Vec<Vec<u8>>>> = PerProcess::new(|| Mutex::new(Vec::new()));

/// An empty buffer.
pub(crate) fn take() -> Vec<u8> {
    POOL.get().try_lock().ok().and_then(|mut pool| pool.pop()).unwrap_or_default()
}

/// Returns `buffer` to the pool, or frees it if it is too large, or the pool is full or in use.
pub(crate) fn put(mut buffer: Vec<u8>) {
    if buffer.capacity() == 0 || buffer.capacity() > MAX_BUFFER_LEN {
        return;
    }
    buffer.clear();
    if let Ok(mut pool) = POOL.get().try_lock()
        && pool.len() < MAX_BUFFERS
    {
        pool.push(buffer);
    }
}
