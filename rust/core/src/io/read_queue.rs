//! A limit on the reads in flight, common to all users of a queue.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

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
    /// Whether more reads are in flight than are allowed by now.
    pub(crate) fn is_spare(&self) -> bool {
        self.0.as_ref().is_some_and(|queue| queue.state().in_flight > queue.max_in_flight())
    }

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

/// A queue of reads. Its owners take turns, so that none waits for all that another has queued; the reads
/// of each start in the order in which they were submitted.
#[derive(Debug, Clone)]
pub struct ReadQueue {
    queue: Arc<Queue>,
    owner: u64,
}

struct Queue {
    max_in_flight: AtomicUsize,
    num_owners: AtomicU64,
    /// A forked child starts with nothing in flight.
    state: PerProcess<Mutex<Load>>,
}

#[derive(Default)]
struct Load {
    /// Those who wait, the next one first.
    waiting: VecDeque<Waiting>,
    in_flight: usize,
}

/// What waits of one owner.
struct Waiting {
    owner: u64,
    /// Jobs with the number of `run_next` calls that are queued for each.
    jobs: VecDeque<(Arc<dyn Job>, usize)>,
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
        let queue = Queue {
            max_in_flight: max_in_flight.max(1).into(),
            num_owners: 1.into(),
            state: PerProcess::new(Default::default),
        };
        Self { queue: Arc::new(queue), owner: 0 }
    }

    /// The same queue for another owner.
    #[must_use]
    pub fn for_another_owner(&self) -> Self {
        let owner = self.queue.num_owners.fetch_add(1, Ordering::Relaxed);
        Self { queue: Arc::clone(&self.queue), owner }
    }

    /// The default queue of the program.
    pub fn of_program() -> &'static Self {
        static QUEUE: PerProcess<ReadQueue> = PerProcess::new(ReadQueue::default);
        QUEUE.get()
    }

    /// The maximum number of reads in flight.
    pub fn max_in_flight(&self) -> usize {
        self.queue.max_in_flight.load(Ordering::Relaxed)
    }

    /// Sets that maximum, to at least one: waiting reads start if it permits, and while more are in flight,
    /// none does.
    pub fn set_max_in_flight(&self, max_in_flight: usize) {
        let mut state = self.state();
        self.queue.max_in_flight.store(max_in_flight.max(1), Ordering::Relaxed);
        let num_waiting =
            state.waiting.iter().flat_map(|of| &of.jobs).map(|(_, count)| count).sum();
        let more = self.count_more(&mut state, num_waiting);
        drop(state);
        self.go_on(more, true);
    }

    /// Queues `count` calls of `job.run_next()` for threads of the engine.
    pub fn submit(&self, job: Arc<dyn Job>, count: usize) {
        if count == 0 {
            return;
        }
        let mut state = self.state();
        if let Some(of) = state.waiting.iter_mut().rfind(|of| of.owner == self.owner) {
            of.jobs.push_back((job, count));
        } else {
            state.waiting.push_back(Waiting { owner: self.owner, jobs: [(job, count)].into() });
        }
        let more = self.count_more(&mut state, count);
        drop(state);
        self.go_on(more, true);
    }

    /// Counts as many of `count` more reads as the limit permits; returns how many.
    fn count_more(&self, state: &mut Load, count: usize) -> usize {
        let more = count.min(self.max_in_flight().saturating_sub(state.in_flight));
        state.in_flight += more;
        more
    }

    /// Counts the caller as one that reads, if the limit permits.
    pub(crate) fn enter(&self) -> Option<Permit> {
        (self.count_more(&mut self.state(), 1) == 1).then(|| self.permit())
    }

    /// For one that is counted already.
    fn permit(&self) -> Permit {
        Permit(Some(self.clone()))
    }

    /// Starts `count` tasks, which are counted already, of the jobs that wait; where no thread can be
    /// started, on this one if that `may_wait`.
    fn go_on(&self, count: usize, may_wait: bool) {
        for number in 0..count {
            let Some((owner, job)) = self.next() else { continue };
            let Some(permit) = Arc::clone(&job).start_next(self.permit()) else { continue };
            permit.give_up();
            self.state().waiting.push_front(Waiting { owner, jobs: [(job, 1)].into() });
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
        while let Some((_, job)) = self.next() {
            let Some(permit) = Arc::clone(&job).start_next(self.permit()) else { return };
            job.run_next();
            if pool::is_crowded() {
                return; // which drops the permit: another thread takes over
            }
            permit.give_up();
        }
    }

    /// The job whose task is next, and its owner. If none waits or too many are in flight, the caller counts
    /// no more.
    fn next(&self) -> Option<(u64, Arc<dyn Job>)> {
        let mut state = self.state();
        let load = &mut *state;
        let is_allowed = load.in_flight <= self.max_in_flight();
        let Some(first) = load.waiting.front_mut().filter(|_| is_allowed) else {
            load.in_flight -= 1;
            return None;
        };
        let owner = first.owner;
        let job = match first.jobs.front_mut() {
            Some((job, count)) if *count > 1 => {
                *count -= 1;
                Some(Arc::clone(job))
            }
            _ => first.jobs.pop_front().map(|(job, _)| job),
        };
        if first.jobs.is_empty() {
            load.waiting.pop_front();
        } else {
            load.waiting.rotate_left(1);
        }
        job.map(|job| (owner, job))
    }

    fn state(&self) -> MutexGuard<'_, Load> {
        self.queue.state.lock()
    }
}
