//! How long reads of a storage make their thread wait, as a number.
//!
//! A read answered by the page cache takes microseconds, and a second thread would only move the
//! bytes from one core's cache to another's. A read that waits for a device or a network costs
//! almost no CPU, and many can wait at the same time. [`Latency`] estimates the wait from the
//! durations of the reads, and everything that asks whether storage is slow asks it.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::read_queue::StorageLimit;

/// A read up to this long may come from memory; each byte allows another nanosecond.
const MEMORY_NS: u32 = 60_000;
const NS_PER_BYTE: u64 = 1;
/// What is taken for the wait of a read of another machine before one has been measured.
const REMOTE_NS: u32 = 1_000_000;
/// The estimate moves by this part of the way to each read.
const SMOOTHING: i64 = 8;
/// A read makes the estimate at most so many times as long, and in fast storage not longer than a read
/// from memory may take: a thread preempted during a read, or a machine that stood still, is not a
/// storage that waits, but two such reads within a few are.
const MAX_GROWTH: u32 = 16;
/// So many reads at first are all timed. Later, while they come from memory, only one in
/// `SAMPLE_INTERVAL` is: reading the clock takes a twentieth of a small read.
const NUM_TIMED: u64 = 64;
const SAMPLE_INTERVAL: u64 = 8;

thread_local! {
    static WAITED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// How long the calling thread has waited for storage since it started.
pub fn waited() -> Duration {
    WAITED.get()
}

/// Adds `time` to the calling thread's [`waited`].
pub fn add_waited(time: Duration) {
    WAITED.set(WAITED.get() + time);
}

/// How long a read of a storage waits, estimated from its past reads without a clock.
///
/// The first read is the estimate, but alone makes storage slow only if it waits for a millisecond; later
/// ones are smoothed.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Latency {
    /// In nanoseconds, beyond what the bytes take; 0 if nothing was read yet.
    ns: u32,
}

impl Latency {
    /// That of storage on another machine, until it is measured.
    pub const REMOTE: Self = Self { ns: REMOTE_NS };

    /// Whether reads wait for storage, so that concurrent ones pay.
    pub fn is_slow(self) -> bool {
        self.ns > MEMORY_NS
    }

    /// Whether every read should be timed, not only a sample.
    fn times_every_read(self) -> bool {
        self.ns > MEMORY_NS / MAX_GROWTH
    }

    /// That of a read of `len` bytes that took `elapsed`.
    fn of_read(elapsed: Duration, len: usize) -> Self {
        let bytes = Duration::from_nanos(NS_PER_BYTE * len as u64);
        let wait = elapsed.saturating_sub(bytes).as_nanos();
        Self { ns: u32::try_from(wait).unwrap_or(u32::MAX).max(1) }
    }

    /// The estimate after a read of `len` bytes that took `elapsed`.
    #[must_use]
    pub fn after(self, elapsed: Duration, len: usize) -> Self {
        let read = Self::of_read(elapsed, len);
        let wait = read.ns;
        if self.ns == 0 {
            // A shorter wait may be for a core.
            return if read >= Self::REMOTE { read } else { Self { ns: wait.min(MEMORY_NS) } };
        }
        let step = (i64::from(wait) - i64::from(self.ns)) / SMOOTHING;
        let most = self.ns.max(MEMORY_NS / MAX_GROWTH).saturating_mul(MAX_GROWTH);
        let ns = u32::try_from(i64::from(self.ns) + step).unwrap_or(u32::MAX).min(most);
        Self { ns: ns.max(1) }
    }
}

/// The latency of a storage, shared by all threads that read from it.
#[derive(Debug, Default)]
pub struct SharedLatency {
    ns: AtomicU32,
    limit: Option<Arc<StorageLimit>>,
}

impl SharedLatency {
    /// No reads yet, of a storage with this limit.
    pub fn of(limit: Option<Arc<StorageLimit>>) -> Arc<Self> {
        Arc::new(Self { ns: AtomicU32::new(0), limit })
    }
}

/// The reads of some files, and the latency of their storage, which other files may be in, too.
#[derive(Debug, Default)]
pub struct StorageLatency {
    storage: Arc<SharedLatency>,
    reads: AtomicU64,
    bytes: AtomicU64,
    timed_reads: AtomicU64,
    timed_ns: AtomicU64,
}

/// The reads of some files so far. In fast storage only a sample of them is timed.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct ReadTotals {
    /// How many reads.
    pub reads: u64,
    /// Bytes read.
    pub bytes: u64,
    /// How many of the reads were timed.
    pub timed_reads: u64,
    /// How long those took, added up.
    pub timed: Duration,
}

impl StorageLatency {
    /// No reads yet, of files in a `storage`.
    pub fn of(storage: &Arc<SharedLatency>) -> Self {
        Self { storage: Arc::clone(storage), ..Self::default() }
    }

    /// The limit of the storage.
    pub fn limit(&self) -> Option<Arc<StorageLimit>> {
        self.storage.limit.clone()
    }

    /// The latency of the storage by the reads so far.
    pub fn estimate(&self) -> Latency {
        Latency { ns: self.storage.ns.load(Ordering::Relaxed) }
    }

    fn set(&self, latency: Latency) {
        self.storage.ns.store(latency.ns, Ordering::Relaxed);
    }

    /// The reads so far; other threads may be reading.
    pub fn totals(&self) -> ReadTotals {
        ReadTotals {
            reads: self.reads.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            timed_reads: self.timed_reads.load(Ordering::Relaxed),
            timed: Duration::from_nanos(self.timed_ns.load(Ordering::Relaxed)),
        }
    }

    /// Whether storage is slow.
    pub fn is_slow(&self) -> bool {
        self.estimate().is_slow()
    }

    /// Takes the storage for slow from now on, until fast reads show the contrary.
    pub fn expect_slow(&self) {
        self.set(self.estimate().max(Latency::REMOTE));
    }

    /// Calls `read`, which reads `len` bytes, and may measure its duration.
    #[inline]
    pub(crate) fn measure<T>(&self, len: usize, read: impl FnOnce() -> T) -> T {
        let number = self.count(len);
        let is_timed = number < NUM_TIMED
            || number.is_multiple_of(SAMPLE_INTERVAL)
            || self.estimate().times_every_read();
        if !is_timed {
            return read();
        }
        let start = Instant::now();
        let result = read();
        self.record(start.elapsed(), len);
        result
    }

    /// Adds a read of `len` bytes that took `elapsed`.
    pub(crate) fn add(&self, elapsed: Duration, len: usize) {
        self.count(len);
        self.record(elapsed, len);
    }

    /// Counts a read of `len` bytes; returns how many there were before.
    fn count(&self, len: usize) -> u64 {
        self.bytes.fetch_add(len as u64, Ordering::Relaxed);
        self.reads.fetch_add(1, Ordering::Relaxed)
    }

    fn record(&self, elapsed: Duration, len: usize) {
        let elapsed_ns = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
        self.timed_reads.fetch_add(1, Ordering::Relaxed);
        self.timed_ns.fetch_add(elapsed_ns, Ordering::Relaxed);
        // A concurrent update may be lost; later reads correct that.
        self.set(self.estimate().after(elapsed, len));
        if Latency::of_read(elapsed, len).is_slow() {
            add_waited(elapsed);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CACHED: Duration = Duration::from_micros(2);
    const NETWORK: Duration = Duration::from_millis(20);
    const DISK: Duration = Duration::from_micros(200);

    fn after(latency: Latency, reads: impl IntoIterator<Item = Duration>) -> Latency {
        reads.into_iter().fold(latency, |latency, read| latency.after(read, 1024))
    }

    fn times(count: usize, read: Duration) -> impl Iterator<Item = Duration> {
        std::iter::repeat_n(read, count)
    }

    fn cached() -> Latency {
        after(Latency::default(), times(100, CACHED))
    }

    /// How many reads from memory make it fast again.
    fn num_until_fast(mut latency: Latency) -> usize {
        let mut count = 0;
        while latency.is_slow() {
            latency = latency.after(CACHED, 1024);
            count += 1;
        }
        count
    }

    #[test]
    fn two_reads_of_milliseconds_or_three_of_a_disk_make_storage_slow() {
        assert!(!after(cached(), [NETWORK]).is_slow());
        assert!(after(cached(), [NETWORK, NETWORK]).is_slow());
        assert!(after(cached(), [NETWORK, CACHED, CACHED, NETWORK]).is_slow());
        assert!(!after(cached(), times(2, DISK)).is_slow());
        assert!(after(cached(), times(3, DISK)).is_slow());
    }

    #[test]
    fn first_read_is_the_estimate() {
        assert!(!Latency::default().is_slow());
        for read in [CACHED, DISK, NETWORK] {
            let opened = after(Latency::default(), [read]);
            assert_eq!(opened.is_slow(), read == NETWORK);
            let known = if read == DISK { Duration::from_nanos(MEMORY_NS.into()) } else { read };
            let bytes = if read == DISK { 0 } else { 1024 };
            assert_eq!(Duration::from_nanos(u64::from(opened.ns) + bytes), known);
        }
    }

    #[test]
    fn occasional_preemption_does_not_make_storage_slow() {
        for pause in [DISK, Duration::from_millis(50), Duration::from_secs(3)] {
            let latency = (0..100).fold(cached(), |latency, _| {
                let latency = latency.after(pause, 1024);
                assert!(!latency.is_slow(), "{pause:?}");
                after(latency, times(30, CACHED))
            });
            assert!(!latency.is_slow());
        }
    }

    #[test]
    fn long_reads_from_memory_do_not_make_storage_slow() {
        let read = Duration::from_micros(300);
        assert!(
            !(0..10).fold(Latency::default(), |latency, _| latency.after(read, 1 << 20)).is_slow()
        );
    }

    #[test]
    fn one_far_read_in_twenty_keeps_storage_slow() {
        for num_cached in [1, 2, 10, 19] {
            let mixed = (0..200).fold(cached(), |latency, _| {
                after(latency.after(NETWORK, 1024), times(num_cached, CACHED))
            });
            assert!(mixed.is_slow(), "{num_cached}");
        }
    }

    #[test]
    fn storage_becomes_fast_by_tens_of_reads_from_memory() {
        for (read, range) in [(DISK, 5..=15), (NETWORK, 30..=60), (Duration::MAX, 60..=90)] {
            let slow = after(Latency::default(), times(100, read));
            let count = num_until_fast(slow);
            assert!(range.contains(&count), "{read:?}: {count}");
        }
        let remote = Latency::REMOTE;
        assert!(remote.is_slow() && remote.times_every_read());
        assert!((20..30).contains(&num_until_fast(remote)));
        assert!(after(remote, times(70, NETWORK)).is_slow());
    }

    #[test]
    fn every_read_is_timed_unless_recent_ones_came_from_memory() {
        assert!(!cached().times_every_read());
        for read in [DISK, NETWORK] {
            assert!(after(cached(), [read]).times_every_read());
        }
    }

    proptest! {
        /// Where reads take between two times, so does the estimate; and longer reads make none shorter.
        #[test]
        fn estimate_follows_the_reads(
            reads in proptest::collection::vec(1_u64..10_000_000_000, 1..300),
            most in 1_u64..10_000_000_000,
            longer in 0_u64..1_000_000_000,
        ) {
            let (mut found, mut above) = (Latency::default(), Latency::default());
            let (mut least, mut last) = (u64::MAX, 0);
            for read in reads {
                let read = read % most + 1;
                (least, last) = (least.min(read), last.max(read));
                found = found.after(Duration::from_nanos(read), 0);
                above = above.after(Duration::from_nanos(read + longer), 0);
                let ns = u64::from(found.ns);
                // A first wait of less than a millisecond counts as at most that of memory.
                prop_assert!(least.min(u64::from(MEMORY_NS)) <= ns && ns <= last);
                prop_assert!(found <= above);
            }
        }
    }

    #[test]
    fn all_reads_are_counted_and_a_sample_of_fast_ones_is_timed() {
        let latency = StorageLatency::default();
        for _ in 0..1000 {
            latency.measure(3, || ());
        }
        let totals = latency.totals();
        assert_eq!((totals.reads, totals.bytes), (1000, 3000));
        assert!((1..=1000).contains(&totals.timed_reads));
        let before = latency.totals();
        latency.measure(1, || std::thread::sleep(Duration::from_millis(2)));
        let timed = latency.totals().timed_reads - before.timed_reads;
        let elapsed = latency.totals().timed.saturating_sub(before.timed);
        assert!(timed == 0 || elapsed >= Duration::from_millis(2));
    }

    #[test]
    fn slow_reads_count_as_waiting_of_their_thread() {
        let latency = StorageLatency::default();
        let before = waited();
        latency.measure(1, || std::thread::sleep(Duration::from_millis(2)));
        assert!(waited() >= before + Duration::from_millis(2));
        std::thread::spawn(|| assert_eq!(waited(), Duration::ZERO)).join().unwrap();
    }
}
