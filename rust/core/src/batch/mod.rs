//! Recycled memory for batches, in this process or shared with another, and copying rows into it.

/// Alignment of every slot: a cache line, and what JAX requires of memory that it borrows.
pub const ALIGNMENT: usize = 64;

/// Free slots retained per size: the batch being filled, the one in use and one between them.
const MAX_FREE_PER_SIZE: usize = 3;

/// More than those are retained while all free slots together have at most so many bytes.
///
/// Threads compute several small batches before the consumer drops as many: when at most three were
/// retained, batches of 400 KB cost a third more, for pages that the system had to clear again.
const ALWAYS_RETAINED_BYTES: usize = 32 << 20;

/// How many times the requested size a recycled slot of shared memory may have.
///
/// When slots served only requests of their own size, two workers that sent varying numbers of 1 MB
/// elements at once held 182 to 726 MB each, of which 52 to 90 % were free.
const MAX_SIZE_RATIO_SHARED: usize = 2;

/// Remote slots that this process maps at once; the contents of further ones are copied. The system
/// allows 65,530 mappings.
const MAX_BORROWED: usize = 8192;

/// The byte that recycled slots are filled with in debug and test runs.
const POISON: u8 = 0xA5;

mod arena;
mod memory;
mod remote_slots;
mod shared_budget;
mod stack;

pub use arena::{Arena, Slot, poison_by_default};
pub use remote_slots::{BorrowedSlot, RemoteSlots, after_fork, before_fork};
pub use shared_budget::SharedBudget;
pub use stack::{copied_bytes, copy_rows, copy_rows_shared, count_copied};
