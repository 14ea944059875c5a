//! `ArrayRecord`: a Riegeli file whose last block leads to an index of its chunks.

mod diagnose;
pub mod footer;
pub mod options;
pub mod reader;
pub mod writer;

pub use reader::ArrayRecordFile;
