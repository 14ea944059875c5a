//! A batch of bins with several features each, and the choice of a bin for each sequence.
//!
//! Saved states of iterators hold no bins: restoring packs the batch again. So the choice must
//! depend on the lengths only.

use crate::pack::choice::Choice;
use crate::pack::free_space::{Fit, signed_len};
use crate::try_alloc::check_available;
use crate::{Error, Result};

/// The shape of a batch of bins.
#[derive(Debug, Clone)]
pub struct BinShape {
    /// Length of a bin, by feature.
    pub capacities: Vec<usize>,
    /// Sequences start at multiples of this, by feature.
    pub alignments: Vec<usize>,
    /// Bins per batch.
    pub num_bins: usize,
    /// The most sequences in a bin, if limited.
    pub max_sequences: Option<usize>,
}

impl BinShape {
    fn check(&self) -> Result<()> {
        let invalid = |problem: String| Err(Error::InvalidArgument(problem));
        if self.num_bins == 0 {
            return invalid("`num_packing_bins` must be at least 1, got 0".into());
        }
        if self.capacities.is_empty() {
            return invalid("`length_struct` must name at least one feature, got none".into());
        }
        if self.alignments.len() != self.capacities.len() {
            return invalid(format!(
                "one alignment for each of {} features is needed, got {}",
                self.capacities.len(),
                self.alignments.len()
            ));
        }
        if self.alignments.contains(&0) {
            return invalid("the alignment of a feature must be at least 1, got 0".into());
        }
        if self.max_sequences == Some(0) {
            return invalid("`max_sequences_per_bin` must be at least 1, got 0".into());
        }
        Ok(())
    }
}

/// A batch of bins that is being filled.
#[derive(Debug)]
pub struct Bins {
    shape: BinShape,
    choice: Choice,
    /// Start of the next sequence, by bin and feature.
    used: Vec<usize>,
    /// Free space, in the same order; -1 in a closed bin.
    free: Vec<i64>,
    sequences: Vec<usize>,
    opened: usize,
}

impl Bins {
    /// Empty bins.
    ///
    /// # Errors
    ///
    /// If `shape` has no bins, no features, an alignment of 0 or a maximum of 0 sequences, or the
    /// bins do not fit into memory.
    pub fn new(shape: BinShape, fit: Fit) -> Result<Self> {
        shape.check()?;
        let num_entries = shape.num_bins.saturating_mul(shape.capacities.len());
        // A bin takes two words per feature, and about 14 in the search structures.
        let words = num_entries.saturating_mul(2).saturating_add(shape.num_bins.saturating_mul(14));
        check_available::<u64>(words, || format!("{} bins", shape.num_bins))?;
        Ok(Self {
            choice: Choice::new(&shape.capacities, shape.num_bins, fit),
            used: vec![0; num_entries],
            free: vec![0; num_entries],
            sequences: vec![0; shape.num_bins],
            opened: 0,
            shape,
        })
    }

    /// The shape of the batch.
    pub fn layout(&self) -> &BinShape {
        &self.shape
    }

    /// The number of bins that hold a sequence; these are the first ones.
    pub fn num_opened(&self) -> usize {
        self.opened
    }

    /// The number of sequences in `bin`.
    pub fn num_sequences(&self, bin: usize) -> usize {
        self.sequences[bin]
    }

    /// The start of the next sequence in `bin`, by feature.
    pub fn starts(&self, bin: usize) -> &[usize] {
        let features = self.shape.capacities.len();
        &self.used[bin * features..][..features]
    }

    /// Checks that an empty bin can hold a sequence with these lengths.
    ///
    /// # Errors
    ///
    /// If a feature is longer than any bin; `names` and `subject` are for the message.
    pub fn check_lengths(&self, lengths: &[usize], names: &[String], subject: &str) -> Result<()> {
        let capacities = &self.shape.capacities;
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

    /// The bin for a sequence with these lengths by feature; `None` if it fits into no bin.
    pub fn choose(&self, lengths: &[usize]) -> Option<usize> {
        self.choice.choose(lengths)
    }

    /// Puts a sequence with these lengths into `bin`, which `choose` returned.
    pub fn put(&mut self, bin: usize, lengths: &[usize]) {
        let features = self.shape.capacities.len();
        let entries = bin * features..(bin + 1) * features;
        let (used, free) = (&mut self.used[entries.clone()], &mut self.free[entries]);
        self.sequences[bin] += 1;
        self.opened = self.opened.max(bin + 1);
        let mut closed = self.shape.max_sequences.is_some_and(|max| self.sequences[bin] >= max);
        for feature in 0..features {
            let end = used[feature] + lengths[feature];
            let alignment = self.shape.alignments[feature];
            used[feature] = if alignment == 1 { end } else { end.next_multiple_of(alignment) };
            free[feature] = signed_len(self.shape.capacities[feature]) - signed_len(used[feature]);
            closed |= free[feature] < 0;
        }
        if closed {
            free.fill(-1);
        }
        self.choice.update(bin, &self.free[..self.opened * features]);
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
    use crate::pack::probes;
    use proptest::prelude::*;

    /// The reference: lists of bins and linear search.
    struct Slow {
        shape: BinShape,
        used: Vec<Vec<usize>>,
        sequences: Vec<usize>,
    }

    impl Slow {
        fn new(shape: &BinShape) -> Self {
            let used = vec![vec![0; shape.capacities.len()]; shape.num_bins];
            Self { shape: shape.clone(), used, sequences: vec![0; shape.num_bins] }
        }

        fn choose(&self, lengths: &[usize], fit: Fit) -> Option<usize> {
            let fitting = (0..self.shape.num_bins).filter(|&bin| {
                self.shape.max_sequences.is_none_or(|max| self.sequences[bin] < max)
                    && (0..lengths.len()).all(|feature| {
                        self.used[bin][feature] + lengths[feature] <= self.shape.capacities[feature]
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
                self.used[bin][feature] = end.next_multiple_of(self.shape.alignments[feature]);
            }
        }
    }

    fn matches_slow(shape: &BinShape, sequences: &[Vec<usize>]) {
        for fit in [Fit::First, Fit::Best] {
            assert_matches_slow(Bins::new(shape.clone(), fit).unwrap(), sequences, fit);
        }
    }

    fn assert_matches_slow(mut bins: Bins, sequences: &[Vec<usize>], fit: Fit) {
        let shape = &bins.shape.clone();
        let mut slow = Slow::new(shape);
        for lengths in sequences {
            let lengths: Vec<usize> = lengths[..shape.capacities.len()]
                .iter()
                .zip(&shape.capacities)
                .map(|(length, capacity)| length % (capacity + 1))
                .collect();
            let mut chosen = bins.choose(&lengths);
            assert_eq!(chosen, slow.choose(&lengths, fit));
            if chosen.is_none() {
                bins.clear();
                slow = Slow::new(shape);
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

    /// Shapes; in half of them all features are alike.
    fn shapes(num_bins: Range<usize>) -> impl Strategy<Value = BinShape> {
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

    /// Lengths of five features: independent, equal, nearly equal, or long in some where they are
    /// short in others; all kinds mixed.
    fn sequences(count: Range<usize>) -> impl Strategy<Value = Vec<Vec<usize>>> {
        let sequence = (proptest::collection::vec(0_usize..60, 5), 0..4).prop_map(|(any, kind)| {
            let like_first = |(feature, length): (usize, &usize)| match kind {
                0 => *length,
                1 => any[0],
                2 => any[0] + length % 4,
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
        fn bins_match_slow(shape in shapes(1..200), sequences in sequences(1..600)) {
            matches_slow(&shape, &sequences);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]

        #[test]
        fn many_bins_match_slow(shape in shapes(500..800), sequences in sequences(1000..1500)) {
            matches_slow(&shape, &sequences);
        }
    }

    /// Blocks probed for each of `sequences`, on average.
    fn probes_each(mut bins: Bins, sequences: &[Vec<usize>]) -> usize {
        probes::take();
        for lengths in sequences {
            let bin = bins.choose(lengths).unwrap_or_else(|| {
                bins.clear();
                0
            });
            bins.put(bin, lengths);
        }
        probes::take() / sequences.len()
    }

    /// The numbers below `count`, a power of two, in scattered order.
    fn scrambled(count: usize) -> impl Iterator<Item = usize> {
        (0..count).map(move |index| (index * 0x9e37_79b1 + 7) % count)
    }

    /// No bin's free space contains another's; then each bin is filled completely.
    fn staircase(num_bins: usize) -> (usize, Vec<Vec<usize>>) {
        let capacity = 4 * num_bins;
        let first = scrambled(num_bins).map(|step| vec![4 * step + 1, capacity - 4 * step - 1]);
        let second = scrambled(num_bins).map(|step| num_bins - 1 - step);
        let second = second.map(|step| vec![capacity - 4 * step - 1, 4 * step + 1]);
        (capacity, first.chain(second).collect())
    }

    /// Half of the bins are one value too short for the sequences that go to the other half.
    fn strip(num_bins: usize) -> (usize, Vec<Vec<usize>>) {
        let capacity = 4 * num_bins;
        let half = num_bins / 2;
        let narrow = scrambled(half).map(|step| vec![capacity - 1 - step, capacity - 9]);
        let wide = scrambled(half).map(|step| vec![capacity - 1 - step, capacity - 10]);
        (capacity, narrow.chain(wide).chain((0..half).map(|_| vec![1, 10])).collect())
    }

    /// Half of the bins lack space in one of three features for the sequences of the other half.
    fn narrow(num_bins: usize) -> (usize, Vec<Vec<usize>>) {
        let capacity = 4 * num_bins;
        let half = num_bins / 2;
        let narrow = scrambled(half).map(|step| {
            let mut lengths = vec![capacity / 2 - step; 3];
            lengths[step % 3] = capacity - 1 - step % 8;
            lengths
        });
        (capacity, narrow.chain((0..half).map(|_| vec![10; 3])).collect())
    }

    /// Three features of independent lengths, most of them short.
    fn documents(num_bins: usize) -> (usize, Vec<Vec<usize>>) {
        let capacity = 1 << 11;
        let drawn: Vec<usize> = scrambled(1 << 20).map(|drawn| drawn % capacity).collect();
        let lengths = drawn.chunks_exact(2).map(|pair| 1 + pair[0] * pair[1] / (2 * capacity));
        let lengths: Vec<usize> = lengths.take(3 * 8 * num_bins).collect();
        (capacity, lengths.chunks_exact(3).map(<[usize]>::to_vec).collect())
    }

    #[test]
    fn each_block_of_bins_is_probed_once_at_most() {
        for workload in [staircase, strip, narrow, documents] {
            for num_bins in [1 << 8, 1 << 11, 1 << 14] {
                let (capacity, sequences) = workload(num_bins);
                let features = sequences[0].len();
                let (capacities, alignments) = (vec![capacity; features], vec![1; features]);
                let shape = BinShape { capacities, alignments, num_bins, max_sequences: None };
                for fit in [Fit::First, Fit::Best] {
                    let num_probes =
                        probes_each(Bins::new(shape.clone(), fit).unwrap(), &sequences);
                    assert!(
                        num_probes <= num_bins / 256,
                        "{fit:?}, {num_bins} bins: {num_probes} probes each"
                    );
                }
            }
        }
    }

    fn shape() -> BinShape {
        BinShape { capacities: vec![4], alignments: vec![1], num_bins: 2, max_sequences: None }
    }

    #[test]
    fn invalid_shapes_are_refused() {
        let invalid = [
            BinShape { num_bins: 0, ..shape() },
            BinShape { alignments: vec![0], ..shape() },
            BinShape { alignments: vec![], ..shape() },
            BinShape { capacities: vec![], alignments: vec![], ..shape() },
            BinShape { max_sequences: Some(0), ..shape() },
        ];
        for shape in invalid {
            assert!(Bins::new(shape, Fit::First).is_err());
        }
    }

    #[test]
    fn sequence_longer_than_every_bin_is_named() {
        let bins = Bins::new(shape(), Fit::Best).unwrap();
        let names = ["tokens".to_owned()];
        assert!(bins.check_lengths(&[4], &names, "packer").is_ok());
        let error = bins.check_lengths(&[5], &names, "packer").unwrap_err().to_string();
        assert!(error.ends_with("max_length) = [('tokens', 5, 4)]"), "{error}");
    }
}
