//! A batch of bins with room for several features, and the choice of a bin for each sequence.
//!
//! Saved states of iterators hold no bins: restoring packs the batch again. So the choice must
//! stay a function of the lengths alone.

use crate::pack::best_fit::BestFit;
use crate::pack::first_fit::FirstFit;
use crate::{Error, Result};

/// Which of the bins that have room a sequence goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fit {
    /// The first one.
    First,
    /// The one with most cells used over all features; the first of equals.
    Best,
}

/// The shape of a batch of bins.
#[derive(Debug, Clone)]
pub struct Layout {
    /// Cells per bin, by feature.
    pub capacities: Vec<usize>,
    /// What the next free cell is rounded up to after each sequence, by feature.
    pub alignments: Vec<usize>,
    /// Bins per batch.
    pub num_bins: usize,
    /// The most sequences a bin takes.
    pub max_sequences: Option<usize>,
}

impl Layout {
    fn check(&self) -> Result<()> {
        let wrong = |problem: String| Err(Error::InvalidArgument(problem));
        if self.num_bins == 0 {
            return wrong("`num_packing_bins` must be at least 1, got 0".into());
        }
        if self.alignments.len() != self.capacities.len() {
            return wrong(format!(
                "one alignment for each of {} features is needed, got {}",
                self.capacities.len(),
                self.alignments.len()
            ));
        }
        if self.alignments.contains(&0) {
            return wrong("the alignment of a feature must be at least 1, got 0".into());
        }
        if self.max_sequences == Some(0) {
            return wrong("`max_sequences_per_bin` must be at least 1, got 0".into());
        }
        Ok(())
    }
}

#[derive(Debug)]
enum Choice {
    First(FirstFit),
    Best(BestFit),
}

/// A batch of bins that fills up.
#[derive(Debug)]
pub struct Bins {
    layout: Layout,
    choice: Choice,
    /// Next free cell, bin by bin, in each feature by feature.
    used: Vec<usize>,
    sequences: Vec<usize>,
    opened: usize,
    remaining: Vec<i64>,
}

impl Bins {
    /// Empty bins.
    ///
    /// # Errors
    ///
    /// If `layout` has no bins, an alignment of 0 or room for no sequence.
    pub fn new(layout: Layout, fit: Fit) -> Result<Self> {
        layout.check()?;
        let capacities: Vec<i64> =
            layout.capacities.iter().map(|&cells| cell_count(cells)).collect();
        let choice = match fit {
            Fit::First => Choice::First(FirstFit::new(&capacities, layout.num_bins)),
            Fit::Best => Choice::Best(BestFit::new(&capacities, layout.num_bins)),
        };
        Ok(Self {
            choice,
            used: vec![0; layout.num_bins * layout.capacities.len()],
            sequences: vec![0; layout.num_bins],
            opened: 0,
            remaining: capacities,
            layout,
        })
    }

    /// The shape of the batch.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// How many bins hold a sequence; these are the first ones.
    pub fn num_opened(&self) -> usize {
        self.opened
    }

    /// Sequences in `bin` so far.
    pub fn num_sequences(&self, bin: usize) -> usize {
        self.sequences[bin]
    }

    /// The next free cell of `bin`, by feature.
    pub fn starts(&self, bin: usize) -> &[usize] {
        let features = self.layout.capacities.len();
        &self.used[bin * features..][..features]
    }

    /// Makes sure that an empty bin would hold a sequence with these lengths.
    ///
    /// # Errors
    ///
    /// If a feature is longer than any bin; `names` and `subject` are for the message.
    pub fn check_lengths(&self, lengths: &[usize], names: &[String], subject: &str) -> Result<()> {
        let capacities = &self.layout.capacities;
        if lengths.iter().zip(capacities).all(|(length, capacity)| length <= capacity) {
            return Ok(());
        }
        let exceeding: Vec<String> = lengths
            .iter()
            .zip(capacities)
            .zip(names)
            .filter(|((length, capacity), _)| length > capacity)
            .map(|((length, capacity), name)| format!("('{name}', {length}, {capacity})"))
            .collect();
        Err(Error::InvalidArgument(format!(
            "Inputs to {subject} must be truncated to max length. Exceeds: (feature_path, \
             feature_length, max_length) = [{}]",
            exceeding.join(", ")
        )))
    }

    /// The bin for a sequence with these lengths by feature; `None` if none has room.
    pub fn choose(&self, lengths: &[usize]) -> Option<usize> {
        match &self.choice {
            Choice::First(tree) => tree.choose(lengths),
            Choice::Best(order) => order.choose(lengths),
        }
    }

    /// Puts a sequence with these lengths into `bin`, as chosen for it.
    pub fn put(&mut self, bin: usize, lengths: &[usize]) {
        let features = self.layout.capacities.len();
        let used = &mut self.used[bin * features..][..features];
        self.sequences[bin] += 1;
        self.opened = self.opened.max(bin + 1);
        let closed = self.layout.max_sequences.is_some_and(|most| self.sequences[bin] >= most);
        for feature in 0..features {
            let end = used[feature] + lengths[feature];
            let alignment = self.layout.alignments[feature];
            used[feature] = if alignment == 1 { end } else { end.next_multiple_of(alignment) };
            self.remaining[feature] = if closed {
                -1
            } else {
                cell_count(self.layout.capacities[feature]) - cell_count(used[feature])
            };
        }
        match &mut self.choice {
            Choice::First(tree) => tree.update(bin, &self.remaining),
            Choice::Best(order) => order.update(bin, &self.remaining, closed),
        }
    }

    /// Empties all bins.
    pub fn clear(&mut self) {
        self.used.fill(0);
        self.sequences.fill(0);
        self.opened = 0;
        match &mut self.choice {
            Choice::First(tree) => tree.clear(),
            Choice::Best(order) => order.clear(),
        }
    }
}

/// A number of cells that may be subtracted from; memory ends long before `i64` does.
pub(crate) fn cell_count(cells: usize) -> i64 {
    i64::try_from(cells).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The bins as lists; every question is answered by looking at all of them.
    struct Slow {
        layout: Layout,
        used: Vec<Vec<usize>>,
        sequences: Vec<usize>,
    }

    impl Slow {
        fn new(layout: &Layout) -> Self {
            let used = vec![vec![0; layout.capacities.len()]; layout.num_bins];
            Self { layout: layout.clone(), used, sequences: vec![0; layout.num_bins] }
        }

        fn choose(&self, lengths: &[usize], fit: Fit) -> Option<usize> {
            let fitting = (0..self.layout.num_bins).filter(|&bin| {
                self.layout.max_sequences.is_none_or(|most| self.sequences[bin] < most)
                    && (0..lengths.len()).all(|feature| {
                        self.used[bin][feature] + lengths[feature]
                            <= self.layout.capacities[feature]
                    })
            });
            match fit {
                Fit::First => fitting.min(),
                Fit::Best => fitting.min_by_key(|&bin| {
                    (std::cmp::Reverse(self.used[bin].iter().sum::<usize>()), bin)
                }),
            }
        }

        fn put(&mut self, bin: usize, lengths: &[usize]) {
            self.sequences[bin] += 1;
            for (feature, length) in lengths.iter().enumerate() {
                let end = self.used[bin][feature] + length;
                self.used[bin][feature] = end.next_multiple_of(self.layout.alignments[feature]);
            }
        }
    }

    fn matches_slow(layout: &Layout, sequences: &[Vec<usize>], fit: Fit) {
        let mut bins = Bins::new(layout.clone(), fit).unwrap();
        let mut slow = Slow::new(layout);
        for lengths in sequences {
            let lengths: Vec<usize> = lengths[..layout.capacities.len()]
                .iter()
                .zip(&layout.capacities)
                .map(|(length, capacity)| length % (capacity + 1))
                .collect();
            let mut chosen = bins.choose(&lengths);
            assert_eq!(chosen, slow.choose(&lengths, fit));
            if chosen.is_none() {
                bins.clear();
                slow = Slow::new(layout);
                chosen = Some(0);
                assert_eq!(bins.choose(&lengths), chosen);
            }
            let bin = chosen.unwrap();
            bins.put(bin, &lengths);
            slow.put(bin, &lengths);
            assert_eq!(bins.starts(bin), slow.used[bin]);
            assert_eq!(bins.num_sequences(bin), slow.sequences[bin]);
            let opened = slow.sequences.iter().filter(|&&count| count > 0).count();
            assert_eq!(bins.num_opened(), opened);
        }
    }

    fn layouts() -> impl Strategy<Value = Layout> {
        let feature = (1_usize..30, 1_usize..5);
        let features = proptest::collection::vec(feature, 1..4);
        (features, 1_usize..20, proptest::option::of(1_usize..5)).prop_map(
            |(features, num_bins, max_sequences)| Layout {
                capacities: features.iter().map(|feature| feature.0).collect(),
                alignments: features.iter().map(|feature| feature.1).collect(),
                num_bins,
                max_sequences,
            },
        )
    }

    fn sequences() -> impl Strategy<Value = Vec<Vec<usize>>> {
        proptest::collection::vec(proptest::collection::vec(0_usize..30, 3..4), 1..150)
    }

    proptest! {
        #[test]
        fn first_fit_matches_slow(layout in layouts(), sequences in sequences()) {
            matches_slow(&layout, &sequences, Fit::First);
        }

        #[test]
        fn best_fit_matches_slow(layout in layouts(), sequences in sequences()) {
            matches_slow(&layout, &sequences, Fit::Best);
        }
    }

    fn layout() -> Layout {
        Layout { capacities: vec![4], alignments: vec![1], num_bins: 2, max_sequences: None }
    }

    #[test]
    fn layouts_without_room_are_refused() {
        let wrong = [
            Layout { num_bins: 0, ..layout() },
            Layout { alignments: vec![0], ..layout() },
            Layout { alignments: vec![], ..layout() },
            Layout { max_sequences: Some(0), ..layout() },
        ];
        for layout in wrong {
            assert!(Bins::new(layout, Fit::First).is_err());
        }
    }

    #[test]
    fn sequence_longer_than_every_bin_is_told() {
        let bins = Bins::new(layout(), Fit::Best).unwrap();
        let names = ["tokens".to_owned()];
        assert!(bins.check_lengths(&[4], &names, "packer").is_ok());
        let told = bins.check_lengths(&[5], &names, "packer").unwrap_err().to_string();
        assert!(told.ends_with("max_length) = [('tokens', 5, 4)]"), "{told}");
    }
}
