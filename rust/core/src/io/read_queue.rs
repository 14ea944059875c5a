//! A limit on the reads in flight, common to all users of a queue.

use std::collections::VecDeque;
use std::sync::Arc;

use super::pool;
use crate::process::PerProcess;
use crate::sync::{Mutex, MutexGuard};

/// The default maximum of reads in flight. At 20 ms a read these are 6,400 reads per second; more
/// gain little and may overload the storage service.
pub const DEFAULT_IN_FLIGHT: usize = 128;

/// A job whose tasks any thread can run.
pub trait Job: Send + Sync {
    /// Runs the next task, unless all have started.
    fn run_next(self: Arc<Self>);

    /// Starts the next task without waiting, if it is a read that needs no thread: it keeps `permit`
    /// until it has ended. Else returns that.
    fn start_next(self: Arc<Self>, permit: Permit) -> Option<Permit> {
        Some(permit)
    }
}

/// Counts as one read in flight. When it is dropped, the next one that waits starts, on another thread:
/// this may be one of the storage, for which the read would wait.
#[derive(Debug)]
pub struct Permit(Option<ReadQueue>);

impl Permit {
    /// Leaves the count as it is: it is somebody else's from now on.
    fn give_up(mut self) {
        self.0 = None;
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(queue) = self.0.take() {
            queue.go_on(1, false);
        }
    }
}

/// A FIFO queue of reads.
#[derive(Debug, Clone)]
pub struct ReadQueue(Arc<Queue>);

struct Queue {
    max_in_flight: usize,
    /// A forked child starts with nothing in flight.
    state: PerProcess<Mutex<Load>>,
}

#[derive(Default)]
struct Load {
    /// Jobs with the number of `run_next` calls that are queued for each.
    waiting: VecDeque<(Arc<dyn Job>, usize)>,
    in_flight: usize,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Queue")
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
        Self(Arc::new(Queue { max_in_flight: max_in_flight.max(1), state }))
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
        self.go_on(more, true);
    }

    /// Counts the caller as one that reads, if the limit permits.
    pub(crate) fn enter(&self) -> Option<Permit> {
        let mut state = self.state();
        let may_enter = state.in_flight < self.0.max_in_flight;
        state.in_flight += usize::from(may_enter);
        may_enter.then(|| self.permit())
    }

    /// For one that is counted already.
    fn permit(&self) -> Permit {
        Permit(Some(self.clone()))
    }

    /// Starts `count` tasks, which are counted already, of the jobs that wait; where no thread can be
    /// started, on this one if that `may_wait`.
    fn go_on(&self, count: usize, may_wait: bool) {
        for number in 0..count {
            let Some(job) = self.next() else { continue };
            let Some(permit) = Arc::clone(&job).start_next(self.permit()) else { continue };
            permit.give_up();
            self.state().waiting.push_front((job, 1));
            // If one needs a thread, the next ones mostly do.
            let work = || -> Box<dyn FnOnce() + Send> {
                let queue = self.clone();
                Box::new(move || queue.work())
            };
            if may_wait {
                pool::submit(count - number, work);
            } else if !pool::try_submit(count - number, work) {
                // Those who wait for the jobs run them.
                self.state().in_flight -= count - number;
            }
            return;
        }
    }

    /// Runs waiting jobs until none is left.
    fn work(&self) {
        while let Some(job) = self.next() {
            let Some(permit) = Arc::clone(&job).start_next(self.permit()) else { return };
            job.run_next();
            if pool::is_crowded() {
                return; // which drops the permit: another thread takes over
            }
            permit.give_up();
        }
    }

    /// The job whose task is next. If none waits, the caller counts no more.
    fn next(&self) -> Option<Arc<dyn Job>> {
        let mut state = self.state();
        let Some((job, count)) = state.waiting.front_mut() else {
            state.in_flight -= 1;
            return None;
        };
        *count -= 1;
        if *count > 0 {
            return Some(Arc::clone(job));
        }
        state.waiting.pop_front().map(|(job, _)| job)
    }

    fn state(&self) -> MutexGuard<'_, Load> {
        self.0.state.lock()
    }
}
