//! `ArrayRecord`: a Riegeli file whose last block leads to an index of its chunks.

mod diagnose;
pub(crate) mod direct;
pub mod footer;
pub mod reader;

pub use reader::ArrayRecordFile;
