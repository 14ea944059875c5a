//! A cache of decoded chunks, with one memory limit for each process.
//!
//! An order with locality returns to a chunk within a few blocks, and decoding the chunk again costs
//! many times what caching it costs. An order without locality never returns, and should not pay
//! for a cache. So chunks are cached as long as earlier ones had hits, or where storage is slow:
//! reading a chunk again takes a thousand times as long as caching it. A chunk is evicted once all
//! its records have been taken.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use crate::Result;
use crate::formats::chunk_records::{ChunkRecords, DecodedChunk};
use crate::io::lru::Lru;
use crate::io::{FlightGuard, SingleFlight};
use crate::process::PerProcess;
use crate::sync::{Mutex, MutexGuard};

/// The memory limit in bytes unless [`set_budget`] changes it.
const DEFAULT_BUDGET: usize = 256 << 20;
/// Longer chunks are not cached: a few of them would evict all others. A frame of zstd of up to
/// 128 MiB (`formats/scanned/stream.rs`) is shorter, with its last record, which may end in the next one.
const MAX_CHUNK_LEN: usize = 144 << 20;
/// How many chunks are cached without a hit, and how many more each hit allows.
const MAX_CREDIT: u32 = 256;
const CREDIT_PER_HIT: u32 = 4;
/// Without credit, one chunk in this many is cached, to notice when an order gains locality.
const TRIAL_INTERVAL: u32 = 32;

static BUDGET: AtomicUsize = AtomicUsize::new(DEFAULT_BUDGET);
static CACHED: PerProcess<Mutex<CachedChunks>> =
    PerProcess::new(|| Mutex::new(CachedChunks::default()));
static FETCHES: SingleFlight = SingleFlight::new();
static NEXT_ID: AtomicU32 = AtomicU32::new(0);

/// Limits this process's cached chunks to `byte_len` bytes; a single chunk may exceed that.
pub fn set_budget(byte_len: usize) {
    BUDGET.store(byte_len, Ordering::Relaxed);
}

/// How many bytes of decoded chunks this process has cached.
pub fn cached_bytes() -> usize {
    cached().chunks.weight()
}

/// The number of a file among those that share a cache, and the offset of a chunk in it.
pub(crate) type ChunkKey = (u32, u64);

/// The cached chunks of some files. A forked child starts with none.
#[derive(Debug)]
pub(crate) struct ChunkCache {
    id: u32,
    credit: PerProcess<Mutex<CacheCredit>>,
}

/// How many more chunks may be cached, which depends on past hits.
#[derive(Debug)]
struct CacheCredit {
    remaining: u32,
    num_refused: u32,
}

/// The cached chunks of all files of a process.
#[derive(Debug, Default)]
struct CachedChunks {
    /// None is used again: the one that was added first leaves first.
    chunks: Lru<(u32, ChunkKey), Entry>,
}

#[derive(Debug)]
struct Entry {
    chunk: Arc<DecodedChunk>,
    /// How many of its records have not been taken yet.
    num_left: usize,
}

impl Default for ChunkCache {
    fn default() -> Self {
        Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            credit: PerProcess::new(|| {
                Mutex::new(CacheCredit { remaining: MAX_CREDIT, num_refused: 0 })
            }),
        }
    }
}

impl ChunkCache {
    /// Looks up chunks, from each of which the given number of records is about to be taken.
    pub(crate) fn find(
        &self,
        requests: impl Iterator<Item = (ChunkKey, usize)>,
    ) -> Vec<Option<Arc<DecodedChunk>>> {
        let mut cached = cached();
        let found: Vec<_> =
            requests.map(|(key, count)| cached.take((self.id, key), count)).collect();
        drop(cached);
        let num_hits = found.iter().flatten().count();
        if num_hits > 0 {
            let mut credit = self.credit();
            let more = CREDIT_PER_HIT.saturating_mul(u32::try_from(num_hits).unwrap_or(u32::MAX));
            credit.remaining = credit.remaining.saturating_add(more).min(MAX_CREDIT);
        }
        found
    }

    /// Caches a chunk, of which `num_taken` records have been taken, if hits are likely.
    pub(crate) fn offer(
        &self,
        key: ChunkKey,
        records: &ChunkRecords<'_>,
        num_taken: usize,
        is_slow: bool,
    ) {
        let num_left = records.len().saturating_sub(num_taken);
        if num_left == 0 || records.byte_len() > MAX_CHUNK_LEN {
            return;
        }
        if is_slow || self.credit().admits() {
            let chunk = Arc::new(records.to_chunk());
            let budget = BUDGET.load(Ordering::Relaxed);
            // The lock is released before the chunks are freed, which may take long.
            let evicted = cached().insert((self.id, key), chunk, num_left, budget);
            drop(evicted);
        }
    }

    /// Waits until no other thread fetches the chunk of `byte_len` bytes; `None` if such a chunk is
    /// never cached.
    pub(crate) fn enter(
        &self,
        (file, begin): ChunkKey,
        byte_len: u64,
    ) -> Result<Option<FlightGuard<'_>>> {
        // Chunks with equal numbers wait for each other, which costs only time.
        let number = begin.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(file);
        let is_cacheable = byte_len <= MAX_CHUNK_LEN as u64;
        is_cacheable.then(|| FETCHES.enter(number ^ u64::from(self.id) << 32)).transpose()
    }

    fn credit(&self) -> MutexGuard<'_, CacheCredit> {
        self.credit.lock()
    }
}

impl Drop for ChunkCache {
    fn drop(&mut self) {
        let forgotten = cached().forget(self.id);
        drop(forgotten);
    }
}

fn cached() -> MutexGuard<'static, CachedChunks> {
    CACHED.lock()
}

impl CacheCredit {
    fn admits(&mut self) -> bool {
        if let Some(remaining) = self.remaining.checked_sub(1) {
            self.remaining = remaining;
            return true;
        }
        self.num_refused = (self.num_refused + 1) % TRIAL_INTERVAL;
        self.num_refused == 0
    }
}

impl CachedChunks {
    fn take(&mut self, key: (u32, ChunkKey), count: usize) -> Option<Arc<DecodedChunk>> {
        let entry = self.chunks.peek_mut(&key)?;
        entry.num_left = entry.num_left.saturating_sub(count);
        if entry.num_left == 0 {
            return self.chunks.remove(&key).map(|entry| entry.chunk);
        }
        Some(Arc::clone(&entry.chunk))
    }

    /// Adds a chunk; returns those that were evicted for it, or itself if it is there already.
    fn insert(
        &mut self,
        key: (u32, ChunkKey),
        chunk: Arc<DecodedChunk>,
        num_left: usize,
        budget: usize,
    ) -> Vec<Entry> {
        let (byte_len, entry) = (chunk.byte_len(), Entry { chunk, num_left });
        if self.chunks.contains(&key) {
            return vec![entry];
        }
        let evicted = self.chunks.make_room(byte_len, budget);
        self.chunks.insert(key, entry, byte_len);
        evicted
    }

    /// Evicts and returns all chunks of one cache's files.
    fn forget(&mut self, id: u32) -> Vec<Entry> {
        let keys: Vec<_> =
            self.chunks.iter().map(|(&key, _)| key).filter(|&(of, _)| of == id).collect();
        keys.into_iter().filter_map(|key| self.chunks.remove(&key)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(byte_len: usize, num_records: usize) -> DecodedChunk {
        let ends = (1..=num_records).map(|end| end * byte_len / num_records).collect();
        DecodedChunk::new(vec![7; byte_len], ends)
    }

    #[test]
    fn chunks_of_all_files_stay_within_the_budget_and_the_oldest_is_evicted_first() {
        let mut cached = CachedChunks::default();
        let budget = 64 << 20;
        for begin in 0..200 {
            let key = (u32::try_from(begin % 3).unwrap(), (0, begin));
            let before = cached.chunks.len();
            let evicted = cached.insert(key, Arc::new(chunk(1 << 20, 2)), 2, budget);
            assert_eq!(cached.chunks.len(), before + 1 - evicted.len());
            assert!(cached.chunks.weight() <= budget);
        }
        let mut is_cached =
            |begin: u64| cached.take((u32::try_from(begin % 3).unwrap(), (0, begin)), 1).is_some();
        assert!(!(0..130).any(&mut is_cached));
        assert!((140..200).all(&mut is_cached));
        assert!(!cached.forget(1).is_empty());
        assert!(cached.chunks.iter().all(|(&(id, _), _)| id != 1) && cached.chunks.len() > 0);
        cached.insert((9, (0, 0)), Arc::new(chunk(1 << 20, 2)), 2, 0);
        assert_eq!(cached.chunks.len(), 1, "one chunk is cached in any case");
    }

    #[test]
    fn a_chunk_is_evicted_with_its_last_record_and_all_chunks_with_their_files() {
        let cache = ChunkCache::default();
        let chunk = chunk(1000, 10);
        let found = |begin: u64, count| cache.find([((0, begin), count)].into_iter())[0].is_some();
        cache.offer((0, 1), &chunk.records(), 4, false);
        assert!(found(1, 5));
        assert!(found(1, 1), "the last one");
        assert!(!found(1, 1));
        cache.offer((0, 2), &chunk.records(), 10, false);
        assert!(!found(2, 1), "all its records were taken");
        cache.offer((0, 3), &chunk.records(), 1, false);
        let id = cache.id;
        drop(cache);
        assert!(!cached().chunks.iter().any(|(&(of, _), _)| of == id));
    }

    #[test]
    fn without_hits_few_chunks_are_cached_unless_storage_is_slow() {
        let cache = ChunkCache::default();
        let chunk = chunk(10, 2);
        let num_cached = |from: u64, is_slow| {
            let is_cached = |begin: &u64| {
                cache.offer((0, *begin), &chunk.records(), 1, is_slow);
                cached().chunks.peek_mut(&(cache.id, (0, *begin))).is_some()
            };
            (from..from + 10_000).filter(is_cached).count()
        };
        let num_trials = num_cached(0, false);
        assert!((256..600).contains(&num_trials), "{num_trials}");
        assert_eq!(num_cached(10_000, true), 10_000);
        assert_eq!(cache.find((10_000..10_100).map(|begin| ((0, begin), 1))).len(), 100);
        assert!(num_cached(30_000, false) > 400, "hits allow more chunks");
    }

    #[test]
    fn a_chunk_above_the_maximum_length_is_not_cached() {
        let cache = ChunkCache::default();
        cache.offer((0, 0), &chunk(MAX_CHUNK_LEN + 1, 2).records(), 1, true);
        assert!(cache.find([((0, 0), 1)].into_iter())[0].is_none());
    }
}
