//! The memory that stored bytes are read into.

use super::format_error::FormatError;

/// Chunks up to this length are read at once; of longer ones the header is read first, so that
/// memory is allocated only if a verified header requires it.
pub(crate) const WHOLE_READ_LEN: u64 = 1 << 20;

/// The first `len` bytes of `raw`, which grows if needed and never shrinks.
pub(crate) fn grow_to(raw: &mut Vec<u8>, len: u64) -> Result<&mut [u8], FormatError> {
    let short = || FormatError::new(format!("no memory for {len} bytes"));
    let len = usize::try_from(len).map_err(|_| short())?;
    if raw.len() < len {
        raw.try_reserve_exact(len - raw.len()).map_err(|_| short())?;
        raw.resize(len, 0);
    }
    Ok(&mut raw[..len])
}
