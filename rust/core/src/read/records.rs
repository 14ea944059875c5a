//! Reads the spans of a plan: reads byte ranges, decodes chunks, copies records to their slots.
//!
//! What must not break: records are returned in the requested order, whatever the order in which
//! they were read.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::plan::{Plan, PlanSpan, PlannedFile, PlannedRead, extent_of};
use crate::formats::checksum::{MAX_LANES, UnverifiedRecord};
use crate::formats::chunk_records::ChunkRecords;
use crate::formats::decode_scratch::{DecodeScratch, MAX_RETAINED_LEN};
use crate::formats::raw_bytes::{WHOLE_READ_LEN, grow_to};
use crate::formats::record_file::{Pick, RecordFile};
use crate::io::buffer_pool;
use crate::io::storage::{LastOpened, ReadPart, Reader};
use crate::io::storage_latency::StorageLatency;
use crate::timeline::{self, Activity};
use crate::write_prefetcher::WritePrefetcher;
use crate::{Result, bytes};

/// Decoding a chunk of this length takes so long, milliseconds, that a thread rather waits for another
/// one that decodes it.
const LONG_CHUNK_LEN: u64 = 1 << 20;

/// The result of reading a span.
#[derive(Debug)]
pub struct Outcome<S> {
    /// The records that were read.
    pub records: SpanRecords,
    /// What is better read concurrently, since storage turned out to be slow.
    pub rest: Option<PlanSpan<S>>,
}

impl Plan {
    /// Reads the records of `span`, each into its slot if that has the right length; all of the slot
    /// is then written. With `may_stop`, may leave some over if storage turns out to be slow.
    ///
    /// # Errors
    /// If a file cannot be read or is damaged; the content of slots is then unspecified and may be
    /// uninitialised.
    ///
    /// # Panics
    /// If `span` is of another plan.
    pub fn read<S: AsMut<[MaybeUninit<u8>]>>(
        &self,
        span: PlanSpan<S>,
        scratch: &mut Scratch,
        may_stop: bool,
    ) -> Result<Outcome<S>> {
        self.read_from(span, None, scratch, may_stop)
    }

    /// Takes the records of `span`, which is one read, out of its bytes from position `begin` on.
    pub(crate) fn read_part<S: AsMut<[MaybeUninit<u8>]>>(
        &self,
        span: PlanSpan<S>,
        begin: u64,
        pieces: &[&[u8]],
        scratch: &mut Scratch,
    ) -> Result<SpanRecords> {
        let pick = &self.picks[self.first_pick(&span)];
        let path = self.files[pick.file as usize].file.stored().path();
        let (part, not_measured) = (ReadPart { path, begin, pieces }, StorageLatency::default());
        let reader = Reader::new(&part, &not_measured);
        Ok(self.read_from(span, Some(reader), scratch, false)?.records)
    }

    /// Reads from the files, or by `reader` if there is one.
    fn read_from<S: AsMut<[MaybeUninit<u8>]>>(
        &self,
        span: PlanSpan<S>,
        only_reader: Option<Reader<'_>>,
        scratch: &mut Scratch,
        may_stop: bool,
    ) -> Result<Outcome<S>> {
        let PlanSpan { reads, mut slots } = span;
        let picks = self.picks_of(&reads);
        let mut sink = Sink {
            slots: &mut slots,
            unused_slot: None,
            records: SpanRecords {
                first_pick: picks.start,
                bytes: buffer_pool::take(),
                locations: Vec::with_capacity(picks.len()),
            },
            unverified: Vec::new(),
        };
        let mut prefetcher = WritePrefetcher::take();
        let read =
            self.read_planned(reads, only_reader, scratch, may_stop, &mut sink, &mut prefetcher);
        // Also after an error: records before it may turn out to be damaged only now.
        self.verify(only_reader, scratch, &mut sink, &mut prefetcher)?;
        scratch.trim();
        let remaining = read?;
        let records = sink.records;
        let rest = (!remaining.is_empty()).then(|| {
            let slots = slots.split_off(records.locations.len().min(slots.len()));
            PlanSpan { reads: remaining, slots }
        });
        Ok(Outcome { records, rest })
    }

    /// Reads `reads`; returns those left over.
    fn read_planned<S: AsMut<[MaybeUninit<u8>]>>(
        &self,
        reads: Range<usize>,
        only_reader: Option<Reader<'_>>,
        scratch: &mut Scratch,
        may_stop: bool,
        sink: &mut Sink<'_, S>,
        prefetcher: &mut WritePrefetcher,
    ) -> Result<Range<usize>> {
        let mut opened = LastOpened::default();
        for number in reads.clone() {
            let read = &self.reads[number];
            let picks = &self.picks[read.picks.clone()];
            let planned = &self.files[picks[0].file as usize];
            let reader = match only_reader {
                Some(reader) => reader,
                None => opened.get(picks[0].file, || planned.handle())?.reader(&planned.latency),
            };
            if read_direct(&*planned.file, reader, read, picks, sink)? {
                if sink.unverified.len() == MAX_LANES {
                    self.verify(only_reader, scratch, sink, prefetcher)?;
                }
            } else if planned.file.has_groups() {
                self.read_groups(planned, reader, picks, scratch, sink)?;
            } else {
                let extent = read.extent.clone();
                read_extent(&*planned.file, reader, extent, picks, scratch, |picks, chunk| {
                    sink.copy_records(picks, chunk);
                })?;
            }
            if may_stop && number + 1 < reads.end && planned.latency.is_slow() {
                return Ok(number + 1..reads.end);
            }
        }
        Ok(reads.end..reads.end)
    }

    /// Verifies the checksums of direct reads and reads damaged records again.
    fn verify<S: AsMut<[MaybeUninit<u8>]>>(
        &self,
        only_reader: Option<Reader<'_>>,
        scratch: &mut Scratch,
        sink: &mut Sink<'_, S>,
        prefetcher: &mut WritePrefetcher,
    ) -> Result<()> {
        if sink.unverified.is_empty() {
            return Ok(());
        }
        let (picks, unverified): (Vec<_>, Vec<_>) = sink.unverified.drain(..).unzip();
        for ((at, pick), damaged) in
            picks.iter().zip(UnverifiedRecord::damaged(unverified, prefetcher))
        {
            if let Some(slot) = damaged {
                self.reread(only_reader, *at, pick, slot, scratch, sink)?;
            }
        }
        Ok(())
    }

    /// Reads a record again with its whole chunk, which reports what is wrong.
    fn reread<S: AsMut<[MaybeUninit<u8>]>>(
        &self,
        only_reader: Option<Reader<'_>>,
        at: usize,
        pick: &Pick,
        slot: &mut [u8],
        scratch: &mut Scratch,
        sink: &mut Sink<'_, S>,
    ) -> Result<()> {
        let planned = &self.files[pick.file as usize];
        let handle;
        let reader = if let Some(reader) = only_reader {
            reader
        } else {
            handle = planned.handle()?;
            handle.reader(&planned.latency)
        };
        let decoded =
            planned.file.read_chunk(reader, pick, &mut scratch.raw, &mut scratch.decoded)?;
        let record = record_of(pick, &decoded);
        if slot.len() == record.len() {
            slot.copy_from_slice(record);
        } else {
            sink.records.locations[at] = sink.records.append(record);
        }
        Ok(())
    }

    /// Combines the records of all spans.
    ///
    /// # Panics
    /// If these are not all spans of this plan.
    pub fn gather(&self, spans: Vec<SpanRecords>) -> Records {
        let mut locations = vec![(0, RecordLocation::InSlot); self.picks.len()];
        let mut num_found = 0;
        for (number, span) in spans.iter().enumerate() {
            for (pick, &location) in self.picks[span.first_pick..].iter().zip(&span.locations) {
                locations[pick.out as usize] = (number, location);
            }
            num_found += span.locations.len();
        }
        assert_eq!(num_found, self.picks.len(), "spans of another plan");
        Records { spans, locations }
    }
}

/// Reads the only record of `read` directly into its slot, if it has one of the right length;
/// returns whether it did.
fn read_direct<S: AsMut<[MaybeUninit<u8>]>>(
    file: &dyn RecordFile,
    reader: Reader<'_>,
    read: &PlannedRead,
    picks: &[Pick],
    sink: &mut Sink<'_, S>,
) -> Result<bool> {
    if !read.is_direct {
        return Ok(false);
    }
    let pick = &picks[0];
    let Some(slot) = sink.slot_of_len(pick.predicted_len as usize) else { return Ok(false) };
    match file.read_direct(reader, pick, slot)? {
        Ok(unverified) => {
            sink.unverified.push(((sink.records.locations.len(), *pick), unverified));
            sink.records.locations.push(RecordLocation::InSlot);
            Ok(true)
        }
        Err(slot) => {
            sink.unused_slot = Some(slot);
            Ok(false)
        }
    }
}

/// Reads the chunks in `extent` with one read.
fn read_extent(
    file: &dyn RecordFile,
    reader: Reader<'_>,
    extent: Range<u64>,
    picks: &[Pick],
    scratch: &mut Scratch,
    mut take: impl FnMut(&[Pick], &ChunkRecords<'_>),
) -> Result<()> {
    let len = extent.end - extent.start;
    if len > WHOLE_READ_LEN {
        for same_chunk in picks.chunk_by(Pick::is_same_chunk) {
            let (pick, raw, decoded) = (&same_chunk[0], &mut scratch.raw, &mut scratch.decoded);
            let began = timeline::begin();
            let chunk = file.read_chunk(reader, pick, raw, decoded)?;
            timeline::add(began, Activity::Decode, file.stored().path(), pick.extent());
            take(same_chunk, &chunk);
        }
        return Ok(());
    }
    let raw =
        grow_to(&mut scratch.raw, len).map_err(|problem| file.damaged(&picks[0], &problem))?;
    reader.read_at(raw, extent.start)?;
    for same_chunk in picks.chunk_by(Pick::is_same_chunk) {
        let pick = &same_chunk[0];
        let at = usize::try_from(pick.begin - extent.start).unwrap_or(usize::MAX);
        let len = usize::try_from(pick.end - pick.begin).unwrap_or(usize::MAX);
        let began = timeline::begin();
        let decoded = file.decode(pick, &mut raw[at..at + len], &mut scratch.decoded)?;
        timeline::add(began, Activity::Decode, file.stored().path(), pick.extent());
        take(same_chunk, &decoded);
    }
    Ok(())
}

impl Plan {
    /// Reads the chunks of a read except cached ones, and caches those that have other records.
    fn read_groups<S: AsMut<[MaybeUninit<u8>]>>(
        &self,
        planned: &PlannedFile,
        reader: Reader<'_>,
        picks: &[Pick],
        scratch: &mut Scratch,
        sink: &mut Sink<'_, S>,
    ) -> Result<()> {
        let key = |picks: &[Pick]| (planned.number, picks[0].begin);
        let chunks: Vec<&[Pick]> = picks.chunk_by(Pick::is_same_chunk).collect();
        let find = || self.cache.find(chunks.iter().map(|picks| (key(picks), picks.len())));
        let mut cached = find();
        let mut guard = None;
        if let ([chunk], [None]) = (&chunks[..], &cached[..]) {
            let len = chunk[0].end - chunk[0].begin;
            if planned.latency.is_slow() || len >= LONG_CHUNK_LEN {
                // Another thread may be reading this chunk: wait for it instead of reading it twice.
                guard = self.cache.enter(key(chunk), len)?;
                if guard.is_some() {
                    cached = find();
                }
            }
        }
        let (mut at, mut rest) = (0, picks);
        while at < chunks.len() {
            if let Some(chunk) = &cached[at] {
                sink.copy_records(chunks[at], &chunk.records());
                rest = &rest[chunks[at].len()..];
                at += 1;
                continue;
            }
            // Read from here to the last missing chunk, cached ones in between included.
            let end = cached.iter().rposition(Option::is_none).map_or(at, |last| last + 1);
            let count = chunks[at..end].iter().map(|picks| picks.len()).sum();
            let (missing, after) = rest.split_at(count);
            let extent = extent_of(missing);
            read_extent(&*planned.file, reader, extent, missing, scratch, |picks, chunk| {
                sink.copy_records(picks, chunk);
                self.cache.offer(key(picks), chunk, picks.len(), planned.latency.is_slow());
            })?;
            (at, rest) = (end, after);
        }
        drop(guard);
        Ok(())
    }
}

/// The destination of a span's records, in the order of its picks.
struct Sink<'a, S> {
    /// The slots of the next picks, if there are any.
    slots: &'a mut [Option<S>],
    /// The slot of the next pick, if already taken from `slots`.
    unused_slot: Option<&'a mut [MaybeUninit<u8>]>,
    records: SpanRecords,
    /// Picks whose records are in their slots but not verified yet.
    unverified: Vec<((usize, Pick), UnverifiedRecord<'a>)>,
}

impl<'a, S: AsMut<[MaybeUninit<u8>]>> Sink<'a, S> {
    /// Takes the slot of the next pick.
    fn slot(&mut self) -> Option<&'a mut [MaybeUninit<u8>]> {
        if self.unused_slot.is_some() {
            return self.unused_slot.take();
        }
        let slots = std::mem::take(&mut self.slots);
        let (slot, rest) = slots.split_first_mut()?;
        self.slots = rest;
        slot.as_mut().map(AsMut::as_mut)
    }

    /// Takes the slot of the next pick, if it is `len` bytes long.
    fn slot_of_len(&mut self, len: usize) -> Option<&'a mut [MaybeUninit<u8>]> {
        let next = self.slots.first_mut()?.as_mut()?;
        if next.as_mut().len() == len { self.slot() } else { None }
    }

    /// Copies the records of the next picks, which are all in one chunk.
    fn copy_records(&mut self, picks: &[Pick], decoded: &ChunkRecords<'_>) {
        for pick in picks {
            let record = record_of(pick, decoded);
            let location = match self.slot() {
                Some(slot) if slot.len() == record.len() => {
                    bytes::filled(slot, record);
                    RecordLocation::InSlot
                }
                _ => self.records.append(record),
            };
            self.records.locations.push(location);
        }
    }
}

fn record_of<'a>(pick: &Pick, decoded: &ChunkRecords<'a>) -> &'a [u8] {
    let record = usize::try_from(pick.within).ok().and_then(|within| decoded.get(within));
    record.expect("a chunk has as many records as its index says")
}

/// Where a record was stored in memory.
#[derive(Debug, Clone, Copy)]
enum RecordLocation {
    /// In its slot.
    InSlot,
    /// In this range of its span's bytes.
    At(usize, usize),
}

/// The records of one span of a plan, in the order in which they were read.
#[derive(Debug)]
pub struct SpanRecords {
    first_pick: usize,
    bytes: Vec<u8>,
    locations: Vec<RecordLocation>,
}

impl SpanRecords {
    /// Appends a copy of `record`.
    fn append(&mut self, record: &[u8]) -> RecordLocation {
        let begin = self.bytes.len();
        self.bytes.extend_from_slice(record);
        RecordLocation::At(begin, self.bytes.len())
    }
}

impl Drop for SpanRecords {
    fn drop(&mut self) {
        buffer_pool::put(std::mem::take(&mut self.bytes));
    }
}

/// Buffers and decompressors that are reused for the next span.
#[derive(Debug, Default)]
pub struct Scratch {
    raw: Vec<u8>,
    decoded: DecodeScratch,
}

impl Scratch {
    fn trim(&mut self) {
        if self.raw.capacity() > MAX_RETAINED_LEN {
            self.raw = Vec::new();
        }
        self.decoded.trim();
    }
}

/// Records in the requested order.
#[derive(Debug)]
pub struct Records {
    spans: Vec<SpanRecords>,
    /// For each record: its span and its location there.
    locations: Vec<(usize, RecordLocation)>,
}

impl Records {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.locations.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.locations.is_empty()
    }

    /// Each record, or `None` if it is in its slot.
    pub fn iter_unslotted(&self) -> impl ExactSizeIterator<Item = Option<&[u8]>> {
        self.locations.iter().map(|&(span, location)| match location {
            RecordLocation::InSlot => None,
            RecordLocation::At(begin, end) => Some(&self.spans[span].bytes[begin..end]),
        })
    }

    /// The records; those in slots are empty here.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        self.iter_unslotted().map(Option::unwrap_or_default)
    }
}
