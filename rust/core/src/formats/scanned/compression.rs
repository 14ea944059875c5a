//! How files of records are compressed as a whole.

use std::path::Path;

use crate::{Error, Result};

/// How many bytes tell of which kind a file is, and how it is compressed.
pub const HEAD_LEN: usize = 4 << 10;

/// How a whole file is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Not at all.
    None,
    /// By gzip, in any number of members.
    Gzip,
    /// By zlib.
    Zlib,
    /// By zstd, in any number of frames.
    Zstd,
    /// By xz, in any number of streams.
    Xz,
    /// By bzip2, in any number of streams.
    Bzip2,
}

/// A format whose files may be compressed.
pub trait MayBeCompressed {
    /// The compression of the file at `path`, which begins with `head`; that is not empty.
    fn detect(&self, path: &Path, head: &[u8]) -> Compression;

    /// What is wrong with a file that begins with `head`, as those of another kind do.
    fn other_kind(&self, head: &[u8]) -> Option<&'static str> {
        other_kind(head)
    }

    /// What is wrong with a file that is not compressed, or what one decompresses to, that begins with
    /// `head`.
    fn not_plain(&self, _head: &[u8]) -> Option<&'static str> {
        None
    }

    /// The compression of the file at `path`, which begins with `head`: nothing is no records,
    /// whatever its name says.
    ///
    /// # Errors
    /// If it is a file of another kind: its bytes would be garbage as records.
    fn compression(&self, path: &Path, head: &[u8]) -> Result<Compression> {
        let found = if head.is_empty() { Compression::None } else { self.detect(path, head) };
        let not_plain = || self.not_plain(head).filter(|_| found == Compression::None);
        match self.other_kind(head).or_else(not_plain) {
            Some(problem) => Err(Error::corrupt(path, "whole file", problem)),
            None => Ok(found),
        }
    }

    /// Checks what the file at `path` decompresses to, which begins with `head`.
    ///
    /// # Errors
    /// As [`compression`](Self::compression), and if it is compressed, too.
    fn check_content(&self, path: &Path, head: &[u8]) -> Result<()> {
        let problem = if head.is_empty() {
            None
        } else if self.detect(Path::new(""), head) == Compression::None {
            self.other_kind(head).or_else(|| self.not_plain(head))
        } else {
            Some("compressed, too: decompress the file once")
        };
        problem.map_or(Ok(()), |problem| Err(Error::corrupt(path, "decompressed data", problem)))
    }
}

/// What is wrong with a file that begins like those that no format here has.
pub fn other_kind(head: &[u8]) -> Option<&'static str> {
    Some(match head {
        [0x04, 0x22, 0x4d, 0x18, ..] => "compressed by LZ4, which is not supported: decompress it",
        [b'P', b'K', 3, 4, ..] => "a zip archive, which is not supported: unpack it",
        [b'7', b'z', 0xbc, 0xaf, 0x27, 0x1c, ..] => {
            "a 7z archive, which is not supported: unpack it"
        }
        [b'P', b'A', b'R', b'1', 0x15, ..] => "a Parquet file: open it as one",
        [b'O', b'b', b'j', 1, ..] => "an Avro file, which is not supported",
        _ => return None,
    })
}

/// Why a stream of zlib cannot have this header.
pub(super) fn zlib_problem(method: u8, flags: u8) -> Option<&'static str> {
    if method & 15 != 8 || method >> 4 > 7 {
        return Some("zlib header has an unknown method or window");
    }
    if !u16::from_be_bytes([method, flags]).is_multiple_of(31) {
        return Some("zlib header has a wrong check value");
    }
    (flags & 32 != 0).then_some("zlib stream needs a dictionary, which is not supported")
}

impl Compression {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::None, Self::Gzip, Self::Zlib, Self::Zstd, Self::Xz, Self::Bzip2];

    /// The name that Python has for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Gzip => "gzip",
            Self::Zlib => "zlib",
            Self::Zstd => "zstd",
            Self::Xz => "xz",
            Self::Bzip2 => "bzip2",
        }
    }

    /// Whether decompression can start inside of a file.
    pub fn has_random_access(self) -> bool {
        !matches!(self, Self::Xz | Self::Bzip2)
    }

    /// What the first bytes of a file say; those of zlib are too few to tell it from other files.
    pub fn detected(head: &[u8]) -> Self {
        match head {
            [0x1f, 0x8b, ..] => Self::Gzip,
            // A frame, or one that readers skip.
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Self::Zstd,
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Self::Xz,
            // With a block or without.
            [b'B', b'Z', b'h', b'1'..=b'9', 0x31, 0x41, 0x59, 0x26, 0x53, 0x59, ..]
            | [b'B', b'Z', b'h', b'1'..=b'9', 0x17, 0x72, 0x45, 0x38, 0x50, 0x90, ..] => {
                Self::Bzip2
            }
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
