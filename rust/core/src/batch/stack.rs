//! Stacking: equal-length rows of bytes copied into consecutive memory.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::bytes::{Bytes, Destination};

static COPIED: AtomicU64 = AtomicU64::new(0);

/// Bytes that [`copy_rows`] has copied in this process.
pub fn copied_bytes() -> u64 {
    COPIED.load(Ordering::Relaxed)
}

/// Copies `rows`, each of `row_len` bytes, into consecutive rows of `out`.
///
/// # Panics
///
/// If a row is not `row_len` bytes long, or `out` is not as long as all rows together.
pub fn copy_rows<'a>(rows: &[Bytes<'_>], row_len: usize, out: impl Into<Destination<'a>>) {
    let mut out = out.into();
    assert!(rows.iter().all(|row| row.len() == row_len), "a row differs in length");
    assert_eq!(Some(out.len()), rows.len().checked_mul(row_len), "rows do not fill `out`");
    COPIED.fetch_add(out.len() as u64, Ordering::Relaxed);
    for row in rows {
        row.copy_to(&mut out.take_front(row_len));
    }
}
