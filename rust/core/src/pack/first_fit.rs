//! The first bin with room, by a tree over the room that is left.

/// A complete binary tree over bins; each node keeps, feature by feature, the most room that
/// any bin below it has. A closed bin has room -1.
#[derive(Debug)]
pub(crate) struct FirstFit {
    capacities: Vec<i64>,
    num_bins: usize,
    leaves: usize,
    /// Node 1 is the root, the children of `node` are `2 * node` and `2 * node + 1`.
    room: Vec<i64>,
}

impl FirstFit {
    pub(crate) fn new(capacities: &[i64], num_bins: usize) -> Self {
        let leaves = num_bins.next_power_of_two();
        let room = vec![-1; 2 * leaves * capacities.len()];
        let mut tree = Self { capacities: capacities.to_vec(), num_bins, leaves, room };
        tree.clear();
        tree
    }

    pub(crate) fn clear(&mut self) {
        let features = self.capacities.len();
        if features == 0 {
            return;
        }
        // A node has bins below it if its leftmost leaf is one.
        for (node, room) in self.room.chunks_exact_mut(features).enumerate().skip(1) {
            let depth = node.ilog2();
            let leftmost = (node << (self.leaves.ilog2() - depth)) - self.leaves;
            if leftmost < self.num_bins {
                room.copy_from_slice(&self.capacities);
            }
        }
    }

    pub(crate) fn choose(&self, lengths: &[usize]) -> Option<usize> {
        match *lengths {
            [length] => self.descend(length),
            _ => self.search(1, lengths),
        }
    }

    /// One feature: a node with room has a child with room, so no step is taken back.
    fn descend(&self, length: usize) -> Option<usize> {
        let fits =
            |node: usize| i64::try_from(length).is_ok_and(|length| length <= self.room[node]);
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

    /// Several features: the room of a node may come from different bins, so a leaf decides.
    fn search(&self, node: usize, lengths: &[usize]) -> Option<usize> {
        let features = self.capacities.len();
        let room = &self.room[node * features..][..features];
        let fits = |(&length, &room): (&usize, &i64)| {
            i64::try_from(length).is_ok_and(|length| length <= room)
        };
        if !lengths.iter().zip(room).all(fits) {
            return None;
        }
        if node >= self.leaves {
            return Some(node - self.leaves).filter(|&bin| bin < self.num_bins);
        }
        self.search(2 * node, lengths).or_else(|| self.search(2 * node + 1, lengths))
    }

    pub(crate) fn update(&mut self, bin: usize, remaining: &[i64]) {
        let features = remaining.len();
        let mut node = bin + self.leaves;
        self.room[node * features..][..features].copy_from_slice(remaining);
        while node > 1 {
            node /= 2;
            let mut changed = false;
            for feature in 0..features {
                let left = self.room[2 * node * features + feature];
                let right = self.room[(2 * node + 1) * features + feature];
                let room = &mut self.room[node * features + feature];
                changed |= *room != left.max(right);
                *room = left.max(right);
            }
            if !changed {
                break;
            }
        }
    }
}
