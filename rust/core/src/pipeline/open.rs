//! Many files opened at the same time: it takes next to no work, and where storage is far, all the
//! more waiting.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::pool;
use crate::records::{FileSet, Files, Plan};
use crate::{Error, Result};

/// How many things are done at a time, where each takes long and where it does not.
const MOST_FAR: usize = 128;
const MOST_NEAR: usize = 16;
/// From here on something takes long.
const LONG: Duration = Duration::from_millis(1);
/// How many things there are for each thread, at least, where they do not take long.
const ITEMS_PER_THREAD: usize = 4;

/// Opens those files of `set` of which the number of records is not known otherwise.
///
/// # Errors
/// If one cannot be opened, or has fewer records than are meant.
pub fn open(set: FileSet) -> Result<Files> {
    let set = Arc::new(set);
    let uncounted = set.uncounted();
    let opening = Arc::clone(&set);
    side_by_side(uncounted, move |at| opening.open(at, false).map(drop))?;
    Files::of(set)
}

/// Decides how the records at `positions` of `files` are read, after reading what is needed for
/// that.
///
/// # Errors
/// If a position is out of range, or a file cannot be opened or does not tell where its chunks
/// begin.
pub fn plan(files: &Arc<Files>, positions: &[u64]) -> Result<Plan> {
    let sorted = files.sort(positions)?;
    match files.plan_at_hand(&sorted)? {
        Ok(plan) => Ok(plan),
        Err(unready) => {
            prepare(files, unready)?;
            files.plan_sorted(&sorted)
        }
    }
}

/// Opens `unready` files and reads where their chunks begin.
fn prepare(files: &Arc<Files>, unready: Vec<usize>) -> Result<()> {
    let files = Arc::clone(files);
    side_by_side(unready, move |at| files.prepare(at))
}

/// Opens all files of `set`, whether that is needed or not.
///
/// # Errors
/// If one cannot be opened, or has fewer records than are meant.
pub fn open_all(set: FileSet) -> Result<Files> {
    let set = Arc::new(set);
    let opening = Arc::clone(&set);
    side_by_side((0..set.len()).collect(), move |at| opening.open(at, false).map(drop))?;
    Files::of(set)
}

struct Round<W> {
    items: Vec<usize>,
    work: W,
    next: AtomicUsize,
    /// Threads that have not come to an end, and the error of the first item that has one.
    left: Mutex<(usize, Option<(usize, Error)>)>,
    ended: Condvar,
}

/// Does `work` on each item; the error of the first item that has one.
///
/// The first is done alone, to see how long one takes.
fn side_by_side<W>(items: Vec<usize>, work: W) -> Result<()>
where
    W: Fn(usize) -> Result<()> + Send + Sync + 'static,
{
    let Some(&first) = items.first() else { return Ok(()) };
    let began = Instant::now();
    work(first)?;
    let num_threads = if began.elapsed() >= LONG {
        MOST_FAR.min(items.len() - 1)
    } else {
        MOST_NEAR.min(items.len() / ITEMS_PER_THREAD)
    };
    if num_threads <= 1 {
        return items[1..].iter().try_for_each(|&item| work(item));
    }
    let round = Arc::new(Round {
        items,
        work,
        next: AtomicUsize::new(1),
        left: Mutex::new((num_threads, None)),
        ended: Condvar::new(),
    });
    pool::submit(num_threads - 1, || {
        let round = Arc::clone(&round);
        Box::new(move || round.take_turns())
    });
    round.take_turns();
    let left = round.left.lock().unwrap_or_else(PoisonError::into_inner);
    let mut left =
        round.ended.wait_while(left, |left| left.0 > 0).unwrap_or_else(PoisonError::into_inner);
    left.1.take().map_or(Ok(()), |(_, error)| Err(error))
}

impl<W: Fn(usize) -> Result<()>> Round<W> {
    fn take_turns(&self) {
        let mut failed = None;
        while let at = self.next.fetch_add(1, Ordering::Relaxed)
            && let Some(&item) = self.items.get(at)
        {
            let result = catch_unwind(AssertUnwindSafe(|| (self.work)(item)));
            let result = result.unwrap_or_else(|_| {
                Err(Error::Panicked("a thread that opens files panicked".to_owned()))
            });
            if let Err(error) = result {
                // Items are begun in order, so nothing before this one is left out.
                self.next.store(self.items.len(), Ordering::Relaxed);
                failed = Some((at, error));
            }
        }
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        left.0 -= 1;
        if let Some((at, error)) = failed
            && left.1.as_ref().is_none_or(|&(earlier, _)| at < earlier)
        {
            left.1 = Some((at, error));
        }
        let is_done = left.0 == 0;
        drop(left);
        if is_done {
            self.ended.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_items_that_take_long_are_worked_on_at_the_same_time() {
        let at_work = Arc::new((AtomicUsize::new(0), AtomicUsize::new(0)));
        let counts = Arc::clone(&at_work);
        side_by_side((0..1000).collect(), move |_| {
            let now = counts.0.fetch_add(1, Ordering::Relaxed) + 1;
            counts.1.fetch_max(now, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(5));
            counts.0.fetch_sub(1, Ordering::Relaxed);
            Ok(())
        })
        .unwrap();
        assert!(at_work.1.load(Ordering::Relaxed) >= 64);
    }

    #[test]
    fn every_item_is_worked_on_once() {
        for count in [0, 1, 2, 5, 8, 100, 1000] {
            let sum = Arc::new(AtomicUsize::new(0));
            let adding = Arc::clone(&sum);
            let items = (1..=count).collect();
            side_by_side(items, move |item| {
                adding.fetch_add(item, Ordering::Relaxed);
                Ok(())
            })
            .unwrap();
            assert_eq!(sum.load(Ordering::Relaxed), count * (count + 1) / 2);
        }
    }

    #[test]
    fn first_error_in_order_is_the_one_told() {
        for _ in 0..50 {
            let made = side_by_side((0..1000).collect(), |item| {
                if item >= 40 { Err(Error::OutOfRange(format!("item {item}"))) } else { Ok(()) }
            });
            assert!(made.unwrap_err().to_string().contains("item 40"));
        }
    }
}
