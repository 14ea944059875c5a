//! The limit on what a record may decode to: a few bytes of a file can stand for gigabytes.

use std::sync::atomic::{AtomicU64, Ordering};

use super::format_error::FormatError;

/// How many bytes a record may decode to unless [`set_max_record_bytes`] changes it.
pub const DEFAULT_MAX_RECORD_BYTES: u64 = 256 << 20;
/// What decodes to at most this many times its stored bytes has no limit: large records, and chunks of
/// many records, are compressed to far more than a 64th.
const PLAUSIBLE_RATIO: u64 = 64;

static MAX_RECORD_BYTES: AtomicU64 = AtomicU64::new(DEFAULT_MAX_RECORD_BYTES);

/// Makes this process refuse records, and chunks of records, that decode to more than `byte_len` bytes
/// and to more than 64 times the bytes that are stored. What is not compressed has no limit.
pub fn set_max_record_bytes(byte_len: u64) {
    MAX_RECORD_BYTES.store(byte_len, Ordering::Relaxed);
}

/// How many bytes `stored_len` stored bytes may decode to.
pub fn max_decoded_len(stored_len: u64) -> u64 {
    MAX_RECORD_BYTES.load(Ordering::Relaxed).max(stored_len.saturating_mul(PLAUSIBLE_RATIO))
}

/// Checks what `stored_len` stored bytes state to decode to against [`max_decoded_len`].
///
/// # Errors
/// If it is longer.
pub fn check_decoded_len(decoded_len: u64, stored_len: u64) -> Result<(), FormatError> {
    let max_len = max_decoded_len(stored_len);
    if decoded_len <= max_len {
        return Ok(());
    }
    Err(FormatError::new(format!(
        "states {decoded_len} decoded bytes, expected at most {max_len} of {stored_len} stored ones; if \
         the file is valid, set the environment variable `GRAINMILL_MAX_RECORD_BYTES` to at least \
         {decoded_len}"
    )))
}
