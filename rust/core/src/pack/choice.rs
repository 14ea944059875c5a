//! The structures that know which bin is next; one feature is quicker than several.

use std::fmt::Debug;

use crate::pack::best_fit::BestFit;
use crate::pack::bins::{Fit, cell_count};
use crate::pack::first_fit::FirstFit;
use crate::pack::room_rows::RoomRows;
use crate::pack::room_trie::RoomTrie;
use crate::pack::staircase::FirstFitOfTwo;

/// The most bins that are compared many at once, at 64 looks, when they differ by feature.
///
/// That is quicker than trees, and no lengths make it slower; but it grows with the bins, and
/// trees hardly do.
const MOST_BINS_IN_ROWS: usize = 1 << 14;

/// Bins by the room they have, arranged for one fit.
pub(crate) trait Rooms: Debug + Send + Sync {
    /// Makes all bins empty.
    fn clear(&mut self);

    /// The bin for a sequence with these lengths by feature; `None` if none has room.
    fn choose(&self, lengths: &[usize]) -> Option<usize>;

    /// Sets the room of `bin` by feature, which only falls; a closed bin has -1 in all.
    ///
    /// Bins come into use in order.
    fn update(&mut self, bin: usize, room: &[i64]);
}

/// Arranges bins with these capacities by feature, so many, for a fit.
pub(crate) type Arrange = fn(&[usize], usize, Fit) -> Box<dyn Rooms>;

/// The bins of a batch.
///
/// As long as every bin has the same room in all features, which takes features of the same
/// lengths, the longest feature decides and the others are left out.
#[derive(Debug)]
pub(crate) struct Choice {
    capacities: Vec<usize>,
    num_bins: usize,
    fit: Fit,
    one: Box<dyn Rooms>,
    several: Option<Box<dyn Rooms>>,
    arrange: Arrange,
    /// Whether every bin has the same room in all features.
    alike: bool,
}

impl Choice {
    /// `arrange` is for features that differ; see [`arranged`].
    pub(crate) fn new(capacities: &[usize], num_bins: usize, fit: Fit, arrange: Arrange) -> Self {
        let capacity = cell_count(capacities[0]);
        let one: Box<dyn Rooms> = match fit {
            Fit::First => Box::new(FirstFit::new(capacity, num_bins)),
            Fit::Best => Box::new(BestFit::new(capacity, num_bins)),
        };
        let capacities = capacities.to_vec();
        let (several, alike) = (None, true);
        let mut fresh = Self { capacities, num_bins, fit, one, several, arrange, alike };
        fresh.clear();
        fresh
    }

    pub(crate) fn clear(&mut self) {
        self.one.clear();
        self.alike = all_same(&self.capacities);
        if !self.alike {
            self.part();
        }
    }

    pub(crate) fn choose(&self, lengths: &[usize]) -> Option<usize> {
        match &self.several {
            Some(several) if !self.alike => several.choose(lengths),
            _ => self.one.choose(&[*lengths.iter().max()?]),
        }
    }

    /// Tells that the room of `bin` has changed; `rooms` are those of all bins in use.
    pub(crate) fn update(&mut self, bin: usize, rooms: &[i64]) {
        let features = self.capacities.len();
        let room = &rooms[bin * features..][..features];
        if !self.alike {
            self.several.iter_mut().for_each(|several| several.update(bin, room));
        } else if all_same(room) {
            self.one.update(bin, &room[..1]);
        } else {
            let several = self.part();
            for (bin, room) in rooms.chunks_exact(features).enumerate() {
                several.update(bin, room);
            }
        }
    }

    /// Goes over to the structure for several features, with empty bins.
    fn part(&mut self) -> &mut Box<dyn Rooms> {
        self.alike = false;
        let arranged = || (self.arrange)(&self.capacities, self.num_bins, self.fit);
        let several = self.several.get_or_insert_with(arranged);
        several.clear();
        several
    }
}

/// Bins with several features in the way that is quicker for so many.
pub(crate) fn arranged(capacities: &[usize], num_bins: usize, fit: Fit) -> Box<dyn Rooms> {
    if num_bins <= MOST_BINS_IN_ROWS {
        in_rows(capacities, num_bins, fit)
    } else {
        in_trees(capacities, num_bins, fit)
    }
}

pub(crate) fn in_rows(capacities: &[usize], num_bins: usize, fit: Fit) -> Box<dyn Rooms> {
    Box::new(RoomRows::new(capacities, num_bins, fit))
}

pub(crate) fn in_trees(capacities: &[usize], num_bins: usize, fit: Fit) -> Box<dyn Rooms> {
    let fullest_first = fit == Fit::Best;
    match (capacities.len(), fit) {
        (2, Fit::First) => {
            let capacities = [capacities[0], capacities[1]].map(cell_count);
            Box::new(FirstFitOfTwo::new(capacities, num_bins))
        }
        (2, Fit::Best) => Box::new(RoomTrie::<[_; 2]>::new(capacities, num_bins, fullest_first)),
        (3..=4, _) => Box::new(RoomTrie::<[_; 4]>::new(capacities, num_bins, fullest_first)),
        _ => Box::new(RoomTrie::<Vec<_>>::new(capacities, num_bins, fullest_first)),
    }
}

fn all_same<T: PartialEq>(cells: &[T]) -> bool {
    cells.iter().all(|other| *other == cells[0])
}

pub(crate) fn total(cells: impl Iterator<Item = usize>) -> usize {
    cells.fold(0, usize::saturating_add)
}
