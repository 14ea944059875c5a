//! `ArrayRecord`: a Riegeli file whose last block leads to an index of its chunks.

mod diagnose;
pub(crate) mod direct;
pub mod footer;
mod index;
pub mod offsets;
pub mod options;
mod pieces;
pub mod reader;
pub mod writer;

pub use options::WriterOptions;
pub use reader::ArrayRecordFile;
pub use writer::RecordWriter;
