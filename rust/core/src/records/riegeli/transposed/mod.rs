//! Chunks whose records, protocol buffer messages, are cut into columns.

pub mod cut;
pub mod decode;
pub mod encode;
pub mod state_machine;
