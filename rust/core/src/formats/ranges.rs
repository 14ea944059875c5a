//! Records in ranges of bytes that the caller knows: the record batches of Arrow files.

use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use super::format::{Format, OpenedFile};
use super::record_file::{Pick, RecordFile};
use crate::io::storage::StoredFile;
use crate::io::storage_latency::StorageLatency;
use crate::{Error, Result};

/// The format of files of which the caller says where each record is.
#[derive(Debug, Clone)]
pub struct Ranges {
    /// Where the records of each file are, by its path.
    pub ranges: HashMap<PathBuf, Arc<[Range<u64>]>>,
}

impl Format for Ranges {
    fn open(&self, file: OpenedFile<'_>) -> Result<Arc<dyn RecordFile>> {
        let stored = file.stored;
        let ranges = self.ranges.get(stored.path()).cloned().unwrap_or_default();
        let byte_len = stored.byte_len();
        let is_within = |range: &Range<u64>| range.start <= range.end && range.end <= byte_len;
        if let Some(number) = ranges.iter().position(|range| !is_within(range)) {
            let Range { start, end } = ranges[number];
            let problem = format!("reaches from byte {start} to {end}, the file has {byte_len}");
            return Err(Error::corrupt(stored.path(), format!("record {number}"), problem));
        }
        Ok(Arc::new(RangesFile { stored, ranges }))
    }
}

/// An open file.
#[derive(Debug)]
struct RangesFile {
    stored: Box<dyn StoredFile>,
    ranges: Arc<[Range<u64>]>,
}

impl RecordFile for RangesFile {
    fn stored(&self) -> &dyn StoredFile {
        &*self.stored
    }

    fn num_records(&self) -> u64 {
        self.ranges.len() as u64
    }

    fn stored_len(&self) -> u64 {
        self.ranges.iter().fold(0, |sum: u64, range| sum.saturating_add(range.end - range.start))
    }

    fn locate(&self, picks: &mut [Pick], _: Option<&StorageLatency>) -> Result<bool> {
        for pick in picks {
            let range = usize::try_from(pick.record).ok().and_then(|at| self.ranges.get(at));
            let range = range.expect("the number of a record");
            (pick.begin, pick.end, pick.within) = (range.start, range.end, 0);
            pick.predicted_len = u32::try_from(range.end - range.start).unwrap_or(0);
        }
        Ok(true)
    }
}
