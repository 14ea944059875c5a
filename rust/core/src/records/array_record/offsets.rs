//! Where the chunks of a file begin: four bytes each, found by number in constant time.

/// Offsets in rising order.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Offsets {
    /// The low half of each.
    low: Vec<u32>,
    /// The high half of all from that number on, wherever it changes.
    high: Vec<(usize, u32)>,
}

impl Offsets {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.low.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.low.is_empty()
    }

    /// Appends `offset`, which must be above all others.
    #[expect(clippy::cast_possible_truncation, reason = "each half is kept in its place")]
    pub fn push(&mut self, offset: u64) {
        let high = (offset >> 32) as u32;
        if high != self.high.last().map_or(0, |&(_, high)| high) {
            self.high.push((self.low.len(), high));
        }
        self.low.push(offset as u32);
    }

    /// How many bytes of memory they take.
    pub fn byte_len(&self) -> usize {
        self.low.capacity() * size_of::<u32>() + self.high.capacity() * size_of::<(usize, u32)>()
    }

    /// Gives back memory that was kept for further ones.
    pub fn shrink(&mut self) {
        self.low.shrink_to_fit();
        self.high.shrink_to_fit();
    }

    /// Offset number `at`, if there are so many.
    #[inline]
    pub fn get(&self, at: usize) -> Option<u64> {
        let low = u64::from(*self.low.get(at)?);
        if self.high.is_empty() {
            return Some(low);
        }
        let begun = self.high.partition_point(|&(from, _)| from <= at);
        let high = begun.checked_sub(1).map_or(0, |last| self.high[last].1);
        Some(u64::from(high) << 32 | low)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_come_back_across_halves_of_numbers() {
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
    fn the_first_offset_may_be_far_in() {
        let mut offsets = Offsets::default();
        offsets.push(5 << 32 | 3);
        assert_eq!((offsets.get(0), offsets.len()), (Some(5 << 32 | 3), 1));
    }
}
