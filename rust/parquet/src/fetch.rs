//! Reads byte ranges of a file, joined where they are close.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use grainmill_core::io::storage::{FileHandle, Reader};
use grainmill_core::io::storage_latency::StorageLatency;
use grainmill_core::try_alloc::try_with_capacity;
use grainmill_core::{Error, Result};

/// Ranges with a smaller gap between them are read together.
const MAX_GAP: u64 = 16 << 10;
/// The same where a read has to wait for storage.
pub(crate) const MAX_SLOW_GAP: u64 = 256 << 10;
/// Ranges are not joined beyond this length.
pub(crate) const MAX_JOINED: u64 = 8 << 20;
/// What a reader of headers fetches at once.
const WINDOW: u64 = 8 << 10;

/// A file that was opened for some reads.
#[derive(Debug, Clone)]
pub(crate) struct OpenFile {
    pub(crate) handle: FileHandle,
    pub(crate) latency: Arc<StorageLatency>,
    pub(crate) byte_len: u64,
}

impl OpenFile {
    /// The bytes in `range`, which must lie in the file.
    pub(crate) fn read(&self, range: Range<u64>) -> Result<Bytes> {
        read(self.handle.reader(&self.latency), range)
    }
}

/// The bytes in `range` of a file, which must lie in it.
pub(crate) fn read(reader: Reader<'_>, range: Range<u64>) -> Result<Bytes> {
    let len = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
    let mut out = try_with_capacity(len, || format!("{len} bytes of a Parquet file"))?;
    out.resize(len, 0);
    reader.read_at(&mut out, range.start)?;
    Ok(out.into())
}

/// Parts of a file in memory; the rest is read when asked for.
#[derive(Debug, Clone)]
pub(crate) struct Fetched {
    file: OpenFile,
    /// Sorted by where they start.
    parts: Vec<(u64, Bytes)>,
}

impl Fetched {
    /// The `parts` of `file`, each with its position.
    pub(crate) fn with(file: OpenFile, mut parts: Vec<(u64, Bytes)>) -> Self {
        parts.sort_unstable_by_key(|&(at, _)| at);
        Self { file, parts }
    }

    /// The file that they are parts of.
    pub(crate) fn file(&self) -> &OpenFile {
        &self.file
    }

    /// Whether the bytes in `range` are in memory.
    pub(crate) fn has(&self, range: &Range<u64>) -> bool {
        self.part(range).is_some()
    }

    /// Fetches `ranges` of `file`, one after another.
    pub(crate) fn of(file: OpenFile, ranges: Vec<Range<u64>>) -> Result<Arc<Self>> {
        let gap = if file.latency.is_slow() { MAX_SLOW_GAP } else { MAX_GAP };
        let mut parts = Vec::new();
        for range in joined(ranges, gap, MAX_JOINED) {
            parts.push((range.start, file.read(range)?));
        }
        Ok(Arc::new(Self { file, parts }))
    }

    /// The bytes in `range`; without a copy if they were fetched.
    pub(crate) fn get(&self, range: Range<u64>) -> Result<Bytes> {
        match self.part(&range) {
            Some(bytes) => Ok(bytes),
            None if range.start <= range.end && range.end <= self.file.byte_len => {
                self.file.read(range)
            }
            None => Err(Error::OutOfRange(format!("bytes {range:?} lie outside the file"))),
        }
    }

    fn part(&self, range: &Range<u64>) -> Option<Bytes> {
        let len = usize::try_from(range.end.checked_sub(range.start)?).ok()?;
        let bytes = self.held_from(range.start)?;
        (len <= bytes.len()).then(|| bytes.slice(..len))
    }

    /// What is in memory from `at` on.
    fn held_from(&self, at: u64) -> Option<Bytes> {
        let after = self.parts.partition_point(|&(start, _)| start <= at);
        let (start, bytes) = self.parts.get(after.checked_sub(1)?)?;
        let skipped = usize::try_from(at - start).ok()?;
        (skipped <= bytes.len()).then(|| bytes.slice(skipped..))
    }

    /// The fetched bytes from `at` on, or some that are read now, up to `end`.
    pub(crate) fn window(&self, at: u64, end: u64, min_len: u64) -> Result<Bytes> {
        let left = end.saturating_sub(at);
        match self.held_from(at) {
            Some(bytes) if !bytes.is_empty() && bytes.len() as u64 >= min_len.min(left) => {
                let left = usize::try_from(left).unwrap_or(usize::MAX);
                Ok(bytes.slice(..bytes.len().min(left)))
            }
            _ => self.file.read(at..end.min(at.saturating_add(min_len.max(WINDOW)))),
        }
    }
}

/// Joins `ranges` with gaps of up to `max_gap` between them, up to `max_joined` bytes.
pub(crate) fn joined(
    mut ranges: Vec<Range<u64>>,
    max_gap: u64,
    max_joined: u64,
) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last)
                if range.start <= last.end.saturating_add(max_gap)
                    && (range.start < last.end || range.end - last.start <= max_joined) =>
            {
                last.end = last.end.max(range.end);
            }
            _ => joined.push(range),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn close_ranges_are_joined_and_long_ones_are_not() {
        assert_eq!(joined(vec![40..50, 0..10, 20..30, 5..12], 8, 100), [0..30, 40..50]);
        assert_eq!(joined(vec![20..30, 0..10], 8, 100), [0..10, 20..30]);
        assert_eq!(joined(vec![0..50, 50..51], 8, 50), [0..50, 50..51]);
        assert_eq!(joined(vec![0..50, 49..60], 8, 50), vec![Range { start: 0, end: 60 }]);
    }
}
