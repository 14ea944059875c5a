//! The fullest bin with room, by an ordered set of the bins in use.

use std::cmp::Reverse;
use std::collections::BTreeSet;

/// Bins in order of the cells they use over all features, ties with the first bin last.
///
/// Of the bins not yet in use only the first is in the order, since they are all alike.
#[derive(Debug)]
pub(crate) struct BestFit {
    capacities: Vec<i64>,
    num_bins: usize,
    /// Room by bin and feature.
    room: Vec<i64>,
    /// The key under which each bin stands in `order`.
    total: Vec<i64>,
    order: BTreeSet<(i64, Reverse<usize>)>,
    opened: usize,
}

impl BestFit {
    pub(crate) fn new(capacities: &[i64], num_bins: usize) -> Self {
        let mut fresh = Self {
            capacities: capacities.to_vec(),
            num_bins,
            room: Vec::new(),
            total: Vec::new(),
            order: BTreeSet::new(),
            opened: 0,
        };
        fresh.clear();
        fresh
    }

    pub(crate) fn clear(&mut self) {
        self.room.clear();
        self.total.clear();
        self.order.clear();
        self.opened = 0;
        self.open_next();
    }

    fn open_next(&mut self) {
        if self.opened < self.num_bins {
            self.room.extend_from_slice(&self.capacities);
            self.total.push(0);
            self.order.insert((0, Reverse(self.opened)));
            self.opened += 1;
        }
    }

    pub(crate) fn choose(&self, lengths: &[usize]) -> Option<usize> {
        let features = self.capacities.len();
        let needed: i64 = lengths.iter().filter_map(|&length| i64::try_from(length).ok()).sum();
        // No bin with more cells in use than this has room in every feature.
        let most = self.capacities.iter().sum::<i64>() - needed;
        let candidates = self.order.range(..=(most, Reverse(0))).rev();
        candidates.map(|&(_, Reverse(bin))| bin).find(|bin| {
            let room = &self.room[bin * features..][..features];
            lengths
                .iter()
                .zip(room)
                .all(|(&length, &room)| i64::try_from(length).is_ok_and(|length| length <= room))
        })
    }

    pub(crate) fn update(&mut self, bin: usize, remaining: &[i64], closed: bool) {
        let features = remaining.len();
        if bin + 1 == self.opened {
            self.open_next();
        }
        self.order.remove(&(self.total[bin], Reverse(bin)));
        self.room[bin * features..][..features].copy_from_slice(remaining);
        self.total[bin] = self.capacities.iter().sum::<i64>() - remaining.iter().sum::<i64>();
        // A bin with every feature past its end takes nothing more, not even an empty sequence.
        if !closed && remaining.iter().all(|&room| room >= 0) {
            self.order.insert((self.total[bin], Reverse(bin)));
        }
    }
}
