//! The structures that know which bin is next; one feature is quicker than several.

use crate::pack::best_fit::BestFit;
use crate::pack::bit_rows::BitRows;
use crate::pack::first_fit::FirstFit;
use crate::pack::free_space::{Fit, FreeSpace, cell_count};

/// The bins of a batch.
///
/// As long as every bin has the same room in all features, which takes features of the same
/// lengths, the longest feature decides and the others are left out.
#[derive(Debug)]
pub(crate) struct Choice {
    capacities: Vec<usize>,
    num_bins: usize,
    fit: Fit,
    one: Box<dyn FreeSpace>,
    several: Option<BitRows>,
    /// Whether every bin has the same room in all features.
    alike: bool,
}

impl Choice {
    pub(crate) fn new(capacities: &[usize], num_bins: usize, fit: Fit) -> Self {
        let capacity = cell_count(capacities[0]);
        let one: Box<dyn FreeSpace> = match fit {
            Fit::First => Box::new(FirstFit::new(capacity, num_bins)),
            Fit::Best => Box::new(BestFit::new(capacity, num_bins)),
        };
        let capacities = capacities.to_vec();
        let mut fresh = Self { capacities, num_bins, fit, one, several: None, alike: true };
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
    fn part(&mut self) -> &mut BitRows {
        self.alike = false;
        let new = || BitRows::new(&self.capacities, self.num_bins, self.fit);
        let several = self.several.get_or_insert_with(new);
        several.clear();
        several
    }
}

fn all_same<T: PartialEq>(cells: &[T]) -> bool {
    cells.iter().all(|other| *other == cells[0])
}
