//! A page shared by a pool of processes: their common memory budget, and the progress of each.
//!
//! The reserved bytes are one counter that all processes update; a reservation that does not fit
//! leaves it unchanged. So the limit holds for all of them at any time.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::platform::{BorrowedFile, OwnedFile};
use crate::shared_memory::Words;
use crate::{Error, Result};

/// The distance in words between those of two processes: a cache line.
const STRIDE: usize = 8;
/// The index of the first word of process 0; the first cache line belongs to all.
const FIRST: usize = STRIDE;

/// The shared page, as mapped by one of the processes.
#[derive(Debug)]
pub struct SharedBudget {
    words: Words,
    budget_bytes: u64,
}

impl SharedBudget {
    /// Creates a page for `num_processes`, which may reserve `budget_bytes` in total, and its file.
    ///
    /// # Errors
    ///
    /// If the system has no memory or no file descriptor left.
    pub fn create(num_processes: usize, budget_bytes: u64) -> Result<(Self, OwnedFile)> {
        let (words, file) = Words::create(FIRST + num_processes * STRIDE)?;
        Ok((Self { words, budget_bytes }, file))
    }

    /// Maps the page of `file`, created by [`SharedBudget::create`] with the same arguments.
    ///
    /// # Errors
    ///
    /// If the page has another size or cannot be mapped.
    pub fn open(file: BorrowedFile<'_>, num_processes: usize, budget_bytes: u64) -> Result<Self> {
        let words = Words::open(file, FIRST + num_processes * STRIDE)?;
        Ok(Self { words, budget_bytes })
    }

    /// Reserves `byte_len` bytes if `spare_bytes` more would fit, too; returns whether it did.
    pub fn reserve(&self, byte_len: u64, spare_bytes: u64) -> bool {
        let fits = |reserved: u64| {
            let all = reserved.checked_add(byte_len)?;
            (all.checked_add(spare_bytes)? <= self.budget_bytes).then_some(all)
        };
        self.words[0].fetch_update(Ordering::AcqRel, Ordering::Acquire, fits).is_ok()
    }

    /// Reserves `byte_len` bytes even beyond the budget; returns whether they are within it.
    pub fn reserve_anyway(&self, byte_len: u64) -> bool {
        let before = self.words[0].fetch_add(byte_len, Ordering::AcqRel);
        before.saturating_add(byte_len) <= self.budget_bytes
    }

    /// Releases `byte_len` reserved bytes.
    ///
    /// # Errors
    ///
    /// If fewer are reserved, which is a defect of the caller; these stay reserved.
    pub fn release(&self, byte_len: u64) -> Result<()> {
        let left = |reserved: u64| reserved.checked_sub(byte_len);
        match self.words[0].fetch_update(Ordering::AcqRel, Ordering::Acquire, left) {
            Ok(_) => Ok(()),
            Err(reserved) => Err(Error::InvalidArgument(format!(
                "`release` must release reserved bytes once, got {byte_len} where {reserved} are \
                 reserved"
            ))),
        }
    }

    /// The number of bytes reserved.
    pub fn reserved(&self) -> u64 {
        self.words[0].load(Ordering::Acquire)
    }

    /// Sets the progress of process `number`.
    ///
    /// # Errors
    ///
    /// If there is no such process.
    pub fn set_progress(&self, number: usize, progress: u64) -> Result<()> {
        self.word(number)?.store(progress, Ordering::Relaxed);
        Ok(())
    }

    /// The progress of process `number`, 0 at first.
    ///
    /// # Errors
    ///
    /// If there is no such process.
    pub fn progress(&self, number: usize) -> Result<u64> {
        Ok(self.word(number)?.load(Ordering::Relaxed))
    }

    fn word(&self, number: usize) -> Result<&AtomicU64> {
        let index = number.checked_mul(STRIDE).and_then(|words| words.checked_add(FIRST));
        index
            .and_then(|index| self.words.get(index))
            .ok_or_else(|| Error::OutOfRange(format!("the page has no process {number}")))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn processes_see_each_others_reservations_and_progress() {
        let (ours, file) = SharedBudget::create(3, 100).unwrap();
        let theirs = SharedBudget::open(file.as_fd(), 3, 100).unwrap();
        assert!(ours.reserve(60, 0));
        assert_eq!(theirs.reserved(), 60);
        theirs.set_progress(2, 17).unwrap();
        assert_eq!((ours.progress(1).unwrap(), ours.progress(2).unwrap()), (0, 17));
        assert!(ours.set_progress(3, 0).is_err());
        assert!(SharedBudget::open(file.as_fd(), 4, 100).is_err());
    }

    #[test]
    fn reservation_that_does_not_fit_changes_nothing() {
        let (shared_budget, _file) = SharedBudget::create(1, 100).unwrap();
        assert!(shared_budget.reserve(60, 40));
        assert!(!shared_budget.reserve(41, 0));
        assert!(!shared_budget.reserve(40, 1));
        assert!(!shared_budget.reserve(u64::MAX, 0));
        assert_eq!(shared_budget.reserved(), 60);
        assert!(!shared_budget.reserve_anyway(50));
        shared_budget.release(110).unwrap();
        assert_eq!(shared_budget.reserved(), 0);
    }

    #[test]
    fn bytes_released_twice_are_an_error_and_change_nothing() {
        let (shared_budget, _file) = SharedBudget::create(1, 100).unwrap();
        assert!(shared_budget.reserve(60, 0) && shared_budget.reserve(30, 0));
        shared_budget.release(60).unwrap();
        let message = shared_budget.release(60).unwrap_err().to_string();
        assert_eq!(
            message,
            "`release` must release reserved bytes once, got 60 where 30 are reserved"
        );
        assert_eq!(shared_budget.reserved(), 30);
        assert!(
            shared_budget.reserve(70, 0) && !shared_budget.reserve(1, 0),
            "the budget is unchanged"
        );
    }

    #[test]
    fn limit_holds_across_threads() {
        let (shared_budget, _file) = SharedBudget::create(1, 1000).unwrap();
        std::thread::scope(|scope| {
            for step in 1..5 {
                let shared_budget = &shared_budget;
                scope.spawn(move || {
                    for _ in 0..1000 {
                        if shared_budget.reserve(100 * step, 0) {
                            assert!(shared_budget.reserved() <= 1000);
                            shared_budget.release(100 * step).unwrap();
                        }
                    }
                });
            }
        });
        assert_eq!(shared_budget.reserved(), 0);
    }
}
