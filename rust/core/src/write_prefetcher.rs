//! Prefetches memory that is about to be written into the cache while a checksum is computed.
//!
//! A copy waits for each cache line of its destination, while a checksum leaves the memory bus
//! idle. So code that copies rows announces the destination of the next ones
//! ([`prefetch_for_write`]), and the next checksums of this thread prefetch those lines. It is only
//! a hint: no byte is read or changed, and the memory may have been freed by then.
#![cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "prefetch instructions"))]
#![cfg_attr(
    not(any(target_arch = "x86_64", test)),
    expect(dead_code, reason = "checksums of several records at once exist for x86-64 only")
)]

use std::cell::Cell;

const LINE_LEN: usize = 64;
/// The number of interleaved regions.
const NUM_REGIONS: usize = 8;
/// Longer prefetches would evict the data being computed.
const MAX_LEN: usize = 512 << 10;

thread_local! {
    /// The longest announced destination, as address and length.
    static NEXT_WRITE: Cell<Option<(usize, usize)>> = const { Cell::new(None) };
}

/// Announces that this thread is about to write `destination`, after it has read more records. Of
/// several announcements, the longest counts.
pub fn prefetch_for_write(destination: *const [u8]) {
    let len = destination.len().min(MAX_LEN);
    if NEXT_WRITE.get().map_or(0, |(_, other)| other) < len {
        NEXT_WRITE.set(Some((destination.addr(), len)));
    }
}

/// The cache lines still to be prefetched, interleaved over several regions, since lines of
/// different pages arrive sooner than those of one page.
#[derive(Debug, Default)]
pub struct WritePrefetcher {
    /// The next line, and the first line of the current pass over the regions.
    at: usize,
    pass: usize,
    passes_end: usize,
    end: usize,
    stride: usize,
}

impl WritePrefetcher {
    /// Takes the destination that this thread has announced, if any.
    pub(crate) fn take() -> Self {
        let Some((address, len)) = NEXT_WRITE.take() else { return Self::default() };
        let (begin, end) = (address / LINE_LEN, (address + len).div_ceil(LINE_LEN));
        let stride = (end - begin).div_ceil(NUM_REGIONS);
        Self { at: begin, pass: begin, passes_end: begin + stride, end, stride }
    }

    /// Starts prefetching up to `count` lines.
    #[inline]
    pub(crate) fn prefetch_lines(&mut self, count: usize) {
        for _ in 0..count {
            let Some(line) = self.next_line() else { return };
            prefetch(line * LINE_LEN);
        }
    }

    #[inline]
    fn next_line(&mut self) -> Option<usize> {
        if self.pass >= self.passes_end {
            return None;
        }
        let line = self.at;
        self.at += self.stride;
        if self.at >= self.end {
            self.pass += 1;
            self.at = self.pass;
        }
        Some(line)
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn prefetch(address: usize) {
    use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
    // SAFETY: a prefetch affects only the cache, whatever the address.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(std::ptr::without_provenance(address)) }
}

#[cfg(not(target_arch = "x86_64"))]
#[inline]
fn prefetch(_: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines_of(mut prefetcher: WritePrefetcher) -> Vec<usize> {
        std::iter::from_fn(|| prefetcher.next_line()).collect()
    }

    #[test]
    fn every_line_is_prefetched_once() {
        let memory = vec![0_u8; 1 << 20];
        for (begin, len) in
            [(0, 1), (63, 2), (1, 64), (0, 500), (7, 8 * 64), (100, 4096), (3, 100_000)]
        {
            let destination = &memory[begin..begin + len];
            prefetch_for_write(destination);
            let mut lines = lines_of(WritePrefetcher::take());
            lines.sort_unstable();
            let first = destination.as_ptr().addr() / LINE_LEN;
            let last = (destination.as_ptr().addr() + len - 1) / LINE_LEN;
            assert_eq!(lines, (first..=last).collect::<Vec<_>>(), "{len} bytes from {begin}");
        }
    }

    #[test]
    fn the_longest_destination_counts_once_up_to_the_maximum() {
        let memory = vec![0_u8; 2 << 20];
        prefetch_for_write(&raw const memory[..100]);
        prefetch_for_write(&raw const memory[..]);
        prefetch_for_write(&raw const memory[5000..6000]);
        let lines = lines_of(WritePrefetcher::take());
        assert_eq!(lines.iter().min(), Some(&(memory.as_ptr().addr() / LINE_LEN)));
        assert!((MAX_LEN / LINE_LEN..=MAX_LEN / LINE_LEN + 1).contains(&lines.len()));
        assert!(lines_of(WritePrefetcher::take()).is_empty());
        prefetch_for_write(&[]);
        assert!(lines_of(WritePrefetcher::take()).is_empty());
    }

    #[test]
    fn announcements_of_another_thread_are_its_own() {
        let memory = [0_u8; 640];
        prefetch_for_write(&memory);
        let other = std::thread::spawn(|| lines_of(WritePrefetcher::take())).join().unwrap();
        assert!(other.is_empty());
        assert!(lines_of(WritePrefetcher::take()).len() >= 10);
    }
}
