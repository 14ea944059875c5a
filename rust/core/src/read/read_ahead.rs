//! Reading records on the engine's threads, synchronously or in the background.

use std::any::Any;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::{Files, Outcome, Plan, PlanSpan, Records, Scratch, SortedPositions, SpanRecords};
use crate::interrupt::{self, Cancellation};
use crate::io::storage::WhenRead;
use crate::io::{Job, Permit, ReadQueue, StorageLimit, storage_latency};
use crate::lock::lock;
use crate::{Error, Result, compute, process};

/// How often a thread that waits for records looks for tasks that it can run itself.
const HELP_INTERVAL: Duration = Duration::from_millis(50);

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Reads the records of `plan`, in the order requested, into `slots` where they fit: on the calling
/// thread if the plan is small and storage is fast. `slots` is empty or has one entry per record.
///
/// # Errors
/// If a file cannot be read or is damaged; of several errors, that of the first file and chunk.
pub fn read<S>(plan: Plan, slots: Vec<Option<S>>, queue: &ReadQueue) -> Result<Records>
where
    S: AsMut<[MaybeUninit<u8>]> + Send + 'static,
{
    match begin(plan, slots, queue)? {
        Reading::Done(records) => Ok(records),
        Reading::Pending(pending) => pending.finish(),
    }
}

/// Records that were read, or are being read.
#[derive(Debug)]
pub enum Reading<S> {
    /// They have been read.
    Done(Records),
    /// Threads of the engine read them.
    Pending(Pending<S>),
}

/// As [`read`], for a caller whose slots must outlive the threads that write into them, also after a
/// wait that was interrupted: what these threads read is left to the caller to wait for.
///
/// # Errors
/// Those of [`read`].
pub fn begin<S>(plan: Plan, slots: Vec<Option<S>>, queue: &ReadQueue) -> Result<Reading<S>>
where
    S: AsMut<[MaybeUninit<u8>]> + Send + 'static,
{
    if plan.is_slow() || plan.is_large() {
        return Ok(Reading::Pending(start(plan, slots, queue)));
    }
    let spans = plan.shares(plan.whole(slots));
    let (mut records, mut rest) = (Vec::with_capacity(spans.len()), Vec::new());
    let mut first_error = None;
    let read = |span| {
        let first = plan.first_pick(&span);
        read_span(&plan, span, true).map_err(|error| (first, error))
    };
    for outcome in compute::map(spans, read) {
        match outcome {
            Ok(outcome) => {
                records.push(outcome.records);
                rest.extend(outcome.rest);
            }
            Err(failed) => keep_first(&mut first_error, failed),
        }
    }
    if let Some((first, _)) = first_error {
        // What comes before it is still read, as it may fail, too.
        rest.retain(|span| plan.first_pick(span) < first);
    }
    match first_error {
        Some((_, error)) if rest.is_empty() => Err(error),
        None if rest.is_empty() => Ok(Reading::Done(plan.gather(records))),
        _ => Ok(Reading::Pending(Pending::start(plan, rest, records, first_error, queue))),
    }
}

/// Starts reading the records of `plan` on the engine's threads.
pub fn start<S>(plan: Plan, slots: Vec<Option<S>>, queue: &ReadQueue) -> Pending<S>
where
    S: AsMut<[MaybeUninit<u8>]> + Send + 'static,
{
    let whole = plan.whole(slots);
    Pending::start(plan, vec![whole], Vec::new(), None, queue)
}

/// Starts reading `sorted`, which cannot be planned before `unready` files are prepared: that runs in
/// parallel, too.
pub fn start_unready<S>(
    files: &Arc<Files>,
    sorted: SortedPositions,
    unready: Vec<usize>,
    queue: &ReadQueue,
) -> Pending<S>
where
    S: AsMut<[MaybeUninit<u8>]> + Send + 'static,
{
    let num_unready = unready.len();
    let unplanned = Unplanned { files: Arc::clone(files), sorted, num_left: num_unready.into() };
    let job = ReadJob::new(Some(unplanned), Vec::new(), queue);
    job.add(unready.into_iter().map(ReadTask::Prepare));
    Pending { job, owner: process::id() }
}

fn read_span<S: AsMut<[MaybeUninit<u8>]>>(
    plan: &Plan,
    span: PlanSpan<S>,
    may_stop: bool,
) -> Result<Outcome<S>> {
    SCRATCH.with_borrow_mut(|scratch| plan.read(span, scratch, may_stop))
}

/// Records that are being read. Dropping it [abandons](Self::abandon) what has not started.
#[derive(Debug)]
pub struct Pending<S> {
    job: Arc<ReadJob<S>>,
    /// The process that started it; threads do not survive a fork in the child.
    owner: u32,
}

#[derive(Debug)]
struct ReadJob<S> {
    /// The inputs of the plan, if there was none at the start.
    unplanned: Option<Unplanned>,
    plan: OnceLock<Plan>,
    todo: Mutex<Todo<S>>,
    queue: ReadQueue,
    /// Ends what is in flight when the read is abandoned.
    cancellation: Arc<Cancellation>,
    progress: Mutex<Progress>,
    finished: Condvar,
}

#[derive(Debug)]
struct Unplanned {
    files: Arc<Files>,
    sorted: SortedPositions,
    /// The number of files that are not prepared yet.
    num_left: AtomicUsize,
}

#[derive(Debug)]
struct Todo<S> {
    tasks: VecDeque<ReadTask<S>>,
    /// Calls of `run_next` that are queued and have not happened yet.
    num_queued: usize,
}

#[derive(Debug)]
enum ReadTask<S> {
    /// Prepare a file.
    Prepare(usize),
    /// Read a part of the plan.
    Read(PlanSpan<S>),
}

#[derive(Debug)]
struct Progress {
    spans: Vec<SpanRecords>,
    /// Tasks that have not finished.
    num_left: usize,
    /// The error of the lowest file and chunk, so that it does not depend on the number of threads.
    first_error: Option<(usize, Error)>,
    /// Called once nothing runs any more, if the read was abandoned.
    when_done: Option<fn()>,
}

impl<S: AsMut<[MaybeUninit<u8>]> + Send + 'static> ReadJob<S> {
    fn new(unplanned: Option<Unplanned>, spans: Vec<SpanRecords>, queue: &ReadQueue) -> Arc<Self> {
        Arc::new(Self {
            unplanned,
            plan: OnceLock::new(),
            todo: Mutex::new(Todo { tasks: VecDeque::new(), num_queued: 0 }),
            queue: queue.clone(),
            cancellation: Arc::default(),
            progress: Mutex::new(Progress {
                spans,
                num_left: 0,
                first_error: None,
                when_done: None,
            }),
            finished: Condvar::new(),
        })
    }

    /// Adds `tasks` and submits them.
    fn add(self: &Arc<Self>, tasks: impl ExactSizeIterator<Item = ReadTask<S>>) {
        lock(&self.progress).num_left += tasks.len();
        lock(&self.todo).tasks.extend(tasks);
        self.submit();
    }

    /// Adds the tasks that read a span.
    fn add_span(self: &Arc<Self>, plan: &Plan, span: PlanSpan<S>) {
        self.add(plan.spans(span).into_iter().map(ReadTask::Read));
    }

    /// Queues as many calls of `run_next` as threads are worth using: one per task where tasks mostly
    /// wait, since storage is slow or files are not prepared yet.
    fn submit(self: &Arc<Self>) {
        let max_threads = if self.is_io_bound() { usize::MAX } else { compute::max_threads() };
        let mut todo = lock(&self.todo);
        let more = todo.tasks.len().min(max_threads).saturating_sub(todo.num_queued);
        todo.num_queued += more;
        drop(todo);
        self.queue.submit(Arc::clone(self) as Arc<dyn Job>, more);
    }

    fn is_io_bound(&self) -> bool {
        self.plan.get().is_none_or(Plan::is_slow)
    }
}

impl<S: AsMut<[MaybeUninit<u8>]> + Send + 'static> Pending<S> {
    fn start(
        plan: Plan,
        todo: Vec<PlanSpan<S>>,
        spans: Vec<SpanRecords>,
        first_error: Option<(usize, Error)>,
        queue: &ReadQueue,
    ) -> Self {
        let job = ReadJob::new(None, spans, queue);
        lock(&job.progress).first_error = first_error;
        let plan = job.plan.get_or_init(|| plan);
        for span in todo {
            job.add_span(plan, span);
        }
        Self { job, owner: process::id() }
    }
}

impl<S: AsMut<[MaybeUninit<u8>]> + Send + 'static> Job for ReadJob<S> {
    fn start_next(self: Arc<Self>, permit: Permit) -> Option<Permit> {
        let permit = self.start_task(permit);
        if permit.is_none() {
            lock(&self.todo).num_queued -= 1;
        }
        permit
    }

    fn storage(&self) -> Option<Arc<StorageLimit>> {
        match (lock(&self.todo).tasks.front()?, self.plan.get(), &self.unplanned) {
            (ReadTask::Read(span), Some(plan), _) => plan.latency_of(span).limit(),
            (&ReadTask::Prepare(file), _, Some(unplanned)) => unplanned.files.limit(file),
            _ => None,
        }
    }

    fn run_next(self: Arc<Self>) {
        lock(&self.todo).num_queued -= 1;
        // On fast storage one call runs many tasks; on slow storage it runs one, and where storage
        // turns out to be slow, calls are queued for the remaining tasks.
        while self.run_task() {
            if self.is_io_bound() {
                self.submit();
                return;
            }
        }
    }
}

impl<S: AsMut<[MaybeUninit<u8>]> + Send + 'static> ReadJob<S> {
    /// Runs a task that has not started; returns whether there was one.
    fn run_task(self: &Arc<Self>) -> bool {
        let Some(task) = lock(&self.todo).tasks.pop_front() else { return false };
        if self.is_abandoned() {
            let left = std::mem::take(&mut lock(&self.todo).tasks);
            self.record(1 + left.len(), Err((0, was_abandoned())));
            return true;
        }
        let first = match (&task, self.plan.get()) {
            (ReadTask::Read(span), Some(plan)) => plan.first_pick(span),
            (&ReadTask::Prepare(file), _) => file,
            _ => 0,
        };
        let result = self.cancellation.run(|| catching_panics(|| self.result_of(task)));
        self.record(1, result.map_err(|error| (first, error)));
        true
    }

    /// Starts a task that has not started without waiting, if the storage permits; else returns
    /// `permit`.
    fn start_task(self: &Arc<Self>, permit: Permit) -> Option<Permit> {
        let Some(plan) = self.plan.get() else { return Some(permit) };
        if self.is_abandoned() {
            return Some(permit);
        }
        let mut todo = lock(&self.todo);
        let Some(ReadTask::Read(span)) = todo.tasks.front() else { return Some(permit) };
        if !plan.latency_of(span).is_slow() {
            return Some(permit);
        }
        // After a panic, a thread that reads reports it.
        let request = catch_unwind(AssertUnwindSafe(|| plan.request(span)));
        let Some((extent, request)) = request.ok().flatten() else { return Some(permit) };
        let Some(ReadTask::Read(span)) = todo.tasks.pop_front() else { return Some(permit) };
        drop(todo);
        let first = plan.first_pick(&span);
        let requested =
            Requested { job: Arc::clone(self), span: Some(span), first, _permit: permit };
        let started = Instant::now();
        let take: WhenRead =
            Box::new(move |bytes| requested.take(&extent, started.elapsed(), bytes));
        // After a panic, `requested` is dropped, which reports it.
        let _ = self.cancellation.run(|| catch_unwind(AssertUnwindSafe(|| request.send(take))));
        None
    }

    fn result_of(self: &Arc<Self>, task: ReadTask<S>) -> Result<Option<SpanRecords>> {
        match (task, self.plan.get(), &self.unplanned) {
            (ReadTask::Read(span), Some(plan), _) => {
                let Outcome { records, rest } = read_span(plan, span, true)?;
                if let Some(rest) = rest {
                    self.add_span(plan, rest);
                }
                Ok(Some(records))
            }
            (ReadTask::Prepare(file), _, Some(Unplanned { files, sorted, num_left })) => {
                let prepared = files.prepare(file);
                let is_last = num_left.fetch_sub(1, Ordering::AcqRel) == 1;
                prepared?;
                if is_last && lock(&self.progress).first_error.is_none() {
                    let plan = files.plan_sorted(sorted)?;
                    let plan = self.plan.get_or_init(|| plan);
                    self.add_span(plan, plan.whole(Vec::new()));
                }
                Ok(None)
            }
            _ => unreachable!("a span has a plan, and a file is only prepared before there is one"),
        }
    }

    /// Records the result of `count` tasks.
    fn record(&self, count: usize, result: Result<Option<SpanRecords>, (usize, Error)>) {
        let mut progress = lock(&self.progress);
        progress.num_left -= count;
        match result {
            Ok(_) if self.is_abandoned() => {}
            Ok(records) => progress.spans.extend(records),
            Err(failed) => keep_first(&mut progress.first_error, failed),
        }
        let is_done = progress.num_left == 0;
        let when_done = if is_done { progress.when_done.take() } else { None };
        drop(progress);
        if is_done {
            self.finished.notify_all();
        }
        if let Some(when_done) = when_done {
            when_done();
        }
    }

    fn is_abandoned(&self) -> bool {
        self.cancellation.is_cancelled()
    }

    /// Waits until all tasks have finished, for at most `max_wait`; returns whether they have.
    fn wait(&self, max_wait: Duration) -> bool {
        let progress = lock(&self.progress);
        let is_left = |progress: &mut Progress| progress.num_left > 0;
        let waited = self.finished.wait_timeout_while(progress, max_wait, is_left);
        waited.unwrap_or_else(PoisonError::into_inner).0.num_left == 0
    }

    /// Runs tasks that have not started, as far as the queue allows.
    fn help(self: &Arc<Self>) {
        let enter = || self.queue.in_storage(self.storage()).enter();
        let mut held = enter();
        while let Some(permit) = held {
            let Some(permit) = self.start_task(permit) else {
                held = enter();
                continue;
            };
            if !self.run_task() {
                break;
            }
            if self.is_io_bound() {
                self.submit();
            }
            held = Some(permit).filter(|permit| !permit.is_spare());
        }
    }
}

/// A task whose bytes have been requested. Its permit is free again when it is dropped.
struct Requested<S: AsMut<[MaybeUninit<u8>]> + Send + 'static> {
    job: Arc<ReadJob<S>>,
    /// What is read, until it is done.
    span: Option<PlanSpan<S>>,
    first: usize,
    _permit: Permit,
}

impl<S: AsMut<[MaybeUninit<u8>]> + Send + 'static> Requested<S> {
    /// Takes the records out of the bytes of `extent`, which took `elapsed` to arrive.
    fn take(mut self, extent: &Range<u64>, elapsed: Duration, bytes: Result<&[&[u8]]>) {
        let (Some(span), Some(plan)) = (self.span.take(), self.job.plan.get()) else { return };
        let len = usize::try_from(extent.end - extent.start).unwrap_or(usize::MAX);
        plan.latency_of(&span).add(elapsed, len);
        let records = bytes.and_then(|pieces| {
            if self.job.is_abandoned() {
                return Err(was_abandoned());
            }
            let read = || {
                SCRATCH
                    .with_borrow_mut(|scratch| plan.read_part(span, extent.start, pieces, scratch))
            };
            catching_panics(read)
        });
        self.job.record(1, records.map(Some).map_err(|error| (self.first, error)));
    }
}

impl<S: AsMut<[MaybeUninit<u8>]> + Send + 'static> Drop for Requested<S> {
    fn drop(&mut self) {
        // The storage has dropped it: somebody waits all the same.
        if self.span.take().is_some() {
            let error = Error::Panicked("a thread that reads panicked".to_owned());
            self.job.record(1, Err((self.first, error)));
        }
    }
}

impl<S: AsMut<[MaybeUninit<u8>]> + Send + 'static> Pending<S> {
    /// Waits for the records; this thread runs tasks that have not started.
    ///
    /// In a forked child, and after a wait that was interrupted, everything is read again, and not into
    /// slots.
    ///
    /// # Errors
    /// If a file cannot be read or is damaged, or the wait is interrupted.
    ///
    /// # Panics
    /// If all tasks have finished without a plan, which is a defect.
    pub fn finish(&self) -> Result<Records> {
        if self.owner != process::id() || self.job.is_abandoned() {
            return self.read_again();
        }
        let result = self.wait();
        if matches!(result, Err(Error::Interrupted)) {
            self.abandon(|| ());
        }
        result
    }

    fn wait(&self) -> Result<Records> {
        let job = &self.job;
        job.help();
        let started = Instant::now();
        interrupt::wait(|interval| {
            let is_done = job.wait(interval.min(HELP_INTERVAL));
            if !is_done {
                job.help(); // all threads of the engine may wait for something else
            }
            is_done.then_some(())
        })?;
        let mut progress = lock(&job.progress);
        if let Some((_, error)) = progress.first_error.take() {
            return Err(error);
        }
        let spans = std::mem::take(&mut progress.spans);
        drop(progress);
        let plan = job.plan.get().expect("the tasks that have finished have a plan");
        if plan.is_slow() {
            storage_latency::add_waited(started.elapsed());
        }
        Ok(plan.gather(spans))
    }

    fn read_again(&self) -> Result<Records> {
        let plan = match (self.job.plan.get(), &self.job.unplanned) {
            (Some(plan), _) => plan.anew(),
            (None, Some(unplanned)) => unplanned.files.plan_sorted(&unplanned.sorted)?,
            (None, None) => unreachable!("there is a plan or the inputs of one"),
        };
        read::<S>(plan, Vec::new(), &self.job.queue)
    }
}

impl<S> Pending<S> {
    /// Whether threads may still write into slots.
    pub fn is_running(&self) -> bool {
        self.owner == process::id() && lock(&self.job.progress).num_left > 0
    }

    /// Whether the records have to be read again.
    pub fn is_abandoned(&self) -> bool {
        self.job.cancellation.is_cancelled()
    }

    /// Skips the tasks that have not started, and frees what was read. Threads may still write into
    /// slots if this returns false; `when_done` is then called once they do no more, on any thread.
    pub fn abandon(&self, when_done: fn()) -> bool {
        if self.owner != process::id() {
            return true;
        }
        let job = &self.job;
        job.cancellation.cancel();
        let skipped = std::mem::take(&mut lock(&job.todo).tasks);
        let mut progress = lock(&job.progress);
        progress.num_left -= skipped.len();
        progress.first_error.get_or_insert_with(|| (0, was_abandoned()));
        let spans = std::mem::take(&mut progress.spans);
        let is_done = progress.num_left == 0;
        progress.when_done = Some(when_done).filter(|_| !is_done);
        drop(progress);
        drop((skipped, spans));
        is_done
    }
}

impl<S> Drop for Pending<S> {
    fn drop(&mut self) {
        self.abandon(|| ());
    }
}

/// Keeps, of two errors with the number of a pick each, that of the lower one.
fn keep_first(first: &mut Option<(usize, Error)>, other: (usize, Error)) {
    if first.as_ref().is_none_or(|(at, _)| other.0 < *at) {
        *first = Some(other);
    }
}

fn was_abandoned() -> Error {
    Error::Panicked("reading was abandoned".to_owned())
}

fn catching_panics<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|payload| Err(Error::Panicked(text_of(payload.as_ref()))))
}

fn text_of(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("a panic without a message")
        .to_owned()
}
