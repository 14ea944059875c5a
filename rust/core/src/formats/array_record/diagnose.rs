//! The error for a file that has no index where an `ArrayRecord` file has one.

use super::super::riegeli::FormatError;
use super::super::riegeli::block::BLOCK_LEN;
use super::super::riegeli::chunk::{ChunkHeader, kind};
use super::super::tfrecord::record_len;
use crate::Error;
use crate::io::storage::{Reader, StoredFile};

/// The error for a file whose postscript has `problem`, or that is too short for a postscript.
#[cold]
pub(super) fn no_index(
    stored: &dyn StoredFile,
    reader: Reader<'_>,
    problem: Option<FormatError>,
) -> Error {
    let mut first = [0; 64];
    let first_len = first.len().min(usize::try_from(stored.byte_len()).unwrap_or(usize::MAX));
    let first = &mut first[..first_len];
    if let Err(error) = reader.read_at(first, 0) {
        return error;
    }
    let looks_like = if first.is_empty() {
        "an empty file"
    } else if is_tfrecord(first) {
        "a TFRecord file, not an ArrayRecord file"
    } else if is_riegeli(first) {
        "an ArrayRecord file without its end: it was truncated or its writer was not closed"
    } else {
        "not an ArrayRecord file, or a damaged one"
    };
    let (place, problem) = match problem {
        Some(problem) => {
            (format!("postscript at byte {}", stored.byte_len() - BLOCK_LEN), problem.to_string())
        }
        None => (
            format!("file of {} bytes", stored.byte_len()),
            "ArrayRecord file should be at least 64KB big".to_owned(),
        ),
    };
    Error::corrupt(stored.path(), place, format!("{problem}; this is {looks_like}"))
}

/// Whether a file begins with the signature of Riegeli files.
fn is_riegeli(first: &[u8]) -> bool {
    let signature = ChunkHeader::of(kind::SIGNATURE, b"", 0, 0).to_bytes();
    first.get(24..).is_some_and(|rest| rest.starts_with(&signature))
}

/// Whether a file begins with a length and its checksum, as a `TFRecord` file does.
fn is_tfrecord(first: &[u8]) -> bool {
    first.first_chunk().is_some_and(|head| record_len(head).is_ok())
}
