//! The bytes of records, by index.
//!
//! Positions become a [`Plan`] of the byte ranges to read ([`files`], [`plan`]); a storage reads
//! them, a [`RecordFile`] decodes them, and [`read`] copies the records to their destinations. A
//! [`Format`] opens such files and knows no storage.

pub mod array_record;
pub mod bagz;
pub mod checksum;
pub mod chunk_cache;
pub mod chunk_records;
pub mod decode_scratch;
pub mod files;
pub mod format;
pub mod format_error;
pub mod index_cache;
pub mod json_lines;
pub mod offsets;
pub mod outputs;
pub mod plan;
mod raw_bytes;
pub mod read;
pub mod record_file;
pub mod record_limit;
pub mod riegeli;
pub mod scanned;
pub mod sequential;
pub mod tfrecord;
pub mod web_dataset;

pub use array_record::{ArrayRecord, ArrayRecordFile};
pub use files::{FileInfo, FileSet, Files, SortedPositions, Source};
pub use format::Format;
pub use format_error::FormatError;
pub use plan::{Plan, Unit};
pub use read::{Outcome, Records, Scratch, UnitRecords};
pub use record_file::RecordFile;
