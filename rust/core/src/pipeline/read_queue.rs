//! A limit on the reads in flight, common to all users of a queue.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::pool;
use crate::process::PerProcess;

/// The default maximum of reads in flight. At 20 ms a read these are 6,400 reads per second; more
/// gain little and may overload the storage service.
pub const DEFAULT_IN_FLIGHT: usize = 128;

/// A job whose tasks any thread can run.
pub trait Job: Send + Sync {
    /// Runs the next task, unless all have started.
    fn run_next(self: Arc<Self>);
}

/// A FIFO queue of reads.
#[derive(Debug, Clone)]
pub struct ReadQueue(Arc<Shared>);

struct Shared {
    max_in_flight: usize,
    /// A forked child starts with nothing in flight.
    state: PerProcess<Mutex<State>>,
}

#[derive(Default)]
struct State {
    /// Jobs with the number of `run_next` calls that are queued for each.
    waiting: VecDeque<(Arc<dyn Job>, usize)>,
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
    /// A queue that runs at most `max_in_flight` reads, at least one, at a time.
    pub fn new(max_in_flight: usize) -> Self {
        let state = PerProcess::new(Default::default);
        Self(Arc::new(Shared { max_in_flight: max_in_flight.max(1), state }))
    }

    /// The default queue of the program.
    pub fn of_program() -> &'static Self {
        static QUEUE: PerProcess<ReadQueue> = PerProcess::new(ReadQueue::default);
        QUEUE.get()
    }

    /// The maximum number of reads in flight.
    pub fn max_in_flight(&self) -> usize {
        self.0.max_in_flight
    }

    /// Queues `count` calls of `job.run_next()` for threads of the engine.
    pub fn submit(&self, job: Arc<dyn Job>, count: usize) {
        if count == 0 {
            return;
        }
        let mut state = self.state();
        state.waiting.push_back((job, count));
        let more = count.min(self.0.max_in_flight - state.in_flight);
        state.in_flight += more;
        drop(state);
        self.add_threads(more);
    }

    /// Counts this thread as one that reads, if the limit permits; it must then call
    /// [`leave`](Self::leave).
    pub(super) fn enter(&self) -> bool {
        let mut state = self.state();
        let may_enter = state.in_flight < self.0.max_in_flight;
        state.in_flight += usize::from(may_enter);
        may_enter
    }

    /// Ends what `enter` started; another thread takes over if jobs are waiting.
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

    /// Runs waiting jobs until none is left.
    fn work(&self) {
        loop {
            let mut state = self.state();
            let Some((job, count)) = state.waiting.front_mut() else {
                state.in_flight -= 1;
                return;
            };
            *count -= 1;
            let job = if *count == 0 {
                state.waiting.pop_front().map(|(job, _)| job)
            } else {
                Some(Arc::clone(job))
            };
            drop(state);
            if let Some(job) = job {
                job.run_next();
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
