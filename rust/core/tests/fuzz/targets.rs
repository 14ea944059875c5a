//! The fuzz targets: functions that must return for any input, without a panic, in little memory, and
//! with valid results.

use std::collections::HashMap;
use std::fmt::Debug;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Once, OnceLock};

use grainmill_core::bytes::ScatterBuffers;
use grainmill_core::formats::array_record::footer::{self, FooterParser, MAGIC};
use grainmill_core::formats::array_record::{WriterOptions, verify};
use grainmill_core::formats::bagz::{Bagz, BagzCompression, Dictionary, Limits};
use grainmill_core::formats::fixed_len::FixedLen;
use grainmill_core::formats::json_lines::JsonLines;
use grainmill_core::formats::mds::Mds;
use grainmill_core::formats::megatron::Megatron;
use grainmill_core::formats::record_limit::set_max_record_bytes;
use grainmill_core::formats::riegeli::block::BLOCK_LEN;
use grainmill_core::formats::riegeli::chunk::{self, CHUNK_HEADER_LEN, ChunkHeader, kind};
use grainmill_core::formats::riegeli::compress::{Codec, Compressor};
use grainmill_core::formats::riegeli::cursor::Cursor;
use grainmill_core::formats::riegeli::decompress::{Decompressor, codec};
use grainmill_core::formats::riegeli::encode::{Group, simple_data};
use grainmill_core::formats::riegeli::hash::hash;
use grainmill_core::formats::riegeli::sink::ChunkSink;
use grainmill_core::formats::riegeli::stream_decoder::{ChunkSource, StreamDecoder, varint64};
use grainmill_core::formats::riegeli::transposed::encode::transposed_data;
use grainmill_core::formats::riegeli::{ChunkRecords, Decoder, FormatError, StreamError};
use grainmill_core::formats::scanned::{Compression, Framing, IndexPlaces, ScannedFormat};
use grainmill_core::formats::sequential::{Frames, RecordBlock, RecordStream};
use grainmill_core::formats::tfrecord::TfRecord;
use grainmill_core::formats::web_dataset::WebDataset;
use grainmill_core::formats::{ArrayRecord, Format};
use grainmill_core::io::storage::{FileId, ReadAt, ReopenedFile, Storage, StoredFile};
use grainmill_core::parse::example::{self, Kind, Names, Values};
use grainmill_core::parse::json::{self, Paths, Step, Value};
use grainmill_core::parse::number::Number;
use grainmill_core::parse::wire::Malformed;
use grainmill_core::read::{FileSet, Files, SourceFile};
use grainmill_core::varint::{push_varint, read_varint};
use grainmill_core::{Error, Result};

/// How many bytes a chunk may decode to here, so that unbounded memory fails a run.
pub(crate) const MAX_CHUNK_LEN: u64 = 16 << 20;
/// About the maximum length of a file that a target writes.
const MAX_FILE_LEN: u64 = 1 << 20;
/// The maximum number of records in a chunk, which must fit such a file.
const MAX_RECORDS: u64 = 1 << 16;

/// The name of a target and its function.
pub(crate) type Target = (&'static str, fn(&[u8]));

/// All targets.
pub(crate) const TARGETS: [Target; 25] = [
    ("file", file),
    ("chunks", chunks),
    ("headers", headers),
    ("postscript", postscript),
    ("footer", footer_records),
    ("simple_chunk", simple_chunk),
    ("transposed_chunk", transposed_chunk),
    ("decompressors", decompressors),
    ("varints", varints),
    ("writer_options", writer_options),
    ("round_trip_simple", round_trip_simple),
    ("round_trip_transposed", round_trip_transposed),
    ("verify", verify_file),
    ("tfrecord_stream", tfrecord_stream),
    ("lines", lines),
    ("example", example),
    ("json", json),
    ("tfrecord", tfrecord),
    ("json_lines", json_lines),
    ("web_dataset", web_dataset),
    ("bagz", bagz),
    ("megatron", megatron),
    ("mds", mds),
    ("fixed_len", fixed_len),
    ("written", written),
];

/// The input as a file.
fn file(input: &[u8]) {
    read_file(input.to_vec());
}

/// The rest of the input as a file in a format that is scanned; its first byte is the compression.
fn scanned<F: Framing>(framing: F, input: &[u8]) {
    let Some((compression, bytes)) = input.split_first() else { return };
    let compression = match compression % 5 {
        0 => Some(Compression::None),
        1 => Some(Compression::Gzip),
        2 => Some(Compression::Zlib),
        3 => Some(Compression::Zstd),
        _ => None,
    };
    let places = IndexPlaces::default();
    read_file_in(ScannedFormat { framing, compression, places }, bytes.to_vec());
}

/// A `TFRecord` file.
fn tfrecord(input: &[u8]) {
    scanned(TfRecord, input);
}

/// A file of JSON lines.
fn json_lines(input: &[u8]) {
    scanned(JsonLines, input);
}

/// A tar file of `WebDataset`.
fn web_dataset(input: &[u8]) {
    scanned(WebDataset, input);
}

/// A Bagz file; the first byte of the input is its compression and where its limits are.
fn bagz(input: &[u8]) {
    let Some((options, bytes)) = input.split_first() else { return };
    let compression = match options % 3 {
        0 => BagzCompression::None,
        1 => BagzCompression::Zstd(None),
        _ => BagzCompression::Zstd(Dictionary::new(b"alpha beta gamma ").ok()),
    };
    let limits = if options % 2 == 0 { Limits::Tail } else { Limits::Separate };
    read_file_in(Bagz { compression, limits }, bytes.to_vec());
}

/// The input is the index, of the types that have one byte, and also its tokens.
fn megatron(input: &[u8]) {
    read_file_in(Megatron { token_type: 1 }, input.to_vec());
}

/// A shard of Mosaic Streaming; the first byte of the input says whether it is one that may be compressed.
fn mds(input: &[u8]) {
    match input.split_first() {
        Some((kind, bytes)) if kind % 2 == 0 => read_file_in(Mds, bytes.to_vec()),
        Some((_, bytes)) => scanned(Mds, bytes),
        None => {}
    }
}

/// A file of records of one length; the first bytes of the input say of which, and where they are.
fn fixed_len(input: &[u8]) {
    let Some((&[record_len, stride, value_len, begin, end], bytes)) = input.split_first_chunk()
    else {
        return;
    };
    let extents = HashMap::from([(PathBuf::from("fuzzed"), u64::from(begin)..u64::from(end))]);
    let format = FixedLen {
        record_len: record_len.into(),
        stride: stride.into(),
        value_len: value_len.into(),
        header_len: begin.into(),
        extents: if end % 2 == 0 { extents } else { HashMap::new() },
    };
    read_file_in(format, bytes.to_vec());
}

/// A file of the chunks in the input, with valid checksums; the last one is the footer.
fn chunks(input: &[u8]) {
    let mut cursor = Cursor::new(input);
    let mut sink = ChunkSink::new(Vec::new()).expect("writing to memory");
    let mut last = 0;
    while !cursor.is_empty() && sink.pos() < MAX_FILE_LEN {
        let Ok(kind) = cursor.byte() else { return };
        if kind == kind::PADDING {
            sink.pad_to_block().expect("writing to memory");
            continue;
        }
        let Ok((num_records, decoded_len)) = counts(&mut cursor) else { return };
        let Ok(data) = cursor.varint64().and_then(|len| cursor.take(len)) else { return };
        last = sink
            .write_chunk(kind, num_records, decoded_len, &[data])
            .expect("a chunk below the largest position");
    }
    sink.pad_to_block().expect("writing to memory");
    let record = postscript_of(last);
    let parts = [&[0, 1][..], &varint(record.len() as u64), &record];
    sink.write_chunk(kind::SIMPLE, 1, record.len() as u64, &parts).expect("writing to memory");
    sink.pad_to_block().expect("writing to memory");
    read_file(sink.finish().expect("writing to memory"));
}

/// The number of records and the decoded length of a chunk, with which inputs start.
fn counts(cursor: &mut Cursor<'_>) -> Result<(u64, u64), FormatError> {
    Ok((cursor.varint64()? % MAX_RECORDS, cursor.varint64()?))
}

fn varint(value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    push_varint(&mut bytes, value);
    bytes
}

fn postscript_of(footer_offset: u64) -> Vec<u8> {
    [&[8][..], &varint(footer_offset), &[16], &varint(MAGIC)].concat()
}

/// Reads records of a file one by one and together, which must agree.
fn read_file(bytes: Vec<u8>) {
    read_file_in(ArrayRecord, bytes);
}

/// As [`read_file`], in another format.
fn read_file_in(format: impl Format + 'static, bytes: Vec<u8>) {
    limit_chunks();
    let storage: Arc<dyn Storage> = Arc::new(InMemory(Arc::new(bytes)));
    let set = FileSet::in_storage(
        &storage,
        &(Arc::new(format) as Arc<dyn Format>),
        [SourceFile::from(PathBuf::from("fuzzed"))],
    );
    let Ok(files) = Files::of(Arc::new(set)) else { return };
    let len = files.len();
    let positions: Vec<u64> = (0..len.min(40)).chain(len.checked_sub(1)).collect();
    let each: Vec<_> = positions.iter().map(|&at| files.read(&[at])).collect();
    let together = files.read(&positions);
    assert_eq!(together.is_ok(), each.iter().all(Result::is_ok), "{together:?}, {each:?}");
    if let Ok(together) = together {
        for (both, single) in together.iter().zip(each.iter().flatten()) {
            assert!(single.iter().eq([both]));
        }
    }
}

/// Records are written and read again, by any list of positions. The input has the format, the number
/// of records, two bytes for each, and the positions.
fn written(input: &[u8]) {
    limit_chunks();
    let Some((&[format, num_records], rest)) = input.split_first_chunk() else { return };
    let (shapes, positions) = rest.split_at(rest.len().min(2 * num_records as usize));
    let mut records: Vec<Vec<u8>> = shapes.chunks_exact(2).map(record_of_shape).collect();
    let is_bagz = format % 6 > 3;
    if !is_bagz {
        records.retain(|record| !record.is_empty());
    }
    let Some(max_position) = records.len().checked_sub(1) else { return };
    let bytes =
        if is_bagz { bagz_of(&records, format % 6 == 4) } else { lines_of(&records, format % 6) };
    let storage: Arc<dyn Storage> = Arc::new(InMemory(Arc::new(bytes)));
    let format: Arc<dyn Format> = match format % 6 {
        4 => Arc::new(Bagz { compression: BagzCompression::Zstd(None), limits: Limits::Tail }),
        5 => Arc::new(Bagz { compression: BagzCompression::None, limits: Limits::Tail }),
        compression => {
            let compression =
                [Compression::None, Compression::Gzip, Compression::Zlib, Compression::Zstd]
                    .get(usize::from(compression))
                    .copied();
            let places = IndexPlaces::default();
            Arc::new(ScannedFormat { framing: JsonLines, compression, places })
        }
    };
    let set = FileSet::in_storage(&storage, &format, [SourceFile::from(PathBuf::from("fuzzed"))]);
    let files = Files::of(Arc::new(set)).expect("a file that was just written");
    assert_eq!(files.len(), records.len() as u64);
    let positions: Vec<u64> =
        positions.iter().map(|&at| (usize::from(at) % (max_position + 1)) as u64).collect();
    for positions in [&positions[..], &(0..files.len()).collect::<Vec<_>>()] {
        let found = files.read(positions).expect("a file that was just written");
        for (&at, found) in positions.iter().zip(found.iter()) {
            let record = &records[usize::try_from(at).expect("there are few")];
            assert!(record == found, "record {at} of {} bytes is another", record.len());
        }
    }
}

/// A record that compresses well or hardly, of up to 240 bytes, 60 KiB or, seldom, 1.4 MB.
fn record_of_shape(shape: &[u8]) -> Vec<u8> {
    static NOISE: OnceLock<Vec<u8>> = OnceLock::new();
    let [len, kind] = shape else { return Vec::new() };
    let unit = match kind % 16 {
        0..10 => 1,
        10..15 => 240,
        _ => 5_600,
    };
    let len = usize::from(*len) * unit;
    if kind / 16 % 2 == 0 {
        return vec![b'a' + kind % 16; len];
    }
    let noise = NOISE.get_or_init(|| {
        let mut state = 0x100_u64;
        let step = |_| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            (state >> 56).to_le_bytes()[0].max(b'!')
        };
        (0..256 + 255 * 5_600).map(step).collect()
    });
    noise[usize::from(*kind)..][..len].to_vec()
}

/// Lines, plain or compressed by gzip, zlib or, in several frames, zstd.
fn lines_of(records: &[Vec<u8>], compression: u8) -> Vec<u8> {
    let mut lines = records.join(&b'\n');
    lines.push(b'\n');
    let level = flate2::Compression::fast();
    let mut packed = Vec::new();
    match compression {
        0 => return lines,
        1 => flate2::read::GzEncoder::new(&lines[..], level).read_to_end(&mut packed),
        2 => flate2::read::ZlibEncoder::new(&lines[..], level).read_to_end(&mut packed),
        _ => return lines.chunks(100_000).flat_map(zstd_frame).collect(),
    }
    .expect("writing to memory");
    packed
}

/// `bytes`, compressed.
fn zstd_frame(bytes: &[u8]) -> Vec<u8> {
    let mut packed = Vec::with_capacity(zstd_safe::compress_bound(bytes.len()));
    zstd_safe::compress(&mut packed, bytes, 1).expect("the buffer is large enough");
    packed
}

/// A Bagz file, with each record compressed by zstd or not; nothing is stored of an empty one.
fn bagz_of(records: &[Vec<u8>], is_zstd: bool) -> Vec<u8> {
    let (mut bytes, mut limits) = (Vec::new(), Vec::new());
    for record in records {
        if is_zstd && !record.is_empty() {
            bytes.extend(zstd_frame(record));
        } else {
            bytes.extend(record);
        }
        limits.extend((bytes.len() as u64).to_le_bytes());
    }
    bytes.extend(limits);
    bytes
}

/// Verifies a file: without problems, all of its records can be read.
fn verify_file(input: &[u8]) {
    limit_chunks();
    let memory = InMemory(Arc::new(input.to_vec()));
    let report = verify::verify(&memory, Path::new("fuzzed"), 100, &mut |_, _| Ok(()))
        .expect("reading memory");
    let storage: Arc<dyn Storage> = Arc::new(memory);
    let format: Arc<dyn Format> = Arc::new(ArrayRecord);
    let set = FileSet::in_storage(&storage, &format, [SourceFile::from(PathBuf::from("fuzzed"))]);
    if report.problems.is_empty() {
        let files = Files::of(Arc::new(set)).expect("a file without problems can be opened");
        assert_eq!(files.len(), report.num_records);
        let positions: Vec<u64> = (0..files.len().min(40)).collect();
        files.read(&positions).expect("a file without problems can be read");
    }
}

fn tfrecord_stream(input: &[u8]) {
    stream(input, || Box::new(TfRecord));
}

fn lines(input: &[u8]) {
    stream(input, || Box::new(JsonLines));
}

/// Reads the input as a stream, in blocks of any length and of single records, which must agree.
fn stream(input: &[u8], frames: impl Fn() -> Box<dyn Frames>) {
    let records_of = |max_records| {
        let (mut block, mut records) = (RecordBlock::default(), Vec::new());
        let input = std::io::Cursor::new(input.to_vec()).take(MAX_FILE_LEN);
        let mut stream = RecordStream::of(PathBuf::from("fuzzed"), input, frames())?;
        // Compressed input may be endless.
        while records.len() < 1000 && stream.offset() < MAX_CHUNK_LEN {
            if !stream.read(&mut block, max_records)? {
                break;
            }
            assert!((1..=max_records).contains(&block.len()));
            records.extend(block.iter().map(<[u8]>::to_vec));
        }
        Ok::<_, Error>(records)
    };
    let (all, single) = (records_of(1000), records_of(1));
    assert_eq!(all.is_ok(), single.is_ok(), "{all:?}, {single:?}");
    if let (Ok(all), Ok(single)) = (all, single) {
        assert!(all.iter().zip(&single).all(|(both, single)| both == single));
    }
}

/// A message of features, and of lists of them.
fn example(input: &[u8]) {
    let names = Names::new(["a", "b", "c", "d"].map(str::to_owned));
    let mut found = vec![None; names.len()];
    if example::features(input, &names, &mut found).is_ok() {
        found.iter().flatten().for_each(read_values);
    }
    let mut found = vec![None; names.len()];
    if example::feature_lists(input, &names, &mut found).is_ok() {
        for steps in found.iter().flatten() {
            let _ = steps.for_each(|values| -> std::result::Result<(), Malformed> {
                values.iter().for_each(read_values);
                Ok(())
            });
        }
    }
}

/// The values of a list are as many as were counted, which `put_numbers` asserts.
fn read_values(values: &Values<'_>) {
    let Ok(count) = values.count() else { return };
    let numbers: &[Number] = match values.kind {
        Kind::Bytes => {
            let mut num_read = 0;
            values.for_each_bytes(|_| num_read += 1).expect("a list that was counted");
            assert_eq!(num_read, count);
            return;
        }
        Kind::Float => &[Number::F32, Number::F64],
        Kind::Int64 => &[Number::I64, Number::U16, Number::Bool],
    };
    for &number in numbers {
        let _ = values.put_numbers(number, &mut vec![0; count * number.byte_len()]);
    }
}

/// A JSON text; what is found in it is JSON, too.
fn json(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let member = |name: &str| Step::Member(name.to_owned());
    let deep = vec![member("b"), member("c"), Step::Item(1), member("d")];
    let paths = Paths::new([vec![member("a")], vec![member("b")], deep, vec![member("f")]]);
    let mut found = vec![None; 4];
    if paths.find(text, &mut found).is_err() {
        return;
    }
    for field in found.into_iter().flatten() {
        assert_eq!(Paths::new([vec![]]).find(field, &mut [None]), Ok(()));
        read_value(field, 0);
    }
}

fn read_value(text: &str, depth: usize) {
    if depth > 20 {
        return;
    }
    match json::value(text) {
        Value::String(string) => drop(json::decoded(string)),
        Value::Array(array) => json::for_each_item(array, |item| {
            read_value(item, depth + 1);
            Ok::<(), ()>(())
        })
        .expect("nothing fails"),
        Value::Object(object) => json::for_each_member(object, |_, member| {
            read_value(member, depth + 1);
            Ok::<(), ()>(())
        })
        .expect("nothing fails"),
        Value::Number(number) => assert!(number.parse::<f64>().is_ok(), "{number}"),
        Value::Null | Value::Bool(_) => {}
    }
}

/// One file, whatever its path.
#[derive(Debug, Clone)]
struct InMemory(Arc<Vec<u8>>);

impl Storage for InMemory {
    fn open(&self, _: &Path) -> Result<(Box<dyn StoredFile>, Arc<dyn ReadAt>)> {
        Ok((Box::new(self.clone()), Arc::new(self.clone())))
    }
}

impl StoredFile for InMemory {
    fn path(&self) -> &Path {
        Path::new("fuzzed")
    }

    fn byte_len(&self) -> u64 {
        self.0.len() as u64
    }

    fn modified_ns(&self) -> i64 {
        0
    }

    fn reopen(&self, _: bool) -> Result<ReopenedFile> {
        Ok(ReopenedFile { bytes: Arc::new(self.clone()), new_id: None })
    }

    fn accept_id(&self, _: FileId) {}
}

impl ReadAt for InMemory {
    fn read_at(&self, out: &mut [u8], at: u64) -> Result<()> {
        let found = usize::try_from(at).ok().and_then(|at| self.0.get(at..)?.get(..out.len()));
        out.copy_from_slice(found.ok_or_else(|| Error::Changed { path: "fuzzed".to_owned() })?);
        Ok(())
    }

    fn read_scattered(&self, buffers: &mut ScatterBuffers<'_>, at: u64) -> Result<()> {
        let mut bytes = vec![0; buffers.byte_len()];
        self.read_at(&mut bytes, at)?;
        buffers.fill(&bytes);
        Ok(())
    }
}

/// Bytes of a file from some offset on, with valid checksums: a chunk with its block headers.
fn headers(input: &[u8]) {
    limit_chunks();
    let Some((begin, raw)) = input.split_first_chunk::<2>() else { return };
    let begin = BLOCK_LEN + u64::from(u16::from_le_bytes(*begin));
    let mut raw = raw.to_vec();
    seal(&mut raw, begin);
    for limit in [begin + raw.len() as u64, u64::MAX] {
        let Ok(opened) = chunk::open(&raw, begin, limit) else { continue };
        assert!(opened.end <= limit);
        let mut raw = raw.clone();
        let Ok(data) = opened.data(&mut raw, begin) else { continue };
        assert_eq!(data.len() as u64, opened.header.data_len);
        let few =
            ChunkHeader { num_records: opened.header.num_records % MAX_RECORDS, ..opened.header };
        decode(&few, &raw[data]);
    }
}

/// Writes valid checksums into the chunk at `begin` and its block headers.
fn seal(raw: &mut [u8], begin: u64) {
    let mut of_chunk = Vec::with_capacity(raw.len());
    let mut at = 0;
    while at < raw.len() {
        if (begin + at as u64).is_multiple_of(BLOCK_LEN) {
            if let Some(header) = raw.get_mut(at..at + 24) {
                let sum = hash(&header[8..]);
                header[..8].copy_from_slice(&sum.to_le_bytes());
            }
            at += 24;
        } else {
            of_chunk.push(at);
            at += 1;
        }
    }
    let mut bytes: Vec<u8> = of_chunk.iter().map(|&at| raw[at]).collect();
    let Some((header, data)) = bytes.split_first_chunk_mut::<CHUNK_HEADER_LEN>() else { return };
    let data_len = u64::from_le_bytes(std::array::from_fn(|at| header[8 + at]));
    if let Some(data) = usize::try_from(data_len).ok().and_then(|len| data.get(..len)) {
        header[16..24].copy_from_slice(&hash(data).to_le_bytes());
    }
    let sum = hash(&header[8..]);
    header[..8].copy_from_slice(&sum.to_le_bytes());
    for (&at, &byte) in of_chunk.iter().zip(header.iter()) {
        raw[at] = byte;
    }
}

/// The record of a postscript.
fn postscript(input: &[u8]) {
    let data = [&[0][..], &with_len(&varint(input.len() as u64)), input].concat();
    let header = ChunkHeader::of(kind::SIMPLE, &data, 1, input.len() as u64);
    let mut decoder = Decoder::default();
    let records = decoder.decode(&header, &data).expect("a valid chunk");
    let _ = footer::footer_offset(records);
}

fn with_len(bytes: &[u8]) -> Vec<u8> {
    [&varint(bytes.len() as u64), bytes].concat()
}

/// The records of a footer: its offset, then each record after its length.
fn footer_records(input: &[u8]) {
    let mut cursor = Cursor::new(input);
    let Ok(footer_offset) = cursor.varint64() else { return };
    let records = split(&mut cursor);
    let Some((first, entries)) = records.split_first() else { return };
    let num_entries = entries.len() as u64;
    let Ok(mut parser) = FooterParser::new(first, num_entries, footer_offset, 100) else { return };
    if entries.iter().any(|entry| parser.entry(entry).is_err()) {
        return;
    }
    let Ok((footer, offsets)) = parser.finish() else { return };
    assert_eq!(footer.num_chunks, num_entries);
    assert!(footer.first_offset <= footer_offset);
    let Some(offsets) = offsets else { return };
    assert_eq!(offsets.len() as u64, num_entries);
    let all: Vec<u64> = (0..offsets.len()).filter_map(|at| offsets.get(at)).collect();
    assert_eq!(all.len(), offsets.len());
    assert!(all.is_sorted_by(|a, b| a < b) && all.iter().all(|&offset| offset < footer_offset));
}

/// Byte strings, each after its length.
fn split<'a>(cursor: &mut Cursor<'a>) -> Vec<&'a [u8]> {
    std::iter::from_fn(|| cursor.varint64().and_then(|len| cursor.take(len)).ok()).collect()
}

/// The data of a simple chunk, after the number of records and the decoded length.
fn simple_chunk(input: &[u8]) {
    let mut cursor = Cursor::new(input);
    let Ok((num_records, decoded_len)) = counts(&mut cursor) else { return };
    limit_chunks();
    decode(&header(kind::SIMPLE, num_records, decoded_len), cursor.rest());
}

/// The data of a transposed chunk, likewise. The decoded records must round-trip.
fn transposed_chunk(input: &[u8]) {
    let mut cursor = Cursor::new(input);
    let Ok((num_records, decoded_len)) = counts(&mut cursor) else { return };
    limit_chunks();
    let header = header(kind::TRANSPOSED, num_records, decoded_len);
    if let Some(group) = decode(&header, cursor.rest())
        && group.decoded_len() < 1 << 16
    {
        assert_round_trips(&group, kind::TRANSPOSED, Codec::Uncompressed, 64);
    }
}

/// A header for data whose checksum has been verified.
fn header(kind: u8, num_records: u64, decoded_len: u64) -> ChunkHeader {
    ChunkHeader { num_records, decoded_len, ..ChunkHeader::of(kind, &[], 0, 0) }
}

/// The records of a chunk, whose number and length must be those in its header.
fn decode(header: &ChunkHeader, data: &[u8]) -> Option<Group> {
    let mut decoder = Decoder::default();
    let records = decoder.decode(header, data).ok()?;
    let mut group = Group::default();
    all(&records).for_each(|record| group.push(record));
    assert_eq!(group.num_records(), header.num_records);
    if matches!(header.kind, kind::SIMPLE | kind::TRANSPOSED) {
        assert_eq!(group.decoded_len(), header.decoded_len);
    }
    Some(group)
}

fn all<'a>(records: &ChunkRecords<'a>) -> impl Iterator<Item = &'a [u8]> {
    (0..records.len()).map(|at| records.get(at).expect("each record has its bytes"))
}

/// A compressed block, after the codec. Decoding at once and as a stream must agree.
fn decompressors(input: &[u8]) {
    let Some((&code, block)) = input.split_first() else { return };
    let code = match code {
        codec::NONE | codec::BROTLI | codec::ZSTD | codec::SNAPPY => code,
        _ => [codec::BROTLI, codec::ZSTD, codec::SNAPPY][usize::from(code) % 3],
    };
    let mut out = Vec::new();
    let whole = Decompressor::default().decompress(code, block, MAX_CHUNK_LEN, &mut out).ok();
    if !StreamDecoder::<ShortReads<'_>>::supports(code) {
        return;
    }
    let len = whole.map_or(0, <[u8]>::len);
    let streamed = || -> Result<Vec<u8>, StreamError> {
        let mut decoder = StreamDecoder::new(code, ShortReads(block))?;
        let mut found = decoder.take(len / 2)?.to_vec();
        found.extend_from_slice(decoder.take(len - len / 2)?);
        decoder.finish()?;
        Ok(found)
    };
    match (whole, streamed()) {
        (Some(whole), Ok(found)) => assert!(found == whole, "{code}: other bytes when streamed"),
        // Only streaming allocates a window.
        (Some(_), Err(StreamError::Data(problem))) if problem.to_string().contains("memory") => {}
        (Some(_), Err(error)) => panic!("{code}: whole only: {error:?}"),
        // libzstd compares a frame with the size that its header states only if it decodes it whole.
        // Both compare it with the length before the frame, which is what records rely on.
        (None, Ok(_)) => assert_ne!(code, codec::SNAPPY, "streamed only"),
        (None, Err(_)) => {}
    }
}

/// A source that returns at most seven bytes at a time.
struct ShortReads<'a>(&'a [u8]);

impl ChunkSource for ShortReads<'_> {
    fn fill(&mut self) -> Result<&[u8], StreamError> {
        Ok(&self.0[..self.0.len().min(7)])
    }

    fn consume(&mut self, len: usize) {
        self.0 = &self.0[len..];
    }
}

/// A varint, which the parsers and a simple reference must read alike.
fn varints(input: &[u8]) {
    let read = |bits: u32| {
        let mut cursor = Cursor::new(input);
        let value = match bits {
            32 => cursor.varint32().map(u64::from),
            _ => cursor.varint64(),
        };
        value.ok().map(|value| (value, input.len() - cursor.rest().len()))
    };
    for bits in [32, 64] {
        assert_eq!(read(bits), reference_varint(input, bits));
    }
    let mut source = ShortReads(input);
    let streamed = varint64(&mut source).ok();
    assert_eq!(streamed.map(|value| (value, input.len() - source.0.len())), read(64));
    if let Some((value, len)) = read(64) {
        assert_eq!(read_varint(input), Ok((value, len)));
        assert_eq!(reference_varint(&varint(value), 64).map(|(value, _)| value), Some(value));
    }
}

fn reference_varint(bytes: &[u8], bits: u32) -> Option<(u64, usize)> {
    let mut value = 0_u128;
    for (at, &byte) in bytes.iter().enumerate().take(bits.div_ceil(7) as usize) {
        value |= u128::from(byte & 0x7f) << (7 * at);
        if byte < 0x80 {
            let value = u64::try_from(value).ok().filter(|&value| bits == 64 || value >> 32 == 0);
            return value.map(|value| (value, at + 1));
        }
    }
    None
}

/// The options of a writer as text, which must round-trip.
fn writer_options(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let Ok(options) = text.parse::<WriterOptions>() else { return };
    let printed = options.to_string();
    let again: WriterOptions = printed.parse().expect("what was printed can be read");
    assert_eq!(again.to_string(), printed, "{text:?}");
}

/// Records after a byte for the codec, encoded as a simple chunk and decoded again.
fn round_trip_simple(input: &[u8]) {
    round_trip(input, kind::SIMPLE);
}

/// The same for transposed chunks.
fn round_trip_transposed(input: &[u8]) {
    round_trip(input, kind::TRANSPOSED);
}

fn round_trip(input: &[u8], kind: u8) {
    let Some((&flags, rest)) = input.split_first() else { return };
    let codec = match flags % 4 {
        0 => Codec::Uncompressed,
        1 => Codec::Snappy,
        2 => Codec::Zstd { level: 1, window_log: 20 },
        _ => Codec::Brotli { level: 1, window_log: None },
    };
    let mut group = Group::default();
    for record in split(&mut Cursor::new(rest)) {
        group.push(record);
    }
    assert_round_trips(&group, kind, codec, 1 << (flags >> 4));
}

fn assert_round_trips(group: &Group, kind: u8, codec: Codec, bucket_len: u64) {
    let mut compressor = Compressor::new(codec).expect("valid settings");
    let mut data = Vec::new();
    let mut scratch = Vec::new();
    if kind == kind::SIMPLE {
        data =
            simple_data(group, &mut compressor, &mut scratch).expect("encoding to memory").concat();
    } else {
        transposed_data(group, bucket_len, &mut compressor, &mut data).expect("encoding to memory");
    }
    let header = ChunkHeader::of(kind, &data, group.num_records(), group.decoded_len());
    let found = decode(&header, &data).expect("what was encoded can be decoded");
    assert!(found.values() == group.values() && found.record_lens().eq(group.record_lens()));
}

fn limit_chunks() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| set_max_record_bytes(MAX_CHUNK_LEN));
}

/// Inputs for the targets made from an intact or damaged file.
pub(crate) fn seeds_of(bytes: &[u8]) -> Vec<(&'static str, Vec<u8>)> {
    let mut seeds = vec![("file", bytes.to_vec()), ("verify", bytes.to_vec())];
    let mut of_file = Vec::new();
    let mut begin = 64_u64;
    let end = (bytes.len() as u64).saturating_sub(BLOCK_LEN);
    while begin < bytes.len() as u64 {
        let Some(mut raw) =
            usize::try_from(begin).ok().and_then(|at| Some(bytes.get(at..)?.to_vec()))
        else {
            break;
        };
        let Ok(opened) = chunk::open(&raw, begin, bytes.len() as u64) else { break };
        let ChunkHeader { kind, num_records, decoded_len, .. } = opened.header;
        if let Ok(span) = usize::try_from(opened.span(begin))
            && span < 2_000
        {
            let at = u16::try_from(begin % BLOCK_LEN).unwrap_or_default().to_le_bytes();
            seeds.push(("headers", [&at, &raw[..span]].concat()));
        }
        let Ok(data) = opened.data(&mut raw, begin) else { break };
        let data = &raw[data];
        let counts = [varint(num_records), varint(decoded_len)].concat();
        match kind {
            kind::SIMPLE => {
                seeds.push(("simple_chunk", [&counts, data].concat()));
                seeds.extend(blocks_of(data).map(|block| ("decompressors", block)));
            }
            kind::TRANSPOSED => seeds.push(("transposed_chunk", [&counts, data].concat())),
            _ => {}
        }
        if begin >= end {
            break;
        }
        of_file.push(kind);
        if kind != kind::PADDING {
            of_file.extend([counts, with_len(data)].concat());
        }
        if let Some(group) = decode(&opened.header, data) {
            seeds.extend(seeds_of_records(&group, begin));
        }
        begin = opened.end;
    }
    seeds.push(("chunks", of_file));
    seeds.push(("postscript", postscript_of(begin)));
    seeds
}

/// The two compressed blocks of a simple chunk.
fn blocks_of(data: &[u8]) -> impl Iterator<Item = Vec<u8>> + use<> {
    let mut cursor = Cursor::new(data);
    let blocks = cursor.byte().and_then(|codec| {
        let lens = cursor.varint64().and_then(|len| cursor.take(len))?;
        Ok([[&[codec], lens].concat(), [&[codec], cursor.rest()].concat()])
    });
    blocks.into_iter().flatten()
}

/// Inputs from the records of a chunk.
fn seeds_of_records(group: &Group, begin: u64) -> Vec<(&'static str, Vec<u8>)> {
    let mut records = Vec::new();
    let mut rest = group.values();
    for len in group.record_lens().take(50) {
        let (record, after) = rest.split_at(len);
        records.extend(with_len(record));
        rest = after;
    }
    let flags = [0, 17, 34, 51_u8].map(|flags| [&[flags][..], &records].concat());
    let mut seeds = vec![("footer", [varint(begin), records].concat())];
    for input in flags {
        seeds.push(("round_trip_simple", input.clone()));
        seeds.push(("round_trip_transposed", input));
    }
    seeds
}

/// Inputs for the targets that take no data of a file.
pub(crate) fn other_seeds() -> Vec<(&'static str, Vec<u8>)> {
    let options = [
        "",
        "default",
        "group_size:256,zstd:5,window_log:20",
        "uncompressed,transpose:false,pad_to_block_boundary:true",
        "transpose,transpose_bucket_size:64K,brotli:9,window_log:auto,max_parallelism:1",
        "snappy:1,saturation_delay_ms:5",
    ];
    let varints =
        [&b"\x00"[..], b"\x7f", b"\x80\x01", b"\xff\xff\xff\xff\x0f", b"\x80\x80\x80\x00"];
    let longest = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01];
    let options = options.map(|text| ("writer_options", text.as_bytes().to_vec()));
    let varints = varints.into_iter().chain([&longest[..]]);
    // A `TFRecord` file with records of one byte and none, plain and as gzip.
    let frames =
        b"\x01\x00\x00\x00\x00\x00\x00\x00\x01\x75\xde\x41\x31\xc3\x0c\x4a\xd6\x00\x00\x00\
        \x00\x00\x00\x00\x00\x29\x03\x98\x07\xd8\xea\x82\xa2";
    let gzip = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\x03\x63\x64\x80\x00\xc6\xd2\x7b\x8e\x86\x87\
        \x79\xbc\xae\x41\xf9\x0c\x9a\xcc\x33\xd8\x6f\xbc\x6a\x5a\x04\x00\xd5\x8a\x7a\xd6\
        \x21\x00\x00\x00";
    // Three lines as xz and as bzip2.
    let xz =
        b"\xfd\x37\x7a\x58\x5a\x00\x00\x01\x69\x22\xde\x36\x02\x00\x21\x01\x16\x00\x00\x00\x74\x2f\
        \xe5\xa3\x01\x00\x10\x7b\x22\x61\x22\x3a\x20\x31\x7d\x0a\x7b\x7d\x0d\x0a\x6c\x61\x73\x74\
        \x00\x00\x00\x00\xc1\x56\xdf\xe4\x00\x01\x25\x11\x3e\x45\xc5\xa2\x90\x42\x99\x0d\x01\x00\
        \x00\x00\x00\x01\x59\x5a";
    let bzip2 =
        b"\x42\x5a\x68\x39\x31\x41\x59\x26\x53\x59\x17\xd1\x21\x82\x00\x00\x06\xd9\x80\x00\x12\x50\
        \x00\x20\x10\x20\x04\x0c\x0a\x20\x00\x22\x00\x34\x68\x40\xd0\x34\x18\xa5\xe1\xbc\x4d\x15\
        \xc6\x08\xf1\x77\x24\x53\x85\x09\x01\x7d\x12\x18\x20";
    let zstd = zstd_frame(frames);
    let frames_of_zstd = [b"\x03", &zstd[..], b"\x50\x2a\x4d\x18\x01\0\0\0 ", &zstd].concat();
    let streams = [
        ("tfrecord_stream", &frames[..]),
        ("tfrecord_stream", &gzip[..]),
        ("lines", &gzip[..]),
        ("tfrecord_stream", &zstd[..]),
        ("lines", &zstd[..]),
        ("lines", &xz[..]),
        ("lines", &bzip2[..]),
        ("tfrecord", &frames_of_zstd),
        ("json_lines", &frames_of_zstd),
    ];
    let written = (0..6_u8).map(|format| {
        // Compressing 1 MB of noise takes a sanitized program a second.
        let noise = if matches!(format, 1 | 2) { 26 } else { 31 };
        let shapes = [[200, noise], [0, 0], [9, 10], [255, 15], [3, 16], [0, 1], [0, 0], [250, 26]];
        ("written", [&[format, 8][..], shapes.as_flattened(), &[7, 3, 3, 0, 1, 2, 250]].concat())
    });
    let lines = ["{\"a\": 1}\n{}\r\n\n  \nlast", "\n", "no end"];
    let lines = lines.map(|text| ("lines", text.as_bytes().to_vec()));
    let texts = [
        r#"{"a": 1, "b": {"c": [10, {"d": "x\"y\u00e9\ud83d\ude00"}], "e": null}, "f": -1.5e-3}"#,
        r#" {"b": {}, "b": {"c": [[], true, false]}} "#,
    ];
    let mut seeds: Vec<_> =
        options.into_iter().chain(varints.map(|bytes| ("varints", bytes.to_vec()))).collect();
    seeds.extend(streams.map(|(name, bytes)| (name, bytes.to_vec())));
    seeds.extend(lines);
    seeds.extend(written);
    // Documents of two sequences and of one; the index has the length that it states for the tokens.
    let header = [&b"MMIDIDX\0\0"[..], &1_u64.to_le_bytes(), &[1]].concat();
    let longs = |values: &[u64]| values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let counts = [50_i32, 0, 44].map(i32::to_le_bytes).concat();
    let index = [header, longs(&[3, 3]), counts, longs(&[0, 50, 50]), longs(&[0, 2, 3])].concat();
    seeds.push(("megatron", index));
    // Samples of 3, 0 and 2 bytes after a layout of columns.
    let words = [3_u32, 22, 25, 25, 27].map(u32::to_le_bytes).concat();
    let shard = [&words[..], b"{}oneab"].concat();
    seeds.extend([&[0][..], &[1, 0]].map(|kind| ("mds", [kind, &shard].concat())));
    seeds.extend([20, 21].map(|end| ("fixed_len", [&[4, 2, 2, 2, end][..], &[7; 22]].concat())));
    seeds.extend(texts.map(|text| ("json", text.as_bytes().to_vec())));
    seeds.extend(examples().into_iter().map(|message| ("example", message)));
    seeds
}

/// Messages with lists of each kind, packed and not, in both of the fields that are read.
fn examples() -> Vec<Vec<u8>> {
    let part = |number: u8, content: &[u8]| {
        [&[number << 3 | 2][..], &varint(content.len() as u64), content].concat()
    };
    let many: Vec<u8> = (0..300_u64).flat_map(|value| varint(value * value)).collect();
    let lists = [
        ("a", part(3, &part(1, &many))),
        ("a", part(3, &[8, 1, 8, 0xac, 2])),
        ("b", part(2, &part(1, &[0, 0, 128, 63, 0, 0, 0, 64]))),
        ("b", part(2, &[13, 0, 0, 128, 63])),
        ("c", part(1, &[part(1, b"text"), part(1, b"")].concat())),
        ("d", Vec::new()),
    ];
    let entry =
        |name: &str, value: &[u8]| part(1, &[part(1, name.as_bytes()), part(2, value)].concat());
    let context: Vec<u8> = lists.iter().flat_map(|(name, list)| entry(name, list)).collect();
    let steps: Vec<u8> = lists
        .iter()
        .flat_map(|(name, list)| entry(name, &[part(1, list), part(1, list)].concat()))
        .collect();
    vec![part(1, &context), [part(1, &context), part(2, &steps)].concat()]
}
