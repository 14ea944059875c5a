//! Streams of gzip (RFC 1952), zlib (RFC 1950) and zstd (RFC 8878), with points at which decompression
//! can start.

use std::borrow::Cow;

use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::inflate_flags::{
    TINFL_FLAG_HAS_MORE_INPUT, TINFL_FLAG_STOP_ON_BLOCK_BOUNDARY,
};
use miniz_oxide::inflate::core::{BlockBoundaryState, DecompressorOxide, decompress};
use zstd_safe::{DCtx, InBuffer, OutBuffer};

use super::super::format_error::{FormatError, StreamError};
use super::super::raw_bytes::grow_to;
use super::compression::{Compression, zlib_problem};
use crate::io::forward_reads::ForwardReads;
use crate::io::storage::Reader;

/// How far back deflate refers.
pub(super) const WINDOW_LEN: usize = 32 << 10;
/// The decompressed bytes that are kept; a power of two, and more than a window.
const RING_LEN: usize = 256 << 10;
/// How many compressed bytes are read at once.
const INPUT_LEN: u64 = 256 << 10;

/// The first byte of a gzip member.
const GZIP_MARK: u8 = 0x1f;

/// Where in the compressed bytes a point is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Boundary {
    /// At the header of a member, stream or frame.
    Header,
    /// Between two blocks: how many bits of the byte before are not used yet, and these bits.
    Block(u8, u8),
}

/// Compressed bytes from a position of the file on, in memory or read as needed.
#[derive(Debug)]
pub(super) struct Input<'a> {
    bytes: Cow<'a, [u8]>,
    pos: usize,
    /// The position in the file of what follows `bytes`.
    next: u64,
    rest: Option<Rest<'a>>,
}

/// A file of which the rest is read as needed.
#[derive(Debug)]
struct Rest<'a> {
    reader: Reader<'a>,
    byte_len: u64,
    reads: ForwardReads,
}

impl<'a> Input<'a> {
    /// The bytes of a file of `byte_len`.
    pub(super) fn of_file(reader: Reader<'a>, byte_len: u64) -> Self {
        let rest = Some(Rest { reader, byte_len, reads: ForwardReads::default() });
        Self { rest, ..Self::of_bytes(&[], 0) }
    }

    /// `bytes`, which are at `at` in their file.
    pub(super) fn of_bytes(bytes: &'a [u8], at: u64) -> Self {
        let next = at + bytes.len() as u64;
        Self { bytes: Cow::Borrowed(bytes), pos: 0, next, rest: None }
    }

    /// The bytes of a file of `byte_len` that begins with `head`.
    pub(super) fn with_head(head: &'a [u8], reader: Reader<'a>, byte_len: u64) -> Self {
        Self { rest: Self::of_file(reader, byte_len).rest, ..Self::of_bytes(head, 0) }
    }

    /// The position in the file of the next byte.
    fn at(&self) -> u64 {
        self.next - (self.bytes.len() - self.pos) as u64
    }

    /// The next bytes; none at the end.
    fn available(&mut self) -> Result<&[u8], StreamError> {
        if self.pos == self.bytes.len()
            && let Some(Rest { reader, byte_len, reads }) = &mut self.rest
            && self.next < *byte_len
        {
            let len = INPUT_LEN.min(*byte_len - self.next);
            let bytes = self.bytes.to_mut();
            bytes.truncate(usize::try_from(len).unwrap_or(usize::MAX));
            reads.read(*reader, grow_to(bytes, len)?, self.next, *byte_len)?;
            self.next += len;
            self.pos = 0;
        }
        Ok(&self.bytes[self.pos..])
    }

    fn byte(&mut self) -> Result<u8, StreamError> {
        let byte = self.available()?.first().copied();
        self.pos += 1;
        byte.ok_or_else(|| {
            self.pos -= 1;
            FormatError::fixed("compressed data are cut short").into()
        })
    }

    fn array<const LEN: usize>(&mut self) -> Result<[u8; LEN], StreamError> {
        let mut bytes = [0; LEN];
        for byte in &mut bytes {
            *byte = self.byte()?;
        }
        Ok(bytes)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Header,
    Blocks,
    Trailer,
    End,
}

/// The first bytes of what `input` decompresses to, as far as it tells; at most `len`.
pub(super) fn head(
    input: Input<'_>,
    compression: Compression,
    len: usize,
) -> Result<Vec<u8>, FormatError> {
    let mut inflate = Inflate::new(input, compression, Boundary::Header, &[])?;
    let mut head = Vec::new();
    while head.len() < len
        && let Ok(Some(piece)) = inflate.next()
    {
        head.extend_from_slice(&piece[..piece.len().min(len - head.len())]);
    }
    Ok(head)
}

enum Decoder {
    Deflate(Box<DecompressorOxide>),
    Zstd(DCtx<'static>),
}

/// A stream that is being decompressed.
pub(super) struct Inflate<'a> {
    input: Input<'a>,
    compression: Compression,
    phase: Phase,
    is_first: bool,
    decoder: Decoder,
    ring: Vec<u8>,
    ring_pos: usize,
    /// The checksum and the length of this member so far, unless it was entered in the middle.
    check: Option<(crc32fast::Hasher, adler2::Adler32, u64)>,
}

impl<'a> Inflate<'a> {
    /// The stream of `input`, which is at its begin or at a `boundary` with this window before it.
    pub(super) fn new(
        input: Input<'a>,
        compression: Compression,
        boundary: Boundary,
        window: &[u8],
    ) -> Result<Self, FormatError> {
        let mut ring = vec![0; RING_LEN];
        let window = &window[window.len().saturating_sub(WINDOW_LEN)..];
        ring[..window.len()].copy_from_slice(window);
        let (phase, decoder) = match boundary {
            Boundary::Header if compression == Compression::Zstd => {
                let context = DCtx::try_create()
                    .ok_or(FormatError::fixed("no memory for a zstd decompressor"))?;
                (Phase::Header, Decoder::Zstd(context))
            }
            Boundary::Header => (Phase::Header, Decoder::Deflate(Box::default())),
            Boundary::Block(num_bits, bit_buf) => {
                let state = BlockBoundaryState { num_bits, bit_buf, ..Default::default() };
                let decompressor = DecompressorOxide::from_block_boundary_state(&state);
                (Phase::Blocks, Decoder::Deflate(Box::new(decompressor)))
            }
        };
        let (is_first, ring_pos, check) = (true, window.len(), None);
        Ok(Self { input, compression, phase, is_first, decoder, ring, ring_pos, check })
    }

    /// The position in the file of the next compressed byte.
    pub(super) fn at(&self) -> u64 {
        self.input.at()
    }

    /// Where decompression can start to give what follows the last piece, if it can start there.
    pub(super) fn boundary(&self) -> Option<Boundary> {
        match self.phase {
            Phase::Header => Some(Boundary::Header),
            Phase::Blocks => {
                let Decoder::Deflate(decompressor) = &self.decoder else { return None };
                let state = decompressor.block_boundary_state()?;
                Some(Boundary::Block(state.num_bits, state.bit_buf))
            }
            Phase::Trailer | Phase::End => None,
        }
    }

    /// The last [`WINDOW_LEN`] decompressed bytes, or zeros before the first.
    pub(super) fn window(&self) -> Vec<u8> {
        let mut window = Vec::with_capacity(WINDOW_LEN);
        if let Some(wrapped) = WINDOW_LEN.checked_sub(self.ring_pos) {
            window.extend_from_slice(&self.ring[RING_LEN - wrapped..]);
        }
        window
            .extend_from_slice(&self.ring[self.ring_pos.saturating_sub(WINDOW_LEN)..self.ring_pos]);
        window
    }

    /// The next decompressed bytes, which end at the next boundary or before it; `None` at the end.
    /// May be empty.
    pub(super) fn next(&mut self) -> Result<Option<&[u8]>, StreamError> {
        match self.phase {
            Phase::Header => {
                self.start()?;
                Ok(Some(&[]))
            }
            Phase::Blocks => self.blocks().map(Some),
            Phase::Trailer => {
                self.finish_member()?;
                Ok(Some(&[]))
            }
            Phase::End => Ok(None),
        }
    }

    /// Reads the header of a member or stream; that of a frame is left to its decoder.
    fn start(&mut self) -> Result<(), StreamError> {
        if self.input.available()?.is_empty() && self.is_first {
            // As TensorFlow reads it, and as no compressor writes it: nothing is no records.
            self.phase = Phase::End;
            return Ok(());
        }
        match self.compression {
            Compression::Zstd => {}
            Compression::Zlib => {
                let [method, flags] = self.input.array()?;
                if let Some(problem) = zlib_problem(method, flags) {
                    return Err(FormatError::fixed(problem).into());
                }
            }
            _ => self.gzip_header()?,
        }
        self.is_first = false;
        if let Decoder::Deflate(decompressor) = &mut self.decoder {
            **decompressor = DecompressorOxide::default();
            self.check = Some((crc32fast::Hasher::new(), adler2::Adler32::new(), 0));
        }
        self.phase = Phase::Blocks;
        Ok(())
    }

    fn gzip_header(&mut self) -> Result<(), StreamError> {
        let [id1, id2, method, flags, ..] = self.input.array::<10>()?;
        if [id1, id2] != [GZIP_MARK, 0x8b] {
            let text = "gzip member does not begin with 1f 8b: other data follow the last member, \
                        or the file is not compressed by gzip";
            return Err(FormatError::fixed(text).into());
        }
        if method != 8 || flags & 0xe0 != 0 {
            return Err(FormatError::fixed("gzip header has an unknown method or flag").into());
        }
        if flags & 4 != 0 {
            for _ in 0..u16::from_le_bytes(self.input.array()?) {
                self.input.byte()?;
            }
        }
        for flag in [8, 16] {
            // The name and the comment each end with a zero.
            while flags & flag != 0 && self.input.byte()? != 0 {}
        }
        if flags & 2 != 0 {
            self.input.array::<2>()?;
        }
        Ok(())
    }

    fn blocks(&mut self) -> Result<&[u8], StreamError> {
        let pos = self.ring_pos;
        let available = self.input.available()?;
        let is_end = available.is_empty();
        let cut_short = FormatError::fixed("compressed data are cut short");
        let (read, written) = match &mut self.decoder {
            Decoder::Deflate(decompressor) => {
                let flags = TINFL_FLAG_HAS_MORE_INPUT | TINFL_FLAG_STOP_ON_BLOCK_BOUNDARY;
                let (status, read, written) =
                    decompress(decompressor, available, &mut self.ring, pos, flags);
                match status {
                    TINFLStatus::Done => self.phase = Phase::Trailer,
                    TINFLStatus::NeedsMoreInput if is_end && written == 0 => {
                        return Err(cut_short.into());
                    }
                    TINFLStatus::BlockBoundary
                    | TINFLStatus::NeedsMoreInput
                    | TINFLStatus::HasMoreOutput => {}
                    _ => return Err(FormatError::fixed("compressed data are damaged").into()),
                }
                (read, written)
            }
            Decoder::Zstd(context) => {
                let mut from = InBuffer::around(available);
                let mut to = OutBuffer::around(&mut self.ring[pos..]);
                let missing = context
                    .decompress_stream(&mut to, &mut from)
                    .map_err(|code| FormatError::fixed(zstd_safe::get_error_name(code)))?;
                if missing == 0 {
                    self.phase = Phase::Header;
                } else if is_end && to.pos() == 0 {
                    return Err(cut_short.into());
                }
                (from.pos(), to.pos())
            }
        };
        self.input.pos += read;
        if self.phase == Phase::Header && self.input.available()?.is_empty() {
            self.phase = Phase::End;
        }
        self.ring_pos = (pos + written) % RING_LEN;
        let piece = &self.ring[pos..pos + written];
        if let Some((crc, adler, len)) = &mut self.check {
            match self.compression {
                Compression::Zlib => adler.write_slice(piece),
                _ => crc.update(piece),
            }
            *len += written as u64;
        }
        Ok(piece)
    }

    /// Reads the trailer, and finds out whether another member follows.
    fn finish_member(&mut self) -> Result<(), StreamError> {
        let check = self.check.take();
        if self.compression == Compression::Zlib {
            let stored = u32::from_be_bytes(self.input.array()?);
            if let Some((_, adler, _)) = check
                && adler.checksum() != stored
            {
                return Err(FormatError::fixed("Adler-32 of the zlib stream does not match").into());
            }
            if !self.input.available()?.is_empty() {
                return Err(FormatError::fixed("other data follow the zlib stream").into());
            }
            self.phase = Phase::End;
            return Ok(());
        }
        let (stored, stored_len) = (self.input.array()?, self.input.array()?);
        if let Some((crc, _, len)) = check {
            if crc.finalize() != u32::from_le_bytes(stored) {
                return Err(FormatError::fixed("CRC-32 of the gzip member does not match").into());
            }
            if len & u64::from(u32::MAX) != u64::from(u32::from_le_bytes(stored_len)) {
                return Err(FormatError::fixed("length of the gzip member does not match").into());
            }
        }
        // Files on tapes are padded with zeros, behind any member.
        let next = loop {
            let available = self.input.available()?;
            let (len, num_zeros) =
                (available.len(), available.iter().take_while(|&&b| b == 0).count());
            let next = available.get(num_zeros).copied();
            self.input.pos += num_zeros;
            if next.is_some() || len == 0 {
                break next;
            }
        };
        self.phase = match next {
            None => Phase::End,
            Some(GZIP_MARK) => Phase::Header,
            Some(_) => {
                return Err(FormatError::fixed("other data follow the last gzip member").into());
            }
        };
        Ok(())
    }
}
