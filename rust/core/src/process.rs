//! State that a forked child gets afresh: a lock that a thread of the parent held is never released there.
#![expect(
    unsafe_code,
    reason = "a `OnceLock` may be held by a thread that does not exist in the child"
)]

use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::lock::lock;
use crate::sync::atomic::AtomicPtr;
use crate::sync::{Mutex, MutexGuard};

/// The id of this process; a fork handler resets it to 0 in the child.
pub(crate) static ID: AtomicU32 = AtomicU32::new(0);

/// The id of this process, cached.
#[inline]
pub fn id() -> u32 {
    match ID.load(Ordering::Relaxed) {
        0 => look_up(),
        id => id,
    }
}

#[cold]
fn look_up() -> u32 {
    // Registering the handler twice does no harm.
    static IS_REGISTERED: AtomicBool = AtomicBool::new(false);
    let id = std::process::id();
    if IS_REGISTERED.load(Ordering::Acquire) || fork::reset_in_child() {
        IS_REGISTERED.store(true, Ordering::Release);
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

    extern "C" fn reset() {
        super::ID.store(0, Ordering::Relaxed);
    }

    /// Makes each forked child look up its own id; returns whether the handler was registered.
    pub(super) fn reset_in_child() -> bool {
        // SAFETY: the handler only stores to an atomic, which is allowed after a fork, and lives as
        // long as the program.
        unsafe { pthread_atfork(None, None, Some(reset)) == 0 }
    }
}

#[cfg(not(unix))]
mod fork {
    /// There is no fork.
    pub(super) fn reset_in_child() -> bool {
        true
    }
}

/// One `T` per process that this program forks.
///
/// No lock is held while a value is created: a child forked meanwhile would wait for it forever.
pub struct PerProcess<T> {
    /// The value of this process, or of its nearest ancestor that has one.
    newest: AtomicPtr<Generation<T>>,
    new: fn() -> T,
}

struct Generation<T> {
    owner: u32,
    value: T,
    /// The value of an ancestor, which is never dropped: the fork may have happened while it was in
    /// use.
    older: *mut Self,
}

impl<T: Send + Sync> PerProcess<T> {
    /// No value yet; `new` creates it.
    pub const fn new(new: fn() -> T) -> Self {
        Self { newest: AtomicPtr::new(ptr::null_mut()), new }
    }

    /// The value of this process, created on first use. Threads that race create one each, of which
    /// one is kept.
    pub fn get(&self) -> &T {
        let owner = id();
        let newest = self.newest.load(Ordering::Acquire);
        // SAFETY: null or stored by `create`, and freed only by `drop`.
        if let Some(generation) = unsafe { newest.as_ref() }
            && generation.owner == owner
        {
            return &generation.value;
        }
        self.create(owner, newest)
    }

    #[cold]
    fn create(&self, owner: u32, older: *mut Generation<T>) -> &T {
        let created = Box::into_raw(Box::new(Generation { owner, value: (self.new)(), older }));
        let stored =
            self.newest.compare_exchange(older, created, Ordering::AcqRel, Ordering::Acquire);
        let winner = match stored {
            Ok(_) => created,
            Err(other) => {
                // SAFETY: created above by `Box::into_raw`, and not shared.
                drop(unsafe { Box::from_raw(created) });
                other
            }
        };
        // SAFETY: stored values are freed only by `drop`. If another thread stored it, that thread
        // is of this process, too: threads do not survive a fork in the child.
        unsafe { &(*winner).value }
    }
}

impl<T: Send> PerProcess<Mutex<T>> {
    /// Locks the value of this process.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        lock(self.get())
    }
}

/// As [`lock`], these go on after a panic.
impl<T: Send + Sync> PerProcess<RwLock<T>> {
    /// The value of this process, which other threads may look at meanwhile.
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        self.get().read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The value of this process, for the calling thread alone.
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.get().write().unwrap_or_else(PoisonError::into_inner)
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
            // SAFETY: created by `Box::into_raw`, and `&mut self` excludes other users.
            newest = unsafe { Box::from_raw(newest) }.older;
        }
    }
}

#[cfg(unix)]
#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc;
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;

    /// The result of `work` in a forked child, or `None` if the child had to be killed.
    fn in_child(work: impl FnOnce() -> u8) -> Option<i32> {
        // SAFETY: the child calls `work` and exits. Of the locks that other threads may hold it needs
        // only the C library's heap, which a fork leaves usable.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = work();
            // SAFETY: exits the child.
            unsafe { libc::_exit(code.into()) };
        }
        assert!(child > 0, "no process could be forked");
        let started = Instant::now();
        let mut status = 0;
        // SAFETY: waits for the child forked above, which has not been waited for.
        while unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == 0 {
            if started.elapsed() > Duration::from_secs(20) {
                // SAFETY: the child has not been waited for, so the id is still its own.
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
    fn child_forked_while_another_thread_creates_the_value_creates_its_own() {
        static MAY_FINISH: AtomicBool = AtomicBool::new(false);
        static IS_BEING_CREATED: AtomicBool = AtomicBool::new(false);
        static VALUE: PerProcess<u8> = PerProcess::new(|| {
            IS_BEING_CREATED.store(true, Ordering::Release);
            while !MAY_FINISH.load(Ordering::Acquire) {
                thread::yield_now();
            }
            7
        });
        let creator = thread::spawn(|| *VALUE.get());
        while !IS_BEING_CREATED.load(Ordering::Acquire) {
            thread::yield_now();
        }
        let found = in_child(|| {
            MAY_FINISH.store(true, Ordering::Release);
            *VALUE.get()
        });
        MAY_FINISH.store(true, Ordering::Release);
        assert_eq!(creator.join().unwrap(), 7);
        assert_eq!(found, Some(7), "`None`: the child waited for a thread of its parent");
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
    fn values_are_dropped_with_their_container() {
        let (sender, receiver) = mpsc::channel();
        let state: PerProcess<std::sync::Mutex<Option<mpsc::Sender<()>>>> =
            PerProcess::new(Default::default);
        *state.get().lock().unwrap() = Some(sender);
        drop(state);
        assert_eq!(receiver.try_recv(), Err(mpsc::TryRecvError::Disconnected));
    }
}
