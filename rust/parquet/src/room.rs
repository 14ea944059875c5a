//! A limit on the bytes of column chunks that are read whole at the same time.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex};

use bytes::Bytes;
use grainmill_core::lock::lock;
use grainmill_core::{Result, interrupt};

/// The limit.
const LIMIT: u64 = 256 << 20;
/// How many bytes one thread takes at most.
pub(crate) const MAX_TAKEN: u64 = LIMIT / 2;

/// How many bytes are taken.
#[derive(Debug, Default)]
pub(crate) struct Room {
    taken: Mutex<u64>,
    returned: Condvar,
}

/// Bytes of a [`Room`], returned when it is dropped.
#[derive(Debug)]
pub(crate) struct Taken {
    room: Arc<Room>,
    byte_len: u64,
}

/// A part of a file that was read to find pages, and may be needed at once to decode them.
#[derive(Debug, Clone)]
pub(crate) struct Held {
    pub(crate) at: u64,
    pub(crate) bytes: Bytes,
    pub(crate) taken: Arc<Taken>,
}

impl Room {
    /// Takes `byte_len` bytes, at most [`MAX_TAKEN`], as soon as there is room for them.
    pub(crate) fn take(self: &Arc<Self>, byte_len: u64) -> Result<Taken> {
        debug_assert!(byte_len <= MAX_TAKEN, "{byte_len} bytes would wait for ever");
        let is_full = |taken: &mut u64| *taken + byte_len > LIMIT;
        *interrupt::wait_while(&self.taken, &self.returned, is_full)? += byte_len;
        Ok(Taken { room: Arc::clone(self), byte_len })
    }
}

impl Held {
    /// Whether it has all bytes of `range`.
    pub(crate) fn has(&self, range: &Range<u64>) -> bool {
        self.at <= range.start && range.end <= self.at + self.bytes.len() as u64
    }
}

impl Taken {
    /// Whether these bytes may be kept: half of the limit must remain, or those who wait in `take`
    /// could wait for ever.
    pub(crate) fn may_stay(&self) -> bool {
        *lock(&self.room.taken) <= LIMIT / 2
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        *lock(&self.room.taken) -= self.byte_len;
        self.room.returned.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_beyond_the_limit_wait_and_half_of_it_may_stay() {
        let room = Arc::new(Room::default());
        let first = room.take(LIMIT / 2).unwrap();
        assert!(first.may_stay());
        let second = room.take(LIMIT / 2).unwrap();
        assert!(!second.may_stay());
        let waiting = {
            let room = Arc::clone(&room);
            std::thread::spawn(move || room.take(1).unwrap().byte_len)
        };
        drop(first);
        assert_eq!(waiting.join().unwrap(), 1);
        drop(second);
        assert_eq!(*room.taken.lock().unwrap(), 0);
    }
}
