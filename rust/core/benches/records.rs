//! Reading records: random and sequential, as they stand, compressed and transposed.

use std::hint::black_box;
use std::path::Path;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use grainmill_core::records::{Files, Source};

/// Opens a file that the repository carries.
fn open(name: &str) -> Files {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/array_record");
    Files::open([Source::from(dir.join(format!("{name}.array_record")))])
        .expect("the file is in the repository")
}

/// Visits every one of `len` positions in an order that is far from rising.
fn scattered(len: u64) -> Vec<u64> {
    let step = (len * 5 / 8..).find(|step| len % step != 0 && step % 2 == 1).unwrap_or(1);
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
        let all = files.read(&rising).expect("the file is sound");
        let all: Vec<&[u8]> = all.iter().collect();
        for (order, positions) in [("rising", rising), ("scattered", scattered(files.len()))] {
            let records = files.read(&positions).expect("the file is sound");
            for (&position, record) in positions.iter().zip(records.iter()) {
                let position = usize::try_from(position).expect("a small file");
                assert_eq!(record, all[position], "record {position} of {name}");
            }
            let mut group = criterion.benchmark_group(format!("records/read/{workload}"));
            group.throughput(Throughput::Elements(files.len()));
            group.bench_function(format!("{order}_n_{}", files.len()), |bencher| {
                bencher.iter(|| files.read(black_box(&positions)).expect("the file is sound"));
            });
            group.finish();
        }
    }
}

fn open_file(criterion: &mut Criterion) {
    assert_eq!(open("grid_g1_zstd3").len(), 600);
    criterion.bench_function("records/open/zstd_g1/chunks_600", |bencher| {
        bencher.iter(|| open(black_box("grid_g1_zstd3")));
    });
}

criterion_group!(benches, read, open_file);
criterion_main!(benches);
