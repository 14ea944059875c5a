//! One schedule for the reads of a process, with limits on how many are in flight.
//!
//! Each pipeline has a queue of a limit of its own, each storage has one, and both are within that of the
//! process. The queue with the fewest reads in flight is the next, in a queue its owners take turns, and the reads
//! of an owner start in the order in which they were submitted, which is that in which they are needed; those whose
//! storage has no place are passed by.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::pool;
use crate::process::PerProcess;
use crate::sync::Mutex;

/// The default maximum of reads in flight of a queue. At 20 ms a read these are 6,400 reads per second; more
/// gain little and may overload the storage service.
pub const DEFAULT_IN_FLIGHT: usize = 128;
/// That of a process, unless a queue may have more: each is a thread or a connection, of which systems allow
/// a thousand by default. Two storages may have all their reads in flight, and there is room for others.
pub const DEFAULT_OF_PROCESS: usize = 512;
/// That of a storage, unless a queue may have more, as of two pipelines: if it does not answer, its reads take
/// no more places of the process.
const DEFAULT_OF_STORAGE: usize = 224;
/// Of a queue that has no limit but that of the process.
const NO_LIMIT: usize = usize::MAX;

static MAX_OF_PROCESS: AtomicUsize = AtomicUsize::new(DEFAULT_OF_PROCESS);
/// A forked child starts with nothing in flight.
static SCHEDULE: PerProcess<Mutex<Schedule>> = PerProcess::new(Default::default);

/// A job whose tasks any thread can run.
pub trait Job: Send + Sync {
    /// Runs the next task, unless all have started.
    fn run_next(self: Arc<Self>);

    /// The limit of the storage that the next task reads from; called with the schedule locked.
    fn storage(&self) -> Option<Arc<StorageLimit>> {
        None
    }

    /// Starts the next task without waiting, if it is a read that needs no thread: it keeps `permit`
    /// until it has ended. Else returns that.
    fn start_next(self: Arc<Self>, permit: Permit) -> Option<Permit> {
        Some(permit)
    }
}

/// Counts as one read in flight. When it is dropped, the next one that waits starts, on another thread:
/// this may be one of the storage, for which the read would wait.
#[derive(Debug)]
pub struct Permit(Option<ReadQueue>);

impl Permit {
    /// Whether more reads are in flight than are allowed by now.
    pub(crate) fn is_spare(&self) -> bool {
        self.0.as_ref().is_some_and(|queue| {
            let mut schedule = SCHEDULE.lock();
            let load = schedule.load_of(queue);
            load.in_flight > load.max() || !schedule.has_place(queue.storage.as_ref(), 0)
        })
    }

    /// Counts no more, and starts nothing.
    fn end(mut self) {
        if let Some(queue) = self.0.take() {
            SCHEDULE.lock().end(&queue);
        }
    }

    /// Ends, and leaves the task of `job`, which was taken for it, to be the next one again.
    fn give_back(mut self, job: Arc<dyn Job>) {
        if let Some(queue) = self.0.take() {
            let mut schedule = SCHEDULE.lock();
            let jobs = [(job, 1)].into();
            schedule.load_of(&queue).waiting.push_front(Waiting { owner: queue.owner, jobs });
            schedule.end(&queue);
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(queue) = self.0.take() {
            SCHEDULE.lock().end(&queue);
            start_waiting(false);
        }
    }
}

/// A queue of reads. Its owners take turns, so that none waits for all that another has queued; the reads
/// of each start in the order in which they were submitted.
#[derive(Debug, Clone)]
pub struct ReadQueue {
    /// Which queue it is, and its limit.
    max_in_flight: Arc<AtomicUsize>,
    owner: u64,
    /// Of those who enter.
    storage: Option<Arc<StorageLimit>>,
}

/// How many reads of a storage may be in flight.
#[derive(Debug, Default)]
pub struct StorageLimit {
    /// 0 if it has no number of its own.
    max_in_flight: AtomicUsize,
}

impl StorageLimit {
    /// So many, at least one; `None` leaves it to the limit of the process.
    pub fn new(max_in_flight: Option<usize>) -> Self {
        let number = max_in_flight.map_or(0, |number| number.max(1));
        Self { max_in_flight: number.into() }
    }

    /// Sets the number, as [`new`](Self::new): waiting reads start if it permits, and while more are in
    /// flight, none does.
    pub fn set(&self, max_in_flight: Option<usize>) {
        let Self { max_in_flight } = Self::new(max_in_flight);
        self.max_in_flight.store(max_in_flight.into_inner(), Ordering::Relaxed);
        start_waiting(true);
    }
}

/// The reads of a process.
#[derive(Default)]
struct Schedule {
    in_flight: usize,
    /// Of each storage of which reads are in flight, how many.
    storages: Vec<(Arc<StorageLimit>, usize)>,
    /// Of each queue of which reads wait or are in flight, the next one first.
    loads: VecDeque<Load>,
}

/// The reads of a queue.
struct Load {
    max_in_flight: Arc<AtomicUsize>,
    in_flight: usize,
    /// Those who wait, the next one first.
    waiting: VecDeque<Waiting>,
}

/// What waits of one owner.
struct Waiting {
    owner: u64,
    /// Jobs with the number of `run_next` calls that are queued for each.
    jobs: VecDeque<(Arc<dyn Job>, usize)>,
}

/// Numbers of an owner and a job that wait, and the storage of its next task.
type Next = (usize, usize, Option<Arc<StorageLimit>>);

impl Load {
    fn max(&self) -> usize {
        self.max_in_flight.load(Ordering::Relaxed)
    }

    fn has_room(&self) -> bool {
        self.in_flight < self.max()
    }

    /// Which owner and which of its jobs is the next one whose storage `has_place`, and that storage.
    fn next(&self, has_place: impl Fn(Option<&Arc<StorageLimit>>) -> bool) -> Option<Next> {
        let owners = self.waiting.iter().enumerate();
        let mut jobs = owners.flat_map(|(owner, of)| {
            of.jobs.iter().enumerate().map(move |(job, waiting)| (owner, job, &waiting.0))
        });
        jobs.find_map(|(owner, job, waiting)| {
            let storage = waiting.storage();
            has_place(storage.as_ref()).then_some((owner, job, storage))
        })
    }

    /// Takes a task of job number `job` of owner number `owner` of those that wait.
    fn take(&mut self, owner: usize, job: usize) -> Option<(u64, Arc<dyn Job>)> {
        let mut of = self.waiting.remove(owner)?;
        let number = of.owner;
        let task = match of.jobs.get_mut(job) {
            Some((waiting, count)) if *count > 1 => {
                *count -= 1;
                Arc::clone(waiting)
            }
            _ => of.jobs.remove(job)?.0,
        };
        if !of.jobs.is_empty() {
            self.waiting.push_back(of);
        }
        Some((number, task))
    }
}

impl Schedule {
    fn load_of(&mut self, queue: &ReadQueue) -> &mut Load {
        let is_of = |load: &Load| Arc::ptr_eq(&load.max_in_flight, &queue.max_in_flight);
        let at = self.loads.iter().position(is_of).unwrap_or_else(|| {
            let max_in_flight = Arc::clone(&queue.max_in_flight);
            self.loads.push_back(Load { max_in_flight, in_flight: 0, waiting: VecDeque::new() });
            self.loads.len() - 1
        });
        &mut self.loads[at]
    }

    /// The largest limit of a queue that has one.
    fn max_of_queues(&self) -> usize {
        let of_queues = self.loads.iter().map(Load::max).filter(|&max| max < NO_LIMIT).max();
        of_queues.unwrap_or(0)
    }

    fn has_room(&self) -> bool {
        self.in_flight < MAX_OF_PROCESS.load(Ordering::Relaxed).max(self.max_of_queues())
    }

    /// Whether so many `more` reads of `storage` may be in flight.
    fn has_place(&self, storage: Option<&Arc<StorageLimit>>, more: usize) -> bool {
        let Some(storage) = storage else { return true };
        let max = match storage.max_in_flight.load(Ordering::Relaxed) {
            0 => DEFAULT_OF_STORAGE.max(self.max_of_queues()),
            max => max,
        };
        self.in_flight_of(storage) + more <= max
    }

    fn in_flight_of(&self, storage: &Arc<StorageLimit>) -> usize {
        let found = self.storages.iter().find(|(of, _)| Arc::ptr_eq(of, storage));
        found.map_or(0, |&(_, in_flight)| in_flight)
    }

    fn begin(&mut self, queue: &ReadQueue) -> Permit {
        self.in_flight += 1;
        self.load_of(queue).in_flight += 1;
        if let Some(storage) = &queue.storage {
            match self.storages.iter_mut().find(|(of, _)| Arc::ptr_eq(of, storage)) {
                Some((_, in_flight)) => *in_flight += 1,
                None => self.storages.push((Arc::clone(storage), 1)),
            }
        }
        Permit(Some(queue.clone()))
    }

    /// Counts one less of `queue`; a forked child has none of its parent's.
    fn end(&mut self, queue: &ReadQueue) {
        let load = self.load_of(queue);
        let was_counted = load.in_flight > 0;
        load.in_flight -= usize::from(was_counted);
        self.in_flight -= usize::from(was_counted);
        self.loads.retain(|load| load.in_flight > 0 || !load.waiting.is_empty());
        self.storages.retain_mut(|(of, in_flight)| {
            let is_ours = queue.storage.as_ref().is_some_and(|storage| Arc::ptr_eq(of, storage));
            *in_flight -= usize::from(is_ours);
            *in_flight > 0
        });
    }

    /// Takes the task whose turn it is, if another read may be in flight.
    fn next(&mut self) -> Option<(Permit, Arc<dyn Job>)> {
        if !self.has_room() {
            return None;
        }
        let loads = self.loads.iter().enumerate().filter(|(_, load)| load.has_room());
        let next = |load: &Load| load.next(|storage| self.has_place(storage, 1));
        let nexts = loads.filter_map(|(at, load)| Some((load.in_flight, at, next(load)?)));
        let (_, at, (owner, job, storage)) = nexts.min_by_key(|&(in_flight, ..)| in_flight)?;
        let mut load = self.loads.remove(at)?;
        let max_in_flight = Arc::clone(&load.max_in_flight);
        let taken = load.take(owner, job);
        self.loads.push_back(load);
        let (owner, job) = taken?;
        Some((self.begin(&ReadQueue { max_in_flight, owner, storage }), job))
    }
}

/// Starts tasks that wait, as far as the limits permit; where no thread can be started, on this one if that
/// `may_wait`, else those who wait for the jobs run them.
fn start_waiting(may_wait: bool) {
    while let Some((permit, job)) = next_for_thread() {
        if !may_wait && !pool::has_threads() {
            return permit.give_back(job);
        }
        let mut task = Some((permit, job));
        pool::submit(move || {
            while let Some((permit, job)) = task.take() {
                job.run_next();
                if pool::is_crowded() {
                    return; // which drops the permit: another thread takes over
                }
                permit.end();
                task = next_for_thread();
            }
        });
    }
}

/// The next task that needs a thread; those before it are started.
fn next_for_thread() -> Option<(Permit, Arc<dyn Job>)> {
    loop {
        let (permit, job) = { SCHEDULE.lock().next()? };
        if let Some(permit) = Arc::clone(&job).start_next(permit) {
            return Some((permit, job));
        }
    }
}

/// Sets the maximum of reads in flight of all queues of this process, unless one of them may have more.
pub fn set_max_of_process(max_in_flight: usize) {
    MAX_OF_PROCESS.store(max_in_flight.max(1), Ordering::Relaxed);
    start_waiting(true);
}

impl Default for ReadQueue {
    fn default() -> Self {
        Self::new(DEFAULT_IN_FLIGHT)
    }
}

impl ReadQueue {
    /// A queue that runs at most `max_in_flight` reads, at least one, at a time.
    pub fn new(max_in_flight: usize) -> Self {
        let max_in_flight = Arc::new(max_in_flight.max(1).into());
        Self { max_in_flight, owner: 0, storage: None }
    }

    /// The same queue for another owner.
    #[must_use]
    pub fn for_another_owner(&self) -> Self {
        static NUM_OWNERS: AtomicU64 = AtomicU64::new(1);
        let owner = NUM_OWNERS.fetch_add(1, Ordering::Relaxed);
        Self { max_in_flight: Arc::clone(&self.max_in_flight), owner, storage: None }
    }

    /// The same queue for those who enter to read from `storage`.
    #[must_use]
    pub fn in_storage(&self, storage: Option<Arc<StorageLimit>>) -> Self {
        Self { storage, ..self.clone() }
    }

    /// The default queue of the program.
    pub fn of_program() -> &'static Self {
        static QUEUE: PerProcess<ReadQueue> = PerProcess::new(ReadQueue::default);
        QUEUE.get()
    }

    /// A queue whose limit is that of the process: of files that are listed, opened, or read forwards.
    pub fn of_process() -> &'static Self {
        static QUEUE: PerProcess<ReadQueue> = PerProcess::new(|| ReadQueue::new(NO_LIMIT));
        QUEUE.get()
    }

    /// The maximum number of reads in flight.
    pub fn max_in_flight(&self) -> usize {
        self.max_in_flight.load(Ordering::Relaxed)
    }

    /// Sets that maximum, to at least one: waiting reads start if it permits, and while more are in flight,
    /// none does.
    pub fn set_max_in_flight(&self, max_in_flight: usize) {
        self.max_in_flight.store(max_in_flight.max(1), Ordering::Relaxed);
        start_waiting(true);
    }

    /// Queues `count` calls of `job.run_next()` for threads of the engine.
    pub fn submit(&self, job: Arc<dyn Job>, count: usize) {
        if count == 0 {
            return;
        }
        let mut schedule = SCHEDULE.lock();
        let load = schedule.load_of(self);
        if let Some(of) = load.waiting.iter_mut().rfind(|of| of.owner == self.owner) {
            of.jobs.push_back((job, count));
        } else {
            load.waiting.push_back(Waiting { owner: self.owner, jobs: [(job, count)].into() });
        }
        drop(schedule);
        start_waiting(true);
    }

    /// Counts the caller as one that reads, if the limits permit.
    pub fn enter(&self) -> Option<Permit> {
        let mut schedule = SCHEDULE.lock();
        let may_enter = schedule.load_of(self).has_room()
            && schedule.has_room()
            && schedule.has_place(self.storage.as_ref(), 1);
        may_enter.then(|| schedule.begin(self))
    }

    /// Counts the caller as one that reads, which others then wait for if the limits say so.
    pub fn enter_anyway(&self) -> Permit {
        SCHEDULE.lock().begin(self)
    }
}

/// Held by a test that takes many places in the one schedule of the process, or counts them: those of the
/// test before have ended, and others take few.
#[cfg(test)]
pub fn turn() -> impl Drop {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = crate::lock::lock(&TURN);
    while SCHEDULE.lock().in_flight > 8 {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    turn
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::lock;

    /// Reads in flight of one queue, which end when their permits are dropped.
    struct Reads {
        storage: Arc<StorageLimit>,
        permits: Mutex<Vec<Permit>>,
    }

    impl Job for Reads {
        fn run_next(self: Arc<Self>) {}

        fn storage(&self) -> Option<Arc<StorageLimit>> {
            Some(Arc::clone(&self.storage))
        }

        fn start_next(self: Arc<Self>, permit: Permit) -> Option<Permit> {
            lock(&self.permits).push(permit);
            None
        }
    }

    fn in_flight(reads: &[Arc<Reads>]) -> Vec<usize> {
        reads.iter().map(|reads| lock(&reads.permits).len()).collect()
    }

    /// Ends those in flight, and those that start in their places.
    fn end_all(reads: &[Arc<Reads>]) {
        while in_flight(reads).iter().any(|&number| number > 0) {
            for reads in reads {
                let ended = std::mem::take(&mut *lock(&reads.permits));
                drop(ended);
            }
        }
    }

    #[test]
    fn queues_have_equal_shares_of_a_storage_however_long_their_reads_take() {
        let _turn = turn();
        let storage = Arc::new(StorageLimit::new(Some(8)));
        let reads = [(); 2]
            .map(|()| Arc::new(Reads { storage: Arc::clone(&storage), permits: Mutex::default() }));
        let queues = [(); 2].map(|()| ReadQueue::new(128));
        for (queue, reads) in queues.iter().zip(&reads) {
            queue.submit(Arc::clone(reads) as Arc<dyn Job>, 100);
        }
        assert_eq!(in_flight(&reads), [8, 0], "nobody else waited");
        for quick in [0, 0, 0, 0, 1, 1, 1, 0, 1, 1] {
            let ended = lock(&reads[quick].permits).pop();
            drop(ended);
        }
        assert_eq!(in_flight(&reads), [4, 4]);
        end_all(&reads);
    }

    #[test]
    fn storages_that_do_not_answer_leave_places_to_others() {
        let _turn = turn();
        let [silent, other] = [2, 1].map(|count| {
            let new = |_| Reads { storage: Arc::default(), permits: Mutex::default() };
            (0..count).map(new).map(Arc::new).collect::<Vec<_>>()
        });
        let queues: Vec<_> = (0..5).map(|_| ReadQueue::default()).collect();
        for (at, queue) in queues.iter().enumerate() {
            queue.submit(Arc::clone(&silent[at % 2]) as Arc<dyn Job>, DEFAULT_IN_FLIGHT);
        }
        assert_eq!(in_flight(&silent), [DEFAULT_OF_STORAGE; 2]);
        ReadQueue::default().submit(Arc::clone(&other[0]) as Arc<dyn Job>, DEFAULT_IN_FLIGHT);
        let num_left = DEFAULT_OF_PROCESS - 2 * DEFAULT_OF_STORAGE;
        // Other tests of this process may read a little meanwhile.
        assert!(
            (num_left / 2..=num_left).contains(&in_flight(&other)[0]),
            "{:?}",
            in_flight(&other)
        );
        end_all(&[silent, other].concat());
    }
}
