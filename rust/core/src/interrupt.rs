//! Waits that the caller of the engine may end, as a program does that is interrupted by Ctrl-C.

use std::cell::Cell;
use std::sync::PoisonError;
use std::time::Duration;

use crate::lock::lock;
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

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
}
