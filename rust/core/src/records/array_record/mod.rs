//! `ArrayRecord` files: Riegeli files with an index of their chunks at the end.

pub mod options;
pub mod writer;
