//! Rows filled one after another with sequences laid end to end and cut at the row's end.
//!
//! Saved states hold the slices that are left of a cut sequence. So how much of a sequence goes
//! into a row must stay a function of the lengths before it in that row.

use crate::{Error, Result};

/// What a row takes.
#[derive(Debug, Clone)]
pub struct Limits {
    /// The features, as messages call them.
    pub names: Vec<String>,
    /// Cells per row, by feature.
    pub capacities: Vec<usize>,
    /// Whether a feature describes the sequence and so is never cut, by feature.
    pub whole: Vec<bool>,
    /// Whether a sequence that fills a row by itself gets a row of its own.
    pub alone: bool,
}

/// Cells of one feature of a sequence on their way into the row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FeatureSlice {
    /// The first cell in the sequence.
    pub from: usize,
    /// The first cell in the row.
    pub start: usize,
    /// How many cells.
    pub len: usize,
}

/// How much of a sequence a row took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    /// It gets a row of its own and leaves this one as it is.
    Alone,
    /// All that was left of it.
    All,
    /// Some; the row is at its end.
    Part,
    /// Nothing; the row is at its end.
    Nothing {
        /// The uncut feature without room, and the room it has.
        limited_by: Option<(usize, usize)>,
    },
}

/// The row that is being filled.
#[derive(Debug)]
pub struct RowFill {
    limits: Limits,
    used: Vec<usize>,
    sequences: usize,
    pieces: Vec<FeatureSlice>,
    /// What is left of the next sequence, if it was cut.
    remainder: Option<Vec<(usize, usize)>>,
}

impl RowFill {
    /// An empty row.
    ///
    /// # Errors
    ///
    /// If a capacity is 0 or the parts of `limits` differ in length.
    pub fn new(limits: Limits) -> Result<Self> {
        let features = limits.capacities.len();
        if limits.capacities.contains(&0)
            || limits.whole.len() != features
            || limits.names.len() != features
        {
            return Err(Error::InvalidArgument(
                "every feature needs a name and a row of at least 1 cell".into(),
            ));
        }
        let used = vec![0; features];
        Ok(Self { limits, used, sequences: 0, pieces: Vec::new(), remainder: None })
    }

    /// What a row takes.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Sequences in the row so far, pieces of cut ones included.
    pub fn num_sequences(&self) -> usize {
        self.sequences
    }

    /// The cells the last [`RowFill::add`] took, by feature.
    pub fn pieces(&self) -> &[FeatureSlice] {
        &self.pieces
    }

    /// What is left of the next sequence by feature, if it was cut.
    pub fn remainder(&self) -> Option<&[(usize, usize)]> {
        self.remainder.as_deref()
    }

    /// Starts over with an empty row, and with `remainder` of the next sequence.
    pub fn restart(&mut self, remainder: Option<Vec<(usize, usize)>>) {
        self.next_row();
        self.remainder = remainder;
    }

    /// Starts the next row.
    pub fn next_row(&mut self) {
        self.used.fill(0);
        self.sequences = 0;
    }

    /// Puts into the row what is left of a sequence and fits.
    ///
    /// After [`Taken::Part`] and [`Taken::Nothing`] the same sequence goes to the next row.
    ///
    /// # Errors
    ///
    /// If no row has room for a feature that is not cut, or a remainder lies outside.
    pub fn add(&mut self, lengths: &[usize]) -> Result<Taken> {
        if self.limits.alone && self.remainder.is_none() && self.fills_a_row(lengths) {
            return Ok(Taken::Alone);
        }
        if let Some(limited_by) = self.limiting(lengths)? {
            return Ok(Taken::Nothing { limited_by: Some(limited_by) });
        }
        self.pieces.clear();
        let (mut taken, mut left) = (0, 0);
        for (feature, &len) in lengths.iter().enumerate() {
            let (start, stop) = self.slice(feature, len)?;
            let room = self.limits.capacities[feature] - self.used[feature];
            let take = room.min(stop - start);
            self.pieces.push(FeatureSlice { from: start, start: self.used[feature], len: take });
            if !self.limits.whole[feature] {
                taken += take;
                left += stop - start - take;
            }
        }
        if taken == 0 && left > 0 {
            return Ok(Taken::Nothing { limited_by: None });
        }
        self.remainder = if left > 0 { Some(self.rests(lengths)?) } else { None };
        for (used, piece) in self.used.iter_mut().zip(&self.pieces) {
            *used += piece.len;
        }
        self.sequences += 1;
        Ok(if left > 0 { Taken::Part } else { Taken::All })
    }

    fn fills_a_row(&self, lengths: &[usize]) -> bool {
        let pairs = || lengths.iter().zip(&self.limits.capacities);
        pairs().all(|(length, cells)| length <= cells)
            && pairs().any(|(length, cells)| length == cells)
    }

    /// The first feature that must stay whole and finds no room, and the room there is.
    fn limiting(&self, lengths: &[usize]) -> Result<Option<(usize, usize)>> {
        for (feature, &len) in lengths.iter().enumerate() {
            let room = self.limits.capacities[feature] - self.used[feature];
            if self.limits.whole[feature] && len > room {
                if self.sequences == 0 {
                    return Err(Error::InvalidArgument(format!(
                        "meta feature `{}` must fit into a row of {room} cells, got {len}",
                        self.limits.names[feature]
                    )));
                }
                return Ok(Some((feature, room)));
            }
        }
        Ok(None)
    }

    /// What is left of a feature with `len` cells.
    fn slice(&self, feature: usize, len: usize) -> Result<(usize, usize)> {
        let Some(remainder) = &self.remainder else { return Ok((0, len)) };
        if self.limits.whole[feature] {
            return Ok((0, len));
        }
        let (start, stop) = remainder[feature];
        if start > stop || stop > len {
            return Err(Error::InvalidArgument(format!(
                "state has the remainder {start}..{stop} of `{}`, which has {len} cells; restore \
                 needs the same data",
                self.limits.names[feature]
            )));
        }
        Ok((start, stop))
    }

    fn rests(&self, lengths: &[usize]) -> Result<Vec<(usize, usize)>> {
        let rest = |(feature, &len): (usize, &usize)| {
            let (_, stop) = self.slice(feature, len)?;
            let piece = self.pieces[feature];
            Ok((piece.from + piece.len, stop))
        };
        lengths.iter().enumerate().map(rest).collect()
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

    /// The rows of (sequence, first cell, cells) that sequences of one feature become.
    fn rows(lengths: &[usize], capacity: usize) -> Vec<Vec<(usize, usize, usize)>> {
        let mut fill = RowFill::new(limits(&[capacity], &[false], false)).unwrap();
        let (mut rows, mut row, mut next) = (Vec::new(), Vec::new(), 0);
        while next < lengths.len() {
            let taken = fill.add(&lengths[next..=next]).unwrap();
            if matches!(taken, Taken::All | Taken::Part) {
                let piece = fill.pieces()[0];
                row.push((next, piece.from, piece.len));
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
            // Cell by cell: which sequence and which of its cells stands there.
            let cells: Vec<(usize, usize)> = lengths
                .iter()
                .enumerate()
                .flat_map(|(sequence, &len)| (0..len).map(move |cell| (sequence, cell)))
                .collect();
            let expected: Vec<Vec<(usize, usize)>> = cells.chunks(capacity).map(<[_]>::to_vec).collect();
            let actual: Vec<Vec<(usize, usize)>> = rows(&lengths, capacity)
                .iter()
                .map(|row| {
                    row.iter()
                        .flat_map(|&(sequence, from, len)| (from..from + len).map(move |cell| (sequence, cell)))
                        .collect()
                })
                .collect();
            prop_assert_eq!(actual, expected);
        }
    }

    #[test]
    fn uncut_feature_without_room_ends_the_row() {
        let mut fill = RowFill::new(limits(&[4, 2], &[false, true], false)).unwrap();
        assert_eq!(fill.add(&[2, 1]).unwrap(), Taken::All);
        assert_eq!(fill.add(&[1, 2]).unwrap(), Taken::Nothing { limited_by: Some((1, 1)) });
        fill.next_row();
        assert!(fill.add(&[1, 3]).is_err());
    }

    #[test]
    fn sequence_that_fills_a_row_stands_alone() {
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
