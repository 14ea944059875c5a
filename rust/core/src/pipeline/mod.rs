//! Threads and the order of what they deliver; nothing else in the crate starts a thread.

pub mod pool;
pub mod read_ahead;

pub use read_ahead::{Pending, read, start};
