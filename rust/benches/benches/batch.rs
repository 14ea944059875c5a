//! Copying rows into slots of the arena.
#![expect(clippy::unwrap_used, reason = "a bench fails by panicking")]

use std::cell::LazyCell;

use criterion::{Criterion, Throughput};
use grainmill_core::batch::{Arena, copy_rows};
use grainmill_core::bytes::Bytes;

use crate::time;

/// Name, bytes per row, rows per batch.
const WORKLOADS: [(&str, usize, usize); 4] = [
    ("image_150528", 150_528, 128),
    ("video_1048576", 1 << 20, 64),
    ("tokens_8192", 8192, 256),
    ("small_64", 64, 1024),
];
/// Larger than the caches, so that the rows of each batch are read from memory.
const COLD_BYTES: usize = 512 << 20;

pub(crate) fn run(criterion: &mut Criterion) {
    copy_into_reused_slot(criterion);
    take_and_return_slot(criterion);
}

fn copy_into_reused_slot(criterion: &mut Criterion) {
    let arena = Arena::new(1 << 30);
    for (workload, row_len, num_rows) in WORKLOADS {
        let batch_len = row_len * num_rows;
        let num_batches = COLD_BYTES.div_ceil(batch_len).min(256);
        let elements = LazyCell::new(|| {
            (0..num_batches * num_rows)
                .map(|row| vec![u8::try_from(row % 251).unwrap(); row_len])
                .collect::<Vec<_>>()
        });
        let rows = LazyCell::new(|| {
            elements.iter().map(|row| row.as_slice().into()).collect::<Vec<Bytes<'_>>>()
        });
        let stack = |rows: &[Bytes<'_>]| {
            let mut slot = arena.slot(batch_len).unwrap();
            copy_rows(rows, row_len, slot.bytes_mut());
            slot
        };
        let set_up = || {
            assert_eq!(stack(&rows[..num_rows]).bytes(), elements[..num_rows].concat());
            rows.chunks_exact(num_rows).cycle()
        };
        let mut group = criterion.benchmark_group(format!("batch/copy_rows/{workload}"));
        let (elements, bytes) = (num_rows as u64, batch_len as u64);
        group.throughput(Throughput::ElementsAndBytes { elements, bytes });
        time(&mut group, &num_rows.to_string(), set_up, |batches| stack(batches.next().unwrap()));
    }
}

fn take_and_return_slot(criterion: &mut Criterion) {
    let set_up = || {
        let arena = Arena::new(1 << 30);
        assert_eq!(arena.slot(8192).unwrap().byte_len(), 8192);
        arena
    };
    let mut group = criterion.benchmark_group("batch/arena/reuse");
    time(&mut group, "8192", set_up, |arena| arena.slot(8192).unwrap());
}
