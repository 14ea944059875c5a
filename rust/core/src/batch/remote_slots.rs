//! Slots of another process, lent to this one until their last user is gone.
//!
//! The process that made a slot writes it and sends it; this one reads it, hands it to the user
//! and says so when it is free again. A changer must not break this: a slot is told as returned
//! only by dropping what was lent, so its maker never writes what anyone can still see.

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

/// To be called whenever this process is about to fork, and [`note_forked`] when it has: the child
/// sees what is lent now, so none of that is written again. Other threads may go on meanwhile: what
/// is lent to them counts as seen by the child.
pub fn note_fork() {
    FORKS.begun.fetch_add(1, Ordering::SeqCst);
}

/// To be called in parent and child after a fork that was noted by [`note_fork`].
pub fn note_forked() {
    FORKS.over.fetch_add(1, Ordering::SeqCst);
}

/// How many forks of this process have begun, and how many of them are over.
#[derive(Debug)]
struct Forks {
    begun: AtomicU64,
    over: AtomicU64,
}

impl Forks {
    const fn new() -> Self {
        Self { begun: AtomicU64::new(0), over: AtomicU64::new(0) }
    }

    /// Now, as [`any_since`](Self::any_since) takes it: `None` while a fork is going on.
    fn now(&self) -> Option<u64> {
        // In this order: no more are over than have begun, so if as many are, none was going on
        // when the first of the two was read.
        let over = self.over.load(Ordering::SeqCst);
        (self.begun.load(Ordering::SeqCst) == over).then_some(over)
    }

    /// Whether a child may have been forked off since `then`.
    fn any_since(&self, then: Option<u64>) -> bool {
        then != Some(self.begun.load(Ordering::SeqCst))
    }
}

/// The slots of one other process that this one has mapped.
#[derive(Debug)]
pub struct RemoteSlots {
    ledger: Arc<Mutex<Ledger>>,
    poison: bool,
}

/// One slot of another process, this one's until it is dropped.
///
/// Share it behind an `Arc`: the last owner's drop returns it.
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
    /// The process it was lent to. A child forked off that sees the same bytes, and must neither
    /// write them nor wait for a lock that a thread it does not have may hold.
    user: u32,
    /// Which of that process's forks are of no concern.
    since: Option<u64>,
}

#[derive(Debug, Default)]
struct Ledger {
    slots: HashMap<u64, Known>,
    returned: Vec<u64>,
    returned_byte_len: usize,
    left_to_children: Vec<u64>,
}

#[derive(Debug)]
struct Known {
    mapping: Arc<Mapping>,
    holder: Holder,
}

/// Who may write a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holder {
    Maker,
    User,
}

impl RemoteSlots {
    /// No slots yet. With `poison`, slots are filled with a byte of no meaning when they are
    /// given back.
    pub fn new(poison: bool) -> Self {
        Self { ledger: Arc::default(), poison }
    }

    /// Makes the slot `id` known, whose bytes are those of `file`; its maker holds it.
    ///
    /// # Errors
    ///
    /// If the slot is known already or cannot be mapped.
    pub fn add(&self, id: u64, file: BorrowedFile<'_>, byte_len: usize) -> Result<()> {
        let mapping = Arc::new(Mapping::open(file, byte_len)?);
        match lock(&self.ledger).slots.entry(id) {
            Entry::Occupied(_) => Err(Error::InvalidArgument(format!("slot {id} came twice"))),
            Entry::Vacant(place) => {
                place.insert(Known { mapping, holder: Holder::Maker });
                Ok(())
            }
        }
    }

    /// The slot `id`, which its maker has just sent.
    ///
    /// # Errors
    ///
    /// If the slot is not known, or its maker was not told that it is free again.
    pub fn borrow(&self, id: u64) -> Result<BorrowedSlot> {
        let mut ledger = lock(&self.ledger);
        let Some(known) = ledger.slots.get_mut(&id) else {
            return Err(Error::InvalidArgument(format!("slot {id} is not known")));
        };
        if known.holder == Holder::User {
            return Err(Error::InvalidArgument(format!("slot {id} was sent while in use")));
        }
        known.holder = Holder::User;
        let mapping = Arc::clone(&known.mapping);
        drop(ledger);
        let (ledger, poison) = (Arc::clone(&self.ledger), self.poison);
        let since = FORKS.now();
        let lent = Shared { id, mapping, ledger, poison, user: std::process::id(), since };
        if NUM_BORROWED.fetch_add(1, Ordering::Relaxed) >= MAX_BORROWED
            && let Ok(copy) = lent.copied()
        {
            return Ok(BorrowedSlot(Bytes::Copied(copy)));
        }
        Ok(BorrowedSlot(Bytes::Shared(lent)))
    }

    /// The slots given back since this was last asked, to be told to their maker, who holds them
    /// from now on, and their bytes together.
    pub fn take_returned(&self) -> (Vec<u64>, usize) {
        let mut ledger = lock(&self.ledger);
        let returned = std::mem::take(&mut ledger.returned);
        let byte_len = std::mem::take(&mut ledger.returned_byte_len);
        for id in &returned {
            if let Some(known) = ledger.slots.get_mut(id) {
                known.holder = Holder::Maker;
            }
        }
        (returned, byte_len)
    }

    /// The slots given up since this was last asked, to be told to their maker, who must not write
    /// them again: a child that this process has forked off may see them.
    pub fn take_retired_by_fork(&self) -> Vec<u64> {
        std::mem::take(&mut lock(&self.ledger).left_to_children)
    }

    /// Forgets the slot `id`; its memory goes with its last user.
    pub fn forget(&self, id: u64) {
        let forgotten = lock(&self.ledger).slots.remove(&id);
        // Giving pages back to the system is slow: not under the lock.
        drop(forgotten);
    }
}

impl BorrowedSlot {
    /// How many bytes there are.
    pub fn byte_len(&self) -> usize {
        match &self.0 {
            Bytes::Shared(lent) => lent.mapping.byte_len(),
            Bytes::Copied(memory) => memory.byte_len(),
        }
    }

    /// Where they begin.
    pub fn as_ptr(&self) -> *mut u8 {
        match &self.0 {
            Bytes::Shared(lent) => lent.mapping.as_ptr(),
            Bytes::Copied(memory) => memory.as_ptr(),
        }
    }
}

impl Shared {
    #[expect(unsafe_code, reason = "a mapping gives out a bare pointer only")]
    fn copied(&self) -> Result<Memory> {
        let byte_len = self.mapping.byte_len();
        let mut memory = Memory::zeroed(byte_len)?;
        // SAFETY: so many bytes are mapped as long as `self` lives. Their maker, another process,
        // does not write them before `RemoteSlots::take_returned` has told it of the slot, which `drop`
        // below puts there.
        let bytes = unsafe { Mapped::new(self.mapping.as_ptr(), byte_len) };
        bytes.copy_to(&mut memory.bytes_mut().into());
        Ok(memory)
    }
}

impl Drop for Shared {
    #[expect(unsafe_code, reason = "a mapping gives out a bare pointer only")]
    fn drop(&mut self) {
        NUM_BORROWED.fetch_sub(1, Ordering::Relaxed);
        if self.user != std::process::id() {
            return;
        }
        let byte_len = self.mapping.byte_len();
        if FORKS.any_since(self.since) {
            let mut ledger = lock(&self.ledger);
            // Its memory is still held by `self`: nothing is given back under the lock.
            if ledger.slots.remove(&self.id).is_some() {
                ledger.left_to_children.push(self.id);
            }
            return;
        }
        if self.poison {
            // SAFETY: the slot is this value's alone until its maker is told, after this.
            unsafe { self.mapping.as_ptr().write_bytes(POISON, byte_len) };
        }
        let mut ledger = lock(&self.ledger);
        if ledger.slots.contains_key(&self.id) {
            ledger.returned.push(self.id);
            ledger.returned_byte_len += byte_len;
        }
    }
}

/// Nothing done under this lock calls out, so no panic leaves it half done, and a thread that
/// holds Python's lock may wait for it.
fn lock(ledger: &Mutex<Ledger>) -> MutexGuard<'_, Ledger> {
    ledger.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn lender_with_slot(poison: bool) -> (RemoteSlots, Mapping) {
        let (mapping, file) = Mapping::create(4096).unwrap();
        let remote_slots = RemoteSlots::new(poison);
        remote_slots.add(1, file.as_fd(), 4096).unwrap();
        (remote_slots, mapping)
    }

    #[test]
    fn slot_is_returned_when_the_last_owner_is_gone() {
        let (remote_slots, _maker) = lender_with_slot(false);
        let lent = Arc::new(remote_slots.borrow(1).unwrap());
        let other = Arc::clone(&lent);
        drop(lent);
        assert_eq!(remote_slots.take_returned(), (vec![], 0));
        drop(other);
        assert_eq!(remote_slots.take_returned(), (vec![1], 4096));
        assert_eq!(remote_slots.take_returned(), (vec![], 0));
    }

    #[test]
    fn slot_in_use_is_not_lent_again() {
        let (remote_slots, _maker) = lender_with_slot(false);
        let lent = remote_slots.borrow(1).unwrap();
        assert!(remote_slots.borrow(1).is_err());
        drop(lent);
        assert!(remote_slots.borrow(1).is_err(), "its maker does not know yet that it is free");
        remote_slots.take_returned();
        assert!(remote_slots.borrow(1).is_ok());
    }

    #[test]
    fn forgotten_slot_stays_readable_and_is_not_returned() {
        let (remote_slots, _maker) = lender_with_slot(false);
        let lent = remote_slots.borrow(1).unwrap();
        remote_slots.forget(1);
        drop(remote_slots.borrow(1).unwrap_err());
        assert_eq!(lent.byte_len(), 4096);
        drop(lent);
        assert_eq!(remote_slots.take_returned(), (vec![], 0));
    }

    #[test]
    fn a_fork_counts_from_its_beginning_and_for_what_begins_before_its_end() {
        let forks = Forks::new();
        let before = forks.now();
        assert!(!forks.any_since(before));
        forks.begun.fetch_add(1, Ordering::SeqCst);
        let meanwhile = forks.now();
        assert!(forks.any_since(before) && forks.any_since(meanwhile));
        forks.over.fetch_add(1, Ordering::SeqCst);
        assert!(forks.any_since(before) && forks.any_since(meanwhile));
        assert!(!forks.any_since(forks.now()));
    }

    #[test]
    #[expect(unsafe_code, reason = "a mapping gives out a bare pointer only")]
    fn returned_slot_is_poisoned() {
        let (remote_slots, maker) = lender_with_slot(true);
        drop(remote_slots.borrow(1).unwrap());
        // SAFETY: the mapping is 4096 bytes long, and its maker holds it again.
        assert_eq!(unsafe { maker.as_ptr().wrapping_add(4095).read() }, POISON);
    }
}
