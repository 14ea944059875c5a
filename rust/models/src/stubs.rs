//! What these files use of other crates, as little as a model needs.

use std::sync::Arc;

use crate::sync::thread;

/// An array of Arrow.
#[expect(clippy::len_without_is_empty, reason = "nobody asks")]
pub trait Array {
    /// How many values it has.
    fn len(&self) -> usize;
    /// How many bytes it takes.
    fn get_array_memory_size(&self) -> usize;
}

/// An array of bytes, shared.
pub type ArrayRef = Arc<Vec<u8>>;

impl Array for ArrayRef {
    fn len(&self) -> usize {
        self.as_slice().len()
    }

    fn get_array_memory_size(&self) -> usize {
        self.as_slice().len()
    }
}

/// Threads of rayon: a new one for each call.
#[derive(Debug)]
pub struct ThreadPool;

impl ThreadPool {
    /// Runs `work` at some time.
    pub fn spawn(&self, work: impl FnOnce() + Send + 'static) {
        thread::spawn(work);
    }
}

/// Has no options.
#[derive(Debug, Default)]
pub struct ThreadPoolBuilder;

impl ThreadPoolBuilder {
    /// As in rayon.
    pub fn new() -> Self {
        Self
    }

    /// Leaves it to the loops how many threads they call.
    #[must_use]
    pub fn num_threads(self, _: usize) -> Self {
        self
    }

    /// Gives no names.
    #[must_use]
    pub fn thread_name(self, _: impl FnMut(usize) -> String) -> Self {
        self
    }

    /// Never fails.
    pub fn build(self) -> std::io::Result<ThreadPool> {
        Ok(ThreadPool)
    }
}
