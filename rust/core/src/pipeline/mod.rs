//! Threads that read records, in order, and the memory budget that a pool of processes shares.
//!
//! No other layer starts threads.

pub mod copy;
pub mod open;
pub mod pool;
pub mod read_ahead;
pub mod read_queue;
mod shared_budget;

pub use read_ahead::{Pending, Reading, begin, read, start, start_unready};
pub use read_queue::{Job, Permit, ReadQueue};
pub use shared_budget::SharedBudget;
