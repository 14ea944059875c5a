//! Tests the layers `formats` and `read` through their public API: files of the C++ writer and damaged files.
#![expect(clippy::unwrap_used, reason = "a test that cannot continue should fail")]
#![expect(clippy::cast_possible_truncation, reason = "offsets in small files")]

use std::any::Any;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};

use grainmill_core::formats::riegeli::{Decoder, chunk};
use grainmill_core::formats::{ArrayRecord, ArrayRecordFile};
use grainmill_core::io::ReadQueue;
use grainmill_core::read::{self, Files, SourceFile};
use grainmill_core::varint::push_varint;
use proptest::prelude::*;
use serde_json::Value;
use sha2::{Digest, Sha256};

/// The whole corpus where it is present, else the files in the repository.
fn corpus() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let shared = root.join("../../../shared/data/array_record");
    if shared.is_dir() { shared } else { root.join("../../tests/data/array_record") }
}

fn manifest(dir: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(dir.join("manifest.json")).unwrap();
    serde_json::from_str::<Value>(&text).unwrap()["files"].as_array().unwrap().clone()
}

fn open(path: &Path) -> grainmill_core::Result<Files> {
    Files::open(ArrayRecord, [SourceFile::from(path.to_owned())])
}

fn hex(digest: impl AsRef<[u8]>) -> String {
    digest.as_ref().iter().flat_map(|byte| [byte >> 4, byte & 15]).map(digit).collect()
}

fn digit(value: u8) -> char {
    char::from_digit(u32::from(value), 16).unwrap()
}

fn sha256_of<'a>(records: impl Iterator<Item = &'a [u8]>) -> String {
    let mut sum = Sha256::new();
    for record in records {
        sum.update((record.len() as u64).to_le_bytes());
        sum.update(record);
    }
    hex(sum.finalize())
}

#[test]
fn files_of_the_cpp_writer_have_the_hashes_of_their_manifest() {
    let dir = corpus();
    let entries = manifest(&dir);
    assert!(entries.len() > 10);
    for entry in entries {
        let name = entry["file"].as_str().unwrap();
        let files = open(&dir.join(name)).unwrap();
        assert_eq!(Some(files.len()), entry["num_records"].as_u64(), "{name}");
        let file: &dyn Any = &**files.set().open(0, false).unwrap();
        let file = file.downcast_ref::<ArrayRecordFile>().unwrap();
        assert_eq!(file.writer_options(), entry["writer_options"].as_str(), "{name}");
        let all: Vec<u64> = (0..files.len()).collect();
        let records = files.read(&all).unwrap();
        assert_eq!(
            Some(sha256_of(records.iter()).as_str()),
            entry["records_sha256"].as_str(),
            "{name}"
        );
        let samples = entry["sample_sha256"].as_object().unwrap();
        let positions: Vec<u64> = samples.keys().rev().map(|key| key.parse().unwrap()).collect();
        let records = files.read(&positions).unwrap();
        for (position, record) in positions.iter().zip(records.iter()) {
            assert_eq!(
                Some(hex(Sha256::digest(record)).as_str()),
                samples[&position.to_string()].as_str(),
                "{name}: record {position}"
            );
        }
    }
}

#[test]
fn damaged_files_fail_as_their_manifest_says() {
    let dir = corpus().join("bad");
    let entries = manifest(&dir);
    assert!(entries.len() > 8);
    for entry in entries {
        let name = entry["file"].as_str().unwrap();
        let reference = &entry["reference"];
        let files = match (open(&dir.join(name)), reference.get("open_error")) {
            (Ok(files), None) => files,
            (Err(error), Some(_)) => {
                assert!(error.to_string().contains(name), "{error} does not name {name}");
                continue;
            }
            (Ok(_), Some(expected)) => panic!("{name} opens, expected {expected}"),
            (Err(error), None) => panic!("{error}"),
        };
        assert_eq!(Some(files.len()), reference["num_records"].as_u64(), "{name}");
        let failed = reference["failed"].as_object().unwrap();
        for position in 0..files.len() {
            let result = files.read(&[position]);
            match (&result, failed.get(&position.to_string())) {
                (Ok(records), None) => assert_eq!(records.len(), 1),
                (Err(error), Some(_)) => {
                    let text = error.to_string();
                    assert!(text.contains(name) && text.contains(": chunk "), "{text}");
                    assert!(text.contains("record"), "{text}");
                }
                (Ok(_), Some(expected)) => panic!("{name}: record {position}: expected {expected}"),
                (Err(error), None) => panic!("{name}: record {position}: {error}"),
            }
        }
        let all: Vec<u64> = (0..files.len()).collect();
        assert_eq!(files.read(&all).is_ok(), failed.is_empty(), "{name}");
        if let Some(expected) = reference["records_sha256"].as_str() {
            assert_eq!(sha256_of(files.read(&all).unwrap().iter()), expected, "{name}");
        }
    }
}

#[test]
fn states_that_open_submessages_without_end_are_refused() {
    const NUM_STATES: u64 = 20_000;
    // No buffers, and states that each end a submessage and lead to the next one by themselves.
    let mut header = vec![0, 0];
    push_varint(&mut header, NUM_STATES);
    header.extend((0..NUM_STATES).map(|_| 14));
    (1..NUM_STATES).for_each(|next| push_varint(&mut header, NUM_STATES + next));
    header.extend([0, 0]);
    let mut data = vec![0];
    push_varint(&mut data, header.len() as u64);
    data.extend(header);
    data.extend([3; 1_000]);
    let header = chunk::ChunkHeader::of(b't', &data, 1, 1 << 28);
    let error = Decoder::default().decode(&header, &data).unwrap_err().to_string();
    assert!(error.contains("too many nested submessages"), "{error}");
}

/// Intact files of several kinds, which the tests damage.
fn intact_files() -> Vec<PathBuf> {
    ["grid_g1_zstd3", "chunk_many_blocks_g8", "example_g100_true", "grid_g16_brotli6"]
        .map(|name| corpus().join(format!("{name}.array_record")))
        .to_vec()
}

/// Reads the records with and without slots, which must agree for any file; returns their hash.
fn read_both_ways(path: &Path) -> Option<String> {
    let files = open(path).ok()?;
    let all: Vec<u64> = (0..files.len().min(200)).collect();
    let whole = files.read(&all).map(|records| sha256_of(records.iter())).ok();
    let plan = files.plan(&all).unwrap();
    let slots = plan.predicted_lens();
    let slot = |len: usize| vec![MaybeUninit::<u8>::uninit(); len.min(1 << 20)];
    let slots = slots.into_iter().map(|len| len.map(slot)).collect();
    let in_slots = read::read(plan, slots, ReadQueue::of_program());
    assert_eq!(in_slots.is_ok(), whole.is_some());
    whole
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn damaged_bytes_never_panic_and_never_decode_to_a_wrong_record(
        file in 0_usize..4,
        changes in proptest::collection::vec((any::<u16>(), 0_u8..4, any::<u64>()), 1..6),
        cut in proptest::option::weighted(0.2, any::<u32>()),
    ) {
        let path = &intact_files()[file];
        let mut bytes = std::fs::read(path).unwrap();
        let expected = read_both_ways(path).unwrap();
        let last_block = bytes.len() - 65_536;
        for (offset, region, value) in changes {
            // Near the front, around the footer, in the postscript, anywhere.
            let len = bytes.len();
            let at = match region {
                0 => usize::from(offset) % 4_096,
                1 => last_block.saturating_sub(usize::from(offset)),
                2 => last_block + usize::from(offset) % 200,
                _ => value as usize % len,
            };
            for (target, byte) in bytes[at..].iter_mut().zip(value.to_le_bytes()) {
                *target ^= byte;
            }
        }
        if let Some(cut) = cut {
            bytes.truncate(cut as usize % bytes.len());
        }
        let dir = tempfile::tempdir().unwrap();
        let damaged = dir.path().join("damaged");
        std::fs::write(&damaged, &bytes).unwrap();
        if let Some(found) = read_both_ways(&damaged) {
            prop_assert_eq!(found, expected);
        }
    }

    #[test]
    fn records_are_returned_in_the_order_of_their_positions(
        positions in proptest::collection::vec(0_u64..900, 0..300),
    ) {
        let dir = corpus();
        let names = ["grid_g16_zstd3", "count_0_default", "grid_g1_uncompressed"];
        let sources = names.map(|name| SourceFile {
            path: dir.join(format!("{name}.array_record")),
            skip: if name == "grid_g1_uncompressed" { 300 } else { 0 },
            ..SourceFile::default()
        });
        let files = Files::open(ArrayRecord, sources).unwrap();
        prop_assert_eq!(files.len(), 900);
        let all: Vec<u64> = (0..900).collect();
        let all = files.read(&all).unwrap();
        let all: Vec<&[u8]> = all.iter().collect();
        let expected: Vec<&[u8]> = positions.iter().map(|&at| all[at as usize]).collect();
        let read = files.read(&positions).unwrap();
        prop_assert_eq!(read.iter().collect::<Vec<_>>(), expected.clone());
        let plan = files.plan(&positions).unwrap();
        let no_slots: Vec<Option<Vec<MaybeUninit<u8>>>> = vec![None; positions.len()];
        let started = read::start(plan, no_slots, ReadQueue::of_program()).finish().unwrap();
        prop_assert_eq!(started.iter().collect::<Vec<_>>(), expected);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// Damaged data with valid checksums, as from a malicious writer.
    #[test]
    fn damaged_data_with_valid_checksums_is_decoded_or_refused(
        file in 0_usize..4,
        changes in proptest::collection::vec((any::<u32>(), any::<u8>()), 0..6),
        (more_records, more_bytes) in (-1_i64..2, -1_i64..2),
        cut in 0_usize..3,
    ) {
        let path = &intact_files()[file];
        let files = open(path).unwrap();
        let extent = files.plan(&[0]).unwrap().picks()[0].extent();
        let bytes = std::fs::read(path).unwrap();
        let mut raw = bytes[extent.start as usize..extent.end as usize].to_vec();
        let opened = chunk::open(&raw, extent.start, extent.end).unwrap();
        let data = opened.data(&mut raw, extent.start).unwrap();
        let mut data = raw[data].to_vec();
        data.truncate(data.len() - cut);
        for (at, byte) in changes {
            let at = at as usize % data.len().min(300);
            data[at] = byte;
        }
        let mut header = opened.header;
        header.num_records = header.num_records.saturating_add_signed(more_records);
        header.decoded_len = header.decoded_len.saturating_add_signed(more_bytes);
        let mut decoder = Decoder::default();
        if let Ok(records) = decoder.decode(&header, &data) {
            prop_assert_eq!(records.len() as u64, header.num_records);
            let total: usize = (0..records.len()).map(|at| records.get(at).unwrap().len()).sum();
            prop_assert_eq!(total as u64, header.decoded_len);
        }
    }
}
