//! Loops over data in memory that idle threads share, where a core alone is the limit.
//!
//! One pool a process, whose threads take part only while they are idle: the calling thread works, too,
//! and a loop never waits for a thread that has not begun, so a busy pool costs nothing.
#![expect(unsafe_code, reason = "threads borrow what their caller waits for")]

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, PoisonError};

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::lock::lock;
use crate::process::PerProcess;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{Condvar, Mutex};

/// Shares for each thread, so that one which starts late or is slow leaves them to others.
const SHARES_PER_THREAD: usize = 4;

/// The most threads of this process that are in loops at a time, if that has been set.
static LIMIT: AtomicUsize = AtomicUsize::new(0);

/// A forked child gets a pool of its own: threads do not survive a fork there.
static POOL: PerProcess<Pool> = PerProcess::new(Pool::new);

struct Pool {
    /// `None` where the calling thread is all there is.
    helpers: Option<ThreadPool>,
    /// The number of helpers and one calling thread.
    num_threads: usize,
    /// Threads that are in a loop: callers, and helpers that they have called.
    num_busy: AtomicUsize,
}

/// The cores that this process may use, by its affinity and the quota of its control group.
pub fn num_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Limits the threads that are in loops at a time to `count`, the calling ones included. Before the
/// first loop of a process it may also be more than there are cores.
pub fn limit_threads(count: usize) {
    LIMIT.store(count.max(1), Ordering::Relaxed);
}

/// The threads worth using for data in memory: as many as there are cores, unless that is limited.
pub fn max_threads() -> usize {
    static NUM_CORES: PerProcess<usize> = PerProcess::new(num_cores);
    match LIMIT.load(Ordering::Relaxed) {
        0 => *NUM_CORES.get(),
        limit => limit,
    }
}

/// Into how many shares to divide work of `len` bytes, of which a core does `min_len` in 50 us: no share
/// is shorter. 1 where no thread is idle.
pub fn num_shares(len: usize, min_len: usize) -> usize {
    let most = len / min_len.max(1);
    if most < 2 || LIMIT.load(Ordering::Relaxed) == 1 {
        return 1;
    }
    match POOL.get().num_idle() {
        0 | 1 => 1,
        idle => most.min(SHARES_PER_THREAD * idle),
    }
}

/// Calls `run` with each of `shares`, on this thread and on idle ones.
///
/// # Panics
/// If `run` does; the other shares may then have been run or not.
pub fn for_each<T: Send>(shares: Vec<T>, run: impl Fn(T) + Sync) {
    if shares.len() < 2 {
        return shares.into_iter().for_each(run);
    }
    let num_shares = shares.len();
    let shares = Mutex::new(shares.into_iter());
    let next = || lock(&shares).next();
    let work = || {
        while let Some(share) = next() {
            run(share);
        }
    };
    POOL.get().run(num_shares - 1, &work);
}

/// As [`for_each`], with what `run` returns for each share, in their order.
///
/// # Panics
/// If `run` does.
pub fn map<T: Send, R: Send>(shares: Vec<T>, run: impl Fn(T) -> R + Sync) -> Vec<R> {
    let mut results: Vec<Option<R>> = shares.iter().map(|_| None).collect();
    let shares = shares.into_iter().zip(&mut results).collect();
    for_each(shares, |(share, result)| *result = Some(run(share)));
    results.into_iter().flatten().collect()
}

impl Pool {
    fn new() -> Self {
        Self::with_threads(max_threads())
    }

    fn with_threads(num_threads: usize) -> Self {
        let builder = ThreadPoolBuilder::new()
            .num_threads(num_threads - 1)
            .thread_name(|number| format!("grainmill-compute-{number}"));
        // For rayon, 0 threads are as many as there are cores.
        let helpers = if num_threads > 1 { builder.build().ok() } else { None };
        let num_threads = if helpers.is_some() { num_threads } else { 1 };
        Self { helpers, num_threads, num_busy: AtomicUsize::new(0) }
    }

    fn num_idle(&self) -> usize {
        self.idle_beside(self.num_busy.load(Ordering::Relaxed))
    }

    fn idle_beside(&self, num_busy: usize) -> usize {
        let limit = match LIMIT.load(Ordering::Relaxed) {
            0 => self.num_threads,
            limit => limit.min(self.num_threads),
        };
        limit.saturating_sub(num_busy)
    }

    /// Calls `work` on this thread and on at most `max_helpers` idle ones.
    fn run(&'static self, max_helpers: usize, work: &(dyn Fn() + Sync)) {
        let mut num_helpers = 0;
        let _ = self.num_busy.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |num_busy| {
            num_helpers = max_helpers.min(self.idle_beside(num_busy + 1));
            Some(num_busy + 1 + num_helpers)
        });
        // SAFETY: only the lifetime changes. A helper uses the reference between `enter` and `leave`, and
        // `close` returns once nobody is there and nobody will be.
        let work_for_helpers =
            unsafe { std::mem::transmute::<&(dyn Fn() + Sync), &'static (dyn Fn() + Sync)>(work) };
        let job = Arc::new(Job {
            work: work_for_helpers,
            inside: Mutex::default(),
            all_left: Condvar::new(),
        });
        if let Some(helpers) = &self.helpers {
            for _ in 0..num_helpers {
                let job = Arc::clone(&job);
                helpers.spawn(move || {
                    job.help();
                    self.num_busy.fetch_sub(1, Ordering::Relaxed);
                });
            }
        }
        let own = catch_unwind(AssertUnwindSafe(work));
        let panicked = job.close();
        self.num_busy.fetch_sub(1, Ordering::Relaxed);
        if let Some(payload) = own.err().or(panicked) {
            resume_unwind(payload);
        }
    }
}

/// A loop in which helpers may take part until its caller closes it.
struct Job {
    /// Valid while a helper is inside.
    work: &'static (dyn Fn() + Sync),
    inside: Mutex<Inside>,
    all_left: Condvar,
}

#[derive(Default)]
struct Inside {
    num_helpers: usize,
    is_closed: bool,
    panicked: Option<Box<dyn Any + Send>>,
}

impl Job {
    fn help(&self) {
        if !self.enter() {
            return;
        }
        let result = catch_unwind(AssertUnwindSafe(self.work));
        self.leave(result.err());
    }

    /// Returns whether the loop is still open.
    fn enter(&self) -> bool {
        let mut inside = lock(&self.inside);
        if !inside.is_closed {
            inside.num_helpers += 1;
        }
        !inside.is_closed
    }

    fn leave(&self, panicked: Option<Box<dyn Any + Send>>) {
        let mut inside = lock(&self.inside);
        inside.num_helpers -= 1;
        inside.panicked = inside.panicked.take().or(panicked);
        let is_awaited = inside.is_closed && inside.num_helpers == 0;
        drop(inside);
        if is_awaited {
            self.all_left.notify_one();
        }
    }

    /// Closes the loop, waits for those inside, and returns the panic of one.
    fn close(&self) -> Option<Box<dyn Any + Send>> {
        let mut inside = lock(&self.inside);
        inside.is_closed = true;
        while inside.num_helpers > 0 {
            inside = self.all_left.wait(inside).unwrap_or_else(PoisonError::into_inner);
        }
        inside.panicked.take()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;

    use super::*;

    const HANGS: Duration = Duration::from_secs(60);

    fn pool(num_threads: usize) -> &'static Pool {
        // A sanitizer takes what nothing refers to for lost.
        static POOLS: Mutex<Vec<&Pool>> = Mutex::new(Vec::new());
        let pool: &Pool = Box::leak(Box::new(Pool::with_threads(num_threads)));
        lock(&POOLS).push(pool);
        pool
    }

    /// Waits until all threads of `pool` have left its loops.
    fn wait_until_idle(pool: &Pool) {
        while pool.num_busy.load(Ordering::Relaxed) > 0 {
            thread::yield_now();
        }
    }

    /// Adds 1 to each of `counts` in a loop of `pool`.
    fn count(pool: &'static Pool, counts: &[AtomicUsize]) {
        let next = AtomicUsize::new(0);
        pool.run(counts.len(), &|| {
            while let Some(count) = counts.get(next.fetch_add(1, Ordering::Relaxed)) {
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
    }

    #[test]
    fn each_share_is_run_once_by_any_number_of_threads() {
        for num_threads in [1, 2, 7] {
            let pool = pool(num_threads);
            for num_shares in [0, 1, 2, 3, 20, 1000] {
                let counts: Vec<AtomicUsize> =
                    std::iter::repeat_with(Default::default).take(num_shares).collect();
                for _ in 0..50 {
                    count(pool, &counts);
                }
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 50));
            }
            wait_until_idle(pool);
            assert_eq!(pool.num_idle(), num_threads);
        }
    }

    #[test]
    fn as_many_threads_take_part_as_are_idle() {
        let pool = pool(3);
        let all = Barrier::new(3);
        pool.run(10, &|| {
            all.wait();
        });
        wait_until_idle(pool);
    }

    #[test]
    fn loop_does_not_wait_for_threads_that_are_busy_with_another() {
        let pool = pool(2);
        let both = Barrier::new(3);
        let may_end = AtomicBool::new(false);
        let long = || {
            both.wait();
            while !may_end.load(Ordering::Relaxed) {
                thread::yield_now();
            }
        };
        thread::scope(|scope| {
            scope.spawn(|| pool.run(1, &long));
            both.wait();
            assert_eq!(pool.num_idle(), 0);
            let counts: [AtomicUsize; 5] = Default::default();
            let (sender, receiver) = channel();
            scope.spawn(move || {
                count(pool, &counts);
                sender.send(counts.map(AtomicUsize::into_inner))
            });
            let counts = receiver.recv_timeout(HANGS);
            may_end.store(true, Ordering::Relaxed);
            assert_eq!(counts, Ok([1; 5]));
        });
    }

    #[test]
    fn loop_does_not_wait_for_threads_that_have_not_begun() {
        let pool = pool(2);
        let (let_go, held) = channel::<()>();
        // Idle by its count, but its thread does something else, or has no core.
        pool.helpers.as_ref().unwrap().spawn(move || {
            let _ = held.recv();
        });
        let (sender, receiver) = channel();
        thread::spawn(move || {
            let counts: [AtomicUsize; 5] = Default::default();
            count(pool, &counts);
            sender.send(counts.map(AtomicUsize::into_inner))
        });
        let counts = receiver.recv_timeout(HANGS);
        drop(let_go);
        assert_eq!(counts, Ok([1; 5]));
        wait_until_idle(pool);
    }

    #[test]
    fn panic_reaches_the_caller_from_any_thread_and_leaves_the_pool_usable() {
        let pool = pool(2);
        let caller = thread::current().id();
        for panics_on_caller in [true, false] {
            let both = Barrier::new(2);
            let work = || {
                both.wait();
                assert!(
                    (thread::current().id() == caller) != panics_on_caller,
                    "expected by the test"
                );
            };
            let payload = catch_unwind(AssertUnwindSafe(|| pool.run(1, &work))).unwrap_err();
            assert_eq!(payload.downcast_ref::<&str>(), Some(&"expected by the test"));
            wait_until_idle(pool);
        }
        let counts: [AtomicUsize; 9] = Default::default();
        count(pool, &counts);
        assert_eq!(counts.map(AtomicUsize::into_inner), [1; 9]);
    }

    #[test]
    fn shares_are_dropped_once_each_though_some_panic() {
        struct Share<'a>(usize, &'a [AtomicUsize]);
        impl Drop for Share<'_> {
            fn drop(&mut self) {
                self.1[self.0].fetch_add(1, Ordering::Relaxed);
            }
        }
        limit_threads(4);
        for num_shares in [1, 2, 5, 40] {
            for (first, step) in [(0, 1), (0, 100), (1, 3), (num_shares - 1, 1)] {
                let drops: Vec<AtomicUsize> =
                    std::iter::repeat_with(Default::default).take(num_shares).collect();
                let shares = (0..num_shares).map(|number| Share(number, &drops)).collect();
                let outcome = catch_unwind(AssertUnwindSafe(|| {
                    map(shares, |share: Share<'_>| {
                        let panics = share.0 >= first && (share.0 - first).is_multiple_of(step);
                        assert!(!panics, "expected by the test");
                    })
                }));
                assert_eq!(outcome.is_err(), first < num_shares);
                assert!(drops.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
        assert_eq!(map(vec![1, 2, 3], |share| share + 1), [2, 3, 4]);
    }

    #[test]
    fn share_may_have_a_loop_of_its_own() {
        let pool = pool(3);
        let counts: [AtomicUsize; 6] = Default::default();
        pool.run(2, &|| count(pool, &counts));
        wait_until_idle(pool);
        let counts = counts.map(AtomicUsize::into_inner);
        assert!(counts[0] >= 1 && counts.iter().all(|&count| count == counts[0]));
    }

    #[test]
    fn work_below_the_shortest_share_is_not_divided() {
        assert_eq!(num_shares(0, 100), 1);
        assert_eq!(num_shares(199, 100), 1);
        assert!(num_shares(250, 100) <= 2);
        assert_eq!(map(vec![3, 1, 2], |share| share * 2), [6, 2, 4]);
        assert_eq!(map(Vec::<i32>::new(), |share| share * 2), []);
    }
}
