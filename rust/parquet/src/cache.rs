//! Decoded arrays, kept within a limit of bytes and shared by the threads that read one source.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use arrow_array::{Array, ArrayRef};
use grainmill_core::process::PerProcess;

/// Consecutive rows of one column of a row group: the numbers of the file, row group, column, and
/// the first row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
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
    state: PerProcess<(Mutex<State>, Condvar)>,
}

#[derive(Debug, Default)]
struct State {
    arrays: HashMap<Key, Entry>,
    /// The keys by when they were last used.
    by_use: BTreeMap<u64, Key>,
    /// What threads are decoding.
    in_flight: HashSet<Key>,
    byte_len: usize,
    clock: u64,
}

#[derive(Debug)]
struct Entry {
    array: ArrayRef,
    byte_len: usize,
    used: u64,
}

/// What a thread finds for a key.
pub(crate) enum Claim {
    /// The array.
    Found(ArrayRef),
    /// Nothing; this thread decodes it, and then calls [`Cache::finish`].
    Decode,
    /// Another thread is decoding it.
    Wait,
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

    /// Looks for each of `keys`, in order.
    pub(crate) fn claim(&self, keys: &[Key]) -> Vec<Claim> {
        let mut state = self.lock();
        let claim = |&key| match state.get(key) {
            Some(array) => Claim::Found(array),
            None if state.in_flight.insert(key) => Claim::Decode,
            None => Claim::Wait,
        };
        keys.iter().map(claim).collect()
    }

    /// Ends the claims of this thread to `keys`, and keeps those of `arrays` that it decoded.
    pub(crate) fn finish(&self, keys: &[Key], arrays: &[(Key, ArrayRef)]) {
        let mut state = self.lock();
        for key in keys {
            state.in_flight.remove(key);
        }
        let mut evicted = Vec::new();
        for (key, array) in arrays {
            state.insert(*key, array, self.budget, &mut evicted);
        }
        drop(state);
        self.state.get().1.notify_all();
        drop(evicted); // frees memory without the lock
    }

    /// Waits until no thread is decoding `key`; the array, if it was kept.
    pub(crate) fn wait(&self, key: Key) -> Option<ArrayRef> {
        let mut state = self.lock();
        while state.in_flight.contains(&key) {
            state = self.state.get().1.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.get(key)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.get().0.lock().unwrap_or_else(PoisonError::into_inner)
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

    #[test]
    fn the_least_recently_used_arrays_leave_first() {
        let len = array().get_array_memory_size();
        let cache = Cache::new(3 * len);
        for row in 0..3 {
            cache.finish(&[key(row)], &[(key(row), array())]);
        }
        assert!(cache.wait(key(0)).is_some());
        cache.finish(&[], &[(key(3), array())]);
        assert!(cache.byte_len() <= 3 * len);
        let kept: Vec<bool> = (0..4).map(|row| cache.wait(key(row)).is_some()).collect();
        assert_eq!(kept, [true, false, true, true]);
    }

    #[test]
    fn an_array_beyond_the_limit_is_not_kept() {
        let cache = Cache::new(100);
        cache.finish(&[], &[(key(0), array())]);
        assert_eq!(cache.byte_len(), 0);
    }

    #[test]
    fn one_thread_decodes_and_others_wait() {
        let cache = Arc::new(Cache::new(1 << 20));
        assert!(matches!(cache.claim(&[key(0)])[..], [Claim::Decode]));
        assert!(matches!(cache.claim(&[key(0)])[..], [Claim::Wait]));
        let waiting = {
            let cache = Arc::clone(&cache);
            std::thread::spawn(move || cache.wait(key(0)).is_some())
        };
        cache.finish(&[key(0)], &[(key(0), array())]);
        assert!(waiting.join().unwrap());
        assert!(matches!(cache.claim(&[key(0)])[..], [Claim::Found(_)]));
    }
}
