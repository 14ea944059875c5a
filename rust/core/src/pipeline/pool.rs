//! The engine's own threads. They read, check and decompress, and never call Python.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};

use crate::process::PerProcess;

/// The most threads there are; reading from memory-backed files gains nothing beyond this.
const MAX_THREADS: usize = 16;

type Work = Box<dyn FnOnce() + Send>;

/// Threads that take work from one queue. A forked child gets its own.
struct Pool {
    queue: Mutex<Queue>,
    awaited: Condvar,
    max_threads: usize,
}

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    num_threads: usize,
    num_idle: usize,
}

static POOL: PerProcess<Pool> = PerProcess::new(|| Pool {
    queue: Mutex::default(),
    awaited: Condvar::new(),
    max_threads: std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS),
});

/// How many threads work at a time at most.
pub fn max_threads() -> usize {
    POOL.get().max_threads
}

/// Has `work` done on a thread of the engine; if none can be started, on this one.
pub fn submit(work: impl FnOnce() + Send + 'static) {
    let pool = POOL.get();
    let mut queue = pool.queue.lock().unwrap_or_else(PoisonError::into_inner);
    queue.work.push_back(Box::new(work));
    let short = queue.num_idle < queue.work.len() && queue.num_threads < pool.max_threads;
    if short && start_thread(queue.num_threads) {
        queue.num_threads += 1;
    }
    if queue.num_threads == 0 {
        let work = queue.work.pop_back();
        drop(queue);
        if let Some(work) = work {
            work();
        }
        return;
    }
    drop(queue);
    pool.awaited.notify_one();
}

fn start_thread(number: usize) -> bool {
    std::thread::Builder::new()
        .name(format!("grainmill-io-{number}"))
        .spawn(|| work_on(POOL.get()))
        .is_ok()
}

fn work_on(pool: &Pool) {
    let mut queue = pool.queue.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        if let Some(work) = queue.work.pop_front() {
            drop(queue);
            // Work catches its own panics to report them; one more must not end the thread.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            queue = pool.queue.lock().unwrap_or_else(PoisonError::into_inner);
        } else {
            queue.num_idle += 1;
            queue = pool.awaited.wait(queue).unwrap_or_else(PoisonError::into_inner);
            queue.num_idle -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
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
}
