//! Reading records on threads, in order.

pub mod copy;
pub mod open;
pub mod read_ahead;

pub use read_ahead::{Pending, Reading, begin, read, start, start_unready};
