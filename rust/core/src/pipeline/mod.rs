//! Threads and the order of what they deliver, and what a pool of processes has in common.
//!
//! Besides, only the pool that copies large batches and the opening of many files start threads.

mod board;
mod parent;
pub mod pool;
pub mod read_ahead;

pub use board::Board;
pub use parent::end_with;
pub use read_ahead::{Pending, read, start};
