//! How many reads are in flight at a time: a bound that all those who share a queue keep together.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::pool;
use crate::process::PerProcess;

/// How many reads are in flight at most unless something else is asked for. At 20 ms a read that
/// is 6,400 reads in a second; more gain little and what serves them may mind.
pub const DEFAULT_IN_FLIGHT: usize = 128;

/// Something of which parts can be done by any thread.
pub(super) trait Parts: Send + Sync {
    /// Does the next part, unless all have been begun.
    fn do_next(self: Arc<Self>);
}

/// Reads that wait for their turn, first come, first served.
#[derive(Debug, Clone)]
pub struct ReadQueue(Arc<Shared>);

struct Shared {
    max_in_flight: usize,
    /// A forked child begins with nothing in flight.
    state: PerProcess<Mutex<State>>,
}

#[derive(Default)]
struct State {
    /// Who has parts to be done, and how many.
    waiting: VecDeque<(Arc<dyn Parts>, usize)>,
    in_flight: usize,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Shared")
            .field("max_in_flight", &self.max_in_flight)
            .finish_non_exhaustive()
    }
}

impl Default for ReadQueue {
    fn default() -> Self {
        Self::new(DEFAULT_IN_FLIGHT)
    }
}

impl ReadQueue {
    /// A queue of which `max_in_flight` reads, at least one, are done at a time.
    pub fn new(max_in_flight: usize) -> Self {
        let state = PerProcess::new(Default::default);
        Self(Arc::new(Shared { max_in_flight: max_in_flight.max(1), state }))
    }

    /// The queue of all those in the program that were given none.
    pub fn of_program() -> &'static Self {
        static QUEUE: PerProcess<ReadQueue> = PerProcess::new(ReadQueue::default);
        QUEUE.get()
    }

    /// How many reads are in flight at most.
    pub fn max_in_flight(&self) -> usize {
        self.0.max_in_flight
    }

    /// Has the next `count` parts of `parts` done by threads of the engine.
    pub(super) fn submit(&self, parts: Arc<dyn Parts>, count: usize) {
        if count == 0 {
            return;
        }
        let mut state = self.state();
        state.waiting.push_back((parts, count));
        let more = count.min(self.0.max_in_flight - state.in_flight);
        state.in_flight += more;
        drop(state);
        self.add_threads(more);
    }

    /// Lets this thread be one of those that read, if there is room for one; it must
    /// [`leave`](Self::leave) in the end.
    pub(super) fn enter(&self) -> bool {
        let mut state = self.state();
        let has_room = state.in_flight < self.0.max_in_flight;
        state.in_flight += usize::from(has_room);
        has_room
    }

    /// Gives the place of this thread to another if something waits.
    pub(super) fn leave(&self) {
        let mut state = self.state();
        if state.waiting.is_empty() {
            state.in_flight -= 1;
        } else {
            drop(state);
            self.add_threads(1);
        }
    }

    fn add_threads(&self, count: usize) {
        if count > 0 {
            pool::submit(count, || {
                let queue = self.clone();
                Box::new(move || queue.work())
            });
        }
    }

    /// Does what waits until nothing is left.
    fn work(&self) {
        loop {
            let mut state = self.state();
            let Some((parts, count)) = state.waiting.front_mut() else {
                state.in_flight -= 1;
                return;
            };
            *count -= 1;
            let parts = if *count == 0 {
                state.waiting.pop_front().map(|(parts, _)| parts)
            } else {
                Some(Arc::clone(parts))
            };
            drop(state);
            if let Some(parts) = parts {
                parts.do_next();
            }
            if pool::is_crowded() {
                self.leave();
                return;
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.get().lock().unwrap_or_else(PoisonError::into_inner)
    }
}
