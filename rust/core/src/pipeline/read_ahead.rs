//! Records read by the engine's threads, at once or while the caller does something else.

use std::any::Any;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use super::pool;
use super::read_queue::{Parts, ReadQueue};
use crate::records::storage_latency;
use crate::records::{Files, Outcome, Plan, Records, Scratch, Sorted, Unit, UnitRecords};
use crate::{Error, Result, process};

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Reads the records of `plan`, in the order asked for, into `slots` where those fit: in the
/// caller as long as that is little and storage near. `slots` is empty or has one for each record.
///
/// # Errors
/// If a file cannot be read or is damaged; of several errors, the one of the first file and chunk.
pub fn read<S>(plan: Plan, slots: Vec<Option<S>>, queue: &ReadQueue) -> Result<Records>
where
    S: AsMut<[MaybeUninit<u8>]> + Send + 'static,
{
    if plan.is_far() || plan.is_large() {
        return start(plan, slots, queue).finish();
    }
    let Outcome { records, rest } = read_unit(&plan, plan.whole(slots), true)?;
    match rest {
        None => Ok(plan.gather(vec![records])),
        Some(rest) => Pending::begin(plan, rest, vec![records], queue).finish(),
    }
}

/// Begins to read the records of `plan` on the engine's threads.
pub fn start<S>(plan: Plan, slots: Vec<Option<S>>, queue: &ReadQueue) -> Pending<S>
where
    S: AsMut<[MaybeUninit<u8>]> + Send + 'static,
{
    let whole = plan.whole(slots);
    Pending::begin(plan, whole, Vec::new(), queue)
}

/// Begins to read `sorted`, for which `unready` files have to be made ready before it can be
/// planned: that is done at the same time, too.
pub fn start_unready<S>(
    files: &Arc<Files>,
    sorted: Sorted,
    unready: Vec<usize>,
    queue: &ReadQueue,
) -> Pending<S>
where
    S: AsMut<[MaybeUninit<u8>]> + Send + 'static,
{
    let num_unready = unready.len();
    let unplanned = Unplanned { files: Arc::clone(files), sorted, num_left: num_unready.into() };
    let job = Job::new(Some(unplanned), Vec::new(), queue);
    job.add(unready.into_iter().map(ReadTask::Prepare));
    Pending { job, owner: process::id() }
}

fn read_unit<S: AsMut<[MaybeUninit<u8>]>>(
    plan: &Plan,
    unit: Unit<S>,
    may_stop: bool,
) -> Result<Outcome<S>> {
    SCRATCH.with_borrow_mut(|scratch| plan.read(unit, scratch, may_stop))
}

/// Records that are being read. Dropping it abandons what has not been read yet.
#[derive(Debug)]
pub struct Pending<S> {
    job: Arc<Job<S>>,
    /// The process that began it; threads do not follow into a forked child.
    owner: u32,
}

#[derive(Debug)]
struct Job<S> {
    /// What the plan is made of, where there was none in the beginning.
    unplanned: Option<Unplanned>,
    plan: OnceLock<Plan>,
    todo: Mutex<Todo<S>>,
    queue: ReadQueue,
    abandoned: AtomicBool,
    progress: Mutex<Progress>,
    finished: Condvar,
}

#[derive(Debug)]
struct Unplanned {
    files: Arc<Files>,
    sorted: Sorted,
    /// How many files are not ready yet.
    num_left: AtomicUsize,
}

#[derive(Debug)]
struct Todo<S> {
    tasks: VecDeque<ReadTask<S>>,
    /// How many turns in the queue this has been given and not had yet.
    num_turns: usize,
}

#[derive(Debug)]
enum ReadTask<S> {
    /// Make a file ready.
    Prepare(usize),
    /// Read some of the plan.
    Read(Unit<S>),
}

#[derive(Debug)]
struct Progress {
    units: Vec<UnitRecords>,
    /// Tasks that have not been finished.
    num_left: usize,
    /// The error of the lowest file and chunk, so that the number of threads does not show.
    first_error: Option<(usize, Error)>,
}

impl<S: AsMut<[MaybeUninit<u8>]> + Send + 'static> Job<S> {
    fn new(unplanned: Option<Unplanned>, units: Vec<UnitRecords>, queue: &ReadQueue) -> Arc<Self> {
        Arc::new(Self {
            unplanned,
            plan: OnceLock::new(),
            todo: Mutex::new(Todo { tasks: VecDeque::new(), num_turns: 0 }),
            queue: queue.clone(),
            abandoned: AtomicBool::new(false),
            progress: Mutex::new(Progress { units, num_left: 0, first_error: None }),
            finished: Condvar::new(),
        })
    }

    /// Has `tasks` done.
    fn add(self: &Arc<Self>, tasks: impl ExactSizeIterator<Item = ReadTask<S>>) {
        lock(&self.progress).num_left += tasks.len();
        lock(&self.todo).tasks.extend(tasks);
        self.queue_up();
    }

    /// Has a unit read.
    fn add_unit(self: &Arc<Self>, plan: &Plan, unit: Unit<S>) {
        self.add(plan.units(unit).into_iter().map(ReadTask::Read));
    }

    /// Sees to it that there are as many turns in the queue as threads are worth having: one for
    /// each task where those wait, as they do if storage is far or files are not ready yet.
    fn queue_up(self: &Arc<Self>) {
        let most = if self.waits() { usize::MAX } else { pool::max_busy() };
        let mut todo = lock(&self.todo);
        let more = todo.tasks.len().min(most).saturating_sub(todo.num_turns);
        todo.num_turns += more;
        drop(todo);
        self.queue.submit(Arc::clone(self) as Arc<dyn Parts>, more);
    }

    fn waits(&self) -> bool {
        self.plan.get().is_none_or(Plan::is_far)
    }
}

impl<S: AsMut<[MaybeUninit<u8>]> + Send + 'static> Pending<S> {
    fn begin(plan: Plan, unit: Unit<S>, units: Vec<UnitRecords>, queue: &ReadQueue) -> Self {
        let job = Job::new(None, units, queue);
        job.add_unit(job.plan.get_or_init(|| plan), unit);
        Self { job, owner: process::id() }
    }
}

impl<S: AsMut<[MaybeUninit<u8>]> + Send + 'static> Parts for Job<S> {
    fn do_next(self: Arc<Self>) {
        lock(&self.todo).num_turns -= 1;
        // Where storage is near there are fewer turns than units; where it is far, each has its own,
        // and those that were near in the beginning are given theirs.
        while self.do_one() {
            if self.waits() {
                self.queue_up();
                return;
            }
        }
    }
}

impl<S: AsMut<[MaybeUninit<u8>]> + Send + 'static> Job<S> {
    /// Does a task that nobody has begun; says whether there was one.
    fn do_one(self: &Arc<Self>) -> bool {
        let Some(task) = lock(&self.todo).tasks.pop_front() else { return false };
        if self.abandoned.load(Ordering::Relaxed) {
            let left = std::mem::take(&mut lock(&self.todo).tasks);
            let error = Error::Panicked("reading was abandoned".to_owned());
            self.note(1 + left.len(), Err((0, error)));
            return true;
        }
        let first = match (&task, self.plan.get()) {
            (ReadTask::Read(unit), Some(plan)) => plan.first_pick(unit),
            (&ReadTask::Prepare(file), _) => file,
            _ => 0,
        };
        let result = catch_unwind(AssertUnwindSafe(|| self.result_of(task)))
            .unwrap_or_else(|payload| Err(Error::Panicked(text_of(payload.as_ref()))));
        self.note(1, result.map_err(|error| (first, error)));
        true
    }

    fn result_of(self: &Arc<Self>, task: ReadTask<S>) -> Result<Option<UnitRecords>> {
        match (task, self.plan.get(), &self.unplanned) {
            (ReadTask::Read(unit), Some(plan), _) => {
                let Outcome { records, rest } = read_unit(plan, unit, true)?;
                if let Some(rest) = rest {
                    self.add_unit(plan, rest);
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
                    self.add_unit(plan, plan.whole(Vec::new()));
                }
                Ok(None)
            }
            _ => unreachable!("a unit has a plan, and a file to be made ready is of none yet"),
        }
    }

    /// Takes note of what came of `count` tasks.
    fn note(&self, count: usize, result: Result<Option<UnitRecords>, (usize, Error)>) {
        let mut progress = lock(&self.progress);
        progress.num_left -= count;
        match result {
            Ok(records) => progress.units.extend(records),
            Err((first, error)) => {
                if progress.first_error.as_ref().is_none_or(|&(earlier, _)| first < earlier) {
                    progress.first_error = Some((first, error));
                }
            }
        }
        let is_done = progress.num_left == 0;
        drop(progress);
        if is_done {
            self.finished.notify_all();
        }
    }

    fn wait(&self) -> MutexGuard<'_, Progress> {
        let progress = lock(&self.progress);
        self.finished
            .wait_while(progress, |progress| progress.num_left > 0)
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: AsMut<[MaybeUninit<u8>]> + Send + 'static> Pending<S> {
    /// Waits for the records; this thread helps to read what nobody has begun.
    ///
    /// After a fork, in the child, everything is read anew and into no slot.
    ///
    /// # Errors
    /// If a file cannot be read or is damaged.
    ///
    /// # Panics
    /// If what was read has not been planned, which is a defect.
    pub fn finish(&self) -> Result<Records> {
        let job = &self.job;
        if self.owner != process::id() {
            return self.read_anew();
        }
        if job.queue.enter() {
            while job.do_one() {
                if job.waits() {
                    job.queue_up();
                }
            }
            job.queue.leave();
        }
        let began = Instant::now();
        let mut progress = job.wait();
        if let Some((_, error)) = progress.first_error.take() {
            return Err(error);
        }
        let units = std::mem::take(&mut progress.units);
        drop(progress);
        let plan = job.plan.get().expect("what was read has been planned");
        if plan.is_far() {
            storage_latency::add_waited(began.elapsed());
        }
        Ok(plan.gather(units))
    }

    fn read_anew(&self) -> Result<Records> {
        let plan = match (self.job.plan.get(), &self.job.unplanned) {
            (Some(plan), _) => plan.anew(),
            (None, Some(unplanned)) => unplanned.files.plan_sorted(&unplanned.sorted)?,
            (None, None) => unreachable!("either a plan or what it is made of is there"),
        };
        read::<S>(plan, Vec::new(), &self.job.queue)
    }

    /// Whether threads may still write into slots.
    pub fn is_running(&self) -> bool {
        self.owner == process::id() && lock(&self.job.progress).num_left > 0
    }

    /// Leaves out whatever has not been begun.
    pub fn abandon(&self) {
        self.job.abandoned.store(true, Ordering::Relaxed);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn text_of(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("a panic without a message")
        .to_owned()
}
