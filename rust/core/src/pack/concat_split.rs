//! Fills rows in order with concatenated sequences, which are split at the end of a row.
//!
//! Saved states hold the remaining slices of a split sequence. So how much of a sequence goes into
//! a row must depend only on the lengths before it in that row.

use crate::{Error, Result};

/// The shape and rules of a row.
#[derive(Debug, Clone)]
pub struct Limits {
    /// The names of features in messages.
    pub names: Vec<String>,
    /// Length of a row, by feature.
    pub capacities: Vec<usize>,
    /// Whether a feature is a meta feature, which is never split, by feature.
    pub whole: Vec<bool>,
    /// Whether a sequence that fills a row by itself gets a row of its own.
    pub alone: bool,
}

/// The slice of one feature of a sequence that goes into the row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FeatureSlice {
    /// Its start in the sequence.
    pub from: usize,
    /// Its start in the row.
    pub start: usize,
    /// Its length.
    pub len: usize,
}

/// How much of a sequence a row took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    /// Nothing: the sequence gets a row of its own, and this row is unchanged.
    Alone,
    /// All of the remaining sequence.
    All,
    /// Some; the row is full.
    Part,
    /// Nothing; the row is full.
    Nothing {
        /// The meta feature that does not fit, and its free space.
        limited_by: Option<(usize, usize)>,
    },
}

/// The row that is being filled.
#[derive(Debug, Clone)]
pub struct RowFill {
    limits: Limits,
    used: Vec<usize>,
    sequences: usize,
    slices: Vec<FeatureSlice>,
    /// The remaining range of the next sequence by feature, if it was split.
    remainder: Option<Vec<(usize, usize)>>,
}

impl RowFill {
    /// An empty row.
    ///
    /// # Errors
    ///
    /// If a capacity is 0 or the fields of `limits` differ in length.
    pub fn new(limits: Limits) -> Result<Self> {
        let features = limits.capacities.len();
        if limits.capacities.contains(&0)
            || limits.whole.len() != features
            || limits.names.len() != features
        {
            return Err(Error::InvalidArgument(
                "every feature needs a name and a row length of at least 1".into(),
            ));
        }
        let used = vec![0; features];
        Ok(Self { limits, used, sequences: 0, slices: Vec::new(), remainder: None })
    }

    /// The shape and rules of a row.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Sequences in the row so far, slices of split ones included.
    pub fn num_sequences(&self) -> usize {
        self.sequences
    }

    /// The slices that the last [`RowFill::add`] took, by feature.
    pub fn pieces(&self) -> &[FeatureSlice] {
        &self.slices
    }

    /// The remaining range of the next sequence by feature, if it was split.
    pub fn remainder(&self) -> Option<&[(usize, usize)]> {
        self.remainder.as_deref()
    }

    /// Restarts with an empty row and with `remainder` of the next sequence.
    pub fn restart(&mut self, remainder: Option<Vec<(usize, usize)>>) {
        self.next_row();
        self.remainder = remainder;
    }

    /// Starts the next row.
    pub fn next_row(&mut self) {
        self.used.fill(0);
        self.sequences = 0;
    }

    /// Adds as much of the remaining sequence to the row as fits.
    ///
    /// After [`Taken::Part`] and [`Taken::Nothing`] the same sequence goes to the next row.
    ///
    /// # Errors
    ///
    /// If a meta feature is longer than a row, or the remainder lies outside the sequence.
    pub fn add(&mut self, lengths: &[usize]) -> Result<Taken> {
        if self.limits.alone && self.remainder.is_none() && self.fills_a_row(lengths) {
            return Ok(Taken::Alone);
        }
        if let Some(limited_by) = self.limiting_feature(lengths)? {
            return Ok(Taken::Nothing { limited_by: Some(limited_by) });
        }
        self.slices.clear();
        let (mut taken, mut left) = (0, 0);
        for (feature, &len) in lengths.iter().enumerate() {
            let (start, stop) = self.remaining(feature, len)?;
            let free = self.limits.capacities[feature] - self.used[feature];
            let take = free.min(stop - start);
            self.slices.push(FeatureSlice { from: start, start: self.used[feature], len: take });
            if !self.limits.whole[feature] {
                taken += take;
                left += stop - start - take;
            }
        }
        if taken == 0 && left > 0 {
            return Ok(Taken::Nothing { limited_by: None });
        }
        self.remainder = if left > 0 { Some(self.remainders(lengths)?) } else { None };
        for (used, slice) in self.used.iter_mut().zip(&self.slices) {
            *used += slice.len;
        }
        self.sequences += 1;
        Ok(if left > 0 { Taken::Part } else { Taken::All })
    }

    fn fills_a_row(&self, lengths: &[usize]) -> bool {
        let pairs = || lengths.iter().zip(&self.limits.capacities);
        pairs().all(|(length, capacity)| length <= capacity)
            && pairs().any(|(length, capacity)| length == capacity)
    }

    /// The first meta feature that does not fit, and its free space.
    fn limiting_feature(&self, lengths: &[usize]) -> Result<Option<(usize, usize)>> {
        for (feature, &len) in lengths.iter().enumerate() {
            let free = self.limits.capacities[feature] - self.used[feature];
            if self.limits.whole[feature] && len > free {
                if self.sequences == 0 {
                    return Err(Error::InvalidArgument(format!(
                        "meta feature `{}` must fit into a row of {free} values, got {len}",
                        self.limits.names[feature]
                    )));
                }
                return Ok(Some((feature, free)));
            }
        }
        Ok(None)
    }

    /// The remaining range of a feature with `len` values.
    fn remaining(&self, feature: usize, len: usize) -> Result<(usize, usize)> {
        let Some(remainder) = &self.remainder else { return Ok((0, len)) };
        if self.limits.whole[feature] {
            return Ok((0, len));
        }
        let (start, stop) = remainder[feature];
        if start > stop || stop > len {
            return Err(Error::InvalidArgument(format!(
                "state has the remainder {start}..{stop} of `{}`, which has {len} values; restore \
                 needs the same data",
                self.limits.names[feature]
            )));
        }
        Ok((start, stop))
    }

    fn remainders(&self, lengths: &[usize]) -> Result<Vec<(usize, usize)>> {
        let remainder = |(feature, &len): (usize, &usize)| {
            let (_, stop) = self.remaining(feature, len)?;
            let slice = self.slices[feature];
            Ok((slice.from + slice.len, stop))
        };
        lengths.iter().enumerate().map(remainder).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn limits(capacities: &[usize], whole: &[bool], alone: bool) -> Limits {
        let names = (0..capacities.len()).map(|feature| format!("f{feature}")).collect();
        Limits { names, capacities: capacities.to_vec(), whole: whole.to_vec(), alone }
    }

    /// The rows that sequences of one feature are split into, as (sequence, start, length).
    fn rows(lengths: &[usize], capacity: usize) -> Vec<Vec<(usize, usize, usize)>> {
        let mut fill = RowFill::new(limits(&[capacity], &[false], false)).unwrap();
        let (mut rows, mut row, mut next) = (Vec::new(), Vec::new(), 0);
        while next < lengths.len() {
            let taken = fill.add(&lengths[next..=next]).unwrap();
            if matches!(taken, Taken::All | Taken::Part) {
                let slice = fill.pieces()[0];
                row.push((next, slice.from, slice.len));
            }
            if taken == Taken::All {
                next += 1;
            } else {
                rows.push(std::mem::take(&mut row));
                fill.next_row();
            }
        }
        rows.extend((!row.is_empty()).then_some(row));
        rows
    }

    proptest! {
        #[test]
        fn concat_split_matches_slow(
            lengths in proptest::collection::vec(1_usize..25, 0..40),
            capacity in 1_usize..20,
        ) {
            // By value: its sequence, and its index there.
            let values: Vec<(usize, usize)> = lengths
                .iter()
                .enumerate()
                .flat_map(|(sequence, &len)| (0..len).map(move |at| (sequence, at)))
                .collect();
            let expected: Vec<Vec<(usize, usize)>> = values.chunks(capacity).map(<[_]>::to_vec).collect();
            let actual: Vec<Vec<(usize, usize)>> = rows(&lengths, capacity)
                .iter()
                .map(|row| {
                    row.iter()
                        .flat_map(|&(sequence, from, len)| (from..from + len).map(move |at| (sequence, at)))
                        .collect()
                })
                .collect();
            prop_assert_eq!(actual, expected);
        }
    }

    #[test]
    fn meta_feature_that_does_not_fit_ends_the_row() {
        let mut fill = RowFill::new(limits(&[4, 2], &[false, true], false)).unwrap();
        assert_eq!(fill.add(&[2, 1]).unwrap(), Taken::All);
        assert_eq!(fill.add(&[1, 2]).unwrap(), Taken::Nothing { limited_by: Some((1, 1)) });
        fill.next_row();
        assert!(fill.add(&[1, 3]).is_err());
    }

    #[test]
    fn sequence_that_fills_a_row_gets_its_own_row() {
        let mut fill = RowFill::new(limits(&[4], &[false], true)).unwrap();
        assert_eq!(fill.add(&[3]).unwrap(), Taken::All);
        assert_eq!(fill.add(&[4]).unwrap(), Taken::Alone);
        assert_eq!(fill.add(&[5]).unwrap(), Taken::Part);
        assert_eq!(fill.remainder(), Some(&[(1, 5)][..]));
        fill.next_row();
        assert_eq!(fill.add(&[5]).unwrap(), Taken::All);
    }

    #[test]
    fn remainder_of_other_data_is_refused() {
        let mut fill = RowFill::new(limits(&[4], &[false], true)).unwrap();
        fill.restart(Some(vec![(2, 9)]));
        assert!(fill.add(&[5]).is_err());
    }
}
