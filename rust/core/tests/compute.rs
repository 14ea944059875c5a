//! Loops that threads share, against the same loops on one thread.
#![expect(clippy::unwrap_used, reason = "a test that cannot continue should fail")]

use std::mem::MaybeUninit;
use std::path::Path;
use std::sync::Arc;

use grainmill_core::batch::{copy_rows, copy_rows_shared};
use grainmill_core::bytes::Bytes;
use grainmill_core::compute::{self, limit_threads};
use grainmill_core::formats::ArrayRecord;
use grainmill_core::formats::array_record::RecordWriter;
use grainmill_core::io::ReadQueue;
use grainmill_core::read::{Files, Records, SourceFile, read};
use proptest::prelude::*;

const NUM_THREADS: [usize; 3] = [7, 2, 1];

/// The results of `compute` with each number of threads. All tests of this program set the numbers, so
/// a result may be of another; none may differ.
fn results<T>(mut compute: impl FnMut() -> T) -> Vec<T> {
    // The first loop of a process fixes the most threads there are.
    NUM_THREADS
        .iter()
        .map(|&num_threads| {
            limit_threads(num_threads);
            compute()
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn rows_are_copied_alike_by_any_number_of_threads(
        row_len in prop_oneof![Just(0_usize), 1..100_usize, 4000..70_000_usize, 500_000..3_000_000_usize],
        byte_len in 0..12_000_000_usize,
        seed in any::<u8>(),
    ) {
        let num_rows = byte_len / row_len.max(100_000);
        let elements: Vec<Vec<u8>> = (0..num_rows)
            .map(|row| (0..row_len).map(|at| seed ^ u8::try_from((at * 31 + row * 7) % 251).unwrap()).collect())
            .collect();
        let rows: Vec<Bytes<'_>> = elements.iter().map(|row| row.as_slice().into()).collect();
        let mut expected = vec![0; num_rows * row_len];
        copy_rows(&rows, row_len, &mut expected[..]);
        for copied in results(|| {
            let mut out = vec![0xA5; num_rows * row_len];
            copy_rows_shared(&rows, row_len, &mut out[..]);
            out
        }) {
            prop_assert!(copied == expected);
        }
    }

    #[test]
    fn results_of_shares_are_in_their_order(
        lens in proptest::collection::vec(prop_oneof![Just(0_u32), 0..50_u32, 0..20_000_u32], 0..60),
    ) {
        let sum = |len: u32| (0..u64::from(len)).fold(1_u64, |sum, step| sum.wrapping_mul(31) ^ step);
        let expected: Vec<u64> = lens.iter().map(|&len| sum(len)).collect();
        for found in results(|| compute::map(lens.clone(), sum)) {
            prop_assert_eq!(&found, &expected);
        }
    }
}

/// Records of awkward lengths: empty, equal, long.
fn records(seed: u64, count: usize, longest: usize) -> Vec<Vec<u8>> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let mut next = move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(state >> 33).unwrap()
    };
    (0..count)
        .map(|_| {
            let len = match next() % 4 {
                0 => 0,
                1 => 100,
                2 => next() % 2000,
                _ => next() % longest,
            };
            let (step, mask) = (next() % 7, next() % 64 + 1);
            (0..len).map(|at| u8::try_from(at * step % mask).unwrap()).collect()
        })
        .collect()
}

fn open(path: &Path) -> Arc<Files> {
    Arc::new(Files::open(ArrayRecord, [SourceFile::from(path.to_owned())]).unwrap())
}

fn read_all(files: &Arc<Files>, positions: &[u64]) -> grainmill_core::Result<Records> {
    let plan = files.plan(positions)?;
    let none: Vec<Option<Vec<MaybeUninit<u8>>>> = Vec::new();
    read(plan, none, ReadQueue::of_program())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(30))]

    #[test]
    fn records_are_read_alike_by_any_number_of_threads(
        seed in any::<u64>(),
        count in 1..400_usize,
        longest in prop_oneof![Just(3000_usize), Just(60_000)],
        options in prop_oneof![
            Just("group_size:1,zstd"), Just("group_size:16,zstd"), Just("group_size:3,snappy"),
            Just("group_size:1,uncompressed"),
        ],
        picks in proptest::collection::vec(any::<proptest::sample::Index>(), 1..500),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.array_record");
        let written = records(seed, count, longest);
        let mut writer = RecordWriter::create(&path, options.parse().unwrap()).unwrap();
        for record in &written {
            writer.write(record).unwrap();
        }
        writer.close().unwrap();
        let files = open(&path);
        let indices: Vec<usize> = picks.iter().map(|pick| pick.index(count)).collect();
        let positions: Vec<u64> = indices.iter().map(|&index| index as u64).collect();
        for found in results(|| read_all(&files, &positions).unwrap()) {
            prop_assert!(found.iter().eq(indices.iter().map(|&index| &written[index][..])));
        }
    }
}

#[test]
fn of_several_damaged_chunks_the_first_is_reported_by_any_number_of_threads() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.array_record");
    let mut writer = RecordWriter::create(&path, "group_size:1,zstd".parse().unwrap()).unwrap();
    for record in 0..100_u32 {
        let noise =
            (0..20_000_u32).map(|at| (at ^ record).wrapping_mul(2_654_435_761).to_le_bytes()[3]);
        writer.write(&noise.collect::<Vec<u8>>()).unwrap();
    }
    writer.close().unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    for at in (60_000..700_000).step_by(50_000) {
        bytes[at] ^= 0xFF;
    }
    std::fs::write(&path, bytes).unwrap();
    let files = open(&path);
    let positions: Vec<u64> = (0..100).collect();
    let errors = results(|| read_all(&files, &positions).unwrap_err().to_string());
    assert!(errors.iter().all(|error| *error == errors[2]), "{errors:?}");
}
