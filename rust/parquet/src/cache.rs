//! Decoded arrays, kept within a limit of bytes and shared by the threads that read one source.
//!
//! A unit that a thread decodes has a [`Slot`] until nobody holds it. Others that need the unit hold
//! the slot, too, and wait for the array, which they get even if the cache has no room for it. So
//! what is read ahead is not decoded twice, and is freed once its readers have it.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use arrow_array::{Array, ArrayRef};
use grainmill_core::io::lru::Lru;
use grainmill_core::lock::lock;
use grainmill_core::process::PerProcess;
use grainmill_core::sync::{Condvar, Mutex, MutexGuard};
use grainmill_core::{Result, interrupt};

/// Consecutive rows of one column of a row group: the numbers of the file, row group, column, and
/// the first row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) file: u32,
    pub(crate) row_group: u32,
    pub(crate) column: u32,
    pub(crate) first_row: u64,
}

/// What is known of a unit before it is decoded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Estimate {
    pub(crate) num_rows: u64,
    /// The bytes of a row once decoded, about.
    pub(crate) row_byte_len: f64,
    /// Whether they may be many more.
    pub(crate) is_rough: bool,
}

/// A unit counts as this many bytes at most, so that sums do not overflow.
const MAX_ESTIMATE: f64 = 4.0 * 1024.0 * 1024.0 * 1024.0;

/// The arrays that were used last.
#[derive(Debug)]
pub(crate) struct Cache {
    budget: usize,
    /// A forked child starts with none: a thread of its parent may be decoding.
    state: PerProcess<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    arrays: Lru<Key, ArrayRef>,
    /// Those that somebody holds, and some that nobody holds any longer.
    slots: HashMap<Key, Weak<Slot>>,
    /// What was decoded so far, by the number of the column.
    decoded: HashMap<u32, Decoded>,
    /// How many slots there are when those that nobody holds are next removed.
    sweep_at: usize,
    /// The bytes that slots reserve.
    reserved: Arc<AtomicUsize>,
}

/// Units of one column.
#[derive(Debug, Default)]
struct Decoded {
    num_rows: f64,
    byte_len: f64,
    /// Claimed ahead while the size of its rows was not known.
    first: Weak<Slot>,
}

/// A unit that a thread is going to decode, is decoding, or has decoded.
#[derive(Debug)]
pub(crate) struct Slot {
    outcome: Mutex<Outcome>,
    finished: Condvar,
    /// Bytes of the array, about until there is one; they are reserved as long as this lives.
    byte_len: AtomicUsize,
    reserved: Arc<AtomicUsize>,
}

#[derive(Debug)]
enum Outcome {
    Pending,
    Decoded(ArrayRef),
    Failed,
}

impl Slot {
    /// Waits until the unit is decoded; None if that failed.
    pub(crate) fn wait(&self) -> Result<Option<ArrayRef>> {
        let is_pending = |outcome: &mut Outcome| matches!(outcome, Outcome::Pending);
        match &*interrupt::wait_while(&self.outcome, &self.finished, is_pending)? {
            Outcome::Decoded(array) => Ok(Some(Arc::clone(array))),
            Outcome::Pending | Outcome::Failed => Ok(None),
        }
    }

    /// Sets what came of it, unless there is an array: the array, or None if it could not be decoded.
    pub(crate) fn finish(&self, array: Option<ArrayRef>) {
        let mut outcome = lock(&self.outcome);
        if !matches!(*outcome, Outcome::Decoded(_)) {
            let byte_len = array.as_ref().map_or(0, Array::get_array_memory_size);
            self.reserved.fetch_add(byte_len, Ordering::Relaxed);
            let before = self.byte_len.swap(byte_len, Ordering::Relaxed);
            self.reserved.fetch_sub(before, Ordering::Relaxed);
            *outcome = array.map_or(Outcome::Failed, Outcome::Decoded);
        }
        drop(outcome);
        self.finished.notify_all();
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.reserved.fetch_sub(*self.byte_len.get_mut(), Ordering::Relaxed);
    }
}

/// What a thread finds for a key.
pub(crate) enum Claim {
    /// The array.
    Found(ArrayRef),
    /// Nothing; this thread decodes it, and then calls [`Cache::finish`].
    Decode(Arc<Slot>),
    /// Another thread decodes it.
    Wait(Arc<Slot>),
}

impl Cache {
    pub(crate) fn new(budget: usize) -> Self {
        Self { budget, state: PerProcess::new(Default::default) }
    }

    pub(crate) fn budget(&self) -> usize {
        self.budget
    }

    /// Bytes of the arrays kept.
    pub(crate) fn byte_len(&self) -> usize {
        self.lock().arrays.weight()
    }

    /// The bytes, about, of the units that somebody holds.
    pub(crate) fn reserved(&self) -> usize {
        self.lock().reserved.load(Ordering::Relaxed)
    }

    /// The bytes of a row of a column, the mean of those decoded so far; 0 if there are none.
    pub(crate) fn row_byte_len(&self, column: u32) -> f64 {
        self.lock().row_byte_len(column)
    }

    /// Looks for each of the keys, in order.
    pub(crate) fn claim(&self, units: impl Iterator<Item = (Key, Estimate)>) -> Vec<Claim> {
        let mut state = self.lock();
        units.map(|(key, estimate)| state.claim(key, estimate)).collect()
    }

    /// As [`claim`](Self::claim), for units that are not asked for yet: as far as less than `limit`
    /// bytes are reserved. Where the size of rows is not known, one unit of a column is decoded first.
    pub(crate) fn claim_ahead(
        &self,
        units: &[(Key, Estimate)],
        limit: usize,
    ) -> Vec<Option<Claim>> {
        let mut state = self.lock();
        let claim = |&(key, estimate)| match state.found(key) {
            Some(claim) => Some(claim),
            None if state.reserved.load(Ordering::Relaxed) >= limit => None,
            None if !state.is_unknown(key, estimate) => {
                Some(Claim::Decode(state.new_slot(key, estimate)))
            }
            None => {
                let of_column = state.decoded.entry(key.column).or_default();
                if of_column.first.strong_count() > 0 {
                    return None;
                }
                let slot = state.new_slot(key, estimate);
                state.decoded.entry(key.column).or_default().first = Arc::downgrade(&slot);
                Some(Claim::Decode(slot))
            }
        };
        units.iter().map(claim).collect()
    }

    /// As [`claim`](Self::claim), but claims nothing unless what is reserved then stays within `limit`
    /// bytes, as far as known.
    pub(crate) fn claim_all(&self, units: &[(Key, Estimate)], limit: usize) -> Vec<Option<Claim>> {
        let mut state = self.lock();
        let mut byte_len = state.reserved.load(Ordering::Relaxed);
        let mut new = HashSet::new();
        for &(key, estimate) in units {
            if !state.has(key) && new.insert(key) {
                byte_len += state.byte_len_of(key, estimate);
                if byte_len > limit || state.is_unknown(key, estimate) {
                    return Vec::new();
                }
            }
        }
        units.iter().map(|&(key, estimate)| Some(state.claim(key, estimate))).collect()
    }

    /// Ends a claim: keeps `array`, or reports that the unit could not be decoded.
    pub(crate) fn finish(&self, key: Key, slot: &Slot, array: Option<ArrayRef>) {
        let keep = |array| {
            let mut state = self.lock();
            state.count(key, array);
            state.insert(key, array, self.budget)
        };
        let evicted = array.as_ref().map(keep);
        slot.finish(array);
        drop(evicted); // frees memory without the lock
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl State {
    /// The array, or the slot of those who decode it.
    fn found(&mut self, key: Key) -> Option<Claim> {
        if let Some(array) = self.arrays.get(&key) {
            return Some(Claim::Found(Arc::clone(array)));
        }
        self.slots.get(&key).and_then(Weak::upgrade).map(Claim::Wait)
    }

    fn claim(&mut self, key: Key, estimate: Estimate) -> Claim {
        self.found(key).unwrap_or_else(|| Claim::Decode(self.new_slot(key, estimate)))
    }

    fn has(&self, key: Key) -> bool {
        self.arrays.contains(&key)
            || self.slots.get(&key).is_some_and(|slot| slot.strong_count() > 0)
    }

    fn row_byte_len(&self, column: u32) -> f64 {
        self.decoded.get(&column).map_or(0.0, |of| of.byte_len / of.num_rows.max(1.0))
    }

    /// Whether a unit may have many more bytes than the estimate.
    fn is_unknown(&self, key: Key, estimate: Estimate) -> bool {
        estimate.is_rough && self.decoded.get(&key.column).is_none_or(|of| of.num_rows <= 0.0)
    }

    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "an estimate"
    )]
    fn byte_len_of(&self, key: Key, estimate: Estimate) -> usize {
        let row_byte_len = estimate.row_byte_len.max(self.row_byte_len(key.column));
        (estimate.num_rows as f64 * row_byte_len).min(MAX_ESTIMATE) as usize
    }

    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    fn count(&mut self, key: Key, array: &ArrayRef) {
        let of_column = self.decoded.entry(key.column).or_default();
        of_column.num_rows += array.len() as f64;
        of_column.byte_len += array.get_array_memory_size() as f64;
    }

    fn new_slot(&mut self, key: Key, estimate: Estimate) -> Arc<Slot> {
        let byte_len = self.byte_len_of(key, estimate);
        if self.slots.len() >= self.sweep_at {
            self.slots.retain(|_, slot| slot.strong_count() > 0);
            self.sweep_at = 2 * self.slots.len() + 64;
        }
        self.reserved.fetch_add(byte_len, Ordering::Relaxed);
        let slot = Arc::new(Slot {
            outcome: Mutex::new(Outcome::Pending),
            finished: Condvar::new(),
            byte_len: AtomicUsize::new(byte_len),
            reserved: Arc::clone(&self.reserved),
        });
        self.slots.insert(key, Arc::downgrade(&slot));
        slot
    }

    /// Keeps an array; returns those that leave for it.
    fn insert(&mut self, key: Key, array: &ArrayRef, budget: usize) -> Vec<ArrayRef> {
        let byte_len = array.get_array_memory_size();
        if byte_len > budget || self.arrays.contains(&key) {
            return Vec::new();
        }
        let evicted = self.arrays.make_room(byte_len, budget);
        self.arrays.insert(key, Arc::clone(array), byte_len);
        evicted
    }
}

#[cfg(test)]
mod tests {
    use arrow_array::Int64Array;

    use super::*;

    fn key(first_row: u64) -> Key {
        Key { file: 0, row_group: 0, column: 0, first_row }
    }

    fn array() -> ArrayRef {
        Arc::new(Int64Array::from(vec![1; 1000]))
    }

    /// Of units that have as many bytes as estimated, nearly.
    const EXACT: Estimate = Estimate { num_rows: 1000, row_byte_len: 8.0, is_rough: false };

    fn claim(cache: &Cache, row: u64) -> Claim {
        cache.claim([(key(row), EXACT)].into_iter()).remove(0)
    }

    /// Claims the unit at `row` and decodes it.
    fn decode(cache: &Cache, row: u64) -> Arc<Slot> {
        let Claim::Decode(slot) = claim(cache, row) else { panic!("{row} was claimed") };
        cache.finish(key(row), &slot, Some(array()));
        slot
    }

    fn has(cache: &Cache, row: u64) -> bool {
        matches!(claim(cache, row), Claim::Found(_))
    }

    #[test]
    fn the_least_recently_used_arrays_leave_first() {
        let len = array().get_array_memory_size();
        let cache = Cache::new(3 * len);
        for row in 0..3 {
            decode(&cache, row);
        }
        assert!(has(&cache, 0));
        decode(&cache, 3);
        assert!(cache.byte_len() <= 3 * len);
        let kept: Vec<bool> = (0..4).map(|row| has(&cache, row)).collect();
        assert_eq!(kept, [true, false, true, true]);
    }

    #[test]
    fn an_array_beyond_the_limit_is_kept_only_as_long_as_its_slot_is_held() {
        let cache = Cache::new(100);
        let slot = decode(&cache, 0);
        assert_eq!((cache.byte_len(), cache.reserved()), (0, array().get_array_memory_size()));
        let Claim::Wait(same) = claim(&cache, 0) else { panic!("the slot is held") };
        assert!(same.wait().unwrap().is_some());
        drop((slot, same));
        assert_eq!(cache.reserved(), 0);
        assert!(matches!(claim(&cache, 0), Claim::Decode(_)));
    }

    #[test]
    fn one_thread_decodes_and_others_wait() {
        let cache = Arc::new(Cache::new(1 << 20));
        let Claim::Decode(slot) = claim(&cache, 0) else { panic!("nobody decodes it") };
        let Claim::Wait(same) = claim(&cache, 0) else { panic!("the slot is held") };
        let waiting = std::thread::spawn(move || same.wait().unwrap().is_some());
        cache.finish(key(0), &slot, Some(array()));
        assert!(waiting.join().unwrap());
        assert!(has(&cache, 0));
    }

    #[test]
    fn those_that_wait_learn_of_a_failure() {
        let cache = Cache::new(1 << 20);
        let Claim::Decode(slot) = claim(&cache, 0) else { panic!("nobody decodes it") };
        cache.finish(key(0), &slot, None);
        assert!(slot.wait().unwrap().is_none());
        assert_eq!(cache.reserved(), 0);
        // One of them can decode it, so that the others need not.
        cache.finish(key(0), &slot, Some(array()));
        cache.finish(key(0), &slot, None);
        assert!(slot.wait().unwrap().is_some());
        assert!(has(&cache, 0));
        assert_eq!(cache.reserved(), array().get_array_memory_size());
    }

    #[test]
    fn later_units_count_as_those_decoded_before() {
        let cache = Cache::new(100);
        let small = Estimate { row_byte_len: 0.1, ..EXACT };
        let units: Vec<(Key, Estimate)> = (0..10).map(|row| (key(row), small)).collect();
        drop(cache.claim_ahead(&units, 1000));
        assert_eq!(cache.reserved(), 0);
        let slot = decode(&cache, 10);
        let claims = cache.claim_ahead(&units, 30_000);
        assert_eq!(claims.iter().flatten().count(), 3);
        assert!(cache.reserved() > 4 * 8000);
        drop((slot, claims));
        assert_eq!(cache.reserved(), 0);
    }

    #[test]
    fn where_the_size_of_rows_is_not_known_one_unit_is_decoded_first() {
        let cache = Cache::new(100);
        let rough = Estimate { row_byte_len: 0.1, is_rough: true, ..EXACT };
        let units: Vec<(Key, Estimate)> = (0..10).map(|row| (key(row), rough)).collect();
        assert!(cache.claim_all(&units, 1000).is_empty());
        let claims = cache.claim_ahead(&units, 1000);
        let count = |claims: &[Option<Claim>]| {
            claims.iter().flatten().filter(|claim| matches!(claim, Claim::Decode(_))).count()
        };
        assert_eq!(count(&claims), 1);
        assert_eq!(count(&cache.claim_ahead(&units, 1000)), 0);
        drop(claims); // it was given up
        let claims = cache.claim_ahead(&units, 1000);
        let Some(Claim::Decode(slot)) = &claims[0] else { panic!("nobody decodes it") };
        cache.finish(key(0), slot, Some(array()));
        assert_eq!(count(&cache.claim_ahead(&units, 30_000)), 3);
    }

    #[test]
    fn all_units_are_claimed_within_the_limit_or_none() {
        let cache = Cache::new(1 << 20);
        drop(decode(&cache, 1));
        let Claim::Decode(held) = claim(&cache, 2) else { panic!("nobody decodes it") };
        let reserved = cache.reserved();
        let units: Vec<(Key, Estimate)> = [0, 1, 2, 3, 0].map(|row| (key(row), EXACT)).into();
        assert!(cache.claim_all(&units, reserved + 10_000).is_empty());
        assert_eq!(cache.reserved(), reserved);
        let claims = cache.claim_all(&units, reserved + 20_000);
        assert_eq!(claims.len(), 5);
        assert!(matches!(&claims[2], Some(Claim::Wait(slot)) if Arc::ptr_eq(slot, &held)));
        assert!(matches!(claims[4], Some(Claim::Wait(_))));
    }

    #[test]
    fn slots_that_nobody_holds_are_removed() {
        let cache = Cache::new(100);
        for row in 0..10_000 {
            decode(&cache, row);
        }
        assert!(cache.lock().slots.len() < 200);
    }
}
