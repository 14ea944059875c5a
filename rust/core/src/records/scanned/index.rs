//! What a scan finds: where the records of a file begin, and where decompression can start.

use std::sync::Arc;

use super::super::offsets::Offsets;
use super::stream::Points;

/// The index of one file.
#[derive(Debug, Clone)]
pub(super) struct Index {
    /// Where each record begins, in the decompressed stream if there is one.
    pub(super) begins: Arc<Offsets>,
    /// Where the last record ends.
    pub(super) end: u64,
    /// Where decompression can start, if the file is compressed.
    pub(super) points: Option<Arc<Points>>,
}

impl Index {
    pub(super) fn num_records(&self) -> u64 {
        self.begins.len() as u64
    }
}

/// Where record `at` of `begins` begins and ends; `end` is where the last one ends.
pub(super) fn extent(begins: &Offsets, end: u64, record: u64) -> Option<std::ops::Range<u64>> {
    let at = usize::try_from(record).ok()?;
    Some(begins.get(at)?..begins.get(at + 1).unwrap_or(end))
}
