//! Threads and the order of what they deliver; nothing else in the crate starts a thread.
