//! Files that the record writer makes: byte for byte where the format leaves no choice.

use std::fs;

use grainmill_core::records::array_record::writer::RecordWriter;
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

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn numbers(count: u32) -> Vec<Vec<u8>> {
    (0..count).map(|number| number.to_string().into_bytes()).collect()
}

/// (name of a golden file, its hash, options, records); what array_record 0.8.6 wrote.
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
