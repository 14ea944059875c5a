//! Decoded chunks of which other records may be wanted soon, within a bound on their memory for each
//! process.
//!
//! An order with locality comes back to a chunk within a few blocks; decoding it each time costs
//! many times what it costs to keep. One without never does, and should not pay for that: so
//! chunks are kept as long as those kept before have been of use, or where storage is far, since
//! reading one again takes a thousand times as long as keeping it. A chunk of which all records
//! have been taken is not kept any longer.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::riegeli::{ChunkRecords, DecodedChunk};
use super::single_flight::{Alone, InWork};
use crate::process::PerProcess;

/// How many bytes of decoded chunks are kept unless [`set_budget`] says otherwise.
const DEFAULT_BUDGET: usize = 256 << 20;
/// Longer chunks are not kept: few of them would push out all others.
const MAX_CHUNK_LEN: usize = 8 << 20;
/// How many chunks are kept before one has been of use, and what a use is worth.
const MOST_CREDIT: u32 = 256;
const CREDIT_OF_USE: u32 = 4;
/// One chunk in so many is kept without credit, so that a change of the order is noticed.
const TRIAL_EVERY: u32 = 32;

static BUDGET: AtomicUsize = AtomicUsize::new(DEFAULT_BUDGET);
static KEPT: PerProcess<Mutex<Kept>> = PerProcess::new(|| Mutex::new(Kept::default()));
static FETCHING: InWork = InWork::new();
static NEXT_ID: AtomicU32 = AtomicU32::new(0);

/// Has this process keep no more than `byte_len` bytes of decoded chunks, or one chunk.
pub fn set_budget(byte_len: usize) {
    BUDGET.store(byte_len, Ordering::Relaxed);
}

/// How many bytes of decoded chunks this process keeps.
pub fn kept_bytes() -> usize {
    kept().byte_len
}

/// A file, by its number among those that share a cache, and where a chunk of it begins.
pub(crate) type ChunkKey = (u32, u64);

/// The chunks kept for some files. A forked child begins with none.
#[derive(Debug)]
pub(crate) struct ChunkCache {
    id: u32,
    worth: PerProcess<Mutex<Worth>>,
}

/// Whether it has been of use to keep chunks.
#[derive(Debug)]
struct Worth {
    credit: u32,
    num_refused: u32,
}

/// What a process keeps for all its files.
#[derive(Debug, Default)]
struct Kept {
    chunks: HashMap<(u32, ChunkKey), Entry>,
    /// Their keys by their numbers, which rise.
    order: BTreeMap<u64, (u32, ChunkKey)>,
    byte_len: usize,
    next_number: u64,
}

#[derive(Debug)]
struct Entry {
    chunk: Arc<DecodedChunk>,
    number: u64,
    /// How many of its records have not been taken.
    num_left: usize,
}

impl Default for ChunkCache {
    fn default() -> Self {
        Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            worth: PerProcess::new(|| Mutex::new(Worth { credit: MOST_CREDIT, num_refused: 0 })),
        }
    }
}

impl ChunkCache {
    /// Those of the chunks that are kept, of each of which so many records are about to be taken.
    pub(crate) fn find(
        &self,
        wanted: impl Iterator<Item = (ChunkKey, usize)>,
    ) -> Vec<Option<Arc<DecodedChunk>>> {
        let mut kept = kept();
        let found: Vec<_> = wanted.map(|(key, count)| kept.take((self.id, key), count)).collect();
        drop(kept);
        let num_uses = found.iter().flatten().count();
        if num_uses > 0 {
            let mut worth = self.worth();
            let more = CREDIT_OF_USE.saturating_mul(u32::try_from(num_uses).unwrap_or(u32::MAX));
            worth.credit = worth.credit.saturating_add(more).min(MOST_CREDIT);
        }
        found
    }

    /// Keeps a chunk of which `num_taken` records have been taken, if that is likely to be of use.
    pub(crate) fn offer(
        &self,
        key: ChunkKey,
        records: &ChunkRecords<'_>,
        num_taken: usize,
        is_far: bool,
    ) {
        let num_left = records.len().saturating_sub(num_taken);
        if num_left == 0 || records.byte_len() > MAX_CHUNK_LEN {
            return;
        }
        if is_far || self.worth().admits() {
            let chunk = Arc::new(records.to_chunk());
            kept().insert((self.id, key), chunk, num_left, BUDGET.load(Ordering::Relaxed));
        }
    }

    /// Waits until nobody else fetches the chunk of `byte_len` bytes, if it is kept then.
    pub(crate) fn alone(&self, (file, begin): ChunkKey, byte_len: u64) -> Option<Alone<'_>> {
        // Chunks that get the same number only wait for each other.
        let number = begin.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(file);
        let is_kept = byte_len <= MAX_CHUNK_LEN as u64;
        is_kept.then(|| FETCHING.alone(number ^ u64::from(self.id) << 32))
    }

    fn worth(&self) -> MutexGuard<'_, Worth> {
        self.worth.get().lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ChunkCache {
    fn drop(&mut self) {
        kept().forget(self.id);
    }
}

fn kept() -> MutexGuard<'static, Kept> {
    KEPT.get().lock().unwrap_or_else(PoisonError::into_inner)
}

impl Worth {
    fn admits(&mut self) -> bool {
        if let Some(credit) = self.credit.checked_sub(1) {
            self.credit = credit;
            return true;
        }
        self.num_refused = (self.num_refused + 1) % TRIAL_EVERY;
        self.num_refused == 0
    }
}

impl Kept {
    fn take(&mut self, key: (u32, ChunkKey), count: usize) -> Option<Arc<DecodedChunk>> {
        let entry = self.chunks.get_mut(&key)?;
        entry.num_left = entry.num_left.saturating_sub(count);
        if entry.num_left == 0 {
            return self.remove(key);
        }
        Some(Arc::clone(&entry.chunk))
    }

    fn insert(
        &mut self,
        key: (u32, ChunkKey),
        chunk: Arc<DecodedChunk>,
        num_left: usize,
        budget: usize,
    ) {
        if self.chunks.contains_key(&key) {
            return;
        }
        let byte_len = chunk.byte_len();
        while self.byte_len + byte_len > budget
            && let Some((_, &oldest)) = self.order.first_key_value()
        {
            self.remove(oldest);
        }
        let number = self.next_number;
        self.next_number += 1;
        self.byte_len += byte_len;
        self.order.insert(number, key);
        self.chunks.insert(key, Entry { chunk, number, num_left });
    }

    fn remove(&mut self, key: (u32, ChunkKey)) -> Option<Arc<DecodedChunk>> {
        let Entry { chunk, number, .. } = self.chunks.remove(&key)?;
        self.order.remove(&number);
        self.byte_len -= chunk.byte_len();
        Some(chunk)
    }

    /// Lets go of all that is kept for the files of one cache.
    fn forget(&mut self, id: u32) {
        let gone: Vec<_> = self.chunks.keys().filter(|(of, _)| *of == id).copied().collect();
        for key in gone {
            self.remove(key);
        }
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
    fn chunks_of_all_files_stay_within_the_budget_and_the_oldest_goes_first() {
        let mut kept = Kept::default();
        let budget = 64 << 20;
        for begin in 0..200 {
            let key = (u32::try_from(begin % 3).unwrap(), (0, begin));
            kept.insert(key, Arc::new(chunk(1 << 20, 2)), 2, budget);
            assert!(kept.byte_len <= budget);
            assert_eq!(kept.order.len(), kept.chunks.len());
        }
        let mut is_kept =
            |begin: u64| kept.take((u32::try_from(begin % 3).unwrap(), (0, begin)), 1).is_some();
        assert!(!(0..130).any(&mut is_kept));
        assert!((140..200).all(&mut is_kept));
        kept.forget(1);
        assert!(kept.chunks.keys().all(|(id, _)| *id != 1) && !kept.chunks.is_empty());
        kept.insert((9, (0, 0)), Arc::new(chunk(1 << 20, 2)), 2, 0);
        assert_eq!(kept.chunks.len(), 1, "one chunk is kept in any case");
    }

    #[test]
    fn a_chunk_goes_with_its_last_record_and_all_chunks_with_their_files() {
        let cache = ChunkCache::default();
        let chunk = chunk(1000, 10);
        let found = |begin: u64, count| cache.find([((0, begin), count)].into_iter())[0].is_some();
        cache.offer((0, 1), &chunk.records(), 4, false);
        assert!(found(1, 5));
        assert!(found(1, 1), "the last one");
        assert!(!found(1, 1));
        cache.offer((0, 2), &chunk.records(), 10, false);
        assert!(!found(2, 1), "nothing of it is left");
        cache.offer((0, 3), &chunk.records(), 1, false);
        let id = cache.id;
        drop(cache);
        assert!(!kept().chunks.keys().any(|(of, _)| *of == id));
    }

    #[test]
    fn chunks_that_are_of_no_use_are_soon_kept_now_and_then_only_unless_storage_is_far() {
        let cache = ChunkCache::default();
        let chunk = chunk(10, 2);
        let num_kept = |from: u64, is_far| {
            let is_kept = |begin: &u64| {
                cache.offer((0, *begin), &chunk.records(), 1, is_far);
                kept().chunks.contains_key(&(cache.id, (0, *begin)))
            };
            (from..from + 10_000).filter(is_kept).count()
        };
        let now_and_then = num_kept(0, false);
        assert!((256..600).contains(&now_and_then), "{now_and_then}");
        assert_eq!(num_kept(10_000, true), 10_000);
        assert_eq!(cache.find((10_000..10_100).map(|begin| ((0, begin), 1))).len(), 100);
        assert!(num_kept(30_000, false) > 400, "what was of use pays for others");
    }

    #[test]
    fn a_chunk_longer_than_the_most_is_not_kept() {
        let cache = ChunkCache::default();
        cache.offer((0, 0), &chunk(MAX_CHUNK_LEN + 1, 2).records(), 1, true);
        assert!(cache.find([((0, 0), 1)].into_iter())[0].is_none());
    }
}
