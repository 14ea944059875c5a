//! The arena: slots of aligned memory that are recycled once their owner has dropped them.
//!
//! Writing into memory that was touched before is many times cheaper than into fresh pages, so
//! a returned slot is retained for the next batch of its size. Invariant: a slot returns only by
//! being dropped, so memory that is still in use is never allocated again.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use super::memory::Memory;
use super::{ALWAYS_RETAINED_BYTES, MAX_FREE_PER_SIZE, MAX_SIZE_RATIO_SHARED, POISON};
use crate::Result;
use crate::lock::lock;
use crate::platform::OwnedFile;

/// An allocator for the memory of batches; clones share their free slots.
#[derive(Clone, Debug)]
pub struct Arena {
    shelf: Arc<Shelf>,
}

/// A buffer of an arena, returned to it when dropped.
///
/// Share it behind an `Arc`: dropping the last reference returns it.
#[derive(Debug)]
pub struct Slot {
    /// Taken only by `drop`.
    memory: Option<Memory>,
    byte_len: usize,
    shelf: Arc<Shelf>,
    is_retired: AtomicBool,
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

    /// An arena whose slots another process can map. It retains all returned slots until it is
    /// trimmed, so that its owner knows which are freed. Since messages differ in size, a request
    /// may be served by a slot of up to twice its size.
    pub fn shared(poison: bool) -> Self {
        let max_ratio = MAX_SIZE_RATIO_SHARED;
        Self {
            shelf: Arc::new(Shelf::new(Memory::shared, max_ratio, usize::MAX, usize::MAX, poison)),
        }
    }

    /// Allocates a slot of `byte_len` bytes, whose contents are unspecified.
    ///
    /// # Errors
    ///
    /// If the system is out of memory.
    pub fn slot(&self, byte_len: usize) -> Result<Slot> {
        let size = size_class(byte_len);
        let recycled = self.shelf.lock().take(size, self.shelf.max_ratio);
        let memory = match recycled.filter(Memory::is_ours) {
            Some(memory) => memory,
            None => self.shelf.allocate(size)?,
        };
        Ok(Slot {
            memory: Some(memory),
            byte_len,
            shelf: Arc::clone(&self.shelf),
            is_retired: AtomicBool::new(false),
        })
    }

    /// Bytes of the free slots.
    pub fn free_bytes(&self) -> usize {
        self.shelf.lock().byte_len
    }

    /// Bytes of all slots, in use and free.
    pub fn total_bytes(&self) -> usize {
        self.shelf.total_bytes.load(Ordering::Relaxed)
    }

    /// Bytes of memory that the arena would have to allocate for a slot of `byte_len` bytes.
    pub fn growth(&self, byte_len: usize) -> usize {
        let size = size_class(byte_len);
        let free = self.shelf.lock().fitting_size(size, self.shelf.max_ratio);
        if free.is_some() { 0 } else { size }
    }

    /// Returns free slots to the system, those free for longest first, until at most
    /// `max_free_bytes` are free; returns the ids by which other processes know them.
    pub fn trim(&self, max_free_bytes: usize) -> Vec<u64> {
        let mut released = self.shelf.lock().release(max_free_bytes);
        released.iter_mut().filter(|memory| memory.is_ours()).for_each(Memory::empty);
        let ids = released.iter().filter_map(|memory| Some(memory.identity()?.id)).collect();
        self.shelf.free_memory(released);
        ids
    }
}

impl Slot {
    /// The requested size of the slot in bytes.
    pub fn byte_len(&self) -> usize {
        self.byte_len
    }

    /// The start of the slot: a multiple of [`ALIGNMENT`](super::ALIGNMENT).
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.as_ref().map_or(std::ptr::null_mut(), Memory::as_ptr)
    }

    /// The id by which another process knows the slot's memory; None if it cannot be mapped.
    pub fn shared_id(&self) -> Option<u64> {
        Some(self.memory.as_ref()?.identity()?.id)
    }

    /// The file of the slot's memory and its length in bytes, for the process that maps it.
    /// It is returned once in the lifetime of that memory.
    pub fn take_file(&self) -> Option<(OwnedFile, usize)> {
        let memory = self.memory.as_ref()?;
        Some((memory.identity()?.take_file()?, memory.byte_len()))
    }

    /// Removes the slot from its arena: its memory is freed when dropped, not recycled.
    pub fn retire(&self) {
        if !self.is_retired.swap(true, Ordering::Relaxed) {
            let byte_len = self.memory.as_ref().map_or(0, Memory::byte_len);
            self.shelf.total_bytes.fetch_sub(byte_len, Ordering::Relaxed);
        }
    }

    /// The bytes of the slot.
    pub fn bytes(&self) -> &[u8] {
        self.memory.as_ref().map_or(&[], |memory| &memory.bytes()[..self.byte_len])
    }

    /// The bytes of the slot, writable.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.memory.as_mut().map_or(&mut [], |memory| &mut memory.bytes_mut()[..self.byte_len])
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take()
            && !*self.is_retired.get_mut()
        {
            self.shelf.put(memory);
        }
    }
}

/// Whether recycled slots are poisoned by default.
pub fn poison_by_default() -> bool {
    cfg!(debug_assertions) || std::env::var_os("GRAINMILL_POISON").is_some()
}

/// The free slots of an arena, and the limits on retaining them.
#[derive(Debug)]
struct Shelf {
    allocate_fn: fn(usize) -> Result<Memory>,
    /// How many times the requested size a recycled slot may have.
    max_ratio: usize,
    max_free_per_size: usize,
    max_free_bytes: usize,
    poison: bool,
    total_bytes: AtomicUsize,
    free: Mutex<Free>,
}

impl Shelf {
    fn new(
        allocate_fn: fn(usize) -> Result<Memory>,
        max_ratio: usize,
        max_free_per_size: usize,
        max_free_bytes: usize,
        poison: bool,
    ) -> Self {
        let (total_bytes, free) = (AtomicUsize::new(0), Mutex::default());
        Self {
            allocate_fn,
            max_ratio,
            max_free_per_size,
            max_free_bytes,
            poison,
            total_bytes,
            free,
        }
    }

    fn allocate(&self, size: usize) -> Result<Memory> {
        let memory = (self.allocate_fn)(size)?;
        self.total_bytes.fetch_add(size, Ordering::Relaxed);
        Ok(memory)
    }

    /// Code under this lock calls no callback, so a panic cannot leave its state inconsistent, and
    /// a thread that holds the GIL may wait for it.
    fn lock(&self) -> MutexGuard<'_, Free> {
        lock(&self.free)
    }

    fn put(&self, mut memory: Memory) {
        if !memory.is_ours() {
            return;
        }
        if self.poison {
            memory.bytes_mut().fill(POISON);
        }
        let released = self.lock().put(memory, self.max_free_per_size, self.max_free_bytes);
        self.free_memory(released);
    }

    /// Returns memory to the system, which is slow: not to be called under the lock.
    fn free_memory(&self, released: Vec<Memory>) {
        let byte_len = released.iter().map(Memory::byte_len).sum();
        self.total_bytes.fetch_sub(byte_len, Ordering::Relaxed);
        drop(released);
    }
}

#[derive(Debug, Default)]
struct Free {
    by_size: BTreeMap<usize, Vec<FreeSlot>>,
    byte_len: usize,
    /// Slots returned so far: a logical clock that tells which slot has been free for longest.
    num_returned: u64,
}

#[derive(Debug)]
struct FreeSlot {
    returned_at: u64,
    memory: Memory,
}

impl Free {
    /// The smallest size of free memory that fits `size` bytes, at most `max_ratio` times as large.
    fn fitting_size(&self, size: usize, max_ratio: usize) -> Option<usize> {
        let mut sizes = self.by_size.range(size..=size.saturating_mul(max_ratio));
        sizes.find(|(_, free)| !free.is_empty()).map(|(&size, _)| size)
    }

    /// Takes the most recently returned memory that fits: the likeliest to be in cache.
    fn take(&mut self, size: usize, max_ratio: usize) -> Option<Memory> {
        let size = self.fitting_size(size, max_ratio)?;
        let memory = self.by_size.get_mut(&size)?.pop()?.memory;
        self.byte_len -= size;
        Some(memory)
    }

    /// Adds `memory`, and removes and returns what exceeds the limits.
    fn put(&mut self, memory: Memory, max_per_size: usize, max_byte_len: usize) -> Vec<Memory> {
        let size = memory.byte_len();
        self.byte_len += size;
        self.num_returned += 1;
        let same_size = self.by_size.entry(size).or_default();
        same_size.push(FreeSlot { returned_at: self.num_returned, memory });
        let mut released = Vec::new();
        if same_size.len() > max_per_size && self.byte_len > ALWAYS_RETAINED_BYTES {
            released.extend(self.take_oldest(size));
        }
        released.extend(self.release(max_byte_len));
        released
    }

    /// Removes the memory that has been free for longest until at most `max_byte_len` bytes are free.
    fn release(&mut self, max_byte_len: usize) -> Vec<Memory> {
        let mut released = Vec::new();
        while self.byte_len > max_byte_len {
            released.extend(self.size_of_oldest().and_then(|oldest| self.take_oldest(oldest)));
        }
        released
    }

    fn size_of_oldest(&self) -> Option<usize> {
        let oldest = self.by_size.iter();
        let oldest = oldest.filter_map(|(size, free)| Some((free.first()?.returned_at, *size)));
        oldest.min().map(|(_, size)| size)
    }

    fn take_oldest(&mut self, size: usize) -> Option<Memory> {
        let same_size = self.by_size.get_mut(&size).filter(|free| !free.is_empty())?;
        self.byte_len -= size;
        Some(same_size.remove(0).memory)
    }
}

/// The size of memory allocated for `byte_len` bytes: at most an eighth more, so that batches of
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

    const RETAIN_ALL: usize = 1 << 40;

    #[test]
    fn dropped_slot_is_recycled() {
        let arena = Arena::new(RETAIN_ALL);
        let slot = arena.slot(100_000).unwrap();
        let address = slot.as_ptr();
        drop(slot);
        assert_eq!(arena.slot(100_001).unwrap().as_ptr(), address);
    }

    #[test]
    fn slot_in_use_is_never_allocated_again() {
        let arena = Arena::new(RETAIN_ALL);
        let slots: Vec<Slot> = (0..20).map(|_| arena.slot(5000).unwrap()).collect();
        let mut addresses: Vec<usize> = slots.iter().map(|slot| slot.as_ptr().addr()).collect();
        addresses.sort_unstable();
        assert!(addresses.windows(2).all(|pair| pair[1] - pair[0] >= 5000));
    }

    #[test]
    fn few_large_slots_of_one_size_are_retained() {
        let arena = Arena::new(RETAIN_ALL);
        let slots: Vec<Slot> = (0..20).map(|_| arena.slot(1 << 24).unwrap()).collect();
        drop(slots);
        assert_eq!(arena.free_bytes(), MAX_FREE_PER_SIZE << 24);
    }

    #[test]
    fn many_small_slots_of_one_size_are_retained() {
        let arena = Arena::new(RETAIN_ALL);
        let slots: Vec<Slot> = (0..100).map(|_| arena.slot(1 << 20).unwrap()).collect();
        drop(slots);
        assert_eq!(arena.free_bytes(), ALWAYS_RETAINED_BYTES);
        let slots: Vec<Slot> = (0..10).map(|_| arena.slot(2 << 20).unwrap()).collect();
        drop(slots);
        assert_eq!(arena.free_bytes(), ALWAYS_RETAINED_BYTES + (MAX_FREE_PER_SIZE << 21));
    }

    #[test]
    fn free_bytes_stay_within_their_limit() {
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
        let arena = Arena::with_poison(RETAIN_ALL, true);
        let mut slot = arena.slot(1000).unwrap();
        slot.bytes_mut().fill(7);
        drop(slot);
        assert!(arena.slot(1000).unwrap().bytes().iter().all(|&byte| byte == POISON));
    }

    #[test]
    fn recycled_slot_keeps_its_bytes_without_poison() {
        let arena = Arena::with_poison(RETAIN_ALL, false);
        let mut slot = arena.slot(1000).unwrap();
        slot.bytes_mut().fill(7);
        drop(slot);
        assert!(arena.slot(1000).unwrap().bytes().iter().all(|&byte| byte == 7));
    }

    #[test]
    fn shared_arena_retains_its_slots_until_it_is_trimmed() {
        let arena = Arena::shared(false);
        let slots: Vec<Slot> = (0..20).map(|_| arena.slot(5000).unwrap()).collect();
        let ids: Vec<u64> = slots.iter().filter_map(Slot::shared_id).collect();
        let total = arena.total_bytes();
        drop(slots);
        assert_eq!((arena.total_bytes(), arena.free_bytes()), (total, total));
        assert_eq!(arena.growth(5000), 0);
        assert_eq!(arena.trim(total / 2).len(), 10);
        let mut freed = arena.trim(0);
        freed.sort_unstable();
        assert_eq!(freed, ids[10..]);
        assert_eq!((arena.total_bytes(), arena.growth(5000)), (0, 5120));
    }

    #[test]
    fn shared_slot_is_recycled_for_requests_down_to_half_its_size() {
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
    fn retired_slot_is_not_recycled() {
        let arena = Arena::shared(true);
        let slot = arena.slot(5000).unwrap();
        slot.retire();
        slot.retire();
        assert_eq!(slot.bytes(), [0; 5000]);
        drop(slot);
        assert_eq!((arena.total_bytes(), arena.free_bytes()), (0, 0));
    }

    #[test]
    fn file_of_a_slot_is_returned_once() {
        let slot = Arena::shared(false).slot(5000).unwrap();
        assert_eq!(slot.take_file().map(|(_, byte_len)| byte_len), Some(5120));
        assert!(slot.take_file().is_none());
        assert!(Arena::new(0).slot(5000).unwrap().take_file().is_none());
    }

    #[test]
    fn slot_outlives_its_arena() {
        let mut slot = Arena::new(RETAIN_ALL).slot(100).unwrap();
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
