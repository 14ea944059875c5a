//! Whether storage is far: how long reads take, and what follows from it.
//!
//! A read that the page cache answers takes microseconds, and a second thread would only carry
//! the bytes from one core's cache to another's. A read that waits for a device or a network costs
//! next to no work, and many others can wait at the same time. Which of both it is shows in the
//! time of the reads themselves; [`Verdict`] judges it.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Reads up to this long may come from memory; a byte more takes a nanosecond at least.
const MEMORY_NS: u64 = 60_000;
const NS_PER_BYTE: u64 = 1;
/// What a slow read weighs: that of a millisecond, up to three times as much.
const SAMPLE: u32 = 8;
const SAMPLE_NS: u64 = 1_000_000;
const MOST_SAMPLES: u64 = 3;
/// Slow reads of this weight together make storage far. A thread that loses its core amid a read
/// weighs less than this, and reads from memory make up for it soon.
const FAR_WEIGHT: u32 = 4 * SAMPLE;
/// So many more reads from memory than slow ones make it near again.
const MOST_WEIGHT: u32 = 2 * FAR_WEIGHT;
/// After this many reads from memory in a row only one in `LOOK_EVERY` is timed: to look at the
/// clock takes a twentieth of a small read.
const CALM: u32 = 64;
const LOOK_EVERY: u32 = 8;

thread_local! {
    static UNTIMED: Cell<u32> = const { Cell::new(0) };
    static WAITED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// How long the calling thread has waited for storage since it began.
pub fn waited() -> Duration {
    WAITED.get()
}

/// Adds to what [`waited`] says of this thread.
pub(crate) fn add_waited(time: Duration) {
    WAITED.set(WAITED.get() + time);
}

/// Whether a read of `len` bytes that took `elapsed` had to wait.
fn is_slow(elapsed: Duration, len: usize) -> bool {
    elapsed > Duration::from_nanos(MEMORY_NS + NS_PER_BYTE * len as u64)
}

/// What the reads so far tell of a storage. Durations go in; there is no clock in here.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    is_far: bool,
    /// The weight of slow reads, less the number of those from memory.
    weight: u32,
    /// How many reads from memory there were since the last slow one.
    calm: u32,
}

impl Verdict {
    /// Whether reads are worth waiting for side by side.
    pub fn is_far(self) -> bool {
        self.is_far
    }

    /// Whether each read should be timed, and not only one now and then.
    pub fn is_watchful(self) -> bool {
        self.calm < CALM
    }

    /// The verdict after a read of `len` bytes that took `elapsed`.
    #[must_use]
    pub fn after(mut self, elapsed: Duration, len: usize) -> Self {
        if is_slow(elapsed, len) {
            let nanos = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
            let samples = (nanos / SAMPLE_NS).clamp(1, MOST_SAMPLES);
            let samples = u32::try_from(samples).unwrap_or(1);
            self.weight = (self.weight + samples * SAMPLE).min(MOST_WEIGHT);
            self.calm = 0;
            self.is_far |= self.weight >= FAR_WEIGHT;
        } else {
            self.weight = self.weight.saturating_sub(1);
            self.calm = (self.calm + 1).min(CALM);
            self.is_far &= self.weight > 0;
        }
        self
    }

    fn to_bits(self) -> u32 {
        u32::from(self.is_far) | self.weight << 1 | self.calm << 16
    }

    fn from_bits(bits: u32) -> Self {
        Self { is_far: bits & 1 == 1, weight: bits >> 1 & 0x7fff, calm: bits >> 16 }
    }
}

/// The verdict on the storage of some files, which all threads that read them add to.
#[derive(Debug, Default)]
pub struct StorageLatency(AtomicU32);

impl StorageLatency {
    /// What the reads so far tell.
    pub fn verdict(&self) -> Verdict {
        Verdict::from_bits(self.0.load(Ordering::Relaxed))
    }

    /// Whether storage is far.
    pub fn is_far(&self) -> bool {
        self.verdict().is_far()
    }

    /// What `read` gives, which reads `len` bytes; it may be timed.
    #[inline]
    pub(crate) fn observed<T>(&self, len: usize, read: impl FnOnce() -> T) -> T {
        if !self.verdict().is_watchful() {
            let untimed = UNTIMED.get() + 1;
            if untimed < LOOK_EVERY {
                UNTIMED.set(untimed);
                return read();
            }
            UNTIMED.set(0);
        }
        let began = Instant::now();
        let result = read();
        self.note(began.elapsed(), len);
        result
    }

    fn note(&self, elapsed: Duration, len: usize) {
        let before = self.verdict();
        let after = before.after(elapsed, len);
        if after != before {
            // Of two threads at once one may be lost, which the next read makes up for.
            self.0.store(after.to_bits(), Ordering::Relaxed);
        }
        if is_slow(elapsed, len) {
            add_waited(elapsed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CACHED: Duration = Duration::from_micros(2);
    const FAR: Duration = Duration::from_millis(20);
    const DISK: Duration = Duration::from_micros(200);

    fn after(verdict: Verdict, reads: impl IntoIterator<Item = Duration>) -> Verdict {
        reads.into_iter().fold(verdict, |verdict, read| verdict.after(read, 1024))
    }

    fn times(count: usize, read: Duration) -> impl Iterator<Item = Duration> {
        std::iter::repeat_n(read, count)
    }

    #[test]
    fn two_reads_of_milliseconds_or_four_of_a_disk_are_far() {
        assert!(!after(Verdict::default(), [FAR]).is_far());
        assert!(after(Verdict::default(), [FAR, FAR]).is_far());
        assert!(!after(Verdict::default(), times(3, DISK)).is_far());
        assert!(after(Verdict::default(), times(4, DISK)).is_far());
    }

    #[test]
    fn a_thread_that_loses_its_core_now_and_then_is_not_far() {
        let verdict = (0..100).fold(Verdict::default(), |verdict, _| {
            after(after(verdict, [Duration::from_millis(50)]), times(30, CACHED))
        });
        assert!(!verdict.is_far());
    }

    #[test]
    fn long_reads_from_memory_are_not_far() {
        let verdict = (0..10).fold(Verdict::default(), |verdict, _| {
            verdict.after(Duration::from_micros(300), 1 << 20)
        });
        assert!(!verdict.is_far());
    }

    #[test]
    fn storage_becomes_near_once_reads_come_from_memory_and_not_before() {
        let far = after(Verdict::default(), times(100, FAR));
        let half_cached = (0..500).fold(far, |verdict, _| after(verdict, [CACHED, FAR, CACHED]));
        assert!(half_cached.is_far());
        assert!(after(far, times(40, CACHED)).is_far());
        let near = after(far, times(70, CACHED));
        assert!(!near.is_far());
        assert!(after(near, [FAR, FAR]).is_far());
    }

    #[test]
    fn each_read_is_timed_unless_all_came_from_memory_lately() {
        assert!(Verdict::default().is_watchful());
        let calm = after(Verdict::default(), times(64, CACHED));
        assert!(!calm.is_watchful());
        assert!(after(calm, [DISK]).is_watchful());
    }

    #[test]
    fn verdicts_survive_being_kept_as_bits() {
        let mut verdict = Verdict::default();
        for read in [CACHED, FAR, FAR, FAR, DISK, CACHED, CACHED].into_iter().cycle().take(200) {
            verdict = verdict.after(read, 100);
            assert_eq!(Verdict::from_bits(verdict.to_bits()), verdict);
        }
    }

    #[test]
    fn slow_reads_count_as_waiting_of_the_thread_that_did_them() {
        let latency = StorageLatency::default();
        let before = waited();
        latency.observed(1, || std::thread::sleep(Duration::from_millis(2)));
        assert!(waited() >= before + Duration::from_millis(2));
        std::thread::spawn(|| assert_eq!(waited(), Duration::ZERO)).join().unwrap();
    }
}
