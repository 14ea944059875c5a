//! Slots of another process, borrowed by this one until their last user drops them.
//!
//! The process that owns a slot writes it and sends it; this one reads it, passes it to the user
//! and reports when it is free again. Invariant: a slot is reported as returned only when the
//! borrowed slot was dropped, so its owner never writes memory that is still in use.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::memory::Memory;
use super::{MAX_BORROWED, POISON};
use crate::bytes::Bytes as Mapped;
use crate::platform::BorrowedFile;
use crate::shared_memory::Mapping;
use crate::{Error, Result};

static NUM_BORROWED: AtomicUsize = AtomicUsize::new(0);
static FORKS: Forks = Forks::new();

/// Must be called before this process forks, and [`after_fork`] afterwards: the child sees the slots
/// that are borrowed now, so these are never written again. Other threads may continue meanwhile:
/// slots that they borrow count as seen by the child.
pub fn before_fork() {
    FORKS.started.fetch_add(1, Ordering::SeqCst);
}

/// Must be called in parent and child after a fork that was announced by [`before_fork`].
pub fn after_fork() {
    FORKS.ended.fetch_add(1, Ordering::SeqCst);
}

/// How many forks of this process have started, and how many of them have ended.
#[derive(Debug)]
struct Forks {
    started: AtomicU64,
    ended: AtomicU64,
}

impl Forks {
    const fn new() -> Self {
        Self { started: AtomicU64::new(0), ended: AtomicU64::new(0) }
    }

    /// A timestamp for [`any_since`](Self::any_since); `None` while a fork is in progress.
    fn now(&self) -> Option<u64> {
        // In this order: no more forks have ended than started, so if the counts are equal, none was
        // in progress when `ended` was read.
        let ended = self.ended.load(Ordering::SeqCst);
        (self.started.load(Ordering::SeqCst) == ended).then_some(ended)
    }

    /// Whether a child may have been forked off since `then`.
    fn any_since(&self, then: Option<u64>) -> bool {
        then != Some(self.started.load(Ordering::SeqCst))
    }
}

/// The slots of one other process that this one has mapped.
#[derive(Debug)]
pub struct RemoteSlots {
    ledger: Arc<Mutex<Ledger>>,
    poison: bool,
}

/// A slot of another process, borrowed by this one until it is dropped.
///
/// Share it behind an `Arc`: dropping the last reference returns it.
#[derive(Debug)]
pub struct BorrowedSlot(Bytes);

#[derive(Debug)]
enum Bytes {
    Shared(Shared),
    Copied(Memory),
}

#[derive(Debug)]
struct Shared {
    id: u64,
    mapping: Arc<Mapping>,
    ledger: Arc<Mutex<Ledger>>,
    poison: bool,
    /// The process that borrowed it. Its forked child sees the same bytes, and must neither write
    /// them nor wait for a lock that a thread of the parent may hold.
    borrower: u32,
    /// Forks before this did not see the slot.
    since: Option<u64>,
}

#[derive(Debug, Default)]
struct Ledger {
    slots: HashMap<u64, MappedSlot>,
    returned: Vec<u64>,
    returned_byte_len: usize,
    retired_by_fork: Vec<u64>,
}

#[derive(Debug)]
struct MappedSlot {
    mapping: Arc<Mapping>,
    holder: Holder,
}

/// Who may write a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holder {
    Owner,
    Borrower,
}

impl RemoteSlots {
    /// No slots yet. With `poison`, slots are filled with a poison byte when they are returned.
    pub fn new(poison: bool) -> Self {
        Self { ledger: Arc::default(), poison }
    }

    /// Maps the slot `id`, whose memory is `file`; its owner holds it.
    ///
    /// # Errors
    ///
    /// If the slot is mapped already or cannot be mapped.
    pub fn add(&self, id: u64, file: BorrowedFile<'_>, byte_len: usize) -> Result<()> {
        let mapping = Arc::new(Mapping::open(file, byte_len)?);
        match lock(&self.ledger).slots.entry(id) {
            Entry::Occupied(_) => Err(Error::InvalidArgument(format!("slot {id} came twice"))),
            Entry::Vacant(entry) => {
                entry.insert(MappedSlot { mapping, holder: Holder::Owner });
                Ok(())
            }
        }
    }

    /// Borrows the slot `id`, which its owner has just sent.
    ///
    /// # Errors
    ///
    /// If the slot is not mapped, or its owner was not told that it is free again.
    pub fn borrow(&self, id: u64) -> Result<BorrowedSlot> {
        let mut ledger = lock(&self.ledger);
        let Some(slot) = ledger.slots.get_mut(&id) else {
            return Err(Error::InvalidArgument(format!("slot {id} is not known")));
        };
        if slot.holder == Holder::Borrower {
            return Err(Error::InvalidArgument(format!("slot {id} was sent while in use")));
        }
        slot.holder = Holder::Borrower;
        let mapping = Arc::clone(&slot.mapping);
        drop(ledger);
        let (ledger, poison) = (Arc::clone(&self.ledger), self.poison);
        let since = FORKS.now();
        let borrower = std::process::id();
        let slot = Shared { id, mapping, ledger, poison, borrower, since };
        if NUM_BORROWED.fetch_add(1, Ordering::Relaxed) >= MAX_BORROWED
            && let Ok(copy) = slot.copied()
        {
            return Ok(BorrowedSlot(Bytes::Copied(copy)));
        }
        Ok(BorrowedSlot(Bytes::Shared(slot)))
    }

    /// The slots returned since the last call, to be reported to their owner, who holds them from
    /// now on, and their total size in bytes.
    pub fn take_returned(&self) -> (Vec<u64>, usize) {
        let mut ledger = lock(&self.ledger);
        let returned = std::mem::take(&mut ledger.returned);
        let byte_len = std::mem::take(&mut ledger.returned_byte_len);
        for id in &returned {
            if let Some(slot) = ledger.slots.get_mut(id) {
                slot.holder = Holder::Owner;
            }
        }
        (returned, byte_len)
    }

    /// The slots retired since the last call, to be reported to their owner, who must not write them
    /// again: a forked child of this process may see them.
    pub fn take_retired_by_fork(&self) -> Vec<u64> {
        std::mem::take(&mut lock(&self.ledger).retired_by_fork)
    }

    /// Forgets the slot `id`; its memory is unmapped with its last user.
    pub fn forget(&self, id: u64) {
        let forgotten = lock(&self.ledger).slots.remove(&id);
        // Returning pages to the system is slow: not under the lock.
        drop(forgotten);
    }
}

impl BorrowedSlot {
    /// The size of the slot in bytes.
    pub fn byte_len(&self) -> usize {
        match &self.0 {
            Bytes::Shared(borrowed) => borrowed.mapping.byte_len(),
            Bytes::Copied(memory) => memory.byte_len(),
        }
    }

    /// The start of the slot.
    pub fn as_ptr(&self) -> *mut u8 {
        match &self.0 {
            Bytes::Shared(borrowed) => borrowed.mapping.as_ptr(),
            Bytes::Copied(memory) => memory.as_ptr(),
        }
    }
}

impl Shared {
    #[expect(unsafe_code, reason = "a mapping returns only a raw pointer")]
    fn copied(&self) -> Result<Memory> {
        let byte_len = self.mapping.byte_len();
        let mut memory = Memory::zeroed(byte_len)?;
        // SAFETY: the mapping is `byte_len` bytes long and lives as long as `self`. Its owner,
        // another process, does not write to it before `RemoteSlots::take_returned` reports the slot,
        // which happens after `drop`.
        let bytes = unsafe { Mapped::new(self.mapping.as_ptr(), byte_len) };
        bytes.copy_to(&mut memory.bytes_mut().into());
        Ok(memory)
    }
}

impl Drop for Shared {
    #[expect(unsafe_code, reason = "a mapping returns only a raw pointer")]
    fn drop(&mut self) {
        NUM_BORROWED.fetch_sub(1, Ordering::Relaxed);
        if self.borrower != std::process::id() {
            return;
        }
        let byte_len = self.mapping.byte_len();
        if FORKS.any_since(self.since) {
            let mut ledger = lock(&self.ledger);
            // `self` still holds the mapping: nothing is unmapped under the lock.
            if ledger.slots.remove(&self.id).is_some() {
                ledger.retired_by_fork.push(self.id);
            }
            return;
        }
        if self.poison {
            // SAFETY: the slot belongs to this value until it is reported to its owner, after this.
            unsafe { self.mapping.as_ptr().write_bytes(POISON, byte_len) };
        }
        let mut ledger = lock(&self.ledger);
        if ledger.slots.contains_key(&self.id) {
            ledger.returned.push(self.id);
            ledger.returned_byte_len += byte_len;
        }
    }
}

/// Code under this lock calls no callback, so a panic cannot leave its state inconsistent, and a
/// thread that holds the GIL may wait for it.
fn lock(ledger: &Mutex<Ledger>) -> MutexGuard<'_, Ledger> {
    ledger.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn mapped_slot(poison: bool) -> (RemoteSlots, Mapping) {
        let (mapping, file) = Mapping::create(4096).unwrap();
        let remote_slots = RemoteSlots::new(poison);
        remote_slots.add(1, file.as_fd(), 4096).unwrap();
        (remote_slots, mapping)
    }

    #[test]
    fn slot_is_returned_with_its_last_reference() {
        let (remote_slots, _owner) = mapped_slot(false);
        let borrowed = Arc::new(remote_slots.borrow(1).unwrap());
        let other = Arc::clone(&borrowed);
        drop(borrowed);
        assert_eq!(remote_slots.take_returned(), (vec![], 0));
        drop(other);
        assert_eq!(remote_slots.take_returned(), (vec![1], 4096));
        assert_eq!(remote_slots.take_returned(), (vec![], 0));
    }

    #[test]
    fn slot_in_use_cannot_be_borrowed_again() {
        let (remote_slots, _owner) = mapped_slot(false);
        let borrowed = remote_slots.borrow(1).unwrap();
        assert!(remote_slots.borrow(1).is_err());
        drop(borrowed);
        assert!(remote_slots.borrow(1).is_err(), "its owner does not know yet that it is free");
        remote_slots.take_returned();
        assert!(remote_slots.borrow(1).is_ok());
    }

    #[test]
    fn forgotten_slot_stays_readable_and_is_not_returned() {
        let (remote_slots, _owner) = mapped_slot(false);
        let borrowed = remote_slots.borrow(1).unwrap();
        remote_slots.forget(1);
        drop(remote_slots.borrow(1).unwrap_err());
        assert_eq!(borrowed.byte_len(), 4096);
        drop(borrowed);
        assert_eq!(remote_slots.take_returned(), (vec![], 0));
    }

    #[test]
    fn a_fork_counts_for_slots_borrowed_before_its_end() {
        let forks = Forks::new();
        let before = forks.now();
        assert!(!forks.any_since(before));
        forks.started.fetch_add(1, Ordering::SeqCst);
        let during = forks.now();
        assert!(forks.any_since(before) && forks.any_since(during));
        forks.ended.fetch_add(1, Ordering::SeqCst);
        assert!(forks.any_since(before) && forks.any_since(during));
        assert!(!forks.any_since(forks.now()));
    }

    #[test]
    #[expect(unsafe_code, reason = "a mapping returns only a raw pointer")]
    fn returned_slot_is_poisoned() {
        let (remote_slots, owner) = mapped_slot(true);
        drop(remote_slots.borrow(1).unwrap());
        // SAFETY: the mapping is 4096 bytes long, and its owner holds it again.
        assert_eq!(unsafe { owner.as_ptr().wrapping_add(4095).read() }, POISON);
    }
}
