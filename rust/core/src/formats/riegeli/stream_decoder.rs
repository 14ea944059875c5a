//! Decodes a compressed block as a stream, with only a window of it in memory.

use std::fmt;

use brotli::BrotliDecompressStream;
use zstd_safe::{DCtx, DParameter, InBuffer, OutBuffer};

use super::brotli_memory::{BrotliState, brotli_problem, brotli_state};
use super::cursor::Cursor;
use super::decompress::{codec, reserve, wrong_len};
use super::{FormatError, StreamError};
use crate::varint::MAX_VARINT_LEN;

/// Bytes that arrive in parts, as in `std::io::BufRead`.
pub trait ChunkSource {
    /// The next bytes that are in memory, after reading more if there are none; empty at the end.
    ///
    /// # Errors
    /// If they cannot be read.
    fn fill(&mut self) -> Result<&[u8], StreamError>;

    /// Skips `len` of these bytes.
    fn consume(&mut self, len: usize);
}

impl ChunkSource for &[u8] {
    fn fill(&mut self) -> Result<&[u8], StreamError> {
        Ok(self)
    }

    fn consume(&mut self, len: usize) {
        *self = &self[len..];
    }
}

impl<S: ChunkSource> ChunkSource for &mut S {
    fn fill(&mut self) -> Result<&[u8], StreamError> {
        (**self).fill()
    }

    fn consume(&mut self, len: usize) {
        (**self).consume(len);
    }
}

/// Reads a varint.
///
/// # Errors
/// If it is truncated or does not fit 64 bits.
pub fn varint64(source: &mut impl ChunkSource) -> Result<u64, StreamError> {
    let mut bytes = Vec::with_capacity(MAX_VARINT_LEN);
    while bytes.len() < MAX_VARINT_LEN {
        let Some(&byte) = source.fill()?.first() else { break };
        source.consume(1);
        bytes.push(byte);
        if byte < 0x80 {
            break;
        }
    }
    Ok(Cursor::new(&bytes).varint64()?)
}

/// Windows of zstd streams that are allowed whatever the length of the stream; and the maximum.
const MIN_WINDOW_LOG: u32 = 27;
const MAX_WINDOW_LOG: u32 = 31;

/// The initial length of the window of decoded bytes.
const WINDOW_LEN: usize = 64 << 10;

/// Decodes a block from start to end.
#[derive(Debug)]
pub struct StreamDecoder<S> {
    source: S,
    stream: Stream,
    /// The decoded length, if stated.
    stated: Option<u64>,
    decoded_len: u64,
    window: Vec<u8>,
    /// The range of the window that has been decoded but not read.
    from: usize,
    to: usize,
}

impl<S: ChunkSource> StreamDecoder<S> {
    /// Whether blocks of this codec can be decoded as a stream.
    pub fn supports(codec: u8) -> bool {
        matches!(codec, codec::NONE | codec::ZSTD | codec::BROTLI)
    }

    /// Starts to decode the block from `source`; `codec` must be [supported](Self::supports).
    ///
    /// # Errors
    /// If the stated length is missing, or there is not enough memory.
    pub fn new(codec: u8, mut source: S) -> Result<Self, StreamError> {
        let stated = if codec == codec::NONE { None } else { Some(varint64(&mut source)?) };
        let stream = Stream::new(codec, stated.unwrap_or(0))?;
        Ok(Self { source, stream, stated, decoded_len: 0, window: Vec::new(), from: 0, to: 0 })
    }

    /// The next `len` bytes.
    ///
    /// # Errors
    /// If there are fewer, or the block is damaged.
    #[inline]
    pub fn take(&mut self, len: usize) -> Result<&[u8], StreamError> {
        if self.to - self.from < len {
            self.fill_window(len)?;
        }
        let begin = self.from;
        let end = begin + len;
        if end > self.to {
            let text = format!("expected {len} more bytes, {} left", self.to - begin);
            return Err(FormatError::new(text).into());
        }
        self.from = end;
        Ok(&self.window[begin..end])
    }

    /// The next varint.
    ///
    /// # Errors
    /// If there is none, or the block is damaged.
    #[inline]
    pub fn varint64(&mut self) -> Result<u64, StreamError> {
        match self.window[self.from..self.to].first() {
            Some(&byte) if byte < 0x80 => {
                self.from += 1;
                Ok(u64::from(byte))
            }
            _ => self.long_varint(),
        }
    }

    #[cold]
    fn long_varint(&mut self) -> Result<u64, StreamError> {
        self.fill_window(MAX_VARINT_LEN)?;
        let mut cursor = Cursor::new(&self.window[self.from..self.to]);
        let value = cursor.varint64()?;
        self.from = self.to - cursor.rest().len();
        Ok(value)
    }

    /// Checks that the block ends here.
    ///
    /// # Errors
    /// If bytes are left, or the block is damaged.
    pub fn finish(mut self) -> Result<(), StreamError> {
        self.fill_window(1)?;
        if self.from < self.to {
            return Err(FormatError::fixed("data left after the last record").into());
        }
        if !self.stream.is_done {
            return Err(FormatError::fixed("compressed stream is truncated").into());
        }
        if !self.source.fill()?.is_empty() {
            return Err(FormatError::fixed(
                "compressed stream does not end at the end of the block",
            )
            .into());
        }
        match self.stated {
            Some(stated) if stated != self.decoded_len => {
                Err(wrong_len(self.decoded_len, stated).into())
            }
            _ => Ok(()),
        }
    }

    /// Decodes until the window has `len` unread bytes or the stream ends.
    #[cold]
    fn fill_window(&mut self, len: usize) -> Result<(), StreamError> {
        self.window.copy_within(self.from..self.to, 0);
        (self.from, self.to) = (0, self.to - self.from);
        while self.to < len {
            if self.to == self.window.len() {
                // Doubling bounds memory by what was decoded, not by what is stated.
                let more = self.window.len().max(WINDOW_LEN);
                reserve(&mut self.window, more)?;
                self.window.resize(self.window.len() + more, 0);
            }
            let input = self.source.fill()?;
            let is_last = input.is_empty();
            let (read, written) = self.stream.step(input, &mut self.window[self.to..])?;
            self.source.consume(read);
            self.to += written;
            self.decoded_len += written as u64;
            if self.stated.is_some_and(|stated| self.decoded_len > stated) {
                return Err(wrong_len(self.decoded_len, self.stated.unwrap_or(0)).into());
            }
            if written == 0 && (is_last || self.stream.is_done || read == 0) {
                break;
            }
        }
        Ok(())
    }
}

/// A streaming decompressor.
struct Stream {
    engine: Engine,
    is_done: bool,
}

enum Engine {
    Plain,
    Zstd(DCtx<'static>),
    Brotli(Box<BrotliState>),
}

impl fmt::Debug for Stream {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Stream").field("is_done", &self.is_done).finish_non_exhaustive()
    }
}

impl Stream {
    /// Starts a stream of `stated` decoded bytes.
    fn new(codec: u8, stated: u64) -> Result<Self, FormatError> {
        let engine = match codec {
            codec::NONE => Engine::Plain,
            codec::ZSTD => {
                let mut context = DCtx::try_create()
                    .ok_or(FormatError::fixed("no memory for a zstd decompressor"))?;
                // Limited because zstd allocates the window as soon as the frame starts.
                let needed = 64 - stated.saturating_sub(1).leading_zeros();
                let max_log = needed.clamp(MIN_WINDOW_LOG, MAX_WINDOW_LOG);
                context.set_parameter(DParameter::WindowLogMax(max_log)).map_err(damaged)?;
                Engine::Zstd(context)
            }
            codec::BROTLI => Engine::Brotli(Box::new(brotli_state())),
            _ => return Err(FormatError::new(format!("unknown compression type {codec:#04x}"))),
        };
        Ok(Self { engine, is_done: false })
    }

    /// Decodes some of `input` into `out`; returns how much was read and written.
    fn step(&mut self, input: &[u8], out: &mut [u8]) -> Result<(usize, usize), FormatError> {
        if self.is_done {
            return Ok((0, 0));
        }
        match &mut self.engine {
            Engine::Plain => {
                let len = input.len().min(out.len());
                out[..len].copy_from_slice(&input[..len]);
                self.is_done = input.is_empty();
                Ok((len, len))
            }
            Engine::Zstd(context) => {
                let mut from = InBuffer::around(input);
                let mut to = OutBuffer::around(out);
                let left = context.decompress_stream(&mut to, &mut from).map_err(damaged)?;
                self.is_done = left == 0;
                Ok((from.pos(), to.pos()))
            }
            Engine::Brotli(state) => {
                let (mut unread, mut read) = (input.len(), 0);
                let (mut free, mut written, mut total) = (out.len(), 0, 0);
                let result = BrotliDecompressStream(
                    &mut unread,
                    &mut read,
                    input,
                    &mut free,
                    &mut written,
                    out,
                    &mut total,
                    state,
                );
                self.is_done = matches!(result, brotli::BrotliResult::ResultSuccess);
                match result {
                    brotli::BrotliResult::ResultFailure => Err(brotli_problem(state)),
                    _ => Ok((read, written)),
                }
            }
        }
    }
}

#[cold]
fn damaged(code: usize) -> FormatError {
    FormatError::new(format!("zstd stream is damaged: {}", zstd_safe::get_error_name(code)))
}

#[cfg(test)]
mod tests {
    use super::super::compress::{Codec, Compressor};
    use super::*;

    /// A source that returns at most seven bytes at a time.
    struct ShortReads<'a>(&'a [u8]);

    impl ChunkSource for ShortReads<'_> {
        fn fill(&mut self) -> Result<&[u8], StreamError> {
            Ok(&self.0[..self.0.len().min(7)])
        }

        fn consume(&mut self, len: usize) {
            self.0 = &self.0[len..];
        }
    }

    fn block_of(codec: Codec, plain: &[u8]) -> Vec<u8> {
        let mut block = Vec::new();
        Compressor::new(codec).unwrap().append(plain, &mut block).unwrap();
        block
    }

    const CODECS: [Codec; 3] = [
        Codec::Uncompressed,
        Codec::Zstd { level: 3, window_log: 20 },
        Codec::Brotli { level: 5, window_log: None },
    ];

    fn text_of(error: Result<(), StreamError>) -> String {
        match error {
            Ok(()) => "ok".to_owned(),
            Err(StreamError::Data(problem)) => problem.to_string(),
            Err(StreamError::File(error)) => error.to_string(),
        }
    }

    #[test]
    fn streams_decode_to_the_same_bytes_as_whole_blocks() {
        let plain: Vec<u8> = (0..100_000_u32).flat_map(|n| (n / 3).to_le_bytes()).collect();
        for codec in CODECS {
            let block = block_of(codec, &plain);
            let mut decoder = StreamDecoder::new(codec.code(), ShortReads(&block)).unwrap();
            let mut found = Vec::new();
            for len in [1, 0, 70_000, 3, 200_000, 129_996] {
                found.extend_from_slice(decoder.take(len).unwrap());
            }
            assert!(found == plain, "{codec:?}");
            decoder.finish().unwrap();
        }
    }

    #[test]
    fn blocks_with_missing_or_extra_bytes_are_refused() {
        for codec in CODECS {
            let read_two = |block: &[u8]| {
                let mut decoder = StreamDecoder::new(codec.code(), ShortReads(block))?;
                decoder.take(2)?;
                decoder.finish()
            };
            let block = block_of(codec, b"ab");
            assert_eq!(text_of(read_two(&block)), "ok", "{codec:?}");
            for wrong in [&block[..block.len() - 1], &[&block[..], b"x"].concat(), b"", b"\x02"] {
                assert_ne!(text_of(read_two(wrong)), "ok", "{codec:?}: {wrong:?}");
            }
            let longer = block_of(codec, b"abc");
            assert_eq!(text_of(read_two(&longer)), "data left after the last record", "{codec:?}");
        }
    }

    #[test]
    fn stated_lengths_are_checked() {
        let mut block = block_of(CODECS[1], b"ab");
        for stated in [1, 3] {
            block[0] = stated;
            let mut decoder = StreamDecoder::new(b'z', &block[..]).unwrap();
            let result = decoder.take(2).map(drop).and_then(|()| decoder.finish());
            assert!(text_of(result).starts_with("block decoded to 2 bytes"), "stated {stated}");
        }
    }

    #[test]
    fn varints_may_span_several_reads() {
        let block = [b"abcde".as_slice(), &[0x81, 0x82, 0x83, 0x04], b"\x07"].concat();
        let mut decoder = StreamDecoder::new(0, ShortReads(&block)).unwrap();
        decoder.take(5).unwrap();
        assert_eq!(decoder.varint64().unwrap(), 1 | 2 << 7 | 3 << 14 | 4 << 21);
        assert_eq!(decoder.varint64().unwrap(), 7);
        assert!(decoder.varint64().is_err());
    }
}
