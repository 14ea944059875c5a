//! Division by one divisor many times, rounding down as Python does.

/// A divisor with its reciprocal, so that a column is divided without a division per entry.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Floor {
    divisor: u64,
    reciprocal: u64,
}

impl Floor {
    /// Prepares division by `divisor`. Zero is accepted here, since a dataset may be empty;
    /// nothing may be divided by it.
    pub(crate) fn new(divisor: u64) -> Self {
        Self { divisor, reciprocal: u64::MAX.checked_div(divisor).unwrap_or(0) }
    }

    /// Whether the divisor is zero.
    pub(crate) fn is_zero(self) -> bool {
        self.divisor == 0
    }

    /// Quotient rounded down and remainder in `0..divisor`, as Python's `divmod`.
    #[inline]
    pub(crate) fn split(self, value: i64) -> (i64, i64) {
        // A negative value is mirrored: `!v / d` counts whole divisors below zero.
        let sign = value >> 63;
        let (quotient, remainder) = self.split_positive((value ^ sign).cast_unsigned());
        let mirrored = if sign == 0 { remainder } else { self.divisor - 1 - remainder };
        (quotient.cast_signed() ^ sign, mirrored.cast_signed())
    }

    #[inline]
    fn split_positive(self, value: u64) -> (u64, u64) {
        // The estimate is at most two short, since `reciprocal > 2**64 / divisor - 2`.
        let mut quotient = high_word(value, self.reciprocal);
        let mut remainder = value - quotient * self.divisor;
        for _ in 0..2 {
            let short = u64::from(remainder >= self.divisor);
            quotient += short;
            remainder -= self.divisor * short;
        }
        (quotient, remainder)
    }
}

#[inline]
fn high_word(a: u64, b: u64) -> u64 {
    ((u128::from(a) * u128::from(b)) >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::Floor;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn split_matches_floor_division(value: i64, divisor in 1..=i64::MAX) {
            for divisor in [divisor, divisor % 1000 + 1, 1, i64::MAX] {
                let expected = (
                    i128::from(value).div_euclid(i128::from(divisor)),
                    i128::from(value).rem_euclid(i128::from(divisor)),
                );
                let (quotient, remainder) = Floor::new(divisor.cast_unsigned()).split(value);
                prop_assert_eq!((quotient.into(), remainder.into()), expected);
            }
        }
    }

    #[test]
    fn split_is_exact_at_the_ends_of_the_range() {
        for value in [i64::MIN, i64::MIN + 1, -1, 0, 1, i64::MAX - 1, i64::MAX] {
            for divisor in [1_i64, 2, 3, (1 << 62) - 1, 1 << 62, i64::MAX] {
                let split = Floor::new(divisor.cast_unsigned()).split(value);
                // `i64::MIN.div_euclid(d)` is floor division for every positive `d`.
                assert_eq!(split, (value.div_euclid(divisor), value.rem_euclid(divisor)));
            }
        }
    }
}
