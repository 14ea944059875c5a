//! Offsets in a file, such as those of its chunks: four bytes each, with lookup by number in constant time.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::io::spill::{self, MAX_PART_LEN, Part};
use crate::shared_memory::Words;
use crate::{Error, Result};

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
        memory: Arc<Words>,
        first: usize,
        len: usize,
    },
    /// In parts of [`MAX_PART_LEN`] in a temporary file, and those after them.
    Spilled(Vec<Part>, Vec<u32>),
}

impl Default for Low {
    fn default() -> Self {
        Self::Own(Vec::new())
    }
}

/// Offsets of a temporary file that were read together.
#[derive(Debug, Default)]
struct Block {
    first: usize,
    values: Vec<u32>,
}

impl Low {
    fn len(&self) -> usize {
        match self {
            Self::Own(low) => low.len(),
            Self::Shared { len, .. } => *len,
            Self::Spilled(parts, rest) => parts.iter().map(Part::len).sum::<usize>() + rest.len(),
        }
    }

    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "each half is extracted separately")]
    fn get(&self, at: usize, block: &mut Block) -> Result<Option<u32>> {
        match self {
            Self::Own(low) => Ok(low.get(at).copied()),
            Self::Shared { memory, first, len } => {
                let word = memory.part(*first, len.div_ceil(2)).and_then(|words| words.get(at / 2));
                let word = word.filter(|_| at < *len);
                Ok(word.map(|word| (word.load(Ordering::Relaxed) >> (at % 2 * 32)) as u32))
            }
            Self::Spilled(parts, rest) => get_spilled(parts, rest, at, block),
        }
    }
}

fn get_spilled(parts: &[Part], rest: &[u32], at: usize, block: &mut Block) -> Result<Option<u32>> {
    let (number, within) = (at / MAX_PART_LEN, at % MAX_PART_LEN);
    let Some(part) = parts.get(number) else {
        let num_before = parts.iter().map(Part::len).sum::<usize>();
        return Ok(at.checked_sub(num_before).and_then(|at| rest.get(at)).copied());
    };
    if within >= part.len() {
        return Ok(None); // the last part may be shorter
    }
    if let Some(&value) = at.checked_sub(block.first).and_then(|at| block.values.get(at)) {
        return Ok(Some(value));
    }
    let first = part.read_block(within, &mut block.values);
    let first = first.map_err(|error| Error::io("temporary file of offsets", "read", error))?;
    block.first = number * MAX_PART_LEN + first;
    Ok(block.values.get(within - first).copied())
}

/// Writes all of `low`, which is then empty, to a temporary file; false if that is not possible.
fn spill(low: &mut Vec<u32>, parts: &mut Vec<Part>) -> bool {
    let Some(written) = written(low) else { return false };
    parts.extend(written);
    *low = Vec::new();
    true
}

fn written(low: &[u32]) -> Option<Vec<Part>> {
    let write = |part| Part::write(part, spill::budget()).ok();
    low.chunks(MAX_PART_LEN).map(write).collect()
}

/// Looks up offsets; neighbours are read together from a temporary file.
#[derive(Debug)]
pub struct OffsetReader<'a> {
    offsets: &'a Offsets,
    block: Block,
}

impl OffsetReader<'_> {
    /// Offset number `at`, or `None` past the last.
    ///
    /// # Errors
    /// If it is in a temporary file and cannot be read.
    #[inline]
    pub fn get(&mut self, at: usize) -> Result<Option<u64>> {
        let Some(low) = self.offsets.low.get(at, &mut self.block)? else { return Ok(None) };
        Ok(Some(u64::from(self.offsets.high_of(at)) << 32 | u64::from(low)))
    }
}

impl Offsets {
    /// Offsets whose low halves are in `memory`, as [`Offsets::low_pairs`] returns them.
    pub(crate) fn shared(
        memory: Arc<Words>,
        first: usize,
        len: usize,
        high: Vec<(usize, u32)>,
    ) -> Option<Self> {
        memory.part(first, len.div_ceil(2))?;
        Some(Self { low: Low::Shared { memory, first, len }, high })
    }

    /// The low halves, two to a word; errors are those of a temporary file.
    pub(crate) fn low_pairs(&self) -> impl Iterator<Item = Result<u64>> {
        let mut block = Block::default();
        let mut low = move |at| Ok(u64::from(self.low.get(at, &mut block)?.unwrap_or_default()));
        (0..self.len()).step_by(2).map(move |at| Ok(low(at)? | low(at + 1)? << 32))
    }

    /// The high half of all offsets from a number on, for each number at which it changes.
    pub(crate) fn high(&self) -> &[(usize, u32)] {
        &self.high
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.low.len()
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
        let high = (offset >> 32) as u32;
        if high != self.high.last().map_or(0, |&(_, high)| high) {
            self.high.push((self.len(), high));
        }
        let low = match &mut self.low {
            Low::Own(low) | Low::Spilled(_, low) => low,
            Low::Shared { .. } => panic!("shared offsets are read-only"),
        };
        low.push(offset as u32);
        if low.len() == low.capacity() {
            self.may_spill();
        }
    }

    /// Writes what is too much for the memory of all offsets to a temporary file.
    #[cold]
    fn may_spill(&mut self) {
        match &mut self.low {
            Low::Own(low)
                if low.len() >= MAX_PART_LEN
                    && low.len() * size_of::<u32>() >= spill::budget() / 2 =>
            {
                // Whole parts; what is left stays.
                let mut rest = low.split_off(low.len() - low.len() % MAX_PART_LEN);
                let mut parts = Vec::new();
                if spill(low, &mut parts) {
                    rest.reserve_exact(MAX_PART_LEN - rest.len());
                    self.low = Low::Spilled(parts, rest);
                } else {
                    low.append(&mut rest);
                }
            }
            Low::Spilled(parts, low) => {
                if low.len() == MAX_PART_LEN && spill(low, parts) {
                    low.reserve_exact(MAX_PART_LEN);
                }
            }
            Low::Own(_) | Low::Shared { .. } => {}
        }
    }

    /// The same offsets in a temporary file, if that is possible.
    pub(crate) fn spilled(&self) -> Option<Self> {
        let Low::Own(low) = &self.low else { return None };
        Some(Self { low: Low::Spilled(written(low)?, Vec::new()), high: self.high.clone() })
    }

    /// Offsets below 2^32 in a temporary file.
    pub(crate) fn of_part(part: Part) -> Self {
        Self { low: Low::Spilled(vec![part], Vec::new()), high: Vec::new() }
    }

    /// The only part, if that is all there is to them.
    pub(crate) fn into_part(self) -> Result<Part, Self> {
        match self {
            Self { low: Low::Spilled(mut parts, rest), high }
                if parts.len() == 1 && rest.is_empty() && high.is_empty() =>
            {
                let only = parts.pop();
                only.ok_or_else(Self::default)
            }
            other => Err(other),
        }
    }

    /// Whether all of them are in memory of this process.
    pub(crate) fn is_in_memory(&self) -> bool {
        matches!(self.low, Low::Own(_))
    }

    /// How many bytes of this process's private memory they take.
    pub fn byte_len(&self) -> usize {
        let low = match &self.low {
            Low::Own(low) => low.capacity() * size_of::<u32>(),
            Low::Shared { .. } => size_of::<Self>(),
            Low::Spilled(parts, rest) => {
                parts.capacity() * size_of::<Part>() + rest.capacity() * size_of::<u32>()
            }
        };
        low + self.high.capacity() * size_of::<(usize, u32)>()
    }

    /// Frees unused capacity.
    pub fn shrink(&mut self) {
        match &mut self.low {
            Low::Own(low) => low.shrink_to_fit(),
            Low::Spilled(parts, rest) => {
                spill(rest, parts);
                rest.shrink_to_fit();
                parts.shrink_to_fit();
            }
            Low::Shared { .. } => {}
        }
        self.high.shrink_to_fit();
    }

    /// Looks up several of them.
    #[inline]
    pub fn reader(&self) -> OffsetReader<'_> {
        OffsetReader { offsets: self, block: Block::default() }
    }

    /// Offset number `at`, or `None` past the last, or if it cannot be read.
    #[inline]
    pub fn get(&self, at: usize) -> Option<u64> {
        self.reader().get(at).ok().flatten()
    }

    /// The high half of offset number `at`.
    #[inline]
    fn high_of(&self, at: usize) -> u32 {
        if self.high.is_empty() {
            return 0;
        }
        let num_changes = self.high.partition_point(|&(from, _)| from <= at);
        num_changes.checked_sub(1).map_or(0, |last| self.high[last].1)
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

    #[test]
    fn spilled_offsets_are_those_in_memory() {
        let count = 2 * MAX_PART_LEN as u64 + 5000;
        let value = |at: u64| at * 3_000 + 7;
        let mut offsets = Offsets::default();
        (0..count).for_each(|at| offsets.push(value(at)));
        offsets.shrink();
        let spilled = offsets.spilled().unwrap();
        assert!(spilled.byte_len() < 1000 && !spilled.is_in_memory());
        assert_eq!(spilled.len(), offsets.len());
        let mut reader = spilled.reader();
        for at in (0..count).step_by(317).chain((0..count).rev().step_by(1001)) {
            let at = usize::try_from(at).unwrap();
            assert_eq!(reader.get(at).unwrap(), offsets.get(at));
            assert_eq!(spilled.get(at), offsets.get(at));
        }
        let last = offsets.len() - 1;
        assert_eq!((spilled.get(last), spilled.get(last + 1)), (offsets.get(last), None));
        assert!(
            spilled.low_pairs().map(Result::unwrap).eq(offsets.low_pairs().map(Result::unwrap))
        );
    }

    #[test]
    fn offsets_beyond_the_budget_are_spilled_while_they_are_collected() {
        let count = 40_u64 << 20; // 160 MiB, more than half of the budget
        let mut offsets = Offsets::default();
        for at in 0..count {
            offsets.push(at * 1000);
            if at % (1 << 20) == 0 {
                let asked = usize::try_from(at / 2).unwrap();
                assert_eq!(offsets.get(asked), Some(asked as u64 * 1000));
            }
        }
        offsets.shrink();
        assert!(offsets.byte_len() < 10_000);
        assert_eq!(offsets.len() as u64, count);
        for at in [0, 1, 33 << 20, (40 << 20) - 1] {
            assert_eq!(offsets.get(at), Some(at as u64 * 1000));
        }
    }
}
