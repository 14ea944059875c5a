//! The fullest bin with room in one feature, by an ordered set of the bins in use.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use crate::pack::free_space::FreeSpace;

/// Bins in order of the cells they use, ties with the first bin last.
///
/// Of the bins not yet in use only the first is in the order, since they are all alike.
#[derive(Debug)]
pub(crate) struct BestFit {
    capacity: i64,
    num_bins: usize,
    /// By bin, the key under which it stands in `order`.
    used: Vec<i64>,
    order: BTreeSet<(i64, Reverse<usize>)>,
}

impl BestFit {
    pub(crate) fn new(capacity: i64, num_bins: usize) -> Self {
        let mut fresh = Self { capacity, num_bins, used: Vec::new(), order: BTreeSet::new() };
        fresh.clear();
        fresh
    }

    fn open_next(&mut self) {
        if self.used.len() < self.num_bins {
            self.order.insert((0, Reverse(self.used.len())));
            self.used.push(0);
        }
    }
}

impl FreeSpace for BestFit {
    fn clear(&mut self) {
        self.used.clear();
        self.order.clear();
        self.open_next();
    }

    fn choose(&self, lengths: &[usize]) -> Option<usize> {
        let most = self.capacity - i64::try_from(lengths[0]).ok()?;
        self.order.range(..=(most, Reverse(0))).next_back().map(|&(_, Reverse(bin))| bin)
    }

    /// A bin whose room is negative takes nothing more, not even an empty sequence.
    fn update(&mut self, bin: usize, room: &[i64]) {
        if bin + 1 == self.used.len() {
            self.open_next();
        }
        self.order.remove(&(self.used[bin], Reverse(bin)));
        self.used[bin] = self.capacity - room[0];
        if room[0] >= 0 {
            self.order.insert((self.used[bin], Reverse(bin)));
        }
    }
}
