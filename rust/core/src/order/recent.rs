//! The permutations used last, so that a key schedule or a small table is made once per epoch.

use super::permute::{Permutation, SHUFFLE_ROUNDS};
use crate::Result;

/// Epochs kept. Readers of one pipeline are seldom in more at once.
const KEPT: usize = 4;

/// Below this many records an index walks four blocks and more, and a table of the whole epoch
/// (at most 32 KiB) soon costs less.
const MAX_TABLE_LEN: u64 = 1 << 14;

/// A few permutations, the one used last first.
#[derive(Clone, Debug, Default)]
pub(crate) struct RecentPermutations {
    kept: Vec<Entry>,
}

#[derive(Clone, Debug)]
struct Entry {
    seed: u32,
    permutation: Permutation,
    num_walked: u64,
    table: Option<Box<[u16]>>,
}

impl RecentPermutations {
    /// Replaces each of `index`, in `0..num_records`, by where `seed` sends it.
    pub(crate) fn apply(&mut self, num_records: u64, seed: u32, index: &mut [i64]) -> Result<()> {
        self.entry(num_records, seed)?.apply(index)
    }

    fn entry(&mut self, num_records: u64, seed: u32) -> Result<&mut Entry> {
        let is_wanted =
            |entry: &Entry| entry.seed == seed && entry.permutation.num_records() == num_records;
        if let Some(place) = self.kept.iter().position(is_wanted) {
            self.kept[..=place].rotate_right(1);
        } else {
            let permutation = Permutation::new(num_records, seed, SHUFFLE_ROUNDS)?;
            self.kept.truncate(KEPT - 1);
            self.kept.insert(0, Entry { seed, permutation, num_walked: 0, table: None });
        }
        Ok(&mut self.kept[0])
    }
}

impl Entry {
    fn apply(&mut self, index: &mut [i64]) -> Result<()> {
        let num_records = self.permutation.num_records();
        if self.table.is_none() && num_records <= MAX_TABLE_LEN {
            self.num_walked = self.num_walked.saturating_add(index.len() as u64);
            // A table costs as much as walking every index once.
            if self.num_walked > num_records / 2 {
                self.table = Some(self.permutation.table()?);
            }
        }
        let Some(table) = &self.table else { return self.permutation.apply_block(index) };
        for index in index {
            let place = usize::try_from(*index).ok().and_then(|place| table.get(place));
            *index = match place {
                Some(&moved) => moved.into(),
                None => return Err(self.permutation.outside(*index)),
            };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{KEPT, RecentPermutations};
    use crate::order::Permutation;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn kept_permutations_match_fresh_ones(
            calls in prop::collection::vec((0..6_u32, 1000..20_000_u64, 1..3000_usize), 1..12),
        ) {
            let mut recent = RecentPermutations::default();
            for (seed, num_records, len) in calls {
                let num_records = num_records / 3000 * 3000 + 500;
                let mut block: Vec<i64> = (0..num_records.cast_signed()).cycle().take(len).collect();
                let mut expected = block.clone();
                recent.apply(num_records, seed, &mut block).unwrap();
                Permutation::new(num_records, seed, 4).unwrap().apply_block(&mut expected).unwrap();
                prop_assert_eq!(block, expected);
                prop_assert!(recent.kept.len() <= KEPT);
            }
        }
    }

    #[test]
    fn a_table_is_made_once_half_an_epoch_was_asked_for() {
        let mut recent = RecentPermutations::default();
        for expected in [false, true, true] {
            recent.apply(1000, 1, &mut [5; 300]).unwrap();
            assert_eq!(recent.kept[0].table.is_some(), expected);
        }
        assert!(recent.apply(1000, 1, &mut [1000]).is_err());
        assert!(recent.apply(1000, 1, &mut [-1]).is_err());
        recent.apply(1 << 30, 1, &mut [5; 300]).unwrap();
        assert!(recent.kept[0].table.is_none());
    }
}
