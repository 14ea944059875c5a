//! Records read by the engine's threads, at once or while the caller does something else.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::pool;
use crate::records::{Files, PartRecords, Plan, Records, Scratch};
use crate::{Error, Result};

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Reads the records of `plan`, in the order asked for, into `slots` where those fit; large plans
/// on several threads. `slots` is empty or has one for each record.
///
/// # Errors
/// If a file cannot be read or is damaged; of several errors, the one of the first file and chunk.
pub fn read<S>(files: &Arc<Files>, plan: Plan, slots: Vec<Option<S>>) -> Result<Records>
where
    S: AsMut<[u8]> + Send + 'static,
{
    if plan.num_parts() > 1 {
        return start(files, plan, slots).finish();
    }
    let mut slots = plan.split(slots);
    let parts = match slots.first_mut() {
        Some(slots) => vec![read_part(files, &plan, 0, slots)?],
        None => Vec::new(),
    };
    Ok(plan.gather(parts))
}

/// Begins to read the records of `plan` on the engine's threads.
pub fn start<S>(files: &Arc<Files>, plan: Plan, slots: Vec<Option<S>>) -> Pending<S>
where
    S: AsMut<[u8]> + Send + 'static,
{
    let num_parts = plan.num_parts();
    let job = Arc::new(Job {
        files: Arc::clone(files),
        slots: plan.split(slots).into_iter().map(Mutex::new).collect(),
        plan,
        next_part: AtomicUsize::new(0),
        abandoned: AtomicBool::new(false),
        progress: Mutex::new(Progress {
            parts: (0..num_parts).map(|_| None).collect(),
            num_left: num_parts,
            first_error: None,
        }),
        finished: Condvar::new(),
    });
    for _ in 0..num_parts.min(pool::max_threads()) {
        let job = Arc::clone(&job);
        pool::submit(move || job.work());
    }
    Pending { job, owner: std::process::id() }
}

fn read_part<S: AsMut<[u8]>>(
    files: &Files,
    plan: &Plan,
    part: usize,
    slots: &mut [Option<S>],
) -> Result<PartRecords> {
    SCRATCH.with_borrow_mut(|scratch| files.read_part(plan, part, slots, scratch))
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
    files: Arc<Files>,
    plan: Plan,
    slots: Vec<Mutex<Vec<Option<S>>>>,
    next_part: AtomicUsize,
    abandoned: AtomicBool,
    progress: Mutex<Progress>,
    finished: Condvar,
}

#[derive(Debug)]
struct Progress {
    parts: Vec<Option<PartRecords>>,
    num_left: usize,
    /// The error of the lowest part, so that the number of threads does not show.
    first_error: Option<(usize, Error)>,
}

impl<S: AsMut<[u8]>> Job<S> {
    /// Reads parts until none is left that nobody has begun.
    fn work(&self) {
        loop {
            let part = self.next_part.fetch_add(1, Ordering::Relaxed);
            if part >= self.plan.num_parts() {
                return;
            }
            let result = if self.abandoned.load(Ordering::Relaxed) {
                Err(Error::Panicked("reading was abandoned".to_owned()))
            } else {
                catch_unwind(AssertUnwindSafe(|| {
                    let mut slots = lock(&self.slots[part]);
                    read_part(&self.files, &self.plan, part, &mut slots)
                }))
                .unwrap_or_else(|payload| Err(Error::Panicked(text_of(payload.as_ref()))))
            };
            self.note(part, result);
        }
    }

    fn note(&self, part: usize, result: Result<PartRecords>) {
        let mut progress = lock(&self.progress);
        progress.num_left -= 1;
        match result {
            Ok(records) => progress.parts[part] = Some(records),
            Err(error) => {
                if progress.first_error.as_ref().is_none_or(|&(earlier, _)| part < earlier) {
                    progress.first_error = Some((part, error));
                }
            }
        }
        if progress.num_left == 0 {
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

impl<S: AsMut<[u8]>> Pending<S> {
    /// Waits for the records; this thread helps to read what nobody has begun.
    ///
    /// After a fork, in the child, everything is read anew and into no slot.
    ///
    /// # Errors
    /// If a file cannot be read or is damaged.
    pub fn finish(&self) -> Result<Records> {
        if self.owner != std::process::id() {
            return self.read_anew();
        }
        self.job.work();
        let mut progress = self.job.wait();
        if let Some((_, error)) = progress.first_error.take() {
            return Err(error);
        }
        let parts = progress.parts.iter_mut().map_while(Option::take).collect();
        Ok(self.job.plan.gather(parts))
    }

    fn read_anew(&self) -> Result<Records> {
        let plan = &self.job.plan;
        let parts = (0..plan.num_parts())
            .map(|part| read_part::<S>(&self.job.files, plan, part, &mut []))
            .collect::<Result<_>>()?;
        Ok(plan.gather(parts))
    }

    /// Whether threads may still write into slots.
    pub fn is_running(&self) -> bool {
        self.owner == std::process::id() && lock(&self.job.progress).num_left > 0
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
