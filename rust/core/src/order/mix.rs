//! The dataset at each position of a weighted mixture.
//!
//! The choice depends on the position alone (Grain's formula, on integer proportions): each
//! dataset in turn takes its share of the positions that the datasets before it left, spread as
//! evenly as integers allow.
//!
//! Evaluating that for one position costs time proportional to the number of datasets. So choices
//! are computed as tables of consecutive positions, at least as many as there are datasets: the
//! positions that a dataset takes from such a range follow directly from the formula.

use std::collections::HashMap;

use super::floor::FloorDivisor;
use super::remaining::Remaining;
use crate::{Error, Result};

/// The longest period whose table is stored in the schedule, in positions.
const MAX_PERIOD_LEN: u64 = 4096;

/// The shortest table, except at the end of a period, in positions.
const MIN_TABLE_LEN: u64 = 4096;

/// The most positions in cached tables, 12 bytes each.
const MAX_CACHED_LEN: u64 = 1 << 20;

/// The most tables for which lookups are counted.
const MAX_COUNTED_TABLES: usize = 1 << 14;

/// The cost of a position in a table, relative to evaluating the formula for one dataset.
const TABLE_COST: u64 = 4;

/// The dataset at every position of a mixture.
#[derive(Clone, Debug)]
pub struct MixSchedule {
    proportions: Box<[u64]>,
    /// Per dataset, the sum of its proportion and those of the datasets after it.
    suffix_sums: Box<[u64]>,
    /// The number of positions after which choices repeat, each key advanced by its dataset's
    /// proportion.
    period: FloorDivisor,
    table_len: u64,
    /// The first period, if it is short.
    period_table: Option<ChoiceTable>,
}

/// The dataset at a position of a mixture, and the position in that dataset.
pub type Choice = (u32, i64);

/// The choices at consecutive offsets in the first period.
#[derive(Clone, Debug)]
struct ChoiceTable {
    first: u64,
    parts: Box<[u32]>,
    keys: Box<[i64]>,
}

impl ChoiceTable {
    #[inline]
    fn get(&self, offset: u64) -> Option<Choice> {
        // An offset before the first is huge.
        let at = usize::try_from(offset.wrapping_sub(self.first)).ok()?;
        Some((*self.parts.get(at)?, self.keys[at]))
    }
}

impl MixSchedule {
    /// A schedule by `proportions`, of which only the ratios matter.
    ///
    /// # Errors
    ///
    /// If there is no proportion, one is zero, or their sum is 2^63 or more.
    pub fn new(proportions: &[u64]) -> Result<Self> {
        if proportions.is_empty() || proportions.contains(&0) {
            let text = "Must specify all non-zero proportions for mixing.";
            return Err(Error::InvalidArgument(text.into()));
        }
        let sum = proportions.iter().try_fold(0_u64, |sum, &part| sum.checked_add(part));
        if sum.is_none_or(|sum| sum > i64::MAX.cast_unsigned()) {
            let text = format!("`proportions` must add up to less than 2**63, got {proportions:?}");
            return Err(Error::InvalidArgument(text));
        }
        // The smallest numbers of the same ratios have the shortest period.
        let common = proportions.iter().copied().fold(0, gcd);
        let proportions: Box<[u64]> = proportions.iter().map(|part| part / common).collect();
        let mut suffix_sums = proportions.clone();
        for part in (1..suffix_sums.len()).rev() {
            suffix_sums[part - 1] += suffix_sums[part];
        }
        let period = FloorDivisor::new(suffix_sums[0]);
        let table_len = (proportions.len() as u64).next_power_of_two().max(MIN_TABLE_LEN);
        let mut schedule = Self { proportions, suffix_sums, period, table_len, period_table: None };
        if schedule.suffix_sums[0] <= MAX_PERIOD_LEN {
            schedule.period_table = Some(schedule.table(0, schedule.suffix_sums[0]));
        }
        Ok(schedule)
    }

    /// The number of datasets.
    pub fn num_parts(&self) -> usize {
        self.proportions.len()
    }

    /// The number of positions after which choices repeat.
    pub(crate) fn period_len(&self) -> u64 {
        self.suffix_sums[0]
    }

    /// How many of those positions the dataset `part` has.
    pub(crate) fn proportion(&self, part: u32) -> u64 {
        self.proportions[part as usize]
    }

    /// The dataset at `position` of the mixture, and the position in that dataset.
    pub fn choose(&self, position: i64) -> Choice {
        let (period, offset) = self.period_and_offset(position);
        let choice = self.period_table.as_ref().and_then(|table| table.get(offset));
        self.advanced(choice.unwrap_or_else(|| self.choose_by_formula(offset)), period)
    }

    /// Calls `visit` with the choice at each of `positions`; `recent` caches some for later calls.
    pub fn choose_block(
        &self,
        recent: &mut RecentChoices,
        positions: impl IntoIterator<Item = i64>,
        mut visit: impl FnMut(Choice),
    ) {
        for position in positions {
            let (period, offset) = self.period_and_offset(position);
            let table = self.period_table.as_ref().or_else(|| recent.last());
            let choice = table.and_then(|table| table.get(offset));
            visit(self.advanced(choice.unwrap_or_else(|| recent.choose(self, offset)), period));
        }
    }

    /// The period of `position`, and the offset in it.
    #[inline]
    fn period_and_offset(&self, position: i64) -> (i64, u64) {
        let (period, offset) = self.period.div_mod(position);
        (period, offset.cast_unsigned())
    }

    #[inline]
    fn advanced(&self, (part, key): Choice, period: i64) -> Choice {
        // No overflow: a dataset has no more positions than the mixture.
        (part, key.wrapping_add(period.wrapping_mul(self.proportions[part as usize].cast_signed())))
    }

    /// Evaluates the formula for each dataset in order, until one takes the offset.
    fn choose_by_formula(&self, offset: u64) -> Choice {
        let mut reaching = offset;
        for (part, (&proportion, &suffix_sum)) in
            (0..).zip(self.proportions.iter().zip(&self.suffix_sums))
        {
            let taken = taken_before(reaching, proportion, suffix_sum);
            if taken_before(reaching + 1, proportion, suffix_sum) > taken {
                return (part, taken.cast_signed());
            }
            reaching -= taken;
        }
        unreachable!("the last dataset takes every offset that reaches it")
    }

    /// The choices at `len` offsets from `first` on, all in the first period.
    fn table(&self, first: u64, len: u64) -> ChoiceTable {
        let num_offsets = usize::try_from(len).unwrap_or(usize::MAX);
        let mut parts = vec![0; num_offsets].into_boxed_slice();
        let mut keys = vec![0; num_offsets].into_boxed_slice();
        let mut left = Remaining::new(num_offsets);
        // The first offset that reaches a dataset, in its own numbering, and their number.
        let (mut reaching, mut num_reaching) = (first, len);
        for (part, (&proportion, &suffix_sum)) in
            (0..).zip(self.proportions.iter().zip(&self.suffix_sums))
        {
            let begin = taken_before(reaching, proportion, suffix_sum);
            let end = taken_before(reaching + num_reaching, proportion, suffix_sum);
            // In reverse, so that removing one leaves the ranks of the others unchanged.
            for key in (begin..end).rev() {
                let rank = product_quotient(key, suffix_sum, proportion) - reaching;
                let offset = left.remove_by_rank(usize::try_from(rank).unwrap_or(usize::MAX));
                parts[offset] = part;
                keys[offset] = key.cast_signed();
            }
            reaching -= begin;
            num_reaching -= end - begin;
            if num_reaching == 0 {
                break;
            }
        }
        ChoiceTable { first, parts, keys }
    }
}

/// A cache of tables and lookup counts; it does not affect what [`MixSchedule`] chooses.
#[derive(Clone, Debug, Default)]
pub struct RecentChoices {
    tables: Vec<ChoiceTable>,
    last: usize,
    /// By table number.
    uses: HashMap<u64, TableUse>,
}

#[derive(Clone, Copy, Debug)]
enum TableUse {
    /// Its index in `tables`.
    Cached(usize),
    /// The number of positions looked up one by one.
    Lookups(u64),
}

impl RecentChoices {
    #[inline]
    fn last(&self) -> Option<&ChoiceTable> {
        self.tables.get(self.last)
    }

    /// The choice at `offset`, which is not in the last table.
    fn choose(&mut self, schedule: &MixSchedule, offset: u64) -> Choice {
        let table_len = schedule.table_len;
        let (number, num_parts) = (offset / table_len, schedule.num_parts() as u64);
        if self.uses.len() >= MAX_COUNTED_TABLES {
            self.clear();
        }
        let uses = self.uses.entry(number).or_insert(TableUse::Lookups(0));
        match uses {
            TableUse::Cached(at) => self.last = *at,
            TableUse::Lookups(lookups) => {
                *lookups += 1;
                // Compute the table once single lookups would cost as much.
                if *lookups * num_parts < TABLE_COST * (table_len + num_parts) {
                    return schedule.choose_by_formula(offset);
                }
                if self.tables.len() as u64 * table_len >= MAX_CACHED_LEN {
                    self.clear();
                }
                let first = number * table_len;
                let len = table_len.min(schedule.suffix_sums[0] - first);
                self.last = self.tables.len();
                self.tables.push(schedule.table(first, len));
                self.uses.insert(number, TableUse::Cached(self.last));
            }
        }
        let choice = self.last().and_then(|table| table.get(offset));
        choice.unwrap_or_else(|| schedule.choose_by_formula(offset))
    }

    fn clear(&mut self) {
        *self = Self::default();
    }
}

/// How many of the first `offsets` offsets that reach a dataset it takes: its share, rounded up.
fn taken_before(offsets: u64, proportion: u64, suffix_sum: u64) -> u64 {
    // It takes `proportion` of every `suffix_sum` offsets, the first of them always.
    match offsets.checked_mul(proportion) {
        Some(product) => product.div_ceil(suffix_sum),
        None => narrow((u128::from(offsets) * u128::from(proportion)).div_ceil(suffix_sum.into())),
    }
}

/// `value * factor / divisor`, rounded down.
fn product_quotient(value: u64, factor: u64, divisor: u64) -> u64 {
    match value.checked_mul(factor) {
        Some(product) => product / divisor,
        None => narrow(u128::from(value) * u128::from(factor) / u128::from(divisor)),
    }
}

fn narrow(wide: u128) -> u64 {
    u64::try_from(wide).expect("at most the number of offsets")
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::{Choice, MAX_CACHED_LEN, MixSchedule, RecentChoices};
    use proptest::prelude::*;

    /// The formula as given in `spec/grain_behaviour.md`, in wide integers.
    fn choose_by_grains_formula(proportions: &[u64], position: i64) -> Choice {
        let mut suffix_sum: i128 = proportions.iter().map(|&part| i128::from(part)).sum();
        let (mut a, mut b) = (i128::from(position), i128::from(position) + 1);
        for (part, &proportion) in (0..).zip(proportions) {
            let step = suffix_sum - i128::from(proportion);
            let (next_a, next_b) =
                ((a * step).div_euclid(suffix_sum), (b * step).div_euclid(suffix_sum));
            if a - next_a != b - next_b {
                return (part, i64::try_from(b - next_b - 1).unwrap());
            }
            suffix_sum = step;
            (a, b) = (next_a, next_b);
        }
        panic!("no dataset was chosen");
    }

    fn proportions() -> impl Strategy<Value = Vec<u64>> {
        let scale = prop_oneof![Just(5_u64), Just(500), Just(100_000), Just(1 << 60)];
        scale.prop_flat_map(|max_proportion| prop::collection::vec(1..=max_proportion, 1..7))
    }

    proptest! {
        #[test]
        fn choose_block_matches_formula(
            proportions in proportions(),
            start in prop_oneof![-5000..5000_i64, -(1_i64 << 62)..1 << 62],
            jumps in prop::collection::vec(any::<i32>(), 0..20),
        ) {
            let schedule = MixSchedule::new(&proportions).unwrap();
            let jumped = jumps.iter().map(|&jump| start + i64::from(jump));
            let positions: Vec<i64> = (start..start + 60).chain(jumped).chain(3..5).collect();
            let mut chosen = Vec::new();
            let mut recent = RecentChoices::default();
            schedule.choose_block(&mut recent, positions.iter().copied(), |choice| {
                chosen.push(choice);
            });
            for (&position, choice) in positions.iter().zip(chosen) {
                prop_assert_eq!(choice, choose_by_grains_formula(&proportions, position));
                prop_assert_eq!(choice, schedule.choose(position));
            }
        }
    }

    fn many_proportions() -> impl Strategy<Value = Vec<u64>> {
        let max_proportion = prop_oneof![Just(1_u64), Just(3), Just(1000), Just(1 << 40)];
        let count = prop_oneof![50..400_usize, Just(6000)];
        (max_proportion, count).prop_flat_map(|(max_proportion, count)| {
            prop::collection::vec(1..=max_proportion, count..=count)
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn tables_of_many_parts_match_formula(
            proportions in many_proportions(),
            starts in prop::collection::vec(-(1_i64 << 40)..1 << 40, 1..4),
        ) {
            let schedule = MixSchedule::new(&proportions).unwrap();
            let mut recent = RecentChoices::default();
            for start in starts.into_iter().chain([0, 0]) {
                // Long enough that the last positions are looked up in tables.
                let mut position = start;
                let mut wrong = None;
                schedule.choose_block(&mut recent, start..start + 12_000, |choice| {
                    // The slow formula evaluates every dataset, so check some positions only.
                    let is_checked = (position - start) % 997 < 2;
                    if is_checked && choice != choose_by_grains_formula(&proportions, position) {
                        wrong = Some((position, choice));
                    }
                    position += 1;
                });
                prop_assert_eq!(wrong, None);
                if schedule.period_table.is_none() {
                    prop_assert!(!recent.tables.is_empty());
                }
            }
        }
    }

    #[test]
    fn cached_choices_are_bounded() {
        let proportions: Vec<u64> = (1 << 20..(1 << 20) + 300).collect();
        let schedule = MixSchedule::new(&proportions).unwrap();
        let mut recent = RecentChoices::default();
        for number in 0..400 {
            let start = 100_000 * number;
            schedule.choose_block(&mut recent, start..start + 100, |_| {});
            let cached: usize = recent.tables.iter().map(|table| table.keys.len()).sum();
            assert!(cached as u64 <= MAX_CACHED_LEN);
        }
        assert!(!recent.tables.is_empty());
    }

    #[test]
    fn positions_at_the_ends_of_the_range_follow_the_formula() {
        for proportions in
            [vec![1], vec![1, 1], vec![3, 1 << 40], vec![1 << 40, 3, 9], vec![4000, 1]]
        {
            let schedule = MixSchedule::new(&proportions).unwrap();
            for position in [i64::MIN, i64::MIN + 1, i64::MAX - 1, i64::MAX] {
                assert_eq!(
                    schedule.choose(position),
                    choose_by_grains_formula(&proportions, position)
                );
            }
            let mut last = (9, 0);
            let mut recent = RecentChoices::default();
            let ends = i64::MAX - 1..=i64::MAX;
            schedule.choose_block(&mut recent, ends, |choice| last = choice);
            assert_eq!(last, choose_by_grains_formula(&proportions, i64::MAX));
        }
    }

    #[test]
    fn empty_zero_and_overflowing_proportions_are_refused() {
        for proportions in [&[][..], &[1, 0], &[1 << 62, 1 << 62], &[u64::MAX, u64::MAX]] {
            assert!(MixSchedule::new(proportions).is_err(), "{proportions:?}");
        }
        assert!(MixSchedule::new(&[1 << 62, (1 << 62) - 1]).is_ok());
    }
}
