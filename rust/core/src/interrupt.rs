//! Waits that the caller of the engine may end, as a program does that is interrupted by Ctrl-C, and what
//! other threads do for it, which is then cancelled.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use crate::lock::lock;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::{Error, Result};

/// How often the caller is asked.
pub(crate) const INTERVAL: Duration = Duration::from_millis(50);
/// For how long a thread sleeps whose caller is never asked.
const LONG: Duration = Duration::from_secs(3600);

thread_local! {
    static CALLER: Cell<Caller> = const { Cell::new(Caller::Patient) };
    /// Whether the caller is being asked: whatever it runs to find out must not wait for what this
    /// thread holds.
    static IS_ANSWERING: Cell<bool> = const { Cell::new(false) };
    /// What would cancel the work that this thread does.
    static CANCELLATION: RefCell<Option<Arc<Cancellation>>> = const { RefCell::new(None) };
}

#[derive(Clone, Copy)]
enum Caller {
    /// Waits as long as it takes.
    Patient,
    /// Is asked whether the wait should end.
    Asked(fn() -> bool),
    /// Has ended one wait, and so all that follow.
    Ended,
}

/// Sets what it holds for this thread back when dropped.
struct Restored<T: Copy + 'static>(&'static std::thread::LocalKey<Cell<T>>, T);

impl<T: Copy> Drop for Restored<T> {
    fn drop(&mut self) {
        self.0.set(self.1);
    }
}

/// Runs `work`, whose waits on this thread fail with [`Error::Interrupted`] once `is_ended` returns
/// true. That is called while a wait lasts, and may call the engine.
pub fn interruptible<T>(is_ended: fn() -> bool, work: impl FnOnce() -> T) -> T {
    let _restored = Restored(&CALLER, CALLER.replace(Caller::Asked(is_ended)));
    work()
}

/// Whether this thread is in the middle of a wait, and what is locked for it stays locked.
pub fn is_answering() -> bool {
    IS_ANSWERING.get()
}

/// Calls `wait_for`, which waits for at most so long, until it returns something.
///
/// # Errors
/// [`Error::Interrupted`] if the caller ends the wait.
pub fn wait<T>(mut wait_for: impl FnMut(Duration) -> Option<T>) -> Result<T> {
    loop {
        let interval = match CALLER.get() {
            Caller::Patient => LONG,
            Caller::Asked(_) => INTERVAL,
            Caller::Ended => return Err(Error::Interrupted),
        };
        if let Some(done) = wait_for(interval) {
            return Ok(done);
        }
        if let Caller::Asked(is_ended) = CALLER.get() {
            let restored = Restored(&IS_ANSWERING, IS_ANSWERING.replace(true));
            let has_ended = is_ended();
            drop(restored);
            if has_ended {
                CALLER.set(Caller::Ended);
            }
        }
    }
}

/// Asks the caller, for a loop that takes long and does not wait.
///
/// # Errors
/// [`Error::Interrupted`] if the caller ends it.
pub fn check() -> Result<()> {
    let mut has_asked = false;
    wait(|_| std::mem::replace(&mut has_asked, true).then_some(()))
}

/// Waits on `condvar` while `condition` holds of what is behind `mutex`, which is free while the caller
/// is asked.
///
/// # Errors
/// [`Error::Interrupted`] if the caller ends the wait.
pub fn wait_while<'a, T>(
    mutex: &'a Mutex<T>,
    condvar: &Condvar,
    mut condition: impl FnMut(&mut T) -> bool,
) -> Result<MutexGuard<'a, T>> {
    wait(|interval| {
        let (guard, timed_out) = condvar
            .wait_timeout_while(lock(mutex), interval, &mut condition)
            .unwrap_or_else(PoisonError::into_inner);
        (!timed_out.timed_out()).then_some(guard)
    })
}

/// Cancels work that threads do for somebody who does not wait for it any more.
#[derive(Default)]
pub struct Cancellation {
    is_cancelled: AtomicBool,
    hooks: Mutex<Hooks>,
}

#[derive(Default)]
struct Hooks {
    by_number: HashMap<u64, Box<dyn FnOnce() + Send>>,
    next: u64,
}

/// Removes its hook when dropped.
#[derive(Debug)]
pub struct CancelHook {
    cancellation: Arc<Cancellation>,
    number: u64,
}

impl Cancellation {
    /// Whether [`cancel`](Self::cancel) was called.
    pub fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Relaxed)
    }

    /// Runs `work`, whose requests end soon after [`cancel`](Self::cancel) is called.
    pub fn run<T>(self: &Arc<Self>, work: impl FnOnce() -> T) -> T {
        struct Back(Option<Arc<Cancellation>>);
        impl Drop for Back {
            fn drop(&mut self) {
                CANCELLATION.set(self.0.take());
            }
        }
        let _back = Back(CANCELLATION.replace(Some(Arc::clone(self))));
        work()
    }

    /// Ends the work, as far as it has hooks.
    pub fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
        let hooks = std::mem::take(&mut lock(&self.hooks).by_number);
        for hook in hooks.into_values() {
            hook();
        }
    }
}

impl fmt::Debug for Cancellation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cancellation").field(&self.is_cancelled()).finish()
    }
}

/// Calls `hook` once the work of this thread is cancelled, or at once if it is; None if it never will be.
pub fn on_cancel(hook: impl FnOnce() + Send + 'static) -> Option<CancelHook> {
    let cancellation = CANCELLATION.with_borrow(Clone::clone)?;
    let mut hooks = lock(&cancellation.hooks);
    let number = hooks.next;
    hooks.next += 1;
    hooks.by_number.insert(number, Box::new(hook));
    drop(hooks);
    if cancellation.is_cancelled() {
        cancellation.cancel();
    }
    Some(CancelHook { cancellation, number })
}

/// Whether the work of this thread is cancelled.
pub fn is_cancelled() -> bool {
    CANCELLATION.with_borrow(|current| current.as_ref().is_some_and(|found| found.is_cancelled()))
}

impl Drop for CancelHook {
    fn drop(&mut self) {
        let removed = lock(&self.cancellation.hooks).by_number.remove(&self.number);
        drop(removed); // whatever that does, nothing is locked
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    #[test]
    fn wait_ends_when_the_caller_says_so_and_so_do_all_that_follow() {
        static NUM_ASKED: AtomicU32 = AtomicU32::new(0);
        let is_ended = || NUM_ASKED.fetch_add(1, Ordering::Relaxed) == 2;
        let (mutex, condvar) = (Mutex::new(()), Condvar::new());
        interruptible(is_ended, || {
            assert!(matches!(wait_while(&mutex, &condvar, |()| true), Err(Error::Interrupted)));
            assert!(matches!(wait(|_| Some(())), Err(Error::Interrupted)));
        });
        assert_eq!(NUM_ASKED.load(Ordering::Relaxed), 3);
        assert!(wait(|_| Some(())).is_ok());
    }

    #[test]
    fn nothing_is_locked_while_the_caller_is_asked() {
        static STATE: Mutex<u32> = Mutex::new(0);
        let count = || {
            assert!(interruptible(|| false, is_answering));
            *STATE.try_lock().expect("it is free") += 1;
            false
        };
        let found =
            interruptible(count, || wait_while(&STATE, &Condvar::new(), |state| *state < 2));
        assert_eq!(*found.unwrap(), 2);
        assert!(!is_answering());
    }

    #[test]
    fn hooks_are_called_once_until_they_are_dropped() {
        let (cancellation, count) =
            (Arc::new(Cancellation::default()), Arc::new(AtomicU32::new(0)));
        let hook = |more| {
            let count = Arc::clone(&count);
            on_cancel(move || _ = count.fetch_add(more, Ordering::Relaxed))
        };
        assert!(hook(1).is_none() && !is_cancelled(), "nothing would cancel it");
        let inner = Arc::new(Cancellation::default());
        let hooks = cancellation.run(|| {
            drop(hook(2));
            [hook(10), inner.run(|| hook(4)), hook(100)]
        });
        cancellation.cancel();
        cancellation.cancel();
        assert_eq!(count.load(Ordering::Relaxed), 110);
        drop(hooks);
        cancellation.run(|| {
            assert!(is_cancelled());
            inner.run(|| assert!(!is_cancelled()));
            assert!(hook(1000).is_some(), "called at once");
        });
        assert_eq!(count.load(Ordering::Relaxed), 1110);
        assert!(!is_cancelled());
    }
}
