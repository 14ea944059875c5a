//! Chunks whose records, protocol buffer messages, are split into columns.

pub mod columns;
pub mod decode;
pub mod encode;
pub mod state_machine;
