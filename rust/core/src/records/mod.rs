//! The bytes of records, by index.
//!
//! Positions become a [`Plan`] of the byte ranges to read ([`files`], [`plan`]); a [`storage`] reads
//! them, a [`RecordFile`] decodes them, and [`read`] copies the records to their destinations. The
//! measured latency decides whether many reads should be in flight at once ([`storage_latency`]).

pub mod array_record;
mod buffer_pool;
pub mod chunk_cache;
pub mod files;
mod local;
pub mod plan;
pub mod read;
pub mod record_file;
pub mod riegeli;
mod single_flight;
pub mod storage;
pub mod storage_latency;

pub use array_record::ArrayRecordFile;
pub use files::{FileInfo, FileSet, Files, SortedPositions, Source};
pub use local::LocalFiles;
pub use plan::{Plan, Unit};
pub use read::{Outcome, Records, Scratch, UnitRecords};
pub use record_file::RecordFile;
