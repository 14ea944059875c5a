//! One read of some records, in each way that the engine has, and what must come of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use grainmill_core::io::ReadQueue;
use grainmill_core::read::{self, Files, Pending, Reading, Records, chunk_cache, open};
use grainmill_core::{Error, Result, interrupt};

use crate::files::{Fault, TestFile};
use crate::slots::{Board, Slot, UNWRITTEN};
use crate::storage::Stored;
use crate::{READS_ITSELF, wait_until};

/// How often the engine has said that an abandoned read has ended.
pub(crate) static NUM_DONE: AtomicUsize = AtomicUsize::new(0);

/// How records are read.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Mode {
    /// On the calling thread.
    Alone,
    /// There or on threads of the engine.
    Begun,
    /// On threads of the engine.
    Started,
    /// There, as is the planning.
    Unready,
    /// They are abandoned after a while, and then read again.
    Abandoned(usize),
    /// They are abandoned after a while.
    Dropped(usize),
    /// The wait may be interrupted.
    Interrupted,
}

/// A read as it is drawn.
#[derive(Debug, Clone)]
pub(crate) struct DrawnRead {
    /// Positions, if they are taken modulo the number of records.
    pub(crate) positions: Vec<u64>,
    pub(crate) mode: Mode,
    /// For each record in turn: no slot, one that fits, one that does not. Without any, there are none.
    pub(crate) slots: Vec<u8>,
    /// The new budget of the cache.
    pub(crate) budget: Option<usize>,
    /// The new limit of the queue.
    pub(crate) limit: Option<usize>,
}

/// Files, the queue through which they are read, and the model.
pub(crate) struct Pipeline {
    pub(crate) files: Arc<Files>,
    pub(crate) queue: ReadQueue,
    pub(crate) stored: Arc<Stored>,
    tested: Vec<Arc<TestFile>>,
    /// For each position the number of its file, and its record or the text of its error.
    records: Vec<(usize, Result<Vec<u8>, String>)>,
    lens: Vec<usize>,
}

/// What a read leaves behind.
pub(crate) struct Done {
    pub(crate) board: Arc<Board>,
    /// Whether the engine promised to say when an abandoned read has ended.
    pub(crate) is_told: bool,
}

/// A read that is to be made.
struct Read<'a> {
    pipeline: &'a Pipeline,
    queue: &'a ReadQueue,
    positions: Vec<u64>,
    board: Arc<Board>,
    /// The length of the slot of each record.
    lens: Vec<Option<usize>>,
}

impl Pipeline {
    pub(crate) fn new(
        files: Arc<Files>,
        queue: ReadQueue,
        stored: Arc<Stored>,
        tested: Vec<Arc<TestFile>>,
    ) -> Self {
        let of_file = |(number, file): (usize, &Arc<TestFile>)| {
            file.records.iter().map(move |record| (number, record.clone())).collect::<Vec<_>>()
        };
        let records: Vec<_> = tested.iter().enumerate().flat_map(of_file).collect();
        assert_eq!(files.len(), records.len() as u64);
        let lens = tested.iter().flat_map(|file| file.record_lens()).collect();
        Self { files, queue, stored, tested, records, lens }
    }

    fn at(&self, position: u64) -> (usize, &Result<Vec<u8>, String>) {
        let (file, record) = &self.records[usize::try_from(position).unwrap()];
        (*file, record)
    }
}

impl DrawnRead {
    /// Reads as an owner of `queue`, and says what is wrong with what came of it.
    pub(crate) fn run(&self, pipeline: &Pipeline, queue: &ReadQueue) -> Result<Done, String> {
        if let Some(limit) = self.limit {
            pipeline.stored.limit.fetch_max(limit, Ordering::SeqCst);
            queue.set_max_in_flight(limit);
        }
        if let Some(budget) = self.budget {
            chunk_cache::set_budget(budget);
        }
        let num_records = pipeline.records.len() as u64;
        let positions = self.positions.iter().filter_map(|at| at.checked_rem(num_records));
        let positions: Vec<u64> = positions.collect();
        let len_of = |(&position, kind): (&u64, &u8)| {
            let len = pipeline.lens[usize::try_from(position).unwrap()];
            [None, Some(len), Some(len + 1)][usize::from(*kind)]
        };
        let lens = positions.iter().zip(self.slots.iter().cycle()).map(len_of).collect::<Vec<_>>();
        let (board, slots) = Board::with_slots(&lens);
        let read = Read { pipeline, queue, positions, board, lens };
        let is_told =
            read.run(self.mode, slots).map_err(|problem| format!("{:?}: {problem}", self.mode))?;
        Ok(Done { board: read.board, is_told })
    }
}

impl Read<'_> {
    /// Returns whether the engine will say when the read has ended.
    fn run(&self, mode: Mode, slots: Vec<Option<Slot>>) -> Result<bool, String> {
        let (files, queue) = (&self.pipeline.files, self.queue);
        let pending = match mode {
            Mode::Alone => {
                READS_ITSELF.set(true);
                let found = files.read(&self.positions);
                READS_ITSELF.set(false);
                return self.check(found, false).map(|()| false);
            }
            Mode::Unready => match self.start_unready(slots) {
                Ok((pending, into_slots)) => {
                    return self.finish(&pending, into_slots).map(|()| false);
                }
                Err(error) => Err(error),
            },
            _ => match open::plan(files, &self.positions) {
                Err(error) => Err(error),
                Ok(plan) if matches!(mode, Mode::Begun) => {
                    READS_ITSELF.set(true);
                    let begun = read::begin(plan, slots, queue);
                    READS_ITSELF.set(false);
                    match begun {
                        Ok(Reading::Done(records)) => {
                            return self.ended(Ok(records), true).map(|()| false);
                        }
                        Ok(Reading::Pending(pending)) => Ok(pending),
                        Err(error) => Err(error),
                    }
                }
                Ok(plan) => Ok(read::start(plan, slots, queue)),
            },
        };
        let pending = match pending {
            Ok(pending) => pending,
            Err(error) => return self.ended(Err(error), true).map(|()| false),
        };
        match mode {
            Mode::Abandoned(patience) => {
                yield_times(patience);
                self.abandon(&pending)
            }
            Mode::Dropped(patience) => {
                yield_times(patience);
                Ok(false)
            }
            Mode::Interrupted => self.interrupt(&pending).map(|()| false),
            _ => self.finish(&pending, true).map(|()| false),
        }
    }

    /// Starts without a plan if that has to be made first; returns whether records go into slots.
    fn start_unready(&self, slots: Vec<Option<Slot>>) -> Result<(Pending<Slot>, bool)> {
        let (files, queue) = (&self.pipeline.files, self.queue);
        let sorted = files.sort(&self.positions)?;
        Ok(match files.plan_if_indexed(&sorted)? {
            Ok(plan) => (read::start(plan, slots, queue), true),
            Err(unready) => (read::start_unready(files, sorted, unready, queue), false),
        })
    }

    fn finish(&self, pending: &Pending<Slot>, into_slots: bool) -> Result<(), String> {
        let found = pending.finish();
        if pending.is_running() {
            return Err("a read that has ended is running".to_owned());
        }
        self.ended(found, into_slots)
    }

    fn abandon(&self, pending: &Pending<Slot>) -> Result<bool, String> {
        let is_done = pending.abandon(|| {
            NUM_DONE.fetch_add(1, Ordering::SeqCst);
        });
        if !is_done && !wait_until(|| !pending.is_running()) {
            return Err("an abandoned read does not end".to_owned());
        }
        self.read_again(pending)?;
        Ok(!is_done)
    }

    /// Reads what was abandoned once more, and not into slots.
    fn read_again(&self, pending: &Pending<Slot>) -> Result<(), String> {
        self.close()?;
        READS_ITSELF.set(true);
        let found = pending.finish();
        READS_ITSELF.set(false);
        self.check(found, false)
    }

    fn interrupt(&self, pending: &Pending<Slot>) -> Result<(), String> {
        let ends_any_wait = || true;
        match interrupt::interruptible(ends_any_wait, || pending.finish()) {
            Err(Error::Interrupted) => {
                if !wait_until(|| !pending.is_running()) {
                    return Err("an interrupted read does not end".to_owned());
                }
                self.read_again(pending)
            }
            found => self.ended(found, true),
        }
    }

    /// Checks what was found, and that nothing is written any more.
    fn ended(&self, found: Result<Records>, into_slots: bool) -> Result<(), String> {
        self.close()?;
        self.check(found, into_slots)
    }

    fn close(&self) -> Result<(), String> {
        let is_free = self.board.close();
        is_free.then_some(()).ok_or_else(|| "a slot is in use after the read".to_owned())
    }

    fn check(&self, found: Result<Records>, into_slots: bool) -> Result<(), String> {
        let failing = self.first_failing();
        match (found, failing) {
            (Ok(records), None) => self.check_records(&records, into_slots),
            (Ok(_), Some((_, text))) => Err(format!("no error, but expected: {text}")),
            (Err(error), failing) => {
                let error = error.to_string();
                let is_expected = failing.is_some_and(|(_, text)| *text == error);
                if is_expected || self.may_fail(&error, failing.map(|(file, _)| file)) {
                    return Ok(());
                }
                Err(format!("{error}, but expected: {:?}", failing.map(|(_, text)| text)))
            }
        }
    }

    /// The file and the error of the record that decides: files are opened first.
    fn first_failing(&self) -> Option<(usize, &String)> {
        let mut sorted = self.positions.clone();
        sorted.sort_unstable();
        let found: Vec<_> = sorted.iter().map(|&position| self.pipeline.at(position)).collect();
        let failing = |&(file, record): &(usize, &'_ Result<Vec<u8>, String>)| {
            record.as_ref().err().map(|_| file)
        };
        let is_missing =
            |file: usize| matches!(self.pipeline.tested[file].drawn.fault, Fault::Missing);
        let missing = found.iter().find(|&found| failing(found).is_some_and(is_missing));
        let first = missing.or_else(|| found.iter().find(|&found| failing(found).is_some()));
        let &(file, record) = first?;
        record.as_ref().err().map(|text| (file, text))
    }

    /// Whether `error` is of a file of which one read fails, or every one, and not only those of what was
    /// asked for: empty units may be merged. No file before it has another error.
    fn may_fail(&self, error: &str, failing: Option<usize>) -> bool {
        self.positions.iter().map(|&position| self.pipeline.at(position).0).any(|number| {
            let file = &self.pipeline.tested[number];
            let text = match file.drawn.fault {
                Fault::Once(_) | Fault::Always => file.unreadable().to_string(),
                Fault::Forgets(_) => {
                    Error::Panicked("a thread that reads panicked".to_owned()).to_string()
                }
                _ => return false,
            };
            text == error && failing.is_none_or(|failing| number <= failing)
        })
    }

    fn check_records(&self, records: &Records, into_slots: bool) -> Result<(), String> {
        if records.len() != self.positions.len() {
            return Err(format!("{} of {} records", records.len(), self.positions.len()));
        }
        for (at, (&position, found)) in
            self.positions.iter().zip(records.iter_unslotted()).enumerate()
        {
            let Ok(record) = self.pipeline.at(position).1 else { continue };
            let slot_len = self.lens.get(at).copied().flatten().filter(|_| into_slots);
            let in_slot = self.board.bytes(at).filter(|_| into_slots);
            let is_right = match found {
                Some(bytes) => bytes == record && slot_len != Some(record.len()),
                None => in_slot.as_ref() == Some(record),
            };
            let is_kept = found.is_none()
                || in_slot.is_none_or(|bytes| bytes.iter().all(|&byte| byte == UNWRITTEN));
            if !is_right || !is_kept {
                return Err(format!("record {position} at {at} is another one"));
            }
        }
        Ok(())
    }
}

fn yield_times(count: usize) {
    (0..count).for_each(|_| std::thread::yield_now());
}
