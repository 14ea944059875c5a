//! The bytes of a stream: of a file or of any reader, decompressed.
//!
//! `scanned::inflate` decompresses gzip, zlib and zstd, too: it can start at points inside of gzip and zlib,
//! for which this decompressor, which takes half the time, has no means.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use flate2::{Decompress, FlushDecompress, Status};
use zstd_safe::{DCtx, InBuffer, OutBuffer};

use super::super::scanned::Compression;
use crate::io::file_bytes::FileBytes;
use crate::timeline::{self, Activity};

/// How many compressed bytes are read at once.
const BUFFER_LEN: usize = 64 << 10;
/// The largest window of deflate, which decompresses all.
const WINDOW_BITS: u8 = 15;
/// The memory that a file of xz may ask for: `xz -9` asks for 65 MiB.
const XZ_MEMORY: u64 = 256 << 20;
/// Of how many decompressed bytes one start of a member is remembered, so that memory is bounded.
const START_SPACING: u64 = 64 << 10;

/// Where bytes come from.
pub(super) enum ByteSource {
    File(FileBytes),
    Other(Box<dyn Read + Send>),
}

impl ByteSource {
    /// The path of the file; empty for another input.
    fn path(&self) -> &Path {
        match self {
            Self::File(file) => file.path(),
            Self::Other(_) => Path::new(""),
        }
    }

    fn seek(&mut self, at: u64) -> io::Result<()> {
        let Self::File(file) = self else {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the input cannot seek"));
        };
        file.seek(at);
        Ok(())
    }
}

impl Read for ByteSource {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::File(file) => file.read(out),
            Self::Other(input) => input.read(out),
        }
    }
}

/// A place where decompression can start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Start {
    /// Where it is in the file.
    pub stored: u64,
    /// The position of what follows it in the decompressed file.
    pub decompressed: u64,
}

/// Decompressed bytes.
pub(super) enum Input {
    Plain(ByteSource),
    Compressed(Box<Members>),
}

impl fmt::Debug for Input {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:?}", self.compression())
    }
}

impl Input {
    pub(super) fn new(source: ByteSource, compression: Compression) -> io::Result<Self> {
        Ok(match compression {
            Compression::None => Self::Plain(source),
            _ => Self::Compressed(Box::new(Members::new(source, compression, Start::default())?)),
        })
    }

    pub(super) fn compression(&self) -> Compression {
        match self {
            Self::Plain(_) => Compression::None,
            Self::Compressed(members) => members.compression,
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
        match self {
            Self::Plain(_) => None,
            Self::Compressed(members) => match members.input.get_ref() {
                ByteSource::File(file) => Some(file.byte_len() - file.left()),
                ByteSource::Other(_) => None,
            },
        }
    }

    /// The last start before position `at` of the stream that is known.
    pub(super) fn start_before(&self, at: u64) -> Start {
        let starts = match self {
            Self::Plain(_) => &[][..],
            Self::Compressed(members) => &members.starts,
        };
        starts.iter().copied().rfind(|start| start.decompressed <= at).unwrap_or_default()
    }

    /// Forgets starts that are not needed to go on at position `at` or later.
    pub(super) fn forget_starts_before(&mut self, at: u64) {
        if let Self::Compressed(members) = self {
            let starts = &mut members.starts;
            let last = starts.iter().rposition(|start| start.decompressed <= at);
            starts.drain(..last.unwrap_or(0));
        }
    }

    /// Remembers `start` instead of those that were found.
    pub(super) fn set_start(&mut self, start: Start) {
        if let Self::Compressed(members) = self {
            members.starts = vec![start];
        }
    }

    /// Goes on at position `at` of the stream, if its source is a file: a compressed one is read
    /// from the last start before it.
    pub(super) fn seek(&mut self, at: u64) -> io::Result<()> {
        let start = self.start_before(at);
        match self {
            Self::Plain(source) => source.seek(at),
            Self::Compressed(members) => {
                members.input.get_mut().seek(start.stored)?;
                let nothing = ByteSource::Other(Box::new(io::empty()));
                let source = std::mem::replace(members.input.get_mut(), nothing);
                **members = Members::new(source, members.compression, start)?;
                io::copy(&mut members.take(at - start.decompressed), &mut io::sink()).map(drop)
            }
        }
    }
}

impl Read for Input {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(source) => source.read(out),
            Self::Compressed(members) => members.read(out),
        }
    }
}

fn damaged(problem: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem)
}

/// What a member is decompressed by.
enum Decoder {
    Deflate(Decompress),
    Zstd(DCtx<'static>),
    Xz(liblzma::stream::Stream),
    Bzip2(bzip2::Decompress),
}

impl Decoder {
    fn new(compression: Compression) -> io::Result<Self> {
        Ok(match compression {
            Compression::Gzip => Self::Deflate(Decompress::new_gzip(WINDOW_BITS)),
            Compression::Zlib | Compression::None => Self::Deflate(Decompress::new(true)),
            Compression::Zstd => Self::Zstd(
                DCtx::try_create().ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?,
            ),
            Compression::Xz => Self::Xz(liblzma::stream::Stream::new_stream_decoder(XZ_MEMORY, 0)?),
            Compression::Bzip2 => Self::Bzip2(bzip2::Decompress::new(false)),
        })
    }

    /// Decompresses some of `from` into `to`: how many bytes of each, and whether the member has ended.
    fn step(&mut self, from: &[u8], to: &mut [u8]) -> io::Result<(usize, usize, bool)> {
        let len = |count: u64| usize::try_from(count).unwrap_or(usize::MAX);
        match self {
            Self::Deflate(decoder) => {
                let (read, written) = (decoder.total_in(), decoder.total_out());
                let status =
                    decoder.decompress(from, to, FlushDecompress::None).map_err(damaged)?;
                let (read, written) = (decoder.total_in() - read, decoder.total_out() - written);
                Ok((len(read), len(written), status == Status::StreamEnd))
            }
            Self::Zstd(decoder) => {
                let (mut from, mut to) = (InBuffer::around(from), OutBuffer::around(to));
                let missing = decoder
                    .decompress_stream(&mut to, &mut from)
                    .map_err(|code| damaged(zstd_safe::get_error_name(code)))?;
                Ok((from.pos(), to.pos(), missing == 0))
            }
            Self::Xz(decoder) => {
                let (read, written) = (decoder.total_in(), decoder.total_out());
                let status = match decoder.process(from, to, liblzma::stream::Action::Run) {
                    Err(liblzma::stream::Error::MemLimit) => {
                        return Err(damaged(
                            "the dictionary of xz needs more than 256 MiB of memory",
                        ));
                    }
                    status => status.map_err(damaged)?,
                };
                let (read, written) = (decoder.total_in() - read, decoder.total_out() - written);
                Ok((len(read), len(written), status == liblzma::stream::Status::StreamEnd))
            }
            Self::Bzip2(decoder) => {
                let (read, written) = (decoder.total_in(), decoder.total_out());
                let status = decoder.decompress(from, to).map_err(damaged)?;
                let (read, written) = (decoder.total_in() - read, decoder.total_out() - written);
                Ok((len(read), len(written), status == bzip2::Status::StreamEnd))
            }
        }
    }
}

/// Members of gzip, frames of zstd, streams of xz or bzip2, one after the other, or one stream of zlib. Zeros
/// may follow those of gzip, as files on tapes are padded with them, and of xz.
pub(super) struct Members {
    input: BufReader<ByteSource>,
    compression: Compression,
    decoder: Decoder,
    /// Whether a member has ended and no other begun.
    is_between: bool,
    /// Where the stream is, in the file and decompressed.
    at: Start,
    /// Where members begin.
    starts: Vec<Start>,
}

impl Members {
    /// What follows `start`, where `source` is.
    fn new(source: ByteSource, compression: Compression, start: Start) -> io::Result<Self> {
        Ok(Self {
            input: BufReader::with_capacity(BUFFER_LEN, source),
            compression,
            decoder: Decoder::new(compression)?,
            is_between: false,
            at: start,
            starts: vec![start],
        })
    }

    /// Begins the next member; returns whether there is one.
    fn begin_member(&mut self) -> io::Result<bool> {
        loop {
            let available = self.input.fill_buf()?;
            let Some(&first) = available.first() else { return Ok(false) };
            let problem = match self.compression {
                Compression::Gzip | Compression::Xz if first == 0 => {
                    let num_zeros = available.iter().take_while(|&&byte| byte == 0).count();
                    self.at.stored += num_zeros as u64;
                    self.input.consume(num_zeros);
                    continue;
                }
                Compression::Gzip if first != 0x1f => "other data follow the last gzip member",
                Compression::Xz if first != 0xfd => "other data follow the last stream of xz",
                Compression::Bzip2 if first != b'B' => "other data follow the last stream of bzip2",
                Compression::Zlib | Compression::None => "other data follow the zlib stream",
                _ => break,
            };
            return Err(damaged(problem));
        }
        // That of zstd goes on with the next frame, and keeps its memory.
        if self.compression != Compression::Zstd {
            self.decoder = Decoder::new(self.compression)?;
        }
        self.is_between = false;
        let last = self.starts.last().map_or(0, |start| start.decompressed);
        if self.at.decompressed >= last + START_SPACING {
            self.starts.push(self.at);
        }
        Ok(true)
    }
}

impl Read for Members {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while !out.is_empty() && (!self.is_between || self.begin_member()?) {
            let available = self.input.fill_buf()?;
            let is_last = available.is_empty();
            let began = timeline::begin();
            let (read, written, is_end) = self.decoder.step(available, out)?;
            let range = self.at.stored..self.at.stored + read as u64;
            timeline::add(began, Activity::Decode, self.input.get_ref().path(), range);
            self.input.consume(read);
            self.at.stored += read as u64;
            self.at.decompressed += written as u64;
            self.is_between = is_end;
            if written > 0 {
                return Ok(written);
            }
            if is_last && !is_end {
                let text = "compressed data are cut short";
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
            }
        }
        Ok(0)
    }
}
