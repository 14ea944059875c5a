//! Reads the units of a plan: fetches ranges, decodes chunks, and puts records where they go.
//!
//! What a changer must not break: records come back in the order asked for, whatever the order in
//! which they were read.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::array_record::ranges::{WHOLE_READ_LEN, room};
use super::buffer_pool;
use super::plan::{Plan, PlannedFile, Request, Unit};
use super::record_file::{Pick, RecordFile, Unchecked};
use super::riegeli::hash::MAX_TOGETHER;
use super::riegeli::{ChunkRecords, Decoder};
use super::storage::Reader;
use crate::Result;
use crate::bytes;
use crate::write_prefetcher::WritePrefetcher;

/// Memory above this is given back after use.
const KEPT_LEN: usize = 8 << 20;

/// What came of a unit.
#[derive(Debug)]
pub struct Outcome<S> {
    /// The records that were read.
    pub records: UnitRecords,
    /// What is better read at the same time, since storage turned out to be far.
    pub rest: Option<Unit<S>>,
}

impl Plan {
    /// Reads the records of `unit`, each into its slot if that has the right length: all of the
    /// slot is written then. If storage turns out to be far meanwhile and it `may_stop`, some may
    /// be left over.
    ///
    /// # Errors
    /// If a file cannot be read or is damaged; what slots then hold is unspecified, and may not be
    /// initialised.
    ///
    /// # Panics
    /// If `unit` is of another plan.
    pub fn read<S: AsMut<[MaybeUninit<u8>]>>(
        &self,
        unit: Unit<S>,
        scratch: &mut Scratch,
        may_stop: bool,
    ) -> Result<Outcome<S>> {
        let Unit { requests, mut slots } = unit;
        let picks = self.picks_of(&requests);
        let may_stop = may_stop && !self.latency.is_far();
        let mut sink = Sink {
            slots: &mut slots,
            unused: None,
            records: UnitRecords {
                first_pick: picks.start,
                bytes: buffer_pool::take(),
                places: Vec::with_capacity(picks.len()),
            },
            waiting: Vec::new(),
        };
        let mut prefetcher = WritePrefetcher::take();
        let mut holding = None;
        let mut left = None;
        for number in requests.clone() {
            let request = &self.requests[number];
            let picks = &self.picks[request.picks.clone()];
            let planned = &self.files[picks[0].file as usize];
            let holding = match &holding {
                Some((file, holding)) if *file == picks[0].file => holding,
                _ => &holding.insert((picks[0].file, planned.holding(&self.latency)?)).1,
            };
            let reader = holding.reader(&self.latency);
            if read_straight(&*planned.file, reader, request, picks, &mut sink)? {
                if sink.waiting.len() == MAX_TOGETHER {
                    self.check(scratch, &mut sink, &mut prefetcher)?;
                }
            } else if planned.file.has_groups() {
                self.read_groups(planned, reader, picks, scratch, &mut sink)?;
            } else {
                let extent = request.extent.clone();
                read_run(&*planned.file, reader, extent, picks, scratch, |picks, chunk| {
                    sink.take(picks, chunk);
                })?;
            }
            if may_stop && number + 1 < requests.end && self.latency.is_far() {
                left = Some(number + 1..requests.end);
                break;
            }
        }
        self.check(scratch, &mut sink, &mut prefetcher)?;
        scratch.trim();
        let records = sink.records;
        let rest = left.map(|requests| {
            let slots = slots.split_off(records.places.len().min(slots.len()));
            Unit { requests, slots }
        });
        Ok(Outcome { records, rest })
    }

    /// Compares the checksums that wait for it, and reads again what they say is damaged.
    fn check<S: AsMut<[MaybeUninit<u8>]>>(
        &self,
        scratch: &mut Scratch,
        sink: &mut Sink<'_, S>,
        prefetcher: &mut WritePrefetcher,
    ) -> Result<()> {
        if sink.waiting.is_empty() {
            return Ok(());
        }
        let (picks, unchecked): (Vec<_>, Vec<_>) = sink.waiting.drain(..).unzip();
        for ((at, pick), damaged) in picks.iter().zip(Unchecked::damaged(unchecked, prefetcher)) {
            if let Some(slot) = damaged {
                self.reread(*at, pick, slot, scratch, sink)?;
            }
        }
        Ok(())
    }

    /// Reads a record once more, the ordinary way, which says what is wrong with it.
    fn reread<S: AsMut<[MaybeUninit<u8>]>>(
        &self,
        at: usize,
        pick: &Pick,
        slot: &mut [u8],
        scratch: &mut Scratch,
        sink: &mut Sink<'_, S>,
    ) -> Result<()> {
        let planned = &self.files[pick.file as usize];
        let holding = planned.holding(&self.latency)?;
        let reader = holding.reader(&self.latency);
        let decoded =
            planned.file.read_chunk(reader, pick, &mut scratch.raw, &mut scratch.decoder)?;
        let record = record_of(pick, &decoded);
        if slot.len() == record.len() {
            slot.copy_from_slice(record);
        } else {
            sink.records.places[at] = sink.records.append(record);
        }
        Ok(())
    }

    /// Puts the records of all units together.
    ///
    /// # Panics
    /// If these are not all units of this plan.
    pub fn gather(&self, units: Vec<UnitRecords>) -> Records {
        let mut places = vec![(0, RecordPlace::InSlot); self.picks.len()];
        let mut num_found = 0;
        for (number, unit) in units.iter().enumerate() {
            for (pick, &place) in self.picks[unit.first_pick..].iter().zip(&unit.places) {
                places[pick.out as usize] = (number, place);
            }
            num_found += unit.places.len();
        }
        assert_eq!(num_found, self.picks.len(), "units of another plan");
        Records { units, places }
    }
}

/// Reads the only record of `request` straight into its slot, if it has one of the right length;
/// says whether it did.
fn read_straight<S: AsMut<[MaybeUninit<u8>]>>(
    file: &dyn RecordFile,
    reader: Reader<'_>,
    request: &Request,
    picks: &[Pick],
    sink: &mut Sink<'_, S>,
) -> Result<bool> {
    if !request.is_straight {
        return Ok(false);
    }
    let pick = &picks[0];
    let Some(slot) = sink.slot_of(pick.predicted_len as usize) else { return Ok(false) };
    match file.read_straight(reader, pick, slot)? {
        Ok(unchecked) => {
            sink.waiting.push(((sink.records.places.len(), *pick), unchecked));
            sink.records.places.push(RecordPlace::InSlot);
            Ok(true)
        }
        Err(slot) => {
            sink.unused = Some(slot);
            Ok(false)
        }
    }
}

/// Reads the chunks of `request` at once.
fn read_run(
    file: &dyn RecordFile,
    reader: Reader<'_>,
    extent: Range<u64>,
    picks: &[Pick],
    scratch: &mut Scratch,
    mut take: impl FnMut(&[Pick], &ChunkRecords<'_>),
) -> Result<()> {
    let len = extent.end - extent.start;
    if len > WHOLE_READ_LEN {
        let decoded = file.read_chunk(reader, &picks[0], &mut scratch.raw, &mut scratch.decoder)?;
        take(picks, &decoded);
        return Ok(());
    }
    let raw = room(&mut scratch.raw, len).map_err(|problem| file.damaged(&picks[0], &problem))?;
    reader.read_at(raw, extent.start)?;
    for same_chunk in picks.chunk_by(Pick::is_beside) {
        let pick = &same_chunk[0];
        let at = usize::try_from(pick.begin - extent.start).unwrap_or(usize::MAX);
        let len = usize::try_from(pick.end - pick.begin).unwrap_or(usize::MAX);
        let decoded = file.decode(pick, &mut raw[at..at + len], &mut scratch.decoder)?;
        take(same_chunk, &decoded);
    }
    Ok(())
}

impl Plan {
    /// Reads the chunks of a request, except those that are kept from before; keeps those of which
    /// other records may be wanted.
    fn read_groups<S: AsMut<[MaybeUninit<u8>]>>(
        &self,
        planned: &PlannedFile,
        reader: Reader<'_>,
        picks: &[Pick],
        scratch: &mut Scratch,
        sink: &mut Sink<'_, S>,
    ) -> Result<()> {
        let key = |picks: &[Pick]| (planned.number, picks[0].begin);
        let chunks: Vec<&[Pick]> = picks.chunk_by(Pick::is_beside).collect();
        let find = || self.cache.find(chunks.iter().map(|picks| (key(picks), picks.len())));
        let mut kept = find();
        let mut alone = None;
        if let ([chunk], [None]) = (&chunks[..], &kept[..])
            && self.latency.is_far()
        {
            // Another block may be fetching it, and reading it twice takes no less time.
            alone = self.cache.alone(key(chunk), chunk[0].end - chunk[0].begin);
            if alone.is_some() {
                kept = find();
            }
        }
        let mut at = 0;
        while at < chunks.len() {
            if let Some(chunk) = &kept[at] {
                sink.take(chunks[at], &chunk.records());
                at += 1;
                continue;
            }
            // From here to the last that is missing; what is kept in between is read along.
            let end = kept.iter().rposition(Option::is_none).map_or(at, |last| last + 1);
            let from = picks.partition_point(|pick| pick.begin < chunks[at][0].begin);
            let to = from + chunks[at..end].iter().map(|picks| picks.len()).sum::<usize>();
            let extent = picks[from].begin..picks[to - 1].end;
            read_run(&*planned.file, reader, extent, &picks[from..to], scratch, |picks, chunk| {
                sink.take(picks, chunk);
                self.cache.offer(key(picks), chunk, picks.len(), self.latency.is_far());
            })?;
            at = end;
        }
        drop(alone);
        Ok(())
    }
}

/// Where the records of a unit go, one pick after the other.
struct Sink<'a, S> {
    /// The slots of the next picks; none where none were given.
    slots: &'a mut [Option<S>],
    /// The slot of the next pick, if it was taken from there already.
    unused: Option<&'a mut [MaybeUninit<u8>]>,
    records: UnitRecords,
    /// Picks whose records are in their slots, until their checksums are compared.
    waiting: Vec<((usize, Pick), Unchecked<'a>)>,
}

impl<'a, S: AsMut<[MaybeUninit<u8>]>> Sink<'a, S> {
    /// Takes the slot of the next pick.
    fn slot(&mut self) -> Option<&'a mut [MaybeUninit<u8>]> {
        if self.unused.is_some() {
            return self.unused.take();
        }
        let slots = std::mem::take(&mut self.slots);
        let (slot, rest) = slots.split_first_mut()?;
        self.slots = rest;
        slot.as_mut().map(AsMut::as_mut)
    }

    /// Takes the slot of the next pick, if that is `len` bytes long.
    fn slot_of(&mut self, len: usize) -> Option<&'a mut [MaybeUninit<u8>]> {
        let next = self.slots.first_mut()?.as_mut()?;
        if next.as_mut().len() == len { self.slot() } else { None }
    }

    /// Takes the next picks, which are all of one chunk.
    fn take(&mut self, picks: &[Pick], decoded: &ChunkRecords<'_>) {
        for pick in picks {
            let record = record_of(pick, decoded);
            let place = match self.slot() {
                Some(slot) if slot.len() == record.len() => {
                    bytes::filled(slot, record);
                    RecordPlace::InSlot
                }
                _ => self.records.append(record),
            };
            self.records.places.push(place);
        }
    }
}

fn record_of<'a>(pick: &Pick, decoded: &ChunkRecords<'a>) -> &'a [u8] {
    let record = usize::try_from(pick.within).ok().and_then(|within| decoded.get(within));
    record.expect("a chunk has as many records as its index says")
}

/// Where a record is.
#[derive(Debug, Clone, Copy)]
enum RecordPlace {
    /// In the slot that was given for it, all of which has been written.
    InSlot,
    /// From here to there in the bytes of its unit.
    At(usize, usize),
}

/// The records of one unit of a plan, in the order in which they were read.
#[derive(Debug)]
pub struct UnitRecords {
    first_pick: usize,
    bytes: Vec<u8>,
    places: Vec<RecordPlace>,
}

impl UnitRecords {
    /// Keeps a copy of `record` here.
    fn append(&mut self, record: &[u8]) -> RecordPlace {
        let begin = self.bytes.len();
        self.bytes.extend_from_slice(record);
        RecordPlace::At(begin, self.bytes.len())
    }
}

impl Drop for UnitRecords {
    fn drop(&mut self) {
        buffer_pool::keep(std::mem::take(&mut self.bytes));
    }
}

/// Memory and decompressors for reading, kept from one unit to the next.
#[derive(Debug, Default)]
pub struct Scratch {
    raw: Vec<u8>,
    decoder: Decoder,
}

impl Scratch {
    fn trim(&mut self) {
        if self.raw.capacity() > KEPT_LEN {
            self.raw = Vec::new();
        }
        self.decoder.trim();
    }
}

/// Records in the order in which they were asked for.
#[derive(Debug)]
pub struct Records {
    units: Vec<UnitRecords>,
    /// Of each record: its unit, and where in that it is.
    places: Vec<(usize, RecordPlace)>,
}

impl Records {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Each record, or `None` if it is in the slot that was given for it.
    pub fn iter_unslotted(&self) -> impl ExactSizeIterator<Item = Option<&[u8]>> {
        self.places.iter().map(|&(unit, place)| match place {
            RecordPlace::InSlot => None,
            RecordPlace::At(begin, end) => Some(&self.units[unit].bytes[begin..end]),
        })
    }

    /// The records; those in slots appear empty.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        self.iter_unslotted().map(Option::unwrap_or_default)
    }
}
