//! Slots passed from producers to a consumer and its users: an exhaustive search of the schedules
//! of a few tasks, and stress tests of threads and processes that also run under sanitizers.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod bytes;
mod deliberate_errors;
mod messages;
mod processes;
mod schedules;
mod threads;
mod world;
