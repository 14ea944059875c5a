//! The models: what some threads do, and what must hold in whatever order they do it.
//!
//! That somebody waits for ever, the checker finds by itself.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};

use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, Runner};

use crate::compute;
use crate::formats::chunk_records::ChunkRecords;
use crate::io::SingleFlight;
use crate::io::parallel::for_each_parallel;
use crate::io::pool;
use crate::io::read_queue::{self, Job, Permit, ReadQueue, StorageLimit};
use crate::lock::lock;
use crate::process::{self, PerProcess};
use crate::read::chunk_cache::{self, ChunkCache};
use crate::stubs::ArrayRef;
use crate::sync::{Condvar, Mutex, thread};
use crate::unit_cache::{Cache, Claim, Estimate, Key};

/// How often a model is run by each way to choose threads, unless the environment has another number.
const NUM_RUNS: usize = 500;
/// How often at most the checker takes a thread off where it would go on; faults need few.
const NUM_PREEMPTIONS: usize = 4;
/// The records of a chunk.
const NUM_RECORDS: usize = 9;
/// The bytes of a unit.
const LEN: usize = 8;
const ESTIMATE: Estimate = Estimate { num_rows: 8, row_byte_len: 1.0, is_rough: false };
/// The same runs each time.
const SEED: u64 = 0x6d69_6c6c;

/// Runs `model` in many orders, with as many threads of the engine as `num_threads` says in turn.
fn check(num_threads: &'static [usize], model: fn()) {
    static ONE_AT_A_TIME: std::sync::Mutex<()> = std::sync::Mutex::new(());
    static NUM_PROCESSES: AtomicU32 = AtomicU32::new(0);
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let num_runs = std::env::var("GRAINMILL_MODEL_RUNS")
        .map_or(NUM_RUNS, |text| text.parse().expect("a number of runs"));
    let run = move || {
        let number = NUM_PROCESSES.fetch_add(1, Ordering::Relaxed);
        process::ID.store(number + 1, Ordering::Relaxed);
        let left = num_threads[number as usize % num_threads.len()];
        thread::NUM_LEFT.store(left, Ordering::Relaxed);
        model();
    };
    Runner::new(RandomScheduler::new_from_seed(SEED, num_runs), Config::default()).run(run);
    let few = PctScheduler::new_from_seed(SEED, NUM_PREEMPTIONS, num_runs);
    Runner::new(few, Config::default()).run(run);
}

/// Runs all of `works`, each on a thread, and waits for them.
fn join(works: Vec<Box<dyn FnOnce() + Send>>) {
    let threads: Vec<_> = works.into_iter().map(thread::spawn).collect();
    for thread in threads {
        thread.join().expect("no thread panics");
    }
}

/// Reads that are counted.
#[derive(Default)]
struct Reads {
    counts: Mutex<Counts>,
    all_done: Condvar,
}

#[derive(Default)]
struct Counts {
    num_running: usize,
    most: usize,
    num_done: usize,
}

impl Reads {
    fn begin(&self) {
        let mut counts = lock(&self.counts);
        counts.num_running += 1;
        counts.most = counts.most.max(counts.num_running);
    }

    fn end(&self) {
        let mut counts = lock(&self.counts);
        counts.num_running -= 1;
        counts.num_done += 1;
        drop(counts);
        self.all_done.notify_all();
    }

    fn skip(&self) {
        lock(&self.counts).num_done += 1;
        self.all_done.notify_all();
    }

    /// Waits until `count` reads have ended; returns how many ran at once.
    fn wait(&self, count: usize) -> usize {
        let counts = self.all_done.wait_while(lock(&self.counts), |found| found.num_done < count);
        counts.unwrap_or_else(PoisonError::into_inner).most
    }
}

/// A job whose reads are requests or need a thread.
struct ReadJob {
    reads: Arc<Reads>,
    has_requests: bool,
    storage: Option<Arc<StorageLimit>>,
}

impl Job for ReadJob {
    fn storage(&self) -> Option<Arc<StorageLimit>> {
        self.storage.clone()
    }

    fn run_next(self: Arc<Self>) {
        self.reads.begin();
        self.reads.end();
    }

    fn start_next(self: Arc<Self>, permit: Permit) -> Option<Permit> {
        if !self.has_requests {
            return Some(permit);
        }
        self.reads.begin();
        thread::spawn(move || {
            self.reads.end();
            drop(permit);
        });
        None
    }
}

/// Queues `count` reads, for an owner of their own.
fn submission(
    queue: &ReadQueue,
    reads: &Arc<Reads>,
    has_requests: bool,
    count: usize,
) -> Box<dyn FnOnce() + Send> {
    submission_in(None, queue, reads, has_requests, count)
}

/// The same, of reads of a storage.
fn submission_in(
    storage: Option<&Arc<StorageLimit>>,
    queue: &ReadQueue,
    reads: &Arc<Reads>,
    has_requests: bool,
    count: usize,
) -> Box<dyn FnOnce() + Send> {
    let (queue, reads, storage) = (queue.for_another_owner(), Arc::clone(reads), storage.cloned());
    Box::new(move || queue.submit(Arc::new(ReadJob { reads, has_requests, storage }), count))
}

/// Every read that is queued starts, never more at once than the limit, and all places are free again
/// at the end: also where threads are few and some reads are answered on threads of the storage.
pub fn read_queue() {
    check(&[1, 2, 9], || {
        let (queue, reads) = (ReadQueue::new(2), Arc::new(Reads::default()));
        let submit = |has_requests, count| submission(&queue, &reads, has_requests, count);
        let enter = || -> Box<dyn FnOnce() + Send> {
            let (queue, reads) = (queue.clone(), Arc::clone(&reads));
            Box::new(move || {
                if let Some(permit) = queue.enter() {
                    reads.begin();
                    reads.end();
                    drop(permit);
                } else {
                    reads.skip();
                }
            })
        };
        join(vec![enter(), enter(), enter()]);
        join(vec![submit(false, 2), submit(true, 2), submit(false, 1), enter()]);
        assert!(reads.wait(9) <= 2, "more reads than allowed");
        drop(all_places(&queue));
    });
}

/// The same while the limit changes: it holds from then on, and reads that it permits start by themselves.
pub fn read_queue_limits() {
    check(&[1, 2, 9], || {
        let (queue, reads) = (ReadQueue::new(2), Arc::new(Reads::default()));
        let submit = |has_requests, count| submission(&queue, &reads, has_requests, count);
        let limited = queue.clone();
        let limit = move || [3, 1].into_iter().for_each(|limit| limited.set_max_in_flight(limit));
        join(vec![submit(false, 2), submit(true, 3), Box::new(limit)]);
        assert!(reads.wait(5) <= 3, "more reads than ever allowed");
        drop(all_places(&queue));
        lock(&reads.counts).most = 0;
        join(vec![submit(false, 2), submit(true, 1)]);
        assert!(reads.wait(8) <= 1, "more reads than allowed");
        let held = all_places(&queue);
        let other = queue.clone();
        join(vec![submit(true, 1), Box::new(move || other.set_max_in_flight(2))]);
        reads.wait(9);
        drop(held);
        let mut held = all_places(&queue);
        lock(&reads.counts).most = 0;
        join(vec![submit(false, 1), submit(true, 1)]);
        queue.set_max_in_flight(1);
        held.pop();
        assert_eq!(lock(&reads.counts).most, 0, "a read has started beside as many as allowed");
        drop(held);
        reads.wait(11);
        all_places(&queue);
    });
}

/// Queues of a process are all served, within the limit of the process and their own, also while that of the
/// process changes; nobody else's reads keep one who enters anyway.
pub fn read_queues_of_a_process() {
    check(&[1, 2, 9], || {
        read_queue::set_max_of_process(2);
        let all = Arc::new(Reads::default());
        let queues = [1, 1, 2].map(ReadQueue::new);
        let submit = |at: usize, has_requests| submission(&queues[at], &all, has_requests, 2);
        join(vec![submit(0, false), submit(1, true), submit(2, true), submit(0, true)]);
        assert!(all.wait(8) <= 2, "more reads than a process may have");
        let limit = || [3, 1].into_iter().for_each(read_queue::set_max_of_process);
        join(vec![submit(0, true), submit(1, false), Box::new(limit)]);
        assert!(all.wait(12) <= 3, "more reads than the process ever may have");
        let held = [queues[2].enter_anyway(), queues[1].enter_anyway(), queues[2].enter_anyway()];
        lock(&all.counts).most = 0;
        join(vec![submit(0, true), submit(2, false)]);
        assert_eq!(lock(&all.counts).most, 0, "a read has started beside too many");
        drop(held);
        all.wait(16);
        for queue in &queues {
            all_places(queue);
        }
    });
}

/// Each storage has at most as many reads in flight as it may have, also while that changes, and one whose places
/// are taken keeps no other from being read.
pub fn read_storages() {
    check(&[1, 2, 9], || {
        read_queue::set_max_of_process(4);
        let (queue, other) = (ReadQueue::new(4), ReadQueue::new(1));
        let limits = [1, 2].map(|max| Arc::new(StorageLimit::new(Some(max))));
        let reads: [Arc<Reads>; 2] = Default::default();
        let submit = |queue, at: usize, has_requests, count| {
            submission_in(Some(&limits[at]), queue, &reads[at], has_requests, count)
        };
        join(vec![
            submit(&queue, 0, true, 2),
            submit(&other, 0, false, 2),
            submit(&queue, 1, false, 2),
            submit(&queue, 1, true, 2),
        ]);
        for (at, most) in [(0, 1), (1, 2)] {
            assert!(reads[at].wait(4) <= most, "more reads than storage {at} may have");
        }
        let in_storage = queue.in_storage(Some(Arc::clone(&limits[0])));
        let held = in_storage.enter_anyway();
        assert!(in_storage.enter().is_none(), "one place too many");
        lock(&reads[0].counts).most = 0;
        join(vec![submit(&queue, 0, true, 2), submit(&queue, 1, true, 1)]);
        reads[1].wait(5);
        assert_eq!(lock(&reads[0].counts).most, 0, "a read has started beside as many as allowed");
        limits[0].set(Some(2));
        assert!(reads[0].wait(6) <= 1, "more reads than allowed");
        drop(held);
        all_places(&queue);
    });
}

/// Each item of a loop over files is processed once and has been when the loop returns, also beside reads that
/// take all places, and while two loops run.
pub fn loops_over_files() {
    check(&[0, 1, 3], || {
        read_queue::set_max_of_process(2);
        let queue = ReadQueue::new(2);
        let held = all_places(&queue);
        let run_loop = |num_items: usize| -> Box<dyn FnOnce() + Send> {
            Box::new(move || {
                let done = Arc::new(Reads::default());
                let counted = Arc::clone(&done);
                for_each_parallel(
                    (0..num_items).collect(),
                    |_| None,
                    move |_| {
                        counted.begin();
                        counted.end();
                        Ok(())
                    },
                )
                .expect("no item fails");
                let counts = lock(&done.counts);
                assert_eq!((counts.num_running, counts.num_done), (0, num_items));
            })
        };
        let other = queue.clone();
        join(vec![run_loop(8), run_loop(9), Box::new(move || drop(held))]);
        // Calls that a loop no longer needs start no more: the checker ends threads where they are.
        std::mem::forget(all_places(&other));
    });
}

/// Takes all places of a queue at once.
fn all_places(queue: &ReadQueue) -> Vec<Permit> {
    let mut permits = Vec::new();
    while permits.len() < queue.max_in_flight() {
        match queue.enter() {
            Some(permit) => permits.push(permit),
            None => thread::yield_now(),
        }
    }
    assert!(queue.enter().is_none(), "one place too many");
    permits
}

/// Each piece of work that is submitted is done once, on a thread of the pool or, without any, at once.
pub fn thread_pool() {
    check(&[0, 1, 2], || {
        let reads = Arc::new(Reads::default());
        let submit = |count| -> Box<dyn FnOnce() + Send> {
            let reads = Arc::clone(&reads);
            Box::new(move || {
                for _ in 0..count {
                    let reads = Arc::clone(&reads);
                    pool::submit(move || {
                        reads.begin();
                        reads.end();
                    });
                }
            })
        };
        join(vec![submit(2), submit(1), submit(1)]);
        reads.wait(4);
        assert_eq!(lock(&reads.counts).num_done, 4);
    });
}

/// Work that is submitted runs at once, whatever other work waits for.
pub fn thread_pool_at_once() {
    check(&[9], || {
        for _ in 0..2 {
            let begun = Arc::new(Reads::default());
            let submit = |count| -> Box<dyn FnOnce() + Send> {
                let begun = Arc::clone(&begun);
                Box::new(move || {
                    for _ in 0..count {
                        let begun = Arc::clone(&begun);
                        pool::submit(move || {
                            begun.begin();
                            begun.end();
                            begun.wait(3);
                        });
                    }
                })
            };
            join(vec![submit(2), submit(1)]);
            begun.wait(3);
        }
    });
}

/// Each share of a loop is run once, and nobody runs one after the loop has returned.
pub fn compute_loops() {
    check(&[0], || {
        compute::limit_threads(3);
        let run_loop = || -> Box<dyn FnOnce() + Send> {
            Box::new(|| {
                let counts: [Mutex<u32>; 3] = Default::default();
                let num_inside = AtomicUsize::new(0);
                compute::for_each(counts.iter().collect(), |count| {
                    num_inside.fetch_add(1, Ordering::Relaxed);
                    *lock(count) += 1;
                    num_inside.fetch_sub(1, Ordering::Relaxed);
                });
                assert_eq!(num_inside.load(Ordering::Relaxed), 0, "a helper is still there");
                assert!(counts.iter().all(|count| *lock(count) == 1));
            })
        };
        join(vec![run_loop(), run_loop()]);
    });
}

/// All threads of a process have one value.
pub fn per_process() {
    check(&[0], || {
        static VALUE: PerProcess<Mutex<u32>> = PerProcess::new(Default::default);
        let add = || -> Box<dyn FnOnce() + Send> { Box::new(|| *VALUE.lock() += 1) };
        join(vec![add(), add(), add()]);
        assert_eq!(*VALUE.lock(), 3);
    });
}

/// One thread at a time holds a key, and nobody waits for a key that is free.
pub fn single_flight() {
    check(&[0], || {
        let flights = Arc::new(SingleFlight::new());
        let num_inside: Arc<[AtomicUsize; 3]> = Arc::default();
        let enter = |keys: [usize; 2]| -> Box<dyn FnOnce() + Send> {
            let (flights, num_inside) = (Arc::clone(&flights), Arc::clone(&num_inside));
            Box::new(move || {
                for key in keys {
                    let guard = flights.enter(key as u64).expect("nothing interrupts it");
                    assert_eq!(num_inside[key].fetch_add(1, Ordering::Relaxed), 0);
                    thread::yield_now();
                    num_inside[key].fetch_sub(1, Ordering::Relaxed);
                    drop(guard);
                }
            })
        };
        let held = flights.enter(2).expect("nothing interrupts it");
        let waiting = thread::spawn(enter([2, 2]));
        join(vec![enter([0, 1]), enter([1, 0]), enter([0, 0])]);
        drop(held);
        waiting.join().expect("it does not panic");
    });
}

/// A chunk is read by one thread at a time, and again only if that failed or it has been evicted; what
/// is found is that chunk.
pub fn chunks() {
    check_chunks(usize::MAX);
    check_chunks(0);
}

fn check_chunks(budget: usize) {
    static BUDGET: AtomicUsize = AtomicUsize::new(0);
    BUDGET.store(budget, Ordering::Relaxed);
    check(&[0], || {
        let budget = BUDGET.load(Ordering::Relaxed);
        chunk_cache::set_budget(budget);
        let cache = Arc::new(ChunkCache::default());
        let reads: Arc<[(AtomicUsize, AtomicUsize); 2]> = Arc::default();
        let reader = |chunks: [u64; 2], first_fails| -> Box<dyn FnOnce() + Send> {
            let (cache, reads) = (Arc::clone(&cache), Arc::clone(&reads));
            Box::new(move || {
                for (at, chunk) in chunks.into_iter().enumerate() {
                    let fails = first_fails && at == 0;
                    let found = read_chunk(&cache, &reads, chunk, fails);
                    assert!(found.is_none_or(|byte| u64::from(byte) == chunk));
                    assert!(found.is_some() || fails);
                }
            })
        };
        join(vec![reader([0, 1], false), reader([1, 0], true), reader([0, 0], false)]);
        for (chunk, (_, num_reads)) in reads.iter().enumerate() {
            let most = 1 + usize::from(chunk == 1);
            let num_reads = num_reads.load(Ordering::Relaxed);
            assert!(budget == 0 || num_reads <= most, "chunk {chunk}: {num_reads} reads");
        }
        drop((reads, cache));
        assert_eq!(chunk_cache::cached_bytes(), 0, "files are gone, their chunks are not");
    });
}

/// As threads read far chunks: look for it, wait for another reader, look again, read.
fn read_chunk(
    cache: &ChunkCache,
    reads: &[(AtomicUsize, AtomicUsize); 2],
    chunk: u64,
    fails: bool,
) -> Option<u8> {
    let key = (0, chunk);
    let find = || cache.find(std::iter::once((key, 1))).remove(0);
    let first = |records: ChunkRecords<'_>| records.get(0).map(|record| record[0]);
    if let Some(found) = find() {
        return first(found.records());
    }
    let _guard = cache.enter(key, 100).expect("nothing interrupts it");
    if let Some(found) = find() {
        return first(found.records());
    }
    let (num_reading, num_reads) = &reads[usize::try_from(chunk).expect("0 or 1")];
    assert_eq!(num_reading.fetch_add(1, Ordering::Relaxed), 0, "two read chunk {chunk}");
    num_reads.fetch_add(1, Ordering::Relaxed);
    thread::yield_now();
    num_reading.fetch_sub(1, Ordering::Relaxed);
    if fails {
        return None;
    }
    let value = [u8::try_from(chunk).expect("0 or 1"); NUM_RECORDS];
    let ends: Vec<_> = (1..=NUM_RECORDS).collect();
    cache.offer(key, &ChunkRecords::new(&value, &ends), 1, true);
    Some(value[0])
}

/// Whoever needs a unit gets its array, also one that has no room in the cache, and whose first decoding
/// failed; nothing stays reserved.
pub fn units() {
    check(&[0], || {
        let cache = Arc::new(Cache::new(LEN));
        let reader = |rows: [u8; 2], first_fails: bool| -> Box<dyn FnOnce() + Send> {
            let cache = Arc::clone(&cache);
            Box::new(move || {
                let keys: BTreeMap<_, _> = rows.map(|row| (row, key(row))).into();
                let found = read_units(&cache, &keys, first_fails);
                assert!(found.iter().all(|(row, array)| **array == vec![*row; LEN]));
                assert_eq!(found.len(), keys.len());
            })
        };
        join(vec![reader([0, 1], true), reader([1, 0], false), reader([1, 2], false)]);
        assert_eq!(cache.reserved(), 0, "bytes stay reserved");
        assert!(cache.byte_len() <= LEN);
    });
}

fn key(row: u8) -> Key {
    Key { file: 0, row_group: 0, column: 0, first_row: row.into() }
}

/// As rows are read: decode what nobody else decodes, then wait for the rest.
fn read_units(
    cache: &Cache,
    keys: &BTreeMap<u8, Key>,
    first_fails: bool,
) -> BTreeMap<u8, ArrayRef> {
    let decode = |row: u8| Arc::new(vec![row; LEN]);
    let claims = cache.claim(keys.values().map(|&key| (key, ESTIMATE)));
    let (mut arrays, mut slots, mut claimed) = (BTreeMap::new(), Vec::new(), Vec::new());
    for (number, ((&row, &key), claim)) in keys.iter().zip(claims).enumerate() {
        match claim {
            Claim::Found(array) => drop(arrays.insert(row, array)),
            Claim::Wait(slot) => slots.push((row, key, slot)),
            Claim::Decode(slot) => {
                let fails = first_fails && number == 0;
                cache.finish(key, &slot, (!fails).then(|| decode(row)));
                claimed.push(Arc::clone(&slot));
                slots.push((row, key, slot));
            }
        }
    }
    for (row, key, slot) in slots {
        let found = slot.wait().expect("nothing interrupts it").unwrap_or_else(|| {
            cache.finish(key, &slot, Some(decode(row)));
            slot.wait().expect("nothing interrupts it").expect("it was decoded")
        });
        arrays.insert(row, found);
    }
    for slot in claimed {
        slot.finish(None); // as where a thread has failed
    }
    arrays
}
