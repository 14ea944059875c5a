//! A batch of bins with room for several features, and the choice of a bin for each sequence.
//!
//! Saved states of iterators hold no bins: restoring packs the batch again. So the choice must
//! stay a function of the lengths alone.

use crate::pack::choice::Choice;
use crate::pack::free_space::{Fit, cell_count};
use crate::try_alloc::check_available;
use crate::{Error, Result};

/// The shape of a batch of bins.
#[derive(Debug, Clone)]
pub struct BinShape {
    /// Cells per bin, by feature.
    pub capacities: Vec<usize>,
    /// What the next free cell is rounded up to after each sequence, by feature.
    pub alignments: Vec<usize>,
    /// Bins per batch.
    pub num_bins: usize,
    /// The most sequences a bin takes.
    pub max_sequences: Option<usize>,
}

impl BinShape {
    fn check(&self) -> Result<()> {
        let wrong = |problem: String| Err(Error::InvalidArgument(problem));
        if self.num_bins == 0 {
            return wrong("`num_packing_bins` must be at least 1, got 0".into());
        }
        if self.capacities.is_empty() {
            return wrong("`length_struct` must name at least one feature, got none".into());
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

/// A batch of bins that fills up.
#[derive(Debug)]
pub struct Bins {
    layout: BinShape,
    choice: Choice,
    /// Next free cell, bin by bin, in each feature by feature.
    used: Vec<usize>,
    /// Room, in the same order; a closed bin has -1.
    rooms: Vec<i64>,
    sequences: Vec<usize>,
    opened: usize,
}

impl Bins {
    /// Empty bins.
    ///
    /// # Errors
    ///
    /// If `layout` has no bins, no features, an alignment of 0 or room for no sequence, or more bins
    /// than fit into memory.
    pub fn new(layout: BinShape, fit: Fit) -> Result<Self> {
        layout.check()?;
        let cells = layout.num_bins.saturating_mul(layout.capacities.len());
        // A bin takes two words for each feature, and some 14 for its place in the arrangement.
        let words = cells.saturating_mul(2).saturating_add(layout.num_bins.saturating_mul(14));
        check_available::<u64>(words, || format!("{} bins", layout.num_bins))?;
        Ok(Self {
            choice: Choice::new(&layout.capacities, layout.num_bins, fit),
            used: vec![0; cells],
            rooms: vec![0; cells],
            sequences: vec![0; layout.num_bins],
            opened: 0,
            layout,
        })
    }

    /// The shape of the batch.
    pub fn layout(&self) -> &BinShape {
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
        self.choice.choose(lengths)
    }

    /// Puts a sequence with these lengths into `bin`, as chosen for it.
    pub fn put(&mut self, bin: usize, lengths: &[usize]) {
        let features = self.layout.capacities.len();
        let cells = bin * features..(bin + 1) * features;
        let (used, room) = (&mut self.used[cells.clone()], &mut self.rooms[cells]);
        self.sequences[bin] += 1;
        self.opened = self.opened.max(bin + 1);
        let mut closed = self.layout.max_sequences.is_some_and(|most| self.sequences[bin] >= most);
        for feature in 0..features {
            let end = used[feature] + lengths[feature];
            let alignment = self.layout.alignments[feature];
            used[feature] = if alignment == 1 { end } else { end.next_multiple_of(alignment) };
            room[feature] = cell_count(self.layout.capacities[feature]) - cell_count(used[feature]);
            closed |= room[feature] < 0;
        }
        if closed {
            room.fill(-1);
        }
        self.choice.update(bin, &self.rooms[..self.opened * features]);
    }

    /// Empties all bins.
    pub fn clear(&mut self) {
        self.used.fill(0);
        self.sequences.fill(0);
        self.opened = 0;
        self.choice.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;
    use crate::pack::looks;
    use proptest::prelude::*;

    /// The bins as lists; every question is answered by looking at all of them.
    struct Slow {
        layout: BinShape,
        used: Vec<Vec<usize>>,
        sequences: Vec<usize>,
    }

    impl Slow {
        fn new(layout: &BinShape) -> Self {
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

    fn matches_slow(layout: &BinShape, sequences: &[Vec<usize>]) {
        for fit in [Fit::First, Fit::Best] {
            bins_match_slow_ones(Bins::new(layout.clone(), fit).unwrap(), sequences, fit);
        }
    }

    fn bins_match_slow_ones(mut bins: Bins, sequences: &[Vec<usize>], fit: Fit) {
        let layout = &bins.layout.clone();
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

    /// Layouts; half of them treat all features alike.
    fn layouts(num_bins: Range<usize>) -> impl Strategy<Value = BinShape> {
        let feature = (1_usize..60, 1_usize..5);
        let features = (proptest::collection::vec(feature, 1..6), any::<bool>());
        let features = features.prop_map(|(mut features, alike)| {
            if alike {
                features = vec![features[0]; features.len()];
            }
            features
        });
        (features, num_bins, proptest::option::of(1_usize..5)).prop_map(
            |(features, num_bins, max_sequences)| BinShape {
                capacities: features.iter().map(|feature| feature.0).collect(),
                alignments: features.iter().map(|feature| feature.1).collect(),
                num_bins,
                max_sequences,
            },
        )
    }

    /// Lengths of five features: independent, the same, nearly the same, or long where others
    /// are short; of every kind in turn.
    fn sequences(count: Range<usize>) -> impl Strategy<Value = Vec<Vec<usize>>> {
        let sequence = (proptest::collection::vec(0_usize..60, 5), 0..4).prop_map(|(any, kind)| {
            let like_first = |(feature, cells): (usize, &usize)| match kind {
                0 => *cells,
                1 => any[0],
                2 => any[0] + cells % 4,
                _ if feature % 2 == 0 => any[0],
                _ => 60 - any[0],
            };
            any.iter().enumerate().map(like_first).collect()
        });
        let mixed = proptest::collection::vec(sequence, count);
        (mixed, any::<bool>()).prop_map(|(mut mixed, same_at_first): (Vec<Vec<usize>>, bool)| {
            if same_at_first {
                let half = mixed.len() / 2;
                mixed[..half].iter_mut().for_each(|lengths| *lengths = vec![lengths[0]; 5]);
            }
            mixed
        })
    }

    proptest! {
        #[test]
        fn bins_match_slow(layout in layouts(1..200), sequences in sequences(1..600)) {
            matches_slow(&layout, &sequences);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]

        #[test]
        fn many_bins_match_slow(layout in layouts(500..800), sequences in sequences(1000..1500)) {
            matches_slow(&layout, &sequences);
        }
    }

    /// What choosing looks at for each of `sequences`, on average.
    fn looks_each(mut bins: Bins, sequences: &[Vec<usize>]) -> usize {
        looks::take();
        for lengths in sequences {
            let bin = bins.choose(lengths).unwrap_or_else(|| {
                bins.clear();
                0
            });
            bins.put(bin, lengths);
        }
        looks::take() / sequences.len()
    }

    /// Numbers below `count`, a power of two, in no particular order.
    fn scrambled(count: usize) -> impl Iterator<Item = usize> {
        (0..count).map(move |index| (index * 0x9e37_79b1 + 7) % count)
    }

    /// No bin's room is within another's, then each bin is filled to its last cell.
    fn staircase(num_bins: usize) -> (usize, Vec<Vec<usize>>) {
        let cells = 4 * num_bins;
        let first = scrambled(num_bins).map(|step| vec![4 * step + 1, cells - 4 * step - 1]);
        let second = scrambled(num_bins).map(|step| num_bins - 1 - step);
        let second = second.map(|step| vec![cells - 4 * step - 1, 4 * step + 1]);
        (cells, first.chain(second).collect())
    }

    /// Half of the bins lack one cell for the sequences that go to the other half.
    fn strip(num_bins: usize) -> (usize, Vec<Vec<usize>>) {
        let cells = 4 * num_bins;
        let half = num_bins / 2;
        let narrow = scrambled(half).map(|step| vec![cells - 1 - step, cells - 9]);
        let wide = scrambled(half).map(|step| vec![cells - 1 - step, cells - 10]);
        (cells, narrow.chain(wide).chain((0..half).map(|_| vec![1, 10])).collect())
    }

    /// Half of the bins lack room in one of three features for what goes to the other half.
    fn narrow(num_bins: usize) -> (usize, Vec<Vec<usize>>) {
        let cells = 4 * num_bins;
        let half = num_bins / 2;
        let narrow = scrambled(half).map(|step| {
            let mut lengths = vec![cells / 2 - step; 3];
            lengths[step % 3] = cells - 1 - step % 8;
            lengths
        });
        (cells, narrow.chain((0..half).map(|_| vec![10; 3])).collect())
    }

    /// Three features of independent lengths, most of them short.
    fn documents(num_bins: usize) -> (usize, Vec<Vec<usize>>) {
        let cells = 1 << 11;
        let drawn: Vec<usize> = scrambled(1 << 20).map(|drawn| drawn % cells).collect();
        let lengths = drawn.chunks_exact(2).map(|pair| 1 + pair[0] * pair[1] / (2 * cells));
        let lengths: Vec<usize> = lengths.take(3 * 8 * num_bins).collect();
        (cells, lengths.chunks_exact(3).map(<[usize]>::to_vec).collect())
    }

    #[test]
    fn looks_are_one_for_each_block_of_bins_at_most() {
        for workload in [staircase, strip, narrow, documents] {
            for num_bins in [1 << 8, 1 << 11, 1 << 14] {
                let (cells, sequences) = workload(num_bins);
                let features = sequences[0].len();
                let (capacities, alignments) = (vec![cells; features], vec![1; features]);
                let layout = BinShape { capacities, alignments, num_bins, max_sequences: None };
                for fit in [Fit::First, Fit::Best] {
                    let looks = looks_each(Bins::new(layout.clone(), fit).unwrap(), &sequences);
                    assert!(
                        looks <= num_bins / 256,
                        "{fit:?}, {num_bins} bins: {looks} looks each"
                    );
                }
            }
        }
    }

    fn layout() -> BinShape {
        BinShape { capacities: vec![4], alignments: vec![1], num_bins: 2, max_sequences: None }
    }

    #[test]
    fn layouts_without_room_are_refused() {
        let wrong = [
            BinShape { num_bins: 0, ..layout() },
            BinShape { alignments: vec![0], ..layout() },
            BinShape { alignments: vec![], ..layout() },
            BinShape { capacities: vec![], alignments: vec![], ..layout() },
            BinShape { max_sequences: Some(0), ..layout() },
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
