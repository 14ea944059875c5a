//! State of which a forked child gets its own, since locks held by lost threads never open.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// How many forks deep each process still gets its own; deeper ones share the last.
const MAX_DEPTH: usize = 32;

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
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    let id = std::process::id();
    if *REGISTERED.get_or_init(fork::forget_in_child) {
        ID.store(id, Ordering::Relaxed);
    }
    id
}

#[cfg(unix)]
mod fork {
    #![expect(unsafe_code, reason = "the C library tells of forks by this call alone")]

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
#[derive(Debug)]
pub(crate) struct PerProcess<T> {
    generations: [OnceLock<(u32, T)>; MAX_DEPTH],
    new: fn() -> T,
}

impl<T> PerProcess<T> {
    pub(crate) const fn new(new: fn() -> T) -> Self {
        Self { generations: [const { OnceLock::new() }; MAX_DEPTH], new }
    }

    /// That of this process; made on first use.
    pub(crate) fn get(&self) -> &T {
        let pid = id();
        let (last, others) = self.generations.split_last().expect("there is at least one");
        for generation in others {
            let (owner, value) = generation.get_or_init(|| (pid, (self.new)()));
            if *owner == pid {
                return value;
            }
        }
        &last.get_or_init(|| (pid, (self.new)())).1
    }
}
