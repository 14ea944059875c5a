//! A map that knows which of its entries was used longest ago.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::Hash;

/// Values by key, in the order of their last uses.
#[derive(Debug)]
pub(crate) struct Lru<K, V> {
    /// Each value and when it was last used.
    entries: HashMap<K, (V, u64)>,
    /// A use of each entry, which need not have been its last, and uses of entries that are gone: so
    /// using one again costs no more than looking it up.
    uses: BinaryHeap<Reverse<(u64, K)>>,
    clock: u64,
}

impl<K, V> Default for Lru<K, V>
where
    K: Ord,
{
    fn default() -> Self {
        Self { entries: HashMap::new(), uses: BinaryHeap::new(), clock: 0 }
    }
}

impl<K: Copy + Eq + Hash + Ord, V> Lru<K, V> {
    /// How many entries there are.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// The keys and values, in any order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.entries.iter().map(|(key, (value, _))| (key, value))
    }

    /// The value of `key`, which is used by that.
    pub(crate) fn get(&mut self, key: &K) -> Option<&V> {
        self.clock += 1;
        let (value, used) = self.entries.get_mut(key)?;
        *used = self.clock;
        Some(value)
    }

    /// The value of `key`, which is not used by that.
    pub(crate) fn peek_mut(&mut self, key: &K) -> Option<&mut V> {
        self.entries.get_mut(key).map(|(value, _)| value)
    }

    /// Adds a value, or replaces the one that `key` has; it is used by that.
    pub(crate) fn insert(&mut self, key: K, value: V) {
        self.clock += 1;
        self.entries.insert(key, (value, self.clock));
        if self.uses.len() > 2 * self.entries.len() + 64 {
            self.uses =
                self.entries.iter().map(|(&key, &(_, used))| Reverse((used, key))).collect();
        } else {
            self.uses.push(Reverse((self.clock, key)));
        }
    }

    /// Removes the value of `key`.
    pub(crate) fn remove(&mut self, key: &K) -> Option<V> {
        self.entries.remove(key).map(|(value, _)| value)
    }

    /// Removes the entry that was used longest ago.
    pub(crate) fn pop_oldest(&mut self) -> Option<(K, V)> {
        loop {
            let Reverse((used, key)) = self.uses.pop()?;
            match self.entries.get(&key) {
                Some(&(_, last)) if last == used => return Some((key, self.remove(&key)?)),
                Some(&(_, last)) => self.uses.push(Reverse((last, key))),
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
    }

    fn calls() -> impl Strategy<Value = Vec<Call>> {
        let key = 0..12_u8;
        let call = prop_oneof![
            4 => key.clone().prop_map(Call::Get),
            1 => key.clone().prop_map(Call::Peek),
            4 => (key.clone(), any::<u16>()).prop_map(|(key, value)| Call::Insert(key, value)),
            2 => key.prop_map(Call::Remove),
            1 => Just(Call::Pop),
        ];
        prop::collection::vec(call, 0..600)
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
                        lru.insert(key, value);
                    }
                    Call::Remove(key) => {
                        let found = taken(&mut list, key).map(|(_, value)| value);
                        prop_assert_eq!(lru.remove(&key), found);
                    }
                    Call::Pop => {
                        let oldest = (!list.is_empty()).then(|| list.remove(0));
                        prop_assert_eq!(lru.pop_oldest(), oldest);
                    }
                }
                prop_assert_eq!(lru.len(), list.len());
                prop_assert!(lru.uses.len() <= 2 * 12 + 65);
            }
        }
    }
}
