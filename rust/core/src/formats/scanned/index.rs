//! What a scan finds: where the records of a file begin, and where decompression can start.

use std::sync::Arc;

use super::super::offsets::{OffsetReader, Offsets};
use super::stream::Points;
use crate::Result;

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
pub(super) fn extent(
    begins: &mut OffsetReader<'_>,
    end: u64,
    record: u64,
) -> Result<Option<std::ops::Range<u64>>> {
    let Ok(at) = usize::try_from(record) else { return Ok(None) };
    let Some(begin) = begins.get(at)? else { return Ok(None) };
    Ok(Some(begin..begins.get(at + 1)?.unwrap_or(end)))
}
