//! The first or the fullest bin with room in several features, by where their rooms lie.

use std::fmt::Debug;

use crate::pack::choice::{Rooms, total};

/// The most bins of a leaf, where they are looked at one by one.
const LEAF_BINS: usize = 32;

/// Cells by feature. Arrays may have more places than there are features, all of them 0.
pub(crate) trait Cells:
    AsRef<[usize]> + AsMut<[usize]> + Clone + Debug + Send + Sync
{
    fn by_feature(cells: &[usize]) -> Self;

    fn within(&self, room: &Self) -> bool {
        self.as_ref().iter().zip(room.as_ref()).all(|(cells, room)| cells <= room)
    }
}

impl<const PLACES: usize> Cells for [usize; PLACES] {
    fn by_feature(cells: &[usize]) -> Self {
        let mut padded = [0; PLACES];
        padded[..cells.len()].copy_from_slice(cells);
        padded
    }
}

impl Cells for Vec<usize> {
    fn by_feature(cells: &[usize]) -> Self {
        cells.to_vec()
    }
}

/// A bin's place in the order of choice: the cells it has left, if that matters, and its number.
type Rank = (usize, usize);

/// After every bin.
const NONE: Rank = (usize::MAX, usize::MAX);

/// A trie of bins by the bits of their room, one bit of each feature after the other, so that
/// the rooms below a node lie in one box.
///
/// If lengths are within the box, all bins of the node have room and the first is known; if
/// they exceed it, none has. So a search goes on only where they lie between, in the order in
/// which the boxes may hold the first bin. Of the bins not yet in use only the first is in the
/// trie, since they are all alike.
///
/// The depth is at most the number of bits of the capacities and of the number of bins. For
/// the fullest bin with two features a search visits a few nodes of each depth: where lengths
/// lie between in one feature only, the box holds a bin with room, hardly fuller than it looks
/// from outside. With more features, and for the first bin, boxes that hold none or a late one
/// may line up, in the worst case all of them; sequences of documents visit some tens.
#[derive(Debug)]
pub(crate) struct RoomTrie<C> {
    capacities: C,
    num_bins: usize,
    fullest_first: bool,
    /// Level by level, the feature and the bit of its room that part a node's children; below
    /// these, bits of the bin's number, which then stands for one more feature.
    levels: Vec<(usize, u32)>,
    /// Room by bin.
    rooms: Vec<C>,
    /// The first is the root.
    nodes: Vec<Node<C>>,
}

#[derive(Debug, Clone)]
struct Bin<C> {
    rank: Rank,
    room: C,
}

/// A box around rooms, and the first of the ranks.
#[derive(Debug)]
struct Bounds<C> {
    first: Rank,
    least: C,
    most: C,
}

#[derive(Debug)]
struct Node<C> {
    /// `None` if there are no bins; those of the root are not kept.
    bounds: Option<Bounds<C>>,
    below: Below<C>,
}

#[derive(Debug)]
enum Below<C> {
    Bins(Vec<Bin<C>>),
    /// The first of two nodes that follow one another.
    Children(usize),
}

impl<C: Cells> RoomTrie<C> {
    pub(crate) fn new(capacities: &[usize], num_bins: usize, fullest_first: bool) -> Self {
        let mut levels = Vec::new();
        for bit in (0..usize::BITS).rev() {
            let parted = |&feature: &usize| capacities[feature] >> bit > 0;
            levels.extend((0..capacities.len()).filter(parted).map(|feature| (feature, bit)));
        }
        let bits = usize::BITS - (num_bins - 1).leading_zeros();
        levels.extend((0..bits).rev().map(|bit| (usize::MAX, bit)));
        let mut trie = Self {
            capacities: C::by_feature(capacities),
            num_bins,
            fullest_first,
            levels,
            rooms: Vec::new(),
            nodes: Vec::new(),
        };
        trie.clear();
        trie
    }
}

impl<C: Cells> Rooms for RoomTrie<C> {
    fn clear(&mut self) {
        self.rooms.clear();
        self.nodes.clear();
        self.nodes.push(Node { bounds: None, below: Below::Bins(Vec::new()) });
        self.open_next();
    }

    fn choose(&self, lengths: &[usize]) -> Option<usize> {
        let mut best = NONE;
        self.search(0, (0, 0), &C::by_feature(lengths), &mut best);
        (best != NONE).then_some(best.1)
    }

    fn update(&mut self, bin: usize, room: &[i64]) {
        if bin + 1 == self.rooms.len() {
            self.open_next();
        }
        let gone = self.bin(bin, self.rooms[bin].clone());
        if room.iter().any(|&cells| cells < 0) {
            return self.change(0, 0, Some(&gone), None);
        }
        for (place, &cells) in self.rooms[bin].as_mut().iter_mut().zip(room) {
            *place = usize::try_from(cells).unwrap_or(0);
        }
        let come = self.bin(bin, self.rooms[bin].clone());
        self.change(0, 0, Some(&gone), Some(&come));
    }
}

impl<C: Cells> RoomTrie<C> {
    fn open_next(&mut self) {
        if self.rooms.len() < self.num_bins {
            let bin = self.bin(self.rooms.len(), self.capacities.clone());
            self.rooms.push(self.capacities.clone());
            self.change(0, 0, None, Some(&bin));
        }
    }

    /// Makes `best` the first rank of bins below `node` with room, if that is before it; it is
    /// not before `least`.
    fn search(&self, node: usize, least: Rank, lengths: &C, best: &mut Rank) {
        if least >= *best {
            return;
        }
        #[cfg(test)]
        super::looks::add(1);
        match &self.nodes[node].below {
            Below::Bins(bins) => {
                for bin in bins {
                    if bin.rank < *best && lengths.within(&bin.room) {
                        *best = bin.rank;
                    }
                }
            }
            &Below::Children(left) => {
                let mut ranks = [NONE; 2];
                for (rank, child) in ranks.iter_mut().zip(&self.nodes[left..]) {
                    let Some(bounds) = &child.bounds else { continue };
                    if lengths.within(&bounds.least) {
                        *best = bounds.first.min(*best);
                    } else if lengths.within(&bounds.most) {
                        *rank = bounds.first;
                        if self.fullest_first {
                            let room = lengths.as_ref().iter().zip(bounds.least.as_ref());
                            let room = room.map(|(&length, &room)| length.max(room));
                            *rank = bounds.first.max((total(room), 0));
                        }
                    }
                }
                let near = usize::from(ranks[1] < ranks[0]);
                self.search(left + near, ranks[near], lengths, best);
                self.search(left + 1 - near, ranks[1 - near], lengths, best);
            }
        }
    }

    fn bin(&self, bin: usize, room: C) -> Bin<C> {
        let left = if self.fullest_first { total(room.as_ref().iter().copied()) } else { 0 };
        Bin { rank: (left, bin), room }
    }

    /// Takes one bin out below `node` and another in.
    fn change(&mut self, node: usize, level: usize, gone: Option<&Bin<C>>, come: Option<&Bin<C>>) {
        match &mut self.nodes[node].below {
            Below::Bins(bins) => {
                if let Some(gone) = gone
                    && let Some(at) = bins.iter().position(|bin| bin.rank == gone.rank)
                {
                    bins.swap_remove(at);
                }
                bins.extend(come.cloned());
                if bins.len() > LEAF_BINS && level < self.levels.len() {
                    self.split(node, level);
                }
            }
            &mut Below::Children(left) => {
                for side in 0..2 {
                    let here = |bin: &&Bin<C>| self.side(level, bin) == side;
                    let (gone, come) = (gone.filter(here), come.filter(here));
                    if gone.is_some() || come.is_some() {
                        self.change(left + side, level + 1, gone, come);
                        self.set_bounds(left + side, gone, come);
                    }
                }
            }
        }
    }

    /// The child of a node at `level` that `bin` is below.
    fn side(&self, level: usize, bin: &Bin<C>) -> usize {
        let (feature, bit) = self.levels[level];
        bin.room.as_ref().get(feature).copied().unwrap_or(bin.rank.1) >> bit & 1
    }

    /// Turns a leaf into a node with two leaves, and so on down to leaves that are small.
    fn split(&mut self, node: usize, level: usize) {
        let left = self.nodes.len();
        let below = std::mem::replace(&mut self.nodes[node].below, Below::Children(left));
        let Below::Bins(bins) = below else { return };
        let (ones, zeros): (Vec<_>, Vec<_>) =
            bins.into_iter().partition(|bin| self.side(level, bin) == 1);
        let large = [&zeros, &ones].map(|bins| bins.len() > LEAF_BINS);
        for bins in [zeros, ones] {
            self.nodes.push(Node { bounds: None, below: Below::Bins(bins) });
        }
        for (child, large) in [left, left + 1].into_iter().zip(large) {
            if large && level + 1 < self.levels.len() {
                self.split(child, level + 1);
            }
            self.find_bounds(child);
        }
    }

    /// Sets the bounds of `node` after a change below it.
    fn set_bounds(&mut self, node: usize, gone: Option<&Bin<C>>, come: Option<&Bin<C>>) {
        #[cfg(test)]
        super::looks::add(1);
        match (&mut self.nodes[node].bounds, gone, come) {
            (Some(bounds), None, Some(come)) => bounds.add(come.rank, &come.room, &come.room),
            (Some(bounds), Some(gone), come) if !bounds.rest_on(gone) => {
                if let Some(come) = come {
                    bounds.add(come.rank, &come.room, &come.room);
                }
            }
            _ => self.find_bounds(node),
        }
    }

    fn find_bounds(&mut self, node: usize) {
        let mut found: Option<Bounds<C>> = None;
        let mut add = |first: Rank, least: &C, most: &C| match &mut found {
            Some(bounds) => bounds.add(first, least, most),
            None => found = Some(Bounds { first, least: least.clone(), most: most.clone() }),
        };
        match &self.nodes[node].below {
            Below::Bins(bins) => bins.iter().for_each(|bin| add(bin.rank, &bin.room, &bin.room)),
            &Below::Children(left) => {
                for bounds in self.nodes[left..=left + 1].iter().flat_map(|node| &node.bounds) {
                    add(bounds.first, &bounds.least, &bounds.most);
                }
            }
        }
        self.nodes[node].bounds = found;
    }
}

impl<C: Cells> Bounds<C> {
    fn add(&mut self, first: Rank, least: &C, most: &C) {
        self.first = self.first.min(first);
        for (cells, &other) in self.least.as_mut().iter_mut().zip(least.as_ref()) {
            *cells = (*cells).min(other);
        }
        for (cells, &other) in self.most.as_mut().iter_mut().zip(most.as_ref()) {
            *cells = (*cells).max(other);
        }
    }

    /// Whether they may be narrower without `bin`.
    fn rest_on(&self, bin: &Bin<C>) -> bool {
        let mut bounds = self.least.as_ref().iter().zip(self.most.as_ref());
        let at_bound = |cells| {
            bounds
                .next()
                .is_some_and(|(least, most)| least < most && (cells == least || cells == most))
        };
        self.first == bin.rank || bin.room.as_ref().iter().any(at_bound)
    }
}
