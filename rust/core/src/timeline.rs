//! What threads do when: reads and decoding, for a timeline that a program takes of its process.
//!
//! Nothing is timed while none is taken. What takes less than a millisecond is left out until it has taken so
//! long together on its thread, since keeping an event costs some microseconds with all that becomes of it.

use std::cell::Cell;
use std::collections::VecDeque;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::platform;
use crate::process::{self, PerProcess};
use crate::sync::Mutex;

/// What takes less is left out until it has added up.
const LEAST: Duration = Duration::from_millis(1);

/// The process that takes one; 0 if none does. A forked child does not.
static TAKEN_BY: AtomicU32 = AtomicU32::new(0);
static KEPT: PerProcess<Mutex<Kept>> = PerProcess::new(Mutex::default);

thread_local! {
    /// What was left out on this thread since an event was kept, by activity.
    static LEFT_OUT: [Cell<Duration>; 2] = const { [const { Cell::new(Duration::ZERO) }; 2] };
}

/// What a thread does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// It reads, and waits for the bytes.
    Read,
    /// It decompresses or decodes.
    Decode,
}

/// Something that has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// What was done.
    pub activity: Activity,
    /// The number by which the system knows the thread, and its name if it is the engine's; none for a
    /// request that no thread waits for, and where threads have no numbers.
    pub thread: Option<(u64, Option<String>)>,
    /// When it began and ended.
    pub time: Range<Instant>,
    /// The file; empty if there is none.
    pub path: PathBuf,
    /// The bytes of the file.
    pub range: Range<u64>,
}

#[derive(Debug, Default)]
struct Kept {
    events: VecDeque<Event>,
    max_events: usize,
    num_dropped: u64,
}

/// Begins a timeline of this process, of which the last `max_events` are kept.
pub fn take(max_events: usize) {
    *KEPT.lock() = Kept { max_events, ..Kept::default() };
    TAKEN_BY.store(process::id(), Ordering::Relaxed);
}

/// Ends it. What has begun before and ends later is not kept.
pub fn end() {
    TAKEN_BY.store(0, Ordering::Relaxed);
}

/// Removes the events so far; returns them with the number of those that were dropped.
pub fn drain() -> (VecDeque<Event>, u64) {
    let mut kept = KEPT.lock();
    (std::mem::take(&mut kept.events), std::mem::take(&mut kept.num_dropped))
}

/// When something begins, if a timeline is taken.
#[inline]
#[must_use]
pub fn begin() -> Option<Instant> {
    let taker = TAKEN_BY.load(Ordering::Relaxed);
    (taker != 0 && taker == process::id()).then(Instant::now)
}

/// Adds what the calling thread did since it `began`, with the bytes `range` of the file at `path`.
#[inline]
pub fn add(began: Option<Instant>, activity: Activity, path: &Path, range: Range<u64>) {
    if let Some(began) = began {
        add_timed(began, activity, path, range);
    }
}

/// Adds a read that began when it was requested, and for which no thread waited.
pub fn add_request(began: Option<Instant>, path: &Path, range: Range<u64>) {
    if let Some(began) = began {
        keep(Activity::Read, None, began..Instant::now(), path, range);
    }
}

#[cold]
fn add_timed(began: Instant, activity: Activity, path: &Path, range: Range<u64>) {
    let ended = Instant::now();
    let is_kept = LEFT_OUT.with(|left_out| {
        let left_out = &left_out[activity as usize];
        let total = left_out.get() + (ended - began);
        let is_kept = total >= LEAST;
        left_out.set(if is_kept { Duration::ZERO } else { total });
        is_kept
    });
    if is_kept {
        let name = thread::current().name().map(str::to_owned);
        let thread = platform::thread_number().map(|number| (number, name));
        keep(activity, thread, began..ended, path, range);
    }
}

fn keep(
    activity: Activity,
    thread: Option<(u64, Option<String>)>,
    time: Range<Instant>,
    path: &Path,
    range: Range<u64>,
) {
    let mut kept = KEPT.lock();
    if begin().is_none() {
        return; // it has ended meanwhile
    }
    if kept.events.len() >= kept.max_events {
        kept.events.pop_front();
        kept.num_dropped += 1;
    }
    kept.events.push_back(Event { activity, thread, time, path: path.to_owned(), range });
}
