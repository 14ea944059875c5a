//! Files that are read from begin to end: requests in flight, errors, compressed and damaged data.
#![expect(clippy::unwrap_used, reason = "a test that cannot continue should fail")]

use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use grainmill_core::bytes::ScatterBuffers;
use grainmill_core::formats::FormatError;
use grainmill_core::formats::checksum::crc32c;
use grainmill_core::formats::json_lines::JsonLines;
use grainmill_core::formats::scanned::{Compression, MayBeCompressed};
use grainmill_core::formats::sequential::{Frame, Frames, RecordBlock, RecordCursor, RecordStream};
use grainmill_core::formats::tfrecord::TfRecord;
use grainmill_core::io::storage::{FileId, ReadAt, ReopenedFile, StartedRead, Storage, StoredFile};
use grainmill_core::io::{FileBytes, Permit};
use grainmill_core::{Error, Result};
use proptest::prelude::*;

/// One file in memory, whose reads are requests.
#[derive(Debug, Default)]
struct Counters {
    in_flight: AtomicU64,
    max_in_flight: AtomicU64,
    num_reads: AtomicUsize,
    /// Every read with a number that this divides fails; none if it is 0.
    fails: AtomicUsize,
}

#[derive(Debug, Clone)]
struct Far {
    bytes: Arc<Vec<u8>>,
    counters: Arc<Counters>,
    starts_reads: bool,
}

impl Far {
    fn new(bytes: &[u8], starts_reads: bool) -> Self {
        Self { bytes: Arc::new(bytes.to_vec()), counters: Arc::default(), starts_reads }
    }

    fn range(&self, range: Range<u64>) -> Result<Vec<u8>> {
        let number = self.counters.num_reads.fetch_add(1, Ordering::Relaxed);
        let fails = self.counters.fails.load(Ordering::Relaxed);
        if fails > 0 && number.is_multiple_of(fails) {
            return Err(Error::Changed { path: "far".to_owned() });
        }
        let index = |at| usize::try_from(at).unwrap();
        let bytes = self.bytes.get(index(range.start)..index(range.end));
        bytes.map(<[u8]>::to_vec).ok_or_else(|| Error::Changed { path: "far".to_owned() })
    }
}

impl Storage for Far {
    fn open(&self, _: &Path) -> Result<(Box<dyn StoredFile>, Arc<dyn ReadAt>)> {
        Ok((Box::new(self.clone()), Arc::new(self.clone())))
    }

    fn is_remote(&self, _: &Path) -> bool {
        true
    }
}

impl StoredFile for Far {
    fn path(&self) -> &Path {
        Path::new("far")
    }

    fn byte_len(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn modified_ns(&self) -> i64 {
        7
    }

    fn reopen(&self, _: bool) -> Result<ReopenedFile> {
        Ok(ReopenedFile { bytes: Arc::new(self.clone()), new_id: None })
    }

    fn accept_id(&self, _: FileId) {}
}

impl ReadAt for Far {
    fn read_at(&self, out: &mut [u8], at: u64) -> Result<()> {
        out.copy_from_slice(&self.range(at..at + out.len() as u64)?);
        Ok(())
    }

    fn read_scattered(&self, _: &mut ScatterBuffers<'_>, _: u64) -> Result<()> {
        unreachable!("nothing that reads forwards does this")
    }

    fn start(&self, range: Range<u64>, permit: Permit) -> Option<Box<dyn StartedRead>> {
        if !self.starts_reads {
            return None;
        }
        let len = range.end - range.start;
        let now = self.counters.in_flight.fetch_add(len, Ordering::Relaxed) + len;
        self.counters.max_in_flight.fetch_max(now, Ordering::Relaxed);
        Some(Box::new(InFlight { far: self.clone(), range, _permit: permit }))
    }
}

struct InFlight {
    far: Far,
    range: Range<u64>,
    _permit: Permit,
}

impl StartedRead for InFlight {
    fn wait(self: Box<Self>) -> Result<Vec<u8>> {
        std::thread::sleep(std::time::Duration::from_millis(2));
        self.far.range(self.range.clone())
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let len = self.range.end - self.range.start;
        self.far.counters.in_flight.fetch_sub(len, Ordering::Relaxed);
    }
}

fn tfrecord(records: &[Vec<u8>]) -> Vec<u8> {
    let mut out = Vec::new();
    for record in records {
        let len = (record.len() as u64).to_le_bytes();
        for part in [&len[..], record] {
            out.extend_from_slice(part);
            out.extend_from_slice(&crc32c::masked(part).to_le_bytes());
        }
    }
    out
}

fn compressed(bytes: &[u8], compression: Compression) -> Vec<u8> {
    match compression {
        Compression::None => bytes.to_vec(),
        Compression::Gzip => {
            let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::new(3));
            out.write_all(bytes).unwrap();
            out.finish().unwrap()
        }
        Compression::Zlib => {
            let mut out = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::new(3));
            out.write_all(bytes).unwrap();
            out.finish().unwrap()
        }
        Compression::Zstd => {
            let frame = |part: &[u8]| {
                let mut out = Vec::with_capacity(zstd_safe::compress_bound(part.len()));
                zstd_safe::compress(&mut out, part, 1).unwrap();
                out
            };
            let (first, second) = bytes.split_at(bytes.len() / 2);
            [frame(first), b"\x50\x2a\x4d\x18\x02\0\0\0..".to_vec(), frame(second)].concat()
        }
        Compression::Xz => {
            let stream = |part: &[u8]| {
                let mut out = liblzma::write::XzEncoder::new(Vec::new(), 1);
                out.write_all(part).unwrap();
                out.finish().unwrap()
            };
            let (first, second) = bytes.split_at(bytes.len() / 2);
            [stream(first), vec![0; 8], stream(second)].concat()
        }
        Compression::Bzip2 => {
            let stream = |part: &[u8]| {
                let mut out = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
                out.write_all(part).unwrap();
                out.finish().unwrap()
            };
            let (first, second) = bytes.split_at(bytes.len() / 2);
            [stream(first), stream(second)].concat()
        }
    }
}

const ALL: [Compression; 6] = Compression::ALL;

fn opened(far: &Far, frames: Box<dyn Frames>) -> Result<RecordStream> {
    RecordStream::open(far, &PathBuf::from("far"), frames)
}

fn records() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let record = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..40),
        (0..255_u8, 0..200_000_usize).prop_map(|(byte, len)| vec![byte; len]),
    ];
    prop::collection::vec(record, 0..40)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(30))]

    #[test]
    fn bytes_are_those_of_the_file_wherever_it_is_read(
        len in 0..3_000_000_usize,
        reads in prop::collection::vec((0..600_000_usize, prop::option::of(0..3_200_000_u64)), 1..20),
        starts_reads in any::<bool>(),
    ) {
        let bytes: Vec<u8> = (0..len).map(|at| (at.wrapping_mul(at) >> 7).to_le_bytes()[0]).collect();
        let far = Far::new(&bytes, starts_reads);
        let mut file = FileBytes::open(&far, Path::new("far")).unwrap();
        let mut at = 0;
        for (read_len, seek) in reads {
            if let Some(to) = seek {
                file.seek(to);
                at = usize::try_from(to).unwrap();
            }
            let mut out = vec![0; read_len];
            let found = file.next(&mut out).unwrap();
            let expected = bytes.get(at..).unwrap_or_default();
            let expected = &expected[..read_len.min(expected.len())];
            prop_assert_eq!(&out[..found], expected);
            at += found;
        }
        drop(file);
        prop_assert_eq!(far.counters.in_flight.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn ranges_that_are_read_at_once_are_those_of_the_files(
        lens in prop::collection::vec(0..2_000_000_usize, 1..5),
        calls in prop::collection::vec(
            prop::collection::vec((any::<usize>(), 0..3_000_000_u64, 0..300_000_u64), 0..8), 1..12),
        starts_reads in any::<bool>(),
    ) {
        let contents: Vec<Vec<u8>> =
            lens.iter().map(|&len| (0..len).map(|at| ((at * len) >> 5).to_le_bytes()[0]).collect()).collect();
        let open = |bytes: &Vec<u8>| {
            let far: Arc<dyn Storage> = Arc::new(Far::new(bytes, starts_reads));
            let file = FileBytes::open_all(&far, vec![PathBuf::from("far")]).unwrap().remove(0);
            Arc::new(Mutex::new(file))
        };
        let files: Vec<_> = contents.iter().map(open).collect();
        let index = |at| usize::try_from(at).unwrap();
        for call in calls {
            let mut asked: Vec<_> = call
                .into_iter()
                .map(|(number, begin, len)| {
                    let number = number % files.len();
                    let end = lens[number] as u64;
                    (number, begin.min(end)..end.min(begin + len))
                })
                .collect();
            asked.sort_by_key(|(number, range)| (*number, range.start));
            let owned = asked.iter().map(|(number, range)| (Arc::clone(&files[*number]), range.clone()));
            let read = FileBytes::read_all(owned.clone().collect()).unwrap();
            prop_assert_eq!(read.len(), asked.len());
            for ((number, range), found) in asked.iter().zip(&read) {
                prop_assert_eq!(found, &contents[*number][index(range.start)..index(range.end)]);
            }
            // One that reaches beyond the end, or was never in the file.
            let end = lens[0] as u64;
            for beyond in [end..end + 1, u64::MAX - 1..u64::MAX] {
                let all = owned.clone().chain([(Arc::clone(&files[0]), beyond)]).collect();
                prop_assert!(lens[0] == 0 || FileBytes::read_all(all).is_err());
            }
        }
    }

    #[test]
    fn failed_reads_lose_no_record(
        records in records(),
        compression in prop::sample::select(ALL.to_vec()),
        fails in 2..5_usize,
        starts_reads in any::<bool>(),
    ) {
        let far = Far::new(&compressed(&tfrecord(&records), compression), starts_reads);
        let mut cursor = RecordCursor::new(opened(&far, Box::new(TfRecord)).unwrap());
        far.counters.fails.store(fails, Ordering::Relaxed);
        let (mut at, mut num_errors) = (0, 0);
        for record in &records {
            prop_assert_eq!(cursor.tell(), at);
            while match cursor.fill() {
                Ok(more) => !more,
                Err(error) => matches!(error, Error::Changed { .. }),
            } {
                num_errors += 1;
                prop_assert!(num_errors < 10_000, "{at}");
                if num_errors % 50 == 0 {
                    far.counters.fails.store(0, Ordering::Relaxed);
                }
            }
            prop_assert_eq!(cursor.buffered().unwrap(), record.as_slice());
            at += 16 + record.len() as u64;
        }
        far.counters.fails.store(0, Ordering::Relaxed);
        prop_assert!(!cursor.fill().unwrap());
        // And back to any record.
        if let Some(number) = records.len().checked_sub(3) {
            let begin = tfrecord(&records[..number]).len() as u64;
            cursor.seek(begin, None);
            for record in &records[number..] {
                prop_assert!(cursor.fill().unwrap());
                prop_assert_eq!(cursor.buffered().unwrap(), record.as_slice());
            }
        }
    }
}

#[test]
fn a_state_names_where_decompression_can_start() {
    let records: Vec<Vec<u8>> = (0..600_usize)
        .map(|n| (0..n % 900).map(|at| ((n * at) >> 3).to_le_bytes()[0]).collect())
        .collect();
    // That of zlib has one stream.
    for compression in ALL.into_iter().filter(|&each| each != Compression::Zlib) {
        let parts: Vec<Vec<u8>> =
            records.chunks(7).map(|records| compressed(&tfrecord(records), compression)).collect();
        let far = Far::new(&parts.concat(), true);
        let mut cursor = RecordCursor::new(opened(&far, Box::new(TfRecord)).unwrap());
        let mut starts = Vec::new();
        for (number, record) in records.iter().enumerate() {
            assert!(cursor.fill().unwrap());
            let (at, start) = (cursor.tell(), cursor.start());
            let is_near = at < start.decompressed + (160 << 10) || compression == Compression::None;
            assert!(start.decompressed <= at && is_near, "{compression:?}: {start:?}, {at}");
            starts.push(start.stored);
            if number % 50 == 49 {
                let mut resumed = RecordCursor::new(opened(&far, Box::new(TfRecord)).unwrap());
                resumed.seek(at, Some(start));
                assert_eq!((resumed.tell(), resumed.start()), (at, start));
                for record in &records[number..] {
                    assert!(resumed.fill().unwrap());
                    assert_eq!(resumed.buffered().unwrap(), record);
                }
                assert!(!resumed.fill().unwrap());
            }
            assert_eq!(cursor.buffered().unwrap(), record);
        }
        assert!(starts.is_sorted());
        starts.dedup();
        assert_eq!(starts.len() > 2, compression != Compression::None, "{compression:?}");
    }
}

#[test]
fn more_is_in_flight_where_it_is_waited_for_and_never_too_much() {
    let far = Far::new(&tfrecord(&vec![vec![7; 100_000]; 900]), true);
    let mut stream = opened(&far, Box::new(TfRecord)).unwrap();
    let mut block = RecordBlock::default();
    while stream.read(&mut block, 1000).unwrap() {}
    assert_eq!(stream.num_records(), 900);
    let max = far.counters.max_in_flight.load(Ordering::Relaxed);
    assert!((16 << 20..=36 << 20).contains(&max), "{max}");
    assert!(far.counters.num_reads.load(Ordering::Relaxed) < 60);
}

#[test]
fn every_truncation_is_seen_or_ends_between_records() {
    let records: Vec<Vec<u8>> = (0..20_usize).map(|len| vec![b'a'; len * 3]).collect();
    for compression in ALL {
        let whole = compressed(&tfrecord(&records), compression);
        let mut num_intact = 0;
        for len in 0..=whole.len() {
            let far = Far::new(&whole[..len], len % 2 == 0);
            let mut stream = opened(&far, Box::new(TfRecord)).unwrap();
            let (mut block, mut found) = (RecordBlock::default(), Vec::new());
            let result = loop {
                match stream.read(&mut block, 7) {
                    Ok(true) => found.extend(block.iter().map(<[u8]>::to_vec)),
                    Ok(false) => break Ok(()),
                    Err(error) => break Err(error.to_string()),
                }
            };
            assert_eq!(found, records[..found.len()]);
            match result {
                Ok(()) => num_intact += 1,
                Err(text) => assert!(text.contains("record "), "{text}"),
            }
        }
        // Between records, or nothing at all; and between frames or streams if records end there, also
        // in the zeros after one.
        let expected = match compression {
            Compression::None => 21..=21,
            Compression::Xz => 2..=11,
            _ => 2..=3,
        };
        assert!(expected.contains(&num_intact), "{compression:?}: {num_intact}");
    }
}

#[test]
fn blank_lines_take_no_memory() {
    let blanks = vec![b'\n'; 20 << 20];
    let bytes = [&b"{}\n"[..], &blanks, b"[]"].concat();
    let mut stream = opened(&Far::new(&bytes, false), Box::new(JsonLines)).unwrap();
    let mut block = RecordBlock::default();
    assert!(stream.read(&mut block, 1).unwrap());
    assert!(stream.read(&mut block, 1000).unwrap());
    assert_eq!(block.iter().collect::<Vec<_>>(), [b"[]"]);
    assert!(block.byte_len() < 1 << 20);
    assert_eq!(stream.offset(), bytes.len() as u64);
}

/// Lines, with the number of bytes in which their ends were searched.
#[derive(Debug, Default)]
struct CountedLines(Arc<AtomicUsize>);

impl Frames for CountedLines {
    fn frame(
        &self,
        bytes: &[u8],
        at: usize,
        searched: usize,
        left: Option<u64>,
    ) -> Result<Frame, FormatError> {
        self.0.fetch_add(bytes.len() - at - searched, Ordering::Relaxed);
        JsonLines.frame(bytes, at, searched, left)
    }
}

impl MayBeCompressed for CountedLines {
    fn detect(&self, path: &Path, head: &[u8]) -> Compression {
        JsonLines.detect(path, head)
    }
}

#[test]
fn long_lines_are_searched_once() {
    let line = vec![b'x'; 12 << 20];
    let bytes = [b"{}\n  \n", &line[..], b"\n[]\n", &line].concat();
    for compression in ALL {
        let counted = CountedLines::default();
        let num_searched = Arc::clone(&counted.0);
        let far = Far::new(&compressed(&bytes, compression), false);
        let mut stream = opened(&far, Box::new(counted)).unwrap();
        let (mut block, mut found) = (RecordBlock::default(), Vec::new());
        while stream.read(&mut block, usize::MAX).unwrap() {
            found.extend(block.iter().map(<[u8]>::to_vec));
        }
        assert!(found == [&b"{}"[..], &line, b"[]", &line]);
        let num_searched = num_searched.load(Ordering::Relaxed);
        assert!(num_searched < 2 * bytes.len(), "{compression:?}: {num_searched}");
    }
    // What an earlier call has searched is not looked at.
    let frame = JsonLines.frame(b" a\nb\n", 1, 2, None);
    assert_eq!(frame, Ok(Frame::Record(1..4, 5)));
}

#[test]
fn verification_ends_with_the_last_damage_that_is_wanted() {
    let mut bytes = tfrecord(&vec![vec![7; 84]; 20_000]);
    for record in bytes.chunks_mut(100) {
        record[50] ^= 1;
    }
    for (max, expected) in [(0, 0), (1, 1), (5, 5), (30_000, 20_000)] {
        let mut stream = opened(&Far::new(&bytes, false), Box::new(TfRecord)).unwrap();
        let damages = stream.verify(&mut RecordBlock::default(), max, &mut |_, _| Ok(())).unwrap();
        assert!(damages.iter().map(|damage| damage.record).eq(0..expected));
        assert_eq!((stream.num_records(), stream.offset()), (expected, 100 * expected));
    }
}

#[test]
fn nothing_is_no_records_whatever_its_name() {
    let makes: [fn() -> Box<dyn Frames>; 2] = [|| Box::new(JsonLines), || Box::new(TfRecord)];
    for name in ["a.jsonl.gz", "a.jsonl.zst", "a"] {
        for make in makes {
            let path = PathBuf::from(name);
            let mut block = RecordBlock::default();
            let mut opened = RecordStream::open(&Far::new(&[], false), &path, make()).unwrap();
            assert!(!opened.read(&mut block, 9).unwrap());
            let mut given = RecordStream::of(path, std::io::empty(), make()).unwrap();
            assert!(!given.read(&mut block, 9).unwrap());
        }
    }
}
