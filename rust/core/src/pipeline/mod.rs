//! Threads and the order of what they deliver, and what a pool of processes has in common.
//!
//! No other layer starts threads.

mod board;
pub mod open;
pub mod pool;
pub mod read_ahead;
pub mod read_queue;

pub use board::Board;
pub use read_ahead::{Pending, read, start, start_unready};
pub use read_queue::ReadQueue;
