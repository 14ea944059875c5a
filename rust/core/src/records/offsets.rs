//! Offsets in a file, such as those of its chunks: four bytes each, with lookup by number in constant time.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::array_record::shared_index::SharedIndex;

/// Offsets in rising order.
#[derive(Debug, Default)]
pub struct Offsets {
    low: Low,
    /// The high half of all offsets from a number on, for each number at which it changes.
    high: Vec<(usize, u32)>,
}

/// The low half of each offset.
#[derive(Debug)]
enum Low {
    Own(Vec<u32>),
    /// Two to a word, from word `first` on.
    Shared {
        memory: Arc<SharedIndex>,
        first: usize,
        len: usize,
    },
}

impl Default for Low {
    fn default() -> Self {
        Self::Own(Vec::new())
    }
}

impl Low {
    #[expect(clippy::cast_possible_truncation, reason = "each half is extracted separately")]
    fn get(&self, at: usize) -> Option<u32> {
        match self {
            Self::Own(low) => low.get(at).copied(),
            Self::Shared { memory, first, len } => {
                let word = memory.words(*first, len.div_ceil(2))?.get(at / 2)?;
                let both = word.load(Ordering::Relaxed);
                (at < *len).then_some((both >> (at % 2 * 32)) as u32)
            }
        }
    }
}

impl Offsets {
    /// Offsets whose low halves are in `memory`, as [`Offsets::low_pairs`] returns them.
    pub(crate) fn shared(
        memory: Arc<SharedIndex>,
        first: usize,
        len: usize,
        high: Vec<(usize, u32)>,
    ) -> Option<Self> {
        memory.words(first, len.div_ceil(2))?;
        Some(Self { low: Low::Shared { memory, first, len }, high })
    }

    /// The low halves, two to a word.
    pub(crate) fn low_pairs(&self) -> impl Iterator<Item = u64> {
        let low = |at| u64::from(self.low.get(at).unwrap_or_default());
        (0..self.len()).step_by(2).map(move |at| low(at + 1) << 32 | low(at))
    }

    /// The high half of all offsets from a number on, for each number at which it changes.
    pub(crate) fn high(&self) -> &[(usize, u32)] {
        &self.high
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        match &self.low {
            Low::Own(low) => low.len(),
            Low::Shared { len, .. } => *len,
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends `offset`, which must be above all others.
    ///
    /// # Panics
    ///
    /// If they are shared.
    #[expect(clippy::cast_possible_truncation, reason = "each half is stored separately")]
    pub fn push(&mut self, offset: u64) {
        let Low::Own(low) = &mut self.low else { panic!("shared offsets are read-only") };
        let high = (offset >> 32) as u32;
        if high != self.high.last().map_or(0, |&(_, high)| high) {
            self.high.push((low.len(), high));
        }
        low.push(offset as u32);
    }

    /// How many bytes of this process's private memory they take.
    pub fn byte_len(&self) -> usize {
        let low = match &self.low {
            Low::Own(low) => low.capacity() * size_of::<u32>(),
            Low::Shared { .. } => size_of::<Self>(),
        };
        low + self.high.capacity() * size_of::<(usize, u32)>()
    }

    /// Frees unused capacity.
    pub fn shrink(&mut self) {
        if let Low::Own(low) = &mut self.low {
            low.shrink_to_fit();
        }
        self.high.shrink_to_fit();
    }

    /// Offset number `at`, or `None` past the last.
    #[inline]
    pub fn get(&self, at: usize) -> Option<u64> {
        let low = u64::from(self.low.get(at)?);
        if self.high.is_empty() {
            return Some(low);
        }
        let num_changes = self.high.partition_point(|&(from, _)| from <= at);
        let high = num_changes.checked_sub(1).map_or(0, |last| self.high[last].1);
        Some(u64::from(high) << 32 | low)
    }
}

impl PartialEq for Offsets {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && (0..self.len()).all(|at| self.get(at) == other.get(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_round_trip_across_changes_of_the_high_half() {
        let expected: Vec<u64> = [64, 65, (1 << 32) - 1, 1 << 32, (1 << 32) + 9, 7 << 32, u64::MAX]
            .into_iter()
            .collect();
        let mut offsets = Offsets::default();
        for &offset in &expected {
            offsets.push(offset);
        }
        offsets.shrink();
        let found: Vec<u64> = (0..offsets.len()).filter_map(|at| offsets.get(at)).collect();
        assert_eq!(found, expected);
        assert_eq!(offsets.get(expected.len()), None);
        assert!(Offsets::default().is_empty());
    }

    #[test]
    fn the_first_offset_may_exceed_32_bits() {
        let mut offsets = Offsets::default();
        offsets.push(5 << 32 | 3);
        assert_eq!((offsets.get(0), offsets.len()), (Some(5 << 32 | 3), 1));
    }
}
