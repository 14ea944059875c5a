//! The first bin with room in one feature, by a tree over the room that is left.

use crate::pack::free_space::FreeSpace;

/// A complete binary tree over bins; each node keeps the most room that any bin below it has.
/// A closed bin has room -1.
#[derive(Debug)]
pub(crate) struct FirstFit {
    capacity: i64,
    num_bins: usize,
    leaves: usize,
    /// Node 1 is the root, the children of `node` are `2 * node` and `2 * node + 1`.
    room: Vec<i64>,
}

impl FirstFit {
    pub(crate) fn new(capacity: i64, num_bins: usize) -> Self {
        let leaves = num_bins.next_power_of_two();
        let mut tree = Self { capacity, num_bins, leaves, room: vec![-1; 2 * leaves] };
        tree.clear();
        tree
    }
}

impl FreeSpace for FirstFit {
    fn clear(&mut self) {
        // A node has bins below it if its leftmost leaf is one.
        for (node, room) in self.room.iter_mut().enumerate().skip(1) {
            let depth = node.ilog2();
            let leftmost = (node << (self.leaves.ilog2() - depth)) - self.leaves;
            if leftmost < self.num_bins {
                *room = self.capacity;
            }
        }
    }

    /// A node with room has a child with room, so no step is taken back.
    fn choose(&self, lengths: &[usize]) -> Option<usize> {
        let length = i64::try_from(lengths[0]).ok()?;
        let fits = |node: usize| length <= self.room[node];
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

    fn update(&mut self, bin: usize, room: &[i64]) {
        let mut node = bin + self.leaves;
        self.room[node] = room[0];
        while node > 1 {
            node /= 2;
            let room = self.room[2 * node].max(self.room[2 * node + 1]);
            if self.room[node] == room {
                break;
            }
            self.room[node] = room;
        }
    }
}
