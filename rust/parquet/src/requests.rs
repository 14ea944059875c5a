//! Units that are fetched and decoded: by few requests, each for close ranges of a file, which one thread
//! makes or several do.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use bytes::Bytes;
use grainmill_core::Result;
use grainmill_core::lock::lock;
use grainmill_core::timeline::{self, Activity};

use crate::cache::Slot;
use crate::decode::Unit;
use crate::fetch::{Fetched, JoinLimits, OpenFile, joined};
use crate::files::ParquetFiles;
use crate::room::Held;

/// A range of a file, and the units that need it, each as often as it has ranges in it.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) file: u32,
    /// Empty where units have all their bytes.
    range: Range<u64>,
    units: Vec<Arc<ClaimedUnit>>,
}

/// A unit that is decoded as soon as its last request is answered.
#[derive(Debug)]
pub(crate) struct ClaimedUnit {
    unit: Unit,
    slot: Weak<Slot>,
    /// The ranges of the file that it needs and that were not read before.
    missing: Vec<Range<u64>>,
    /// How many of them are not in `parts`.
    num_left: AtomicUsize,
    parts: Mutex<Vec<(u64, Bytes)>>,
    /// Keeps the bytes of `parts` counted.
    _held: Vec<Held>,
}

impl Request {
    /// Whether somebody waits for its units.
    pub(crate) fn is_needed(&self) -> bool {
        self.units.iter().any(|unit| unit.slot.strong_count() > 0)
    }

    /// Makes it, of `file`, and decodes the units for which it was the last. Of several errors, the first is
    /// returned; all units that can be decoded are.
    pub(crate) fn run(&self, files: &ParquetFiles, file: &OpenFile) -> Result<()> {
        if !self.range.is_empty() {
            let bytes = file.read(self.range.clone())?;
            for unit in &self.units {
                lock(&unit.parts).push((self.range.start, bytes.clone()));
            }
        }
        let of_file = files.file(self.file as usize)?;
        let mut first_error = None;
        for unit in &self.units {
            if unit.num_left.fetch_sub(1, Ordering::AcqRel) == 1
                && let Some(slot) = unit.slot.upgrade()
            {
                let parts = std::mem::take(&mut *lock(&unit.parts));
                let fetched = Arc::new(Fetched::with(file.clone(), parts));
                let began = timeline::begin();
                let array = unit.unit.decode(of_file, &fetched);
                let extent = if began.is_some() { unit.unit.extent() } else { 0..0 };
                timeline::add(began, Activity::Decode, Path::new(of_file.path()), extent);
                let array = array.map_err(|error| {
                    first_error.get_or_insert(error);
                });
                files.cache().finish(unit.unit.key, &slot, array.ok());
            }
        }
        first_error.map_or(Ok(()), Err)
    }
}

impl ClaimedUnit {
    /// A unit that the caller has claimed; `chunks` of its file have been read.
    pub(crate) fn new(unit: Unit, slot: &Arc<Slot>, chunks: &[Held]) -> Arc<Self> {
        let (mut held, mut missing): (Vec<Held>, Vec<_>) = (Vec::new(), unit.ranges());
        missing.retain(|range| {
            let chunk = chunks.iter().find(|chunk| chunk.has(range));
            held.extend(chunk.cloned());
            chunk.is_none()
        });
        held.dedup_by_key(|chunk| chunk.at);
        let parts = held.iter().map(|chunk| (chunk.at, chunk.bytes.clone())).collect();
        Arc::new(Self {
            unit,
            slot: Arc::downgrade(slot),
            parts: Mutex::new(parts),
            _held: held,
            num_left: AtomicUsize::new(missing.len().max(1)),
            missing,
        })
    }
}

impl Drop for ClaimedUnit {
    /// Those that wait for it learn that it was not decoded, if so.
    fn drop(&mut self) {
        if let Some(slot) = self.slot.upgrade() {
            slot.finish(None);
        }
    }
}

/// The requests for `units`, file by file; last those that only decode one that has all its bytes.
pub(crate) fn requests_of(units: Vec<Arc<ClaimedUnit>>, limits: JoinLimits) -> Vec<Request> {
    let mut by_file: BTreeMap<u32, Vec<_>> = BTreeMap::new();
    let mut complete = Vec::new();
    for unit in units {
        let file = unit.unit.key.file;
        let missing = unit.missing.iter().map(|range| (range.clone(), Arc::clone(&unit)));
        by_file.entry(file).or_default().extend(missing);
        if unit.missing.is_empty() {
            complete.push(Request { file, range: 0..0, units: vec![unit] });
        }
    }
    let of_file = |(file, parts)| {
        let joined = joined(parts, limits).into_iter();
        joined.map(move |(range, units)| Request { file, range, units })
    };
    by_file.into_iter().flat_map(of_file).chain(complete).collect()
}
