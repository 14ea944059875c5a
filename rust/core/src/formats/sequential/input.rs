//! The bytes of a stream: of a file or of any reader, decompressed.
//!
//! `scanned::inflate` decompresses gzip and zlib, too: it can start at points inside of them, for which
//! this decompressor, which takes half the time, has no means.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read};

use flate2::{Decompress, FlushDecompress, Status};
use zstd_safe::{DCtx, InBuffer, OutBuffer};

use super::super::scanned::Compression;
use crate::io::file_bytes::FileBytes;

/// How many compressed bytes are read at once.
const BUFFER_LEN: usize = 64 << 10;
/// The largest window, which decompresses all.
const WINDOW_BITS: u8 = 15;
/// The first byte of a gzip member.
const GZIP_MARK: u8 = 0x1f;

/// Where bytes come from.
pub(super) enum ByteSource {
    File(FileBytes),
    Other(Box<dyn Read + Send>),
}

impl Read for ByteSource {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::File(file) => file.read(out),
            Self::Other(input) => input.read(out),
        }
    }
}

/// Decompressed bytes.
pub(super) enum Input {
    Plain(ByteSource),
    Deflate(Deflate),
    Zstd(Zstd),
}

impl fmt::Debug for Input {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:?}", self.compression())
    }
}

impl Input {
    pub(super) fn new(source: ByteSource, compression: Compression) -> io::Result<Self> {
        let buffered = |source| BufReader::with_capacity(BUFFER_LEN, source);
        Ok(match compression {
            Compression::None => Self::Plain(source),
            Compression::Gzip | Compression::Zlib => {
                Self::Deflate(Deflate::new(buffered(source), compression == Compression::Gzip))
            }
            Compression::Zstd => Self::Zstd(Zstd {
                input: buffered(source),
                context: DCtx::try_create()
                    .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?,
                is_in_frame: false,
            }),
        })
    }

    pub(super) fn compression(&self) -> Compression {
        match self {
            Self::Plain(_) => Compression::None,
            Self::Deflate(Deflate { is_gzip: true, .. }) => Compression::Gzip,
            Self::Deflate(_) => Compression::Zlib,
            Self::Zstd(_) => Compression::Zstd,
        }
    }

    /// How many bytes follow, if that is known.
    pub(super) fn left(&self) -> Option<u64> {
        match self {
            Self::Plain(ByteSource::File(file)) => Some(file.left()),
            _ => None,
        }
    }

    /// How many compressed bytes have been read, if the stream is compressed and that is known.
    pub(super) fn compressed_offset(&self) -> Option<u64> {
        let source = match self {
            Self::Plain(_) => return None,
            Self::Deflate(Deflate { input, .. }) | Self::Zstd(Zstd { input, .. }) => {
                input.get_ref()
            }
        };
        match source {
            ByteSource::File(file) => Some(file.byte_len() - file.left()),
            ByteSource::Other(_) => None,
        }
    }

    /// Goes on at position `at` of the stream, if its source is a file: a compressed one is read
    /// from its begin for that.
    pub(super) fn seek(&mut self, at: u64) -> io::Result<()> {
        let compression = self.compression();
        let source = match self {
            Self::Plain(source) => source,
            Self::Deflate(Deflate { input, .. }) | Self::Zstd(Zstd { input, .. }) => {
                input.get_mut()
            }
        };
        let ByteSource::File(file) = source else {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the input cannot seek"));
        };
        if compression == Compression::None {
            file.seek(at);
            return Ok(());
        }
        file.seek(0);
        let source = std::mem::replace(source, ByteSource::Other(Box::new(io::empty())));
        *self = Self::new(source, compression)?;
        io::copy(&mut self.take(at), &mut io::sink()).map(drop)
    }
}

impl Read for Input {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(source) => source.read(out),
            Self::Deflate(stream) => stream.read(out),
            Self::Zstd(stream) => stream.read(out),
        }
    }
}

fn damaged(problem: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem)
}

fn cut_short() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "compressed data are cut short")
}

/// One stream of zlib, or any number of members of gzip, which zeros may follow: files on tapes are
/// padded with them.
pub(super) struct Deflate {
    input: BufReader<ByteSource>,
    decompress: Decompress,
    is_gzip: bool,
    /// Whether the stream, or a member, has ended.
    is_end: bool,
}

impl Deflate {
    fn new(input: BufReader<ByteSource>, is_gzip: bool) -> Self {
        let decompress =
            if is_gzip { Decompress::new_gzip(WINDOW_BITS) } else { Decompress::new(true) };
        Self { input, decompress, is_gzip, is_end: false }
    }
}

impl Read for Deflate {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while !out.is_empty() {
            let available = self.input.fill_buf()?;
            if self.is_end {
                match available.iter().position(|&byte| byte != 0) {
                    _ if available.is_empty() => break,
                    Some(0) if self.is_gzip && available[0] == GZIP_MARK => {
                        self.decompress = Decompress::new_gzip(WINDOW_BITS);
                        self.is_end = false;
                    }
                    Some(0) if self.is_gzip => {
                        return Err(damaged("other data follow the last gzip member"));
                    }
                    num_zeros if self.is_gzip => {
                        let num_zeros = num_zeros.unwrap_or(available.len());
                        self.input.consume(num_zeros);
                        continue;
                    }
                    _ => return Err(damaged("other data follow the zlib stream")),
                }
            }
            let is_last = available.is_empty();
            let (read, written) = (self.decompress.total_in(), self.decompress.total_out());
            let status = self.decompress.decompress(available, out, FlushDecompress::None);
            let status = status.map_err(damaged)?;
            let len = |count: u64| usize::try_from(count).unwrap_or(usize::MAX);
            self.input.consume(len(self.decompress.total_in() - read));
            self.is_end = status == Status::StreamEnd;
            let written = len(self.decompress.total_out() - written);
            if written > 0 {
                return Ok(written);
            }
            if is_last && !self.is_end {
                return Err(cut_short());
            }
        }
        Ok(0)
    }
}

/// One or more frames of zstd, and those that are skipped.
pub(super) struct Zstd {
    input: BufReader<ByteSource>,
    context: DCtx<'static>,
    is_in_frame: bool,
}

impl Read for Zstd {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while !out.is_empty() {
            let available = self.input.fill_buf()?;
            let is_last = available.is_empty();
            if is_last && !self.is_in_frame {
                break;
            }
            let mut from = InBuffer::around(available);
            let mut to = OutBuffer::around(&mut *out);
            let missing = self
                .context
                .decompress_stream(&mut to, &mut from)
                .map_err(|code| damaged(zstd_safe::get_error_name(code)))?;
            let (read, written) = (from.pos(), to.pos());
            self.input.consume(read);
            self.is_in_frame = missing != 0;
            if written > 0 {
                return Ok(written);
            }
            if is_last && self.is_in_frame {
                return Err(cut_short());
            }
        }
        Ok(0)
    }
}
