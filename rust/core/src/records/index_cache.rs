//! The offsets in files that are open, with a memory limit for each process.
//!
//! Those of the least recently used files are moved to a temporary file, where looking one up takes a
//! microsecond; reading an index again takes milliseconds. Where there is no place for them, they are
//! dropped.

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

/// Limits the indices that each process has in memory to `byte_len` bytes, and 16 times as many in
/// temporary files.
pub fn set_budget(byte_len: usize) {
    BUDGET.store(byte_len, Ordering::Relaxed);
    evict(with_cache(|cache| cache.leaving(byte_len)));
}

/// The memory limit in bytes.
pub fn budget() -> usize {
    BUDGET.load(Ordering::Relaxed)
}

/// How many bytes of indices this process has in memory.
pub fn cached_bytes() -> usize {
    with_cache(|cache| cache.byte_len)
}

#[derive(Debug, Default)]
struct IndexCache {
    files: HashMap<u64, Entry>,
    byte_len: usize,
    clock: u64,
}

#[derive(Debug)]
struct Entry {
    offsets: Arc<Offsets>,
    last_used: u64,
    /// Whether it is being moved to a temporary file.
    is_leaving: bool,
}

type Leaving = Vec<(u64, Arc<Offsets>)>;

fn with_cache<T>(work: impl FnOnce(&mut IndexCache) -> T) -> T {
    work(&mut CACHE.get().lock().unwrap_or_else(PoisonError::into_inner))
}

impl IndexCache {
    fn get(&mut self, file: u64) -> Option<Arc<Offsets>> {
        self.clock += 1;
        let entry = self.files.get_mut(&file)?;
        entry.last_used = self.clock;
        Some(Arc::clone(&entry.offsets))
    }

    fn insert(&mut self, file: u64, offsets: Arc<Offsets>) {
        self.remove(file);
        self.clock += 1;
        self.byte_len += offsets.byte_len();
        self.files.insert(file, Entry { offsets, last_used: self.clock, is_leaving: false });
    }

    /// What must be moved to a temporary file so that at most `budget` bytes are left: the least
    /// recently used. Drops what cannot be moved.
    fn leaving(&mut self, budget: usize) -> Leaving {
        let mut leaving = Vec::new();
        if self.byte_len <= budget {
            return leaving;
        }
        let mut uses: Vec<(u64, u64)> =
            self.files.iter().map(|(&file, entry)| (entry.last_used, file)).collect();
        uses.sort_unstable();
        // An eighth more than needed, since finding the oldest looks at all files.
        let (target, mut byte_len) = (budget - budget / 8, self.byte_len);
        for &(_, file) in &uses {
            if byte_len <= target {
                return leaving;
            }
            if let Some(entry) = self.files.get_mut(&file)
                && entry.offsets.is_in_memory()
            {
                byte_len -= entry.offsets.byte_len();
                if !std::mem::replace(&mut entry.is_leaving, true) {
                    leaving.push((file, Arc::clone(&entry.offsets)));
                }
            }
        }
        for (_, file) in uses {
            if byte_len <= target {
                break;
            }
            if let Some(entry) = self.files.get(&file)
                && !entry.is_leaving
            {
                byte_len -= entry.offsets.byte_len();
                self.remove(file);
            }
        }
        leaving
    }

    /// Replaces the offsets of `file` by `spilled`, unless it was closed or `offsets` are others now.
    fn replace(&mut self, file: u64, offsets: &Arc<Offsets>, spilled: Option<Arc<Offsets>>) {
        let is_only_one = self.files.len() == 1;
        let Some(entry) = self.files.get_mut(&file) else { return };
        if !Arc::ptr_eq(&entry.offsets, offsets) {
            return;
        }
        match spilled {
            Some(spilled) => {
                self.byte_len = self.byte_len - offsets.byte_len() + spilled.byte_len();
                (entry.offsets, entry.is_leaving) = (spilled, false);
            }
            // One file may exceed the budget: nothing could be read of it otherwise.
            None if is_only_one => entry.is_leaving = false,
            None => self.remove(file),
        }
    }

    fn remove(&mut self, file: u64) {
        if let Some(entry) = self.files.remove(&file) {
            self.byte_len -= entry.offsets.byte_len();
        }
    }
}

/// Moves offsets to a temporary file, or drops them. Others may look them up meanwhile.
fn evict(leaving: Leaving) {
    for (file, offsets) in leaving {
        let spilled = offsets.spilled().map(Arc::new);
        with_cache(|cache| cache.replace(file, &offsets, spilled));
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
    evict(with_cache(|cache| {
        cache.insert(file, Arc::clone(offsets));
        cache.leaving(budget())
    }));
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

    fn inserted(cache: &mut IndexCache, file: u64, count: u64, budget: usize, can_spill: bool) {
        cache.insert(file, offsets(count));
        for (file, offsets) in cache.leaving(budget) {
            let spilled = if can_spill { offsets.spilled().map(Arc::new) } else { None };
            assert_eq!(spilled.is_some(), can_spill);
            cache.replace(file, &offsets, spilled);
        }
        let byte_len: usize = cache.files.values().map(|entry| entry.offsets.byte_len()).sum();
        assert_eq!(cache.byte_len, byte_len);
        assert!(byte_len <= budget || cache.files.len() == 1 && !can_spill);
    }

    #[test]
    fn offsets_stay_within_the_budget_and_the_recently_used_ones_in_memory() {
        let byte_len = offsets(1000).byte_len();
        let budget = 64 * byte_len;
        for can_spill in [false, true] {
            let mut cache = IndexCache::default();
            for file in 0..1000 {
                inserted(&mut cache, file, 1000, budget, can_spill);
                assert!(cache.get(0).is_some_and(|offsets| offsets.is_in_memory()), "in use");
                assert_eq!(cache.get(file).unwrap().get(999), Some(1000));
            }
            let num_in_memory =
                cache.files.values().filter(|entry| entry.offsets.is_in_memory()).count();
            assert!((20..=64).contains(&num_in_memory), "{num_in_memory}");
            assert_eq!(cache.files.len() == 1000, can_spill);
            for file in [1, 500, 999] {
                let found = cache.get(file).and_then(|offsets| offsets.get(700));
                assert_eq!(found.is_some(), can_spill || file == 999);
                assert!(found.is_none_or(|found| found == 701));
            }
            cache.remove(999);
            inserted(&mut cache, 2000, 100_000, budget, can_spill);
            (0..=2000).for_each(|file| cache.remove(file));
            assert_eq!(cache.byte_len, 0);
        }
    }

    #[test]
    fn offsets_that_are_being_moved_can_be_looked_up_and_removed() {
        let mut cache = IndexCache::default();
        (0..3).for_each(|file| cache.insert(file, offsets(1000)));
        let leaving = cache.leaving(100);
        assert_eq!(leaving.len(), 3);
        assert!(cache.leaving(100).is_empty(), "they leave once");
        assert!((0..3).all(|file| cache.get(file).is_some()));
        cache.remove(0);
        cache.insert(1, offsets(7));
        for (file, offsets) in leaving {
            let spilled = offsets.spilled().map(Arc::new);
            cache.replace(file, &offsets, spilled);
        }
        assert!(cache.get(0).is_none());
        assert_eq!(cache.get(1).unwrap().len(), 7);
        assert_eq!(cache.get(2).unwrap().get(999), Some(1000));
    }
}
