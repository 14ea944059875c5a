//! What a system says about a file.

/// The metadata of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileMetadata {
    pub(crate) kind: FileKind,
    pub(crate) byte_len: u64,
    /// When its content was last modified, in nanoseconds since 1970.
    pub(crate) modified_ns: i64,
    /// Its device and inode numbers; zeros where the system has none.
    pub(crate) number: (u64, u64),
}

/// What a path refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileKind {
    Regular,
    Directory,
    Other,
}
