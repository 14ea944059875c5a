//! Reads byte ranges of a file, joined where they are close.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use grainmill_core::io::storage::{FileHandle, Reader};
use grainmill_core::io::storage_latency::StorageLatency;
use grainmill_core::try_alloc::try_with_capacity;
use grainmill_core::{Error, Result};

/// What a reader of headers fetches at once.
const WINDOW: u64 = 8 << 10;

/// Which ranges are read together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct JoinLimits {
    /// The maximum gap between them.
    max_gap: u64,
    /// Ranges are not joined beyond this length.
    max_len: u64,
}

impl JoinLimits {
    pub(crate) const FAST: Self = Self { max_gap: 16 << 10, max_len: 8 << 20 };
    /// Where reads wait for storage: several shorter ones take less time than a long one.
    pub(crate) const SLOW: Self = Self { max_gap: 256 << 10, max_len: 2 << 20 };
    /// The offset indexes of a row group lie next to each other.
    pub(crate) const INDEXES: Self = Self { max_gap: 256 << 10, max_len: 8 << 20 };
}

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

/// Joins `ranges` of a file within `limits`, and those that overlap in any case; each range has what belonged
/// to those that it was joined from.
pub(crate) fn joined<T>(
    mut ranges: Vec<(Range<u64>, T)>,
    limits: JoinLimits,
) -> Vec<(Range<u64>, Vec<T>)> {
    ranges.sort_by_key(|(range, _)| range.start);
    let mut joined: Vec<(Range<u64>, Vec<T>)> = Vec::new();
    for (range, of_range) in ranges {
        match joined.last_mut() {
            Some((last, of_last))
                if range.start <= last.end.saturating_add(limits.max_gap)
                    && (range.start < last.end || range.end - last.start <= limits.max_len) =>
            {
                last.end = last.end.max(range.end);
                of_last.push(of_range);
            }
            _ => joined.push((range, vec![of_range])),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn may_join(joined: &Range<u64>, next: &Range<u64>, limits: JoinLimits) -> bool {
        next.start < joined.end
            || next.start - joined.end <= limits.max_gap
                && next.end - joined.start <= limits.max_len
    }

    proptest! {
        #[test]
        fn ranges_are_read_once_and_joined_as_far_as_the_limits_allow(
            ranges in prop::collection::vec((0..400_u64, 0..60_u64), 0..40),
            (max_gap, max_len) in (0..40_u64, 0..200_u64),
        ) {
            let limits = JoinLimits { max_gap, max_len };
            let ranges: Vec<_> = ranges.iter().map(|&(at, len)| at..at + len).collect();
            let found = joined(ranges.iter().cloned().zip(0..).collect(), limits);
            let mut all: Vec<usize> = found.iter().flat_map(|(_, of)| of.clone()).collect();
            all.sort_unstable();
            prop_assert_eq!(all, (0..ranges.len()).collect::<Vec<_>>());
            for (whole, of) in &found {
                let of: Vec<_> = of.iter().map(|&number| &ranges[number]).collect();
                prop_assert_eq!(whole.start, of[0].start);
                prop_assert_eq!(Some(whole.end), of.iter().map(|range| range.end).max());
                for (count, next) in of.iter().enumerate().skip(1) {
                    let end = of[..count].iter().map(|range| range.end).max();
                    prop_assert!(may_join(&(whole.start..end.unwrap()), next, limits));
                }
            }
            for pair in found.windows(2) {
                prop_assert!(!may_join(&pair[0].0, &ranges[pair[1].1[0]], limits));
            }
        }
    }
}
