//! A value that is made on first use, such as a file that is opened then.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use super::SingleFlight;
use crate::Result;

static NEXT_ID: AtomicU64 = AtomicU64::new(0);
static FLIGHTS: SingleFlight = SingleFlight::new();

/// A value that is made once. Where that fails, the next that asks for it tries again.
#[derive(Debug)]
pub struct TryOnce<T> {
    /// Unique in the process.
    id: u64,
    value: OnceLock<T>,
}

impl<T> Default for TryOnce<T> {
    fn default() -> Self {
        Self { id: NEXT_ID.fetch_add(1, Ordering::Relaxed), value: OnceLock::new() }
    }
}

impl<T> TryOnce<T> {
    /// The value, if it has been made.
    pub fn get(&self) -> Option<&T> {
        self.value.get()
    }

    /// The value; if there is none, this thread makes it, or waits for the one that does.
    ///
    /// # Errors
    /// Those of `make`, and [`Error::Interrupted`](crate::Error::Interrupted).
    pub fn get_or_make(&self, make: impl FnOnce() -> Result<T>) -> Result<&T> {
        if let Some(value) = self.value.get() {
            return Ok(value);
        }
        let _guard = FLIGHTS.enter(self.id)?;
        if let Some(value) = self.value.get() {
            return Ok(value);
        }
        let value = make()?;
        Ok(self.value.get_or_init(|| value))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::AtomicUsize;

    use super::*;
    use crate::Error;

    #[test]
    fn one_thread_makes_the_value_and_after_a_failure_another_does() {
        let (cells, both) = ([TryOnce::default(), TryOnce::default()], Barrier::new(2));
        let num_made = AtomicUsize::new(0);
        let make = |is_first: bool| {
            if is_first {
                both.wait(); // values of different cells are made at the same time
            }
            std::thread::yield_now();
            match num_made.fetch_add(1, Ordering::Relaxed) {
                0 | 1 => Err(Error::OutOfRange("none yet".to_owned())),
                number => Ok(number),
            }
        };
        let outcomes: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..16)
                .map(|number| {
                    let (cell, make) = (&cells[number % 2], &make);
                    scope.spawn(move || cell.get_or_make(|| make(number < 2)).ok())
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for (number, outcome) in outcomes.iter().enumerate() {
            assert!(outcome.is_none_or(|value| cells[number % 2].get() == Some(value)));
        }
        assert_eq!(outcomes.iter().filter(|outcome| outcome.is_none()).count(), 2);
        assert_eq!(num_made.into_inner(), 4, "two failures, and each value once");
    }
}
