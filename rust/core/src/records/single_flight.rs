//! Work that no two threads should do at once, though others may do the same for other things.

use std::collections::HashSet;
use std::sync::{Condvar, Mutex, PoisonError};

use crate::process::PerProcess;

/// What is being worked on, by number. A forked child begins with nothing.
#[derive(Debug)]
pub(crate) struct InWork(PerProcess<(Mutex<State>, Condvar)>);

#[derive(Debug, Default)]
struct State {
    numbers: HashSet<u64>,
    num_waiting: usize,
}

/// Lets others work on the same thing when it goes.
#[derive(Debug)]
pub(crate) struct Alone<'a> {
    in_work: &'a InWork,
    number: u64,
}

impl InWork {
    pub(crate) const fn new() -> Self {
        Self(PerProcess::new(Default::default))
    }

    /// Waits until nobody works on thing `number`; then this thread does.
    pub(crate) fn alone(&self, number: u64) -> Alone<'_> {
        let (state, freed) = self.0.get();
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        while !state.numbers.insert(number) {
            state.num_waiting += 1;
            state = freed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.num_waiting -= 1;
        }
        Alone { in_work: self, number }
    }
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        let (state, freed) = self.in_work.0.get();
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        state.numbers.remove(&self.number);
        let awaited = state.num_waiting > 0;
        drop(state);
        if awaited {
            freed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Barrier};

    use super::*;

    #[test]
    fn one_thread_at_a_time_works_on_a_thing_and_others_on_other_things() {
        static IN_WORK: InWork = InWork::new();
        let both = Arc::new(Barrier::new(2));
        let at_one = Arc::new(AtomicUsize::new(0));
        let threads: Vec<_> = (0..2)
            .flat_map(|number| [number, number, number])
            .map(|number| {
                let (both, at_one) = (Arc::clone(&both), Arc::clone(&at_one));
                std::thread::spawn(move || {
                    let _alone = IN_WORK.alone(number);
                    if number == 1 {
                        assert_eq!(at_one.fetch_add(1, Ordering::Relaxed), 0);
                        at_one.fetch_sub(1, Ordering::Relaxed);
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
