//! State of which a forked child gets its own, since locks held by lost threads never open.
#![expect(unsafe_code, reason = "a `OnceLock` is one more lock that a lost thread may hold")]

use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

/// The number of this process, which a fork sets to 0 in the child.
static ID: AtomicU32 = AtomicU32::new(0);

/// The number of this process; the system is asked once.
#[inline]
pub(crate) fn id() -> u32 {
    match ID.load(Ordering::Relaxed) {
        0 => look_up(),
        id => id,
    }
}

#[cold]
fn look_up() -> u32 {
    // Several threads at once may arrange it, which does no harm.
    static IS_ARRANGED: AtomicBool = AtomicBool::new(false);
    let id = std::process::id();
    if IS_ARRANGED.load(Ordering::Acquire) || fork::forget_in_child() {
        IS_ARRANGED.store(true, Ordering::Release);
        ID.store(id, Ordering::Relaxed);
    }
    id
}

#[cfg(unix)]
mod fork {
    use std::ffi::c_int;
    use std::sync::atomic::Ordering;

    type Handler = Option<extern "C" fn()>;

    unsafe extern "C" {
        fn pthread_atfork(prepare: Handler, parent: Handler, child: Handler) -> c_int;
    }

    extern "C" fn forget() {
        super::ID.store(0, Ordering::Relaxed);
    }

    /// Has each forked child look its number up; says whether that could be arranged.
    pub(super) fn forget_in_child() -> bool {
        // SAFETY: the handler only stores to an atomic, which is allowed after a fork, and is
        // there as long as the program.
        unsafe { pthread_atfork(None, None, Some(forget)) == 0 }
    }
}

#[cfg(not(unix))]
mod fork {
    /// There is no fork.
    pub(super) fn forget_in_child() -> bool {
        true
    }
}

/// One `T` for each process that this program forks into.
///
/// No lock is held while one is made: a child that is forked off meanwhile would wait for it for
/// ever.
pub struct PerProcess<T> {
    /// That of this process, or of the last one before it that had one.
    newest: AtomicPtr<Generation<T>>,
    new: fn() -> T,
}

struct Generation<T> {
    owner: u32,
    value: T,
    /// That of a process before, which lives on: its children may have been forked off in the
    /// middle of using it.
    older: *mut Self,
}

impl<T: Send + Sync> PerProcess<T> {
    /// None made yet; `new` makes one.
    pub const fn new(new: fn() -> T) -> Self {
        Self { newest: AtomicPtr::new(ptr::null_mut()), new }
    }

    /// That of this process; made on first use. Of several threads at once each makes one, of
    /// which one is kept.
    pub fn get(&self) -> &T {
        let owner = id();
        let newest = self.newest.load(Ordering::Acquire);
        // SAFETY: null or put there below, and freed by `drop` only.
        if let Some(generation) = unsafe { newest.as_ref() }
            && generation.owner == owner
        {
            return &generation.value;
        }
        self.made(owner, newest)
    }

    #[cold]
    fn made(&self, owner: u32, older: *mut Generation<T>) -> &T {
        let made = Box::into_raw(Box::new(Generation { owner, value: (self.new)(), older }));
        let put = self.newest.compare_exchange(older, made, Ordering::AcqRel, Ordering::Acquire);
        let kept = match put {
            Ok(_) => made,
            Err(other) => {
                // SAFETY: made above by `Box::into_raw`, and seen by nobody.
                drop(unsafe { Box::from_raw(made) });
                other
            }
        };
        // SAFETY: what is put there is freed by `drop` only. If it was another thread's, that one
        // is of this process too: threads do not follow into a forked child.
        unsafe { &(*kept).value }
    }
}

impl<T> fmt::Debug for PerProcess<T> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("PerProcess").finish_non_exhaustive()
    }
}

impl<T> Drop for PerProcess<T> {
    fn drop(&mut self) {
        let mut newest = *self.newest.get_mut();
        while !newest.is_null() {
            // SAFETY: made by `Box::into_raw`, and nobody else is left who may use it.
            newest = unsafe { Box::from_raw(newest) }.older;
        }
    }
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc;
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;

    /// What `work` returns in a forked child, or `None` if the child had to be killed.
    fn in_child(work: impl FnOnce() -> u8) -> Option<i32> {
        // SAFETY: the child calls `work` and ends, without what other threads may hold but the
        // C library's heap, which a fork leaves usable.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = work();
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(code.into()) };
        }
        assert!(child > 0, "no process could be forked");
        let began = Instant::now();
        let mut status = 0;
        // SAFETY: asks for the end of the child forked above, which has not been told yet.
        while unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == 0 {
            if began.elapsed() > Duration::from_secs(20) {
                // SAFETY: the child has not been waited for, so the number is still its own.
                unsafe { libc::kill(child, libc::SIGKILL) };
                // SAFETY: as above.
                unsafe { libc::waitpid(child, &raw mut status, 0) };
                return None;
            }
            thread::sleep(Duration::from_millis(1));
        }
        libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status))
    }

    #[test]
    fn child_forked_while_another_thread_makes_the_value_makes_its_own() {
        static ARE_MADE_AT_ONCE: AtomicBool = AtomicBool::new(false);
        static IS_BEING_MADE: AtomicBool = AtomicBool::new(false);
        static VALUE: PerProcess<u8> = PerProcess::new(|| {
            IS_BEING_MADE.store(true, Ordering::Release);
            while !ARE_MADE_AT_ONCE.load(Ordering::Acquire) {
                thread::yield_now();
            }
            7
        });
        let maker = thread::spawn(|| *VALUE.get());
        while !IS_BEING_MADE.load(Ordering::Acquire) {
            thread::yield_now();
        }
        let found = in_child(|| {
            ARE_MADE_AT_ONCE.store(true, Ordering::Release);
            *VALUE.get()
        });
        ARE_MADE_AT_ONCE.store(true, Ordering::Release);
        assert_eq!(maker.join().unwrap(), 7);
        assert_eq!(found, Some(7), "`None`: the child waited for a thread that it does not have");
    }

    #[test]
    fn all_threads_of_a_process_have_one_value_and_its_child_another() {
        static VALUE: PerProcess<AtomicU32> = PerProcess::new(AtomicU32::default);
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| VALUE.get().fetch_add(1, Ordering::Relaxed));
            }
        });
        assert_eq!(VALUE.get().load(Ordering::Relaxed), 8);
        let child =
            || VALUE.get().fetch_add(5, Ordering::Relaxed) + VALUE.get().load(Ordering::Relaxed);
        assert_eq!(in_child(|| u8::try_from(child()).unwrap()), Some(5));
        assert_eq!(VALUE.get().load(Ordering::Relaxed), 8);
    }

    #[test]
    fn values_are_dropped_with_what_holds_them() {
        let (sender, receiver) = mpsc::channel();
        let state: PerProcess<std::sync::Mutex<Option<mpsc::Sender<()>>>> =
            PerProcess::new(Default::default);
        *state.get().lock().unwrap() = Some(sender);
        drop(state);
        assert_eq!(receiver.try_recv(), Err(mpsc::TryRecvError::Disconnected));
    }
}
