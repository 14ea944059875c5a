//! Slots between their makers, the process that receives them and its users: every schedule of a
//! few tasks, and then many threads and processes at once, for the sanitizers to look on.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on should fail")]

mod bytes;
mod crowd;
mod ill;
mod processes;
mod schedules;
mod threads;
mod world;
