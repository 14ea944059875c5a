//! First fit for one feature, by a tree of maxima over the free space of bins.

use crate::pack::free_space::FreeSpace;

/// A complete binary tree over bins; each node holds the largest free space of the bins under it,
/// -1 if all are closed.
#[derive(Debug)]
pub(crate) struct FirstFit {
    capacity: i64,
    num_bins: usize,
    leaves: usize,
    /// Node 1 is the root, the children of `node` are `2 * node` and `2 * node + 1`.
    free: Vec<i64>,
}

impl FirstFit {
    pub(crate) fn new(capacity: i64, num_bins: usize) -> Self {
        let leaves = num_bins.next_power_of_two();
        let mut tree = Self { capacity, num_bins, leaves, free: vec![-1; 2 * leaves] };
        tree.clear();
        tree
    }
}

impl FreeSpace for FirstFit {
    fn clear(&mut self) {
        // A node has bins under it if its leftmost leaf is a bin.
        for (node, free) in self.free.iter_mut().enumerate().skip(1) {
            let depth = node.ilog2();
            let leftmost = (node << (self.leaves.ilog2() - depth)) - self.leaves;
            if leftmost < self.num_bins {
                *free = self.capacity;
            }
        }
    }

    /// A node into which the length fits has such a child, so there is no backtracking.
    fn choose(&self, lengths: &[usize]) -> Option<usize> {
        let length = i64::try_from(lengths[0]).ok()?;
        let fits = |node: usize| length <= self.free[node];
        let mut node = 1;
        if !fits(node) {
            return None;
        }
        while node < self.leaves {
            node *= 2;
            if !fits(node) {
                node += 1;
            }
        }
        Some(node - self.leaves)
    }

    fn update(&mut self, bin: usize, free: &[i64]) {
        let mut node = bin + self.leaves;
        self.free[node] = free[0];
        while node > 1 {
            node /= 2;
            let free = self.free[2 * node].max(self.free[2 * node + 1]);
            if self.free[node] == free {
                break;
            }
            self.free[node] = free;
        }
    }
}
