//! The arena: slots of aligned memory that are used again once their owner is gone.
//!
//! Writing into memory that was touched before is many times cheaper than into fresh pages, so
//! a slot that comes back is kept for the next batch of its size. A changer must not break this:
//! a slot returns only by being dropped, so memory that anyone can still see is never handed out.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::memory::Memory;
use super::{MAX_FREE_PER_SIZE, MOST_TIMES_SHARED, POISON};
use crate::Result;
use crate::platform::OwnedFile;

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
    given_up: AtomicBool,
}

impl Arena {
    /// An arena that keeps at most `max_free_bytes` of unused memory.
    ///
    /// Recycled slots are filled with a poison byte in debug builds, and in release builds
    /// where the environment has `GRAINMILL_POISON`.
    pub fn new(max_free_bytes: usize) -> Self {
        Self::with_poison(max_free_bytes, poison_by_default())
    }

    /// As [`Arena::new`], with the poisoning of recycled slots set by the caller.
    pub fn with_poison(max_free_bytes: usize, poison: bool) -> Self {
        let shelf = Shelf::new(Memory::zeroed, 1, MAX_FREE_PER_SIZE, max_free_bytes, poison);
        Self { shelf: Arc::new(shelf) }
    }

    /// An arena whose slots another process can map. It keeps all that come back until it is
    /// trimmed, so that its owner knows which are gone; and since what is sent at once has a
    /// different size each time, one of up to twice the size serves.
    pub fn shared(poison: bool) -> Self {
        let times = MOST_TIMES_SHARED;
        Self { shelf: Arc::new(Shelf::new(Memory::shared, times, usize::MAX, usize::MAX, poison)) }
    }

    /// A slot of `byte_len` bytes, with whatever its last owner left in them.
    ///
    /// # Errors
    ///
    /// If the system has no memory left for it.
    pub fn slot(&self, byte_len: usize) -> Result<Slot> {
        let size = size_class(byte_len);
        let recycled = self.shelf.lock().take(size, self.shelf.most_times);
        let memory = match recycled.filter(Memory::is_ours) {
            Some(memory) => memory,
            None => self.shelf.made(size)?,
        };
        Ok(Slot {
            memory: Some(memory),
            byte_len,
            shelf: Arc::clone(&self.shelf),
            given_up: AtomicBool::new(false),
        })
    }

    /// Bytes of the slots that wait to be used again.
    pub fn free_bytes(&self) -> usize {
        self.shelf.lock().byte_len
    }

    /// Bytes of all slots, those in use and those that wait.
    pub fn total_bytes(&self) -> usize {
        self.shelf.total_bytes.load(Ordering::Relaxed)
    }

    /// Bytes of memory that a slot of `byte_len` bytes would add to those the arena has.
    pub fn growth(&self, byte_len: usize) -> usize {
        let size = size_class(byte_len);
        let waits = self.shelf.lock().serving(size, self.shelf.most_times);
        if waits.is_some() { 0 } else { size }
    }

    /// Gives waiting slots back to the system, those that waited longest first, until at most
    /// `max_free_bytes` wait; returns the numbers by which other processes know them.
    pub fn trim(&self, max_free_bytes: usize) -> Vec<u64> {
        let mut released = self.shelf.lock().release(max_free_bytes);
        released.iter_mut().filter(|memory| memory.is_ours()).for_each(Memory::empty);
        let ids = released.iter().filter_map(|memory| Some(memory.identity()?.id)).collect();
        self.shelf.let_go(released);
        ids
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

    /// The number by which another process knows the slot's memory; None in one that it cannot map.
    pub fn shared_id(&self) -> Option<u64> {
        Some(self.memory.as_ref()?.identity()?.id)
    }

    /// The file behind the slot's memory and its length in bytes, for the process that maps it.
    /// It is given once in the life of that memory.
    pub fn take_file(&self) -> Option<(OwnedFile, usize)> {
        let memory = self.memory.as_ref()?;
        Some((memory.identity()?.take_file()?, memory.byte_len()))
    }

    /// Takes the slot out of its arena: its memory is not used again once its owner is gone.
    pub fn give_up(&self) {
        if !self.given_up.swap(true, Ordering::Relaxed) {
            let byte_len = self.memory.as_ref().map_or(0, Memory::byte_len);
            self.shelf.total_bytes.fetch_sub(byte_len, Ordering::Relaxed);
        }
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
        if let Some(memory) = self.memory.take()
            && !*self.given_up.get_mut()
        {
            self.shelf.put(memory);
        }
    }
}

/// Whether recycled slots are poisoned where nobody said.
pub fn poison_by_default() -> bool {
    cfg!(debug_assertions) || std::env::var_os("GRAINMILL_POISON").is_some()
}

/// The free slots of an arena, and the rules for keeping them.
#[derive(Debug)]
struct Shelf {
    make: fn(usize) -> Result<Memory>,
    /// How many times the size that is wanted a recycled slot may have.
    most_times: usize,
    max_free_per_size: usize,
    max_free_bytes: usize,
    poison: bool,
    total_bytes: AtomicUsize,
    free: Mutex<Free>,
}

impl Shelf {
    fn new(
        make: fn(usize) -> Result<Memory>,
        most_times: usize,
        max_free_per_size: usize,
        max_free_bytes: usize,
        poison: bool,
    ) -> Self {
        let (total_bytes, free) = (AtomicUsize::new(0), Mutex::default());
        Self { make, most_times, max_free_per_size, max_free_bytes, poison, total_bytes, free }
    }

    fn made(&self, size: usize) -> Result<Memory> {
        let memory = (self.make)(size)?;
        self.total_bytes.fetch_add(size, Ordering::Relaxed);
        Ok(memory)
    }

    /// Nothing done under this lock calls out, so no panic leaves it half done, and a thread
    /// that holds Python's lock may wait for it.
    fn lock(&self) -> MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, mut memory: Memory) {
        if !memory.is_ours() {
            return;
        }
        if self.poison {
            memory.bytes_mut().fill(POISON);
        }
        let released = self.lock().put(memory, self.max_free_per_size, self.max_free_bytes);
        self.let_go(released);
    }

    /// Gives memory back to the system, which is slow: not under the lock.
    fn let_go(&self, released: Vec<Memory>) {
        let byte_len = released.iter().map(Memory::byte_len).sum();
        self.total_bytes.fetch_sub(byte_len, Ordering::Relaxed);
        drop(released);
    }
}

#[derive(Debug, Default)]
struct Free {
    by_size: BTreeMap<usize, Vec<Returned>>,
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
    /// The size of waiting memory that serves `size` bytes best, at most `most_times` as large.
    fn serving(&self, size: usize, most_times: usize) -> Option<usize> {
        let mut sizes = self.by_size.range(size..=size.saturating_mul(most_times));
        sizes.find(|(_, kept)| !kept.is_empty()).map(|(&size, _)| size)
    }

    /// The most recently returned memory that serves: the likeliest to be in a cache still.
    fn take(&mut self, size: usize, most_times: usize) -> Option<Memory> {
        let size = self.serving(size, most_times)?;
        let memory = self.by_size.get_mut(&size)?.pop()?.memory;
        self.byte_len -= size;
        Some(memory)
    }

    /// Keeps `memory`, and hands back what is too much now.
    fn put(&mut self, memory: Memory, max_per_size: usize, max_byte_len: usize) -> Vec<Memory> {
        let size = memory.byte_len();
        self.byte_len += size;
        self.num_returned += 1;
        let same_size = self.by_size.entry(size).or_default();
        same_size.push(Returned { at: self.num_returned, memory });
        let mut released = Vec::new();
        if same_size.len() > max_per_size {
            released.extend(self.take_oldest(size));
        }
        released.extend(self.release(max_byte_len));
        released
    }

    /// Takes out what waited longest until at most `max_byte_len` bytes wait.
    fn release(&mut self, max_byte_len: usize) -> Vec<Memory> {
        let mut released = Vec::new();
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
    fn shared_arena_keeps_its_slots_until_it_is_trimmed() {
        let arena = Arena::shared(false);
        let slots: Vec<Slot> = (0..20).map(|_| arena.slot(5000).unwrap()).collect();
        let ids: Vec<u64> = slots.iter().filter_map(Slot::shared_id).collect();
        let held = arena.total_bytes();
        drop(slots);
        assert_eq!((arena.total_bytes(), arena.free_bytes()), (held, held));
        assert_eq!(arena.growth(5000), 0);
        assert_eq!(arena.trim(held / 2).len(), 10);
        let mut dropped = arena.trim(0);
        dropped.sort_unstable();
        assert_eq!(dropped, ids[10..]);
        assert_eq!((arena.total_bytes(), arena.growth(5000)), (0, 5120));
    }

    #[test]
    fn shared_slot_serves_down_to_half_its_size() {
        let arena = Arena::shared(false);
        let sizes = [40_960, 12_288, 16_384];
        let slots = sizes.map(|byte_len| arena.slot(byte_len).unwrap());
        let ids = slots.each_ref().map(Slot::shared_id);
        drop(slots);
        assert_eq!([6_144, 12_000, 20_480].map(|byte_len| arena.growth(byte_len)), [0; 3]);
        assert_eq!([5_632, 45_056].map(|byte_len| arena.growth(byte_len)), [5_632, 45_056]);
        let smaller = arena.slot(9_000).unwrap();
        assert_eq!((smaller.shared_id(), smaller.byte_len()), (ids[1], 9_000));
        assert_eq!(arena.slot(9_000).unwrap().shared_id(), ids[2]);
        assert_eq!(arena.total_bytes(), sizes.iter().sum::<usize>());
    }

    #[test]
    fn slot_given_up_is_not_used_again() {
        let arena = Arena::shared(true);
        let slot = arena.slot(5000).unwrap();
        slot.give_up();
        slot.give_up();
        assert_eq!(slot.bytes(), [0; 5000]);
        drop(slot);
        assert_eq!((arena.total_bytes(), arena.free_bytes()), (0, 0));
    }

    #[test]
    fn file_of_a_slot_is_given_once() {
        let slot = Arena::shared(false).slot(5000).unwrap();
        assert_eq!(slot.take_file().map(|(_, byte_len)| byte_len), Some(5120));
        assert!(slot.take_file().is_none());
        assert!(Arena::new(0).slot(5000).unwrap().take_file().is_none());
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
