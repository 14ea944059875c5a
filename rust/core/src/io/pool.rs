//! The engine's thread pool. Its threads read, verify and decompress, and never call Python.

use std::collections::VecDeque;
use std::sync::PoisonError;

use crate::compute::num_cores;
use crate::lock::lock;
use crate::process::PerProcess;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Condvar, Mutex, thread};

/// The maximum number of threads. Most of them wait for storage; callers limit how many do at a
/// time.
const MAX_THREADS: usize = 256;
/// As many more may open files while all of those wait.
const MAX_MORE_TO_OPEN: usize = 128;
/// The maximum number of threads that work on data in memory; more gain nothing.
const MAX_BUSY: usize = 16;

type Work = Box<dyn FnOnce() + Send>;

/// Threads that take work from one queue. A forked child gets a pool of its own.
struct Pool {
    queue: Mutex<Queue>,
    work_added: Condvar,
    num_cores: usize,
    /// Whether work is queued that no idle thread will take.
    is_crowded: AtomicBool,
}

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    num_threads: usize,
    /// Threads that wait for work, or have been started and not taken any yet.
    num_idle: usize,
}

static POOL: PerProcess<Pool> = PerProcess::new(|| Pool {
    queue: Mutex::default(),
    work_added: Condvar::new(),
    num_cores: num_cores(),
    is_crowded: AtomicBool::new(false),
});

/// The number of threads worth using for data in memory.
pub fn max_busy() -> usize {
    POOL.get().num_cores.min(MAX_BUSY)
}

/// Whether work waits for a thread, so that a long-running job should yield its thread.
pub(super) fn is_crowded() -> bool {
    POOL.get().is_crowded.load(Ordering::Relaxed)
}

/// Runs `count` jobs, each from a call of `work`, on threads of the engine; if none can be started,
/// on this one.
pub fn submit(count: usize, work: impl Fn() -> Work) {
    if !try_submit(count, &work) {
        (0..count).for_each(|_| work()());
    }
}

/// As [`submit`], but runs nothing on this thread; returns whether there are other threads.
pub(super) fn try_submit(count: usize, work: impl Fn() -> Work) -> bool {
    POOL.get().add(count, work, MAX_THREADS, VecDeque::push_back)
}

/// Runs `count` jobs before all others on threads of the engine, if any can be started, also while all
/// of those that read wait.
pub(super) fn submit_opening(count: usize, work: impl Fn() -> Work) {
    POOL.get().add(count, work, MAX_THREADS + MAX_MORE_TO_OPEN, VecDeque::push_front);
}

fn start_thread(number: usize) -> bool {
    thread::Builder::new()
        .name(format!("grainmill-io-{number}"))
        .spawn(|| POOL.get().work())
        .is_ok()
}

impl Pool {
    /// Adds `count` jobs to the queue, unless there are no threads; returns whether there are.
    fn add(
        &self,
        count: usize,
        work: impl Fn() -> Work,
        max_threads: usize,
        push: fn(&mut VecDeque<Work>, Work),
    ) -> bool {
        let mut queue = lock(&self.queue);
        (0..count).for_each(|_| push(&mut queue.work, work()));
        let num_idle = queue.num_idle;
        while queue.num_idle < queue.work.len() && queue.num_threads < max_threads {
            if !start_thread(queue.num_threads) {
                break;
            }
            queue.num_threads += 1;
            queue.num_idle += 1;
        }
        self.update_crowded(&queue);
        if queue.num_threads == 0 {
            let left = std::mem::take(&mut queue.work);
            drop(queue);
            drop(left);
            return false;
        }
        drop(queue);
        if count >= num_idle {
            self.work_added.notify_all();
        } else {
            (0..count).for_each(|_| self.work_added.notify_one());
        }
        true
    }

    fn update_crowded(&self, queue: &Queue) {
        let is_crowded = queue.work.len() > queue.num_idle;
        self.is_crowded.store(is_crowded, Ordering::Relaxed);
    }

    fn work(&self) {
        let mut queue = lock(&self.queue);
        loop {
            if let Some(work) = queue.work.pop_front() {
                queue.num_idle -= 1;
                self.update_crowded(&queue);
                drop(queue);
                // Jobs catch their own panics to report them; any other must not end the thread.
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
                queue = lock(&self.queue);
                queue.num_idle += 1;
            } else {
                queue = self.work_added.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Barrier};

    use super::*;

    #[test]
    fn work_is_done_on_named_threads_even_after_a_panic() {
        let (sender, receiver) = std::sync::mpsc::channel();
        submit(1, || Box::new(|| panic!("expected by the test")));
        submit(1, || {
            let sender = sender.clone();
            Box::new(move || {
                let name = std::thread::current().name().map(str::to_owned);
                sender.send(name).expect("the test waits");
            })
        });
        let name = receiver.recv().expect("work was done").expect("threads have names");
        assert!(name.starts_with("grainmill-io-"), "{name}");
    }

    #[test]
    fn all_submitted_work_runs_concurrently_whatever_the_number_of_cores() {
        let all = Arc::new(Barrier::new(101));
        for _ in 0..2 {
            submit(100, || {
                let all = Arc::clone(&all);
                Box::new(move || {
                    all.wait();
                })
            });
            all.wait();
        }
    }
}
