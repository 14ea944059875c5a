//! Decompresses a block of a chunk without trusting the length that it states.

use brotli::BrotliDecompressStream;
use zstd_safe::DCtx;

use super::FormatError;
use super::brotli_memory::{brotli_problem, brotli_state};
use super::cursor::Cursor;

/// The bytes that identify a compression.
pub mod codec {
    /// Not compressed.
    pub const NONE: u8 = 0;
    /// A Brotli stream.
    pub const BROTLI: u8 = b'b';
    /// A Zstandard frame.
    pub const ZSTD: u8 = b'z';
    /// A raw Snappy block.
    pub const SNAPPY: u8 = b's';
}

/// The start of a Zstandard frame; skippable frames, which differ, are refused.
pub(crate) const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// A Zstandard block of 4 bytes holds at most 128 KiB.
const ZSTD_MAX_RATIO: u64 = (128 << 10) / 4;
/// A Snappy copy of 3 bytes gives at most 64.
const SNAPPY_MAX_RATIO: u64 = 22;
/// The initial capacity of Brotli output.
const BROTLI_STEP: usize = 1 << 20;

/// Decompressors, reused for many blocks.
#[derive(Default)]
pub struct Decompressor {
    zstd: Option<DCtx<'static>>,
    snappy: snap::raw::Decoder,
}

impl std::fmt::Debug for Decompressor {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Decompressor").finish_non_exhaustive()
    }
}

impl Decompressor {
    /// Decompresses `block` with `codec` into `out`, or returns `block` if it is not compressed.
    /// Allocates at most `max_len` bytes, whatever length the block states.
    ///
    /// # Errors
    /// If the compression is unknown, the stream is damaged or does not end at the end of the block,
    /// its length is not the stated one, or the stated length exceeds `max_len`.
    pub fn decompress<'a>(
        &mut self,
        codec: u8,
        block: &'a [u8],
        max_len: u64,
        out: &'a mut Vec<u8>,
    ) -> Result<&'a [u8], FormatError> {
        if codec == codec::NONE {
            return Ok(block);
        }
        check_codec(codec)?;
        let mut cursor = Cursor::new(block);
        let stated = cursor.varint64()?;
        if stated > max_len {
            return Err(FormatError::new(format!(
                "block states {stated} decoded bytes, expected at most {max_len}"
            )));
        }
        let stream = cursor.rest();
        if codec == codec::ZSTD {
            check_single_frame(stream)?;
        }
        self.decompress_stream(codec, stream, stated, out)?;
        Ok(out)
    }

    /// Replaces `out` by what `stream`, compressed with `codec`, decompresses to: `stated` bytes.
    ///
    /// # Errors
    /// If the compression is unknown, the stream is damaged or does not end at its end, or its length
    /// is another.
    pub fn decompress_stream(
        &mut self,
        codec: u8,
        stream: &[u8],
        stated: u64,
        out: &mut Vec<u8>,
    ) -> Result<(), FormatError> {
        check_codec(codec)?;
        match codec {
            codec::ZSTD => self.zstd(stream, stated, out)?,
            codec::SNAPPY => self.snappy(stream, stated, out)?,
            _ => brotli(stream, stated, out)?,
        }
        if out.len() as u64 == stated { Ok(()) } else { Err(wrong_len(out.len() as u64, stated)) }
    }

    fn zstd(&mut self, stream: &[u8], stated: u64, out: &mut Vec<u8>) -> Result<(), FormatError> {
        clear_and_reserve(out, stated, stream.len(), ZSTD_MAX_RATIO)?;
        let context = zstd_context(&mut self.zstd)?;
        context.decompress(out, stream).map(drop).map_err(damaged_zstd)
    }

    fn snappy(&mut self, stream: &[u8], stated: u64, out: &mut Vec<u8>) -> Result<(), FormatError> {
        let damaged = |error| FormatError::new(format!("snappy block is damaged: {error}"));
        let len = snap::raw::decompress_len(stream).map_err(damaged)? as u64;
        if len != stated {
            return Err(wrong_len(len, stated));
        }
        let len = clear_and_reserve(out, stated, stream.len(), SNAPPY_MAX_RATIO)?;
        out.resize(len, 0);
        let written = self.snappy.decompress(stream, out).map_err(damaged)?;
        out.truncate(written);
        Ok(())
    }
}

/// The context in `created`, created at its first use.
pub(crate) fn zstd_context<'a>(
    created: &'a mut Option<DCtx<'static>>,
) -> Result<&'a mut DCtx<'static>, FormatError> {
    if created.is_none() {
        *created = DCtx::try_create();
    }
    created.as_mut().ok_or(FormatError::fixed("no memory for a zstd decompressor"))
}

fn check_codec(codec: u8) -> Result<(), FormatError> {
    if matches!(codec, codec::BROTLI | codec::ZSTD | codec::SNAPPY) {
        return Ok(());
    }
    Err(FormatError::new(format!("unknown compression type {codec:#04x}")))
}

fn check_single_frame(stream: &[u8]) -> Result<(), FormatError> {
    if !stream.starts_with(&ZSTD_MAGIC) {
        return Err(FormatError::fixed("zstd stream does not begin with a frame"));
    }
    let frame_len = zstd_safe::find_frame_compressed_size(stream).map_err(damaged_zstd)?;
    if frame_len != stream.len() {
        return Err(FormatError::fixed("zstd frame does not end at the end of the block"));
    }
    Ok(())
}

fn damaged_zstd(code: usize) -> FormatError {
    FormatError::new(format!("zstd stream is damaged: {}", zstd_safe::get_error_name(code)))
}

/// Clears `out` and reserves `stated` bytes, if `stream_len` bytes can decode to as many.
fn clear_and_reserve(
    out: &mut Vec<u8>,
    stated: u64,
    stream_len: usize,
    max_ratio: u64,
) -> Result<usize, FormatError> {
    let max_len = (stream_len as u64).saturating_mul(max_ratio);
    let len = usize::try_from(stated).ok().filter(|_| stated <= max_len).ok_or_else(|| {
        FormatError::new(format!("{stream_len} compressed bytes cannot decode to {stated} bytes"))
    })?;
    out.clear();
    reserve(out, len)?;
    Ok(len)
}

/// Reserves `len` more bytes in `out`.
pub(crate) fn reserve(out: &mut Vec<u8>, len: usize) -> Result<(), FormatError> {
    out.try_reserve_exact(len)
        .map_err(|_| FormatError::new(format!("no memory for {len} decoded bytes")))
}

fn brotli(stream: &[u8], stated: u64, out: &mut Vec<u8>) -> Result<(), FormatError> {
    let max_len = usize::try_from(stated).unwrap_or(usize::MAX);
    let mut state = brotli_state();
    let (mut unread, mut read, mut written) = (stream.len(), 0, 0);
    out.clear();
    loop {
        if written == out.len() {
            // Doubling bounds memory by what was decoded, not by what is stated. One byte more than
            // stated detects a longer stream.
            let target = (written * 2).max(BROTLI_STEP).min(max_len.saturating_add(1));
            if target <= written {
                return Err(wrong_len(written as u64, stated));
            }
            reserve(out, target - written)?;
            out.resize(target, 0);
        }
        let (mut free, mut at, mut total) = (out.len() - written, written, 0);
        let result = BrotliDecompressStream(
            &mut unread,
            &mut read,
            stream,
            &mut free,
            &mut at,
            out,
            &mut total,
            &mut state,
        );
        written = at;
        match result {
            brotli::BrotliResult::NeedsMoreOutput => {}
            brotli::BrotliResult::ResultSuccess if unread == 0 => {
                out.truncate(written);
                return Ok(());
            }
            brotli::BrotliResult::ResultSuccess => {
                return Err(FormatError::fixed(
                    "brotli stream does not end at the end of the block",
                ));
            }
            brotli::BrotliResult::NeedsMoreInput => {
                return Err(FormatError::fixed("brotli stream is truncated"));
            }
            brotli::BrotliResult::ResultFailure => {
                return Err(brotli_problem(&state));
            }
        }
    }
}

pub(crate) fn wrong_len(found: u64, stated: u64) -> FormatError {
    FormatError::new(format!("block decoded to {found} bytes, it states {stated}"))
}
