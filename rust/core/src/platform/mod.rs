//! What differs between operating systems: files, shared memory, the times of threads, and the end
//! of a parent process.
//!
//! No other file names an item that only one system has. `linux`, `portable` (other systems with
//! file descriptors) and `windows` define the same functions; the feature `portable` selects
//! the portable ones on Linux, so that they are tested where most of the tests run.

#[cfg(unix)]
mod files;
#[cfg(all(target_os = "linux", not(feature = "portable")))]
mod linux;
#[cfg(unix)]
mod mapped;
mod metadata;
#[cfg(all(unix, any(not(target_os = "linux"), feature = "portable")))]
mod portable;
#[cfg(not(unix))]
mod windows;

#[cfg(all(target_os = "linux", not(feature = "portable")))]
use linux as system;
#[cfg(all(unix, any(not(target_os = "linux"), feature = "portable")))]
use portable as system;
#[cfg(not(unix))]
use windows as system;

#[cfg(unix)]
pub(crate) use files::{
    ReadFile, TemporaryFile, is_a_directory, is_not_syncable, is_out_of_files, max_files,
};
#[cfg(unix)]
pub use files::{create_private_dirs, make_private};
#[cfg(unix)]
pub use mapped::{borrowed, from_descriptor, into_descriptor};
#[cfg(unix)]
pub(crate) use mapped::{is_alive, map_anonymous, map_file, unmap};
pub(crate) use metadata::{FileKind, FileMetadata};
/// An open file that can be passed to another process.
#[cfg(unix)]
pub use std::os::fd::{BorrowedFd as BorrowedFile, OwnedFd as OwnedFile};
pub use system::{die_with_parent, process_file, shared_file, thread_times};
pub(crate) use system::{discard_pages, fixed_len, thread_number};
#[cfg(not(unix))]
pub use windows::{
    BorrowedFile, OwnedFile, borrowed, create_private_dirs, from_descriptor, into_descriptor,
    make_private,
};
#[cfg(not(unix))]
pub(crate) use windows::{
    ReadFile, TemporaryFile, is_a_directory, is_alive, is_not_syncable, is_out_of_files,
    map_anonymous, map_file, max_files, unmap,
};

#[cfg(test)]
mod tests;
