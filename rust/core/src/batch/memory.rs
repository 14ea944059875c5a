//! One zeroed, 64-byte-aligned run of bytes: what a slot is made of.
#![expect(unsafe_code, reason = "aligned memory whose pages are only touched when written")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::ALIGNMENT;
use crate::platform::{self, OwnedFile};
use crate::shared_memory::Mapping;
use crate::{Error, Result};

/// Runs from this length on have pages of their own. In the C heap, amid the elements that are
/// copied into them, batches of 800 KB cost a seventh more.
const PAGES_FROM: usize = 256 << 10;

/// Memory that belongs to one owner, zeroed by the system when it was made.
#[derive(Debug)]
pub(super) struct Memory {
    start: NonNull<u8>,
    byte_len: usize,
    home: Home,
}

/// Where the bytes come from, and how they go back.
#[derive(Debug)]
enum Home {
    Heap { base: NonNull<u8>, layout: Layout },
    Pages,
    Shared { mapping: Mapping, identity: Identity },
}

/// What another process needs to find a run of bytes.
#[derive(Debug)]
pub(super) struct Identity {
    /// Of all the memory of this process, only this has the number.
    pub(super) id: u64,
    file: Mutex<Option<OwnedFile>>,
    /// The process that made it; a child forked off that sees the same bytes.
    maker: u32,
}

impl Identity {
    /// The file behind the bytes; one is enough for each other process.
    pub(super) fn take_file(&self) -> Option<OwnedFile> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

// SAFETY: the pointers are to memory that only this value owns and frees; nothing is tied to a thread.
unsafe impl Send for Memory {}
// SAFETY: a shared reference gives out pointers and `&[u8]`, and writing through either needs
// `&mut Memory` or the caller's own `unsafe` promise.
unsafe impl Sync for Memory {}

impl Memory {
    /// `byte_len` zero bytes, or an error where the system has no room for them.
    ///
    /// The alignment is cut out of a larger run: the allocator hands out untouched pages for
    /// plain alignment, and would write every byte for a stricter one.
    pub(super) fn zeroed(byte_len: usize) -> Result<Self> {
        if byte_len >= PAGES_FROM {
            // A process may have only so many mappings: then the heap will do.
            if let Ok(start) = platform::anonymous(byte_len) {
                return Ok(Self { start, byte_len, home: Home::Pages });
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
        Ok(Self { start, byte_len, home: Home::Heap { base, layout } })
    }

    /// The same, in memory that another process can map.
    pub(super) fn shared(byte_len: usize) -> Result<Self> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        let (mapping, file) = Mapping::create(byte_len)?;
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let identity = Identity { id, file: Mutex::new(Some(file)), maker: std::process::id() };
        let start = NonNull::new(mapping.as_ptr())
            .ok_or_else(|| Error::InvalidArgument("shared memory at address 0".into()))?;
        Ok(Self { start, byte_len, home: Home::Shared { mapping, identity } })
    }

    /// How another process finds the bytes, where it can.
    pub(super) fn identity(&self) -> Option<&Identity> {
        match &self.home {
            Home::Heap { .. } | Home::Pages => None,
            Home::Shared { identity, .. } => Some(identity),
        }
    }

    /// Whether the bytes are this process's to write. Those of the heap become a forked child's
    /// own; those that are shared stay its parent's.
    pub(super) fn is_ours(&self) -> bool {
        self.identity().is_none_or(|identity| identity.maker == std::process::id())
    }

    /// Gives the pages of shared memory back at once, where other processes may still map it:
    /// giving back is slow, and is not to fall to the one that unmaps it last.
    pub(super) fn empty(&mut self) {
        if let Home::Shared { mapping, .. } = &mut self.home {
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
        // SAFETY: `zeroed` or `shared` made `byte_len` initialised bytes at `start`, which go only
        // in `drop`. Another process that maps them reads only while this one does not write.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.byte_len) }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `&mut self` keeps every other reference away.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.byte_len) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        match self.home {
            // SAFETY: `base` came from `alloc_zeroed` with this same `layout`, in `zeroed`.
            Home::Heap { base, layout } => unsafe { dealloc(base.as_ptr(), layout) },
            // SAFETY: `start` came from `anonymous` with this length, and nobody uses it any more.
            Home::Pages => drop(unsafe { platform::unmapped(self.start, self.byte_len) }),
            Home::Shared { .. } => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zeroed_and_aligned() {
        for byte_len in [0, 1, 63, 64, 65, 4095, PAGES_FROM - 1, PAGES_FROM, 1 << 20] {
            let memory = Memory::zeroed(byte_len).unwrap();
            assert_eq!(memory.as_ptr().addr() % ALIGNMENT, 0);
            assert_eq!(memory.bytes().len(), byte_len);
            assert!(memory.bytes().iter().all(|&byte| byte == 0));
        }
    }

    #[test]
    fn more_memory_than_there_is_is_an_error() {
        for byte_len in [usize::MAX, usize::MAX - 64, usize::MAX / 2 - 80] {
            let message = Memory::zeroed(byte_len).unwrap_err().to_string();
            assert_eq!(message, format!("no memory for a slot of {byte_len} bytes"));
        }
    }
}
