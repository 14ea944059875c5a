//! Transposed chunks: records that are protocol buffer messages, cut into columns.

pub mod cut;
pub mod encode;
pub mod machine;
