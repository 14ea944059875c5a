//! Threads and the order of what they deliver, and what a pool of processes has in common;
//! nothing else in the crate starts a thread.

mod board;
mod parent;
pub mod pool;
pub mod read_ahead;

pub use board::Board;
pub use parent::end_with;
pub use read_ahead::{Pending, read, start};
