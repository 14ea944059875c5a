//! Formats without an index of their own: records one after the other, found by one scan.
//!
//! A [`Framing`] knows where records begin and end in a stream of bytes, a `scan` finds all of
//! them, and an `index_file` keeps what was found, so that it happens once. Of a compressed stream
//! the index also has points at which decompression can start (`stream`), about every mebibyte, or at
//! frames of zstd.

mod compression;
mod file;
mod framing;
mod index;
mod index_file;
mod inflate;
mod scan;
mod stream;

pub use compression::{Compression, HEAD_LEN, MayBeCompressed, other_kind};
pub use file::ScannedFormat;
pub use framing::{Framing, Scanner};
pub use index_file::IndexPlaces;

/// For `make fuzz`, which has targets that are not public otherwise.
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub use index_file::fuzzing;
