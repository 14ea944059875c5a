//! Records of one length at equal distances: windows of flat files of tokens, rows of arrays.

use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use super::format::{Format, OpenedFile};
use super::record_file::{Pick, RecordFile};
use crate::io::storage::StoredFile;
use crate::io::storage_latency::StorageLatency;
use crate::{Error, Result};

/// The format of files whose records have one length. They may overlap; what is left at the end and is
/// shorter than a record is none.
#[derive(Debug, Clone)]
pub struct FixedLen {
    /// The bytes of a record.
    pub record_len: u64,
    /// From where a record begins to where the next one does.
    pub stride: u64,
    /// The bytes of one value, of which a file has a whole number.
    pub value_len: u64,
    /// How many bytes precede the values in files that are not in `extents`.
    pub header_len: u64,
    /// Where the values of files are that say so themselves, by their paths.
    pub extents: HashMap<PathBuf, Range<u64>>,
}

impl Format for FixedLen {
    fn open(&self, file: OpenedFile<'_>) -> Result<Arc<dyn RecordFile>> {
        let stored = file.stored;
        let byte_len = stored.byte_len();
        let extent = self.extents.get(stored.path()).cloned();
        let extent = extent.unwrap_or(self.header_len..byte_len);
        let damaged = |problem| Err(Error::corrupt(stored.path(), "whole file", problem));
        if extent.end > byte_len || extent.start > extent.end {
            let end = extent.end.max(extent.start);
            return damaged(format!("has {byte_len} bytes, its values end at byte {end}"));
        }
        let len = extent.end - extent.start;
        if self.value_len == 0 || self.stride == 0 || self.record_len == 0 {
            return damaged("values, records and strides have no bytes".to_owned());
        }
        if !len.is_multiple_of(self.value_len) {
            let (value_len, begin) = (self.value_len, extent.start);
            return damaged(format!(
                "has {len} bytes from byte {begin} on, which are no whole number of values of {value_len}"
            ));
        }
        let num_records = len.checked_sub(self.record_len).map_or(0, |rest| rest / self.stride + 1);
        let &Self { record_len, stride, .. } = self;
        Ok(Arc::new(FixedLenFile { stored, extent, num_records, record_len, stride }))
    }
}

/// An open file.
#[derive(Debug)]
struct FixedLenFile {
    stored: Box<dyn StoredFile>,
    extent: Range<u64>,
    num_records: u64,
    record_len: u64,
    stride: u64,
}

impl RecordFile for FixedLenFile {
    fn stored(&self) -> &dyn StoredFile {
        &*self.stored
    }

    fn num_records(&self) -> u64 {
        self.num_records
    }

    fn stored_len(&self) -> u64 {
        self.num_records.saturating_mul(self.record_len)
    }

    fn locate(&self, picks: &mut [Pick], _: Option<&StorageLatency>) -> Result<bool> {
        for pick in picks {
            pick.begin = self.extent.start + pick.record * self.stride;
            pick.end = pick.begin + self.record_len;
            pick.within = 0;
            pick.predicted_len = u32::try_from(self.record_len).unwrap_or(0);
        }
        Ok(true)
    }
}
