//! A page that a pool of processes shares: the memory they have in common, and where each stands.
//!
//! The bytes reserved are a single number that all of them add to and take from; a reservation
//! that does not fit leaves it as it was. So the bound holds whoever asks and whenever.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::platform::{BorrowedFile, OwnedFile};
use crate::shared_memory::Words;
use crate::{Error, Result};

/// Words between those of one process and the next: a cache line.
const STRIDE: usize = 8;
/// Where the words of process 0 begin; the first line is everybody's.
const FIRST: usize = STRIDE;

/// The shared page, in any of the processes.
#[derive(Debug)]
pub struct SharedBudget {
    words: Words,
    budget_bytes: u64,
}

impl SharedBudget {
    /// A page for `num_processes`, which may reserve `budget_bytes` together, and its file.
    ///
    /// # Errors
    ///
    /// If the system has no memory or no descriptor left for it.
    pub fn create(num_processes: usize, budget_bytes: u64) -> Result<(Self, OwnedFile)> {
        let (words, file) = Words::create(FIRST + num_processes * STRIDE)?;
        Ok((Self { words, budget_bytes }, file))
    }

    /// The page behind `file`, made by [`SharedBudget::create`] with the same numbers.
    ///
    /// # Errors
    ///
    /// If the numbers are others, or the page cannot be mapped.
    pub fn open(file: BorrowedFile<'_>, num_processes: usize, budget_bytes: u64) -> Result<Self> {
        let words = Words::open(file, FIRST + num_processes * STRIDE)?;
        Ok(Self { words, budget_bytes })
    }

    /// Reserves `byte_len` bytes if `spare_bytes` more would fit beside them; says whether it did.
    pub fn reserve(&self, byte_len: u64, spare_bytes: u64) -> bool {
        let fits = |reserved: u64| {
            let all = reserved.checked_add(byte_len)?;
            (all.checked_add(spare_bytes)? <= self.budget_bytes).then_some(all)
        };
        self.words[0].fetch_update(Ordering::AcqRel, Ordering::Acquire, fits).is_ok()
    }

    /// Reserves `byte_len` bytes, budget or not; says whether it is kept all the same.
    pub fn reserve_anyway(&self, byte_len: u64) -> bool {
        let before = self.words[0].fetch_add(byte_len, Ordering::AcqRel);
        before.saturating_add(byte_len) <= self.budget_bytes
    }

    /// Gives `byte_len` reserved bytes back.
    ///
    /// # Errors
    ///
    /// If fewer are reserved, which is a defect of the one who counts; they stay reserved then.
    pub fn release(&self, byte_len: u64) -> Result<()> {
        let left = |reserved: u64| reserved.checked_sub(byte_len);
        match self.words[0].fetch_update(Ordering::AcqRel, Ordering::Acquire, left) {
            Ok(_) => Ok(()),
            Err(reserved) => Err(Error::InvalidArgument(format!(
                "`release` gives back reserved bytes once, got {byte_len} where {reserved} are \
                 reserved"
            ))),
        }
    }

    /// Bytes reserved at the moment.
    pub fn reserved(&self) -> u64 {
        self.words[0].load(Ordering::Acquire)
    }

    /// Writes down where process `number` stands.
    ///
    /// # Errors
    ///
    /// If there is no such process.
    pub fn mark(&self, number: usize, place: u64) -> Result<()> {
        self.place(number)?.store(place, Ordering::Relaxed);
        Ok(())
    }

    /// What process `number` last wrote down, 0 at first.
    ///
    /// # Errors
    ///
    /// If there is no such process.
    pub fn marked(&self, number: usize) -> Result<u64> {
        Ok(self.place(number)?.load(Ordering::Relaxed))
    }

    fn place(&self, number: usize) -> Result<&AtomicU64> {
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
    fn processes_see_each_others_numbers() {
        let (ours, file) = SharedBudget::create(3, 100).unwrap();
        let theirs = SharedBudget::open(file.as_fd(), 3, 100).unwrap();
        assert!(ours.reserve(60, 0));
        assert_eq!(theirs.reserved(), 60);
        theirs.mark(2, 17).unwrap();
        assert_eq!((ours.marked(1).unwrap(), ours.marked(2).unwrap()), (0, 17));
        assert!(ours.mark(3, 0).is_err());
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
    fn bytes_given_back_twice_are_an_error_and_change_nothing() {
        let (shared_budget, _file) = SharedBudget::create(1, 100).unwrap();
        assert!(shared_budget.reserve(60, 0) && shared_budget.reserve(30, 0));
        shared_budget.release(60).unwrap();
        let message = shared_budget.release(60).unwrap_err().to_string();
        assert_eq!(
            message,
            "`release` gives back reserved bytes once, got 60 where 30 are reserved"
        );
        assert_eq!(shared_budget.reserved(), 30);
        assert!(
            shared_budget.reserve(70, 0) && !shared_budget.reserve(1, 0),
            "the budget is what it was"
        );
    }

    #[test]
    fn bound_holds_among_threads() {
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
