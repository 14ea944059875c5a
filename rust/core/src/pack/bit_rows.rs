//! First fit and best fit for several features, by rows of bits.

use std::array::from_fn;

use crate::pack::free_space::{Fit, FreeSpace, signed_len};

/// Words of 64 bins in a row.
const WORDS: usize = 4;

/// Bins in a block.
const BLOCK: usize = 64 * WORDS;

/// A bit per bin of a block.
type Row = [u64; WORDS];

const NO_BIN: Row = [0; WORDS];

/// Bitmaps of the free space of bins, which compare 256 bins at once.
///
/// The free space in a feature is split into two digits. For each value of each digit, a row marks
/// the bins of a block that have at least this digit; so three rows per feature determine the bins
/// into which a length fits. For best fit, one row per bit of the total free space finds the
/// fullest of them. (Bit-parallel comparison: Li and Patel, "`BitWeaving`: Fast Scans for Main
/// Memory Data Processing", SIGMOD 2013.)
///
/// A search probes each block of 256 bins at most once: it is linear in the number of bins, and
/// takes a few microseconds for 10,000. Updating a bin writes one word in each row between its old
/// and its new digits.
#[derive(Debug)]
pub(crate) struct BitRows {
    features: Vec<Feature>,
    num_bins: usize,
    /// Rows for the total free space, which only best fit needs.
    total_bits: usize,
    /// Rows per block.
    height: usize,
    /// By block, in the order in which blocks were opened: the rows of each feature, then those of
    /// the total free space, highest bit first.
    rows: Vec<Row>,
    /// By block and feature, an exclusive upper bound of the first digits of all bins.
    bounds: Vec<usize>,
    /// Free space by bin and feature.
    free: Vec<i64>,
}

/// How the free space in a feature is split into digits, and where its rows start in a block.
#[derive(Debug)]
struct Feature {
    capacity: usize,
    /// Bits of the second digit.
    bits: u32,
    /// First of the rows for a first digit of at least 0, 1, and so on; the last one is empty.
    firsts: usize,
    /// First of the rows for a second digit of at least 0, 1, and so on.
    seconds: usize,
}

impl Feature {
    fn digits(&self, len: usize) -> (usize, usize) {
        (len >> self.bits, len & ((1 << self.bits) - 1))
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
        let total_bits = match fit {
            Fit::First => 0,
            Fit::Best => bit_length(total(capacities.iter().copied())) as usize,
        };
        height += total_bits;
        let (rows, bounds, free) = (Vec::new(), Vec::new(), Vec::new());
        Self { features, num_bins, total_bits, height, rows, bounds, free }
    }

    /// The bins of a block into which `lengths` fit.
    fn fitting(&self, rows: &[Row], lengths: &[usize]) -> Row {
        let mut fitting = [!0; WORDS];
        for (feature, &length) in self.features.iter().zip(lengths) {
            let (first, second) = feature.digits(length);
            let firsts = &rows[feature.firsts + first..];
            let (at_least, greater) = (firsts[0], firsts[1]);
            let seconds = rows[feature.seconds + second];
            fitting = from_fn(|at| fitting[at] & (greater[at] | (at_least[at] & seconds[at])));
        }
        fitting
    }

    /// The least total free space of `bins`, and the bins that have it.
    fn fullest(&self, rows: &[Row], mut bins: Row) -> (usize, Row) {
        let mut total_free = 0;
        for row in &rows[self.height - self.total_bits..] {
            let fuller: Row = from_fn(|at| bins[at] & !row[at]);
            // The outcome is unpredictable, so avoid a branch.
            let none = fuller == NO_BIN;
            let keep = u64::from(none).wrapping_neg();
            bins = from_fn(|at| fuller[at] | (bins[at] & keep));
            total_free = total_free << 1 | usize::from(none);
        }
        (total_free, bins)
    }

    /// Adds a block of empty bins.
    fn open_block(&mut self) {
        let bins = BLOCK.min(self.num_bins - self.free.len() / self.features.len());
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
        let total_free = total(self.features.iter().map(|feature| feature.capacity));
        for (bit, row) in rows[self.height - self.total_bits..].iter_mut().rev().enumerate() {
            if total_free >> bit & 1 == 1 {
                *row = all;
            }
        }
        for _ in 0..bins {
            self.free.extend(self.features.iter().map(|feature| signed_len(feature.capacity)));
        }
    }
}

impl FreeSpace for BitRows {
    fn clear(&mut self) {
        self.rows.clear();
        self.bounds.clear();
        self.free.clear();
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
            super::probes::add(1);
            let fitting = self.fitting(rows, lengths);
            if fitting == NO_BIN {
                continue;
            }
            let (total_free, fullest) = self.fullest(rows, fitting);
            if total_free < best.0 {
                best = (total_free, Some(BLOCK * block + first_bin(fullest)));
                if self.total_bits == 0 {
                    break;
                }
            }
        }
        let next = self.free.len() / self.features.len();
        let fits = || features().all(|(feature, &length)| length <= feature.capacity);
        best.1.or_else(|| (next < self.num_bins && fits()).then_some(next))
    }

    fn update(&mut self, bin: usize, free_now: &[i64]) {
        let num_features = self.features.len();
        if bin * num_features == self.free.len() {
            self.open_block();
        }
        let rows = &mut self.rows[bin / BLOCK * self.height..][..self.height];
        let free = &mut self.free[bin * num_features..][..num_features];
        let bounds = &mut self.bounds[bin / BLOCK * num_features..][..num_features];
        let (word, bit) = (bin % BLOCK / 64, 1 << (bin % 64));
        let mut total_free = 0_usize;
        for (((feature, old), &free_now), bound) in
            self.features.iter().zip(free).zip(free_now).zip(bounds)
        {
            let Ok(len_before) = usize::try_from(std::mem::replace(old, free_now)) else {
                continue;
            };
            let (first_before, second_before) = feature.digits(len_before);
            // A closed bin is in no row of first digits, not even that for 0.
            let (first, second) = usize::try_from(free_now).map_or((0, second_before), |len| {
                total_free = total_free.saturating_add(len);
                let (first, second) = feature.digits(len);
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
        for (digit, row) in rows[self.height - self.total_bits..].iter_mut().rev().enumerate() {
            row[word] =
                if total_free >> digit & 1 == 1 { row[word] | bit } else { row[word] & !bit };
        }
    }
}

fn total(lengths: impl Iterator<Item = usize>) -> usize {
    lengths.fold(0, usize::saturating_add)
}

fn bit_length(number: usize) -> u32 {
    usize::BITS - number.leading_zeros()
}

fn first_bin(bins: Row) -> usize {
    let word = bins.iter().position(|&word| word != 0).unwrap_or(0);
    64 * word + bins[word].trailing_zeros() as usize
}
