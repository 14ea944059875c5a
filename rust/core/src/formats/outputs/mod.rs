//! Files of several formats that are written by several threads: an encoder of each thread turns
//! records into bytes, and the output appends these in order.

mod array_record;
mod bagz;
mod framed;
mod output;

use std::path::Path;

use crate::io::new_file::NewFile;
use crate::{Error, Result};

pub use output::{Encoded, Encoder, OpenFile, Output};

/// Creates a file of `format` with `options`, which there must not be yet.
///
/// The formats are `array_record`, `tfrecord`, `jsonl` and `bagz`.
///
/// # Errors
/// If there is no such format, an option is invalid, or the file cannot be created.
pub fn create(format: &str, path: &Path, options: &str) -> Result<Box<dyn Output>> {
    create_in(format, path, options, &mut NewFile::boxed_new)
}

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
