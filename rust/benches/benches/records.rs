//! Reading records: random and sequential, uncompressed, compressed and transposed.

use std::cell::LazyCell;
use std::hint::black_box;
use std::path::{Path, PathBuf};

use criterion::{Criterion, Throughput};
use grainmill_core::formats::ArrayRecord;
use grainmill_core::formats::array_record::RecordWriter;
use grainmill_core::read::{Files, SourceFile};

use crate::time;

pub(crate) fn run(criterion: &mut Criterion) {
    read(criterion);
    open_file(criterion);
    tiny_records(criterion);
}

/// Opens a file of the repository.
fn open(name: &str) -> Files {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/array_record");
    Files::open(ArrayRecord, [SourceFile::from(dir.join(format!("{name}.array_record")))])
        .expect("the file is in the repository")
}

/// The positions `0..len` in a scattered order.
fn scattered(len: u64) -> Vec<u64> {
    let step =
        (len * 5 / 8..=len).find(|&step| !len.is_multiple_of(step) && step % 2 == 1).unwrap_or(1);
    (0..len).map(|at| at * step % len).collect()
}

fn read(criterion: &mut Criterion) {
    for (workload, name) in [
        ("plain", "grid_g1_uncompressed"),
        ("zstd_g1", "grid_g1_zstd3"),
        ("zstd_g16", "grid_g16_zstd3"),
        ("brotli_g16", "grid_g16_brotli6"),
        ("snappy_g16", "grid_g16_snappy"),
        ("transposed_g100", "example_g100_true"),
    ] {
        let files = open(name);
        let rising: Vec<u64> = (0..files.len()).collect();
        for (order, positions) in [("rising", rising), ("scattered", scattered(files.len()))] {
            let set_up = || {
                let rising: Vec<u64> = (0..files.len()).collect();
                let all = files.read(&rising).expect("the file is valid");
                let all: Vec<&[u8]> = all.iter().collect();
                let records = files.read(&positions).expect("the file is valid");
                for (&position, record) in positions.iter().zip(records.iter()) {
                    let position = usize::try_from(position).expect("a small file");
                    assert_eq!(record, all[position], "record {position} of {name}");
                }
            };
            let mut group = criterion.benchmark_group(format!("records/read/{workload}"));
            group.throughput(Throughput::Elements(files.len()));
            time(&mut group, &format!("{order}_n_{}", files.len()), set_up, |()| {
                files.read(black_box(&positions)).expect("the file is valid")
            });
        }
    }
}

/// A file of `num_records` records of a few bytes, one per chunk.
fn write_tiny(dir: &Path, num_records: u64) -> PathBuf {
    let path = dir.join(format!("{num_records}.array_record"));
    let options = "uncompressed".parse().expect("valid options");
    let mut writer = RecordWriter::create(&path, options).expect("space for a file");
    for number in 0..num_records {
        writer.write(number.to_string().as_bytes()).expect("space for a record");
    }
    writer.close().expect("space for an index");
    path
}

fn open_path(path: &Path) -> Files {
    Files::open(ArrayRecord, [SourceFile::from(path.to_owned())]).expect("the file is valid")
}

fn open_file(criterion: &mut Criterion) {
    let set_up = || assert_eq!(open("grid_g1_zstd3").len(), 600);
    let mut group = criterion.benchmark_group("records/open/zstd_g1");
    time(&mut group, "chunks_600", set_up, |()| open(black_box("grid_g1_zstd3")));
}

/// Opening a file, and reading one record at a time, which does not depend on their number.
fn tiny_records(criterion: &mut Criterion) {
    let dir = tempfile::tempdir().expect("a directory for files");
    for (size, num_records) in [("1e3", 1_000), ("1e6", 1_000_000)] {
        let path = LazyCell::new(|| write_tiny(dir.path(), num_records));

        let mut group = criterion.benchmark_group("records/open/plain");
        group.sample_size(10).throughput(Throughput::Elements(num_records));
        let set_up = || assert_eq!(open_path(&path).len(), num_records);
        time(&mut group, &format!("chunks_{size}"), set_up, |()| open_path(black_box(&path)));
        group.finish();

        let mut group = criterion.benchmark_group("records/random_read/plain");
        let read_next = |(files, position): &mut (Files, u64)| {
            *position = (*position + 617_411) % num_records;
            let records = files.read(&[*position]).expect("the file is valid");
            (*position, records)
        };
        let set_up = || {
            let mut parts = (open_path(&path), 0);
            for _ in 0..100 {
                let (position, records) = read_next(&mut parts);
                assert!(records.iter().eq([position.to_string().as_bytes()]), "record {position}");
            }
            parts
        };
        time(&mut group, &format!("n_{size}"), set_up, read_next);
    }
}
