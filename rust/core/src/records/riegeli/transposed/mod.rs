//! Chunks whose records, protocol buffer messages, are cut into columns.

pub mod decode;
