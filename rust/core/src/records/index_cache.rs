//! A cache of the offsets in recently read files, with a memory limit for each process.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::offsets::Offsets;
use crate::process::PerProcess;

/// The memory limit in bytes unless [`set_budget`] changes it.
const DEFAULT_BUDGET: usize = 256 << 20;

static NEXT_ID: AtomicU64 = AtomicU64::new(0);
static BUDGET: AtomicUsize = AtomicUsize::new(DEFAULT_BUDGET);
static CACHE: PerProcess<Mutex<IndexCache>> = PerProcess::new(|| Mutex::new(IndexCache::default()));

/// Limits the cached indices of each process to `byte_len` bytes; the least recently used are
/// evicted, and read again when needed. The index of one file may exceed the limit.
pub fn set_budget(byte_len: usize) {
    BUDGET.store(byte_len, Ordering::Relaxed);
}

/// The memory limit in bytes.
pub fn budget() -> usize {
    BUDGET.load(Ordering::Relaxed)
}

/// How many bytes of indices this process has cached.
pub fn cached_bytes() -> usize {
    with_cache(|cache| cache.byte_len)
}

#[derive(Debug, Default)]
struct IndexCache {
    files: HashMap<u64, (Arc<Offsets>, u64)>,
    byte_len: usize,
    clock: u64,
}

fn with_cache<T>(work: impl FnOnce(&mut IndexCache) -> T) -> T {
    work(&mut CACHE.get().lock().unwrap_or_else(PoisonError::into_inner))
}

impl IndexCache {
    fn get(&mut self, file: u64) -> Option<Arc<Offsets>> {
        self.clock += 1;
        let (offsets, last_used) = self.files.get_mut(&file)?;
        *last_used = self.clock;
        Some(Arc::clone(offsets))
    }

    fn insert(&mut self, file: u64, offsets: Arc<Offsets>, budget: usize) {
        self.remove(file);
        let byte_len = offsets.byte_len();
        if self.byte_len + byte_len > budget {
            // An eighth more than needed, since finding the oldest looks at all files.
            self.shrink((budget - budget / 8).saturating_sub(byte_len));
        }
        self.clock += 1;
        self.byte_len += byte_len;
        self.files.insert(file, (offsets, self.clock));
    }

    /// Evicts the least recently used files until at most `byte_len` bytes are left.
    fn shrink(&mut self, byte_len: usize) {
        let mut uses: Vec<(u64, u64)> =
            self.files.iter().map(|(&file, &(_, last_used))| (last_used, file)).collect();
        uses.sort_unstable();
        for (_, file) in uses {
            if self.byte_len <= byte_len {
                return;
            }
            self.remove(file);
        }
    }

    fn remove(&mut self, file: u64) {
        if let Some((offsets, _)) = self.files.remove(&file) {
            self.byte_len -= offsets.byte_len();
        }
    }
}

/// A number for a file whose offsets are to be cached, unique in the process.
pub(crate) fn new_id() -> u64 {
    NEXT_ID.fetch_add(1, Ordering::Relaxed)
}

/// The offsets of `file`, if they are cached.
pub(crate) fn get(file: u64) -> Option<Arc<Offsets>> {
    with_cache(|cache| cache.get(file))
}

/// Caches the offsets of `file`.
pub(crate) fn insert(file: u64, offsets: &Arc<Offsets>) {
    with_cache(|cache| cache.insert(file, Arc::clone(offsets), budget()));
}

/// Removes the offsets of `file`.
pub(crate) fn remove(file: u64) {
    with_cache(|cache| cache.remove(file));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offsets(count: u64) -> Arc<Offsets> {
        let mut offsets = Offsets::default();
        (1..=count).for_each(|offset| offsets.push(offset));
        offsets.shrink();
        Arc::new(offsets)
    }

    #[test]
    fn recently_used_files_stay_within_the_budget() {
        let mut cache = IndexCache::default();
        let byte_len = offsets(1000).byte_len();
        let budget = 16 * byte_len;
        for file in 0..1000 {
            cache.insert(file, offsets(1000), budget);
            assert!(cache.byte_len <= budget);
            assert_eq!(cache.byte_len, cache.files.len() * byte_len);
            assert!(cache.get(0).is_some(), "used each time");
            assert!(cache.get(file).is_some());
        }
        assert!(cache.files.len() >= 12);
        assert!(cache.get(900).is_none());
        cache.insert(2000, offsets(100_000), budget);
        assert_eq!(cache.files.len(), 1, "the index of one file is cached whatever its length");
        cache.remove(2000);
        assert_eq!(cache.byte_len, 0);
    }
}
