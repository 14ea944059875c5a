//! Work on many files in parallel: it takes little CPU, but much waiting where storage is slow.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::pool;
use super::read_queue::{DEFAULT_OF_PROCESS, Job, ReadQueue, StorageLimit};
use crate::interrupt::{self, Cancellation};
use crate::lock::lock;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{Condvar, Mutex};
use crate::{Error, Result, compute};

/// An item that takes at least this takes long, and mostly waits.
const SLOW: Duration = Duration::from_millis(1);
/// The number of threads where items do not take long, if there are not more cores: they may wait for a disk.
const MIN_THREADS: usize = 16;
/// The minimum number of items for each of these.
const MIN_ITEMS_PER_THREAD: usize = 4;
/// So many more after an item that takes long: files behind near ones may be far.
const MORE_THREADS: usize = 16;

struct ParallelLoop<W, L> {
    items: Vec<usize>,
    work: W,
    limit_of: L,
    queue: ReadQueue,
    cancellation: Arc<Cancellation>,
    next: AtomicUsize,
    state: Mutex<LoopState>,
    finished: Condvar,
}

#[derive(Default)]
struct LoopState {
    /// Calls of `run_next` that are queued and have not begun.
    num_queued: usize,
    /// Threads that process items. Those that have not begun yet are not waited for: they may be busy
    /// with something else for long.
    num_running: usize,
    is_first_done: bool,
    /// The error of the first item that failed.
    first_error: Option<(usize, Error)>,
}

/// Calls `work` for each item; returns the error of the first item that failed.
///
/// Each item counts as a read in flight, of the storage of which `limit_of` returns the limit. The calling
/// thread does not wait for others' reads: it takes part whatever they do.
///
/// The first item is processed alone, to measure how long one takes; if it takes long, others begin meanwhile.
///
/// # Errors
/// Those of `work`, and [`Error::Interrupted`] if the caller ends the loop.
pub fn for_each_parallel<W, L>(items: Vec<usize>, limit_of: L, work: W) -> Result<()>
where
    W: Fn(usize) -> Result<()> + Send + Sync + 'static,
    L: Fn(usize) -> Option<Arc<StorageLimit>> + Send + Sync + 'static,
{
    let shared = Arc::new(ParallelLoop {
        items,
        work,
        limit_of,
        queue: ReadQueue::of_process().for_another_owner(),
        cancellation: Arc::default(),
        next: AtomicUsize::new(0),
        state: Mutex::default(),
        finished: Condvar::new(),
    });
    let counted = shared.queue.in_storage(shared.storage()).enter_anyway();
    let mut asked = Instant::now();
    lock(&shared.state).num_running += 1;
    if shared.max_fast() > 0 && pool::has_threads() {
        shared.queue.submit(Arc::new(FirstItem(Arc::clone(&shared))), 1);
    }
    let first = shared.process_next(&mut asked);
    lock(&shared.state).is_first_done = true;
    shared.finished.notify_all();
    match first {
        Some(elapsed) if elapsed >= SLOW => shared.submit(DEFAULT_OF_PROCESS),
        _ => shared.submit(shared.max_fast()),
    }
    while shared.process_next(&mut asked).is_some() {}
    shared.end();
    drop(counted);
    let is_running = |state: &mut LoopState| state.num_running > 0;
    let mut state = interrupt::wait_while(&shared.state, &shared.finished, is_running)
        .inspect_err(|_| shared.cancellation.cancel())?;
    state.first_error.take().map_or(Ok(()), |(_, error)| Err(error))
}

impl<W, L> ParallelLoop<W, L>
where
    W: Fn(usize) -> Result<()> + Send + Sync + 'static,
    L: Fn(usize) -> Option<Arc<StorageLimit>> + Send + Sync + 'static,
{
    /// How many threads to use where items do not take long.
    fn max_fast(&self) -> usize {
        compute::max_threads().max(MIN_THREADS).min(self.items.len() / MIN_ITEMS_PER_THREAD)
    }

    /// Queues `more` calls of `run_next`, or as many as items are left.
    fn submit(self: &Arc<Self>, more: usize) {
        let num_left = self.items.len().saturating_sub(self.next.load(Ordering::Relaxed));
        let mut state = lock(&self.state);
        let more = more.min(num_left.saturating_sub(state.num_queued));
        state.num_queued += more;
        drop(state);
        self.queue.submit(Arc::clone(self) as Arc<dyn Job>, more);
    }

    /// Processes the next item; returns how long it took, if there was one. The caller was last asked when
    /// it was `asked`.
    fn process_next(&self, asked: &mut Instant) -> Option<Duration> {
        let at = self.next.fetch_add(1, Ordering::Relaxed);
        let item = *self.items.get(at)?;
        let started = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(|| {
            if asked.elapsed() >= interrupt::INTERVAL {
                interrupt::check()?;
                *asked = Instant::now();
            }
            self.cancellation.run(|| (self.work)(item))
        }));
        let result = result.unwrap_or_else(|_| {
            Err(Error::Panicked("a thread that opens files panicked".to_owned()))
        });
        if let Err(error) = result {
            // Items are started in order, so none before this one is skipped.
            self.next.store(self.items.len(), Ordering::Relaxed);
            let mut state = lock(&self.state);
            if state.first_error.as_ref().is_none_or(|&(earlier, _)| at < earlier) {
                state.first_error = Some((at, error));
            }
        }
        Some(started.elapsed())
    }

    /// Returns how many others process items, or will.
    fn end(&self) -> usize {
        let mut state = lock(&self.state);
        state.num_running -= 1;
        let (num_running, num_queued) = (state.num_running, state.num_queued);
        drop(state);
        if num_running == 0 {
            self.finished.notify_all();
        }
        num_running + num_queued
    }
}

impl<W, L> Job for ParallelLoop<W, L>
where
    W: Fn(usize) -> Result<()> + Send + Sync + 'static,
    L: Fn(usize) -> Option<Arc<StorageLimit>> + Send + Sync + 'static,
{
    fn storage(&self) -> Option<Arc<StorageLimit>> {
        (self.limit_of)(*self.items.get(self.next.load(Ordering::Relaxed))?)
    }

    /// Processes items for a while, and then lets other reads go first.
    fn run_next(self: Arc<Self>) {
        let (started, mut asked) = (Instant::now(), Instant::now());
        let mut state = lock(&self.state);
        state.num_queued -= 1;
        state.num_running += 1;
        drop(state);
        let mut last = Some(Duration::ZERO);
        while last.is_some() && started.elapsed() < SLOW {
            last = self.process_next(&mut asked);
        }
        let num_others = self.end();
        match last {
            Some(elapsed) if elapsed >= SLOW => self.submit(1 + MORE_THREADS),
            Some(_) if num_others <= self.max_fast() => self.submit(1),
            _ => {}
        }
    }
}

/// Waits for the first item, and starts the others if it takes long.
struct FirstItem<W, L>(Arc<ParallelLoop<W, L>>);

impl<W, L> Job for FirstItem<W, L>
where
    W: Fn(usize) -> Result<()> + Send + Sync + 'static,
    L: Fn(usize) -> Option<Arc<StorageLimit>> + Send + Sync + 'static,
{
    fn run_next(self: Arc<Self>) {
        let Self(items) = &*self;
        let is_awaited = |state: &mut LoopState| !state.is_first_done;
        let waited = items.finished.wait_timeout_while(lock(&items.state), SLOW, is_awaited);
        let (state, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        drop(state);
        if waited.timed_out() {
            items.submit(DEFAULT_OF_PROCESS);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::AtomicBool;

    use super::super::read_queue::{DEFAULT_IN_FLIGHT, turn};
    use super::*;

    /// How many of 1,000 items are processed at a time, of which those from `first_slow` on take long.
    fn most_at_a_time(first_slow: usize) -> usize {
        let _turn = turn();
        let active = Arc::new((AtomicUsize::new(0), AtomicUsize::new(0)));
        let counts = Arc::clone(&active);
        for_each_parallel(
            (0..1000).collect(),
            |_| None,
            move |item| {
                let now = counts.0.fetch_add(1, Ordering::Relaxed) + 1;
                counts.1.fetch_max(now, Ordering::Relaxed);
                if item >= first_slow {
                    std::thread::sleep(Duration::from_millis(5));
                }
                counts.0.fetch_sub(1, Ordering::Relaxed);
                Ok(())
            },
        )
        .unwrap();
        active.1.load(Ordering::Relaxed)
    }

    #[test]
    fn many_items_that_take_long_are_processed_in_parallel() {
        assert!(most_at_a_time(0) >= 64);
    }

    /// Reads that never end, as of a storage that does not answer, until `end`.
    struct Stuck {
        begin: Barrier,
        end: Barrier,
    }

    impl Job for Stuck {
        fn run_next(self: Arc<Self>) {
            self.begin.wait();
            self.end.wait();
        }
    }

    #[test]
    fn items_are_processed_while_all_reads_of_the_process_wait() {
        let _turn = turn();
        let barrier = || Barrier::new(DEFAULT_OF_PROCESS + 1);
        let stuck = Arc::new(Stuck { begin: barrier(), end: barrier() });
        let queue = ReadQueue::new(DEFAULT_OF_PROCESS);
        queue.submit(Arc::clone(&stuck) as Arc<dyn Job>, DEFAULT_OF_PROCESS);
        stuck.begin.wait();
        for_each_parallel((0..1000).collect(), |_| None, |_| Ok(())).unwrap();
        stuck.end.wait();
    }

    #[test]
    fn items_are_processed_beside_a_pipeline_whose_reads_wait() {
        let _turn = turn();
        let barrier = || Barrier::new(DEFAULT_IN_FLIGHT + 1);
        let stuck = Arc::new(Stuck { begin: barrier(), end: barrier() });
        ReadQueue::default().submit(Arc::clone(&stuck) as Arc<dyn Job>, DEFAULT_IN_FLIGHT);
        stuck.begin.wait();
        let both = Arc::new(Barrier::new(2));
        let waiting = Arc::clone(&both);
        for_each_parallel(
            (0..3).collect(),
            |_| None,
            move |item| {
                if item == 0 {
                    std::thread::sleep(SLOW);
                } else {
                    waiting.wait();
                }
                Ok(())
            },
        )
        .unwrap();
        stuck.end.wait();
    }

    #[test]
    fn far_items_behind_near_ones_are_processed_in_parallel() {
        let most = most_at_a_time(100);
        assert!((64..=DEFAULT_OF_PROCESS).contains(&most), "{most}");
    }

    #[test]
    fn other_items_begin_while_the_first_takes_long() {
        let _turn = turn();
        let barrier = Arc::new(Barrier::new(64));
        let wait = move |_| {
            barrier.wait();
            Ok(())
        };
        for_each_parallel((0..64).collect(), |_| None, wait).unwrap();
    }

    #[test]
    fn every_item_is_processed_once() {
        for count in [0, 1, 2, 5, 8, 100, 1000] {
            let sum = Arc::new(AtomicUsize::new(0));
            let adding = Arc::clone(&sum);
            let items = (1..=count).collect();
            for_each_parallel(
                items,
                |_| None,
                move |item| {
                    adding.fetch_add(item, Ordering::Relaxed);
                    Ok(())
                },
            )
            .unwrap();
            assert_eq!(sum.load(Ordering::Relaxed), count * (count + 1) / 2);
        }
    }

    #[test]
    fn caller_ends_the_loop_though_it_takes_part_in_it() {
        static IS_ENDED: AtomicBool = AtomicBool::new(false);
        let caller = std::thread::current().id();
        let work = move |item| {
            if item == 0 {
                std::thread::sleep(interrupt::INTERVAL);
            } else if std::thread::current().id() == caller {
                return Err(Error::OutOfRange("the caller was not asked".to_owned()));
            }
            while item > 0 && !IS_ENDED.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        };
        let end = || {
            IS_ENDED.store(true, Ordering::Relaxed);
            true
        };
        let result = interrupt::interruptible(end, || {
            for_each_parallel((0..1000).collect(), |_| None, work)
        });
        IS_ENDED.store(true, Ordering::Relaxed);
        assert!(matches!(result, Err(Error::Interrupted)), "{result:?}");
    }

    #[test]
    fn first_error_in_order_is_reported() {
        for _ in 0..50 {
            let result = for_each_parallel(
                (0..1000).collect(),
                |_| None,
                |item| {
                    if item >= 40 { Err(Error::OutOfRange(format!("item {item}"))) } else { Ok(()) }
                },
            );
            assert!(result.unwrap_err().to_string().contains("item 40"));
        }
    }
}
