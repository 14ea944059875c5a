//! Reads of a file from one place to later ones.
//!
//! A storage whose reads are requests has several in flight, as many as are needed so that nobody waits
//! for one; from any other slow storage much is read at once. A file in memory or on a fast disk is
//! read as asked.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::read_queue::ReadQueue;
use super::storage::{Reader, StartedRead};
use super::storage_latency::add_waited;
use crate::process::{self, PerProcess};
use crate::{Error, Result};

/// How many bytes of a file are in flight, or wait to be taken, at first and at most.
const FIRST_WINDOW: u64 = 1 << 20;
const MAX_WINDOW: u64 = 32 << 20;
/// How many requests a window has, of what length at least.
const PIECES: u64 = 8;
const MIN_PIECE_LEN: u64 = 256 << 10;
/// The maximum of all windows of a process, beside one piece of each file.
const MAX_IN_PROCESS: u64 = 256 << 20;
/// How much is read at once from slow storage that starts no reads.
const SLOW_LEN: u64 = 8 << 20;
/// Who goes on so little behind the end of the window will find the next place in it, once it has grown.
const NEAR: u64 = 4 << 20;
/// A longer wait makes the window grow.
const LONG_WAIT: Duration = Duration::from_millis(1);

/// What the windows of this process hold.
static IN_PROCESS: PerProcess<AtomicU64> = PerProcess::new(AtomicU64::default);

/// The reads of one file.
#[derive(Debug)]
pub(crate) struct ForwardReads {
    /// Consecutive parts of the file.
    pieces: VecDeque<Piece>,
    window: u64,
    /// How many reads must go on, one behind the other, before more is read than they ask for.
    least_in_row: u32,
    num_in_row: u32,
    /// Where the last read ended.
    end: u64,
    /// The process that started the reads: in a forked child, nobody finishes them.
    owner: u32,
}

#[derive(Debug)]
struct Piece {
    range: Range<u64>,
    content: Content,
    _share: Share,
}

enum Content {
    Started(Box<dyn StartedRead>),
    Bytes(Vec<u8>),
}

impl fmt::Debug for Content {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Started(_) => "Started",
            Self::Bytes(_) => "Bytes",
        })
    }
}

/// A part of what all windows may hold.
#[derive(Debug)]
struct Share {
    byte_len: u64,
    owner: u32,
}

impl Share {
    fn new(byte_len: u64) -> Self {
        IN_PROCESS.get().fetch_add(byte_len, Ordering::Relaxed);
        Self { byte_len, owner: process::id() }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if self.owner == process::id() {
            IN_PROCESS.get().fetch_sub(self.byte_len, Ordering::Relaxed);
        }
    }
}

impl Default for ForwardReads {
    fn default() -> Self {
        Self {
            pieces: VecDeque::new(),
            window: FIRST_WINDOW,
            least_in_row: 0,
            num_in_row: 0,
            end: u64::MAX,
            owner: process::id(),
        }
    }
}

impl ForwardReads {
    /// Those of a file of which perhaps only some places are read, such as its header.
    pub(crate) fn anywhere() -> Self {
        Self { least_in_row: 2, ..Self::default() }
    }

    /// Fills `out` from position `at` of the file behind `reader`, which has `byte_len` bytes. The next
    /// call should ask for what follows, or for a place not far behind it.
    ///
    /// # Errors
    /// If the file cannot be read or ends too early; the next call reads again.
    pub(crate) fn read(
        &mut self,
        reader: Reader<'_>,
        mut out: &mut [u8],
        mut at: u64,
        byte_len: u64,
    ) -> Result<()> {
        if self.owner != process::id() {
            *self = Self { least_in_row: self.least_in_row, ..Self::default() };
        }
        // The next call may begin where this one does, so the first pieces stay.
        self.move_to(at);
        let end = std::mem::replace(&mut self.end, at + out.len() as u64);
        let goes_on = !self.pieces.is_empty() || (end..=end.saturating_add(NEAR)).contains(&at);
        self.num_in_row = if goes_on { self.num_in_row.saturating_add(1) } else { 0 };
        if self.num_in_row < self.least_in_row {
            return reader.read_at(out, at);
        }
        let mut number = 0;
        while !out.is_empty() {
            // Of a long record, all of them would be as much as the record.
            while self.pieces.front().is_some_and(|first| first.range.end + MAX_WINDOW <= at) {
                self.pieces.pop_front();
                number -= 1;
            }
            if reader.is_slow() {
                self.start(reader, at, byte_len);
            }
            if number == self.pieces.len() {
                let is_long = out.len() as u64 >= SLOW_LEN.min(byte_len.saturating_sub(at));
                if is_long || !reader.is_slow() {
                    return reader.read_at(out, at);
                }
                let range = at..byte_len.min(at + SLOW_LEN);
                let mut bytes = vec![0; usize_of(range.end - range.start)];
                reader.read_at(&mut bytes, at)?;
                self.push(range, Content::Bytes(bytes));
            }
            let (begin, bytes) = self.piece(number)?;
            let found = bytes.get(usize_of(at - begin)..).unwrap_or_default();
            let len = found.len().min(out.len());
            let (now, later) = out.split_at_mut(len);
            now.copy_from_slice(&found[..len]);
            (out, at) = (later, at + len as u64);
            number += 1;
        }
        Ok(())
    }

    fn push(&mut self, range: Range<u64>, content: Content) {
        let share = Share::new(range.end - range.start);
        self.pieces.push_back(Piece { range, content, _share: share });
    }

    /// Drops what lies before `at`, and everything if `at` is elsewhere.
    fn move_to(&mut self, at: u64) {
        while self.pieces.front().is_some_and(|first| first.range.end <= at) {
            let is_last = self.pieces.len() == 1;
            let end = self.pieces.pop_front().map_or(0, |first| first.range.end);
            if is_last && end + NEAR < at {
                self.window = FIRST_WINDOW;
            }
        }
        if self.pieces.front().is_some_and(|first| first.range.start > at) {
            self.pieces.clear();
            self.window = FIRST_WINDOW;
        }
    }

    /// Starts reads of what follows, as far as the window reaches.
    fn start(&mut self, reader: Reader<'_>, at: u64, byte_len: u64) {
        let piece_len = (self.window / PIECES).max(MIN_PIECE_LEN);
        let mut next = self.pieces.back().map_or(at, |last| last.range.end);
        while next < byte_len {
            let range = next..byte_len.min(next + piece_len);
            let is_first = self.pieces.is_empty();
            let has_room = next - at < self.window
                && IN_PROCESS.get().load(Ordering::Relaxed) + piece_len <= MAX_IN_PROCESS;
            if !is_first && !has_room {
                return;
            }
            let queue = ReadQueue::of_process().in_storage(reader.limit());
            // What is needed now does not wait for what others read ahead.
            let permit = if is_first { Some(queue.enter_anyway()) } else { queue.enter() };
            let Some(started) = permit.and_then(|permit| reader.start(range.clone(), permit))
            else {
                return;
            };
            next = range.end;
            self.push(range, Content::Started(started));
        }
    }

    /// Where piece `number` begins, and its bytes; waits for them.
    fn piece(&mut self, number: usize) -> Result<(u64, &[u8])> {
        let Some(piece) = self.pieces.get_mut(number) else { return Ok((0, &[])) };
        let range = piece.range.clone();
        let bytes = match std::mem::replace(&mut piece.content, Content::Bytes(Vec::new())) {
            Content::Bytes(bytes) => bytes,
            Content::Started(started) => {
                let began = Instant::now();
                let result = started.wait();
                let waited = began.elapsed();
                add_waited(waited);
                if waited >= LONG_WAIT {
                    self.window = (2 * self.window).min(MAX_WINDOW);
                }
                let bytes = result.inspect_err(|_| self.pieces.clear())?;
                if bytes.len() as u64 != range.end - range.start {
                    self.pieces.clear();
                    return Err(Error::Panicked("a storage has read another length".to_owned()));
                }
                bytes
            }
        };
        match self.pieces.get_mut(number) {
            Some(Piece { content: Content::Bytes(place), .. }) => {
                *place = bytes;
                Ok((range.start, place))
            }
            _ => Ok((0, &[])),
        }
    }
}

fn usize_of(len: u64) -> usize {
    usize::try_from(len).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::super::read_queue::{Permit, turn};
    use super::super::storage::ReadAt;
    use super::super::storage_latency::StorageLatency;
    use super::*;
    use crate::bytes::ScatterBuffers;

    /// Each byte is the low one of its position in MiB.
    #[derive(Debug)]
    struct Far;

    struct InFlight(Range<u64>, Permit);

    impl ReadAt for Far {
        fn read_at(&self, out: &mut [u8], at: u64) -> Result<()> {
            for (byte, at) in out.iter_mut().zip(at..) {
                *byte = (at >> 20).to_le_bytes()[0];
            }
            Ok(())
        }

        fn read_scattered(&self, _: &mut ScatterBuffers<'_>, _: u64) -> Result<()> {
            unreachable!("nothing that reads forwards does this")
        }

        fn start(&self, range: Range<u64>, permit: Permit) -> Option<Box<dyn StartedRead>> {
            Some(Box::new(InFlight(range, permit)))
        }
    }

    impl StartedRead for InFlight {
        fn wait(self: Box<Self>) -> Result<Vec<u8>> {
            std::thread::sleep(LONG_WAIT);
            let mut bytes = vec![0; usize_of(self.0.end - self.0.start)];
            Far.read_at(&mut bytes, self.0.start)?;
            drop(self.1);
            Ok(bytes)
        }
    }

    fn slow() -> StorageLatency {
        let latency = StorageLatency::default();
        latency.expect_slow();
        latency
    }

    #[test]
    fn long_reads_hold_no_more_than_a_window_before_and_behind() {
        let _turn = turn();
        let latency = slow();
        let (reader, byte_len) = (Reader::new(&Far, &latency), 200 << 20);
        let mut reads = ForwardReads::default();
        let mut out = vec![0; 90 << 20];
        for at in [100, (90 << 20) + 100, 100] {
            out.fill(255);
            reads.read(reader, &mut out, at, byte_len).unwrap();
            let is_right = |(byte, at): (&u8, u64)| *byte == (at >> 20).to_le_bytes()[0];
            assert!(out.iter().zip(at..).all(is_right));
            let held: u64 =
                reads.pieces.iter().map(|piece| piece.range.end - piece.range.start).sum();
            assert!(held <= 2 * MAX_WINDOW + (8 << 20), "{held}");
            assert!(held > MAX_WINDOW, "{held}");
        }
    }

    #[test]
    fn places_near_each_other_are_read_ahead_and_those_far_away_are_not() {
        let _turn = turn();
        let latency = slow();
        let (reader, byte_len) = (Reader::new(&Far, &latency), 1 << 30);
        for (step, is_near) in
            [(1 << 20, true), (4 << 20, true), (6 << 20, false), (20 << 20, false)]
        {
            let mut reads = ForwardReads::default();
            let mut num_ahead = 0;
            for number in 0..30 {
                let at = number * step;
                num_ahead += u32::from(reads.pieces.iter().any(|piece| piece.range.contains(&at)));
                let mut out = [255; 100];
                reads.read(reader, &mut out, at, byte_len).unwrap();
                assert_eq!(out, [(at >> 20).to_le_bytes()[0]; 100]);
            }
            let least = if is_near { 20..=30 } else { 0..=0 };
            assert!(least.contains(&num_ahead), "{num_ahead} of 30 with {step} bytes in between");
        }
    }

    #[test]
    fn places_anywhere_are_read_ahead_where_they_go_on() {
        let _turn = turn();
        let latency = slow();
        let (reader, byte_len) = (Reader::new(&Far, &latency), 1 << 30);
        let mut reads = ForwardReads::anywhere();
        let mut pieces_after = |at: u64| {
            let mut out = [255; 100];
            reads.read(reader, &mut out, at, byte_len).unwrap();
            assert_eq!(out, [(at >> 20).to_le_bytes()[0]; 100]);
            reads.pieces.len()
        };
        for at in [0, 500 << 20, 8, 8, 40 << 20, 0, 100] {
            assert_eq!(pieces_after(at), 0, "{at}");
        }
        assert!(pieces_after(200) > 1);
        assert_eq!(pieces_after(50), 0, "before what was read");
        assert_eq!(pieces_after(3 << 20), 0);
        for at in [5 << 20, (5 << 20) + 1] {
            assert!(pieces_after(at) > 1, "{at}");
        }
    }

    #[test]
    fn nothing_is_read_ahead_beside_as_many_reads_as_a_process_may_have() {
        let _turn = turn();
        let queue = ReadQueue::of_process();
        let held: Vec<Permit> = std::iter::from_fn(|| queue.enter()).collect();
        let latency = slow();
        let (reader, byte_len) = (Reader::new(&Far, &latency), 200 << 20);
        let mut reads = ForwardReads::default();
        let mut read_at =
            |at| reads.read(reader, &mut [0; 100], at, byte_len).map(|()| reads.pieces.len());
        for at in [0, 100, MIN_PIECE_LEN] {
            assert_eq!(read_at(at).unwrap(), 1, "{at}");
        }
        drop(held);
        assert!(read_at(MIN_PIECE_LEN + 1).unwrap() > 1);
    }
}
