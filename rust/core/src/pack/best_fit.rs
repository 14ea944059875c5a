//! Best fit for one feature, by an ordered set of the open bins.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use crate::pack::free_space::FreeSpace;

/// Bins ordered by their used length, among equals the first bin last.
///
/// Of the empty bins only the first is in the set, since they are all alike.
#[derive(Debug)]
pub(crate) struct BestFit {
    capacity: i64,
    num_bins: usize,
    /// By bin, its used length, the key in `order`.
    used: Vec<i64>,
    order: BTreeSet<(i64, Reverse<usize>)>,
}

impl BestFit {
    pub(crate) fn new(capacity: i64, num_bins: usize) -> Self {
        let mut new = Self { capacity, num_bins, used: Vec::new(), order: BTreeSet::new() };
        new.clear();
        new
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
        let max_used = self.capacity - i64::try_from(lengths[0]).ok()?;
        self.order.range(..=(max_used, Reverse(0))).next_back().map(|&(_, Reverse(bin))| bin)
    }

    /// A bin whose free space is negative takes nothing more, not even an empty sequence.
    fn update(&mut self, bin: usize, free: &[i64]) {
        if bin + 1 == self.used.len() {
            self.open_next();
        }
        self.order.remove(&(self.used[bin], Reverse(bin)));
        self.used[bin] = self.capacity - free[0];
        if free[0] >= 0 {
            self.order.insert((self.used[bin], Reverse(bin)));
        }
    }
}
