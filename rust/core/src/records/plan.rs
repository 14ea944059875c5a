//! Which ranges of files are read for a list of records: arithmetic, no bytes.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use super::chunk_cache::ChunkCache;
use super::record_file::{Holding, Pick, RecordFile};
use super::storage_latency::StorageLatency;
use crate::Result;

/// Parts of a plan hold about this many bytes where storage is near; a smaller plan is not worth
/// a second thread.
const UNIT_LEN: u64 = 1 << 20;
/// Records from this length on are read straight to where they are wanted.
const STRAIGHT_LEN: u32 = 4 << 10;

/// What reading ranges together costs, and so which are.
#[derive(Debug, Clone, Copy)]
pub struct Costs {
    /// Neighbouring chunks are read together up to this length.
    pub run_len: u64,
    /// Unwanted bytes that are read along when that saves a read.
    pub gap_len: u64,
    /// Records up to this length are read together with their neighbours, though it costs a copy
    /// from where they were read to.
    pub joined_len: u32,
}

impl Costs {
    /// Of the page cache: runs that a core's cache holds, gaps that cost less than a system call.
    pub const NEAR: Self = Self { run_len: 128 << 10, gap_len: 1 << 10, joined_len: STRAIGHT_LEN };
    /// Of storage where a read waits for milliseconds: fewer reads, as long as each is a small
    /// part of what a connection carries meanwhile.
    pub const FAR: Self = Self { run_len: 256 << 10, gap_len: 16 << 10, joined_len: 64 << 10 };
}

/// Picks that are read at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Which picks of the plan.
    pub picks: Range<usize>,
    /// The bytes of their file that hold all their chunks.
    pub extent: Range<u64>,
    /// Whether it is one record that can be read straight to where it is wanted.
    pub is_straight: bool,
}

/// Groups picks, which are in rising order, to what is read at once: whole chunks of one file.
pub fn requests(picks: &[Pick], costs: &Costs) -> Vec<Request> {
    let mut requests = Vec::with_capacity(picks.len());
    let mut begin = 0;
    while begin < picks.len() {
        let count = run(&picks[begin..], costs);
        let run = begin..begin + count;
        let (first, last) = (&picks[begin], &picks[run.end - 1]);
        requests.push(Request {
            extent: first.begin..last.end,
            is_straight: count == 1 && first.predicted_len >= STRAIGHT_LEN,
            picks: run,
        });
        begin += count;
    }
    requests
}

/// How many of the first picks are read at once.
#[inline]
fn run(picks: &[Pick], costs: &Costs) -> usize {
    let first = &picks[0];
    if first.predicted_len >= costs.joined_len {
        return 1;
    }
    let longest = costs.run_len.max(first.end - first.begin);
    let (mut end, mut count) = (first.end, 1);
    for pick in &picks[1..] {
        let joins = pick.file == first.file
            && pick.predicted_len < costs.joined_len
            && pick.end - first.begin <= longest
            && pick.begin.saturating_sub(end) <= costs.gap_len;
        if !joins {
            break;
        }
        end = pick.end;
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
    /// Whether it has been looked at for this plan, with success.
    is_checked: OnceLock<bool>,
}

impl PlannedFile {
    pub(crate) fn new(number: u32, file: Arc<dyn RecordFile>) -> Self {
        Self { number, file, is_checked: OnceLock::new() }
    }

    /// Holds the file. Where storage is far, all units of a plan look at it once.
    pub(crate) fn holding(&self, latency: &StorageLatency) -> Result<Holding> {
        let check = || Holding::of(&*self.file, latency, false).is_ok();
        let was_checked = latency.is_far() && *self.is_checked.get_or_init(check);
        Holding::of(&*self.file, latency, was_checked)
    }
}

/// How a list of positions is read: in units, each on any thread.
#[derive(Debug)]
pub struct Plan {
    pub(crate) files: Vec<PlannedFile>,
    /// In rising order.
    pub(crate) picks: Vec<Pick>,
    pub(crate) requests: Vec<Request>,
    pub(crate) latency: Arc<StorageLatency>,
    pub(crate) cache: Arc<ChunkCache>,
}

/// Some requests of a plan, and where their records go if that is known.
#[derive(Debug)]
pub struct Unit<S> {
    /// Which requests.
    pub(crate) requests: Range<usize>,
    /// One for each pick, or none at all.
    pub(crate) slots: Vec<Option<S>>,
}

impl Plan {
    pub(crate) fn new(
        files: Vec<PlannedFile>,
        picks: Vec<Pick>,
        latency: Arc<StorageLatency>,
        cache: Arc<ChunkCache>,
    ) -> Self {
        let costs = if latency.is_far() { Costs::FAR } else { Costs::NEAR };
        let requests = requests(&picks, &costs);
        Self { files, picks, requests, latency, cache }
    }

    /// The same plan for another process, in which nothing has been done.
    #[must_use]
    pub fn anew(&self) -> Self {
        let files = self
            .files
            .iter()
            .map(|planned| PlannedFile::new(planned.number, Arc::clone(&planned.file)));
        Self {
            files: files.collect(),
            picks: self.picks.clone(),
            requests: self.requests.clone(),
            latency: Arc::clone(&self.latency),
            cache: Arc::clone(&self.cache),
        }
    }

    /// The records to be read, by file and chunk.
    pub fn picks(&self) -> &[Pick] {
        &self.picks
    }

    /// Whether the storage it reads from is far.
    pub fn is_far(&self) -> bool {
        self.latency.is_far()
    }

    /// Whether it is worth a second thread though storage is near.
    pub fn is_large(&self) -> bool {
        let mut len = 0;
        self.requests.iter().any(|request| {
            let is_full = len >= UNIT_LEN;
            len += request.extent.end - request.extent.start;
            is_full
        })
    }

    /// How long each record is, in the order asked for, where the index of its file tells. A hint:
    /// a damaged or unusual file may hold something else.
    pub fn predicted_lens(&self) -> Vec<Option<usize>> {
        let mut lens = vec![None; self.picks.len()];
        for pick in &self.picks {
            lens[pick.out as usize] = Some(pick.predicted_len as usize).filter(|&len| len > 0);
        }
        lens
    }

    /// The whole plan as one unit. `slots`, in the order asked for, has one for each record or none.
    ///
    /// # Panics
    /// If there are some slots, but fewer than records.
    pub fn whole<S>(&self, mut slots: Vec<Option<S>>) -> Unit<S> {
        let slots = if slots.is_empty() {
            slots
        } else {
            self.picks.iter().map(|pick| slots[pick.out as usize].take()).collect()
        };
        Unit { requests: 0..self.requests.len(), slots }
    }

    /// Cuts a unit into those that are read at the same time: one for each request where storage
    /// is far, else about a mebibyte each.
    pub fn units<S>(&self, unit: Unit<S>) -> Vec<Unit<S>> {
        let is_far = self.is_far();
        let mut units = Vec::new();
        let has_slots = !unit.slots.is_empty();
        let mut slots = unit.slots.into_iter();
        let mut push = |requests: Range<usize>| {
            let count = if has_slots { self.picks_of(&requests).len() } else { 0 };
            units.push(Unit { requests, slots: slots.by_ref().take(count).collect() });
        };
        let (mut begin, mut len) = (unit.requests.start, 0);
        for at in unit.requests.clone() {
            if at > begin && (is_far || len >= UNIT_LEN) {
                push(begin..at);
                (begin, len) = (at, 0);
            }
            len += self.requests[at].extent.end - self.requests[at].extent.start;
        }
        if begin < unit.requests.end {
            push(begin..unit.requests.end);
        }
        units
    }

    /// The number of the first pick of `unit`.
    pub fn first_pick<S>(&self, unit: &Unit<S>) -> usize {
        self.picks_of(&unit.requests).start
    }

    /// Which picks some requests are for.
    pub(crate) fn picks_of(&self, requests: &Range<usize>) -> Range<usize> {
        match (self.requests.get(requests.start), requests.end.checked_sub(1)) {
            (Some(first), Some(last)) if last >= requests.start => {
                first.picks.start..self.requests[last].picks.end
            }
            _ => 0..0,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Picks in rising order from gaps, lengths of chunks, how many records of each are wanted,
    /// and whether another file begins; lengths are known where chunks hold one record.
    fn picks_of(chunks: &[(u64, u64, usize, bool)]) -> Vec<Pick> {
        let (mut at, mut file, mut picks) = (0, 0, Vec::new());
        for &(gap, len, count, is_next_file) in chunks {
            if is_next_file {
                (at, file) = (0, file + 1);
            }
            at += gap;
            let predicted_len = if count == 1 { u32::try_from(len - 1).unwrap() } else { 0 };
            let pick = Pick { begin: at, end: at + len, file, predicted_len, ..Pick::default() };
            picks.extend((0..count).map(|within| Pick { within: within as u64, ..pick }));
            at += len;
        }
        picks
    }

    /// Whether two picks that follow each other could be read at once, as the costs say.
    fn could_join(first: &Pick, last: &Pick, pick: &Pick, costs: &Costs) -> bool {
        pick.file == last.file
            && pick.begin.saturating_sub(last.end) <= costs.gap_len
            && pick.end - first.begin <= costs.run_len.max(first.end - first.begin)
            && first.predicted_len.max(pick.predicted_len) < costs.joined_len
    }

    proptest! {
        #[test]
        fn requests_hold_each_pick_once_and_no_more_than_pays(
            chunks in proptest::collection::vec(
                (0_u64..40_000, 1_u64..100_000, 1_usize..4, proptest::bool::weighted(0.1)),
                0..80,
            ),
            shrink in 0_u32..3,
        ) {
            let scale = 16_u64.pow(shrink);
            let scaled: Vec<_> = chunks
                .iter()
                .map(|&(gap, len, count, next)| (gap / scale, len / scale + 1, count, next))
                .collect();
            let picks = picks_of(&scaled);
            for costs in [Costs::NEAR, Costs::FAR] {
                let requests = requests(&picks, &costs);
                let all: Vec<usize> =
                    requests.iter().flat_map(|request| request.picks.clone()).collect();
                prop_assert_eq!(all, (0..picks.len()).collect::<Vec<_>>());
                for request in &requests {
                    let run = &picks[request.picks.clone()];
                    let (first, last) = (&run[0], &run[run.len() - 1]);
                    prop_assert_eq!(&request.extent, &(first.begin..last.end));
                    for pair in run.windows(2) {
                        prop_assert!(could_join(first, &pair[0], &pair[1], &costs));
                    }
                    if request.is_straight {
                        prop_assert!(run.len() == 1 && first.predicted_len >= STRAIGHT_LEN);
                    }
                    if let Some(next) = picks.get(request.picks.end) {
                        prop_assert!(!could_join(first, last, next, &costs));
                    }
                }
            }
        }
    }
}
