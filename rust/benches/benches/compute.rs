//! Loops that threads share, with one thread and with two, from shares of 50 us up.
#![expect(clippy::unwrap_used, reason = "a bench fails by panicking")]

use std::cell::LazyCell;
use std::mem::MaybeUninit;
use std::path::Path;
use std::sync::Arc;

use criterion::{Criterion, Throughput};
use grainmill_core::batch::{Arena, copy_rows, copy_rows_shared};
use grainmill_core::bytes::Bytes;
use grainmill_core::compute::{self, limit_threads};
use grainmill_core::formats::array_record::RecordWriter;
use grainmill_core::formats::{ArrayRecord, outputs};
use grainmill_core::io::ReadQueue;
use grainmill_core::read::copy::{CopyTarget, InMemory};
use grainmill_core::read::{Files, SourceFile, read};
use grainmill_image::{Filter, Options};

use crate::time;

const NUM_THREADS: [(&str, usize); 2] = [("threads_1", 1), ("threads_2", 2)];
/// Larger than the caches, so that the rows of each batch are read from memory.
const COLD_BYTES: usize = 256 << 20;

pub(crate) fn run(criterion: &mut Criterion) {
    rows(criterion);
    chunks(criterion);
    images(criterion);
    encoding(criterion);
}

/// Times `routine` with each number of threads.
fn with_threads<T, R>(
    criterion: &mut Criterion,
    (loop_name, workload): (&str, &str),
    throughput: Throughput,
    set_up: impl Fn() -> T,
    mut routine: impl FnMut(&mut T, usize) -> R,
) {
    let mut group = criterion.benchmark_group(format!("compute/{loop_name}/{workload}"));
    group.throughput(throughput);
    for (name, num_threads) in NUM_THREADS {
        let set_up = || {
            // As many as the first loop of the process finds.
            limit_threads(2);
            compute::for_each(vec![(); 2], |()| ());
            limit_threads(num_threads);
            set_up()
        };
        time(&mut group, name, set_up, |parts| routine(parts, num_threads));
    }
}

fn rows(criterion: &mut Criterion) {
    let arena = Arena::new(1 << 30);
    for (workload, row_len, num_rows) in [
        ("image_150528_n_256", 150_528, 256),
        ("image_150528_n_16", 150_528, 16),
        ("tokens_8192_n_1024", 8192, 1024),
        ("tokens_8192_n_128", 8192, 128),
    ] {
        let batch_len = row_len * num_rows;
        let num_batches = COLD_BYTES.div_ceil(batch_len);
        let elements = LazyCell::new(|| {
            (0..num_batches * num_rows).map(|_| vec![7_u8; row_len]).collect::<Vec<_>>()
        });
        let rows = LazyCell::new(|| {
            elements.iter().map(|row| row.as_slice().into()).collect::<Vec<Bytes<'_>>>()
        });
        let (count, bytes) = (num_rows as u64, batch_len as u64);
        let throughput = Throughput::ElementsAndBytes { elements: count, bytes };
        let set_up = || rows.chunks_exact(num_rows).cycle();
        with_threads(criterion, ("copy_rows", workload), throughput, set_up, |batches, threads| {
            let mut slot = arena.slot(batch_len).unwrap();
            let copy = if threads == 1 { copy_rows } else { copy_rows_shared };
            copy(batches.next().unwrap(), row_len, slot.bytes_mut());
            slot
        });
    }
}

/// Records that compress as text does.
fn texts(count: usize, len: usize) -> Vec<Vec<u8>> {
    let mut state = 1_u32;
    let record = |_| {
        let mut text = Vec::new();
        while text.len() < len {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            text.extend(format!("word{} ", state >> 20).into_bytes());
        }
        text.truncate(len);
        text
    };
    (0..count).map(record).collect()
}

fn chunks(criterion: &mut Criterion) {
    let dir = tempfile::tempdir().unwrap();
    for (workload, options, len, count) in [
        ("zstd_65536_n_16", "group_size:1,zstd", 65_536, 16),
        ("zstd_65536_n_4", "group_size:1,zstd", 65_536, 4),
        ("zstd_8192_n_64", "group_size:1,zstd", 8192, 64),
        ("zstd_8192_n_16", "group_size:1,zstd", 8192, 16),
        ("uncompressed_65536_n_12", "group_size:1,uncompressed", 65_536, 12),
    ] {
        let set_up = || {
            let path = dir.path().join(format!("{workload}.array_record"));
            let mut writer = RecordWriter::create(&path, options.parse().unwrap()).unwrap();
            for record in texts(count, len) {
                writer.write(&record).unwrap();
            }
            writer.close().unwrap();
            Arc::new(Files::open(ArrayRecord, [SourceFile::from(path)]).unwrap())
        };
        let positions: Vec<u64> = (0..count as u64).collect();
        let throughput = Throughput::Bytes((count * len) as u64);
        with_threads(criterion, ("read", workload), throughput, set_up, |files, _| {
            let none: Vec<Option<Vec<MaybeUninit<u8>>>> = Vec::new();
            read(files.plan(&positions).unwrap(), none, ReadQueue::of_program()).unwrap()
        });
    }
}

fn images(criterion: &mut Criterion) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/images");
    let options = Options {
        channels: Some(3),
        filter: Filter::Bilinear,
        exif_orientation: false,
        draft: false,
        max_pixels: 1 << 28,
        allow_damaged: false,
    };
    let set_up = || std::fs::read(dir.join("baseline_420.jpg")).unwrap();
    let throughput = Throughput::Elements(16);
    with_threads(criterion, ("decode_images", "jpeg_n_16"), throughput, set_up, |file, _| {
        let num_shares = compute::num_shares(16 * file.len(), 4 << 10).min(16);
        let shares = vec![&**file; 16];
        let shares = shares.chunks(16_usize.div_ceil(num_shares)).collect();
        compute::map(shares, |files: &[&[u8]]| {
            let decode = |file: &&[u8]| grainmill_image::decode(file, None, None, &options);
            files.iter().map(decode).collect::<Result<Vec<_>, _>>().unwrap()
        })
    });
}

/// The threads of a conversion, which are its own.
fn encoding(criterion: &mut Criterion) {
    let dir = tempfile::tempdir().unwrap();
    let records = LazyCell::new(|| texts(8192, 1024));
    let throughput = Throughput::Bytes(8192 * 1024);
    let set_up = || ();
    with_threads(criterion, ("encode", "zstd_1024"), throughput, set_up, |(), num_threads| {
        let path = dir.path().join("copy.array_record");
        let output = outputs::create("array_record", &path, "group_size:64,zstd").unwrap();
        let mut target = CopyTarget::new(output);
        let mut source = InMemory(records.iter().map(Vec::as_slice));
        target.copy(&mut source, u64::MAX, num_threads).unwrap();
        target.close().unwrap();
        std::fs::remove_file(path).unwrap();
    });
}
