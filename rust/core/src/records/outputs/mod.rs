//! Files of several formats that are written by several threads: an encoder of each thread turns
//! records into bytes, and the output appends these in order.

mod array_record;
mod bagz;
mod framed;

use std::fmt::Debug;
use std::path::Path;

use super::array_record::writer::EncodedChunks;
use super::new_file::NewFile;
use super::sequential::RecordBlock;
use super::storage::WriteFile;
use crate::{Error, Result};

/// Records as they are in a file, made by an encoder for the output that gave it.
#[derive(Debug, Default)]
pub struct Encoded {
    /// Of `ArrayRecord` files.
    chunks: EncodedChunks,
    /// Of other files.
    bytes: Vec<u8>,
    /// The stored length of each record, for files with an index at their end.
    lens: Vec<u64>,
}

impl Encoded {
    fn clear(&mut self) {
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

/// Creates a file of `format` with `options`, which there must not be yet.
///
/// The formats are `array_record`, `tfrecord`, `jsonl` and `bagz`.
///
/// # Errors
/// If there is no such format, an option is invalid, or the file cannot be created.
pub fn create(format: &str, path: &Path, options: &str) -> Result<Box<dyn Output>> {
    create_in(format, path, options, &mut NewFile::boxed_new)
}

/// Creates a file, where a storage keeps it.
pub type OpenFile<'a> = &'a mut dyn FnMut(&Path) -> Result<Box<dyn WriteFile>>;

/// As [`create`], in the file that `open` creates once the options are found to be valid.
///
/// # Errors
/// If there is no such format, an option is invalid, or `open` fails.
pub fn create_in(
    format: &str,
    path: &Path,
    options: &str,
    open: OpenFile<'_>,
) -> Result<Box<dyn Output>> {
    match format {
        "array_record" => {
            Ok(Box::new(array_record::ArrayRecordOutput::create(path, options, open)?))
        }
        "bagz" => Ok(Box::new(bagz::BagzOutput::create(path, options, open)?)),
        "tfrecord" | "jsonl" => Ok(Box::new(framed::Framed::create(path, format, options, open)?)),
        _ => Err(Error::InvalidArgument(format!("files of format `{format}` cannot be written"))),
    }
}

/// The level in `name:LEVEL` or `name`; `None` if `option` has another name.
fn level_of(option: &str, name: &str, default: i32) -> Option<Result<i32>> {
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
