//! Reuses buffers: writing to pages that are already mapped costs a fraction of writing to new ones.

use std::sync::Mutex;

use crate::process::PerProcess;

/// How many buffers the pool holds.
const MAX_BUFFERS: usize = 16;
/// Larger buffers are freed.
const MAX_BUFFER_LEN: usize = 4 << 20;

static POOL: PerProcess<Mutex<Vec<Vec<u8>>>> = PerProcess::new(|| Mutex::new(Vec::new()));

/// An empty buffer.
pub(crate) fn take() -> Vec<u8> {
    POOL.lock().pop().unwrap_or_default()
}

/// Returns `buffer` to the pool, or frees it if it is too large or the pool is full.
pub(crate) fn put(mut buffer: Vec<u8>) {
    if buffer.capacity() == 0 || buffer.capacity() > MAX_BUFFER_LEN {
        return;
    }
    buffer.clear();
    let mut pool = POOL.lock();
    if pool.len() < MAX_BUFFERS {
        pool.push(buffer);
    }
}
