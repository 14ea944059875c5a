//! Copying rows into slots of the arena.
#![expect(clippy::unwrap_used, reason = "a bench fails by panicking")]

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use grainmill_core::batch::{Arena, copy_rows};
use grainmill_core::bytes::Bytes;

/// Name, bytes per row, rows per batch.
const WORKLOADS: [(&str, usize, usize); 4] = [
    ("image_150528", 150_528, 128),
    ("video_1048576", 1 << 20, 64),
    ("tokens_8192", 8192, 256),
    ("small_64", 64, 1024),
];
/// Larger than the caches, so that the rows of each batch are read from memory.
const COLD_BYTES: usize = 512 << 20;

fn copy_into_reused_slot(criterion: &mut Criterion) {
    let arena = Arena::new(1 << 30);
    for (workload, row_len, num_rows) in WORKLOADS {
        let num_batches = COLD_BYTES.div_ceil(row_len * num_rows).min(256);
        let elements: Vec<Vec<u8>> = (0..num_batches * num_rows)
            .map(|row| vec![u8::try_from(row % 251).unwrap(); row_len])
            .collect();
        let rows: Vec<Bytes<'_>> = elements.iter().map(|row| row.as_slice().into()).collect();
        let stack = |rows: &[Bytes<'_>]| {
            let mut slot = arena.slot(row_len * num_rows).unwrap();
            copy_rows(rows, row_len, slot.bytes_mut());
            slot
        };
        let mut group = criterion.benchmark_group(format!("batch/copy_rows/{workload}"));
        group.throughput(Throughput::Elements(num_rows as u64));
        assert_eq!(stack(&rows[..num_rows]).bytes(), elements[..num_rows].concat());
        let mut batches = rows.chunks_exact(num_rows).cycle();
        group.bench_function(num_rows.to_string(), |bencher| {
            bencher.iter(|| black_box(stack(batches.next().unwrap())));
        });
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
