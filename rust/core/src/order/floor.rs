//! Repeated floor division by one divisor, as Python's `//` and `%`.

/// A divisor with its reciprocal, which replaces each division by a multiplication.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FloorDivisor {
    divisor: u64,
    reciprocal: u64,
}

impl FloorDivisor {
    /// Precomputes the reciprocal. Zero is accepted, since a dataset may be empty, but `div_mod`
    /// must not be called then.
    pub(crate) fn new(divisor: u64) -> Self {
        Self { divisor, reciprocal: u64::MAX.checked_div(divisor).unwrap_or(0) }
    }

    /// Whether the divisor is zero.
    pub(crate) fn is_zero(self) -> bool {
        self.divisor == 0
    }

    /// The divisor.
    pub(crate) fn divisor(self) -> u64 {
        self.divisor
    }

    /// Quotient rounded down, and remainder in `0..divisor`, as Python's `divmod`.
    #[inline]
    pub(crate) fn div_mod(self, value: i64) -> (i64, i64) {
        // For a negative value, `!(!value / divisor)` is the quotient rounded down.
        let sign = value >> 63;
        let (quotient, remainder) = self.div_mod_positive((value ^ sign).cast_unsigned());
        let remainder = if sign == 0 { remainder } else { self.divisor - 1 - remainder };
        (quotient.cast_signed() ^ sign, remainder.cast_signed())
    }

    #[inline]
    fn div_mod_positive(self, value: u64) -> (u64, u64) {
        // The estimate is at most two too small, since `reciprocal > 2**64 / divisor - 2`.
        let mut quotient = high_word(value, self.reciprocal);
        let mut remainder = value - quotient * self.divisor;
        for _ in 0..2 {
            let correction = u64::from(remainder >= self.divisor);
            quotient += correction;
            remainder -= self.divisor * correction;
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
    use super::FloorDivisor;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn div_mod_matches_floor_division(value: i64, divisor in 1..=i64::MAX) {
            for divisor in [divisor, divisor % 1000 + 1, 1, i64::MAX] {
                let expected = (
                    i128::from(value).div_euclid(i128::from(divisor)),
                    i128::from(value).rem_euclid(i128::from(divisor)),
                );
                let (quotient, remainder) = FloorDivisor::new(divisor.cast_unsigned()).div_mod(value);
                prop_assert_eq!((quotient.into(), remainder.into()), expected);
            }
        }
    }

    #[test]
    fn div_mod_is_exact_at_the_ends_of_the_range() {
        for value in [i64::MIN, i64::MIN + 1, -1, 0, 1, i64::MAX - 1, i64::MAX] {
            for divisor in [1_i64, 2, 3, (1 << 62) - 1, 1 << 62, i64::MAX] {
                let found = FloorDivisor::new(divisor.cast_unsigned()).div_mod(value);
                // `i64::MIN.div_euclid(d)` is floor division for every positive `d`.
                assert_eq!(found, (value.div_euclid(divisor), value.rem_euclid(divisor)));
            }
        }
    }
}
