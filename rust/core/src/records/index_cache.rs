//! The offsets in files that are open, with a memory limit for each process.
//!
//! Those of the least recently used files are moved to a temporary file, where looking one up takes a
//! microsecond; reading an index again takes milliseconds. Where there is no place for them, they are
//! dropped.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::offsets::Offsets;
use super::spill::{self, Part};
use crate::process::PerProcess;

pub use super::spill::budget;

static NEXT_ID: AtomicU64 = AtomicU64::new(0);
static CACHE: PerProcess<Mutex<IndexCache>> = PerProcess::new(|| Mutex::new(IndexCache::default()));

/// Limits the indices that each process has in memory to `byte_len` bytes, and 16 times as many in
/// temporary files.
pub fn set_budget(byte_len: usize) {
    spill::set_budget(byte_len);
    evict(with_cache(|cache| cache.leaving(byte_len)));
}

/// How many bytes of indices this process has in memory.
pub fn cached_bytes() -> usize {
    with_cache(|cache| cache.byte_len)
}

#[derive(Debug, Default)]
struct IndexCache {
    in_memory: HashMap<u64, Entry>,
    elsewhere: HashMap<u64, Elsewhere>,
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

/// Offsets in temporary files, or in memory that processes share.
#[derive(Debug)]
enum Elsewhere {
    /// Within the table: small allocations, made when larger ones are freed, would take their place, so
    /// that neither the next large one nor the system could use it.
    Part(Part),
    Other(Arc<Offsets>),
}

impl Elsewhere {
    fn of(offsets: Arc<Offsets>) -> Self {
        let own = Arc::try_unwrap(offsets).map(Offsets::into_part);
        match own {
            Ok(Ok(part)) => Self::Part(part),
            Ok(Err(offsets)) => Self::Other(Arc::new(offsets)),
            Err(shared) => Self::Other(shared),
        }
    }

    fn offsets(&self) -> Arc<Offsets> {
        match self {
            Self::Part(part) => Arc::new(Offsets::of_part(part.clone())),
            Self::Other(offsets) => Arc::clone(offsets),
        }
    }

    fn byte_len(&self) -> usize {
        match self {
            Self::Part(_) => size_of::<(u64, Self)>(),
            Self::Other(offsets) => offsets.byte_len(),
        }
    }
}

type Leaving = Vec<(u64, Arc<Offsets>)>;

fn with_cache<T>(work: impl FnOnce(&mut IndexCache) -> T) -> T {
    work(&mut CACHE.get().lock().unwrap_or_else(PoisonError::into_inner))
}

impl IndexCache {
    fn get(&mut self, file: u64) -> Option<Arc<Offsets>> {
        self.clock += 1;
        match self.in_memory.get_mut(&file) {
            Some(entry) => {
                entry.last_used = self.clock;
                Some(Arc::clone(&entry.offsets))
            }
            None => self.elsewhere.get(&file).map(Elsewhere::offsets),
        }
    }

    fn insert(&mut self, file: u64, offsets: Arc<Offsets>) {
        self.remove(file);
        self.clock += 1;
        if offsets.is_in_memory() {
            self.byte_len += offsets.byte_len();
            let entry = Entry { offsets, last_used: self.clock, is_leaving: false };
            self.in_memory.insert(file, entry);
        } else {
            let elsewhere = Elsewhere::of(offsets);
            self.byte_len += elsewhere.byte_len();
            self.elsewhere.insert(file, elsewhere);
        }
    }

    /// What must be moved to a temporary file so that at most `budget` bytes are left: the least
    /// recently used. If that is not enough, drops what is elsewhere: it is read again when needed.
    fn leaving(&mut self, budget: usize) -> Leaving {
        let mut leaving = Vec::new();
        if self.byte_len <= budget {
            return leaving;
        }
        let mut uses: Vec<(u64, u64)> =
            self.in_memory.iter().map(|(&file, entry)| (entry.last_used, file)).collect();
        uses.sort_unstable();
        // An eighth more than needed, since finding the oldest looks at all of them.
        let (target, mut byte_len) = (budget - budget / 8, self.byte_len);
        for (_, file) in uses {
            if byte_len <= target {
                return leaving;
            }
            if let Some(entry) = self.in_memory.get_mut(&file) {
                byte_len -= entry.offsets.byte_len();
                if !std::mem::replace(&mut entry.is_leaving, true) {
                    leaving.push((file, Arc::clone(&entry.offsets)));
                }
            }
        }
        if byte_len > budget {
            let elsewhere = std::mem::take(&mut self.elsewhere);
            self.byte_len -= elsewhere.values().map(Elsewhere::byte_len).sum::<usize>();
        }
        leaving
    }

    /// Replaces the offsets of `file` by `spilled`, unless it was closed or `offsets` are others now.
    fn replace(&mut self, file: u64, offsets: &Arc<Offsets>, spilled: Option<Arc<Offsets>>) {
        let is_only_one = self.in_memory.len() + self.elsewhere.len() == 1;
        let Some(entry) = self.in_memory.get_mut(&file) else { return };
        if !Arc::ptr_eq(&entry.offsets, offsets) {
            return;
        }
        match spilled {
            Some(spilled) => self.insert(file, spilled),
            // One file may exceed the budget: nothing could be read of it otherwise.
            None if is_only_one => entry.is_leaving = false,
            None => self.remove(file),
        }
    }

    fn remove(&mut self, file: u64) {
        let in_memory = self.in_memory.remove(&file).map(|entry| entry.offsets.byte_len());
        let elsewhere = || self.elsewhere.remove(&file).map(|elsewhere| elsewhere.byte_len());
        self.byte_len -= in_memory.or_else(elsewhere).unwrap_or(0);
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
        let in_memory = cache.in_memory.values().map(|entry| entry.offsets.byte_len());
        let elsewhere = cache.elsewhere.values().map(Elsewhere::byte_len);
        assert_eq!(cache.byte_len, in_memory.chain(elsewhere).sum());
        assert!(cache.byte_len <= budget || cache.in_memory.len() == 1 && !can_spill);
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
            let num_in_memory = cache.in_memory.len();
            assert!((20..=64).contains(&num_in_memory), "{num_in_memory}");
            assert_eq!(cache.elsewhere.len() + num_in_memory == 1000, can_spill);
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
