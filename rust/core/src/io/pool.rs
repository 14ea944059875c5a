//! The engine's thread pool. Its threads read, verify and decompress, and never call Python.

use std::collections::VecDeque;
use std::sync::PoisonError;

use crate::lock::lock;
use crate::process::PerProcess;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Condvar, Mutex, thread};

type Work = Box<dyn FnOnce() + Send>;

/// Threads that take work from one queue. A forked child gets a pool of its own.
struct Pool {
    queue: Mutex<Queue>,
    work_added: Condvar,
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
    is_crowded: AtomicBool::new(false),
});

/// Whether work waits for a thread, so that a long-running job should yield its thread.
pub(super) fn is_crowded() -> bool {
    POOL.get().is_crowded.load(Ordering::Relaxed)
}

/// Runs `work` on a thread of the engine; if none can be started, on this one. There are as many threads as
/// callers have work at a time.
pub fn submit(work: impl FnOnce() + Send + 'static) {
    let pool = POOL.get();
    let mut queue = lock(&pool.queue);
    if queue.num_idle <= queue.work.len() {
        queue.start_thread();
    }
    if queue.num_threads == 0 {
        drop(queue);
        return work();
    }
    queue.work.push_back(Box::new(work));
    pool.update_crowded(&queue);
    drop(queue);
    pool.work_added.notify_one();
}

/// Whether there are threads, or one can be started.
pub(super) fn has_threads() -> bool {
    let mut queue = lock(&POOL.get().queue);
    queue.num_threads > 0 || queue.start_thread()
}

impl Queue {
    fn start_thread(&mut self) -> bool {
        let is_started = thread::Builder::new()
            .name(format!("grainmill-io-{}", self.num_threads))
            .spawn(|| POOL.get().work())
            .is_ok();
        self.num_threads += usize::from(is_started);
        self.num_idle += usize::from(is_started);
        is_started
    }
}

impl Pool {
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
        submit(|| panic!("expected by the test"));
        submit(move || {
            let name = std::thread::current().name().map(str::to_owned);
            sender.send(name).expect("the test waits");
        });
        let name = receiver.recv().expect("work was done").expect("threads have names");
        assert!(name.starts_with("grainmill-io-"), "{name}");
    }

    #[test]
    fn all_submitted_work_runs_concurrently_whatever_the_number_of_cores() {
        let all = Arc::new(Barrier::new(101));
        for _ in 0..2 {
            for _ in 0..100 {
                let all = Arc::clone(&all);
                submit(move || {
                    all.wait();
                });
            }
            all.wait();
        }
    }
}
