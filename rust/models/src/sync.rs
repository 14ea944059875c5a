//! What the engine's threads share and wait on: the checker's, each use of which is a place where another thread
//! may go on.

pub use shuttle::sync::{Condvar, Mutex, MutexGuard, atomic};

/// Threads of the checker, of which some cannot be started.
pub mod thread {
    use std::io::{Error, ErrorKind, Result};
    use std::sync::atomic::{AtomicUsize, Ordering};

    pub use shuttle::thread::{spawn, yield_now};

    /// How many more threads may be started by a [`Builder`].
    pub static NUM_LEFT: AtomicUsize = AtomicUsize::new(0);

    /// Starts a thread, as long as there are some left.
    #[derive(Debug, Default)]
    pub struct Builder;

    impl Builder {
        /// As in the standard library.
        pub fn new() -> Self {
            Self
        }

        /// As there, but threads have no names.
        #[must_use]
        pub fn name(self, _: String) -> Self {
            self
        }

        /// As there, and nobody can wait for its end: threads of the pool have none.
        pub fn spawn(self, work: impl FnOnce() + Send + 'static) -> Result<()> {
            let less = |left: usize| left.checked_sub(1);
            NUM_LEFT
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less)
                .map_err(|_| Error::from(ErrorKind::WouldBlock))?;
            drop(shuttle::future::spawn(async { work() }));
            Ok(())
        }
    }
}
