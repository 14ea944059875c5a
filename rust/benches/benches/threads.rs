//! What a read costs by the number of threads that read: CPU time, and how often a thread waits for another.
//!
//! With more threads than cores, the time of a read says little, but a lock that many want shows: a thread that
//! finds it taken sleeps, and each sleep is a voluntary switch. `cargo bench --bench threads`; Linux only.
#![expect(clippy::unwrap_used, reason = "a bench fails by panicking")]

use std::fs;
use std::io::{self, Write as _};
use std::mem::MaybeUninit;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use grainmill_core::formats::array_record::{ArrayRecord, RecordWriter};
use grainmill_core::io::{Job, Permit, ReadQueue};
use grainmill_core::read::{self, Files, SourceFile, open};

const NUM_THREADS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
const NUM_FILES: usize = 100;
const RECORDS_PER_FILE: u64 = 100;
/// Reads of all threads of a case together.
const NUM_READS: usize = 192_000;

/// A read that has ended as soon as it starts.
struct Ended;

impl Job for Ended {
    fn run_next(self: Arc<Self>) {}

    fn start_next(self: Arc<Self>, permit: Permit) -> Option<Permit> {
        drop(permit);
        None
    }
}

/// The CPU time of the calling thread, and how often it has waited.
fn usage() -> (Duration, u64) {
    let text = |name| fs::read_to_string(format!("/proc/thread-self/{name}")).unwrap();
    let number = |text: &str| text.trim().parse::<u64>().unwrap();
    let nanos = number(text("schedstat").split(' ').next().unwrap());
    let status = text("status");
    let switches = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    (Duration::from_nanos(nanos), number(switches.unwrap()))
}

/// CPU microseconds of a read, and waits in a thousand, where `num_threads` call `read` with numbers.
#[expect(clippy::cast_precision_loss, reason = "counts are small")]
fn measured(num_threads: usize, read: &(impl Fn(usize, u64) + Sync)) -> (f64, f64) {
    let start = Barrier::new(num_threads);
    let num_reads = NUM_READS / num_threads;
    let run = |thread: usize| {
        // Each its own numbers, by a generator of Knuth's.
        let mut number = thread as u64;
        start.wait();
        let before = usage();
        for _ in 0..num_reads {
            number = number
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            read(thread, number >> 33);
        }
        let after = usage();
        (after.0.saturating_sub(before.0), after.1 - before.1)
    };
    let used: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> =
            (0..num_threads).map(|thread| scope.spawn(move || run(thread))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let cpu: Duration = used.iter().map(|(cpu, _)| *cpu).sum();
    let waits: u64 = used.iter().map(|(_, waits)| waits).sum();
    let count = (num_reads * num_threads) as f64;
    (cpu.as_secs_f64() * 1e6 / count, waits as f64 * 1e3 / count)
}

fn table(name: &str, read: impl Fn(usize, u64) + Sync) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "\n| {name}: threads | CPU of a read, us | against one | waits in 1,000 |")?;
    writeln!(out, "| ---: | ---: | ---: | ---: |")?;
    let mut first = None;
    for num_threads in NUM_THREADS {
        let mut rounds: Vec<_> = (0..5).map(|_| measured(num_threads, &read)).collect();
        rounds.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (cpu, waits) = rounds[2];
        let factor = cpu / *first.get_or_insert(cpu);
        writeln!(out, "| {num_threads} | {cpu:.2} | {factor:.2} | {waits:.2} |")?;
    }
    Ok(())
}

fn main() -> io::Result<()> {
    let dir = tempfile::tempdir()?;
    let path = |number| dir.path().join(format!("{number}.array_record"));
    for number in 0..NUM_FILES {
        let options = "group_size:1,uncompressed".parse().unwrap();
        let mut writer = RecordWriter::create(path(number), options).unwrap();
        for record in 0..RECORDS_PER_FILE {
            writer.write(&[record.to_le_bytes()[0]; 100]).unwrap();
        }
        writer.close().unwrap();
    }
    let sources = (0..NUM_FILES).map(|number| SourceFile::from(path(number)));
    let files = Arc::new(Files::open(ArrayRecord, sources).unwrap());
    let read_one = |number: u64| {
        let plan = open::plan(&files, &[number]).unwrap();
        let none: Vec<Option<Vec<MaybeUninit<u8>>>> = Vec::new();
        assert_eq!(read::read(plan, none, ReadQueue::of_program()).unwrap().len(), 1);
    };
    table("records of 100 files", |_, number| read_one(number % files.len()))?;
    let of_first = |_, number: u64| read_one(number % RECORDS_PER_FILE);
    table("records of one file", of_first)?;
    let queues: Vec<_> = (0..64).map(|_| ReadQueue::default()).collect();
    table("requests, a queue for 8 threads", |thread, _| {
        queues[thread / 8].submit(Arc::new(Ended), 1);
    })?;
    table("requests, a queue each", |thread, _| {
        queues[thread].submit(Arc::new(Ended), 1);
    })
}
