//! What operating systems do differently: files, shared memory, and the end of a parent process.
//!
//! No other file names an item that only one system has. Each of `linux`, `portable` (other
//! systems with descriptors) and `elsewhere` offers the same functions; `--cfg grainmill_portable`
//! has Linux take the portable ones, so that they are tested where most of the tests run.

#[cfg(unix)]
mod files;
#[cfg(all(target_os = "linux", not(grainmill_portable)))]
mod linux;
#[cfg(unix)]
mod mapped;
#[cfg(all(unix, any(not(target_os = "linux"), grainmill_portable)))]
mod portable;
#[cfg(not(unix))]
mod windows;

#[cfg(not(unix))]
use elsewhere as system;
#[cfg(all(target_os = "linux", not(grainmill_portable)))]
use linux as system;
#[cfg(all(unix, any(not(target_os = "linux"), grainmill_portable)))]
use portable as system;

#[cfg(unix)]
pub(crate) use files::{ReadFile, is_a_directory, is_not_syncable, is_out_of_files, max_files};
#[cfg(unix)]
pub(crate) use mapped::{anonymous, borrowed, is_alive, mapped, unmapped};
/// A file that this process has open, to be handed to another process.
#[cfg(unix)]
pub use std::os::fd::{BorrowedFd as BorrowedFile, OwnedFd as OwnedFile};
pub use system::die_with_parent;
pub(crate) use system::{fixed_len, give_back, shared_file};
#[cfg(not(unix))]
pub use windows::{BorrowedFile, OwnedFile};
#[cfg(not(unix))]
pub(crate) use windows::{
    ReadFile, anonymous, borrowed, is_a_directory, is_alive, is_not_syncable, is_out_of_files,
    mapped, max_files, unmapped,
};

/// What a system knows of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileFacts {
    pub(crate) kind: FileKind,
    pub(crate) byte_len: u64,
    /// When its content changed last, in nanoseconds since 1970.
    pub(crate) modified_ns: i64,
    /// The numbers of its device and of itself there; zeros where they are not told.
    pub(crate) number: (u64, u64),
}

/// What a path leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileKind {
    Regular,
    Directory,
    Other,
}

#[cfg(test)]
mod tests;
