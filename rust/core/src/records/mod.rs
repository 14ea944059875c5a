//! The bytes of records, by index.

pub mod array_record;
mod descriptors;
pub mod files;
pub mod riegeli;
mod spare;

pub use array_record::ArrayRecordFile;
pub use files::{Files, PartRecords, Plan, Records, Scratch, Source};
