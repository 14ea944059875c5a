//! A process that does not outlive its parent.

use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

/// Has the system kill this process as soon as the thread that made it ends.
///
/// False where `parent` is not, or no longer, the parent: then there is nothing to wait for.
///
/// # Errors
///
/// If the system does not offer this.
pub fn end_with(parent: u32) -> std::io::Result<bool> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // The parent may have gone before the system was asked.
    let current = getppid().map(Pid::as_raw_pid);
    Ok(current.and_then(|pid| u32::try_from(pid).ok()) == Some(parent))
}
