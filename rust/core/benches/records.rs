//! Reading records: random and sequential, uncompressed, compressed and transposed.

use std::hint::black_box;
use std::path::{Path, PathBuf};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use grainmill_core::records::array_record::RecordWriter;
use grainmill_core::records::{ArrayRecord, Files, Source};

/// Opens a file of the repository.
fn open(name: &str) -> Files {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/array_record");
    Files::open(ArrayRecord, [Source::from(dir.join(format!("{name}.array_record")))])
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
        let all = files.read(&rising).expect("the file is valid");
        let all: Vec<&[u8]> = all.iter().collect();
        for (order, positions) in [("rising", rising), ("scattered", scattered(files.len()))] {
            let records = files.read(&positions).expect("the file is valid");
            for (&position, record) in positions.iter().zip(records.iter()) {
                let position = usize::try_from(position).expect("a small file");
                assert_eq!(record, all[position], "record {position} of {name}");
            }
            let mut group = criterion.benchmark_group(format!("records/read/{workload}"));
            group.throughput(Throughput::Elements(files.len()));
            group.bench_function(format!("{order}_n_{}", files.len()), |bencher| {
                bencher.iter(|| files.read(black_box(&positions)).expect("the file is valid"));
            });
            group.finish();
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
    Files::open(ArrayRecord, [Source::from(path.to_owned())]).expect("the file is valid")
}

fn open_file(criterion: &mut Criterion) {
    assert_eq!(open("grid_g1_zstd3").len(), 600);
    criterion.bench_function("records/open/zstd_g1/chunks_600", |bencher| {
        bencher.iter(|| open(black_box("grid_g1_zstd3")));
    });
    let dir = tempfile::tempdir().expect("a directory for files");
    let mut group = criterion.benchmark_group("records/open/plain");
    group.sample_size(10);
    for (size, num_records) in SIZES {
        let path = write_tiny(dir.path(), num_records);
        assert_eq!(open_path(&path).len(), num_records);
        group.throughput(Throughput::Elements(num_records));
        group.bench_function(format!("chunks_{size}"), |bencher| {
            bencher.iter(|| open_path(black_box(&path)));
        });
    }
}

const SIZES: [(&str, u64); 2] = [("1e3", 1_000), ("1e6", 1_000_000)];

/// One record at a time; the cost does not depend on the number of records.
fn random_read(criterion: &mut Criterion) {
    let dir = tempfile::tempdir().expect("a directory for files");
    for (size, num_records) in SIZES {
        let files = open_path(&write_tiny(dir.path(), num_records));
        let mut position = 0;
        let mut read_next = || {
            position = (position + 617_411) % num_records;
            let records = files.read(&[position]).expect("the file is valid");
            (position, records)
        };
        for _ in 0..100 {
            let (position, records) = read_next();
            assert!(records.iter().eq([position.to_string().as_bytes()]), "record {position}");
        }
        criterion.bench_function(&format!("records/random_read/plain/n_{size}"), |bencher| {
            bencher.iter(&mut read_next);
        });
    }
}

criterion_group!(benches, read, open_file, random_read);
criterion_main!(benches);
