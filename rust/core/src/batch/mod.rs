//! Elements into rows of a slot: the reused memory of batches, and copying rows into it.

mod arena;
mod memory;
mod stack;

pub use arena::{Arena, Slot};
pub use memory::ALIGNMENT;
pub use stack::{Warmth, copy_rows};
