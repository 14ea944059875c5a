//! What threads share and wait on: the standard library's. `rust/models` compiles the files that use it with
//! a model checker's in its place.

pub use std::sync::{Condvar, Mutex, MutexGuard, atomic};
pub use std::thread;
