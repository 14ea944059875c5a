//! Memory that is about to be written, brought into the cache while something is computed.
//!
//! A core that copies to memory waits for each line of it first; one that computes a checksum
//! leaves the way to memory idle. So whoever copies rows says where the next ones will go
//! ([`prefetch_for_write`]), and the next checksums of this thread fetch those lines on the way. All
//! of it is a hint: no byte is read or changed, and the memory may be gone by then.
#![cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "instructions of the processor"))]
#![cfg_attr(
    not(any(target_arch = "x86_64", test)),
    expect(
        dead_code,
        reason = "checksums of several records at once are written for one processor"
    )
)]

use std::cell::Cell;

const LINE_LEN: usize = 64;
/// How many places are fetched from in turn.
const PLACES: usize = 8;
/// More than this would push out of the cache what was computed.
const MOST_LEN: usize = 512 << 10;

thread_local! {
    /// The longest place, as address and length.
    static EXPECTED: Cell<Option<(usize, usize)>> = const { Cell::new(None) };
}

/// Says that this thread is about to write `place`, after it has read more records. Of several
/// places, the longest counts.
pub fn prefetch_for_write(place: *const [u8]) {
    let len = place.len().min(MOST_LEN);
    if EXPECTED.get().map_or(0, |(_, other)| other) < len {
        EXPECTED.set(Some((place.addr(), len)));
    }
}

/// The lines of the cache that are still to be fetched, from several places in turn: they come
/// sooner from different pages than one after the other from one.
#[derive(Debug, Default)]
pub struct WritePrefetcher {
    /// The next line, and where the turn that it belongs to began.
    at: usize,
    turn: usize,
    turns_end: usize,
    end: usize,
    stride: usize,
}

impl WritePrefetcher {
    /// What this thread is expected to write next; nothing, until it is said again.
    pub(crate) fn take() -> Self {
        let Some((address, len)) = EXPECTED.take() else { return Self::default() };
        let (begin, end) = (address / LINE_LEN, (address + len).div_ceil(LINE_LEN));
        let stride = (end - begin).div_ceil(PLACES);
        Self { at: begin, turn: begin, turns_end: begin + stride, end, stride }
    }

    /// Begins to fetch the next lines, up to `count`.
    #[inline]
    pub(crate) fn prefetch_lines(&mut self, count: usize) {
        for _ in 0..count {
            let Some(line) = self.next_line() else { return };
            fetch(line * LINE_LEN);
        }
    }

    #[inline]
    fn next_line(&mut self) -> Option<usize> {
        if self.turn >= self.turns_end {
            return None;
        }
        let line = self.at;
        self.at += self.stride;
        if self.at >= self.end {
            self.turn += 1;
            self.at = self.turn;
        }
        Some(line)
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn fetch(address: usize) {
    use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
    // SAFETY: fetching ahead has no effect but on the cache, whatever the address.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(std::ptr::without_provenance(address)) }
}

#[cfg(not(target_arch = "x86_64"))]
#[inline]
fn fetch(_: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines_of(mut prefetcher: WritePrefetcher) -> Vec<usize> {
        std::iter::from_fn(|| prefetcher.next_line()).collect()
    }

    #[test]
    fn every_line_is_fetched_once() {
        let memory = vec![0_u8; 1 << 20];
        for (begin, len) in
            [(0, 1), (63, 2), (1, 64), (0, 500), (7, 8 * 64), (100, 4096), (3, 100_000)]
        {
            let place = &memory[begin..begin + len];
            prefetch_for_write(place);
            let mut lines = lines_of(WritePrefetcher::take());
            lines.sort_unstable();
            let first = place.as_ptr().addr() / LINE_LEN;
            let last = (place.as_ptr().addr() + len - 1) / LINE_LEN;
            assert_eq!(lines, (first..=last).collect::<Vec<_>>(), "{len} bytes from {begin}");
        }
    }

    #[test]
    fn the_longest_place_counts_once_and_no_more_than_a_cache_holds() {
        let memory = vec![0_u8; 2 << 20];
        prefetch_for_write(&raw const memory[..100]);
        prefetch_for_write(&raw const memory[..]);
        prefetch_for_write(&raw const memory[5000..6000]);
        let lines = lines_of(WritePrefetcher::take());
        assert_eq!(lines.iter().min(), Some(&(memory.as_ptr().addr() / LINE_LEN)));
        assert!((MOST_LEN / LINE_LEN..=MOST_LEN / LINE_LEN + 1).contains(&lines.len()));
        assert!(lines_of(WritePrefetcher::take()).is_empty());
        prefetch_for_write(&[]);
        assert!(lines_of(WritePrefetcher::take()).is_empty());
    }

    #[test]
    fn what_another_thread_will_write_is_its_own() {
        let memory = [0_u8; 640];
        prefetch_for_write(&memory);
        let elsewhere = std::thread::spawn(|| lines_of(WritePrefetcher::take())).join().unwrap();
        assert!(elsewhere.is_empty());
        assert!(lines_of(WritePrefetcher::take()).len() >= 10);
    }
}
