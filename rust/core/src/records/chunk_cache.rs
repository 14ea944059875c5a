//! Decoded chunks of which other records may be wanted soon, within a bound on their memory.
//!
//! An order with locality comes back to a chunk within a few blocks; decoding it each time costs
//! many times what it costs to keep. One without never does, and should not pay for that: so
//! chunks are kept as long as those kept before have been of use.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::riegeli::{ChunkRecords, DecodedChunk};
use super::single::{Alone, InWork};
use crate::process::PerProcess;

/// How many bytes of decoded chunks are kept for some files.
const BUDGET: usize = 64 << 20;
/// Longer chunks are not kept: few of them would push out all others.
const MAX_CHUNK_LEN: usize = BUDGET / 8;
/// How many chunks are kept before one has been of use, and what a use is worth.
const MOST_CREDIT: u32 = 256;
const CREDIT_OF_USE: u32 = 4;
/// One chunk in so many is kept without credit, so that a change of the order is noticed.
const TRIAL_EVERY: u32 = 32;

static FETCHING: InWork = InWork::new();

/// A file, by its number among those that share a cache, and where a chunk of it begins.
pub(crate) type ChunkKey = (u32, u64);

/// The chunks kept for some files. A forked child begins with none.
#[derive(Debug)]
pub(crate) struct ChunkCache(PerProcess<Mutex<State>>);

#[derive(Debug)]
struct State {
    chunks: HashMap<ChunkKey, Arc<DecodedChunk>>,
    /// Their keys, longest kept first.
    order: VecDeque<ChunkKey>,
    byte_len: usize,
    credit: u32,
    num_refused: u32,
}

impl Default for ChunkCache {
    fn default() -> Self {
        Self(PerProcess::new(|| {
            Mutex::new(State {
                chunks: HashMap::new(),
                order: VecDeque::new(),
                byte_len: 0,
                credit: MOST_CREDIT,
                num_refused: 0,
            })
        }))
    }
}

impl ChunkCache {
    /// Those of the chunks that are kept.
    pub(crate) fn find(
        &self,
        keys: impl Iterator<Item = ChunkKey>,
    ) -> Vec<Option<Arc<DecodedChunk>>> {
        let mut state = self.state();
        keys.map(|key| state.find(key)).collect()
    }

    /// Keeps a chunk if that is likely to be of use.
    pub(crate) fn offer(&self, key: ChunkKey, records: &ChunkRecords<'_>) {
        if records.byte_len() > MAX_CHUNK_LEN || !self.state().admits() {
            return;
        }
        let chunk = Arc::new(records.to_chunk());
        self.state().insert(key, chunk);
    }

    /// Waits until nobody else fetches the chunk, if it is likely to be kept then.
    pub(crate) fn alone(&self, (file, begin): ChunkKey) -> Option<Alone<'_>> {
        // Chunks that get the same number only wait for each other.
        let number = begin.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(file);
        let is_useful = self.state().credit > 0;
        is_useful.then(|| FETCHING.alone(number))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.get().lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn find(&mut self, key: ChunkKey) -> Option<Arc<DecodedChunk>> {
        let chunk = self.chunks.get(&key)?;
        self.credit = (self.credit + CREDIT_OF_USE).min(MOST_CREDIT);
        Some(Arc::clone(chunk))
    }

    fn admits(&mut self) -> bool {
        if let Some(credit) = self.credit.checked_sub(1) {
            self.credit = credit;
            return true;
        }
        self.num_refused = (self.num_refused + 1) % TRIAL_EVERY;
        self.num_refused == 0
    }

    fn insert(&mut self, key: ChunkKey, chunk: Arc<DecodedChunk>) {
        let byte_len = chunk.byte_len();
        if self.chunks.contains_key(&key) {
            return;
        }
        while self.byte_len + byte_len > BUDGET
            && let Some(oldest) = self.order.pop_front()
        {
            if let Some(oldest) = self.chunks.remove(&oldest) {
                self.byte_len -= oldest.byte_len();
            }
        }
        self.byte_len += byte_len;
        self.order.push_back(key);
        self.chunks.insert(key, chunk);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keep(cache: &ChunkCache, begin: u64, byte_len: usize) -> bool {
        cache.offer((0, begin), &DecodedChunk::new(vec![7; byte_len], vec![byte_len]).records());
        cache.state().chunks.contains_key(&(0, begin))
    }

    #[test]
    fn chunks_stay_within_the_budget_and_the_oldest_goes_first() {
        let cache = ChunkCache::default();
        for begin in 0..200 {
            assert!(keep(&cache, begin, 1 << 20));
            assert!(cache.state().byte_len <= BUDGET);
        }
        let found = cache.find((0..200).map(|begin| (0, begin)));
        assert!(found[..130].iter().all(Option::is_none));
        assert!(found[140..].iter().all(Option::is_some));
        assert!(!keep(&cache, 1000, MAX_CHUNK_LEN + 1));
    }

    #[test]
    fn chunks_that_are_of_no_use_are_soon_kept_now_and_then_only() {
        let cache = ChunkCache::default();
        let kept = (0..10_000).filter(|&begin| keep(&cache, begin, 10)).count();
        assert!((256..600).contains(&kept), "{kept}");
        assert!(cache.alone((0, 0)).is_none());
        let last = cache.state().order.back().copied();
        (0..10).for_each(|_| assert!(cache.find(last.into_iter())[0].is_some()));
        assert!(keep(&cache, 20_000, 10), "what was of use pays for others");
        assert!(cache.alone((0, 0)).is_some());
    }
}
