//! Measures how long reads take, to tell slow storage from fast.
//!
//! A read answered by the page cache takes microseconds, and a second thread would only move the
//! bytes from one core's cache to another's. A read that waits for a device or a network costs
//! almost no CPU, and many can wait at the same time. [`LatencyStats`] tells the two apart by the
//! duration of the reads.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A read up to this long may come from memory; each byte allows another nanosecond.
const MEMORY_NS: u64 = 60_000;
const NS_PER_BYTE: u64 = 1;
/// The weight of a slow read for each millisecond that it takes, between one and three of them.
const WEIGHT_PER_MS: u32 = 8;
const NS_PER_MS: u64 = 1_000_000;
const MAX_MS: u64 = 3;
/// Slow reads with this total weight classify storage as slow. A thread preempted during a read
/// adds less than this, and a few fast reads cancel it. Only the first read of all classifies it alone,
/// if it takes a millisecond: what opens a file comes before what many reads wait for.
const SLOW_WEIGHT: u32 = 4 * WEIGHT_PER_MS;
/// The limit of the weight: this many fast reads classify storage as fast again.
const MAX_WEIGHT: u32 = 2 * SLOW_WEIGHT;
/// After this many fast reads in a row only one in `SAMPLE_INTERVAL` is timed: reading the clock
/// takes a twentieth of a small read.
const MAX_FAST_STREAK: u32 = 64;
const SAMPLE_INTERVAL: u32 = 8;

thread_local! {
    static UNTIMED: Cell<u32> = const { Cell::new(0) };
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

/// Whether a read of `len` bytes that took `elapsed` had to wait for storage.
fn is_slow_read(elapsed: Duration, len: usize) -> bool {
    elapsed > Duration::from_nanos(MEMORY_NS + NS_PER_BYTE * len as u64)
}

/// The classification of a storage by its past reads, computed from durations without a clock.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct LatencyStats {
    is_slow: bool,
    /// The weight of slow reads, less the number of fast ones.
    weight: u32,
    /// How many fast reads followed the last slow one.
    fast_streak: u32,
}

impl LatencyStats {
    /// Whether storage is slow, so that concurrent reads pay.
    pub fn is_slow(self) -> bool {
        self.is_slow
    }

    /// The statistics of storage that is slow until fast reads show the contrary.
    pub fn of_remote() -> Self {
        Self { is_slow: true, weight: SLOW_WEIGHT, fast_streak: 0 }
    }

    /// Whether every read should be timed, not only a sample.
    pub fn times_every_read(self) -> bool {
        self.fast_streak < MAX_FAST_STREAK
    }

    /// The statistics after a read of `len` bytes that took `elapsed`.
    #[must_use]
    pub fn after(mut self, elapsed: Duration, len: usize) -> Self {
        if is_slow_read(elapsed, len) {
            let nanos = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
            let millis = nanos / NS_PER_MS;
            self.is_slow |= self == Self::default() && millis > 0;
            let millis = u32::try_from(millis.clamp(1, MAX_MS)).unwrap_or(1);
            self.weight = (self.weight + millis * WEIGHT_PER_MS).min(MAX_WEIGHT);
            self.fast_streak = 0;
            self.is_slow |= self.weight >= SLOW_WEIGHT;
        } else {
            self.weight = self.weight.saturating_sub(1);
            self.fast_streak = (self.fast_streak + 1).min(MAX_FAST_STREAK);
            self.is_slow &= self.weight > 0;
        }
        self
    }

    fn to_bits(self) -> u32 {
        u32::from(self.is_slow) | self.weight << 1 | self.fast_streak << 16
    }

    fn from_bits(bits: u32) -> Self {
        Self { is_slow: bits & 1 == 1, weight: bits >> 1 & 0x7fff, fast_streak: bits >> 16 }
    }
}

/// The latency statistics of a storage, shared by all threads that read from it.
#[derive(Debug, Default)]
pub struct AtomicStats(AtomicU32);

/// The reads of some files, and the latency of their storage, which other files may be in, too.
#[derive(Debug, Default)]
pub struct StorageLatency {
    stats: Arc<AtomicStats>,
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
    /// No reads yet, of files in a storage with these `stats`.
    pub fn of(stats: &Arc<AtomicStats>) -> Self {
        Self { stats: Arc::clone(stats), ..Self::default() }
    }

    /// The statistics of the reads so far.
    pub fn stats(&self) -> LatencyStats {
        LatencyStats::from_bits(self.stats.0.load(Ordering::Relaxed))
    }

    fn set_stats(&self, stats: LatencyStats) {
        self.stats.0.store(stats.to_bits(), Ordering::Relaxed);
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
        self.stats().is_slow()
    }

    /// Takes the storage for slow from now on, until fast reads show the contrary.
    pub fn expect_slow(&self) {
        self.set_stats(LatencyStats::of_remote());
    }

    /// Calls `read`, which reads `len` bytes, and may measure its duration.
    #[inline]
    pub(crate) fn measure<T>(&self, len: usize, read: impl FnOnce() -> T) -> T {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(len as u64, Ordering::Relaxed);
        if !self.stats().times_every_read() {
            let untimed = UNTIMED.get() + 1;
            if untimed < SAMPLE_INTERVAL {
                UNTIMED.set(untimed);
                return read();
            }
            UNTIMED.set(0);
        }
        let start = Instant::now();
        let result = read();
        self.record(start.elapsed(), len);
        result
    }

    /// Adds a read of `len` bytes that took `elapsed`.
    pub(crate) fn add(&self, elapsed: Duration, len: usize) {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(len as u64, Ordering::Relaxed);
        self.record(elapsed, len);
    }

    fn record(&self, elapsed: Duration, len: usize) {
        let elapsed_ns = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
        self.timed_reads.fetch_add(1, Ordering::Relaxed);
        self.timed_ns.fetch_add(elapsed_ns, Ordering::Relaxed);
        let before = self.stats();
        let after = before.after(elapsed, len);
        if after != before {
            // A concurrent update may be lost; later reads correct that.
            self.set_stats(after);
        }
        if is_slow_read(elapsed, len) {
            add_waited(elapsed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CACHED: Duration = Duration::from_micros(2);
    const NETWORK: Duration = Duration::from_millis(20);
    const DISK: Duration = Duration::from_micros(200);

    fn after(stats: LatencyStats, reads: impl IntoIterator<Item = Duration>) -> LatencyStats {
        reads.into_iter().fold(stats, |stats, read| stats.after(read, 1024))
    }

    fn times(count: usize, read: Duration) -> impl Iterator<Item = Duration> {
        std::iter::repeat_n(read, count)
    }

    #[test]
    fn two_reads_of_milliseconds_or_four_of_a_disk_make_storage_slow() {
        assert!(!after(LatencyStats::default(), [CACHED, NETWORK]).is_slow());
        assert!(after(LatencyStats::default(), [CACHED, NETWORK, NETWORK]).is_slow());
        assert!(!after(LatencyStats::default(), times(3, DISK)).is_slow());
        assert!(after(LatencyStats::default(), times(4, DISK)).is_slow());
    }

    #[test]
    fn first_read_of_milliseconds_makes_storage_slow_for_a_few_reads() {
        let opened = after(LatencyStats::default(), [NETWORK]);
        assert!(opened.is_slow() && opened.times_every_read());
        assert!(after(opened, times(20, CACHED)).is_slow());
        assert!(!after(opened, times(24, CACHED)).is_slow());
        assert!(after(opened, [CACHED, NETWORK]).is_slow());
        assert!(!after(LatencyStats::default(), [DISK]).is_slow());
    }

    #[test]
    fn occasional_preemption_does_not_make_storage_slow() {
        let stats = (0..100).fold(LatencyStats::default(), |stats, _| {
            after(after(stats, [Duration::from_millis(50)]), times(30, CACHED))
        });
        assert!(!stats.is_slow());
    }

    #[test]
    fn long_reads_from_memory_do_not_make_storage_slow() {
        let stats = (0..10).fold(LatencyStats::default(), |stats, _| {
            stats.after(Duration::from_micros(300), 1 << 20)
        });
        assert!(!stats.is_slow());
    }

    #[test]
    fn storage_becomes_fast_only_once_reads_come_from_memory() {
        let slow = after(LatencyStats::default(), times(100, NETWORK));
        let half_cached = (0..500).fold(slow, |stats, _| after(stats, [CACHED, NETWORK, CACHED]));
        assert!(half_cached.is_slow());
        assert!(after(slow, times(40, CACHED)).is_slow());
        let fast = after(slow, times(70, CACHED));
        assert!(!fast.is_slow());
        assert!(after(fast, [NETWORK, NETWORK]).is_slow());
    }

    #[test]
    fn remote_storage_is_slow_until_reads_come_from_memory() {
        let remote = LatencyStats::of_remote();
        assert!(remote.is_slow() && remote.times_every_read());
        assert!(after(remote, times(20, CACHED)).is_slow());
        assert!(!after(remote, times(70, CACHED)).is_slow());
        assert!(after(remote, times(70, NETWORK)).is_slow());
    }

    #[test]
    fn every_read_is_timed_unless_recent_ones_came_from_memory() {
        assert!(LatencyStats::default().times_every_read());
        let fast = after(LatencyStats::default(), times(64, CACHED));
        assert!(!fast.times_every_read());
        assert!(after(fast, [DISK]).times_every_read());
    }

    #[test]
    fn stats_round_trip_as_bits() {
        let mut stats = LatencyStats::default();
        for read in
            [CACHED, NETWORK, NETWORK, NETWORK, DISK, CACHED, CACHED].into_iter().cycle().take(200)
        {
            stats = stats.after(read, 100);
            assert_eq!(LatencyStats::from_bits(stats.to_bits()), stats);
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
