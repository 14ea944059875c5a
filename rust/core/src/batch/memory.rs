//! A zeroed, 64-byte-aligned allocation: the memory of a slot.
#![expect(unsafe_code, reason = "aligned memory whose pages are only touched when written")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::ALIGNMENT;
use crate::lock::lock;
use crate::platform::{self, OwnedFile};
use crate::shared_memory::Mapping;
use crate::{Error, Result};

/// Allocations from this size on have pages of their own: in the C heap, next to the elements that
/// are copied into them, batches of 800 KB cost a seventh more.
const MIN_PAGES_LEN: usize = 256 << 10;

/// Memory with one owner, zeroed by the system when it was allocated.
#[derive(Debug)]
pub(super) struct Memory {
    start: NonNull<u8>,
    byte_len: usize,
    backing: Backing,
}

/// How the memory was allocated, and so how it is freed.
#[derive(Debug)]
enum Backing {
    Heap { base: NonNull<u8>, layout: Layout },
    Pages,
    Shared { mapping: Mapping, identity: Identity },
}

/// What another process needs to map the memory.
#[derive(Debug)]
pub(super) struct Identity {
    /// Unique in this process.
    pub(super) id: u64,
    file: Mutex<Option<OwnedFile>>,
    /// The process that allocated it; a forked child sees the same bytes.
    creator: u32,
}

impl Identity {
    /// The file of the memory, returned once.
    pub(super) fn take_file(&self) -> Option<OwnedFile> {
        lock(&self.file).take()
    }
}

// SAFETY: only this value owns and frees the memory; nothing is tied to a thread.
unsafe impl Send for Memory {}
// SAFETY: a shared reference returns pointers and `&[u8]`, and writing through either needs
// `&mut Memory` or the caller's own `unsafe` promise.
unsafe impl Sync for Memory {}

impl Memory {
    /// Allocates `byte_len` zero bytes.
    ///
    /// The aligned range is cut out of a larger allocation: the allocator returns untouched pages
    /// for its own alignment, and would write every byte for a stricter one.
    pub(super) fn zeroed(byte_len: usize) -> Result<Self> {
        if byte_len >= MIN_PAGES_LEN {
            // At the limit on mappings of a process, fall back to the heap.
            if let Ok(start) = platform::map_anonymous(byte_len) {
                return Ok(Self { start, byte_len, backing: Backing::Pages });
            }
        }
        let refused = || Error::OutOfMemory(format!("no memory for a slot of {byte_len} bytes"));
        let total = byte_len.checked_add(ALIGNMENT).ok_or_else(refused)?;
        let layout = Layout::from_size_align(total, 16).map_err(|_| refused())?;
        // SAFETY: `layout` is at least `ALIGNMENT` bytes long, so not empty.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(refused)?;
        let skipped = base.align_offset(ALIGNMENT).min(ALIGNMENT);
        // SAFETY: `skipped` is at most `ALIGNMENT`, by which `layout` exceeds `byte_len`.
        let start = unsafe { base.add(skipped) };
        Ok(Self { start, byte_len, backing: Backing::Heap { base, layout } })
    }

    /// As [`zeroed`](Self::zeroed), in memory that another process can map.
    pub(super) fn shared(byte_len: usize) -> Result<Self> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        let (mapping, file) = Mapping::create(byte_len)?;
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let identity = Identity { id, file: Mutex::new(Some(file)), creator: std::process::id() };
        let start = NonNull::new(mapping.as_ptr())
            .ok_or_else(|| Error::InvalidArgument("shared memory at address 0".into()))?;
        Ok(Self { start, byte_len, backing: Backing::Shared { mapping, identity } })
    }

    /// How another process can map the memory, if it can.
    pub(super) fn identity(&self) -> Option<&Identity> {
        match &self.backing {
            Backing::Heap { .. } | Backing::Pages => None,
            Backing::Shared { identity, .. } => Some(identity),
        }
    }

    /// Whether this process may write the bytes. A forked child gets a copy of the heap; shared
    /// memory still belongs to its parent.
    pub(super) fn is_ours(&self) -> bool {
        self.identity().is_none_or(|identity| identity.creator == std::process::id())
    }

    /// Frees the pages of shared memory now, though other processes may still map it: that is slow,
    /// and the process that unmaps it last should not pay for it.
    pub(super) fn empty(&mut self) {
        if let Backing::Shared { mapping, .. } = &mut self.backing {
            mapping.empty();
        }
    }

    pub(super) fn byte_len(&self) -> usize {
        self.byte_len
    }

    pub(super) fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: `zeroed` or `shared` allocated `byte_len` initialised bytes at `start`, which only
        // `drop` frees. Another process that maps them reads only while this one does not write.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.byte_len) }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `&mut self` excludes every other reference.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.byte_len) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        match self.backing {
            // SAFETY: `base` came from `alloc_zeroed` with the same `layout`, in `zeroed`.
            Backing::Heap { base, layout } => unsafe { dealloc(base.as_ptr(), layout) },
            // SAFETY: `start` came from `map_anonymous` with this length, and is no longer in use.
            Backing::Pages => drop(unsafe { platform::unmap(self.start, self.byte_len) }),
            Backing::Shared { .. } => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zeroed_and_aligned() {
        for byte_len in [0, 1, 63, 64, 65, 4095, MIN_PAGES_LEN - 1, MIN_PAGES_LEN, 1 << 20] {
            let memory = Memory::zeroed(byte_len).unwrap();
            assert_eq!(memory.as_ptr().addr() % ALIGNMENT, 0);
            assert_eq!(memory.bytes().len(), byte_len);
            assert!(memory.bytes().iter().all(|&byte| byte == 0));
        }
    }

    #[test]
    fn more_memory_than_the_system_has_is_an_error() {
        for byte_len in [usize::MAX, usize::MAX - 64, usize::MAX / 2 - 80] {
            let message = Memory::zeroed(byte_len).unwrap_err().to_string();
            assert_eq!(message, format!("no memory for a slot of {byte_len} bytes"));
        }
    }
}
