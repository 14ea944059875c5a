//! The layer `batch`, through its public API: rows into slots.
#![expect(clippy::unwrap_used, reason = "a bench that cannot go on should fail")]

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use grainmill_core::batch::{Arena, Warmth, copy_rows};

/// Name, bytes of a row, rows of a batch.
const WORKLOADS: [(&str, usize, usize); 3] =
    [("image_150528", 150_528, 128), ("tokens_8192", 8192, 256), ("small_64", 64, 1024)];

fn copy_into_reused_slot(criterion: &mut Criterion) {
    let arena = Arena::new(1 << 30);
    for (workload, row_len, num_rows) in WORKLOADS {
        let elements: Vec<Vec<u8>> =
            (0..num_rows).map(|row| vec![u8::try_from(row % 251).unwrap(); row_len]).collect();
        let rows: Vec<&[u8]> = elements.iter().map(Vec::as_slice).collect();
        let stack = || {
            let mut slot = arena.slot(row_len * num_rows).unwrap();
            copy_rows(&rows, row_len, slot.bytes_mut(), Warmth::Cold);
            slot
        };
        assert_eq!(stack().bytes(), rows.concat());
        let mut group = criterion.benchmark_group(format!("batch/copy_rows/{workload}"));
        group.throughput(Throughput::Elements(num_rows as u64));
        group.bench_function(num_rows.to_string(), |bencher| bencher.iter(|| black_box(stack())));
        group.finish();
    }
}

fn take_and_return_slot(criterion: &mut Criterion) {
    let arena = Arena::new(1 << 30);
    assert_eq!(arena.slot(8192).unwrap().byte_len(), 8192);
    criterion.bench_function("batch/arena/reuse/8192", |bencher| {
        bencher.iter(|| black_box(arena.slot(8192).unwrap()));
    });
}

criterion_group!(benches, copy_into_reused_slot, take_and_return_slot);
criterion_main!(benches);
