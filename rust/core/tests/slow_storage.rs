//! Reads from slow storage: requests in flight, the order of records, errors and abandoned reads.
#![expect(clippy::unwrap_used, reason = "a test that cannot continue should fail")]

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use grainmill_core::bytes::ScatterBuffers;
use grainmill_core::formats::array_record::RecordWriter;
use grainmill_core::formats::{ArrayRecord, Format};
use grainmill_core::io::storage::{
    FileId, ReadAt, ReadRequest, ReopenedFile, Storage, StoredFile, WhenRead,
};
use grainmill_core::io::{Job, ReadQueue};
use grainmill_core::read::{self, FileSet, Files, Records, Scratch, SourceFile, open};
use grainmill_core::{Error, Result};
use proptest::prelude::*;

/// Files in memory with a configurable delay for each read.
#[derive(Debug, Default)]
struct SlowFiles {
    files: Mutex<HashMap<PathBuf, Arc<Vec<u8>>>>,
    delay_us: AtomicUsize,
    num_opened: AtomicUsize,
    num_reads: AtomicUsize,
    num_bytes_read: AtomicUsize,
    in_flight: AtomicUsize,
    max_in_flight: AtomicUsize,
    /// How many reads must have been in flight at once before any ends.
    holds_until: AtomicUsize,
    fails: AtomicUsize,
    /// Whether reads can be requested, and how many were.
    has_requests: AtomicBool,
    num_requests: AtomicUsize,
    /// Whether the storage forgets what was requested.
    forgets: AtomicBool,
    /// Whether it panics when a read is to be requested, or has been.
    panics: [AtomicBool; 2],
}

#[derive(Debug, Clone)]
struct SlowFile {
    storage: Arc<SlowFiles>,
    path: PathBuf,
    bytes: Arc<Vec<u8>>,
}

/// A `Storage` that shares its files with the test.
#[derive(Debug, Clone, Default)]
struct Shared(Arc<SlowFiles>);

impl Storage for Shared {
    fn open(&self, path: &Path) -> Result<(Box<dyn StoredFile>, Arc<dyn ReadAt>)> {
        self.0.num_opened.fetch_add(1, Ordering::Relaxed);
        let bytes = self.0.files.lock().unwrap().get(path).cloned();
        let bytes = bytes.ok_or_else(|| {
            Error::io(path, "open", std::io::Error::from(std::io::ErrorKind::NotFound))
        })?;
        let file = || SlowFile {
            storage: Arc::clone(&self.0),
            path: path.to_owned(),
            bytes: Arc::clone(&bytes),
        };
        Ok((Box::new(file()), Arc::new(file())))
    }
}

impl StoredFile for SlowFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn byte_len(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn modified_ns(&self) -> i64 {
        7
    }

    fn reopen(&self, _: bool) -> Result<ReopenedFile> {
        let (storage, path, bytes) =
            (Arc::clone(&self.storage), self.path.clone(), Arc::clone(&self.bytes));
        Ok(ReopenedFile { bytes: Arc::new(SlowFile { storage, path, bytes }), new_id: None })
    }

    fn accept_id(&self, _: FileId) {}

    fn has_requests(&self) -> bool {
        self.storage.has_requests.load(Ordering::Relaxed)
    }
}

impl SlowFile {
    fn begin_read(&self) {
        let storage = &self.storage;
        storage.num_reads.fetch_add(1, Ordering::Relaxed);
        let now = storage.in_flight.fetch_add(1, Ordering::Relaxed) + 1;
        storage.max_in_flight.fetch_max(now, Ordering::Relaxed);
    }

    fn end_read(&self, out: &mut [u8], at: u64) -> Result<()> {
        let storage = &self.storage;
        let delay = storage.delay_us.load(Ordering::Relaxed);
        if delay > 0 {
            std::thread::sleep(Duration::from_micros(delay as u64));
        }
        let since = Instant::now();
        while storage.max_in_flight.load(Ordering::Relaxed)
            < storage.holds_until.load(Ordering::Relaxed)
            && since.elapsed() < Duration::from_secs(20)
        {
            std::thread::sleep(Duration::from_micros(200));
        }
        storage.in_flight.fetch_sub(1, Ordering::Relaxed);
        if storage.fails.load(Ordering::Relaxed) > 0 {
            return Err(Error::Changed { path: self.path.display().to_string() });
        }
        let at = usize::try_from(at).unwrap();
        out.copy_from_slice(&self.bytes[at..at + out.len()]);
        Ok(())
    }
}

impl ReadAt for SlowFile {
    fn read_at(&self, out: &mut [u8], at: u64) -> Result<()> {
        self.storage.num_bytes_read.fetch_add(out.len(), Ordering::Relaxed);
        self.begin_read();
        self.end_read(out, at)
    }

    fn read_scattered(&self, buffers: &mut ScatterBuffers<'_>, at: u64) -> Result<()> {
        let mut bytes = vec![0; buffers.byte_len()];
        self.read_at(&mut bytes, at)?;
        buffers.fill(&bytes);
        Ok(())
    }

    fn request(&self, range: Range<u64>) -> Option<Box<dyn ReadRequest>> {
        assert!(!self.storage.panics[0].load(Ordering::Relaxed), "expected by the test");
        self.has_requests().then(|| Box::new(SlowRequest(self.clone(), range)) as _)
    }
}

struct SlowRequest(SlowFile, Range<u64>);

impl ReadRequest for SlowRequest {
    /// Reads on a new thread, and passes the bytes on in uneven pieces.
    fn send(self: Box<Self>, when_read: WhenRead) {
        let Self(file, range) = *self;
        assert!(!file.storage.panics[1].load(Ordering::Relaxed), "expected by the test");
        file.storage.num_requests.fetch_add(1, Ordering::Relaxed);
        file.begin_read();
        std::thread::spawn(move || {
            if file.storage.forgets.load(Ordering::Relaxed) {
                return;
            }
            let mut bytes = vec![0; usize::try_from(range.end - range.start).unwrap()];
            match file.end_read(&mut bytes, range.start) {
                Ok(()) => {
                    let (front, rest) = bytes.split_at(bytes.len() / 3);
                    when_read(Ok(&[front, &[], &rest[..1], &rest[1..]]));
                }
                Err(error) => when_read(Err(error)),
            }
        });
    }
}

impl Shared {
    /// Adds a file of `num_records` records, each of `len` bytes that repeat its number.
    fn add(&self, name: &str, num_records: u64, len: usize, options: &str) -> SourceFile {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("written");
        let mut writer = RecordWriter::create(&path, options.parse().unwrap()).unwrap();
        for number in 0..num_records {
            writer.write(&record(number, len)).unwrap();
        }
        writer.close().unwrap();
        let bytes = Arc::new(std::fs::read(&path).unwrap());
        self.0.files.lock().unwrap().insert(PathBuf::from(name), bytes);
        SourceFile::from(PathBuf::from(name))
    }

    fn set_delay_us(&self, delay: usize) {
        self.0.delay_us.store(delay, Ordering::Relaxed);
    }

    /// Makes reads wait for each other until `count` are in flight, however busy the machine is.
    fn hold_until(&self, count: usize) {
        self.0.max_in_flight.store(0, Ordering::Relaxed);
        self.0.holds_until.store(count, Ordering::Relaxed);
    }

    /// The maximum number of reads in flight since the last call. No read waits for others any more.
    fn take_max_in_flight(&self) -> usize {
        self.0.holds_until.store(0, Ordering::Relaxed);
        self.0.max_in_flight.swap(0, Ordering::Relaxed)
    }

    fn set_has_requests(&self, has_requests: bool) {
        self.0.has_requests.store(has_requests, Ordering::Relaxed);
    }

    fn take_num_requests(&self) -> usize {
        self.0.num_requests.swap(0, Ordering::Relaxed)
    }

    fn take_num_reads(&self) -> usize {
        self.0.num_reads.swap(0, Ordering::Relaxed)
    }

    fn open(&self, sources: impl IntoIterator<Item = SourceFile>) -> Arc<Files> {
        let storage: Arc<dyn Storage> = Arc::new(self.clone());
        Arc::new(
            open::open(FileSet::in_storage(
                &storage,
                &(Arc::new(ArrayRecord) as Arc<dyn Format>),
                sources,
            ))
            .unwrap(),
        )
    }
}

fn record(number: u64, len: usize) -> Vec<u8> {
    number.to_le_bytes().iter().copied().cycle().take(len).collect()
}

/// All of `len` positions in a scattered order.
fn scattered(len: u64) -> Vec<u64> {
    (0..len).map(|at| at * 617 % len).collect()
}

fn read(files: &Arc<Files>, positions: &[u64], queue: &ReadQueue) -> Records {
    read::read::<Vec<MaybeUninit<u8>>>(open::plan(files, positions).unwrap(), Vec::new(), queue)
        .unwrap()
}

fn assert_are(records: &Records, positions: &[u64], len: usize) {
    assert_eq!(records.len(), positions.len());
    for (&position, found) in positions.iter().zip(records.iter()) {
        assert_eq!(found, record(position, len), "record {position}");
    }
}

/// Files whose storage is slow and has been classified as slow.
fn slow(storage: &Shared, sources: impl IntoIterator<Item = SourceFile>) -> Arc<Files> {
    let files = storage.open(sources);
    storage.set_delay_us(4000);
    let queue = ReadQueue::new(64);
    // Another chunk each time, since chunks may be cached.
    for position in (0..).step_by(17) {
        if files.is_slow() {
            break;
        }
        read(&files, &[position], &queue);
    }
    storage.take_max_in_flight();
    files
}

#[test]
fn reads_in_flight_reach_the_limit_and_records_stay_in_order() {
    let storage = Shared::default();
    // Too long to be merged into one read.
    let source = storage.add("file", 1000, 70_000, "group_size:1,uncompressed");
    let files = slow(&storage, [source]);
    for (max_in_flight, has_requests) in
        [1, 7, 100].into_iter().flat_map(|max| [(max, false), (max, true)])
    {
        storage.set_has_requests(has_requests);
        storage.take_num_requests();
        let queue = ReadQueue::new(max_in_flight);
        let blocks: Vec<Vec<u64>> = scattered(1000)
            .chunks(20)
            .take(if max_in_flight < 100 { 3 } else { 20 })
            .map(Vec::from)
            .collect();
        storage.hold_until(max_in_flight);
        let pending: Vec<_> = blocks
            .iter()
            .map(|block| {
                let slots = vec![Some(vec![MaybeUninit::uninit(); 70_000]); 20];
                read::start(open::plan(&files, block).unwrap(), slots, &queue)
            })
            .collect();
        // Records in slots are dropped here; lengths and errors are still returned.
        for pending in pending {
            assert_eq!(pending.finish().unwrap().len(), 20);
        }
        assert_eq!(storage.take_max_in_flight(), max_in_flight);
        let num_requested = if has_requests { 20 * blocks.len() } else { 0 };
        assert_eq!(storage.take_num_requests(), num_requested);
        let records = read(&files, &blocks[0], &queue);
        assert_are(&records, &blocks[0], 70_000);
    }
}

#[test]
fn block_whose_storage_turns_out_to_be_slow_is_read_concurrently() {
    let storage = Shared::default();
    let files = storage.open([storage.add("file", 3000, 1000, "group_size:1,uncompressed")]);
    assert!(!files.is_slow());
    storage.set_delay_us(10_000);
    storage.take_max_in_flight();
    let positions = scattered(3000)[..64].to_vec();
    let records = read(&files, &positions, &ReadQueue::default());
    assert_are(&records, &positions, 1000);
    assert!(files.is_slow());
    assert!(storage.take_max_in_flight() >= 16);
    storage.set_delay_us(0);
    for _ in 0..10 {
        read(&files, &positions, &ReadQueue::default());
    }
    assert!(!files.is_slow(), "the storage is fast again");
}

#[test]
fn reads_that_were_planned_as_fast_do_not_follow_each_other_on_slow_storage() {
    let storage = Shared::default();
    let files = storage.open([storage.add("file", 3000, 1000, "group_size:1,uncompressed")]);
    let plan = open::plan(&files, &scattered(3000)[..64]).unwrap();
    let unit = plan.whole::<Vec<MaybeUninit<u8>>>(Vec::new());
    storage.set_delay_us(10_000);
    while !files.is_slow() {
        read(&files, &[5], &ReadQueue::default());
    }
    storage.take_num_reads();
    let mut scratch = Scratch::default();
    let mut rest = Some(unit);
    let mut records = Vec::new();
    while let Some(unit) = rest {
        let outcome = plan.read(unit, &mut scratch, true).unwrap();
        assert_eq!(storage.take_num_reads(), 1);
        records.push(outcome.records);
        rest = outcome.rest;
    }
    assert_are(&plan.gather(records), &scattered(3000)[..64], 1000);
}

#[test]
fn long_index_of_a_far_file_is_read_once_and_by_few_reads() {
    let storage = Shared::default();
    let source = storage.add("file", 200_000, 8, "group_size:1,uncompressed");
    storage.set_delay_us(5000);
    let files = storage.open([source]);
    let num_reads = storage.take_num_reads();
    assert!(num_reads <= 3, "{num_reads}: the end, a window, and as much as there is");
    let positions = [199_999, 0, 100_000];
    assert_are(&read(&files, &positions, &ReadQueue::default()), &positions, 8);
    assert_eq!(storage.take_num_reads(), 3);
}

#[test]
fn many_files_are_opened_concurrently_with_one_read_each() {
    let storage = Shared::default();
    let first = storage.add("0", 10, 10, "group_size:1");
    let bytes = storage.0.files.lock().unwrap()[&first.path].clone();
    let sources: Vec<SourceFile> =
        (0..600).map(|number| SourceFile::from(PathBuf::from(number.to_string()))).collect();
    for source in &sources {
        storage.0.files.lock().unwrap().insert(source.path.clone(), Arc::clone(&bytes));
    }
    storage.set_delay_us(5000);
    let files = storage.open(sources);
    assert_eq!(files.len(), 6000);
    assert_eq!(storage.take_num_reads(), 600);
    let num_bytes = storage.0.num_bytes_read.load(Ordering::Relaxed);
    assert!(num_bytes <= 600 * (65 << 10), "{num_bytes}: a block, and the postscript");
    assert!(storage.take_max_in_flight() >= 64);
    assert!(files.is_slow());
}

#[test]
fn files_of_known_length_are_opened_when_read_and_concurrently() {
    let storage = Shared::default();
    let sources: Vec<SourceFile> = (0..200)
        .map(|number| SourceFile {
            take: Some(10),
            ..storage.add(&format!("{number}"), 10, 100, "group_size:1,uncompressed")
        })
        .collect();
    let num_opened = || storage.0.num_opened.load(Ordering::Relaxed);
    for is_started_first in [false, true] {
        storage.0.num_opened.store(0, Ordering::Relaxed);
        let files = storage.open(sources.clone());
        assert_eq!((files.len(), num_opened()), (2000, 0));
        storage.set_delay_us(5000);
        storage.take_max_in_flight();
        let positions: Vec<u64> = (0..60).rev().map(|file| 10 * file + file % 10).collect();
        let queue = ReadQueue::default();
        let records = if is_started_first {
            let sorted = files.sort(&positions).unwrap();
            let unready = files.plan_if_indexed(&sorted).unwrap().unwrap_err();
            assert_eq!(unready.len(), 60);
            read::start_unready::<Vec<MaybeUninit<u8>>>(&files, sorted, unready, &queue)
                .finish()
                .unwrap()
        } else {
            read(&files, &positions, &queue)
        };
        let expected: Vec<u64> = positions.iter().map(|position| position % 10).collect();
        assert_are(&records, &expected, 100);
        assert_eq!(num_opened(), 60);
        assert!(storage.take_max_in_flight() >= 20);
        storage.set_delay_us(0);
    }
}

#[test]
fn joined_files_are_read_as_one_sequence_and_opened_once() {
    let storage = Shared::default();
    let lens: [u64; 4] = [5, 0, 3, 7];
    let datasets: Vec<Arc<Files>> = lens
        .iter()
        .map(|&len| storage.open([storage.add(&format!("file {len}"), len, 100, "group_size:2")]))
        .collect();
    let num_opened = storage.0.num_opened.load(Ordering::Relaxed);
    let joined = Arc::new(Files::joined(datasets.iter().map(|dataset| &**dataset)).unwrap());
    assert_eq!(joined.num_records().collect::<Vec<_>>(), lens);
    let expected: Vec<Vec<u8>> =
        lens.iter().flat_map(|&len| (0..len).map(|number| record(number, 100))).collect();
    let positions: Vec<u64> = (0..15).rev().chain([3, 14, 5, 5]).collect();
    let records = read(&joined, &positions, &ReadQueue::default());
    for (found, &position) in records.iter().zip(&positions) {
        assert_eq!(found, expected[usize::try_from(position).unwrap()]);
    }
    assert_eq!(storage.0.num_opened.load(Ordering::Relaxed), num_opened);
    assert!(joined.sort(&[15]).is_err());
}

#[test]
fn missing_files_and_failing_reads_are_errors_of_their_pending_reads() {
    let storage = Shared::default();
    let source = storage.add("file", 500, 5000, "group_size:1,uncompressed");
    let missing = SourceFile { take: Some(10), ..SourceFile::from(PathBuf::from("missing")) };
    let files = slow(&storage, [source, missing]);
    let queue = ReadQueue::default();
    let sorted = files.sort(&[3, 505]).unwrap();
    let unready = files.plan_if_indexed(&sorted).unwrap().unwrap_err();
    assert_eq!(unready, [1]);
    let pending = read::start_unready::<Vec<MaybeUninit<u8>>>(&files, sorted, unready, &queue);
    assert!(pending.finish().unwrap_err().to_string().contains("missing"));
    storage.0.fails.store(1, Ordering::Relaxed);
    for has_requests in [false, true] {
        storage.set_has_requests(has_requests);
        let plan = files.plan(&scattered(500)[..50]).unwrap();
        let pending = read::start::<Vec<MaybeUninit<u8>>>(plan, Vec::new(), &queue);
        assert!(pending.finish().unwrap_err().to_string().contains("file"));
    }
    assert!(storage.take_num_requests() > 0);
}

#[test]
fn damage_is_reported_alike_whoever_reads_it() {
    let storage = Shared::default();
    for (name, options) in [("direct", "uncompressed"), ("decoded", "zstd")] {
        let source = storage.add(name, 300, 5000, &format!("group_size:1,{options}"));
        let files = slow(&storage, [source]);
        let num_records = files.len();
        let mut bytes = (*storage.0.files.lock().unwrap()[Path::new(name)]).clone();
        for at in (1000..bytes.len() / 8).step_by(bytes.len() / 200 + 3) {
            bytes[at] ^= 1;
        }
        storage.0.files.lock().unwrap().insert(PathBuf::from(name), Arc::new(bytes));
        let files_of_damaged = storage.open([SourceFile::from(PathBuf::from(name))]);
        let found = |has_requests| -> Vec<String> {
            storage.set_has_requests(has_requests);
            while !files_of_damaged.is_slow() {
                let _ = open::plan(&files_of_damaged, &[0]).and_then(|plan| {
                    read::read::<Vec<MaybeUninit<u8>>>(plan, Vec::new(), ReadQueue::of_program())
                });
            }
            let read = |number| {
                let slots = vec![Some(vec![MaybeUninit::uninit(); 5000])];
                let plan = open::plan(&files_of_damaged, &[number]).unwrap();
                read::start(plan, slots, &ReadQueue::default()).finish()
            };
            let text = |result: Result<Records>| {
                result.map_or_else(|error| error.to_string(), |_| String::new())
            };
            (0..num_records).map(|number| text(read(number))).collect()
        };
        let by_threads = found(false);
        assert_eq!(storage.take_num_requests(), 0);
        assert_eq!(found(true), by_threads);
        assert!(storage.take_num_requests() > 0);
        assert!(by_threads.iter().filter(|text| text.contains("chunk")).count() > 5);
        assert!(by_threads.iter().filter(|text| text.is_empty()).count() > 5);
        storage.set_delay_us(0);
    }
}

#[test]
fn requests_that_a_storage_forgets_are_errors_and_block_nothing() {
    let storage = Shared::default();
    let files = slow(&storage, [storage.add("file", 500, 5000, "group_size:1,uncompressed")]);
    storage.set_has_requests(true);
    storage.0.forgets.store(true, Ordering::Relaxed);
    let queue = ReadQueue::new(2);
    let plan = files.plan(&scattered(500)[..50]).unwrap();
    let pending = read::start::<Vec<MaybeUninit<u8>>>(plan, Vec::new(), &queue);
    assert!(pending.finish().unwrap_err().to_string().contains("panicked"));
    assert!(storage.take_num_requests() > 2);
    storage.0.forgets.store(false, Ordering::Relaxed);
    let records = read(&files, &[5, 3], &queue);
    assert_are(&records, &[5, 3], 5000);
}

#[test]
fn abandoned_reads_end_after_those_in_flight() {
    let storage = Shared::default();
    let files = slow(&storage, [storage.add("file", 2000, 5000, "group_size:1,uncompressed")]);
    for has_requests in [false, true] {
        storage.set_has_requests(has_requests);
        let queue = ReadQueue::new(4);
        storage.take_num_reads();
        let plan = open::plan(&files, &scattered(2000)).unwrap();
        let pending = read::start::<Vec<MaybeUninit<u8>>>(plan, Vec::new(), &queue);
        pending.abandon(|| ());
        while pending.is_running() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(storage.take_num_reads() < 200);
        let records = read(&files, &[5, 3], &queue);
        assert_are(&records, &[5, 3], 5000);
    }
}

#[test]
fn far_files_of_a_mixture_are_read_like_far_files_alone() {
    let (near, far) = (Shared::default(), Shared::default());
    let near_files = near.open([near.add("near", 3000, 5000, "group_size:1,uncompressed")]);
    let far_files = slow(&far, [far.add("far", 300, 70_000, "group_size:1,uncompressed")]);
    let joined = Arc::new(Files::joined([&*near_files, &far_files]).unwrap());
    assert!(joined.is_slow() && !near_files.is_slow());
    let queue = ReadQueue::default();
    // Each block has 60 near records for each far one, and there are 20 of these.
    for round in 0..3 {
        let mut positions = scattered(3000)[..1200].to_vec();
        for at in 0..20 {
            positions.insert(at * 61 + 30, 3000 + (round * 20 + at as u64) * 7 % 300);
        }
        let plan = open::plan(&joined, &positions).unwrap();
        assert!(plan.is_slow());
        far.hold_until(15);
        let records = read::start::<Vec<MaybeUninit<u8>>>(plan, Vec::new(), &queue);
        let records = records.finish().unwrap();
        assert!(far.take_max_in_flight() >= 15);
        for (&position, found) in positions.iter().zip(records.iter()) {
            let expected = match position.checked_sub(3000) {
                Some(position) => record(position, 70_000),
                None => record(position, 5000),
            };
            assert_eq!(found, expected, "record {position}");
        }
        // Thousands of fast reads do not make the far storage near.
        for positions in scattered(3000).chunks(100) {
            let plan = open::plan(&joined, positions).unwrap();
            assert!(!plan.is_slow());
            read(&joined, positions, &queue);
        }
        assert!(joined.is_slow() && far_files.is_slow() && !near_files.is_slow());
    }
    let before = joined.read_totals().reads;
    read(&far_files, &[299], &queue);
    assert_eq!(joined.read_totals().reads, before, "counts are those of the set");
}

/// Memory of a record that counts how many there are.
struct Counted(Vec<MaybeUninit<u8>>, Arc<AtomicUsize>);

impl AsMut<[MaybeUninit<u8>]> for Counted {
    fn as_mut(&mut self) -> &mut [MaybeUninit<u8>] {
        &mut self.0
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.1.fetch_sub(1, Ordering::Relaxed);
    }
}

fn counted(count: usize, len: usize) -> (Vec<Option<Counted>>, Arc<AtomicUsize>) {
    let left = Arc::new(AtomicUsize::new(count));
    let slot = || Some(Counted(vec![MaybeUninit::uninit(); len], Arc::clone(&left)));
    (std::iter::repeat_with(slot).take(count).collect(), left)
}

#[test]
fn abandoned_reads_keep_only_what_is_being_written() {
    static NUM_DONE: AtomicUsize = AtomicUsize::new(0);
    let storage = Shared::default();
    let files = slow(&storage, [storage.add("file", 300, 70_000, "group_size:1,uncompressed")]);
    for (round, has_requests) in [false, true].into_iter().enumerate() {
        storage.set_has_requests(has_requests);
        storage.set_delay_us(100_000);
        let plan = open::plan(&files, &scattered(300)).unwrap();
        let (slots, left) = counted(300, 70_000);
        let pending = read::start(plan, slots, &ReadQueue::new(8));
        while storage.0.in_flight.load(Ordering::Relaxed) < 8 {
            std::thread::yield_now();
        }
        let is_done = pending.abandon(|| {
            NUM_DONE.fetch_add(1, Ordering::Relaxed);
        });
        assert!(!is_done && left.load(Ordering::Relaxed) <= 8);
        while pending.is_running() {
            std::thread::sleep(Duration::from_millis(1));
        }
        while NUM_DONE.load(Ordering::Relaxed) <= round {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(left.load(Ordering::Relaxed), 0);
        if has_requests {
            storage.set_delay_us(0);
            let again = pending.finish().unwrap();
            assert!(again.iter_unslotted().all(|record| record.is_some()), "not into slots");
        }
    }
}

#[test]
fn no_slot_is_written_after_a_read_in_which_the_storage_panicked() {
    let storage = Shared::default();
    let files = slow(&storage, [storage.add("file", 300, 70_000, "group_size:1,uncompressed")]);
    storage.set_has_requests(true);
    for (at, panics) in storage.0.panics.iter().enumerate() {
        let plan = open::plan(&files, &scattered(300)).unwrap();
        let (slots, left) = counted(300, 70_000);
        let pending = read::start(plan, slots, &ReadQueue::new(8));
        panics.store(true, Ordering::Relaxed);
        let found = pending.finish();
        assert!(!pending.is_running());
        assert_eq!(left.load(Ordering::Relaxed), 0);
        // Threads that read take over where nothing can be requested.
        assert_eq!(found.is_ok(), at == 0);
        panics.store(false, Ordering::Relaxed);
    }
}

/// The positions `0..len`, each window of `window` in a scattered order.
fn window_order(len: u64, window: u64) -> Vec<u64> {
    let fits = |step: &u64| step % 2 == 1 && !window.is_multiple_of(*step);
    let step = (window / 2..=window + 2).find(fits).unwrap();
    let within = |begin: u64| (0..window).map(move |at| begin + at * step % window);
    (0..len / window).flat_map(|number| within(number * window)).collect()
}

#[test]
fn orders_with_locality_fetch_each_chunk_once() {
    let storage = Shared::default();
    let source = storage.add("grouped", 8192, 300, "group_size:16");
    for is_slow in [false, true] {
        let files =
            if is_slow { slow(&storage, [source.clone()]) } else { storage.open([source.clone()]) };
        for order in [window_order(8192, 512), (0..8192).collect::<Vec<u64>>()] {
            let files = if is_slow { Arc::clone(&files) } else { storage.open([source.clone()]) };
            storage.take_num_reads();
            let queue = ReadQueue::default();
            for positions in order.chunks(40) {
                assert_are(&read(&files, positions, &queue), positions, 300);
            }
            let num_reads = storage.take_num_reads();
            assert!(num_reads <= 8192 / 16 + 8, "{num_reads}, slow: {is_slow}");
        }
        storage.set_delay_us(0);
    }
}

/// A job that says when it starts, and waits there if it is the first.
struct Told {
    number: usize,
    started: Arc<Mutex<Vec<usize>>>,
    may_go_on: Option<Arc<Barrier>>,
}

impl Job for Told {
    fn run_next(self: Arc<Self>) {
        self.started.lock().unwrap().push(self.number);
        if let Some(may_go_on) = &self.may_go_on {
            may_go_on.wait();
        }
    }
}

/// In which order jobs start that are submitted, numbered from 1, by the owners named, while another runs.
fn order_of_starts(owners: &[usize]) -> Vec<usize> {
    let queue = ReadQueue::new(1);
    let handles: Vec<_> = (0..4).map(|_| queue.for_another_owner()).collect();
    let (started, all_submitted) = (Arc::default(), Arc::new(Barrier::new(2)));
    let job = |number, may_go_on| Told { number, started: Arc::clone(&started), may_go_on };
    queue.submit(Arc::new(job(0, Some(Arc::clone(&all_submitted)))), 1);
    for (number, &owner) in (1..).zip(owners) {
        handles[owner].submit(Arc::new(job(number, None)), 1);
    }
    all_submitted.wait();
    while started.lock().unwrap().len() <= owners.len() {
        std::thread::yield_now();
    }
    started.lock().unwrap().split_off(1)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn owners_of_a_queue_take_turns_and_each_is_served_in_its_order(
        owners in proptest::collection::vec(prop_oneof![3 => Just(0_usize), 1 => 0..4_usize], 0..60)
    ) {
        let mut rounds: Vec<Vec<usize>> = Vec::new();
        let mut owners_of: Vec<usize> = Vec::new();
        for &owner in &owners {
            if !owners_of.contains(&owner) {
                owners_of.push(owner);
            }
        }
        // One read of each owner that still has one, in the order in which they came.
        for round in 0..owners.len() {
            let nth = |owner: &usize| (1..).zip(&owners).filter(|(_, of)| *of == owner).nth(round);
            rounds.push(owners_of.iter().filter_map(nth).map(|(number, _)| number).collect());
        }
        prop_assert_eq!(order_of_starts(&owners), rounds.concat());
    }
}

#[test]
fn raised_limit_starts_what_waits_and_lowered_one_nothing_until_fewer_are_in_flight() {
    let storage = Shared::default();
    let files = slow(&storage, [storage.add("file", 2000, 5000, "group_size:1,uncompressed")]);
    for has_requests in [false, true] {
        storage.set_has_requests(has_requests);
        let queue = ReadQueue::new(2);
        for limit in [2, 40, 3, 12] {
            let positions = &scattered(2000)[..40 * limit];
            let plan = open::plan(&files, positions).unwrap();
            let before = queue.max_in_flight();
            let is_lower = limit < before;
            storage.hold_until(if is_lower { usize::MAX } else { limit });
            let pending = read::start::<Vec<MaybeUninit<u8>>>(plan, Vec::new(), &queue);
            let in_flight = || storage.0.in_flight.load(Ordering::Relaxed);
            while is_lower && in_flight() < before {
                std::thread::yield_now();
            }
            queue.set_max_in_flight(limit);
            if is_lower {
                storage.take_max_in_flight(); // lets them end
                while in_flight() > limit {
                    std::thread::yield_now();
                }
                storage.take_max_in_flight();
            }
            assert_are(&pending.finish().unwrap(), positions, 5000);
            let found = storage.take_max_in_flight();
            assert!(found == limit || is_lower && found < limit, "{found} of {limit}");
        }
    }
}
