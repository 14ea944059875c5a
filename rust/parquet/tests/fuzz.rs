//! Reads damaged files: any bytes must give rows or an error, without a panic that escapes, a hang,
//! or memory beyond the limits. The inputs are the same in each run.
#![expect(clippy::unwrap_used, reason = "a test that cannot continue should fail")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use grainmill_core::bytes::ScatterBuffers;
use grainmill_core::records::storage::{FileId, ReadAt, ReopenedFile, Storage, StoredFile};
use grainmill_core::{Error, Result};
use grainmill_parquet::ParquetFiles;

/// How many inputs are tried, and for how long at most; an idle machine tries all.
const NUM_INPUTS: u64 = 4000;
const MAX_TIME: Duration = Duration::from_secs(8);
/// Rows read of each input.
const MAX_ROWS: u64 = 200;

/// A file in memory, at any path.
#[derive(Debug, Clone)]
struct Memory(Arc<[u8]>);

impl Storage for Memory {
    fn open(&self, path: &Path) -> Result<(Box<dyn StoredFile>, Arc<dyn ReadAt>)> {
        let stored = Stored { memory: self.clone(), path: path.to_owned() };
        Ok((Box::new(stored), Arc::new(self.clone())))
    }
}

#[derive(Debug)]
struct Stored {
    memory: Memory,
    path: PathBuf,
}

impl StoredFile for Stored {
    fn path(&self) -> &Path {
        &self.path
    }

    fn byte_len(&self) -> u64 {
        self.memory.0.len() as u64
    }

    fn modified_ns(&self) -> i64 {
        0
    }

    fn reopen(&self, _was_checked: bool) -> Result<ReopenedFile> {
        Ok(ReopenedFile { bytes: Arc::new(self.memory.clone()), new_id: None })
    }

    fn accept_id(&self, _id: FileId) {}
}

impl ReadAt for Memory {
    fn read_at(&self, out: &mut [u8], at: u64) -> Result<()> {
        let at = usize::try_from(at).unwrap();
        let end = at.checked_add(out.len()).filter(|&end| end <= self.0.len());
        let end = end.ok_or(Error::Changed { path: "memory".to_owned() })?;
        out.copy_from_slice(&self.0[at..end]);
        Ok(())
    }

    fn read_scattered(&self, _buffers: &mut ScatterBuffers<'_>, _at: u64) -> Result<()> {
        unreachable!("Parquet files are read range by range")
    }
}

/// Reads some rows of the file `input`, alone and together; returns how many of them it could.
fn read(input: Vec<u8>) -> Result<usize> {
    let storage: Arc<dyn Storage> = Arc::new(Memory(input.into()));
    let file = vec![(PathBuf::from("input"), None)];
    let files = Arc::new(ParquetFiles::open(&storage, file, None, 1 << 20)?);
    let rows: Vec<u64> = (0..files.len().min(MAX_ROWS)).collect();
    if let Some(&last) = rows.last() {
        drop(files.read(&[last]));
        drop(files.read(&[files.len() - 1]));
    }
    let rows = files.read(&rows)?;
    for column in &rows.columns {
        if rows.len > 0 {
            assert_eq!(column.joined()?.len(), rows.len);
        }
    }
    Ok(rows.len)
}

fn seeds() -> Vec<Vec<u8>> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/parquet");
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(data).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).unwrap()).collect()
}

/// The next number of a fixed sequence.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state >> 33
}

#[test]
fn the_seeds_are_read() {
    for seed in seeds() {
        assert!(read(seed).unwrap() > 0);
    }
}

#[test]
fn damaged_files_give_rows_or_an_error() {
    // The crate's own panics are caught and would fill the output.
    std::panic::set_hook(Box::new(|_| ()));
    let seeds = seeds();
    let started = Instant::now();
    let mut state = 1;
    let (mut num_errors, mut num_inputs) = (0, 0);
    for number in 0..NUM_INPUTS {
        if started.elapsed() > MAX_TIME {
            break;
        }
        let mut input = seeds[usize::try_from(number).unwrap() % seeds.len()].clone();
        let footer_len = u32::from_le_bytes(*input[..input.len() - 4].last_chunk().unwrap());
        let len = input.len() as u64;
        for _ in 0..=next(&mut state) % 3 {
            // Half of the changes go to the footer, which decides most.
            let at = if next(&mut state).is_multiple_of(2) {
                len - 1 - next(&mut state) % (u64::from(footer_len) + 8)
            } else {
                next(&mut state) % len
            };
            let at = usize::try_from(at).unwrap();
            match next(&mut state) % 4 {
                0 => input[at] ^= 1 << (next(&mut state) % 8),
                1 => input[at] = u8::try_from(next(&mut state) % 256).unwrap(),
                2 => {
                    input[at] =
                        [0, 1, 0x7f, 0x80, 0xff][usize::try_from(next(&mut state) % 5).unwrap()];
                }
                _ => {
                    let from = usize::try_from(next(&mut state) % len).unwrap();
                    input[at] = input[from];
                }
            }
        }
        let copy = input.clone();
        let result = std::panic::catch_unwind(|| read(input));
        let Ok(result) = result else {
            drop(std::panic::take_hook());
            panic!("input {number} panics: {copy:02x?}");
        };
        num_errors += u64::from(result.is_err());
        num_inputs += 1;
    }
    drop(std::panic::take_hook());
    assert!(num_inputs < 20 || num_errors > num_inputs / 10, "{num_errors} of {num_inputs}");
}
