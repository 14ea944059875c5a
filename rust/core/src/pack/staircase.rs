//! The first bin with room in two features, by a tree that knows exactly what fits where.

use crate::pack::bins::cell_count;
use crate::pack::choice::Rooms;

/// Room in both features; a closed bin has -1 in both.
type Room = [i64; 2];

/// Bins that are looked at one by one.
const BLOCK: usize = 16;

/// A complete binary tree over blocks of bins; each node keeps the staircase of the bins below.
///
/// A staircase covers what fits into one of its bins and nothing else, so a search takes no
/// step back: it bisects one staircase for each level. A change of a bin climbs as long as no
/// other bin below a node has the room that is gone, and looks at the steps that were within
/// it. Such a step shows once and stays until its own bin changes, so there are few; but one
/// change may move a whole staircase, whose steps are fewer than the bins and the cells of one.
#[derive(Debug)]
pub(crate) struct FirstFitOfTwo {
    capacities: Room,
    leaves: usize,
    /// Room by bin.
    rooms: Vec<Room>,
    /// Node 1 is the root, the children of `node` are `2 * node` and `2 * node + 1`.
    nodes: Vec<Staircase>,
}

impl FirstFitOfTwo {
    pub(crate) fn new(capacities: Room, num_bins: usize) -> Self {
        let leaves = num_bins.div_ceil(BLOCK).next_power_of_two();
        let rooms = vec![capacities; num_bins];
        let mut tree =
            Self { capacities, leaves, rooms, nodes: vec![Staircase::default(); 2 * leaves] };
        tree.clear();
        tree
    }
}

impl Rooms for FirstFitOfTwo {
    fn clear(&mut self) {
        self.rooms.fill(self.capacities);
        for (node, staircase) in self.nodes.iter_mut().enumerate().skip(1) {
            // A node has bins below it if its leftmost leaf has one.
            let depth = node.ilog2();
            let leftmost = (node << (self.leaves.ilog2() - depth)) - self.leaves;
            staircase.0.clear();
            if leftmost * BLOCK < self.rooms.len() {
                staircase.0.push(self.capacities);
            }
        }
    }

    fn choose(&self, lengths: &[usize]) -> Option<usize> {
        let lengths = [lengths[0], lengths[1]].map(cell_count);
        let mut node = 1;
        if !self.nodes[node].covers(lengths) {
            return None;
        }
        while node < self.leaves {
            #[cfg(test)]
            super::looks::add(1);
            node *= 2;
            if !self.nodes[node].covers(lengths) {
                node += 1;
            }
        }
        let first = (node - self.leaves) * BLOCK;
        let inside = self.rooms[first..].iter().position(|&room| within(lengths, room));
        inside.map(|bin| first + bin)
    }

    fn update(&mut self, bin: usize, room: &[i64]) {
        let gone = std::mem::replace(&mut self.rooms[bin], [room[0], room[1]]);
        let first = bin / BLOCK * BLOCK;
        let block = &self.rooms[first..self.rooms.len().min(first + BLOCK)];
        if block.iter().any(|&room| within(gone, room)) {
            return;
        }
        let mut node = self.leaves + bin / BLOCK;
        let shown = block.iter().copied().filter(|&room| within(room, gone));
        self.nodes[node].replace(gone, shown);
        while node > 1 {
            node /= 2;
            #[cfg(test)]
            super::looks::add(1);
            let (above, below) = self.nodes.split_at_mut(2 * node);
            let [left, right, ..] = below else { return };
            if left.covers(gone) || right.covers(gone) {
                return;
            }
            above[node].replace(gone, left.within(gone).chain(right.within(gone)));
        }
    }
}

/// Rooms none of which is within another, with less and less in the first feature and so more
/// and more in the second.
#[derive(Debug, Clone, Default)]
struct Staircase(Vec<Room>);

impl Staircase {
    fn covers(&self, lengths: Room) -> bool {
        let end = self.0.partition_point(|room| room[0] >= lengths[0]);
        end > 0 && self.0[end - 1][1] >= lengths[1]
    }

    /// The steps within `room`.
    fn within(&self, room: Room) -> impl Iterator<Item = Room> {
        let begin = self.0.partition_point(|step| step[0] > room[0]);
        self.0[begin..].iter().copied().take_while(move |step| step[1] <= room[1])
    }

    /// Takes the step `gone` out and adds what may be one now.
    fn replace(&mut self, gone: Room, shown: impl Iterator<Item = Room>) {
        let at = self.0.partition_point(|step| step[0] > gone[0]);
        if self.0.get(at) == Some(&gone) {
            self.0.remove(at);
        }
        for room in shown {
            #[cfg(test)]
            super::looks::add(1);
            if !self.covers(room) {
                let begin = self.0.partition_point(|step| step[0] > room[0]);
                let end = begin + self.within(room).count();
                self.0.splice(begin..end, [room]);
            }
        }
    }
}

fn within(lengths: Room, room: Room) -> bool {
    lengths[0] <= room[0] && lengths[1] <= room[1]
}
