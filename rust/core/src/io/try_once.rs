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
    use std::time::Duration;

    use super::*;
    use crate::Error;

    #[test]
    fn one_thread_makes_the_value_and_after_a_failure_another_does() {
        let (cells, both) = ([TryOnce::default(), TryOnce::default()], Barrier::new(2));
        let fail = || {
            both.wait(); // those of different cells are made at the same time
            Err(Error::OutOfRange("none yet".to_owned()))
        };
        std::thread::scope(|scope| {
            for cell in &cells {
                scope.spawn(move || {
                    assert!(cell.get_or_make(fail).is_err() && cell.get().is_none());
                });
            }
        });
        let num_made = AtomicUsize::new(0);
        let make = || {
            let number = num_made.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(10)); // others come meanwhile
            Ok(number)
        };
        std::thread::scope(|scope| {
            for cell in cells.iter().cycle().take(16) {
                scope.spawn(move || assert_eq!(cell.get_or_make(make).ok(), cell.get()));
            }
        });
        assert_eq!(num_made.into_inner(), 2, "each value once");
    }
}
