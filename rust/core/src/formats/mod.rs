//! Formats of files of records.
//!
//! A [`Format`] opens a file as a [`RecordFile`], which locates and decodes its records; neither knows where
//! files are. [`sequential`] reads all records of a file in order, [`outputs`] write them.

pub mod array_record;
pub mod bagz;
pub mod checksum;
pub mod chunk_records;
pub mod decode_scratch;
pub mod fixed_len;
pub mod format;
pub mod format_error;
pub mod index_cache;
pub mod json_lines;
pub mod mds;
pub mod megatron;
pub mod offsets;
pub mod outputs;
pub mod ranges;
pub(crate) mod raw_bytes;
pub mod record_file;
pub mod record_limit;
pub mod riegeli;
pub mod scanned;
pub mod sequential;
pub mod tfrecord;
pub mod web_dataset;

pub use array_record::{ArrayRecord, ArrayRecordFile};
pub use format::Format;
pub use format_error::FormatError;
pub use record_file::RecordFile;
