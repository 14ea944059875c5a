//! Copies between files: by one thread and several, in blocks of any length.
#![expect(clippy::unwrap_used, reason = "a test that cannot continue should fail")]

use std::fs;
use std::io::Cursor;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use grainmill_core::formats::array_record::{RecordWriter, verify};
use grainmill_core::formats::json_lines::JsonLines;
use grainmill_core::formats::sequential::{RecordBlock, RecordStream};
use grainmill_core::formats::tfrecord::TfRecord;
use grainmill_core::formats::{ArrayRecord, outputs};
use grainmill_core::io::LocalFiles;
use grainmill_core::read::copy::{CopyTarget, InMemory, Indexed};
use grainmill_core::read::{Files, SourceFile};
use proptest::prelude::*;

fn target(format: &str, path: &Path, options: &str) -> CopyTarget {
    CopyTarget::new(outputs::create(format, path, options).unwrap())
}

/// The bytes of a file of `format` to which `records` were copied by `num_threads`, in `parts` calls.
fn copied(
    format: &str,
    options: &str,
    records: &[Vec<u8>],
    num_threads: usize,
    parts: usize,
) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let mut target = target(format, &path, options);
    for part in records.chunks(records.len().div_ceil(parts).max(1)) {
        let mut source = InMemory(part.iter().map(Vec::as_slice));
        assert_eq!(target.copy(&mut source, u64::MAX, num_threads).unwrap(), part.len() as u64);
    }
    target.close().unwrap();
    fs::read(path).unwrap()
}

/// What the writer of single records writes.
fn written(options: &str, records: &[Vec<u8>]) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let mut writer = RecordWriter::create(&path, options.parse().unwrap()).unwrap();
    for record in records {
        writer.write(record).unwrap();
    }
    writer.close().unwrap();
    fs::read(path).unwrap()
}

/// The frames of a `TFRecord` file, one by one, and its checksums bit by bit.
fn tfrecord(records: &[Vec<u8>]) -> Vec<u8> {
    let crc = |bytes: &[u8]| {
        let crc = !bytes.iter().fold(!0_u32, |crc, &byte| {
            (0..8).fold(crc ^ u32::from(byte), |crc, _| {
                (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg())
            })
        });
        crc.rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
    };
    let mut out = Vec::new();
    for record in records {
        let len = (record.len() as u64).to_le_bytes();
        out.extend([&len[..], &crc(&len), record, &crc(record)].concat());
    }
    out
}

fn read_stream(bytes: Vec<u8>, max_records: usize) -> Result<Vec<Vec<u8>>, String> {
    let mut stream =
        RecordStream::of(PathBuf::from("f"), Cursor::new(bytes), Box::new(TfRecord)).unwrap();
    let (mut block, mut records) = (RecordBlock::default(), Vec::new());
    while stream.read(&mut block, max_records).map_err(|error| error.to_string())? {
        records.extend(block.iter().map(<[u8]>::to_vec));
    }
    Ok(records)
}

fn records() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let record = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..40),
        (0..255_u8, 0..70_000_usize).prop_map(|(byte, len)| vec![byte; len]),
    ];
    prop::collection::vec(record, 0..40)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn copies_equal_what_the_writer_of_records_writes(
        records in records(),
        options in prop::sample::select(vec![
            "", "uncompressed", "group_size:3", "group_size:7,snappy", "group_size:5,transpose",
            "group_size:1000,brotli:1", "pad_to_block_boundary:true,group_size:4",
        ]),
        num_threads in 1..4_usize,
        parts in 1..4_usize,
    ) {
        let found = copied("array_record", options, &records, num_threads, parts);
        prop_assert_eq!(found, written(options, &records));
    }

    #[test]
    fn tfrecord_files_equal_their_slow_twin_and_are_read_back(
        records in records(),
        num_threads in 1..4_usize,
        max_records in 1..50_usize,
    ) {
        let plain = tfrecord(&records);
        prop_assert_eq!(&copied("tfrecord", "", &records, num_threads, 2), &plain);
        prop_assert_eq!(&read_stream(plain, max_records).unwrap(), &records);
        let gzip = copied("tfrecord", "gzip:1", &records, num_threads, 2);
        if !records.is_empty() {
            prop_assert_eq!(&gzip[..2], b"\x1f\x8b");
        }
        prop_assert_eq!(&read_stream(gzip, max_records).unwrap(), &records);
    }

    #[test]
    fn lines_are_read_back(lines in prop::collection::vec("[a-z{} ]{0,9}[a-z]", 0..50)) {
        let records: Vec<_> = lines.into_iter().map(String::into_bytes).collect();
        let bytes = copied("jsonl", "", &records, 2, 3);
        let mut stream =
            RecordStream::of(PathBuf::from("f"), Cursor::new(bytes), Box::new(JsonLines)).unwrap();
        let (mut block, mut found) = (RecordBlock::default(), Vec::new());
        while stream.read(&mut block, 7).unwrap() {
            found.extend(block.iter().map(<[u8]>::to_vec));
        }
        prop_assert_eq!(found, records);
    }

    #[test]
    fn short_blocks_compress_the_same_whether_remembered_or_not(
        lens in prop::collection::vec(0..300_usize, 1..30),
        options in prop::sample::select(vec!["zstd:3", "zstd:-5", "zstd:19", "snappy", "brotli:6"]),
    ) {
        // A file of one record has nothing to remember; the chunks of a file of several must hold
        // the same bytes, in which the block of the record's length comes first.
        let records: Vec<_> = lens.iter().map(|&len| vec![b'x'; len]).collect();
        let all = written(&format!("pad_to_block_boundary:true,{options}"), &records);
        for (number, record) in records.iter().enumerate() {
            let options = format!("pad_to_block_boundary:true,{options}");
            let alone = written(&options, std::slice::from_ref(record));
            // The first chunk of a file follows the signature; the others begin a block.
            let begin = if number == 0 { 64 } else { 65_536 * number + 24 };
            let len = usize::try_from(u64::from_le_bytes(alone[72..80].try_into().unwrap()));
            let len = len.unwrap();
            prop_assert_eq!(&all[begin + 40..begin + 40 + len], &alone[104..104 + len]);
        }
    }
}

#[test]
fn records_at_positions_are_copied_in_their_order() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let records: Vec<_> =
        (0..5000_u32).map(|n| n.to_le_bytes().repeat(1 + n as usize % 90)).collect();
    fs::write(&path, written("group_size:7", &records)).unwrap();
    let files = Arc::new(Files::open(ArrayRecord, [SourceFile::from(path)]).unwrap());
    let positions: Vec<u64> = (0..5000).map(|n| n * 1237 % 5000).collect();
    for num_threads in [1, 2] {
        let out = dir.path().join(format!("out-{num_threads}"));
        let mut target = target("tfrecord", &out, "");
        let (mut source, mut left) = (Indexed::new(&files), &positions[..]);
        for num_records in [1, 700, 3000, 1299] {
            let (now, later) = left.split_at(left.len().min(num_records + 40));
            source.add(now.iter().copied()).unwrap();
            left = later;
            let count = target.copy(&mut source, num_records as u64, num_threads).unwrap();
            assert_eq!(count, num_records as u64);
        }
        target.close().unwrap();
        let expected: Vec<_> = (0..5000).map(|n| records[n * 1237 % 5000].clone()).collect();
        assert_eq!(fs::read(out).unwrap(), tfrecord(&expected));
    }
}

#[test]
fn errors_name_the_record_and_its_place() {
    let records = vec![vec![1; 10], vec![2; 20], vec![3; 30]];
    let whole = tfrecord(&records);
    let mut damaged = whole.clone();
    damaged[26 + 12] ^= 1;
    let error = read_stream(damaged, 10).unwrap_err();
    assert!(error.starts_with("f: record 1 at byte 26: checksum mismatch of the data"), "{error}");
    for len in 0..whole.len() {
        let ends = [0, 26, 62];
        let result = read_stream(whole[..len].to_vec(), 10);
        assert_eq!(result.is_ok(), ends.contains(&len), "{len} bytes");
    }
    let mut huge = whole;
    huge[..8].copy_from_slice(&(1_u64 << 60).to_le_bytes());
    assert!(read_stream(huge, 10).unwrap_err().contains("record 0 at byte 0"));
}

#[test]
fn every_damaged_chunk_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let records: Vec<_> = (0..100_u8).map(|n| vec![n; 100]).collect();
    let bytes = written("uncompressed", &records);
    fs::write(&path, &bytes).unwrap();
    let report = verify::verify(&LocalFiles, &path, 100, &mut |_, _| Ok(())).unwrap();
    assert_eq!((report.num_records, report.problems.len()), (100, 0));
    assert_eq!((report.num_chunks, report.record_bytes), (100, 10_000));
    let mut damaged = bytes;
    for number in [0_u8, 17, 99] {
        let at = damaged.windows(100).position(|bytes| bytes == [number; 100]).unwrap();
        damaged[at + 5] ^= 4;
    }
    // A header, after which the next chunk is found by the index.
    let at = damaged.windows(100).position(|bytes| bytes == [50; 100]).unwrap();
    damaged[at - 20] ^= 4;
    fs::write(&path, &damaged).unwrap();
    let report = verify::verify(&LocalFiles, &path, 100, &mut |_, _| Ok(())).unwrap();
    let chunks: Vec<_> = report.problems.iter().map(|problem| problem.chunk).collect();
    assert_eq!(chunks, [Some(0), Some(17), Some(50), Some(99)]);
    assert_eq!((report.num_records, report.indexed_records), (96, Some(100)));
    assert_eq!(
        verify::verify(&LocalFiles, &path, 2, &mut |_, _| Ok(())).unwrap().problems.len(),
        2
    );
}
