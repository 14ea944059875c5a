//! A temporary file for offsets that do not fit into the memory they may take.
//!
//! The system keeps what is used of it in memory as long as there is room. A file has no name, so
//! nothing is left behind; it is freed with the last offsets in it.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use crate::platform::TemporaryFile;
use crate::process::PerProcess;

/// How many bytes of offsets each process has in memory unless [`set_budget`] changes it.
const DEFAULT_BUDGET: usize = 256 << 20;
/// The length of one file.
const FILE_LEN: u64 = 64 << 20;
/// How many bytes of files there may be for each byte of memory that offsets may take.
const MAX_RATIO: u64 = 16;
/// How many offsets are written at once at most.
pub(crate) const MAX_PART_LEN: usize = 1 << 20;
/// How many offsets are read at once.
const BLOCK_LEN: usize = 128;

const OFFSET_LEN: usize = size_of::<u32>();

static BUDGET: AtomicUsize = AtomicUsize::new(DEFAULT_BUDGET);
static FILES: PerProcess<Mutex<Files>> = PerProcess::new(Mutex::default);

/// How many bytes of offsets this process may have in memory.
pub fn budget() -> usize {
    BUDGET.load(Ordering::Relaxed)
}

pub(crate) fn set_budget(byte_len: usize) {
    BUDGET.store(byte_len, Ordering::Relaxed);
}

#[derive(Default)]
struct Files {
    /// The file that is being filled, and how far.
    last: Option<Arc<TemporaryFile>>,
    used: u64,
    all: Vec<Weak<TemporaryFile>>,
}

impl Files {
    /// A range of `len` bytes of a file, while at most `max_len` bytes are used.
    fn allocate(&mut self, len: u64, max_len: u64) -> io::Result<(Arc<TemporaryFile>, u64)> {
        if let Some(file) = &self.last
            && FILE_LEN - self.used >= len
        {
            let at = self.used;
            self.used += len;
            return Ok((Arc::clone(file), at));
        }
        self.last = None;
        self.all.retain(|file| file.strong_count() > 0);
        if self.all.len() as u64 >= (max_len / FILE_LEN).max(1) {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        let file = Arc::new(TemporaryFile::create()?);
        self.all.push(Arc::downgrade(&file));
        self.used = len;
        self.last = Some(Arc::clone(&file));
        Ok((file, 0))
    }
}

/// Consecutive offsets, or their low halves, in a temporary file.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    file: Arc<TemporaryFile>,
    at: u64,
    len: usize,
}

impl Part {
    /// Writes `offsets`, at most [`MAX_PART_LEN`]; `budget` is the memory that all may take.
    ///
    /// # Errors
    /// If there is no place for them.
    pub(crate) fn write(offsets: &[u32], budget: usize) -> io::Result<Self> {
        let mut bytes = Vec::with_capacity(offsets.len() * OFFSET_LEN);
        for offset in offsets {
            bytes.extend_from_slice(&offset.to_ne_bytes());
        }
        let max_len = (budget as u64).saturating_mul(MAX_RATIO);
        let (file, at) = FILES.lock().allocate(bytes.len() as u64, max_len)?;
        file.write_at(&bytes, at)?;
        Ok(Self { file, at, len: offsets.len() })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Replaces `block` by the offsets around number `at`; returns the number of the first.
    ///
    /// # Errors
    /// If they cannot be read.
    pub(crate) fn read_block(&self, at: usize, block: &mut Vec<u32>) -> io::Result<usize> {
        let first = at - at % BLOCK_LEN;
        let mut bytes = [0; BLOCK_LEN * OFFSET_LEN];
        let bytes = &mut bytes[..(self.len - first).min(BLOCK_LEN) * OFFSET_LEN];
        self.file.read_at(bytes, self.at + (first * OFFSET_LEN) as u64)?;
        block.clear();
        block.extend(bytes.as_chunks().0.iter().map(|bytes| u32::from_ne_bytes(*bytes)));
        Ok(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_round_trip_and_files_are_freed_with_their_last_part() {
        let offsets: Vec<u32> = (0..2_500_000).collect();
        let mut files = Files::default();
        let mut parts = Vec::new();
        for part in offsets.chunks(MAX_PART_LEN) {
            parts.push(Part::write(part, 1 << 30).unwrap());
        }
        let mut block = Vec::new();
        for (number, part) in parts.iter().enumerate() {
            for at in [0, 1, 127, 128, part.len() / 2, part.len() - 1] {
                let first = part.read_block(at, &mut block).unwrap();
                assert_eq!(block[at - first] as usize, number * MAX_PART_LEN + at);
            }
        }
        let held: Vec<_> = (0..3).map(|_| files.allocate(FILE_LEN, 2 * FILE_LEN)).collect();
        assert!(held[0].is_ok() && held[1].is_ok());
        assert!(held[2].is_err(), "beyond the limit");
        drop(held);
        assert!(files.allocate(1, 0).is_ok());
    }
}
