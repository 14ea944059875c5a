//! Files of the record writer, compared byte for byte where the format allows one encoding.
#![expect(clippy::unwrap_used, reason = "a test that cannot continue should fail")]

use std::fs;
use std::path::{Path, PathBuf};

use grainmill_core::formats::ArrayRecord;
use grainmill_core::formats::array_record::RecordWriter;
use grainmill_core::formats::record_limit::{DEFAULT_MAX_RECORD_BYTES, set_max_record_bytes};
use grainmill_core::read::{Files, SourceFile};
use proptest::prelude::*;
use sha2::{Digest, Sha256};

fn written(options: &str, records: &[Vec<u8>]) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file.array_record");
    let mut writer = RecordWriter::create(&path, options.parse().unwrap()).unwrap();
    for record in records {
        writer.write(record).unwrap();
    }
    writer.close().unwrap();
    fs::read(path).unwrap()
}

/// The records of a file written with `options`.
fn read_back(options: &str, records: &[Vec<u8>]) -> Vec<Vec<u8>> {
    read_from(&written(options, records))
}

/// The records of a file of these bytes.
fn read_from(bytes: &[u8]) -> Vec<Vec<u8>> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file.array_record");
    fs::write(&path, bytes).unwrap();
    read(&path)
}

fn read(path: &Path) -> Vec<Vec<u8>> {
    let files = Files::open(ArrayRecord, [SourceFile::from(path.to_owned())]).unwrap();
    let positions: Vec<u64> = (0..files.len()).collect();
    files.read(&positions).unwrap().iter().map(<[u8]>::to_vec).collect()
}

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/array_record")
}

fn sha256(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"))
}

fn numbers(count: u32) -> Vec<Vec<u8>> {
    (0..count).map(|number| number.to_string().into_bytes()).collect()
}

/// (name of a golden file, its hash, options, records), as `array_record` 0.8.6 wrote them.
fn plain_cases() -> Vec<(&'static str, &'static str, &'static str, Vec<Vec<u8>>)> {
    vec![
        (
            "count_0_uncompressed",
            "bb7d9c8ed25aa0ec5f40ee07e444096b2b58697cb675400fdadaedfab1ce2c40",
            "uncompressed",
            Vec::new(),
        ),
        (
            "count_12000_g1_uncompressed",
            "14c087187b0a6c9815aec61e8609b159f5eff87985c209744b01bafd900736df",
            "uncompressed",
            numbers(12_000),
        ),
        (
            "count_100000_g25_uncompressed",
            "56df3c60ad3c4fa91b6f63a7fb7b9c4fedd4ae1acb9e6f8ed79a60fd4d8957e6",
            "group_size:25,uncompressed",
            numbers(100_000),
        ),
        (
            "empty_records_5_g1_uncompressed",
            "aab208ca3726d5ea5eb42cb065eb72408da77e6a14425fe80ba99843771d87a5",
            "uncompressed",
            vec![Vec::new(); 5],
        ),
        (
            "empty_records_1000_g1000_uncompressed",
            "3cccd07a9325208450e950256e5f8c0c409829f1490365d533709e6bf407e785",
            "group_size:1000,uncompressed",
            vec![Vec::new(); 1000],
        ),
    ]
}

#[test]
fn uncompressed_files_are_those_of_array_record() {
    for (name, hash, options, records) in plain_cases() {
        assert_eq!(sha256(&written(options, &records)), hash, "{name}");
    }
}

/// The corpus is not in the repository; the test above has the hashes of some files.
#[test]
fn golden_files_are_reproduced() {
    let Ok(manifest) = fs::read_to_string(corpus().join("manifest.json")) else { return };
    let manifest: serde_json::Value = serde_json::from_str(&manifest).unwrap();
    let mut num_equal = 0;
    for file in manifest["files"].as_array().unwrap() {
        let (name, options) = (file["file"].as_str().unwrap(), &file["writer_options"]);
        let path = corpus().join(name);
        let records = read(&path);
        let bytes = written(options.as_str().unwrap(), &records);
        let stored = options.as_str().unwrap();
        if stored.contains("uncompressed") && !stored.contains("transpose:true") {
            assert!(bytes == fs::read(&path).unwrap(), "{name} differs");
            num_equal += 1;
        }
        assert!(read_from(&bytes) == records, "{name} does not round-trip");
    }
    assert_eq!(num_equal, 23);
}

#[test]
fn large_records_round_trip_with_every_codec() {
    let text: Vec<u8> = (0..700_000_u32).flat_map(u32::to_le_bytes).collect();
    let records = vec![b"before".to_vec(), text.repeat(24), Vec::new(), text];
    for codec in ["uncompressed", "snappy", "zstd:1", "brotli:1", "transpose,zstd:1"] {
        assert!(read_back(&format!("group_size:3,{codec}"), &records) == records, "{codec}");
    }
}

#[test]
fn the_limit_of_decoded_bytes_can_be_changed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("long.array_record");
    // Longer than any record of the other tests, which may run at the same time.
    let record: Vec<u8> = (0..80).flat_map(|byte| vec![byte; 1_000_000]).collect();
    for options in ["zstd:1", "transpose,uncompressed", "uncompressed"] {
        let mut writer = RecordWriter::create(&path, options.parse().unwrap()).unwrap();
        writer.write(&record).unwrap();
        writer.close().unwrap();
        let read = || Files::open(ArrayRecord, [SourceFile::from(path.clone())])?.read(&[0]);
        assert!(read().unwrap().iter().eq([&record[..]]), "{options}");
        set_max_record_bytes(79_999_999);
        let refused = read().map(drop);
        set_max_record_bytes(DEFAULT_MAX_RECORD_BYTES);
        // Chunks that take as many bytes in the file have no limit.
        let text = refused.map_or_else(|error| error.to_string(), |()| "ok".to_owned());
        let expected = if options == "zstd:1" { "expected at most 79999999" } else { "ok" };
        assert!(text.contains(expected), "{options}: {text}");
    }
}

#[test]
fn a_million_empty_records_fit_one_chunk() {
    let records = vec![Vec::new(); 1_000_000];
    assert_eq!(read_back("group_size:2147483647", &records).len(), records.len());
}

#[test]
fn windows_of_every_size_round_trip() {
    let record: Vec<u8> = (0..300_000_u32).flat_map(u32::to_be_bytes).collect();
    for options in ["zstd,window_log:10", "zstd,window_log:31", "brotli:5,window_log:10"] {
        let records = [record.clone()];
        assert!(read_back(options, &records) == records, "{options}");
    }
}

#[test]
fn a_writer_that_is_dropped_leaves_a_file_that_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file.array_record");
    let mut writer = RecordWriter::create(&path, "uncompressed".parse().unwrap()).unwrap();
    for _ in 0..40 {
        writer.write(&vec![7; 100_000]).unwrap();
    }
    drop(writer);
    assert!(fs::metadata(&path).unwrap().len() > 1 << 20, "much was written");
    assert!(Files::open(ArrayRecord, [SourceFile::from(path)]).is_err());
}

#[test]
fn a_full_disk_fails_every_later_call() {
    let mut writer = RecordWriter::create("/dev/full", "uncompressed".parse().unwrap()).unwrap();
    let first = writer.write(&vec![0; 2 << 20]).unwrap_err().to_string();
    assert!(first.starts_with("/dev/full: write: No space left on device"), "{first}");
    assert!(!writer.is_ok());
    assert_eq!(writer.write(b"x").unwrap_err().to_string(), first);
    assert_eq!(writer.close().unwrap_err().to_string(), first);
}

#[test]
fn a_path_that_cannot_be_created_is_named() {
    let dir = tempfile::tempdir().unwrap();
    for path in [dir.path().to_owned(), dir.path().join("missing/file")] {
        let error = RecordWriter::create(&path, "".parse().unwrap()).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{}: open: ", path.display())), "{error}");
    }
}

fn options() -> impl Strategy<Value = String> {
    let codec = prop::sample::select(vec![
        "uncompressed",
        "snappy",
        "zstd",
        "zstd:-7",
        "zstd:9,window_log:12",
        "brotli:2",
        "brotli:4,window_log:16",
    ]);
    let layout = prop::sample::select(vec![
        "",
        ",transpose",
        ",transpose,transpose_bucket_size:1",
        ",transpose,transpose_bucket_size:1M",
        ",pad_to_block_boundary:true",
    ]);
    (codec, layout, 1..30_u32)
        .prop_map(|(codec, layout, size)| format!("{codec}{layout},group_size:{size}"))
}

fn record() -> impl Strategy<Value = Vec<u8>> {
    // Small bytes are often tags and lengths of messages.
    prop_oneof![
        prop::collection::vec(any::<u8>(), 0..60),
        prop::collection::vec(0..0x22_u8, 0..40),
        (any::<u8>(), 0..90_000_usize).prop_map(|(byte, len)| vec![byte; len]),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn written_records_are_read_back(
        options in options(),
        records in prop::collection::vec(record(), 0..50),
    ) {
        prop_assert!(read_back(&options, &records) == records);
    }
}
