//! State of which a forked child gets its own, since locks held by lost threads never open.

use std::sync::OnceLock;

/// How many forks deep each process still gets its own; deeper ones share the last.
const MAX_DEPTH: usize = 32;

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
        let pid = std::process::id();
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
