//! Lets one thread at a time work on each key, such as the file that is being opened.

use std::collections::HashSet;

use crate::lock::lock;
use crate::process::PerProcess;
use crate::sync::{Condvar, Mutex};
use crate::{Error, Result, interrupt};

/// The keys that threads are working on. A forked child starts with none.
#[derive(Debug)]
pub struct SingleFlight(PerProcess<(Mutex<Flights>, Condvar)>);

#[derive(Debug, Default)]
struct Flights {
    keys: HashSet<u64>,
    num_waiting: usize,
}

/// Releases its key when dropped.
#[derive(Debug)]
pub struct FlightGuard<'a> {
    flights: &'a SingleFlight,
    key: u64,
}

impl Default for SingleFlight {
    fn default() -> Self {
        Self::new()
    }
}

impl SingleFlight {
    /// No key is held.
    pub const fn new() -> Self {
        Self(PerProcess::new(Default::default))
    }

    /// Waits until no other thread holds `key`, and takes it.
    ///
    /// # Errors
    /// [`Error::Interrupted`] if the caller ends the wait, or this thread may
    /// hold the key itself.
    pub fn enter(&self, key: u64) -> Result<FlightGuard<'_>> {
        let (mutex, released) = self.0.get();
        let mut state = lock(mutex);
        if !state.keys.insert(key) {
            if interrupt::is_answering() {
                return Err(Error::Interrupted);
            }
            state.num_waiting += 1;
            drop(state);
            let entered =
                interrupt::wait_while(mutex, released, |state| !state.keys.insert(key)).map(drop);
            lock(mutex).num_waiting -= 1;
            entered?;
        }
        Ok(FlightGuard { flights: self, key })
    }
}

impl Drop for FlightGuard<'_> {
    fn drop(&mut self) {
        let (state, released) = self.flights.0.get();
        let mut state = lock(state);
        state.keys.remove(&self.key);
        let has_waiting = state.num_waiting > 0;
        drop(state);
        if has_waiting {
            released.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Barrier};

    use super::*;

    #[test]
    fn one_thread_at_a_time_holds_a_key_and_others_hold_other_keys() {
        static FLIGHTS: SingleFlight = SingleFlight::new();
        let both = Arc::new(Barrier::new(2));
        let num_inside = Arc::new(AtomicUsize::new(0));
        let threads: Vec<_> = (0..2)
            .flat_map(|key| [key, key, key])
            .map(|key| {
                let (both, num_inside) = (Arc::clone(&both), Arc::clone(&num_inside));
                std::thread::spawn(move || {
                    let _guard = FLIGHTS.enter(key).unwrap();
                    if key == 1 {
                        assert_eq!(num_inside.fetch_add(1, Ordering::Relaxed), 0);
                        num_inside.fetch_sub(1, Ordering::Relaxed);
                    }
                    both.wait();
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
    }
}
