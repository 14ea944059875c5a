//! `ArrayRecord`: a Riegeli file whose last block points to an index of its chunks.

mod chunk_stream;
mod diagnose;
mod direct;
pub mod footer;
mod index;
pub mod options;
pub(crate) mod ranges;
pub mod reader;
pub mod shared_index;
pub mod verify;
pub mod writer;

pub use options::WriterOptions;
pub use reader::{ArrayRecord, ArrayRecordFile};
pub use writer::RecordWriter;
