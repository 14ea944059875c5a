//! `ArrayRecord`: a Riegeli file whose last block leads to an index of its chunks.

mod diagnose;
pub(crate) mod direct;
pub mod footer;
pub mod options;
pub mod reader;
pub mod writer;

pub use options::WriterOptions;
pub use reader::ArrayRecordFile;
pub use writer::RecordWriter;
