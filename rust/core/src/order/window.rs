//! Shuffles inside windows: every record stays within a bounded distance of its index.
//!
//! Windows are numbered from 0 across epochs, and each has its own order. If the window size
//! divides the epoch, this is Grain's order. Otherwise Grain's last window takes records of the
//! next epoch, so that an epoch repeats some and lacks others; here each epoch starts with a new
//! window, its last one is shorter, and an epoch of `n` records has `ceil(n / window)` windows.

use super::floor::FloorDivisor;
use super::permute::{Permutation, SHUFFLE_ROUNDS};
use crate::try_alloc::try_with_capacity;
use crate::{Error, Result};

/// Maps positions to windows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Windows {
    num_records: FloorDivisor,
    epoch_len: i64,
    window_size: FloorDivisor,
    window_len: i64,
    per_epoch: i64,
}

/// One window: its number, where it starts and how many records it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) number: i64,
    pub(crate) start: i64,
    pub(crate) len: i64,
}

impl Windows {
    /// Windows of `window_size` over epochs of `num_records`; neither may be negative.
    pub(crate) fn new(num_records: i64, window_size: i64) -> Result<Self> {
        if window_size < 1 {
            let text = format!("`window_size` must be at least 1, got {window_size}");
            return Err(Error::InvalidArgument(text));
        }
        // If the window size divides the epoch, treat each window as an epoch of its own.
        let epoch_len = if num_records % window_size == 0 { window_size } else { num_records };
        let window_len = window_size.min(epoch_len.max(1));
        Ok(Self {
            num_records: FloorDivisor::new(if num_records == 0 {
                0
            } else {
                epoch_len.cast_unsigned()
            }),
            epoch_len,
            window_size: FloorDivisor::new(window_len.cast_unsigned()),
            window_len,
            per_epoch: epoch_len / window_len + i64::from(epoch_len % window_len != 0),
        })
    }

    /// Whether there are no records.
    pub(crate) fn is_empty(&self) -> bool {
        self.num_records.is_zero()
    }

    /// How many records an epoch has, and how many windows; a window may count as an epoch.
    pub(crate) fn of_epoch(&self) -> (u64, i64) {
        (self.num_records.divisor(), self.per_epoch)
    }

    /// The window of `position`, or `None` if its start or number overflows.
    pub(crate) fn at(&self, position: i64) -> Option<Window> {
        let (epoch, offset) = self.num_records.div_mod(position);
        let (window, _) = self.window_size.div_mod(offset);
        let skipped = window * self.window_len;
        Some(Window {
            number: epoch.checked_mul(self.per_epoch)?.checked_add(window)?,
            start: epoch.checked_mul(self.epoch_len)?.checked_add(skipped)?,
            len: self.window_len.min(self.epoch_len - skipped),
        })
    }
}

/// The order in which the sequential window shuffle emits a window of `window_len` elements, as
/// indices into the window.
///
/// `seed` is the window's: the dataset's plus the window's number. The range is reversed first,
/// since Grain pops elements from the end of the shuffled window.
///
/// # Errors
///
/// If the order does not fit into memory.
pub fn window_order(window_len: u64, seed: u32) -> Result<Vec<i64>> {
    if window_len == 0 {
        return Ok(Vec::new());
    }
    let len = usize::try_from(window_len).unwrap_or(usize::MAX);
    let mut order: Vec<i64> =
        try_with_capacity(len, || format!("{window_len} elements of a window"))?;
    order.extend((0..window_len.cast_signed()).rev());
    Permutation::new(window_len, seed, SHUFFLE_ROUNDS)?.apply_block(&mut order)?;
    Ok(order)
}

#[cfg(test)]
mod tests {
    use super::{Window, Windows, window_order};

    #[test]
    fn dividing_windows_are_numbered_over_the_endless_sequence() {
        let windows = Windows::new(20, 5).unwrap();
        assert_eq!(windows.at(23), Some(Window { number: 4, start: 20, len: 5 }));
        assert_eq!(windows.at(-1), Some(Window { number: -1, start: -5, len: 5 }));
    }

    #[test]
    fn other_windows_restart_with_each_epoch() {
        let windows = Windows::new(20, 6).unwrap();
        assert_eq!(windows.at(19), Some(Window { number: 3, start: 18, len: 2 }));
        assert_eq!(windows.at(20), Some(Window { number: 4, start: 20, len: 6 }));
        assert_eq!(windows.at(-1), Some(Window { number: -1, start: -2, len: 2 }));
        let whole = Windows::new(7, 100).unwrap();
        assert_eq!(whole.at(8), Some(Window { number: 1, start: 7, len: 7 }));
    }

    #[test]
    fn windows_cover_every_position_once() {
        for (num_records, window_size) in [(1, 1), (7, 3), (12, 4), (5, 9), (100, 1)] {
            let windows = Windows::new(num_records, window_size).unwrap();
            let mut next = 0;
            while next < 3 * num_records {
                let window = windows.at(next).unwrap();
                assert_eq!(window.start, next);
                assert!((1..=window_size).contains(&window.len));
                for position in next..next + window.len {
                    assert_eq!(windows.at(position), Some(window));
                }
                next += window.len;
            }
        }
    }

    #[test]
    fn a_window_order_is_a_permutation_and_huge_windows_are_refused() {
        let mut order = window_order(1000, 3).unwrap();
        assert_ne!(order[..10], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        order.sort_unstable();
        assert!(order.into_iter().eq(0..1000));
        assert_eq!(window_order(0, 3).unwrap(), []);
        assert!(window_order(1 << 62, 3).is_err());
    }
}
