//! Buffers that have been used before: writing into their pages costs a fraction of fresh ones.

use std::sync::{Mutex, PoisonError};

use crate::process::PerProcess;

/// How many buffers are kept.
const MAX_SPARE: usize = 16;
/// Buffers above this are given back to the system.
const KEPT_LEN: usize = 4 << 20;

static SPARE: PerProcess<Mutex<Vec<Vec<u8>>>> = PerProcess::new(|| Mutex::new(Vec::new()));

/// An empty buffer.
pub(crate) fn take() -> Vec<u8> {
    SPARE.get().lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
}

/// Keeps `buffer` for later, if there is room.
pub(crate) fn keep(mut buffer: Vec<u8>) {
    if buffer.capacity() == 0 || buffer.capacity() > KEPT_LEN {
        return;
    }
    buffer.clear();
    let mut spare = SPARE.get().lock().unwrap_or_else(PoisonError::into_inner);
    if spare.len() < MAX_SPARE {
        spare.push(buffer);
    }
}
