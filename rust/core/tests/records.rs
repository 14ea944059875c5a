//! The layer `records` through its public API: files of the C++ writer, damaged ones, and faults.

use std::path::{Path, PathBuf};

use grainmill_core::records::{Files, Source};
use serde_json::Value;
use sha2::{Digest, Sha256};

/// The shared corpus, where it is present.
fn corpus() -> Option<PathBuf> {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/data/array_record"));
    path.is_dir().then(|| path.to_owned())
}

fn manifest(dir: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(dir.join("manifest.json")).unwrap();
    serde_json::from_str::<Value>(&text).unwrap()["files"].as_array().unwrap().clone()
}

fn open(path: &Path) -> grainmill_core::Result<Files> {
    Files::open([Source::from(path.to_owned())])
}

fn hex(digest: impl AsRef<[u8]>) -> String {
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
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
fn files_of_the_c_writer_read_with_the_hashes_of_their_manifest() {
    let Some(dir) = corpus() else { return };
    let entries = manifest(&dir);
    assert!(entries.len() > 100);
    for entry in entries {
        let name = entry["file"].as_str().unwrap();
        let files = open(&dir.join(name)).unwrap();
        assert_eq!(Some(files.len()), entry["num_records"].as_u64(), "{name}");
        assert_eq!(
            files.files().next().unwrap().writer_options(),
            entry["writer_options"].as_str(),
            "{name}"
        );
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
fn damaged_files_get_the_strict_verdict_of_their_manifest() {
    let Some(dir) = corpus() else { return };
    let dir = dir.join("bad");
    let entries = manifest(&dir);
    assert!(entries.len() > 70);
    for entry in entries {
        let name = entry["file"].as_str().unwrap();
        let verdict = &entry["reference"];
        let files = match (open(&dir.join(name)), verdict.get("open_error")) {
            (Ok(files), None) => files,
            (Err(error), Some(_)) => {
                assert!(error.to_string().contains(name), "{error} does not name {name}");
                continue;
            }
            (Ok(_), Some(expected)) => panic!("{name} opens, expected {expected}"),
            (Err(error), None) => panic!("{error}"),
        };
        assert_eq!(Some(files.len()), verdict["num_records"].as_u64(), "{name}");
        let failed = verdict["failed"].as_object().unwrap();
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
        if let Some(expected) = verdict["records_sha256"].as_str() {
            assert_eq!(sha256_of(files.read(&all).unwrap().iter()), expected, "{name}");
        }
    }
}
