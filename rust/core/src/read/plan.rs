//! Computes the byte ranges to read for a list of records, without I/O.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use super::chunk_cache::ChunkCache;
use crate::formats::record_file::{Pick, RecordFile};
use crate::io::storage::{FileHandle, ReadRequest};
use crate::io::storage_latency::StorageLatency;
use crate::{Result, compute};

/// About how many bytes a span reads where storage is fast; less does not pay for a second thread.
const SPAN_LEN: u64 = 1 << 20;
/// A core decompresses so much in 140 us (zstd), and up to ten times that long (Brotli).
const MIN_SHARE_LEN: usize = 64 << 10;
/// Longer records are better copied and verified by a thread of their own than by one of the storage.
const MAX_DIRECT_REQUEST_LEN: u64 = 1 << 20;
/// The same for what has to be decoded.
const MAX_DECODED_REQUEST_LEN: u64 = 64 << 10;
/// Records of this length or more are read directly into their slots.
const MIN_DIRECT_LEN: u32 = 4 << 10;

/// Limits for merging the ranges of neighbouring chunks into one read.
#[derive(Debug, Clone, Copy)]
pub struct MergeLimits {
    /// The maximum length of a merged read.
    pub max_read_len: u64,
    /// The maximum gap of unneeded bytes between two merged chunks.
    pub max_gap_len: u64,
    /// Records up to this length are merged, although that costs a copy out of the read buffer.
    pub max_record_len: u32,
}

impl MergeLimits {
    /// For the page cache: reads fit a core's cache, gaps cost less than a system call.
    pub const FAST: Self =
        Self { max_read_len: 128 << 10, max_gap_len: 1 << 10, max_record_len: MIN_DIRECT_LEN };
    /// For storage with latencies of milliseconds: fewer reads, each still short against what a
    /// connection transfers in that time.
    pub const SLOW: Self =
        Self { max_read_len: 256 << 10, max_gap_len: 16 << 10, max_record_len: 64 << 10 };
}

/// Picks that one read covers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedRead {
    /// Which picks of the plan.
    pub picks: Range<usize>,
    /// The bytes of the file that hold all their chunks.
    pub extent: Range<u64>,
    /// Whether it is one record that can be read directly into its slot.
    pub is_direct: bool,
}

/// Merges picks, which are in rising order, into reads of whole chunks of one file, within the limits
/// for that file.
pub fn merged_reads(picks: &[Pick], limits_of: impl Fn(u32) -> MergeLimits) -> Vec<PlannedRead> {
    let mut reads = Vec::with_capacity(picks.len());
    let mut begin = 0;
    while begin < picks.len() {
        let count = num_merged(&picks[begin..], &limits_of(picks[begin].file));
        let merged = begin..begin + count;
        reads.push(PlannedRead {
            extent: extent_of(&picks[merged.clone()]),
            is_direct: count == 1 && picks[begin].predicted_len >= MIN_DIRECT_LEN,
            picks: merged,
        });
        begin += count;
    }
    reads
}

/// The bytes that hold the chunks of `picks`, which are in rising order. Chunks of a compressed stream
/// overlap, and one may end before the chunk before it: a record may extend over several.
pub(crate) fn extent_of(picks: &[Pick]) -> Range<u64> {
    let begin = picks.first().map_or(0, |first| first.begin);
    begin..picks.iter().map(|pick| pick.end).max().unwrap_or(begin)
}

/// How many of the first picks are merged into one read.
#[inline]
fn num_merged(picks: &[Pick], limits: &MergeLimits) -> usize {
    let first = &picks[0];
    if first.predicted_len >= limits.max_record_len {
        return 1;
    }
    let max_len = limits.max_read_len.max(first.end - first.begin);
    let (mut end, mut count) = (first.end, 1);
    for pick in &picks[1..] {
        let can_merge = pick.file == first.file
            && pick.predicted_len < limits.max_record_len
            && pick.end.max(end) - first.begin <= max_len
            && pick.begin.saturating_sub(end) <= limits.max_gap_len;
        if !can_merge {
            break;
        }
        end = end.max(pick.end);
        count += 1;
    }
    count
}

/// A file of a plan.
#[derive(Debug)]
pub(crate) struct PlannedFile {
    /// Which of all files it is.
    pub(crate) number: u32,
    pub(crate) file: Arc<dyn RecordFile>,
    pub(crate) latency: Arc<StorageLatency>,
    /// Whether it was checked for changes for this plan, with success.
    is_checked: OnceLock<bool>,
}

impl PlannedFile {
    pub(crate) fn new(
        number: u32,
        file: Arc<dyn RecordFile>,
        latency: Arc<StorageLatency>,
    ) -> Self {
        Self { number, file, latency, is_checked: OnceLock::new() }
    }

    /// A handle for reads. Where storage is slow, the file is checked once for all spans.
    pub(crate) fn handle(&self) -> Result<FileHandle> {
        let (file, latency) = (&*self.file, &*self.latency);
        let open = |was_checked| {
            FileHandle::open(file.stored(), latency, was_checked, |reader| file.is_same(reader))
        };
        let check = || open(false).is_ok();
        open(latency.is_slow() && *self.is_checked.get_or_init(check))
    }
}

/// How a list of positions is read: in spans, each of which any thread can read.
#[derive(Debug)]
pub struct Plan {
    pub(crate) files: Vec<PlannedFile>,
    /// In rising order.
    pub(crate) picks: Vec<Pick>,
    pub(crate) reads: Vec<PlannedRead>,
    /// Of all files, each once.
    latencies: Vec<Arc<StorageLatency>>,
    pub(crate) cache: Arc<ChunkCache>,
}

/// Some reads of a plan, and the slots for their records if there are any.
#[derive(Debug)]
pub struct PlanSpan<S> {
    /// Which reads.
    pub(crate) reads: Range<usize>,
    /// One for each pick, or empty.
    pub(crate) slots: Vec<Option<S>>,
}

impl Plan {
    pub(crate) fn new(files: Vec<PlannedFile>, picks: Vec<Pick>, cache: Arc<ChunkCache>) -> Self {
        let mut latencies: Vec<Arc<StorageLatency>> = Vec::new();
        for planned in &files {
            if !latencies.iter().any(|latency| Arc::ptr_eq(latency, &planned.latency)) {
                latencies.push(Arc::clone(&planned.latency));
            }
        }
        let limits_of = |file: u32| {
            let is_slow = files[file as usize].latency.is_slow();
            if is_slow { MergeLimits::SLOW } else { MergeLimits::FAST }
        };
        let reads = merged_reads(&picks, limits_of);
        Self { files, picks, reads, latencies, cache }
    }

    /// A copy of the plan for another process, with no file checked yet.
    #[must_use]
    pub fn anew(&self) -> Self {
        let files = self.files.iter().map(|PlannedFile { number, file, latency, .. }| {
            PlannedFile::new(*number, Arc::clone(file), Arc::clone(latency))
        });
        Self {
            files: files.collect(),
            picks: self.picks.clone(),
            reads: self.reads.clone(),
            latencies: self.latencies.clone(),
            cache: Arc::clone(&self.cache),
        }
    }

    /// The records to read, by file and chunk.
    pub fn picks(&self) -> &[Pick] {
        &self.picks
    }

    /// Whether a storage of its files is slow.
    pub fn is_slow(&self) -> bool {
        self.latencies.iter().any(|latency| latency.is_slow())
    }

    /// How many reads of slow storage it has.
    pub fn num_slow_reads(&self) -> usize {
        (0..self.reads.len()).filter(|&at| self.file_of(at).latency.is_slow()).count()
    }

    /// The file of read number `at`.
    pub(crate) fn file_of(&self, at: usize) -> &PlannedFile {
        &self.files[self.picks[self.reads[at].picks.start].file as usize]
    }

    /// The latency of the storage from which `span` is read, or first read.
    pub(crate) fn latency_of<S>(&self, span: &PlanSpan<S>) -> &StorageLatency {
        &self.file_of(span.reads.start).latency
    }

    /// Whether it pays for a second thread although storage is fast.
    pub fn is_large(&self) -> bool {
        let mut len = 0;
        self.reads.iter().any(|read| {
            let is_full = len >= SPAN_LEN;
            len += read.extent.end - read.extent.start;
            is_full
        })
    }

    /// The length of each record in the requested order, if known from the index of its file. Only
    /// a hint: a damaged or unusual file may hold another length.
    pub fn predicted_lens(&self) -> Vec<Option<usize>> {
        let mut lens = vec![None; self.picks.len()];
        for pick in &self.picks {
            lens[pick.out as usize] = Some(pick.predicted_len as usize).filter(|&len| len > 0);
        }
        lens
    }

    /// The whole plan as one span. `slots` is empty or has one for each record, in the requested
    /// order.
    ///
    /// # Panics
    /// If `slots` is not empty and shorter than the records.
    pub fn whole<S>(&self, mut slots: Vec<Option<S>>) -> PlanSpan<S> {
        let slots = if slots.is_empty() {
            slots
        } else {
            self.picks.iter().map(|pick| slots[pick.out as usize].take()).collect()
        };
        PlanSpan { reads: 0..self.reads.len(), slots }
    }

    /// Splits a span into spans that are read concurrently: one for each read where storage is
    /// slow, which come first, then about a mebibyte each.
    pub fn spans<S>(&self, span: PlanSpan<S>) -> Vec<PlanSpan<S>> {
        self.split(span, SPAN_LEN)
    }

    /// Splits a span that is read from fast storage into what idle threads may share.
    ///
    /// Only what has to be decompressed: records that are as they are stored arrive as fast as memory
    /// gives them, and are used next by the thread that asked for them.
    pub fn shares<S>(&self, span: PlanSpan<S>) -> Vec<PlanSpan<S>> {
        let reads = self.reads.get(span.reads.clone()).unwrap_or(&[]);
        let is_decoded = |read: &&PlannedRead| self.picks[read.picks.start].predicted_len == 0;
        let byte_len = |read: &PlannedRead| read.extent.end - read.extent.start;
        let len: u64 = reads.iter().filter(is_decoded).map(byte_len).sum();
        let num_shares = compute::num_shares(usize::try_from(len).unwrap_or(0), MIN_SHARE_LEN);
        if num_shares < 2 { vec![span] } else { self.split(span, len / num_shares as u64) }
    }

    /// As [`spans`](Self::spans), of about `span_len` bytes where storage is fast.
    fn split<S>(&self, span: PlanSpan<S>, span_len: u64) -> Vec<PlanSpan<S>> {
        let mut spans = Vec::new();
        let has_slots = !span.slots.is_empty();
        let mut slots = span.slots.into_iter();
        let mut push = |reads: Range<usize>| {
            let count = if has_slots { self.picks_of(&reads).len() } else { 0 };
            spans.push(PlanSpan { reads, slots: slots.by_ref().take(count).collect() });
        };
        let (mut begin, mut len) = (span.reads.start, 0);
        let mut was_slow = false;
        for at in span.reads.clone() {
            let is_slow = self.file_of(at).latency.is_slow();
            if at > begin && (is_slow || was_slow || len >= span_len) {
                push(begin..at);
                (begin, len) = (at, 0);
            }
            was_slow = is_slow;
            len += self.reads[at].extent.end - self.reads[at].extent.start;
        }
        if begin < span.reads.end {
            push(begin..span.reads.end);
        }
        if self.latencies.len() > 1 {
            spans.sort_by_key(|span| !self.latency_of(span).is_slow());
        }
        spans
    }

    /// What requests the bytes of `span`, if no thread needs to wait for them, and where they begin:
    /// [`read_part`](Self::read_part) then takes the records.
    pub(crate) fn request<S>(
        &self,
        span: &PlanSpan<S>,
    ) -> Option<(Range<u64>, Box<dyn ReadRequest>)> {
        let [read] = self.reads.get(span.reads.clone())? else { return None };
        let extent = read.extent.clone();
        let max_len = if read.is_direct { MAX_DIRECT_REQUEST_LEN } else { MAX_DECODED_REQUEST_LEN };
        let planned = self.file_of(span.reads.start);
        let needs_thread = extent.end - extent.start > max_len
            || planned.file.has_groups()
            || !planned.file.stored().has_requests();
        if needs_thread {
            return None;
        }
        // Whatever is wrong, a thread that reads will find it.
        let request = planned.handle().ok()?.request(extent.clone())?;
        Some((extent, request))
    }

    /// The index of the first pick of `span`.
    pub fn first_pick<S>(&self, span: &PlanSpan<S>) -> usize {
        self.picks_of(&span.reads).start
    }

    /// The picks of some reads.
    pub(crate) fn picks_of(&self, reads: &Range<usize>) -> Range<usize> {
        match (self.reads.get(reads.start), reads.end.checked_sub(1)) {
            (Some(first), Some(last)) if last >= reads.start => {
                first.picks.start..self.reads[last].picks.end
            }
            _ => 0..0,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Picks in rising order from, for each chunk: how far after the begin of the last one it begins,
    /// its length, the number of its records, whether a new file starts. Chunks may be empty, overlap,
    /// and end before those before them. Record lengths are known in chunks of one record.
    fn picks_of(chunks: &[(u64, u64, usize, bool)]) -> Vec<Pick> {
        let (mut begin, mut file, mut picks) = (0, 0, Vec::new());
        for &(step, len, count, is_next_file) in chunks {
            if is_next_file {
                (begin, file) = (0, file + 1);
            }
            begin += step;
            let is_known = count == 1 && len > 0;
            let predicted_len = if is_known { u32::try_from(len - 1).unwrap() } else { 0 };
            let pick = Pick { begin, end: begin + len, file, predicted_len, ..Pick::default() };
            picks.extend((0..count).map(|within| Pick { within: within as u64, ..pick }));
        }
        picks
    }

    /// Whether `pick` may be merged into a read of `merged`.
    fn can_merge(merged: &[Pick], pick: &Pick, limits: &MergeLimits) -> bool {
        let first = &merged[0];
        let end = merged.iter().map(|pick| pick.end).max().unwrap();
        pick.file == first.file
            && pick.begin.saturating_sub(end) <= limits.max_gap_len
            && end.max(pick.end) - first.begin <= limits.max_read_len.max(first.end - first.begin)
            && first.predicted_len.max(pick.predicted_len) < limits.max_record_len
    }

    proptest! {
        #[test]
        fn requests_cover_each_pick_once_and_merge_as_much_as_allowed(
            chunks in proptest::collection::vec(
                (
                    prop_oneof![Just(0_u64), 0_u64..40_000],
                    prop_oneof![Just(0_u64), 0_u64..40_000, 0_u64..400_000],
                    1_usize..4,
                    proptest::bool::weighted(0.1),
                ),
                0..80,
            ),
            shrink in 0_u32..3,
        ) {
            let scale = 16_u64.pow(shrink);
            let scaled: Vec<_> = chunks
                .iter()
                .map(|&(step, len, count, next)| (step / scale, len / scale, count, next))
                .collect();
            let picks = picks_of(&scaled);
            for limits in [MergeLimits::FAST, MergeLimits::SLOW] {
                let reads = merged_reads(&picks, |_| limits);
                let all: Vec<usize> =
                    reads.iter().flat_map(|read| read.picks.clone()).collect();
                prop_assert_eq!(all, (0..picks.len()).collect::<Vec<_>>());
                for read in &reads {
                    let merged = &picks[read.picks.clone()];
                    for pick in merged {
                        prop_assert!(read.extent.start <= pick.begin);
                        prop_assert!(pick.end <= read.extent.end);
                    }
                    prop_assert!(merged.iter().any(|pick| pick.end == read.extent.end));
                    prop_assert_eq!(merged[0].begin, read.extent.start);
                    for count in 1..merged.len() {
                        prop_assert!(can_merge(&merged[..count], &merged[count], &limits));
                    }
                    if read.is_direct {
                        let is_long = merged[0].predicted_len >= MIN_DIRECT_LEN;
                        prop_assert!(merged.len() == 1 && is_long);
                    }
                    if let Some(next) = picks.get(read.picks.end) {
                        prop_assert!(!can_merge(merged, next, &limits));
                    }
                }
            }
        }
    }
}
