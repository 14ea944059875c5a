//! Stacking: equal-length rows of bytes copied side by side.

use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;

use crate::process::PerProcess;

/// From this many bytes in a call on, cold rows are copied by several threads.
const PARALLEL_BYTES: usize = 256 << 10;
/// Copying is bound by memory, which a few threads saturate.
const MAX_THREADS: usize = 4;

static COPIED: AtomicU64 = AtomicU64::new(0);

/// Bytes that [`copy_rows`] copied in this process so far.
pub fn copied_bytes() -> u64 {
    COPIED.load(Ordering::Relaxed)
}

/// Whether the rows to copy were written a moment ago.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Warmth {
    /// They are in the cache of this thread's core, so no other thread would copy them faster.
    Hot,
    /// They come from memory, which one core alone does not saturate.
    Cold,
}

/// Copies `rows`, each of `row_len` bytes, into consecutive rows of `out`.
///
/// Calls that move many cold bytes are shared among threads of the engine's own.
///
/// # Panics
///
/// If a row is not `row_len` bytes long or `out` not as long as all of them.
pub fn copy_rows(rows: &[&[u8]], row_len: usize, out: &mut [u8], warmth: Warmth) {
    assert!(rows.iter().all(|row| row.len() == row_len), "a row differs in length");
    assert_eq!(Some(out.len()), rows.len().checked_mul(row_len), "rows do not fill `out`");
    if row_len == 0 {
        return;
    }
    COPIED.fetch_add(u64::try_from(out.len()).unwrap_or(u64::MAX), Ordering::Relaxed);
    let shared = warmth == Warmth::Cold && out.len() >= PARALLEL_BYTES;
    match shared.then(pool).flatten() {
        Some(pool) => pool.install(|| copy_in_parallel(rows, row_len, out)),
        None => copy_in_turn(rows, row_len, out),
    }
}

fn copy_in_turn(rows: &[&[u8]], row_len: usize, out: &mut [u8]) {
    for (row, place) in rows.iter().zip(out.chunks_exact_mut(row_len)) {
        place.copy_from_slice(row);
    }
}

fn copy_in_parallel(rows: &[&[u8]], row_len: usize, out: &mut [u8]) {
    let rows_per_task = rows.len().div_ceil(rayon::current_num_threads()).max(1);
    let places = out.par_chunks_mut(rows_per_task * row_len);
    places.zip(rows.par_chunks(rows_per_task)).for_each(|(places, rows)| {
        copy_in_turn(rows, row_len, places);
    });
}

/// The threads that copy, or none where the machine has one core.
fn pool() -> Option<&'static rayon::ThreadPool> {
    static POOL: PerProcess<Option<rayon::ThreadPool>> = PerProcess::new(|| {
        let num_threads = std::thread::available_parallelism().map_or(1, usize::from);
        let builder = rayon::ThreadPoolBuilder::new().num_threads(num_threads.min(MAX_THREADS));
        let named = builder.thread_name(|n| format!("grainmill-copy-{n}"));
        named.build().ok().filter(|_| num_threads > 1)
    });
    POOL.get().as_ref()
}
