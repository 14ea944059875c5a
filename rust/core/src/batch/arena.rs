//! The arena: slots of aligned memory that are used again once their owner is gone.
//!
//! Writing into memory that was touched before is many times cheaper than into fresh pages, so
//! a slot that comes back is kept for the next batch of its size. A changer must not break this:
//! a slot returns only by being dropped, so memory that anyone can still see is never handed out.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::memory::Memory;
use crate::Result;

/// Free slots kept of one size: the batch being filled, the one in use and one between them.
const MAX_FREE_PER_SIZE: usize = 3;
/// What recycled slots are filled with in debug and test runs.
const POISON: u8 = 0xA5;

/// Where the memory of batches comes from and returns to; clones share their free slots.
#[derive(Clone, Debug)]
pub struct Arena {
    shelf: Arc<Shelf>,
}

/// One piece of an arena's memory, owned by whoever holds it and returned when dropped.
///
/// Share it behind an `Arc`: the last owner's drop returns it.
#[derive(Debug)]
pub struct Slot {
    /// Taken out only by `drop`.
    memory: Option<Memory>,
    byte_len: usize,
    shelf: Arc<Shelf>,
}

impl Arena {
    /// An arena that keeps at most `max_free_bytes` of unused memory.
    ///
    /// Recycled slots are filled with a poison byte in debug builds, and in release builds
    /// where the environment has `GRAINMILL_POISON`.
    pub fn new(max_free_bytes: usize) -> Self {
        let poison = cfg!(debug_assertions) || std::env::var_os("GRAINMILL_POISON").is_some();
        Self::with_poison(max_free_bytes, poison)
    }

    /// As [`Arena::new`], with the poisoning of recycled slots set by the caller.
    pub fn with_poison(max_free_bytes: usize, poison: bool) -> Self {
        let free = Mutex::default();
        Self { shelf: Arc::new(Shelf { max_free_bytes, poison, free }) }
    }

    /// A slot of `byte_len` bytes, with whatever its last owner left in them.
    ///
    /// # Errors
    ///
    /// If the system has no memory left for it.
    pub fn slot(&self, byte_len: usize) -> Result<Slot> {
        let size = size_class(byte_len);
        let recycled = self.shelf.lock().take(size);
        let memory = match recycled {
            Some(memory) => memory,
            None => Memory::zeroed(size)?,
        };
        Ok(Slot { memory: Some(memory), byte_len, shelf: Arc::clone(&self.shelf) })
    }

    /// Bytes of the slots that wait to be used again.
    pub fn free_bytes(&self) -> usize {
        self.shelf.lock().byte_len
    }
}

impl Slot {
    /// Bytes of the slot that were asked for.
    pub fn byte_len(&self) -> usize {
        self.byte_len
    }

    /// Where the slot begins: a multiple of [`ALIGNMENT`](super::ALIGNMENT).
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.as_ref().map_or(std::ptr::null_mut(), Memory::as_ptr)
    }

    /// The bytes of the slot.
    pub fn bytes(&self) -> &[u8] {
        self.memory.as_ref().map_or(&[], |memory| &memory.bytes()[..self.byte_len])
    }

    /// The bytes of the slot, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.memory.as_mut().map_or(&mut [], |memory| &mut memory.bytes_mut()[..self.byte_len])
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.shelf.put(memory);
        }
    }
}

/// The free slots of an arena, and the rules for keeping them.
#[derive(Debug)]
struct Shelf {
    max_free_bytes: usize,
    poison: bool,
    free: Mutex<Free>,
}

impl Shelf {
    /// Nothing done under this lock calls out, so no panic leaves it half done, and a thread
    /// that holds Python's lock may wait for it.
    fn lock(&self) -> MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, mut memory: Memory) {
        if self.poison {
            memory.bytes_mut().fill(POISON);
        }
        let released = self.lock().put(memory, self.max_free_bytes);
        // Giving pages back to the system is slow: not under the lock.
        drop(released);
    }
}

#[derive(Debug, Default)]
struct Free {
    by_size: HashMap<usize, Vec<Returned>>,
    byte_len: usize,
    /// Slots returned so far: the clock that says which free slot waited longest.
    num_returned: u64,
}

#[derive(Debug)]
struct Returned {
    at: u64,
    memory: Memory,
}

impl Free {
    /// The most recently returned memory of this size: the likeliest to be in a cache still.
    fn take(&mut self, size: usize) -> Option<Memory> {
        let memory = self.by_size.get_mut(&size)?.pop()?.memory;
        self.byte_len -= size;
        Some(memory)
    }

    /// Keeps `memory`, and hands back what is too much now.
    fn put(&mut self, memory: Memory, max_byte_len: usize) -> Vec<Memory> {
        let size = memory.byte_len();
        self.byte_len += size;
        self.num_returned += 1;
        let same_size = self.by_size.entry(size).or_default();
        same_size.push(Returned { at: self.num_returned, memory });
        let mut released = Vec::new();
        if same_size.len() > MAX_FREE_PER_SIZE {
            released.extend(self.take_oldest(size));
        }
        while self.byte_len > max_byte_len {
            released.extend(self.size_of_oldest().and_then(|oldest| self.take_oldest(oldest)));
        }
        released
    }

    fn size_of_oldest(&self) -> Option<usize> {
        let oldest = self.by_size.iter().filter_map(|(size, kept)| Some((kept.first()?.at, *size)));
        oldest.min().map(|(_, size)| size)
    }

    fn take_oldest(&mut self, size: usize) -> Option<Memory> {
        let same_size = self.by_size.get_mut(&size).filter(|kept| !kept.is_empty())?;
        self.byte_len -= size;
        Some(same_size.remove(0).memory)
    }
}

/// The size of memory that serves `byte_len` bytes: at most an eighth more, so that batches of
/// slightly different lengths share their slots.
fn size_class(byte_len: usize) -> usize {
    const SMALLEST: usize = 512;
    let byte_len = byte_len.max(SMALLEST);
    let step = 1 << (byte_len.ilog2() - 3);
    byte_len.checked_next_multiple_of(step).unwrap_or(byte_len)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEEP_ALL: usize = 1 << 40;

    #[test]
    fn dropped_slot_is_used_again() {
        let arena = Arena::new(KEEP_ALL);
        let slot = arena.slot(100_000).unwrap();
        let address = slot.as_ptr();
        drop(slot);
        assert_eq!(arena.slot(100_001).unwrap().as_ptr(), address);
    }

    #[test]
    fn slot_in_use_is_never_handed_out() {
        let arena = Arena::new(KEEP_ALL);
        let slots: Vec<Slot> = (0..20).map(|_| arena.slot(5000).unwrap()).collect();
        let mut addresses: Vec<usize> = slots.iter().map(|slot| slot.as_ptr().addr()).collect();
        addresses.sort_unstable();
        assert!(addresses.windows(2).all(|pair| pair[1] - pair[0] >= 5000));
    }

    #[test]
    fn few_slots_of_one_size_are_kept() {
        let arena = Arena::new(KEEP_ALL);
        let slots: Vec<Slot> = (0..20).map(|_| arena.slot(1 << 20).unwrap()).collect();
        drop(slots);
        assert_eq!(arena.free_bytes(), MAX_FREE_PER_SIZE << 20);
    }

    #[test]
    fn free_bytes_stay_within_their_bound() {
        let arena = Arena::new(100_000);
        for byte_len in (1000..60_000).step_by(777) {
            drop(arena.slot(byte_len).unwrap());
            assert!(arena.free_bytes() <= 100_000);
        }
        assert!(arena.free_bytes() > 0);
        drop(arena.slot(200_000).unwrap());
        assert_eq!(arena.free_bytes(), 0);
    }

    #[test]
    fn recycled_slot_is_poisoned() {
        let arena = Arena::with_poison(KEEP_ALL, true);
        let mut slot = arena.slot(1000).unwrap();
        slot.bytes_mut().fill(7);
        drop(slot);
        assert!(arena.slot(1000).unwrap().bytes().iter().all(|&byte| byte == POISON));
    }

    #[test]
    fn recycled_slot_keeps_its_bytes_without_poison() {
        let arena = Arena::with_poison(KEEP_ALL, false);
        let mut slot = arena.slot(1000).unwrap();
        slot.bytes_mut().fill(7);
        drop(slot);
        assert!(arena.slot(1000).unwrap().bytes().iter().all(|&byte| byte == 7));
    }

    #[test]
    fn slot_outlives_its_arena() {
        let mut slot = Arena::new(KEEP_ALL).slot(100).unwrap();
        slot.bytes_mut().fill(1);
        assert_eq!(slot.bytes(), [1; 100]);
    }

    #[test]
    fn size_class_wastes_at_most_an_eighth() {
        for byte_len in (512..100_000).chain([1 << 40, (1 << 40) + 1]) {
            let size = size_class(byte_len);
            assert!(size >= byte_len && size - byte_len <= byte_len / 8);
        }
    }
}
