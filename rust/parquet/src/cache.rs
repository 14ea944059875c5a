//! Decoded arrays, kept within a limit of bytes and shared by the threads that read one source.
//!
//! A unit that a thread decodes has a [`Slot`] until nobody holds it. Others that need the unit hold
//! the slot, too, and wait for the array, which they get even if the cache has no room for it. So
//! what is read ahead is not decoded twice, and is freed once its readers have it.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use arrow_array::{Array, ArrayRef};
use grainmill_core::process::PerProcess;

/// Consecutive rows of one column of a row group: the numbers of the file, row group, column, and
/// the first row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) file: u32,
    pub(crate) row_group: u32,
    pub(crate) column: u32,
    pub(crate) first_row: u64,
}

/// The arrays that were used last.
#[derive(Debug)]
pub(crate) struct Cache {
    budget: usize,
    /// A forked child starts with none: a thread of its parent may be decoding.
    state: PerProcess<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    arrays: HashMap<Key, Entry>,
    /// The keys by when they were last used.
    by_use: BTreeMap<u64, Key>,
    /// Those that somebody holds, and some that nobody holds any longer.
    slots: HashMap<Key, Weak<Slot>>,
    /// How many slots there are when those that nobody holds are next removed.
    sweep_at: usize,
    /// The bytes that slots reserve.
    reserved: Arc<AtomicUsize>,
    byte_len: usize,
    clock: u64,
}

#[derive(Debug)]
struct Entry {
    array: ArrayRef,
    byte_len: usize,
    used: u64,
}

/// A unit that a thread is going to decode, is decoding, or has decoded.
#[derive(Debug)]
pub(crate) struct Slot {
    outcome: Mutex<Outcome>,
    finished: Condvar,
    /// Bytes of the array, about, as long as this lives.
    byte_len: usize,
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
    pub(crate) fn wait(&self) -> Option<ArrayRef> {
        let outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        let is_pending = |outcome: &mut Outcome| matches!(outcome, Outcome::Pending);
        let outcome = self.finished.wait_while(outcome, is_pending);
        match &*outcome.unwrap_or_else(PoisonError::into_inner) {
            Outcome::Decoded(array) => Some(Arc::clone(array)),
            Outcome::Pending | Outcome::Failed => None,
        }
    }

    /// Sets what came of it, unless that is known: the array, or None if it could not be decoded.
    pub(crate) fn finish(&self, array: Option<ArrayRef>) {
        let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*outcome, Outcome::Pending) {
            *outcome = array.map_or(Outcome::Failed, Outcome::Decoded);
        }
        drop(outcome);
        self.finished.notify_all();
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.reserved.fetch_sub(self.byte_len, Ordering::Relaxed);
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
        self.lock().byte_len
    }

    /// The bytes, about, of the units that somebody holds.
    pub(crate) fn reserved(&self) -> usize {
        self.lock().reserved.load(Ordering::Relaxed)
    }

    /// Looks for each of the keys, in order; units have about this many bytes once decoded.
    pub(crate) fn claim(&self, units: impl Iterator<Item = (Key, usize)>) -> Vec<Claim> {
        let mut state = self.lock();
        let claim = |(key, byte_len)| match state.get(key) {
            Some(array) => Claim::Found(array),
            None => match state.slots.get(&key).and_then(Weak::upgrade) {
                Some(slot) => Claim::Wait(slot),
                None => Claim::Decode(state.new_slot(key, byte_len)),
            },
        };
        units.map(claim).collect()
    }

    /// Ends a claim: keeps `array`, or reports that the unit could not be decoded.
    pub(crate) fn finish(&self, key: Key, slot: &Slot, array: Option<ArrayRef>) {
        let mut evicted = Vec::new();
        if let Some(array) = &array {
            self.lock().insert(key, array, self.budget, &mut evicted);
        }
        slot.finish(array);
        drop(evicted); // frees memory without the lock
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.get().lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn get(&mut self, key: Key) -> Option<ArrayRef> {
        let entry = self.arrays.get_mut(&key)?;
        self.clock += 1;
        self.by_use.remove(&entry.used);
        entry.used = self.clock;
        self.by_use.insert(self.clock, key);
        Some(Arc::clone(&entry.array))
    }

    fn new_slot(&mut self, key: Key, byte_len: usize) -> Arc<Slot> {
        if self.slots.len() >= self.sweep_at {
            self.slots.retain(|_, slot| slot.strong_count() > 0);
            self.sweep_at = 2 * self.slots.len() + 64;
        }
        self.reserved.fetch_add(byte_len, Ordering::Relaxed);
        let slot = Arc::new(Slot {
            outcome: Mutex::new(Outcome::Pending),
            finished: Condvar::new(),
            byte_len,
            reserved: Arc::clone(&self.reserved),
        });
        self.slots.insert(key, Arc::downgrade(&slot));
        slot
    }

    fn insert(&mut self, key: Key, array: &ArrayRef, budget: usize, evicted: &mut Vec<Entry>) {
        let byte_len = array.get_array_memory_size();
        if byte_len > budget || self.arrays.contains_key(&key) {
            return;
        }
        while self.byte_len + byte_len > budget
            && let Some((_, oldest)) = self.by_use.pop_first()
        {
            if let Some(entry) = self.arrays.remove(&oldest) {
                self.byte_len -= entry.byte_len;
                evicted.push(entry);
            }
        }
        self.clock += 1;
        self.byte_len += byte_len;
        self.by_use.insert(self.clock, key);
        let array = Arc::clone(array);
        self.arrays.insert(key, Entry { array, byte_len, used: self.clock });
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

    fn claim(cache: &Cache, row: u64) -> Claim {
        cache.claim([(key(row), 8000)].into_iter()).remove(0)
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
        assert_eq!((cache.byte_len(), cache.reserved()), (0, 8000));
        let Claim::Wait(same) = claim(&cache, 0) else { panic!("the slot is held") };
        assert!(same.wait().is_some());
        drop((slot, same));
        assert_eq!(cache.reserved(), 0);
        assert!(matches!(claim(&cache, 0), Claim::Decode(_)));
    }

    #[test]
    fn one_thread_decodes_and_others_wait() {
        let cache = Arc::new(Cache::new(1 << 20));
        let Claim::Decode(slot) = claim(&cache, 0) else { panic!("nobody decodes it") };
        let Claim::Wait(same) = claim(&cache, 0) else { panic!("the slot is held") };
        let waiting = std::thread::spawn(move || same.wait().is_some());
        cache.finish(key(0), &slot, Some(array()));
        assert!(waiting.join().unwrap());
        assert!(has(&cache, 0));
    }

    #[test]
    fn those_that_wait_learn_of_a_failure() {
        let cache = Cache::new(1 << 20);
        let Claim::Decode(slot) = claim(&cache, 0) else { panic!("nobody decodes it") };
        cache.finish(key(0), &slot, None);
        assert!(slot.wait().is_none());
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
