//! Indices of files that are open, with a memory limit for each process.
//!
//! Offsets of the least recently used files are moved to a temporary file, where looking one up takes a
//! microsecond; reading an index again takes milliseconds. Where there is no place for them, they are
//! dropped, as other indices are.

use std::any::Any;
use std::collections::HashMap;
use std::fmt::Debug;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock};

use super::offsets::Offsets;
use crate::Result;
use crate::io::SingleFlight;
use crate::io::lru::Lru;
use crate::io::spill::{self, Part};
use crate::io::storage_latency::StorageLatency;
use crate::process::PerProcess;

pub use crate::io::spill::budget;

static NEXT_ID: AtomicU64 = AtomicU64::new(0);
/// The files whose offsets are being read.
static LOADS: SingleFlight = SingleFlight::new();
static CACHE: PerProcess<RwLock<IndexCache>> = PerProcess::new(RwLock::default);

/// Limits the indices that each process has in memory to `byte_len` bytes, and 16 times as many in
/// temporary files.
pub fn set_budget(byte_len: usize) {
    spill::set_budget(byte_len);
    evict(with_cache(|cache| cache.leaving(byte_len)));
}

/// How many bytes of indices this process has in memory.
pub fn cached_bytes() -> usize {
    CACHE.read().byte_len()
}

/// How many offsets of files that are opened are kept though nobody may read these: an eighth of the
/// memory that all may take.
pub(super) fn room() -> u64 {
    ((budget() / 8).saturating_sub(cached_bytes()) / size_of::<u32>()) as u64
}

/// What is kept of a file or a part of it, and can be found again.
pub trait CachedIndex: Any + Debug + Send + Sync {
    /// How many bytes of memory it takes.
    fn byte_len(&self) -> usize;

    /// It, if it is offsets.
    fn into_offsets(self: Arc<Self>) -> Option<Arc<Offsets>> {
        None
    }
}

impl CachedIndex for Offsets {
    fn byte_len(&self) -> usize {
        Self::byte_len(self)
    }

    fn into_offsets(self: Arc<Self>) -> Option<Arc<Offsets>> {
        Some(self)
    }
}

#[derive(Debug, Default)]
struct IndexCache {
    in_memory: Lru<u64, Arc<dyn CachedIndex>>,
    elsewhere: HashMap<u64, Elsewhere>,
    elsewhere_len: usize,
}

/// Offsets in temporary files, or in memory that processes share.
#[derive(Debug)]
enum Elsewhere {
    /// On their way to a temporary file.
    Leaving(Arc<Offsets>),
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
            Self::Leaving(offsets) | Self::Other(offsets) => Arc::clone(offsets),
        }
    }

    fn byte_len(&self) -> usize {
        match self {
            Self::Leaving(_) => 0,
            Self::Part(_) => size_of::<(u64, Self)>(),
            Self::Other(offsets) => offsets.byte_len(),
        }
    }
}

type Leaving = Vec<(u64, Arc<dyn CachedIndex>)>;

fn with_cache<T>(work: impl FnOnce(&mut IndexCache) -> T) -> T {
    work(&mut CACHE.write())
}

impl IndexCache {
    fn byte_len(&self) -> usize {
        self.in_memory.weight() + self.elsewhere_len
    }

    fn get<T: CachedIndex>(&self, file: u64) -> Option<Arc<T>> {
        let index: Arc<dyn Any + Send + Sync> = match self.in_memory.get(&file) {
            Some(index) => Arc::<dyn CachedIndex>::clone(index),
            None => self.elsewhere.get(&file)?.offsets(),
        };
        index.downcast().ok()
    }

    fn insert(&mut self, file: u64, index: Arc<dyn CachedIndex>) {
        self.remove(file);
        let offsets = Arc::clone(&index).into_offsets();
        if let Some(offsets) = offsets.filter(|offsets| !offsets.is_in_memory()) {
            drop(index); // `Elsewhere` takes the only one apart
            let elsewhere = Elsewhere::of(offsets);
            self.elsewhere_len += elsewhere.byte_len();
            self.elsewhere.insert(file, elsewhere);
        } else {
            let byte_len = index.byte_len();
            self.in_memory.insert(file, index, byte_len);
        }
    }

    /// What must be moved to a temporary file so that at most `budget` bytes are left: the least
    /// recently used. If that is not enough, drops what is elsewhere: it is read again when needed.
    fn leaving(&mut self, budget: usize) -> Leaving {
        let mut leaving = Vec::new();
        if self.byte_len() <= budget {
            return leaving;
        }
        // An eighth more than needed, so that it happens less often.
        while self.byte_len() > budget - budget / 8
            && let Some((file, index)) = self.in_memory.pop_oldest()
        {
            if let Some(offsets) = Arc::clone(&index).into_offsets() {
                self.elsewhere.insert(file, Elsewhere::Leaving(offsets));
            }
            leaving.push((file, index));
        }
        if self.byte_len() > budget {
            self.elsewhere_len = 0;
            self.elsewhere.retain(|_, offsets| matches!(offsets, Elsewhere::Leaving(_)));
        }
        leaving
    }

    /// Replaces the offsets of `file` by `spilled`, unless it was closed or `offsets` are others now.
    fn replace(&mut self, file: u64, offsets: &Arc<Offsets>, spilled: Option<Arc<Offsets>>) {
        let is_only_one = self.in_memory.len() + self.elsewhere.len() == 1;
        match self.elsewhere.get(&file) {
            Some(Elsewhere::Leaving(leaving)) if Arc::ptr_eq(leaving, offsets) => {}
            _ => return,
        }
        match spilled {
            Some(spilled) => self.insert(file, spilled),
            // One file may exceed the budget: nothing could be read of it otherwise.
            None if is_only_one => self.insert(file, Arc::<Offsets>::clone(offsets)),
            None => self.remove(file),
        }
    }

    fn remove(&mut self, file: u64) {
        if self.in_memory.remove(&file).is_none()
            && let Some(elsewhere) = self.elsewhere.remove(&file)
        {
            self.elsewhere_len -= elsewhere.byte_len();
        }
    }
}

/// Moves offsets to a temporary file, where others may look them up meanwhile, or drops them.
fn evict(leaving: Leaving) {
    for (file, index) in leaving {
        let Some(offsets) = index.into_offsets() else { continue };
        let spilled = offsets.spilled().map(Arc::new);
        with_cache(|cache| cache.replace(file, &offsets, spilled));
    }
}

/// Where the index of an open file is: in the cache, as long as there is room, and in the file.
#[derive(Debug)]
pub struct IndexHandle<T: CachedIndex = Offsets>(u64, PhantomData<fn() -> T>);

impl<T: CachedIndex> Default for IndexHandle<T> {
    /// A handle of an index that is not cached yet.
    fn default() -> Self {
        Self(NEXT_ID.fetch_add(1, Ordering::Relaxed), PhantomData)
    }
}

impl<T: CachedIndex> IndexHandle<T> {
    /// Caches the index.
    pub fn keep(&self, index: &Arc<T>) {
        evict(with_cache(|cache| {
            cache.insert(self.0, Arc::<T>::clone(index));
            cache.leaving(budget())
        }));
    }

    /// The index if it is cached. Else `load` reads it, on one thread at a time, and it is cached; or
    /// there is none, without a latency to measure.
    ///
    /// # Errors
    /// Those of `load`, and [`Error::Interrupted`](crate::Error::Interrupted).
    pub(crate) fn get(
        &self,
        latency: Option<&StorageLatency>,
        load: impl FnOnce(&StorageLatency) -> Result<Arc<T>>,
    ) -> Result<Option<Arc<T>>> {
        let cached = self.cached();
        let (None, Some(latency)) = (&cached, latency) else { return Ok(cached) };
        let _guard = LOADS.enter(self.0)?;
        if let Some(index) = self.cached() {
            return Ok(Some(index));
        }
        let index = load(latency)?;
        self.keep(&index);
        Ok(Some(index))
    }

    /// The index if it is cached.
    pub fn cached(&self) -> Option<Arc<T>> {
        CACHE.read().get(self.0)
    }
}

impl<T: CachedIndex> Drop for IndexHandle<T> {
    fn drop(&mut self) {
        with_cache(|cache| cache.remove(self.0));
    }
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

    fn found(cache: &IndexCache, file: u64) -> Option<Arc<Offsets>> {
        cache.get(file)
    }

    fn inserted(cache: &mut IndexCache, file: u64, count: u64, budget: usize, can_spill: bool) {
        cache.insert(file, offsets(count));
        for (file, index) in cache.leaving(budget) {
            let offsets = index.into_offsets().unwrap();
            let spilled = if can_spill { offsets.spilled().map(Arc::new) } else { None };
            assert_eq!(spilled.is_some(), can_spill);
            cache.replace(file, &offsets, spilled);
        }
        let in_memory = cache.in_memory.iter().map(|(_, index)| index.byte_len());
        let elsewhere = cache.elsewhere.values().map(Elsewhere::byte_len);
        assert_eq!(cache.byte_len(), in_memory.chain(elsewhere).sum());
        assert!(cache.byte_len() <= budget || cache.in_memory.len() == 1 && !can_spill);
    }

    #[test]
    fn offsets_stay_within_the_budget_and_the_recently_used_ones_in_memory() {
        let byte_len = offsets(1000).byte_len();
        let budget = 64 * byte_len;
        for can_spill in [false, true] {
            let mut cache = IndexCache::default();
            for file in 0..1000 {
                inserted(&mut cache, file, 1000, budget, can_spill);
                assert!(found(&cache, 0).is_some_and(|offsets| offsets.is_in_memory()), "in use");
                assert_eq!(found(&cache, file).unwrap().get(999), Some(1000));
            }
            let num_in_memory = cache.in_memory.len();
            assert!((20..=64).contains(&num_in_memory), "{num_in_memory}");
            assert_eq!(cache.elsewhere.len() + num_in_memory == 1000, can_spill);
            for file in [1, 500, 999] {
                let offset = found(&cache, file).and_then(|offsets| offsets.get(700));
                assert_eq!(offset.is_some(), can_spill || file == 999);
                assert!(offset.is_none_or(|offset| offset == 701));
            }
            cache.remove(999);
            inserted(&mut cache, 2000, 100_000, budget, can_spill);
            (0..=2000).for_each(|file| cache.remove(file));
            assert_eq!(cache.byte_len(), 0);
        }
    }

    #[derive(Debug)]
    struct Other(usize);

    impl CachedIndex for Other {
        fn byte_len(&self) -> usize {
            self.0
        }
    }

    #[test]
    fn other_indices_share_the_budget_and_are_dropped() {
        let mut cache = IndexCache::default();
        let byte_len = offsets(1000).byte_len();
        (0..100).for_each(|file| match file % 2 {
            0 => cache.insert(file, offsets(1000)),
            _ => cache.insert(file, Arc::new(Other(byte_len))),
        });
        let leaving = cache.leaving(48 * byte_len);
        assert_eq!(cache.byte_len(), 42 * byte_len);
        let left: Vec<u64> = leaving.iter().map(|&(file, _)| file).collect();
        assert_eq!(left, (0..58).collect::<Vec<_>>(), "the oldest");
        for file in 0..100 {
            assert_eq!(cache.get::<Offsets>(file).is_some(), file % 2 == 0, "{file}");
            let other = cache.get::<Other>(file);
            assert_eq!(other.is_some(), file % 2 == 1 && !left.contains(&file), "{file}");
        }
    }

    #[test]
    fn offsets_that_are_being_moved_can_be_looked_up_and_removed() {
        let mut cache = IndexCache::default();
        (0..3).for_each(|file| cache.insert(file, offsets(1000)));
        let leaving = cache.leaving(100);
        assert_eq!(leaving.len(), 3);
        assert!(cache.leaving(100).is_empty(), "they leave once");
        assert!((0..3).all(|file| found(&cache, file).is_some()));
        cache.remove(0);
        cache.insert(1, offsets(7));
        for (file, index) in leaving {
            let offsets = index.into_offsets().unwrap();
            let spilled = offsets.spilled().map(Arc::new);
            cache.replace(file, &offsets, spilled);
        }
        assert!(found(&cache, 0).is_none());
        assert_eq!(found(&cache, 1).unwrap().len(), 7);
        assert_eq!(found(&cache, 2).unwrap().get(999), Some(1000));
    }
}
