//! Copies records from one file to another, encoded by several threads, in order.
//!
//! The calling thread reads blocks of records and appends what the others have encoded; at most two
//! blocks for each of them, and one more, are in memory.

use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread;

use super::{Files, Pending, Records, open};
use crate::formats::outputs::{Encoded, Encoder, Output};
use crate::formats::sequential::{BLOCK_BYTES, RecordBlock, RecordStream};
use crate::io::ReadQueue;
use crate::lock::lock;
use crate::{Error, Result};

/// Where records come from, block by block.
pub trait BlockSource {
    /// Replaces the content of `block` by the next records, at most `max_records` if it cannot know
    /// itself where to stop; returns whether there were any.
    ///
    /// # Errors
    /// If they cannot be read.
    fn next(&mut self, block: &mut RecordBlock, max_records: usize) -> Result<bool>;
}

impl BlockSource for RecordStream {
    fn next(&mut self, block: &mut RecordBlock, max_records: usize) -> Result<bool> {
        self.read(block, max_records)
    }
}

/// Records in memory.
#[derive(Debug)]
pub struct InMemory<I>(pub I);

impl<'a, I: Iterator<Item = &'a [u8]>> BlockSource for InMemory<I> {
    fn next(&mut self, block: &mut RecordBlock, max_records: usize) -> Result<bool> {
        block.clear();
        while block.len() < max_records && block.byte_len() < BLOCK_BYTES {
            let Some(record) = self.0.next() else { break };
            block.push(record);
        }
        Ok(!block.is_empty())
    }
}

/// The records at positions of files that have an index.
#[derive(Debug)]
pub struct Indexed {
    files: Arc<Files>,
    /// The positions whose reads have not begun.
    positions: VecDeque<u64>,
    /// Where storage is slow, reads in flight.
    pending: VecDeque<Pending<Vec<MaybeUninit<u8>>>>,
    /// Records that have been read, and how many of them were copied.
    read: Option<(Records, usize)>,
    block_len: usize,
}

/// Where storage is slow, how many blocks are read at once at most, so that neighbours among their records are
/// one request, and how many times as many are read ahead.
const MAX_BLOCKS_TOGETHER: usize = 32;
const MAX_AHEAD: usize = 2;

impl Indexed {
    /// Records of `files`, at no position yet.
    pub fn new(files: &Arc<Files>) -> Self {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_precision_loss,
            clippy::cast_sign_loss,
            reason = "an estimate"
        )]
        let block_len = (BLOCK_BYTES as f64 / files.mean_byte_len().max(16.0)) as usize;
        Self {
            files: Arc::clone(files),
            positions: VecDeque::new(),
            pending: VecDeque::new(),
            read: None,
            block_len: block_len.max(1),
        }
    }

    /// About how many records are read at once.
    pub fn block_len(&self) -> usize {
        self.block_len
    }

    /// Adds the records at `positions`, in that order. Where storage is slow, their reads begin.
    ///
    /// # Errors
    /// If a position is out of range, or a file or its index cannot be read.
    pub fn add(&mut self, positions: impl IntoIterator<Item = u64>) -> Result<()> {
        self.positions.extend(positions);
        self.start()
    }

    fn start(&mut self) -> Result<()> {
        while self.files.is_slow() && self.pending.len() < MAX_AHEAD && !self.positions.is_empty() {
            let positions = self.next_positions(MAX_BLOCKS_TOGETHER * self.block_len);
            let sorted = self.files.sort(&positions)?;
            let queue = ReadQueue::of_program();
            self.pending.push_back(match self.files.plan_if_indexed(&sorted)? {
                Ok(plan) => super::start(plan, Vec::new(), queue),
                Err(unready) => super::start_unready(&self.files, sorted, unready, queue),
            });
        }
        Ok(())
    }

    fn next_positions(&mut self, max_records: usize) -> Vec<u64> {
        let count = max_records.min(self.positions.len());
        self.positions.drain(..count).collect()
    }

    /// The next records, of which those before a number have been copied.
    fn next_read(&mut self, max_records: usize) -> Result<Option<(Records, usize)>> {
        if self.read.is_some() {
            return Ok(self.read.take());
        }
        self.start()?;
        if let Some(pending) = self.pending.pop_front() {
            return Ok(Some((pending.finish()?, 0)));
        }
        let now = self.next_positions(max_records.min(self.block_len));
        if now.is_empty() {
            return Ok(None);
        }
        let none: Vec<Option<Vec<MaybeUninit<u8>>>> = Vec::new();
        let plan = open::plan(&self.files, &now)?;
        Ok(Some((super::read(plan, none, ReadQueue::of_program())?, 0)))
    }
}

impl BlockSource for Indexed {
    fn next(&mut self, block: &mut RecordBlock, max_records: usize) -> Result<bool> {
        block.clear();
        let Some((records, num_copied)) = self.next_read(max_records)? else { return Ok(false) };
        for record in records.iter().skip(num_copied).take(max_records.min(self.block_len)) {
            block.push(record);
        }
        let num_copied = num_copied + block.len();
        self.read = (num_copied < records.len()).then_some((records, num_copied));
        Ok(true)
    }
}

/// An output, and the records that do not yet fill a block of it.
#[derive(Debug)]
pub struct CopyTarget {
    output: Box<dyn Output>,
    encoders: Vec<Box<dyn Encoder>>,
    rest: RecordBlock,
    num_records: u64,
    spare: Vec<(RecordBlock, Encoded)>,
}

impl CopyTarget {
    /// Copies to `output`.
    pub fn new(output: Box<dyn Output>) -> Self {
        Self {
            output,
            encoders: Vec::new(),
            rest: RecordBlock::default(),
            num_records: 0,
            spare: Vec::new(),
        }
    }

    /// Appends up to `max_records` records of `source`, encoded by `num_threads` threads besides the
    /// calling one, or by that one if it is 1. Returns how many there were.
    ///
    /// # Errors
    /// If they cannot be read, encoded or written; the output is then incomplete.
    pub fn copy(
        &mut self,
        source: &mut dyn BlockSource,
        max_records: u64,
        num_threads: usize,
    ) -> Result<u64> {
        let num_threads = num_threads.max(1);
        while self.encoders.len() < num_threads {
            self.encoders.push(self.output.encoder()?);
        }
        let before = self.num_records;
        let mut blocks = Blocks {
            source,
            left: max_records,
            group_size: self.output.group_size(),
            rest: std::mem::take(&mut self.rest),
            num_read: self.num_records,
        };
        if num_threads == 1 {
            let encoder = &mut self.encoders[0];
            let (mut block, mut bytes) = self.spare.pop().unwrap_or_default();
            while blocks.next(&mut block)? {
                encoder.encode(&block, &mut bytes)?;
                self.output.append(&bytes)?;
            }
            self.spare.push((block, bytes));
        } else {
            let encoders = &mut self.encoders[..num_threads];
            copy_threaded(&mut blocks, encoders, &mut *self.output, &mut self.spare)?;
        }
        self.num_records = blocks.num_read;
        self.rest = blocks.rest;
        Ok(self.num_records - before)
    }

    /// Writes the remaining records and closes the output.
    ///
    /// # Errors
    /// If that fails.
    pub fn close(mut self) -> Result<()> {
        if !self.rest.is_empty() {
            let mut encoder = match self.encoders.pop() {
                Some(encoder) => encoder,
                None => self.output.encoder()?,
            };
            let mut bytes = Encoded::default();
            encoder.encode(&self.rest, &mut bytes)?;
            self.output.append(&bytes)?;
        }
        self.output.close()
    }
}

/// Blocks whose number of records is a multiple of the output's group size.
struct Blocks<'a> {
    source: &'a mut dyn BlockSource,
    left: u64,
    group_size: usize,
    /// The records of the last group, which is not complete.
    rest: RecordBlock,
    num_read: u64,
}

impl Blocks<'_> {
    fn next(&mut self, block: &mut RecordBlock) -> Result<bool> {
        if self.group_size == 1 {
            return self.read(block);
        }
        loop {
            let is_end = !self.read(block)?;
            if !is_end {
                for record in block.iter() {
                    self.rest.push(record);
                }
            }
            let is_long = is_end || self.rest.byte_len() >= BLOCK_BYTES;
            if is_long && self.rest.len() >= self.group_size {
                let whole = self.rest.len() - self.rest.len() % self.group_size;
                std::mem::swap(block, &mut self.rest);
                self.rest.clear();
                block.move_from(whole, &mut self.rest);
                return Ok(true);
            }
            if is_end {
                return Ok(false);
            }
        }
    }

    fn read(&mut self, block: &mut RecordBlock) -> Result<bool> {
        let max_records = usize::try_from(self.left).unwrap_or(usize::MAX);
        if max_records == 0 || !self.source.next(block, max_records)? {
            return Ok(false);
        }
        block.set_first(self.num_read);
        self.left = self.left.saturating_sub(block.len() as u64);
        self.num_read += block.len() as u64;
        Ok(true)
    }
}

type Work = (RecordBlock, Encoded, SyncSender<Done>);
type Done = Result<(RecordBlock, Encoded)>;

fn copy_threaded(
    blocks: &mut Blocks<'_>,
    encoders: &mut [Box<dyn Encoder>],
    output: &mut dyn Output,
    spare: &mut Vec<(RecordBlock, Encoded)>,
) -> Result<()> {
    let max_in_flight = 2 * encoders.len();
    let (submit, work) = sync_channel::<Work>(max_in_flight);
    let work = Mutex::new(work);
    thread::scope(|scope| {
        for encoder in encoders {
            let work = &work;
            thread::Builder::new()
                .name("grainmill-encode".to_owned())
                .spawn_scoped(scope, move || run(&mut **encoder, work))
                .map_err(|error| Error::Panicked(format!("cannot start a thread: {error}")))?;
        }
        let submit = submit; // dropped at the end of the scope, which ends the threads
        let mut in_flight: VecDeque<Receiver<Done>> = VecDeque::new();
        let mut finish_one = |in_flight: &mut VecDeque<Receiver<Done>>| {
            let Some(next) = in_flight.pop_front() else { return Ok(None) };
            let done = next.recv().map_err(|_| ended())??;
            output.append(&done.1)?;
            Ok(Some(done))
        };
        loop {
            let mut free = spare.pop();
            if in_flight.len() >= max_in_flight {
                free = finish_one(&mut in_flight)?.or(free);
            }
            let (mut block, encoded) = free.unwrap_or_default();
            if !blocks.next(&mut block)? {
                spare.push((block, encoded));
                break;
            }
            let (send, receive) = sync_channel(1);
            submit.send((block, encoded, send)).map_err(|_| ended())?;
            in_flight.push_back(receive);
        }
        while let Some(done) = finish_one(&mut in_flight)? {
            spare.push(done);
        }
        Ok(())
    })
}

/// Encodes blocks until there are no more.
fn run(encoder: &mut dyn Encoder, work: &Mutex<Receiver<Work>>) {
    loop {
        let next = lock(work).recv();
        let Ok((block, mut bytes, done)) = next else { return };
        let result = catch_unwind(AssertUnwindSafe(|| encoder.encode(&block, &mut bytes)));
        let result = result.unwrap_or_else(|_| Err(ended())).map(|()| (block, bytes));
        if done.send(result).is_err() {
            return; // the copy has failed
        }
    }
}

fn ended() -> Error {
    Error::Panicked("a thread that encodes records has ended".to_owned())
}
