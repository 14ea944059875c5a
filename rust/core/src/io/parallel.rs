//! Work on many files in parallel: it takes little CPU, but much waiting where storage is slow.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use super::pool;
use crate::lock::lock;
use crate::{Error, Result, interrupt};

/// The maximum number of threads where an item takes long and where it does not.
const MAX_THREADS_SLOW: usize = 256;
const MAX_THREADS_FAST: usize = 16;
/// An item that takes at least this takes long.
const SLOW: Duration = Duration::from_millis(1);
/// The minimum number of items per thread where they do not take long.
const MIN_ITEMS_PER_THREAD: usize = 4;

struct ParallelLoop<W> {
    items: Vec<usize>,
    work: W,
    next: AtomicUsize,
    state: Mutex<LoopState>,
    finished: Condvar,
}

#[derive(Default)]
struct LoopState {
    /// Threads that process items. Those that have not begun yet are not waited for: they may be busy
    /// with something else for long.
    num_running: usize,
    /// The error of the first item that failed.
    first_error: Option<(usize, Error)>,
}

/// Calls `work` for each item; returns the error of the first item that failed.
///
/// The first item is processed alone, to measure how long one takes.
///
/// # Errors
/// Those of `work`, and [`Error::Interrupted`] if the caller ends the loop.
pub fn for_each_parallel<W>(items: Vec<usize>, work: W) -> Result<()>
where
    W: Fn(usize) -> Result<()> + Send + Sync + 'static,
{
    let Some(&first) = items.first() else { return Ok(()) };
    let started = Instant::now();
    work(first)?;
    let num_threads = if started.elapsed() >= SLOW {
        MAX_THREADS_SLOW.min(items.len() - 1)
    } else {
        MAX_THREADS_FAST.min(items.len() / MIN_ITEMS_PER_THREAD)
    };
    let shared = Arc::new(ParallelLoop {
        items,
        work,
        next: AtomicUsize::new(1),
        state: Mutex::default(),
        finished: Condvar::new(),
    });
    if num_threads > 1 {
        pool::submit_opening(num_threads - 1, || {
            let shared = Arc::clone(&shared);
            Box::new(move || shared.run(Instant::now()))
        });
    }
    shared.run(started);
    let mut state =
        interrupt::wait_while(&shared.state, &shared.finished, |state| state.num_running > 0)?;
    state.first_error.take().map_or(Ok(()), |(_, error)| Err(error))
}

impl<W: Fn(usize) -> Result<()>> ParallelLoop<W> {
    /// Processes items until none is left; the caller was last asked when it was `asked`.
    fn run(&self, mut asked: Instant) {
        let mut failed = None;
        let mut state = lock(&self.state);
        state.num_running += 1;
        drop(state);
        while let at = self.next.fetch_add(1, Ordering::Relaxed)
            && let Some(&item) = self.items.get(at)
        {
            let result = catch_unwind(AssertUnwindSafe(|| {
                if asked.elapsed() >= interrupt::INTERVAL {
                    interrupt::check()?;
                    asked = Instant::now();
                }
                (self.work)(item)
            }));
            let result = result.unwrap_or_else(|_| {
                Err(Error::Panicked("a thread that opens files panicked".to_owned()))
            });
            if let Err(error) = result {
                // Items are started in order, so none before this one is skipped.
                self.next.store(self.items.len(), Ordering::Relaxed);
                failed = Some((at, error));
            }
        }
        let mut state = lock(&self.state);
        state.num_running -= 1;
        if let Some((at, error)) = failed
            && state.first_error.as_ref().is_none_or(|&(earlier, _)| at < earlier)
        {
            state.first_error = Some((at, error));
        }
        let is_done = state.num_running == 0;
        drop(state);
        if is_done {
            self.finished.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn many_items_that_take_long_are_processed_in_parallel() {
        let active = Arc::new((AtomicUsize::new(0), AtomicUsize::new(0)));
        let counts = Arc::clone(&active);
        for_each_parallel((0..1000).collect(), move |_| {
            let now = counts.0.fetch_add(1, Ordering::Relaxed) + 1;
            counts.1.fetch_max(now, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(5));
            counts.0.fetch_sub(1, Ordering::Relaxed);
            Ok(())
        })
        .unwrap();
        assert!(active.1.load(Ordering::Relaxed) >= 64);
    }

    #[test]
    fn items_are_processed_while_all_threads_that_read_wait() {
        let (begin, end) = (Arc::new(Barrier::new(257)), Arc::new(Barrier::new(257)));
        pool::submit(256, || {
            let (begin, end) = (Arc::clone(&begin), Arc::clone(&end));
            Box::new(move || {
                begin.wait();
                end.wait();
            })
        });
        begin.wait();
        let both = Arc::new(Barrier::new(2));
        let waiting = Arc::clone(&both);
        for_each_parallel((0..3).collect(), move |item| {
            if item == 0 {
                std::thread::sleep(SLOW);
            } else {
                waiting.wait();
            }
            Ok(())
        })
        .unwrap();
        for_each_parallel((0..1000).collect(), |_| Ok(())).unwrap();
        end.wait();
    }

    #[test]
    fn every_item_is_processed_once() {
        for count in [0, 1, 2, 5, 8, 100, 1000] {
            let sum = Arc::new(AtomicUsize::new(0));
            let adding = Arc::clone(&sum);
            let items = (1..=count).collect();
            for_each_parallel(items, move |item| {
                adding.fetch_add(item, Ordering::Relaxed);
                Ok(())
            })
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
        let result = interrupt::interruptible(end, || for_each_parallel((0..1000).collect(), work));
        IS_ENDED.store(true, Ordering::Relaxed);
        assert!(matches!(result, Err(Error::Interrupted)), "{result:?}");
    }

    #[test]
    fn first_error_in_order_is_reported() {
        for _ in 0..50 {
            let result = for_each_parallel((0..1000).collect(), |item| {
                if item >= 40 { Err(Error::OutOfRange(format!("item {item}"))) } else { Ok(()) }
            });
            assert!(result.unwrap_err().to_string().contains("item 40"));
        }
    }
}
