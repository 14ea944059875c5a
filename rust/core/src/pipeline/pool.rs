//! The engine's own threads. They read, check and decompress, and never call Python.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use crate::process::PerProcess;

/// The most threads there are. Most of them wait for storage; how many do at a time is for those
/// who give them work.
const MAX_THREADS: usize = 256;
/// The most that work on what is in memory; more gain nothing.
const MAX_BUSY: usize = 16;

type Work = Box<dyn FnOnce() + Send>;

/// Threads that take work from one queue. A forked child gets its own.
struct Pool {
    queue: Mutex<Queue>,
    awaited: Condvar,
    num_cores: usize,
    /// Whether work waits though there are as many threads as may be.
    is_crowded: AtomicBool,
}

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    num_threads: usize,
    /// Threads that wait for work, or have been started and not come to it yet.
    num_free: usize,
}

static POOL: PerProcess<Pool> = PerProcess::new(|| Pool {
    queue: Mutex::default(),
    awaited: Condvar::new(),
    num_cores: std::thread::available_parallelism().map_or(1, usize::from),
    is_crowded: AtomicBool::new(false),
});

/// How many threads are worth having for what is in memory.
pub fn max_busy() -> usize {
    POOL.get().num_cores.min(MAX_BUSY)
}

/// Whether others wait for a thread, so that who has one for long should let go of it.
pub(super) fn is_crowded() -> bool {
    POOL.get().is_crowded.load(Ordering::Relaxed)
}

/// Has `work` done `count` times on threads of the engine; if none can be started, on this one.
pub fn submit(count: usize, work: impl Fn() -> Box<dyn FnOnce() + Send>) {
    let pool = POOL.get();
    let mut queue = pool.queue.lock().unwrap_or_else(PoisonError::into_inner);
    queue.work.extend((0..count).map(|_| work()));
    let num_idle = queue.num_free;
    while queue.num_free < queue.work.len() && queue.num_threads < MAX_THREADS {
        if !start_thread(queue.num_threads) {
            break;
        }
        queue.num_threads += 1;
        queue.num_free += 1;
    }
    pool.note_crowd(&queue);
    if queue.num_threads == 0 {
        let left: Vec<Work> = queue.work.drain(..).collect();
        drop(queue);
        for work in left {
            work();
        }
        return;
    }
    drop(queue);
    if count >= num_idle {
        pool.awaited.notify_all();
    } else {
        for _ in 0..count {
            pool.awaited.notify_one();
        }
    }
}

fn start_thread(number: usize) -> bool {
    std::thread::Builder::new()
        .name(format!("grainmill-io-{number}"))
        .spawn(|| POOL.get().work())
        .is_ok()
}

impl Pool {
    fn note_crowd(&self, queue: &Queue) {
        let is_crowded = queue.work.len() > queue.num_free;
        self.is_crowded.store(is_crowded, Ordering::Relaxed);
    }

    fn work(&self) {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(work) = queue.work.pop_front() {
                queue.num_free -= 1;
                self.note_crowd(&queue);
                drop(queue);
                // Work catches its own panics to report them; one more must not end the thread.
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
                queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
                queue.num_free += 1;
            } else {
                queue = self.awaited.wait(queue).unwrap_or_else(PoisonError::into_inner);
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
    fn as_much_work_as_is_given_goes_on_at_once_whatever_the_number_of_cores() {
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
