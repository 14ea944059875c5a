//! Many files of records as one index space, read by lists of positions.
//!
//! A list becomes a [`Plan`]: its positions sorted by file and chunk, so that each chunk is
//! decoded once and neighbours are read together, and cut into parts that can be read at the same
//! time. What a changer must not break: records come back in the order asked for, whatever the
//! order in which they were read.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::array_record::ArrayRecordFile;
use super::array_record::direct::{self, Unchecked};
use super::array_record::reader::{Lease, WHOLE_READ_LEN, room};
use super::riegeli::hash::MAX_TOGETHER;
use super::riegeli::{ChunkRecords, Decoder};
use super::spare;
use crate::warm::Warming;
use crate::{Error, Result};

/// Neighbouring chunks are read together up to this length, which a core's cache still holds.
const RUN_LEN: u64 = 128 << 10;
/// Unwanted bytes that are read along when that saves a system call.
const GAP_LEN: u64 = 1 << 10;
/// Parts of a plan hold about this many bytes; a smaller plan is not worth a second thread.
const PART_LEN: u64 = 1 << 20;
/// Records from this length on are read straight into their slots.
const DIRECT_LEN: usize = 4 << 10;
/// The most files that are opened at a time, and how many there are for each thread that does it.
const MAX_OPENERS: usize = 16;
const ITEMS_PER_OPENER: usize = 4;
/// Memory above this is given back after use.
const KEPT_LEN: usize = 8 << 20;

/// A file and which of its records are meant.
#[derive(Debug, Clone)]
pub struct Source {
    /// Where the file is.
    pub path: PathBuf,
    /// How many of its first records are left out.
    pub skip: u64,
    /// How many records follow; all, if `None`.
    pub take: Option<u64>,
}

impl From<PathBuf> for Source {
    fn from(path: PathBuf) -> Self {
        Self { path, skip: 0, take: None }
    }
}

/// Many files as one index space.
#[derive(Debug)]
pub struct Files {
    files: Vec<Part>,
    /// Where each file's records begin among all; one more at the end.
    starts: Vec<u64>,
}

/// The records of one file that are meant.
#[derive(Debug)]
struct Part {
    file: ArrayRecordFile,
    skip: u64,
}

impl Files {
    /// Opens files and reads their indices.
    ///
    /// # Errors
    /// If one cannot be opened, or has fewer records than are meant.
    pub fn open(sources: impl IntoIterator<Item = Source>) -> Result<Self> {
        let sources: Vec<Source> = sources.into_iter().collect();
        let files = side_by_side(&sources, |source| ArrayRecordFile::open(&source.path))?;
        let mut opened = Self { files: Vec::new(), starts: vec![0] };
        let mut total = 0_u64;
        for (Source { path, skip, take }, file) in sources.into_iter().zip(files) {
            let num_records = file.num_records();
            let left = num_records.checked_sub(skip);
            let len = match (left, take) {
                (Some(left), None) => left,
                (Some(left), Some(take)) if take <= left => take,
                _ => {
                    let end = take
                        .map_or_else(String::new, |take| format!("{}", skip.saturating_add(take)));
                    return Err(Error::OutOfRange(format!(
                        "{}: records [{skip}:{end}] were asked for, but the file has {num_records}",
                        path.display()
                    )));
                }
            };
            total = total
                .checked_add(len)
                .ok_or_else(|| Error::OutOfRange("more than 2^64 records".to_owned()))?;
            opened.files.push(Part { file, skip });
            opened.starts.push(total);
        }
        Ok(opened)
    }

    /// How many records there are.
    pub fn len(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many records of each file are meant.
    pub fn num_records(&self) -> impl Iterator<Item = u64> {
        self.starts.windows(2).map(|ends| ends[1] - ends[0])
    }

    /// The files, in order.
    pub fn files(&self) -> impl Iterator<Item = &ArrayRecordFile> {
        self.files.iter().map(|part| &part.file)
    }

    /// About how many bytes a record takes where it is stored.
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    pub fn mean_byte_len(&self) -> f64 {
        let stored: u64 = self.files().map(ArrayRecordFile::stored_len).sum();
        let records: u64 = self.files().map(ArrayRecordFile::num_records).sum();
        stored as f64 / records.max(1) as f64
    }

    /// The file of `position` and the record in it; `position` must be below [`Self::len`].
    fn place(&self, position: u64) -> (usize, u64) {
        let file = match self.files.len() {
            1 => 0,
            _ => self.starts.partition_point(|&start| start <= position) - 1,
        };
        (file, self.files[file].skip + (position - self.starts[file]))
    }

    /// Decides how the records at `positions` are read.
    ///
    /// # Errors
    /// If a position is not below [`Self::len`], or a file of which the first record is asked for
    /// does not tell where its chunks begin.
    pub fn plan(&self, positions: &[u64]) -> Result<Plan> {
        let mut picks = Vec::with_capacity(positions.len());
        for (out, &position) in positions.iter().enumerate() {
            if position >= self.len() {
                return Err(Error::OutOfRange(format!(
                    "record {position} was asked for, but there are {}",
                    self.len()
                )));
            }
            let (file, record) = self.place(position);
            let group_size = self.files[file].file.group_size();
            let (chunk, within) = if group_size == 1 {
                (record, 0)
            } else {
                (record / group_size, record % group_size)
            };
            picks.push(Pick { file, chunk, within, out });
        }
        let order = |pick: &Pick| (pick.file, pick.chunk);
        if !picks.is_sorted_by_key(order) {
            picks.sort_unstable_by_key(order);
        }
        Ok(Plan { parts: self.parts(&picks)?, picks })
    }

    /// Cuts picks between chunks into pieces of about [`PART_LEN`].
    fn parts(&self, picks: &[Pick]) -> Result<Vec<Range<usize>>> {
        let (mut parts, mut begin, mut len) = (Vec::new(), 0, 0);
        for (at, pick) in picks.iter().enumerate() {
            if at > 0 && picks[at - 1].is_beside(pick) {
                continue;
            }
            if len >= PART_LEN {
                parts.push(begin..at);
                (begin, len) = (at, 0);
            }
            let extent = self.files[pick.file].file.extent(pick.chunk)?;
            len += extent.end - extent.start;
        }
        if begin < picks.len() {
            parts.push(begin..picks.len());
        }
        Ok(parts)
    }

    /// Reads the records at `positions`, in that order.
    ///
    /// # Errors
    /// If a position is out of range, or a file cannot be read or is damaged.
    pub fn read(&self, positions: &[u64]) -> Result<Records> {
        let plan = self.plan(positions)?;
        let mut scratch = Scratch::default();
        let parts = (0..plan.num_parts())
            .map(|part| self.read_part::<Vec<u8>>(&plan, part, &mut [], &mut scratch))
            .collect::<Result<Vec<_>>>()?;
        Ok(plan.gather(parts))
    }

    /// How long each record of `plan` is, in the order asked for, where the index of its file
    /// tells. A hint: a damaged or unusual file may hold something else.
    pub fn predicted_lens(&self, plan: &Plan) -> Vec<Option<usize>> {
        let mut lens = vec![None; plan.picks.len()];
        for pick in &plan.picks {
            lens[pick.out] = self.files[pick.file].file.predicted_len(pick.chunk);
        }
        lens
    }

    /// Reads one part of `plan`, each record into its slot of [`Plan::split`] if that has the
    /// right length. `slots` may be empty.
    ///
    /// # Errors
    /// If a file cannot be read or is damaged; what slots then hold is unspecified.
    ///
    /// # Panics
    /// If `plan` is of other files or has no such part.
    pub fn read_part<S: AsMut<[u8]>>(
        &self,
        plan: &Plan,
        part: usize,
        slots: &mut [Option<S>],
        scratch: &mut Scratch,
    ) -> Result<PartRecords> {
        let picks = &plan.picks[plan.parts[part].clone()];
        let mut sink = Sink {
            slots,
            records: PartRecords { bytes: spare::take(), places: Vec::with_capacity(picks.len()) },
            waiting: Vec::new(),
        };
        let mut warming = Warming::take();
        for picks in picks.chunk_by(|a, b| a.file == b.file) {
            let file = &self.files[picks[0].file].file;
            let lease = file.lease()?;
            let mut rest = picks;
            while !rest.is_empty() {
                rest = if let Some(unchecked) = read_direct(file, &lease, rest, &mut sink)? {
                    let last = sink.records.places.len() - 1;
                    sink.waiting.push(((last, rest[0]), unchecked));
                    if sink.waiting.len() == MAX_TOGETHER {
                        self.check(scratch, &mut sink, &mut warming)?;
                    }
                    &rest[1..]
                } else {
                    read_run(file, &lease, rest, scratch, &mut sink)?
                };
            }
        }
        self.check(scratch, &mut sink, &mut warming)?;
        scratch.trim();
        Ok(sink.records)
    }

    /// Compares the checksums that wait for it, and reads again what they say is damaged.
    fn check<S: AsMut<[u8]>>(
        &self,
        scratch: &mut Scratch,
        sink: &mut Sink<'_, S>,
        warming: &mut Warming,
    ) -> Result<()> {
        let (picks, unchecked): (Vec<_>, Vec<_>) = sink.waiting.drain(..).unzip();
        let intact = Unchecked::are_intact(unchecked, &sink.in_slots(&picks), warming);
        for ((at, pick), intact) in picks.iter().zip(intact) {
            if !intact {
                self.reread(*at, pick, scratch, sink)?;
            }
        }
        Ok(())
    }

    /// Reads a record once more, the ordinary way, which says what is wrong with it.
    fn reread<S: AsMut<[u8]>>(
        &self,
        at: usize,
        pick: &Pick,
        scratch: &mut Scratch,
        sink: &mut Sink<'_, S>,
    ) -> Result<()> {
        let file = &self.files[pick.file].file;
        let lease = file.lease()?;
        let decoded =
            file.read_chunk(&lease, pick.chunk, &mut scratch.raw, &mut scratch.decoder)?;
        sink.put(at, pick, &decoded);
        Ok(())
    }
}

/// What `work` makes of each item, in order, or the error of the first item that it fails for.
///
/// For many items, threads do it at the same time: where storage is far away, a file takes next to
/// no work and all the more waiting.
fn side_by_side<A: Sync, B: Send + Sync>(
    items: &[A],
    work: impl Fn(&A) -> Result<B> + Sync,
) -> Result<Vec<B>> {
    let num_threads = MAX_OPENERS.min(items.len() / ITEMS_PER_OPENER);
    if num_threads <= 1 {
        return items.iter().map(work).collect();
    }
    let next = AtomicUsize::new(0);
    let made: Vec<OnceLock<Result<B>>> = items.iter().map(|_| OnceLock::new()).collect();
    let take_turns = || {
        while let at = next.fetch_add(1, Ordering::Relaxed)
            && at < items.len()
        {
            let result = work(&items[at]);
            if result.is_err() {
                next.store(items.len(), Ordering::Relaxed);
            }
            made[at].get_or_init(|| result);
        }
    };
    thread::scope(|scope| {
        for _ in 1..num_threads {
            // Where the system has no thread left, those there are do it all.
            let _ = thread::Builder::new().spawn_scoped(scope, take_turns);
        }
        take_turns();
    });
    // Items were begun in order, so nothing before the first error is missing.
    made.into_iter().filter_map(OnceLock::into_inner).collect()
}

/// Reads the first pick straight into its slot, if it has one and is long enough for that to pay.
fn read_direct<S: AsMut<[u8]>>(
    file: &ArrayRecordFile,
    lease: &Lease,
    picks: &[Pick],
    sink: &mut Sink<'_, S>,
) -> Result<Option<Unchecked>> {
    let Some(slot) = sink.slot() else { return Ok(None) };
    let out = slot.as_mut();
    if out.len() < DIRECT_LEN || file.predicted_len(picks[0].chunk) != Some(out.len()) {
        return Ok(None);
    }
    let read = direct::read(file, lease, &file.extent(picks[0].chunk)?, out)?;
    if read.is_some() {
        sink.records.places.push(Place::InSlot);
    }
    Ok(read)
}

/// Reads the first picks of a file that lie close together; returns the others.
fn read_run<'a, S: AsMut<[u8]>>(
    file: &ArrayRecordFile,
    lease: &Lease,
    picks: &'a [Pick],
    scratch: &mut Scratch,
    sink: &mut Sink<'_, S>,
) -> Result<&'a [Pick]> {
    let first = file.extent(picks[0].chunk)?;
    let longest = RUN_LEN.max(first.end - first.start);
    let (mut end, mut count) = (first.end, 1);
    for pick in &picks[1..] {
        let extent = file.extent(pick.chunk)?;
        if extent.end - first.start > longest || extent.start.saturating_sub(end) > GAP_LEN {
            break;
        }
        end = extent.end;
        count += 1;
    }
    let (run, rest) = picks.split_at(count);
    if end - first.start > WHOLE_READ_LEN {
        let decoded =
            file.read_chunk(lease, picks[0].chunk, &mut scratch.raw, &mut scratch.decoder)?;
        sink.take(run, &decoded);
        return Ok(rest);
    }
    let raw = room(&mut scratch.raw, end - first.start)
        .map_err(|problem| file.damaged(picks[0].chunk, &problem))?;
    file.read_at(lease, raw, first.start)?;
    for same_chunk in run.chunk_by(Pick::is_beside) {
        let chunk = same_chunk[0].chunk;
        let extent = file.extent(chunk)?;
        let at = usize::try_from(extent.start - first.start).unwrap_or(usize::MAX);
        let len = usize::try_from(extent.end - extent.start).unwrap_or(usize::MAX);
        let decoded = file.decode_chunk(chunk, &mut raw[at..at + len], &mut scratch.decoder)?;
        sink.take(same_chunk, &decoded);
    }
    Ok(rest)
}

/// Where the records of a part go, one pick after the other.
struct Sink<'a, S> {
    slots: &'a mut [Option<S>],
    records: PartRecords,
    /// Picks whose records are in their slots, until their checksums are compared.
    waiting: Vec<((usize, Pick), Unchecked)>,
}

impl<S: AsMut<[u8]>> Sink<'_, S> {
    /// The slot of the next pick.
    fn slot(&mut self) -> Option<&mut S> {
        self.slots.get_mut(self.records.places.len())?.as_mut()
    }

    /// What is in the slots of picks, which are in ascending order.
    fn in_slots(&mut self, picks: &[(usize, Pick)]) -> Vec<&[u8]> {
        let Some(&(first, _)) = picks.first() else { return Vec::new() };
        let mut slots = self.slots.iter_mut().enumerate().skip(first);
        let mut in_slot = |&(at, _): &(usize, Pick)| {
            slots
                .find(|&(slot, _)| slot == at)
                .and_then(|(_, slot)| slot.as_mut())
                .map(AsMut::as_mut)
        };
        picks.iter().map(|pick| in_slot(pick).map_or(&[][..], |bytes| bytes)).collect()
    }

    /// Takes the next picks, which are all of one chunk.
    fn take(&mut self, picks: &[Pick], decoded: &ChunkRecords<'_>) {
        for pick in picks {
            self.records.places.push(Place::InSlot);
            self.put(self.records.places.len() - 1, pick, decoded);
        }
    }

    /// Puts a record where pick number `at` goes: into its slot if it fits.
    fn put(&mut self, at: usize, pick: &Pick, decoded: &ChunkRecords<'_>) {
        let record = usize::try_from(pick.within).ok().and_then(|within| decoded.get(within));
        let record = record.expect("a chunk has as many records as its index says");
        self.records.places[at] = if let Some(Some(slot)) = self.slots.get_mut(at)
            && let out = slot.as_mut()
            && out.len() == record.len()
        {
            out.copy_from_slice(record);
            Place::InSlot
        } else {
            let begin = self.records.bytes.len();
            self.records.bytes.extend_from_slice(record);
            Place::At(begin, self.records.bytes.len())
        };
    }
}

/// One record that is asked for.
#[derive(Debug, Clone, Copy)]
struct Pick {
    file: usize,
    chunk: u64,
    /// Which record of the chunk.
    within: u64,
    /// Where in the list of positions it stands.
    out: usize,
}

impl Pick {
    fn is_beside(&self, other: &Self) -> bool {
        self.chunk == other.chunk && self.file == other.file
    }
}

/// How a list of positions is read: in parts, each on any thread.
#[derive(Debug)]
pub struct Plan {
    /// By file and chunk.
    picks: Vec<Pick>,
    parts: Vec<Range<usize>>,
}

impl Plan {
    /// How many parts there are.
    pub fn num_parts(&self) -> usize {
        self.parts.len()
    }

    /// Sorts slots, given in the order asked for, to the parts that fill them.
    ///
    /// # Panics
    /// If there are fewer slots than records.
    pub fn split<S>(&self, mut slots: Vec<Option<S>>) -> Vec<Vec<Option<S>>> {
        let of_part = |part: &Range<usize>| {
            self.picks[part.clone()].iter().map(|pick| slots[pick.out].take()).collect()
        };
        self.parts.iter().map(of_part).collect()
    }

    /// Puts parts together, in their order.
    ///
    /// # Panics
    /// If these are not all parts of this plan.
    pub fn gather(&self, parts: Vec<PartRecords>) -> Records {
        let mut places = vec![(0, Place::InSlot); self.picks.len()];
        assert_eq!(parts.len(), self.parts.len(), "parts of another plan");
        for (number, (part, range)) in parts.iter().zip(&self.parts).enumerate() {
            for (pick, &place) in self.picks[range.clone()].iter().zip(&part.places) {
                places[pick.out] = (number, place);
            }
        }
        Records { parts, places }
    }
}

/// Where a record is.
#[derive(Debug, Clone, Copy)]
enum Place {
    /// In the slot that was given for it.
    InSlot,
    /// From here to there in the bytes of its part.
    At(usize, usize),
}

/// The records of one part of a plan, in the order in which they were read.
#[derive(Debug)]
pub struct PartRecords {
    bytes: Vec<u8>,
    places: Vec<Place>,
}

impl Drop for PartRecords {
    fn drop(&mut self) {
        spare::keep(std::mem::take(&mut self.bytes));
    }
}

/// Memory and decompressors for reading, kept from one part to the next.
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
    parts: Vec<PartRecords>,
    /// Of each record: its part, and where in that it is.
    places: Vec<(usize, Place)>,
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
        self.places.iter().map(|&(part, place)| match place {
            Place::InSlot => None,
            Place::At(begin, end) => Some(&self.parts[part].bytes[begin..end]),
        })
    }

    /// The records; those in slots appear empty.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        self.iter_unslotted().map(Option::unwrap_or_default)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn many_items_are_worked_on_at_the_same_time_and_stay_in_order() {
        let items: Vec<usize> = (0..64).collect();
        let all_at_work = Barrier::new(MAX_OPENERS);
        let made = side_by_side(&items, |&item| {
            all_at_work.wait();
            Ok(item * 2)
        });
        assert_eq!(made.unwrap(), (0..64).map(|item| item * 2).collect::<Vec<_>>());
    }

    #[test]
    fn first_error_in_order_is_the_one_told() {
        let items: Vec<usize> = (0..1000).collect();
        for _ in 0..50 {
            let made = side_by_side(&items, |&item| {
                if item >= 40 { Err(Error::OutOfRange(format!("item {item}"))) } else { Ok(item) }
            });
            assert!(made.unwrap_err().to_string().contains("item 40"));
        }
    }
}
