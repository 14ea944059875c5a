//! Elements into rows of a slot: the reused memory of batches, in this process or shared with
//! another, and copying rows into it.

/// Every slot begins at a multiple of this: a cache line, and what JAX asks of memory it borrows.
pub const ALIGNMENT: usize = 64;

/// Free slots kept of one size: the batch being filled, the one in use and one between them.
const MAX_FREE_PER_SIZE: usize = 3;

/// How many times the size that is asked for a recycled slot of shared memory may have.
///
/// Two workers that make 1 MB elements, more or fewer at once as their pace varies, held 182 to
/// 726 MB each when a slot served its own size alone, and 52 to 90 % of that waited.
const MOST_TIMES_SHARED: usize = 2;

/// Slots that this process may use at once; of what comes beyond that it gets copies. The system
/// allows 65,530 mappings.
const MAX_BORROWED: usize = 8192;

/// What recycled slots are filled with in debug and test runs.
const POISON: u8 = 0xA5;

mod arena;
mod memory;
mod remote_slots;
mod stack;

pub use arena::{Arena, Slot, poison_by_default};
pub use remote_slots::{BorrowedSlot, RemoteSlots, note_fork, note_forked};
pub use stack::{copied_bytes, copy_rows};
