//! The first or the fullest bin with room in several features, by rows of bits.

use std::array::from_fn;

use crate::pack::free_space::{Fit, FreeSpace, cell_count};

/// Words of 64 bins in a row.
const WORDS: usize = 4;

/// Bins in a block.
const BLOCK: usize = 64 * WORDS;

/// A bit for each bin of a block.
type Row = [u64; WORDS];

const NO_BIN: Row = [0; WORDS];

/// Bins by the digits of their room, which bits of 256 bins side by side compare at once.
///
/// Room in a feature has two digits. One row says which bins of a block have at least some
/// first digit, another which have at least some second one, so that three rows for each
/// feature tell which bins have room; a row for each bit of the cells that are left finds the
/// fullest of them. (Bits side by side: Li and Patel, "`BitWeaving`: Fast Scans for Main Memory
/// Data Processing", SIGMOD 2013.)
///
/// A search looks at one block for every 256 bins at most, whatever their rooms are: it grows with
/// the bins, and takes a few microseconds at 10,000. A change of a bin writes one word of the rows
/// that its digits have passed.
#[derive(Debug)]
pub(crate) struct BitRows {
    features: Vec<Feature>,
    num_bins: usize,
    /// Rows for the cells that are left, which only the fullest bin needs.
    left_bits: usize,
    /// Rows of a block.
    height: usize,
    /// Block by block as they come into use: the rows of each feature, then those of the cells
    /// that are left, the highest bit first.
    rows: Vec<Row>,
    /// By block and feature, a number that the first digits of all bins are below.
    bounds: Vec<usize>,
    /// Room by bin and feature.
    rooms: Vec<i64>,
}

/// The digits of the room in a feature, and where its rows begin in a block.
#[derive(Debug)]
struct Feature {
    capacity: usize,
    /// Bits of the second digit.
    bits: u32,
    /// Bins whose first digit is at least 0, 1, and so on; the last is a row of no bin.
    firsts: usize,
    /// Bins whose second digit is at least 0, 1, and so on.
    seconds: usize,
}

impl Feature {
    fn digits(&self, cells: usize) -> (usize, usize) {
        (cells >> self.bits, cells & ((1 << self.bits) - 1))
    }
}

impl BitRows {
    pub(crate) fn new(capacities: &[usize], num_bins: usize, fit: Fit) -> Self {
        let mut height = 0;
        let feature = |&capacity: &usize| {
            let bits = bit_length(capacity).div_ceil(2);
            let (firsts, seconds) = (height, height + (capacity >> bits) + 2);
            height = seconds + (1 << bits);
            Feature { capacity, bits, firsts, seconds }
        };
        let features = capacities.iter().map(feature).collect();
        let left_bits = match fit {
            Fit::First => 0,
            Fit::Best => bit_length(total(capacities.iter().copied())) as usize,
        };
        height += left_bits;
        let (rows, bounds, rooms) = (Vec::new(), Vec::new(), Vec::new());
        Self { features, num_bins, left_bits, height, rows, bounds, rooms }
    }

    /// The bins of a block with room.
    fn fitting(&self, rows: &[Row], lengths: &[usize]) -> Row {
        let mut fitting = [!0; WORDS];
        for (feature, &length) in self.features.iter().zip(lengths) {
            let (first, second) = feature.digits(length);
            let firsts = &rows[feature.firsts + first..];
            let (as_many, more) = (firsts[0], firsts[1]);
            let seconds = rows[feature.seconds + second];
            fitting = from_fn(|at| fitting[at] & (more[at] | (as_many[at] & seconds[at])));
        }
        fitting
    }

    /// The cells left in the fullest of `bins`, and those that have as many left.
    fn fullest(&self, rows: &[Row], mut bins: Row) -> (usize, Row) {
        let mut left = 0;
        for row in &rows[self.height - self.left_bits..] {
            let fuller: Row = from_fn(|at| bins[at] & !row[at]);
            // Nobody can guess the outcome, so there is no branch.
            let none = fuller == NO_BIN;
            let stay = u64::from(none).wrapping_neg();
            bins = from_fn(|at| fuller[at] | (bins[at] & stay));
            left = left << 1 | usize::from(none);
        }
        (left, bins)
    }

    /// Adds a block of empty bins.
    fn open_block(&mut self) {
        let bins = BLOCK.min(self.num_bins - self.rooms.len() / self.features.len());
        let mut all = NO_BIN;
        (0..bins).for_each(|bin| all[bin / 64] |= 1 << (bin % 64));
        let block = self.rows.len();
        self.rows.resize(block + self.height, NO_BIN);
        let rows = &mut self.rows[block..];
        for feature in &self.features {
            let (first, second) = feature.digits(feature.capacity);
            rows[feature.firsts..=feature.firsts + first].fill(all);
            rows[feature.seconds..=feature.seconds + second].fill(all);
            self.bounds.push(first + 1);
        }
        let left = total(self.features.iter().map(|feature| feature.capacity));
        for (bit, row) in rows[self.height - self.left_bits..].iter_mut().rev().enumerate() {
            if left >> bit & 1 == 1 {
                *row = all;
            }
        }
        for _ in 0..bins {
            self.rooms.extend(self.features.iter().map(|feature| cell_count(feature.capacity)));
        }
    }
}

impl FreeSpace for BitRows {
    fn clear(&mut self) {
        self.rows.clear();
        self.bounds.clear();
        self.rooms.clear();
    }

    fn choose(&self, lengths: &[usize]) -> Option<usize> {
        let features = || self.features.iter().zip(lengths);
        let bounds = self.bounds.chunks_exact(self.features.len());
        let mut best = (usize::MAX, None);
        for (block, (bounds, rows)) in bounds.zip(self.rows.chunks_exact(self.height)).enumerate() {
            let digits = features().map(|(feature, length)| length >> feature.bits);
            if digits.zip(bounds).any(|(digit, &bound)| digit >= bound) {
                continue;
            }
            #[cfg(test)]
            super::looks::add(1);
            let fitting = self.fitting(rows, lengths);
            if fitting == NO_BIN {
                continue;
            }
            let (left, fullest) = self.fullest(rows, fitting);
            if left < best.0 {
                best = (left, Some(BLOCK * block + first_bin(fullest)));
                if self.left_bits == 0 {
                    break;
                }
            }
        }
        let next = self.rooms.len() / self.features.len();
        let fits = || features().all(|(feature, &length)| length <= feature.capacity);
        best.1.or_else(|| (next < self.num_bins && fits()).then_some(next))
    }

    fn update(&mut self, bin: usize, room: &[i64]) {
        let num_features = self.features.len();
        if bin * num_features == self.rooms.len() {
            self.open_block();
        }
        let rows = &mut self.rows[bin / BLOCK * self.height..][..self.height];
        let rooms = &mut self.rooms[bin * num_features..][..num_features];
        let bounds = &mut self.bounds[bin / BLOCK * num_features..][..num_features];
        let (word, bit) = (bin % BLOCK / 64, 1 << (bin % 64));
        let mut left = 0_usize;
        for (((feature, was), &room), bound) in
            self.features.iter().zip(rooms).zip(room).zip(bounds)
        {
            let Ok(cells_before) = usize::try_from(std::mem::replace(was, room)) else { continue };
            let (first_before, second_before) = feature.digits(cells_before);
            // A closed bin has no first digit, not even 0.
            let (first, second) = usize::try_from(room).map_or((0, second_before), |cells| {
                left = left.saturating_add(cells);
                let (first, second) = feature.digits(cells);
                (first + 1, second)
            });
            for row in &mut rows[feature.firsts..][first..=first_before] {
                row[word] &= !bit;
            }
            let (low, high) = (second.min(second_before), second.max(second_before));
            for row in &mut rows[feature.seconds..][low + 1..=high] {
                row[word] ^= bit;
            }
            while *bound > 0 && rows[feature.firsts + *bound - 1] == NO_BIN {
                *bound -= 1;
            }
        }
        for (place, row) in rows[self.height - self.left_bits..].iter_mut().rev().enumerate() {
            row[word] = if left >> place & 1 == 1 { row[word] | bit } else { row[word] & !bit };
        }
    }
}

fn total(cells: impl Iterator<Item = usize>) -> usize {
    cells.fold(0, usize::saturating_add)
}

fn bit_length(number: usize) -> u32 {
    usize::BITS - number.leading_zeros()
}

fn first_bin(bins: Row) -> usize {
    let word = bins.iter().position(|&word| word != 0).unwrap_or(0);
    64 * word + bins[word].trailing_zeros() as usize
}
