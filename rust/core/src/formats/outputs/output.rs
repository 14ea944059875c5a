//! The interface of a file that is being written: encoders, and the output that appends what they made.

use std::fmt::Debug;
use std::path::Path;

use crate::formats::array_record::writer::EncodedChunks;
use crate::formats::sequential::RecordBlock;
use crate::io::storage::WriteFile;
use crate::{Error, Result};

/// Records as they are in a file, made by an encoder for the output that gave it.
#[derive(Debug, Default)]
pub struct Encoded {
    /// Of `ArrayRecord` files.
    pub(super) chunks: EncodedChunks,
    /// Of other files.
    pub(super) bytes: Vec<u8>,
    /// The stored length of each record, for files with an index at their end.
    pub(super) lens: Vec<u64>,
}

impl Encoded {
    pub(super) fn clear(&mut self) {
        self.chunks.clear();
        self.bytes.clear();
        self.lens.clear();
    }
}

/// Encodes records on one thread.
pub trait Encoder: Debug + Send {
    /// Replaces the content of `out` by the records of `block`.
    ///
    /// # Errors
    /// If a record cannot be stored in this format, or the codec fails.
    fn encode(&mut self, block: &RecordBlock, out: &mut Encoded) -> Result<()>;
}

/// A file that is being written. It can be read once [`close`](Self::close) has returned.
pub trait Output: Debug + Send {
    /// How many records are encoded together: each block but the last has a multiple of this.
    fn group_size(&self) -> usize;

    /// An encoder for records of this file.
    ///
    /// # Errors
    /// If the codec cannot be set up.
    fn encoder(&self) -> Result<Box<dyn Encoder>>;

    /// Appends encoded records.
    ///
    /// # Errors
    /// If the file cannot be written.
    fn append(&mut self, encoded: &Encoded) -> Result<()>;

    /// Writes what follows the records and syncs the file.
    ///
    /// # Errors
    /// If that fails.
    fn close(self: Box<Self>) -> Result<()>;
}

/// Creates a file, where a storage keeps it.
pub type OpenFile<'a> = &'a mut dyn FnMut(&Path) -> Result<Box<dyn WriteFile>>;

/// The level in `name:LEVEL` or `name`; `None` if `option` has another name.
pub(super) fn level_of(option: &str, name: &str, default: i32) -> Option<Result<i32>> {
    let (key, value) = option.split_once(':').unwrap_or((option, ""));
    (key == name).then(|| {
        if value.is_empty() {
            return Ok(default);
        }
        value.parse().map_err(|_| {
            Error::InvalidArgument(format!("level of `{name}` must be a number, got `{value}`"))
        })
    })
}
