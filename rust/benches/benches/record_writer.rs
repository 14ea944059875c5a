//! Writing records: chunks, codecs, transposition.
#![expect(clippy::unwrap_used, reason = "a bench fails by panicking")]

use std::fmt::Write as _;
use std::hint::black_box;
use std::path::Path;

use criterion::{Criterion, Throughput};
use grainmill_core::formats::ArrayRecord;
use grainmill_core::formats::array_record::RecordWriter;
use grainmill_core::read::{Files, SourceFile};

use crate::time;

const NUM_RECORDS: u32 = 20_000;

pub(crate) fn run(criterion: &mut Criterion) {
    write_files(criterion);
}

/// Records of 1 KiB that compress to about half, as text does.
fn texts() -> Vec<Vec<u8>> {
    let mut state = 1_u32;
    let record = |_| {
        let mut text = String::new();
        while text.len() < 1024 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let _ = write!(text, "word{} ", state >> 20);
        }
        text.into_bytes()[..1024].to_vec()
    };
    (0..NUM_RECORDS).map(record).collect()
}

/// Messages with a number, a string, and a message of two fixed numbers.
fn messages() -> Vec<Vec<u8>> {
    (0..NUM_RECORDS).map(message).collect()
}

fn message(number: u32) -> Vec<u8> {
    let mut out = vec![0x08, (number & 0x7f) as u8 | 0x80, (number >> 7 & 0x7f) as u8 | 1];
    let name = format!("example-{number:06}");
    out.extend([0x12, 14]);
    out.extend(name.as_bytes());
    out.extend([0x1a, 14, 0x09]);
    out.extend((f64::from(number) / 7.0).to_le_bytes());
    out.push(0x15);
    out.extend(number.to_le_bytes());
    out
}

fn write_all(path: &Path, options: &str, records: &[Vec<u8>]) {
    let mut writer = RecordWriter::create(path, options.parse().unwrap()).unwrap();
    for record in records {
        writer.write(black_box(record)).unwrap();
    }
    writer.close().unwrap();
}

fn write_files(criterion: &mut Criterion) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file.array_record");
    let mut group = criterion.benchmark_group("records/write");
    group.sample_size(10);
    let (text_len, message_len) = (1024, message(0).len());
    for (workload, options, record_len, records) in [
        ("text_1k/group_1/uncompressed", "uncompressed", text_len, texts as fn() -> _),
        ("text_1k/group_256/zstd_3", "group_size:256,zstd:3", text_len, texts),
        (
            "message_46/group_256/transpose_zstd_3",
            "group_size:256,transpose",
            message_len,
            messages,
        ),
        ("message_46/group_256/zstd_3", "group_size:256", message_len, messages),
    ] {
        let set_up = || {
            let records: Vec<Vec<u8>> = records();
            assert!(records.iter().all(|record| record.len() == record_len));
            write_all(&path, options, &records);
            let files = Files::open(ArrayRecord, [SourceFile::from(path.clone())]).unwrap();
            let positions: Vec<u64> = (0..u64::from(NUM_RECORDS)).collect();
            assert!(files.read(&positions).unwrap().iter().eq(records.iter().map(Vec::as_slice)));
            records
        };
        group.throughput(Throughput::Bytes(u64::from(NUM_RECORDS) * record_len as u64));
        time(&mut group, workload, set_up, |records| write_all(&path, options, records));
    }
}
