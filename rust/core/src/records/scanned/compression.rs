//! How files of records are compressed as a whole.

use std::path::Path;

use super::inflate::zlib_problem;

/// How a whole file is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Not at all.
    None,
    /// By gzip, in any number of members.
    Gzip,
    /// By zlib.
    Zlib,
    /// By zstd, in any number of frames; can be read from begin to end only.
    Zstd,
}

/// A format whose files may be compressed.
pub trait MayBeCompressed {
    /// The compression of the file at `path`, which begins with `head`; that is not empty.
    fn detect(&self, path: &Path, head: &[u8]) -> Compression;

    /// The compression of the file at `path`, which begins with `head`: nothing is no records,
    /// whatever its name says.
    fn compression(&self, path: &Path, head: &[u8]) -> Compression {
        if head.is_empty() { Compression::None } else { self.detect(path, head) }
    }
}

impl Compression {
    /// What the first bytes of a file say; those of zlib are too few to tell it from other files.
    pub fn detected(head: &[u8]) -> Self {
        match head {
            [0x1f, 0x8b, ..] => Self::Gzip,
            // A frame, or one that readers skip.
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Self::Zstd,
            _ => Self::None,
        }
    }

    /// Whether `head` is the header of a zlib stream.
    pub fn is_zlib(head: &[u8]) -> bool {
        matches!(head, &[method, flags, ..] if zlib_problem(method, flags).is_none())
    }

    /// The text for the place of a record that begins at byte `at` of the decompressed data.
    pub(crate) fn place(self, record: Option<u64>, at: u64) -> String {
        let record = record.map_or_else(String::new, |record| format!("{record} "));
        let of = if self == Self::None { "" } else { " of the decompressed data" };
        format!("record {record}at byte {at}{of}")
    }
}
