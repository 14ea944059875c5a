//! The fuzz target for Parquet files: any bytes must give rows or an error, without a panic that
//! escapes, a hang, or memory beyond the limits.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use grainmill_core::bytes::ScatterBuffers;
use grainmill_core::io::ReadQueue;
use grainmill_core::io::storage::{FileId, ReadAt, ReopenedFile, Storage, StoredFile};
use grainmill_core::{Error, Result};
use grainmill_parquet::{Choice, ParquetFiles};

/// The name of a target and its function.
pub(crate) type Target = (&'static str, fn(&[u8]));

/// All targets.
pub(crate) const TARGETS: [Target; 1] = [("parquet", parquet)];

/// Rows read of each input.
const MAX_ROWS: u64 = 200;

/// The input as a file.
fn parquet(input: &[u8]) {
    drop(read(input.to_vec()));
}

/// Reads some rows of the file `input`, alone and together; returns how many of them it could.
pub(crate) fn read(input: Vec<u8>) -> Result<usize> {
    let storage: Arc<dyn Storage> = Arc::new(Memory(input.into()));
    let file = vec![(PathBuf::from("input"), None)];
    let files = Arc::new(ParquetFiles::open(&storage, file, Choice::default(), 1 << 20)?);
    let queue = ReadQueue::of_program();
    let rows: Vec<u64> = (0..files.len().min(MAX_ROWS)).collect();
    if let Some(&last) = rows.last() {
        drop(files.read(&[last], queue));
        drop(files.read(&[files.len() - 1], queue));
    }
    let rows = files.read(&rows, queue)?;
    for column in &rows.columns {
        if rows.len > 0 {
            assert_eq!(column.joined()?.len(), rows.len);
        }
    }
    Ok(rows.len)
}

/// Inputs to begin with: the files of the tests.
pub(crate) fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/parquet");
    let entries = std::fs::read_dir(data).expect("the files of the tests");
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("a file").path()).collect();
    paths.sort();
    let files = paths.iter().map(|path| std::fs::read(path).expect("a file of the tests"));
    files.map(|file| ("parquet", file)).collect()
}

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
        let at = usize::try_from(at).unwrap_or(usize::MAX);
        let end = at.checked_add(out.len()).filter(|&end| end <= self.0.len());
        let end = end.ok_or(Error::Changed { path: "memory".to_owned() })?;
        out.copy_from_slice(&self.0[at..end]);
        Ok(())
    }

    fn read_scattered(&self, _buffers: &mut ScatterBuffers<'_>, _at: u64) -> Result<()> {
        unreachable!("Parquet files are read range by range")
    }
}
