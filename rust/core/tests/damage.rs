//! Damage to files of every format: 2,000 flipped bits, every truncation, lengths of 2^60, and streams
//! that decompress to more than memory has. Each gives an error that says where, or, where nothing in
//! the file can tell, records; never a panic, a hang, or much memory.
//!
//! Parquet and images have such tests in their crates; `fuzz/` has inputs that are changed more.
#![expect(clippy::unwrap_used, reason = "a test that cannot continue should fail")]

use std::io::{Cursor, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Once};

use flate2::write::{GzEncoder, ZlibEncoder};
use grainmill_core::bytes::ScatterBuffers;
use grainmill_core::formats::array_record::RecordWriter;
use grainmill_core::formats::bagz::{Bagz, BagzCompression, Dictionary, Limits};
use grainmill_core::formats::checksum::crc32c;
use grainmill_core::formats::json_lines::JsonLines;
use grainmill_core::formats::mds::Mds;
use grainmill_core::formats::megatron::Megatron;
use grainmill_core::formats::record_limit::set_max_record_bytes;
use grainmill_core::formats::riegeli::chunk::{CHUNK_HEADER_LEN, ChunkHeader, kind};
use grainmill_core::formats::riegeli::hash::hash;
use grainmill_core::formats::scanned::{Compression, Framing, IndexPlaces, ScannedFormat};
use grainmill_core::formats::sequential::{Frames, RecordBlock, RecordStream};
use grainmill_core::formats::tfrecord::TfRecord;
use grainmill_core::formats::web_dataset::WebDataset;
use grainmill_core::formats::{ArrayRecord, Format};
use grainmill_core::io::storage::{FileId, ReadAt, ReopenedFile, Storage, StoredFile};
use grainmill_core::parse::example::{self, Names};
use grainmill_core::parse::json::{Paths, Step};
use grainmill_core::read::{FileSet, Files, SourceFile};
use grainmill_core::{Error, Result};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const NUM_FLIPS: usize = 2000;
/// The name of the file that is damaged.
const NAME: &str = "damaged.file";
/// How many bytes a chunk or record may decode to here.
const MAX_CHUNK_LEN: u64 = 16 << 20;
/// The memory of the tests and their threads, besides that of the process at its start.
const ALLOWANCE: u64 = 900 << 20;

/// Bounds what damage can make the engine allocate: more fails the test.
fn limit_memory() {
    static LIMIT: Once = Once::new();
    LIMIT.call_once(|| {
        set_max_record_bytes(MAX_CHUNK_LEN);
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: u64 = statm.split(' ').next().unwrap().parse().unwrap();
        let maximum = getrlimit(Resource::As).maximum;
        let current = Some(pages * rustix::param::page_size() as u64 + ALLOWANCE);
        setrlimit(Resource::As, Rlimit { current, maximum }).unwrap();
    });
}

// --- files in memory -----------------------------------------------------------------------------

/// A file, and the one with its limits or index.
#[derive(Debug, Clone)]
struct Memory {
    file: Arc<Vec<u8>>,
    limits: Arc<Vec<u8>>,
}

#[derive(Debug, Clone)]
struct Stored(PathBuf, Arc<Vec<u8>>);

impl Storage for Memory {
    fn open(&self, path: &Path) -> Result<(Box<dyn StoredFile>, Arc<dyn ReadAt>)> {
        let bytes = if path == Path::new(NAME) { &self.file } else { &self.limits };
        let stored = Stored(path.to_owned(), Arc::clone(bytes));
        Ok((Box::new(stored.clone()), Arc::new(stored)))
    }
}

impl StoredFile for Stored {
    fn path(&self) -> &Path {
        &self.0
    }

    fn byte_len(&self) -> u64 {
        self.1.len() as u64
    }

    fn modified_ns(&self) -> i64 {
        0
    }

    fn reopen(&self, _: bool) -> Result<ReopenedFile> {
        Ok(ReopenedFile { bytes: Arc::new(self.clone()), new_id: None })
    }

    fn accept_id(&self, _: FileId) {}
}

impl ReadAt for Stored {
    fn read_at(&self, out: &mut [u8], at: u64) -> Result<()> {
        let found = usize::try_from(at).ok().and_then(|at| self.1.get(at..)?.get(..out.len()));
        out.copy_from_slice(found.ok_or_else(|| Error::Changed { path: NAME.to_owned() })?);
        Ok(())
    }

    fn read_scattered(&self, buffers: &mut ScatterBuffers<'_>, at: u64) -> Result<()> {
        let mut bytes = vec![0; buffers.byte_len()];
        self.read_at(&mut bytes, at)?;
        buffers.fill(&bytes);
        Ok(())
    }
}

// --- formats -------------------------------------------------------------------------------------

/// A file of some format.
struct Case {
    name: &'static str,
    read: Read,
    bytes: Vec<u8>,
    /// Whether each flipped bit that changes a record must be an error.
    is_protected: bool,
}

/// How its records are read.
enum Read {
    ByPosition(Arc<dyn Format>, Vec<u8>),
    InOrder(fn() -> Box<dyn Frames>),
}

type Outcome = Result<Vec<Result<Vec<u8>>>>;

impl Case {
    /// Each record of `bytes`, or why it cannot be read.
    fn outcome(&self, bytes: Vec<u8>) -> Outcome {
        match &self.read {
            Read::InOrder(framing) => in_order(bytes, framing()),
            Read::ByPosition(format, limits) => {
                let limits = Arc::new(limits.clone());
                by_position(format, Memory { file: Arc::new(bytes), limits })
            }
        }
    }

    fn records(&self) -> Vec<Vec<u8>> {
        self.outcome(self.bytes.clone()).unwrap().into_iter().map(Result::unwrap).collect()
    }
}

fn by_position(format: &Arc<dyn Format>, memory: Memory) -> Outcome {
    let storage: Arc<dyn Storage> = Arc::new(memory);
    let set = FileSet::in_storage(&storage, format, [SourceFile::from(PathBuf::from(NAME))]);
    let files = Files::of(Arc::new(set))?;
    let positions: Vec<u64> = (0..files.len().min(200)).collect();
    let read = |at: &u64| Ok(files.read(&[*at])?.iter().next().unwrap_or_default().to_vec());
    let each: Vec<Result<Vec<u8>>> = positions.iter().map(read).collect();
    let together = files.read(&positions);
    assert_eq!(together.is_ok(), each.iter().all(Result::is_ok), "{together:?}, {each:?}");
    Ok(each)
}

/// The records up to the first that cannot be read.
fn in_order(bytes: Vec<u8>, framing: Box<dyn Frames>) -> Outcome {
    let mut stream = RecordStream::of(PathBuf::from(NAME), Cursor::new(bytes), framing)?;
    let (mut block, mut found) = (RecordBlock::default(), Vec::new());
    loop {
        match stream.read(&mut block, 1) {
            Ok(true) => found.extend(block.iter().map(|record| Ok(record.to_vec()))),
            Ok(false) => return Ok(found),
            Err(error) => {
                found.push(Err(error));
                return Ok(found);
            }
        }
    }
}

fn records() -> Vec<Vec<u8>> {
    let text = |number: u32| format!("{{\"number\": {number}, \"text\": \"abcd {}\"}}", number * 7);
    (0..24).map(|number| text(number).into_bytes()).collect()
}

fn tfrecord(records: &[Vec<u8>]) -> Vec<u8> {
    let mut out = Vec::new();
    for record in records {
        out.extend(tfrecord_head(record.len() as u64));
        out.extend_from_slice(record);
        out.extend(crc32c::masked(record).to_le_bytes());
    }
    out
}

fn tfrecord_head(len: u64) -> Vec<u8> {
    let len = len.to_le_bytes();
    [&len[..], &crc32c::masked(&len).to_le_bytes()].concat()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut out = GzEncoder::new(Vec::new(), flate2::Compression::default());
    out.write_all(bytes).unwrap();
    out.finish().unwrap()
}

fn zlib(bytes: &[u8]) -> Vec<u8> {
    let mut out = ZlibEncoder::new(Vec::new(), flate2::Compression::default());
    out.write_all(bytes).unwrap();
    out.finish().unwrap()
}

fn xz(bytes: &[u8]) -> Vec<u8> {
    let mut out = liblzma::write::XzEncoder::new(Vec::new(), 6);
    out.write_all(bytes).unwrap();
    out.finish().unwrap()
}

fn bzip2(bytes: &[u8]) -> Vec<u8> {
    let mut out = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::default());
    out.write_all(bytes).unwrap();
    out.finish().unwrap()
}

fn zstd(bytes: &[u8], dictionary: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(zstd_safe::compress_bound(bytes.len()));
    let mut context = zstd_safe::CCtx::create();
    context.set_parameter(zstd_safe::CParameter::ChecksumFlag(true)).unwrap();
    context.load_dictionary(dictionary).unwrap();
    context.compress2(&mut out, bytes).unwrap();
    out
}

/// Each part in a frame with a checksum, behind one that is passed over.
fn zstd_frames<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Vec<u8> {
    let frames = parts.into_iter().flat_map(|part| zstd(part, b""));
    b"\x50\x2a\x4d\x18\x03\0\0\0abc".iter().copied().chain(frames).collect()
}

fn limits(records: &[Vec<u8>]) -> Vec<u8> {
    let ends = records.iter().scan(0, |end, record| {
        *end += record.len() as u64;
        Some(end.to_le_bytes())
    });
    ends.flatten().collect()
}

/// The header of a file in a tar file, with a length in binary.
fn tar_header(name: &str, kind: u8, len: u64) -> Vec<u8> {
    let mut header = vec![0; 512];
    header[..name.len()].copy_from_slice(name.as_bytes());
    header[100..108].copy_from_slice(b"0000644\0");
    header[124] = 0x80;
    header[128..136].copy_from_slice(&len.to_be_bytes());
    header[156] = kind;
    header[257..265].copy_from_slice(b"ustar\x0000");
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().copied().map(u32::from).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    header
}

fn tar(records: &[Vec<u8>]) -> Vec<u8> {
    let mut out = Vec::new();
    for (number, record) in records.iter().take(6).enumerate() {
        out.extend(tar_header(&format!("{number}.json"), b'0', record.len() as u64));
        out.extend_from_slice(record);
        out.resize(out.len().next_multiple_of(512), 0);
    }
    out.resize(out.len() + 1024, 0);
    out
}

fn array_record(options: &str) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(NAME);
    let mut writer = RecordWriter::create(&path, options.parse().unwrap()).unwrap();
    for record in records() {
        writer.write(&record).unwrap();
    }
    writer.close().unwrap();
    std::fs::read(path).unwrap()
}

const DICTIONARY: &[u8] = b"{\"number\": 10, \"text\": \"abcd 70\"}";

fn scanned(framing: impl Framing, compression: Compression) -> Read {
    let places = IndexPlaces::default();
    let format = ScannedFormat { framing, compression: Some(compression), places };
    Read::ByPosition(Arc::new(format), Vec::new())
}

fn bagz(compression: BagzCompression) -> Read {
    Read::ByPosition(Arc::new(Bagz { compression, limits: Limits::Tail }), Vec::new())
}

/// Each record is a document of one sequence of bytes.
fn megatron(records: &[Vec<u8>]) -> (Read, Vec<u8>) {
    let count = records.len() as u64;
    let counts =
        records.iter().flat_map(|record| u32::try_from(record.len()).unwrap().to_le_bytes());
    let ends = limits(records);
    let begins = [&[0; 8], &ends[..ends.len() - 8]].concat();
    let mut index = b"MMIDIDX\0\0\x01\0\0\0\0\0\0\0\x01".to_vec();
    index.extend([count, count + 1].into_iter().flat_map(u64::to_le_bytes));
    index.extend(counts.chain(begins));
    index.extend((0..=count).flat_map(u64::to_le_bytes));
    (Read::ByPosition(Arc::new(Megatron { token_type: 1 }), index), records.concat())
}

/// A shard of samples, with a layout of columns before them.
fn mds(records: &[Vec<u8>]) -> Vec<u8> {
    let layout = b"{\"column_names\": []}";
    let begin = 4 * (records.len() + 2) + layout.len();
    let ends = limits(records);
    let ends =
        ends.as_chunks().0.iter().map(|&end| usize::try_from(u64::from_le_bytes(end)).unwrap());
    let words = [records.len(), begin].into_iter().chain(ends.map(|end| begin + end));
    let mut shard: Vec<u8> =
        words.flat_map(|word| u32::try_from(word).unwrap().to_le_bytes()).collect();
    shard.extend(layout);
    shard.extend(records.concat());
    shard
}

fn cases() -> Vec<Case> {
    use Compression::{Gzip, None, Zlib, Zstd};
    let records = records();
    let (frames, tar) = (tfrecord(&records), tar(&records));
    let lines: Vec<u8> = records.iter().flat_map(|record| [record, &b"\n"[..]].concat()).collect();
    let packed: Vec<Vec<u8>> = records.iter().map(|record| zstd(record, b"")).collect();
    let dictionary = Dictionary::new(DICTIONARY).unwrap();
    let by_dictionary: Vec<Vec<u8>> =
        records.iter().map(|record| zstd(record, DICTIONARY)).collect();
    let tailed = |records: &[Vec<u8>]| [records.concat(), limits(records)].concat();
    // Limits have no checksum, frames have.
    let separate = |compression, records: &[Vec<u8>]| {
        let format: Arc<dyn Format> = Arc::new(Bagz { compression, limits: Limits::Separate });
        (Read::ByPosition(format, limits(records)), records.concat())
    };
    let array_record = |options| {
        let format: Arc<dyn Format> = Arc::new(ArrayRecord);
        (Read::ByPosition(format, Vec::new()), array_record(options))
    };
    let case = |name, (read, bytes), is_protected| Case { name, read, bytes, is_protected };
    vec![
        case("array_record uncompressed", array_record("group_size:5,uncompressed"), true),
        case("array_record zstd", array_record("group_size:5,zstd:3"), true),
        case("array_record brotli", array_record("group_size:5,brotli:3"), true),
        case("array_record snappy", array_record("group_size:1,snappy"), true),
        case("array_record transposed", array_record("group_size:9,transpose:true"), true),
        case("tfrecord", (scanned(TfRecord, None), frames.clone()), true),
        case("tfrecord gzip", (scanned(TfRecord, Gzip), gzip(&frames)), true),
        case("tfrecord zlib", (scanned(TfRecord, Zlib), zlib(&frames)), true),
        case("tfrecord zstd", (scanned(TfRecord, Zstd), zstd_frames(frames.chunks(100))), true),
        case("json_lines", (scanned(JsonLines, None), lines.clone()), false),
        case("json_lines gzip", (scanned(JsonLines, Gzip), gzip(&lines)), true),
        case(
            "json_lines zstd",
            // A cut between frames may leave a whole line before it, but no part of one.
            (scanned(JsonLines, Zstd), zstd_frames(lines.split_inclusive(|&byte| byte == b'\n'))),
            true,
        ),
        case("web_dataset", (scanned(WebDataset, None), tar.clone()), false),
        case("web_dataset gzip", (scanned(WebDataset, Gzip), gzip(&tar)), true),
        case("bagz", (bagz(BagzCompression::None), tailed(&records)), false),
        case("bagz zstd", (bagz(BagzCompression::Zstd(Option::None)), tailed(&packed)), false),
        case("bagz frames", separate(BagzCompression::Zstd(Option::None), &packed), true),
        case(
            "bagz dictionary",
            separate(BagzCompression::Zstd(Some(dictionary)), &by_dictionary),
            true,
        ),
        case("megatron", megatron(&records), false),
        case("mds", (Read::ByPosition(Arc::new(Mds), Vec::new()), mds(&records)), false),
        case("mds gzip", (scanned(Mds, Gzip), gzip(&mds(&records))), true),
        case("mds zstd", (scanned(Mds, Zstd), zstd_frames([&mds(&records)[..]])), true),
        case("tfrecord in order", (Read::InOrder(|| Box::new(TfRecord)), frames.clone()), true),
        case("tfrecord gzip in order", (Read::InOrder(|| Box::new(TfRecord)), gzip(&frames)), true),
        case("tfrecord zlib in order", (Read::InOrder(|| Box::new(TfRecord)), zlib(&frames)), true),
        case("tfrecord xz in order", (Read::InOrder(|| Box::new(TfRecord)), xz(&frames)), true),
        case(
            "tfrecord bzip2 in order",
            (Read::InOrder(|| Box::new(TfRecord)), bzip2(&frames)),
            true,
        ),
        case("lines in order", (Read::InOrder(|| Box::new(JsonLines)), lines), false),
    ]
}

// --- damage --------------------------------------------------------------------------------------

/// A random generator with a fixed seed.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 16).unwrap() % end
    }
}

/// `bytes` with one bit flipped, 2,000 times, but not in the middle of padding.
fn flips(bytes: &[u8]) -> impl Iterator<Item = (usize, Vec<u8>)> {
    let is_near = |at: usize| bytes[at.saturating_sub(8)..(at + 9).min(bytes.len())] != [0; 17];
    let places: Vec<usize> = (0..bytes.len()).filter(|&at| is_near(at)).collect();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    (0..NUM_FLIPS).map(move |_| {
        let bit = 8 * places[random.below(places.len())] + random.below(8);
        let mut damaged = bytes.to_vec();
        damaged[bit / 8] ^= 1 << (bit % 8);
        (bit, damaged)
    })
}

/// An error names the file, and the place in it.
fn assert_names_the_place(error: &Error, what: &str) {
    let Error::Corrupt { path, place, problem } = error else {
        panic!("{what}: {error:?}");
    };
    assert_eq!(path, NAME, "{what}");
    assert!(!problem.is_empty(), "{what}");
    let says_where = place.contains(|byte: char| byte.is_ascii_digit());
    assert!(says_where || ["limits", "whole file", "footer"].contains(&place.as_str()), "{error}");
}

#[test]
fn flipped_bits_are_errors_that_say_where_or_leave_the_records_alone() {
    limit_memory();
    for case in cases() {
        let expected = case.records();
        assert!(expected.len() >= 6, "{}", case.name);
        let mut num_errors = 0;
        for (bit, damaged) in flips(&case.bytes) {
            let what = format!("{}: bit {bit}", case.name);
            let found = match case.outcome(damaged) {
                Ok(found) => found,
                Err(error) => {
                    assert_names_the_place(&error, &what);
                    num_errors += 1;
                    continue;
                }
            };
            for error in found.iter().filter_map(|record| record.as_ref().err()) {
                assert_names_the_place(error, &what);
            }
            let is_whole = found.iter().all(Result::is_ok);
            num_errors += usize::from(!is_whole);
            if !case.is_protected {
                continue;
            }
            assert!(!is_whole || found.len() == expected.len(), "{what}: {}", found.len());
            for (record, expected) in found.iter().zip(&expected) {
                assert!(record.as_ref().map_or(true, |record| record == expected), "{what}");
            }
        }
        // Where bits do not count, as in padding and in the header of gzip, there is no error.
        let enough = if case.is_protected { NUM_FLIPS / 4 } else { 0 };
        assert!(num_errors >= enough, "{}: {num_errors}", case.name);
    }
}

#[test]
fn files_cut_at_any_byte_are_errors_or_have_the_records_before() {
    limit_memory();
    for case in cases() {
        let expected = case.records();
        let is_array_record = case.name.starts_with("array_record");
        let cuts = (0..case.bytes.len())
            // Between the chunks of a small ArrayRecord file is a block of padding.
            .filter(|cut| !is_array_record || cut % 65_536 < 3000 || cut % 97 == 0);
        for cut in cuts {
            let what = format!("{}: cut at {cut}", case.name);
            let found = match case.outcome(case.bytes[..cut].to_vec()) {
                Ok(found) => found,
                Err(error) => {
                    assert_names_the_place(&error, &what);
                    continue;
                }
            };
            for error in found.iter().filter_map(|record| record.as_ref().err()) {
                assert_names_the_place(error, &what);
            }
            assert!(!is_array_record, "{what}");
            // Damage may leave the last line, and what a limit separates, shorter or longer.
            if case.is_protected {
                let num_read = found.iter().filter(|record| record.is_ok()).count();
                assert!(num_read <= expected.len(), "{what}");
                for (record, expected) in found.iter().zip(&expected) {
                    assert!(record.as_ref().map_or(true, |record| record == expected), "{what}");
                }
            }
        }
    }
}

#[test]
fn lengths_of_2_to_the_60_are_errors_that_take_no_memory() {
    const HUGE: u64 = 1 << 60;
    limit_memory();
    let head = [tfrecord(&records()[..1]), tfrecord_head(HUGE), vec![b'x'; 100]].concat();
    let pax = format!("28 size={HUGE}\n");
    let pax = format!("{} size={HUGE}\n", pax.len());
    let mut attributes = tar_header("pax", b'x', pax.len() as u64);
    attributes.extend_from_slice(pax.as_bytes());
    attributes.resize(1024, 0);
    let named = [tar_header("0.json", b'L', HUGE), vec![0; 1024]].concat();
    let sized = [tar_header("0.json", b'0', HUGE), vec![0; 1024]].concat();
    let attributes = [attributes, tar_header("0.json", b'0', 3), vec![0; 1024]].concat();
    // A frame that states its length in eight bytes, and has one empty block.
    let frame = [&b"\x28\xb5\x2f\xfd\xe0"[..], &HUGE.to_le_bytes(), &[1, 0, 0]].concat();
    let frames = [&frame[..], &(frame.len() as u64).to_le_bytes()].concat();
    let limit = [&b"record"[..], &6_u64.to_le_bytes(), &HUGE.to_le_bytes()].concat();
    let in_tail = [&b"record"[..], &HUGE.to_le_bytes(), &6_u64.to_le_bytes()].concat();
    let by_scan = |framing| scanned(framing, Compression::None);
    let of_tar = || scanned(WebDataset, Compression::None);
    let zstd = || bagz(BagzCompression::Zstd(None));
    let in_order = Read::InOrder(|| Box::new(TfRecord));
    for (name, read, bytes) in [
        ("tfrecord", by_scan(TfRecord), head.clone()),
        ("tfrecord gzip", scanned(TfRecord, Compression::Gzip), gzip(&head)),
        ("tfrecord zstd", scanned(TfRecord, Compression::Zstd), zstd_frames([&head[..]])),
        ("tfrecord in order", in_order, head),
        ("tar", of_tar(), sized),
        ("tar name", of_tar(), named),
        ("tar attributes", of_tar(), attributes),
        ("bagz frame", zstd(), frames),
        ("bagz last limit", bagz(BagzCompression::None), limit),
        ("bagz limit", bagz(BagzCompression::None), in_tail),
        ("array_record", Read::ByPosition(Arc::new(ArrayRecord), Vec::new()), huge_chunk()),
    ] {
        let case = Case { name, read, bytes: Vec::new(), is_protected: true };
        let error = match case.outcome(bytes) {
            Ok(found) => found.into_iter().find_map(Result::err),
            Err(error) => Some(error),
        };
        assert_names_the_place(&error.unwrap_or_else(|| panic!("{name} is read")), name);
    }
}

/// A file whose first chunk states data of 2^60 bytes, in a header with a valid hash.
fn huge_chunk() -> Vec<u8> {
    let mut bytes = array_record("group_size:5,uncompressed");
    let header = &mut bytes[64..64 + CHUNK_HEADER_LEN];
    let intact = ChunkHeader::from_bytes(header.first_chunk().unwrap()).unwrap();
    assert_eq!(intact.kind, kind::SIMPLE);
    header.copy_from_slice(&ChunkHeader { data_len: 1 << 60, ..intact }.to_bytes());
    let sum = hash(&header[8..]);
    header[..8].copy_from_slice(&sum.to_le_bytes());
    bytes
}

#[test]
fn streams_that_decompress_to_more_than_the_limit_are_errors() {
    limit_memory();
    // 64 MiB of one record, with a limit of 16 MiB.
    let len = 64 << 20;
    let content = vec![b' '; len];
    let frame = [tfrecord_head(len as u64), content.clone(), vec![0; 4]].concat();
    let line = [&b"{"[..], &content, b"}\n"].concat();
    let file = [tar_header("0.json", b'0', len as u64), content.clone(), vec![0; 1024]].concat();
    let stated = zstd(&content, b"");
    // Streamed, so that the frame does not state its length.
    let mut unstated = Vec::with_capacity(1 << 20);
    let mut stream = zstd_safe::CCtx::create();
    {
        let mut out = zstd_safe::OutBuffer::around(&mut unstated);
        let mut input = zstd_safe::InBuffer::around(&content);
        stream.compress_stream(&mut out, &mut input).unwrap();
        while stream.end_stream(&mut out).unwrap() > 0 {}
        assert_eq!(input.pos, content.len());
    }
    drop(content);
    let bag = |frame: Vec<u8>| [&frame[..], &(frame.len() as u64).to_le_bytes()].concat();
    let zstd = || bagz(BagzCompression::Zstd(None));
    for (name, read, bytes) in [
        ("tfrecord gzip", scanned(TfRecord, Compression::Gzip), gzip(&frame)),
        ("tfrecord zlib", scanned(TfRecord, Compression::Zlib), zlib(&frame)),
        ("tfrecord zstd", scanned(TfRecord, Compression::Zstd), zstd_frames(frame.chunks(1 << 20))),
        ("json_lines gzip", scanned(JsonLines, Compression::Gzip), gzip(&line)),
        (
            "json_lines zstd",
            scanned(JsonLines, Compression::Zstd),
            zstd_frames(line.chunks(1 << 20)),
        ),
        ("web_dataset gzip", scanned(WebDataset, Compression::Gzip), gzip(&file)),
        ("bagz stated", zstd(), bag(stated)),
        ("bagz unstated", zstd(), bag(unstated)),
    ] {
        assert!(bytes.len() < 1 << 20);
        let case = Case { name, read, bytes: Vec::new(), is_protected: true };
        let error = match case.outcome(bytes) {
            Ok(found) => found.into_iter().find_map(Result::err),
            Err(error) => Some(error),
        };
        let error = error.unwrap_or_else(|| panic!("{name} is read"));
        assert_names_the_place(&error, name);
        assert!(error.to_string().contains("GRAINMILL_MAX_RECORD_BYTES"), "{name}: {error}");
    }
}

#[test]
fn empty_files_have_no_records_or_are_errors() {
    for case in cases() {
        match case.outcome(Vec::new()) {
            Ok(found) => assert!(found.is_empty(), "{}", case.name),
            Err(error) => assert_names_the_place(&error, case.name),
        }
    }
}

#[test]
fn flipped_bits_of_messages_and_texts_are_refused_or_read() {
    let member = |name: &str| vec![Step::Member(name.to_owned())];
    let text = records()[3].clone();
    let paths = Paths::new([member("number"), member("text")]);
    for (_, damaged) in flips(&text) {
        let Ok(damaged) = std::str::from_utf8(&damaged) else { continue };
        let mut found = vec![None; 2];
        if paths.find(damaged, &mut found).is_ok() {
            let parsed: serde_json::Value = serde_json::from_str(damaged).unwrap();
            assert_eq!(found[0].is_some(), parsed.get("number").is_some(), "{damaged}");
        } else {
            assert!(serde_json::from_str::<serde_json::Value>(damaged).is_err(), "{damaged}");
        }
    }
    // Two features: three integers, and a text.
    let message = b"\x0a\x24\x0a\x0f\x0a\x03ids\x12\x08\x1a\x06\x0a\x04\x01\x02\xac\x02\
        \x0a\x11\x0a\x04text\x12\x09\x0a\x07\x0a\x05hello";
    let names = Names::new(["ids".to_owned(), "text".to_owned()]);
    let mut num_refused = 0;
    for (_, damaged) in
        flips(message).chain((0..message.len()).map(|end| (end, message[..end].to_vec())))
    {
        let mut found = vec![None; names.len()];
        match example::features(&damaged, &names, &mut found) {
            Ok(()) => {
                for values in found.iter().flatten() {
                    let _ = values.count();
                }
            }
            Err(_) => num_refused += 1,
        }
    }
    assert!(num_refused > 400, "{num_refused}");
}
