//! A map that knows which of its entries was used longest ago, and how much all of them weigh.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::Hash;
use std::sync::atomic::{AtomicU64, Ordering};

/// Values by key, in the order of their last uses.
#[derive(Debug)]
pub struct Lru<K, V> {
    entries: HashMap<K, Entry<V>>,
    /// A use of each entry, which need not have been its last, and uses of entries that are gone: so
    /// using one again costs no more than looking it up.
    uses: BinaryHeap<Reverse<(u64, K)>>,
    clock: AtomicU64,
    weight: usize,
}

#[derive(Debug)]
struct Entry<V> {
    value: V,
    /// When it was last used. Threads that share the map may use an entry at the same time.
    used: AtomicU64,
    weight: usize,
}

impl<K, V> Default for Lru<K, V>
where
    K: Ord,
{
    fn default() -> Self {
        Self {
            entries: HashMap::new(),
            uses: BinaryHeap::new(),
            clock: AtomicU64::new(0),
            weight: 0,
        }
    }
}

impl<V> Entry<V> {
    fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }
}

impl<K: Copy + Eq + Hash + Ord, V> Lru<K, V> {
    fn now(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// How many entries there are.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// What the values weigh, such as their bytes.
    pub fn weight(&self) -> usize {
        self.weight
    }

    /// The keys and values, in any order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.entries.iter().map(|(key, entry)| (key, &entry.value))
    }

    /// Whether `key` has a value, which is not used by that.
    pub fn contains(&self, key: &K) -> bool {
        self.entries.contains_key(key)
    }

    /// The value of `key`, which is used by that.
    pub fn get(&self, key: &K) -> Option<&V> {
        let entry = self.entries.get(key)?;
        entry.used.store(self.now(), Ordering::Relaxed);
        Some(&entry.value)
    }

    /// The value of `key`, which is not used by that.
    pub(crate) fn peek_mut(&mut self, key: &K) -> Option<&mut V> {
        self.entries.get_mut(key).map(|entry| &mut entry.value)
    }

    /// Adds a value of this `weight`, or replaces the one that `key` has; it is used by that.
    pub fn insert(&mut self, key: K, value: V, weight: usize) {
        let now = self.now();
        let replaced = self.entries.insert(key, Entry { value, used: now.into(), weight });
        self.weight = self.weight + weight - replaced.map_or(0, |entry| entry.weight);
        if self.uses.len() > 2 * self.entries.len() + 64 {
            let last_use = |(&key, entry): (&K, &Entry<V>)| Reverse((entry.used(), key));
            self.uses = self.entries.iter().map(last_use).collect();
        } else {
            self.uses.push(Reverse((now, key)));
        }
    }

    /// Removes the entries that were used longest ago until one of this `weight` fits into
    /// `limit`, or none is left; returns their values.
    pub fn make_room(&mut self, weight: usize, limit: usize) -> Vec<V> {
        let mut removed = Vec::new();
        while self.weight + weight > limit
            && let Some((_, oldest)) = self.pop_oldest()
        {
            removed.push(oldest);
        }
        removed
    }

    /// Removes the value of `key`.
    pub(crate) fn remove(&mut self, key: &K) -> Option<V> {
        let Entry { value, weight, .. } = self.entries.remove(key)?;
        self.weight -= weight;
        Some(value)
    }

    /// Removes the entry that was used longest ago.
    pub(crate) fn pop_oldest(&mut self) -> Option<(K, V)> {
        loop {
            let Reverse((used, key)) = self.uses.pop()?;
            match self.entries.get(&key) {
                Some(entry) if entry.used() == used => return Some((key, self.remove(&key)?)),
                Some(entry) => self.uses.push(Reverse((entry.used(), key))),
                None => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Call {
        Get(u8),
        Peek(u8),
        Insert(u8, u16),
        Remove(u8),
        Pop,
        MakeRoom(u8, u16),
    }

    fn calls() -> impl Strategy<Value = Vec<Call>> {
        let key = 0..12_u8;
        let call = prop_oneof![
            4 => key.clone().prop_map(Call::Get),
            1 => key.clone().prop_map(Call::Peek),
            4 => (key.clone(), any::<u16>()).prop_map(|(key, value)| Call::Insert(key, value)),
            2 => key.prop_map(Call::Remove),
            1 => Just(Call::Pop),
            1 => (any::<u8>(), 0..4000_u16).prop_map(|(len, limit)| Call::MakeRoom(len, limit)),
        ];
        prop::collection::vec(call, 0..600)
    }

    fn weight(value: u16) -> usize {
        usize::from(value % 1000)
    }

    fn sum(list: &[(u8, u16)]) -> usize {
        list.iter().map(|&(_, value)| weight(value)).sum()
    }

    proptest! {
        #[test]
        fn entries_leave_as_from_a_list_that_each_use_moves_to_its_end(calls in calls()) {
            let (mut lru, mut list) = (Lru::default(), Vec::<(u8, u16)>::new());
            let taken = |list: &mut Vec<(u8, u16)>, key| {
                let at = list.iter().position(|(other, _)| *other == key)?;
                Some(list.remove(at))
            };
            for call in calls {
                match call {
                    Call::Get(key) => {
                        let found = taken(&mut list, key);
                        list.extend(found);
                        prop_assert_eq!(lru.get(&key).copied(), found.map(|(_, value)| value));
                    }
                    Call::Peek(key) => {
                        let found = list.iter().find(|(other, _)| *other == key);
                        prop_assert_eq!(lru.peek_mut(&key).copied(), found.map(|(_, value)| *value));
                    }
                    Call::Insert(key, value) => {
                        taken(&mut list, key);
                        list.push((key, value));
                        lru.insert(key, value, weight(value));
                    }
                    Call::Remove(key) => {
                        let found = taken(&mut list, key).map(|(_, value)| value);
                        prop_assert_eq!(lru.remove(&key), found);
                    }
                    Call::Pop => {
                        let oldest = (!list.is_empty()).then(|| list.remove(0));
                        prop_assert_eq!(lru.pop_oldest(), oldest);
                    }
                    Call::MakeRoom(len, limit) => {
                        let (len, limit) = (usize::from(len), usize::from(limit));
                        let mut removed = Vec::new();
                        while !list.is_empty() && sum(&list) + len > limit {
                            removed.push(list.remove(0).1);
                        }
                        prop_assert_eq!(lru.make_room(len, limit), removed);
                    }
                }
                prop_assert_eq!(lru.len(), list.len());
                prop_assert_eq!(lru.weight(), sum(&list));
                for key in 0..12 {
                    let is_listed = list.iter().any(|&(other, _)| other == key);
                    prop_assert_eq!(lru.contains(&key), is_listed);
                }
                prop_assert!(lru.uses.len() <= 2 * 12 + 65);
            }
        }
    }
}
