//! Decodes rows before they are asked for, where storage is slow: many requests are in flight together.
//!
//! What must not break: a thread of the engine that runs a task never waits for another task of the
//! same queue, except for one that is running already.

use std::collections::{HashMap, HashSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use grainmill_core::interrupt::{self, Cancellation};
use grainmill_core::io::{Job, ReadQueue, StorageLimit, storage_latency};
use grainmill_core::lock::lock;
use grainmill_core::{Result, process};

use crate::cache::{Claim, Estimate, Key, Slot};
use crate::decode::Unit;
use crate::fetch::JoinLimits;
use crate::files::{ParquetFiles, Pick};
use crate::placings::Placing;
use crate::plan::UnitFinder;
use crate::requests::{ClaimedUnit, Request, requests_of};
use crate::room::Held;

/// Rows beyond what is needed next are not read if that takes finding out more of the files, and those
/// parts have more than this many times as many rows.
const MAX_SCATTER: u64 = 4;

/// Rows that are being decoded. Dropping it abandons what nobody else waits for.
#[derive(Debug)]
pub struct Ahead {
    job: Arc<AheadJob>,
    /// The process that started it; threads do not survive a fork in the child.
    owner: u32,
}

/// It opens files, then finds pages, then fetches and decodes them; each stage is many tasks.
#[derive(Debug)]
struct AheadJob {
    files: Arc<ParquetFiles>,
    positions: Vec<u64>,
    columns: Vec<usize>,
    is_beyond: bool,
    queue: ReadQueue,
    /// Ends what is in flight when it is abandoned.
    cancellation: Arc<Cancellation>,
    todo: Mutex<VecDeque<Task>>,
    /// Tasks of the stage that have not finished.
    num_left: AtomicUsize,
    progress: Mutex<Progress>,
    finished: Condvar,
}

#[derive(Debug)]
struct Progress {
    /// The stages that have not begun.
    stages: &'static [Stage],
    is_finished: bool,
    /// What was decoded, or is by another job; held until this job is dropped.
    slots: Vec<Arc<Slot>>,
    /// Chunks, by file, that were read to find pages.
    held: HashMap<u32, Vec<Held>>,
}

#[derive(Debug, Clone, Copy)]
enum Stage {
    Open,
    Place,
    Fetch,
}

#[derive(Debug)]
enum Task {
    /// Open the file of this number.
    Open(usize),
    /// Find pages.
    Place(Placing),
    /// Make a request, and decode the units for which it was the last.
    Fetch(Request),
}

impl Ahead {
    /// Starts to decode the `columns` of the rows at `positions`; if these are beyond what is needed
    /// next, only if half of the memory has room for all of them.
    pub(crate) fn start(
        files: &Arc<ParquetFiles>,
        positions: Vec<u64>,
        columns: Vec<usize>,
        is_beyond: bool,
        queue: &ReadQueue,
    ) -> Self {
        const STAGES: &[Stage] = &[Stage::Open, Stage::Place, Stage::Fetch];
        let job = AheadJob::new(files, positions, columns, is_beyond, queue, STAGES);
        job.go_on();
        Self { job, owner: process::id() }
    }

    /// Starts to fetch and decode units that the caller has claimed.
    pub(crate) fn of_claimed(
        files: &Arc<ParquetFiles>,
        claimed: Vec<Arc<ClaimedUnit>>,
        queue: &ReadQueue,
    ) -> Self {
        let job = AheadJob::new(files, Vec::new(), Vec::new(), false, queue, &[]);
        job.add(fetches(claimed));
        Self { job, owner: process::id() }
    }

    /// Waits until all rows are decoded, or cannot be.
    ///
    /// # Errors
    /// If the wait is interrupted.
    pub fn wait(&self) -> Result<()> {
        if self.owner != process::id() {
            return Ok(());
        }
        let started = Instant::now();
        let is_running = |progress: &mut Progress| !progress.is_finished;
        let progress = interrupt::wait_while(&self.job.progress, &self.job.finished, is_running)?;
        let slots = progress.slots.clone();
        drop(progress);
        for slot in slots {
            slot.wait()?;
        }
        storage_latency::add_waited(started.elapsed());
        Ok(())
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        if self.owner != process::id() {
            return; // a thread of the parent may hold the lock
        }
        self.job.cancellation.cancel();
        let slots = std::mem::take(&mut lock(&self.job.progress).slots);
        drop(slots);
    }
}

impl Job for AheadJob {
    fn storage(&self) -> Option<Arc<StorageLimit>> {
        self.files.limit()
    }

    fn run_next(self: Arc<Self>) {
        let Some(task) = lock(&self.todo).pop_front() else { return };
        // Even if it is abandoned, another job may wait for what it finds or fetches.
        let is_needed = match &task {
            Task::Open(_) => false,
            Task::Place(placing) => self.files.placings().is_awaited(*placing),
            Task::Fetch(_) => true,
        };
        // What fails here is raised where the rows are read.
        let run = || catch_unwind(AssertUnwindSafe(|| self.run(&task)));
        let done = if self.cancellation.is_cancelled() {
            is_needed.then(run)
        } else {
            Some(self.cancellation.run(run))
        };
        let chunks = done.and_then(|run| run.ok()?.ok()).unwrap_or_default();
        if let Task::Place(placing) = task {
            self.keep(placing, &chunks);
            self.files.placings().end(placing, &chunks);
        }
        drop(task);
        self.end_task();
    }
}

impl AheadJob {
    fn new(
        files: &Arc<ParquetFiles>,
        mut positions: Vec<u64>,
        columns: Vec<usize>,
        is_beyond: bool,
        queue: &ReadQueue,
        stages: &'static [Stage],
    ) -> Arc<Self> {
        if is_beyond {
            positions.sort_unstable(); // they are many, and all of them are claimed or none
        }
        let (slots, held) = (Vec::new(), HashMap::new());
        Arc::new(Self {
            files: Arc::clone(files),
            positions,
            columns,
            is_beyond,
            queue: queue.clone(),
            cancellation: Arc::default(),
            todo: Mutex::default(),
            num_left: AtomicUsize::new(0),
            progress: Mutex::new(Progress { stages, is_finished: false, slots, held }),
            finished: Condvar::new(),
        })
    }

    /// Begins the next stage that has tasks, when none of the last one is left.
    fn go_on(self: &Arc<Self>) {
        while let Some(stage) = self.next_stage() {
            self.num_left.store(1, Ordering::Release); // this call
            // What fails here is raised where the rows are read.
            let tasks = catch_unwind(AssertUnwindSafe(|| self.tasks_of(stage)));
            let Some(tasks) = tasks.ok().and_then(Result::ok).flatten() else { break };
            self.add(tasks);
            if self.num_left.fetch_sub(1, Ordering::AcqRel) > 1 {
                return;
            }
        }
        let mut progress = lock(&self.progress);
        progress.is_finished = true;
        progress.held.clear();
        drop(progress);
        self.finished.notify_all();
    }

    fn next_stage(&self) -> Option<Stage> {
        let mut progress = lock(&self.progress);
        let (&stage, later) = progress.stages.split_first()?;
        progress.stages = later;
        (!self.cancellation.is_cancelled()).then_some(stage)
    }

    /// Counts a task of this stage as finished.
    fn end_task(self: &Arc<Self>) {
        if self.num_left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.go_on();
        }
    }

    /// Adds tasks of a stage.
    fn add(self: &Arc<Self>, tasks: Vec<Task>) {
        let count = tasks.len();
        self.num_left.fetch_add(count, Ordering::AcqRel);
        lock(&self.todo).extend(tasks);
        self.queue.submit(Arc::clone(self) as Arc<dyn Job>, count);
    }

    /// The tasks of a stage; None if the job ends before it.
    fn tasks_of(self: &Arc<Self>, stage: Stage) -> Result<Option<Vec<Task>>> {
        match stage {
            Stage::Open => Ok(self.opens()),
            Stage::Place => self.places(),
            // As far as memory allows.
            Stage::Fetch => {
                let picks = self.files.picks(&self.positions)?;
                Ok(Some(fetches(self.new_units(&picks)?)))
            }
        }
    }

    /// The files that are not open.
    fn opens(&self) -> Option<Vec<Task>> {
        let unopened: Vec<usize> = self.files.unopened(&self.positions).collect();
        let num_rows = unopened.iter().map(|&file| self.files.file_len(file));
        if self.is_scattered(unopened.len(), num_rows.sum()) {
            return None;
        }
        Some(unopened.into_iter().map(Task::Open).collect())
    }

    /// Whether so little of these files or row groups would be used that reading on beyond what is
    /// needed next would delay that, for little.
    fn is_scattered(&self, count: usize, num_rows: u64) -> bool {
        let num_positions = self.positions.len();
        self.is_beyond
            && count > 4 + num_positions / 64
            && num_rows / MAX_SCATTER > num_positions as u64
    }

    /// The columns of row groups whose pages are not known; waits for those that another job finds.
    fn places(self: &Arc<Self>) -> Result<Option<Vec<Task>>> {
        let picks = self.files.picks(&self.positions)?;
        let mut groups: Vec<(u32, u32)> =
            picks.iter().map(|pick| (pick.file, pick.row_group)).collect();
        groups.sort_unstable();
        groups.dedup();
        let mut unknown = Vec::new();
        let (mut num_unknown, mut num_rows) = (0, 0_u64);
        for (number, row_group) in groups {
            let (file, row_group) = (self.files.file(number as usize)?, row_group as usize);
            let num_before = unknown.len();
            let mut has_indexed = false;
            for &column in &self.columns {
                if file.placed(row_group, column).is_some() {
                    continue;
                }
                let is_indexed = file.has_index(row_group, column);
                if is_indexed && has_indexed {
                    continue;
                }
                has_indexed |= is_indexed;
                let column = (!is_indexed).then_some(column);
                unknown.push(Placing { file: number, row_group, column });
            }
            if unknown.len() > num_before {
                num_unknown += 1;
                num_rows = num_rows.saturating_add(file.group_len(row_group));
            }
        }
        if self.is_scattered(num_unknown, num_rows) {
            return Ok(None);
        }
        unknown.retain(|&placing| {
            self.files.placings().begin(placing, || {
                self.num_left.fetch_add(1, Ordering::AcqRel);
                let job = Arc::clone(self);
                Box::new(move |chunks| {
                    job.keep(placing, chunks);
                    job.end_task();
                })
            })
        });
        Ok(Some(unknown.into_iter().map(Task::Place).collect()))
    }

    /// Claims the units of `picks` that nobody decodes yet.
    fn new_units(&self, picks: &[Pick]) -> Result<Vec<Arc<ClaimedUnit>>> {
        let mut finders: Vec<_> =
            self.columns.iter().map(|&column| UnitFinder::new(&self.files, column)).collect();
        let (mut wanted, mut seen) = (Vec::new(), HashSet::new());
        let mut last = vec![None; finders.len()];
        for &pick in picks {
            for (finder, last) in finders.iter_mut().zip(&mut last) {
                if let Some(unit) = finder.find(pick)?
                    && last.replace(unit.key) != Some(unit.key)
                    && seen.insert(unit.key)
                {
                    wanted.push(unit.clone());
                }
            }
        }
        let held = std::mem::take(&mut lock(&self.progress).held);
        let (mut units, mut slots) = (Vec::new(), Vec::new());
        let estimates: Vec<_> = wanted.iter().map(Unit::estimate).collect();
        for (claim, unit) in self.claims(&estimates).into_iter().zip(wanted) {
            match claim {
                Some(Claim::Decode(slot)) => {
                    let chunks = held.get(&unit.key.file).map_or(&[][..], Vec::as_slice);
                    units.push(ClaimedUnit::new(unit, &slot, chunks));
                    slots.push(slot);
                }
                Some(Claim::Wait(slot)) => slots.push(slot),
                Some(Claim::Found(_)) | None => {}
            }
        }
        drop(held);
        let mut progress = lock(&self.progress);
        if !self.cancellation.is_cancelled() {
            progress.slots = slots;
        }
        Ok(units)
    }

    /// The claims to units, or none.
    fn claims(&self, wanted: &[(Key, Estimate)]) -> Vec<Option<Claim>> {
        let (cache, limit) = (self.files.cache(), self.files.max_ahead());
        if self.is_beyond {
            return cache.claim_all(wanted, limit / 2);
        }
        cache.claim_ahead(wanted, limit)
    }

    /// Runs a task; returns the chunks that were read to find pages.
    fn run(&self, task: &Task) -> Result<Vec<Held>> {
        match task {
            &Task::Open(number) => self.files.file(number).map(|_| Vec::new()),
            &Task::Place(Placing { file: number, row_group, column }) => {
                let file = self.files.file(number as usize)?;
                Ok(file.place(row_group, column, &self.columns, self.files.room())?.1)
            }
            Task::Fetch(request) if request.is_needed() => {
                let file = self.files.file(request.file as usize)?.reopen()?;
                request.run(&self.files, &file).map(|()| Vec::new())
            }
            Task::Fetch(_) => Ok(Vec::new()),
        }
    }

    /// Keeps the chunks that were read for `placing` until its units are claimed.
    fn keep(&self, placing: Placing, chunks: &[Held]) {
        lock(&self.progress).held.entry(placing.file).or_default().extend_from_slice(chunks);
    }
}

fn fetches(units: Vec<Arc<ClaimedUnit>>) -> Vec<Task> {
    requests_of(units, JoinLimits::SLOW).into_iter().map(Task::Fetch).collect()
}
