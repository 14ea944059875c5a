//! Which dataset comes next when several are mixed by weight.
//!
//! The choice at a position is arithmetic on the position alone (Grain's formula, on integer
//! proportions): the datasets are asked in turn, and each takes its share of the positions
//! that those before it left, spread as evenly as integers can be.

use super::floor::Floor;
use crate::{Error, Result};

/// The longest period kept as a table, in positions (48 KiB).
const MAX_TABLE_LEN: u64 = 4096;

/// The order in which the parts of a mixture take turns.
#[derive(Clone, Debug)]
pub struct MixSchedule {
    proportions: Box<[u64]>,
    /// Per part, what it and the parts after it have together.
    rests: Box<[u64]>,
    /// The first period, where it is short: who is chosen, and its key.
    table: Option<(Floor, Table)>,
}

/// For each position of a period, the part chosen and its key.
type Table = Box<[(u32, u32)]>;

/// What a position of a mixture is: which dataset, and which position of it.
pub type Choice = (u32, i64);

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
        let mut schedule = Self { proportions, rests, table: None };
        schedule.table = schedule.tabulated();
        Ok(schedule)
    }

    /// The number of parts.
    pub fn num_parts(&self) -> usize {
        self.proportions.len()
    }

    /// The dataset at `position` of the mixture, and the position in that dataset.
    pub fn choose(&self, position: i64) -> Choice {
        match &self.table {
            Some((period, table)) => self.choose_from_table(*period, table, position),
            None => self.choose_by_formula(position),
        }
    }

    /// Calls `visit` with the choice at each of `positions`; consecutive ones are fastest.
    pub fn choose_block(
        &self,
        positions: impl Iterator<Item = i64>,
        mut visit: impl FnMut(Choice),
    ) {
        if let Some((period, table)) = &self.table {
            positions.for_each(|at| visit(self.choose_from_table(*period, table, at)));
            return;
        }
        let mut run = Run::default();
        let mut following = None;
        for position in positions {
            if following == Some(position) {
                if run.levels.is_empty() {
                    run = self.run_from(position);
                }
                visit(run.next());
            } else {
                run.levels.clear();
                visit(self.choose_by_formula(position));
            }
            following = position.checked_add(1);
        }
    }

    #[inline]
    fn choose_from_table(&self, period: Floor, table: &[(u32, u32)], position: i64) -> Choice {
        let (periods, place) = period.split(position);
        // The remainder is below the period, which is the length of the table.
        let (part, key) = table[usize::try_from(place).unwrap_or(0)];
        // No overflow: a part has at most as many positions as the mixture, and a short period.
        (part, periods * self.proportions[part as usize].cast_signed() + i64::from(key))
    }

    /// One period of choices: after `sum(proportions)` positions they repeat, with each key
    /// advanced by its part's proportion.
    fn tabulated(&self) -> Option<(Floor, Table)> {
        let period = self.rests[0];
        if period > MAX_TABLE_LEN {
            return None;
        }
        let mut run = self.run_from(0);
        let mut entry = || {
            let (part, key) = run.next();
            (part, u32::try_from(key).unwrap_or(u32::MAX))
        };
        Some((Floor::new(period), (0..period).map(|_| entry()).collect()))
    }

    /// Asks one part after the other whether the position is its own.
    fn choose_by_formula(&self, position: i64) -> Choice {
        let mut reached = position;
        for (part, (&proportion, &rest)) in (0..).zip(self.proportions.iter().zip(&self.rests)) {
            let step = rest - proportion;
            let (passed, carried) = scaled(reached, step, rest);
            // The next position passes one more on, or it is this part's.
            if carried + step < rest {
                return (part, reached - passed);
            }
            reached = passed;
        }
        unreachable!("the last part passes nothing on")
    }

    /// The state of every part at `position`, which [`Run::next`] then counts on.
    fn run_from(&self, position: i64) -> Run {
        let mut reached = position;
        let mut level = |(&proportion, &rest): (&u64, &u64)| {
            let step = rest - proportion;
            let (passed, carried) = scaled(reached, step, rest);
            let level = Level { step, rest, carried, key: reached - passed };
            reached = passed;
            level
        };
        Run { levels: self.proportions.iter().zip(&self.rests).map(&mut level).collect() }
    }
}

/// Choices at consecutive positions, by counting instead of dividing.
#[derive(Debug, Default)]
struct Run {
    levels: Vec<Level>,
}

/// What one part has seen so far.
#[derive(Debug)]
struct Level {
    /// Of `rest` positions that reach the part, how many it passes on.
    step: u64,
    rest: u64,
    /// The remainder of the positions passed on; at `rest` another one is.
    carried: u64,
    /// The part's next key.
    key: i64,
}

impl Run {
    #[inline]
    fn next(&mut self) -> Choice {
        for (part, level) in (0..).zip(&mut self.levels) {
            level.carried += level.step;
            if level.carried < level.rest {
                let key = level.key;
                level.key = key.wrapping_add(1);
                return (part, key);
            }
            level.carried -= level.rest;
        }
        unreachable!("the last part passes nothing on")
    }
}

/// `value * step / rest` rounded down, and the remainder, for `step < rest`.
fn scaled(value: i64, step: u64, rest: u64) -> (i64, u64) {
    let (step, rest) = (step.cast_signed(), rest.cast_signed());
    if let Some(product) = value.checked_mul(step) {
        return (product.div_euclid(rest), product.rem_euclid(rest).cast_unsigned());
    }
    let product = i128::from(value) * i128::from(step);
    let (quotient, remainder) = (product.div_euclid(rest.into()), product.rem_euclid(rest.into()));
    let narrow = |wide: i128| i64::try_from(wide).expect("smaller than `value` or `rest`");
    (narrow(quotient), narrow(remainder).cast_unsigned())
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::{Choice, MixSchedule};
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
            schedule.choose_block(positions.iter().copied(), |choice| chosen.push(choice));
            for (&position, choice) in positions.iter().zip(chosen) {
                prop_assert_eq!(choice, choose_slowly(&proportions, position));
                prop_assert_eq!(choice, schedule.choose(position));
            }
        }
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
            schedule.choose_block(i64::MAX - 1..=i64::MAX, |choice| last = choice);
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
