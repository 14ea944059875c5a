//! Elements into rows of a slot: the reused memory of batches, in this process or shared with
//! another, and copying rows into it.

mod arena;
mod lent;
mod memory;
mod shared;
mod stack;

pub use arena::{Arena, Slot, poison_by_default};
pub use lent::{Lender, Lent, note_fork};
pub use memory::ALIGNMENT;
pub use shared::Mapping;
pub use stack::{Warmth, copied_bytes, copy_rows};
