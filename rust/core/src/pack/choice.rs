//! Selects the search structure for the bins of a batch: one feature is faster than several.

use crate::pack::best_fit::BestFit;
use crate::pack::bit_rows::BitRows;
use crate::pack::first_fit::FirstFit;
use crate::pack::free_space::{Fit, FreeSpace, signed_len};

/// The search structures for the bins of a batch.
///
/// While every bin has the same free space in all features, because sequences have equal lengths
/// in all of them, only the longest feature is searched.
#[derive(Debug)]
pub(crate) struct Choice {
    capacities: Vec<usize>,
    num_bins: usize,
    fit: Fit,
    one: Box<dyn FreeSpace>,
    several: Option<BitRows>,
    /// Whether every bin has the same free space in all features.
    is_uniform: bool,
}

impl Choice {
    pub(crate) fn new(capacities: &[usize], num_bins: usize, fit: Fit) -> Self {
        let capacity = signed_len(capacities[0]);
        let one: Box<dyn FreeSpace> = match fit {
            Fit::First => Box::new(FirstFit::new(capacity, num_bins)),
            Fit::Best => Box::new(BestFit::new(capacity, num_bins)),
        };
        let capacities = capacities.to_vec();
        let mut new = Self { capacities, num_bins, fit, one, several: None, is_uniform: true };
        new.clear();
        new
    }

    pub(crate) fn clear(&mut self) {
        self.one.clear();
        self.is_uniform = all_same(&self.capacities);
        if !self.is_uniform {
            self.switch_to_several();
        }
    }

    pub(crate) fn choose(&self, lengths: &[usize]) -> Option<usize> {
        match &self.several {
            Some(several) if !self.is_uniform => several.choose(lengths),
            _ => self.one.choose(&[*lengths.iter().max()?]),
        }
    }

    /// Updates the search structure after a change of `bin`; `free` is the free space of all open
    /// bins, by bin and feature.
    pub(crate) fn update(&mut self, bin: usize, free: &[i64]) {
        let features = self.capacities.len();
        let bin_free = &free[bin * features..][..features];
        if !self.is_uniform {
            self.several.iter_mut().for_each(|several| several.update(bin, bin_free));
        } else if all_same(bin_free) {
            self.one.update(bin, &bin_free[..1]);
        } else {
            let several = self.switch_to_several();
            for (bin, bin_free) in free.chunks_exact(features).enumerate() {
                several.update(bin, bin_free);
            }
        }
    }

    /// Switches to the structure for several features, with empty bins.
    fn switch_to_several(&mut self) -> &mut BitRows {
        self.is_uniform = false;
        let empty = || BitRows::new(&self.capacities, self.num_bins, self.fit);
        let several = self.several.get_or_insert_with(empty);
        several.clear();
        several
    }
}

fn all_same<T: PartialEq>(values: &[T]) -> bool {
    values.iter().all(|other| *other == values[0])
}
