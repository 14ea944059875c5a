//! Which dataset comes next when several are mixed by weight.
//!
//! The choice at a position is arithmetic on the position alone (Grain's formula, on integer
//! proportions): the datasets are asked in turn, and each takes its share of the positions
//! that those before it left, spread as evenly as integers can be.
//!
//! To ask each of many datasets at each position would cost in proportion to their number. The
//! positions that reach a dataset are consecutive, so for a stretch of them it is known at once
//! which it takes: choices are made for stretches at least as long as there are datasets.

use std::collections::HashMap;

use super::floor::Floor;
use super::remaining::Remaining;
use crate::{Error, Result};

/// The longest period that is kept with the schedule, in positions.
const MAX_TABLE_LEN: u64 = 4096;

/// The shortest stretch of positions chosen for at once, but for that at the end of a period.
const MIN_STRETCH_LEN: u64 = 4096;

/// Positions for which choices are kept, of 12 bytes each.
const MAX_KEPT_LEN: u64 = 1 << 20;

/// Stretches that are remembered to have been asked for.
const MAX_ASKED: usize = 1 << 14;

/// What a position of a stretch takes, counted in parts asked for one position alone.
const CHOICE_COST: u64 = 4;

/// The order in which the parts of a mixture take turns.
#[derive(Clone, Debug)]
pub struct MixSchedule {
    proportions: Box<[u64]>,
    /// Per part, what it and the parts after it have together.
    rests: Box<[u64]>,
    /// After so many positions choices repeat, each key advanced by its part's proportion.
    period: Floor,
    stretch_len: u64,
    /// The first period, where it is short.
    table: Option<Stretch>,
}

/// What a position of a mixture is: which dataset, and which position of it.
pub type Choice = (u32, i64);

/// The choices at consecutive places of the first period.
#[derive(Clone, Debug)]
struct Stretch {
    first: u64,
    parts: Box<[u32]>,
    keys: Box<[i64]>,
}

impl Stretch {
    #[inline]
    fn get(&self, place: u64) -> Option<Choice> {
        // A place before the first is huge.
        let at = usize::try_from(place.wrapping_sub(self.first)).ok()?;
        Some((*self.parts.get(at)?, self.keys[at]))
    }
}

impl MixSchedule {
    /// A schedule by `proportions`, whose sizes relative to each other count.
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
        // Only ratios enter the formula; the smallest numbers have the shortest period.
        let common = proportions.iter().copied().fold(0, gcd);
        let proportions: Box<[u64]> = proportions.iter().map(|part| part / common).collect();
        let mut rests = proportions.clone();
        for part in (1..rests.len()).rev() {
            rests[part - 1] += rests[part];
        }
        let period = Floor::new(rests[0]);
        let stretch_len = (proportions.len() as u64).next_power_of_two().max(MIN_STRETCH_LEN);
        let mut schedule = Self { proportions, rests, period, stretch_len, table: None };
        if schedule.rests[0] <= MAX_TABLE_LEN {
            schedule.table = Some(schedule.stretch(0, schedule.rests[0]));
        }
        Ok(schedule)
    }

    /// The number of parts.
    pub fn num_parts(&self) -> usize {
        self.proportions.len()
    }

    /// The dataset at `position` of the mixture, and the position in that dataset.
    pub fn choose(&self, position: i64) -> Choice {
        let (periods, place) = self.place(position);
        let choice = self.table.as_ref().and_then(|table| table.get(place));
        self.advanced(choice.unwrap_or_else(|| self.choose_by_formula(place)), periods)
    }

    /// Calls `visit` with the choice at each of `positions`; `recent` remembers some for later.
    pub fn choose_block(
        &self,
        recent: &mut RecentChoices,
        positions: impl IntoIterator<Item = i64>,
        mut visit: impl FnMut(Choice),
    ) {
        for position in positions {
            let (periods, place) = self.place(position);
            let stretch = self.table.as_ref().or_else(|| recent.last());
            let choice = stretch.and_then(|stretch| stretch.get(place));
            visit(self.advanced(choice.unwrap_or_else(|| recent.choose(self, place)), periods));
        }
    }

    /// How many periods `position` is behind the start, and its place in its own.
    #[inline]
    fn place(&self, position: i64) -> (i64, u64) {
        let (periods, place) = self.period.split(position);
        (periods, place.cast_unsigned())
    }

    #[inline]
    fn advanced(&self, (part, key): Choice, periods: i64) -> Choice {
        // No overflow: a part has no more positions than the mixture.
        (
            part,
            key.wrapping_add(periods.wrapping_mul(self.proportions[part as usize].cast_signed())),
        )
    }

    /// Asks one part after the other whether the place is its own.
    fn choose_by_formula(&self, place: u64) -> Choice {
        let mut reached = place;
        for (part, (&proportion, &rest)) in (0..).zip(self.proportions.iter().zip(&self.rests)) {
            let taken = taken_before(reached, proportion, rest);
            if taken_before(reached + 1, proportion, rest) > taken {
                return (part, taken.cast_signed());
            }
            reached -= taken;
        }
        unreachable!("the last part passes nothing on")
    }

    /// The choices at `len` places from `first` on, all in the first period.
    fn stretch(&self, first: u64, len: u64) -> Stretch {
        let num_places = usize::try_from(len).unwrap_or(usize::MAX);
        let mut parts = vec![0; num_places].into_boxed_slice();
        let mut keys = vec![0; num_places].into_boxed_slice();
        let mut left = Remaining::new(num_places);
        // The places that reach a part, counted as it counts them.
        let (mut reached, mut num_reached) = (first, len);
        for (part, (&proportion, &rest)) in (0..).zip(self.proportions.iter().zip(&self.rests)) {
            let begin = taken_before(reached, proportion, rest);
            let end = taken_before(reached + num_reached, proportion, rest);
            // From the last on, so that the ranks of the others stay.
            for key in (begin..end).rev() {
                let rank = product_quotient(key, rest, proportion) - reached;
                let place = left.take(usize::try_from(rank).unwrap_or(usize::MAX));
                parts[place] = part;
                keys[place] = key.cast_signed();
            }
            reached -= begin;
            num_reached -= end - begin;
            if num_reached == 0 {
                break;
            }
        }
        Stretch { first, parts, keys }
    }
}

/// Choices made last, and what was asked for; what [`MixSchedule`] chooses does not depend on it.
#[derive(Clone, Debug, Default)]
pub struct RecentChoices {
    stretches: Vec<Stretch>,
    last: usize,
    /// By the number of a stretch.
    asked: HashMap<u64, Asked>,
}

#[derive(Clone, Copy, Debug)]
enum Asked {
    /// Where it is kept.
    Kept(usize),
    /// How many single positions of it were asked for.
    Times(u64),
}

impl RecentChoices {
    #[inline]
    fn last(&self) -> Option<&Stretch> {
        self.stretches.get(self.last)
    }

    /// The choice at `place`, which is not in the last stretch.
    fn choose(&mut self, schedule: &MixSchedule, place: u64) -> Choice {
        let stretch_len = schedule.stretch_len;
        let (number, num_parts) = (place / stretch_len, schedule.num_parts() as u64);
        if self.asked.len() >= MAX_ASKED {
            self.forget();
        }
        let asked = self.asked.entry(number).or_insert(Asked::Times(0));
        match asked {
            Asked::Kept(at) => self.last = *at,
            Asked::Times(times) => {
                *times += 1;
                // To ask for single positions shall not cost more than to know the whole stretch.
                if *times * num_parts < CHOICE_COST * (stretch_len + num_parts) {
                    return schedule.choose_by_formula(place);
                }
                if self.stretches.len() as u64 * stretch_len >= MAX_KEPT_LEN {
                    self.forget();
                }
                let first = number * stretch_len;
                let len = stretch_len.min(schedule.rests[0] - first);
                self.last = self.stretches.len();
                self.stretches.push(schedule.stretch(first, len));
                self.asked.insert(number, Asked::Kept(self.last));
            }
        }
        let choice = self.last().and_then(|stretch| stretch.get(place));
        choice.unwrap_or_else(|| schedule.choose_by_formula(place))
    }

    fn forget(&mut self) {
        *self = Self::default();
    }
}

/// Of the first `places` places that reach a part, those it takes: its share, rounded up.
fn taken_before(places: u64, proportion: u64, rest: u64) -> u64 {
    // Of each `rest` places it takes `proportion`, and the first place is always its own.
    match places.checked_mul(proportion) {
        Some(product) => product.div_ceil(rest),
        None => narrow((u128::from(places) * u128::from(proportion)).div_ceil(rest.into())),
    }
}

/// `value * factor / divisor`, rounded down, where that fits.
fn product_quotient(value: u64, factor: u64, divisor: u64) -> u64 {
    match value.checked_mul(factor) {
        Some(product) => product / divisor,
        None => narrow(u128::from(value) * u128::from(factor) / u128::from(divisor)),
    }
}

fn narrow(wide: u128) -> u64 {
    u64::try_from(wide).expect("at most the number of places")
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::{Choice, MAX_KEPT_LEN, MixSchedule, RecentChoices};
    use proptest::prelude::*;

    /// The formula as `spec/grain_behaviour.md` has it, in wide integers.
    fn choose_slowly(proportions: &[u64], position: i64) -> Choice {
        let mut rest: i128 = proportions.iter().map(|&part| i128::from(part)).sum();
        let (mut a, mut b) = (i128::from(position), i128::from(position) + 1);
        for (part, &proportion) in (0..).zip(proportions) {
            let step = rest - i128::from(proportion);
            let (next_a, next_b) = ((a * step).div_euclid(rest), (b * step).div_euclid(rest));
            if a - next_a != b - next_b {
                return (part, i64::try_from(b - next_b - 1).unwrap());
            }
            rest = step;
            (a, b) = (next_a, next_b);
        }
        panic!("no part was chosen");
    }

    fn proportions() -> impl Strategy<Value = Vec<u64>> {
        let scale = prop_oneof![Just(5_u64), Just(500), Just(100_000), Just(1 << 60)];
        scale.prop_flat_map(|most| prop::collection::vec(1..=most, 1..7))
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
                prop_assert_eq!(choice, choose_slowly(&proportions, position));
                prop_assert_eq!(choice, schedule.choose(position));
            }
        }
    }

    fn many_proportions() -> impl Strategy<Value = Vec<u64>> {
        let most = prop_oneof![Just(1_u64), Just(3), Just(1000), Just(1 << 40)];
        let count = prop_oneof![50..400_usize, Just(6000)];
        (most, count).prop_flat_map(|(most, count)| prop::collection::vec(1..=most, count..=count))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn stretches_of_many_parts_match_formula(
            proportions in many_proportions(),
            starts in prop::collection::vec(-(1_i64 << 40)..1 << 40, 1..4),
        ) {
            let schedule = MixSchedule::new(&proportions).unwrap();
            let mut recent = RecentChoices::default();
            for start in starts.into_iter().chain([0, 0]) {
                // Long enough for the first positions to be asked for singly, the last not.
                let mut position = start;
                let mut wrong = None;
                schedule.choose_block(&mut recent, start..start + 12_000, |choice| {
                    // Each choice asks every part here: some will do.
                    let is_due = (position - start) % 997 < 2;
                    if is_due && choice != choose_slowly(&proportions, position) {
                        wrong = Some((position, choice));
                    }
                    position += 1;
                });
                prop_assert_eq!(wrong, None);
                if schedule.table.is_none() {
                    prop_assert!(!recent.stretches.is_empty());
                }
            }
        }
    }

    #[test]
    fn choices_kept_are_bounded() {
        let proportions: Vec<u64> = (1 << 20..(1 << 20) + 300).collect();
        let schedule = MixSchedule::new(&proportions).unwrap();
        let mut recent = RecentChoices::default();
        for number in 0..400 {
            let start = 100_000 * number;
            schedule.choose_block(&mut recent, start..start + 100, |_| {});
            let kept: usize = recent.stretches.iter().map(|stretch| stretch.keys.len()).sum();
            assert!(kept as u64 <= MAX_KEPT_LEN);
        }
        assert!(!recent.stretches.is_empty());
    }

    #[test]
    fn positions_at_the_ends_of_the_range_follow_the_formula() {
        for proportions in
            [vec![1], vec![1, 1], vec![3, 1 << 40], vec![1 << 40, 3, 9], vec![4000, 1]]
        {
            let schedule = MixSchedule::new(&proportions).unwrap();
            for position in [i64::MIN, i64::MIN + 1, i64::MAX - 1, i64::MAX] {
                assert_eq!(schedule.choose(position), choose_slowly(&proportions, position));
            }
            let mut last = (9, 0);
            let mut recent = RecentChoices::default();
            let ends = i64::MAX - 1..=i64::MAX;
            schedule.choose_block(&mut recent, ends, |choice| last = choice);
            assert_eq!(last, choose_slowly(&proportions, i64::MAX));
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
