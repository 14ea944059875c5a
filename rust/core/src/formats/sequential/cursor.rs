//! One record of a stream after the other, with the place of the next.

use super::{RecordBlock, RecordStream, Start};
use crate::Result;

/// The records of a stream, read in blocks and taken singly.
#[derive(Debug)]
pub struct RecordCursor {
    stream: RecordStream,
    block: RecordBlock,
    /// How many records of the block were taken.
    num_taken: usize,
}

impl RecordCursor {
    /// The records of `stream`; errors do not name their numbers.
    pub fn new(stream: RecordStream) -> Self {
        let stream = stream.without_numbers();
        Self { stream, block: RecordBlock::default(), num_taken: 0 }
    }

    /// The next record, if that needs no I/O.
    pub fn buffered(&mut self) -> Option<&[u8]> {
        let record = self.block.get(self.num_taken)?;
        self.num_taken += 1;
        Some(record)
    }

    /// Reads the next records; returns whether there are any.
    ///
    /// # Errors
    /// If the file cannot be read or was changed, or the next record is damaged or cut short. Nothing
    /// is lost: the next call tries again.
    pub fn fill(&mut self) -> Result<bool> {
        if self.num_taken < self.block.len() {
            return Ok(true);
        }
        self.num_taken = 0;
        self.stream.read(&mut self.block, usize::MAX)
    }

    /// Where the next record begins, in the decompressed file.
    pub fn tell(&self) -> u64 {
        match self.num_taken.checked_sub(1) {
            Some(last) => self.stream.end_of(last),
            None if self.block.is_empty() => self.stream.offset(),
            None => self.stream.block_begin(),
        }
    }

    /// Where decompression can start to get the next record.
    pub fn start(&self) -> Start {
        self.stream.start_before(self.tell())
    }

    /// Makes the record that begins at byte `at` of the decompressed file the next one, which is
    /// decompressed from `start` on.
    pub fn seek(&mut self, at: u64, start: Option<Start>) {
        self.block.clear();
        self.num_taken = 0;
        self.stream.seek(at, start);
    }
}
