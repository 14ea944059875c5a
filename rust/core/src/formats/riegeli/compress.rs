//! Compressed blocks: the bytes themselves, or their length and one compressed stream.

use std::fmt;

use brotli::enc::BrotliEncoderParams;
use zstd_safe::zstd_sys::ZSTD_EndDirective;
use zstd_safe::{CCtx, CParameter, InBuffer, OutBuffer};

use super::FormatError;
use crate::varint::push_varint;

/// How the blocks of a chunk are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Codec {
    /// Not at all.
    Uncompressed,
    /// Snappy, without settings.
    Snappy,
    /// Zstandard.
    Zstd {
        /// -131072 (fastest) to 22 (smallest).
        level: i32,
        /// The binary logarithm of the window, 10 to 31.
        window_log: u32,
    },
    /// Brotli.
    Brotli {
        /// 0 (fastest) to 11 (smallest).
        level: i32,
        /// The binary logarithm of the window, 10 to 30; few decoders support more than 24.
        window_log: Option<u32>,
    },
}

impl Codec {
    /// The byte for this codec at the start of a chunk's data.
    pub fn code(self) -> u8 {
        match self {
            Self::Uncompressed => 0,
            Self::Snappy => b's',
            Self::Zstd { .. } => b'z',
            Self::Brotli { .. } => b'b',
        }
    }
}

/// Compresses blocks with the same settings.
pub struct Compressor {
    codec: Codec,
    engine: Engine,
    /// The last short block and its compressed form: the lengths of a chunk of one record are often
    /// those of the chunk before, and compressing three bytes takes as long as 200.
    short: (Vec<u8>, Vec<u8>),
}

/// Blocks up to this length are remembered.
const SHORT_LEN: usize = 16;

enum Engine {
    None,
    Snappy(Box<snap::raw::Encoder>),
    Zstd(CCtx<'static>),
    Brotli(Box<BrotliEncoderParams>),
}

impl fmt::Debug for Compressor {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Compressor").field("codec", &self.codec).finish_non_exhaustive()
    }
}

impl Compressor {
    /// A compressor with the settings of `codec`.
    ///
    /// # Errors
    /// If the library rejects the settings or cannot allocate memory.
    pub fn new(codec: Codec) -> Result<Self, FormatError> {
        let engine = match codec {
            Codec::Uncompressed => Engine::None,
            Codec::Snappy => Engine::Snappy(Box::new(snap::raw::Encoder::new())),
            Codec::Zstd { level, window_log } => Engine::Zstd(zstd_context(level, window_log)?),
            Codec::Brotli { level, .. } => Engine::Brotli(Box::new(BrotliEncoderParams {
                quality: level,
                ..BrotliEncoderParams::default()
            })),
        };
        Ok(Self { codec, engine, short: Default::default() })
    }

    /// The settings.
    pub fn codec(&self) -> Codec {
        self.codec
    }

    /// Appends `plain` to `out` as a compressed block.
    ///
    /// # Errors
    /// If the codec does not support that many bytes or cannot allocate memory.
    pub fn append(&mut self, plain: &[u8], out: &mut Vec<u8>) -> Result<(), FormatError> {
        if matches!(self.engine, Engine::None) {
            out.extend_from_slice(plain);
            return Ok(());
        }
        if plain.len() > SHORT_LEN {
            return self.append_compressed(plain, out);
        }
        // No plain block is remembered before the first, which an empty one would equal.
        if self.short.0 != plain || self.short.1.is_empty() {
            let begin = out.len();
            self.append_compressed(plain, out)?;
            self.short.0.clear();
            self.short.0.extend_from_slice(plain);
            self.short.1.clear();
            self.short.1.extend_from_slice(&out[begin..]);
        } else {
            out.extend_from_slice(&self.short.1);
        }
        Ok(())
    }

    fn append_compressed(&mut self, plain: &[u8], out: &mut Vec<u8>) -> Result<(), FormatError> {
        push_varint(out, plain.len() as u64);
        match &mut self.engine {
            Engine::None => out.extend_from_slice(plain),
            Engine::Snappy(encoder) => append_snappy(encoder, plain, out)?,
            Engine::Zstd(context) => append_zstd(context, plain, out)?,
            Engine::Brotli(params) => {
                let Codec::Brotli { window_log, .. } = self.codec else {
                    return Err(FormatError::fixed("brotli without settings"));
                };
                append_brotli(params, window_log, plain, out)?;
            }
        }
        Ok(())
    }
}

/// The level of most files, and the shortest match that zstd looks for there.
///
/// By itself it looks for four bytes in short blocks (as in files of `array_record`) and for five in
/// longer ones. With four, records of 1 KiB take an eighth longer, and text, tokens and messages
/// are one to seven percent larger (JSON is up to five percent smaller).
const ZSTD_MIN_MATCH: u32 = 5;
const ZSTD_DEFAULT_LEVEL: i32 = 3;

fn zstd_context(level: i32, window_log: u32) -> Result<CCtx<'static>, FormatError> {
    let mut context = CCtx::try_create().ok_or(FormatError::fixed("zstd: no memory"))?;
    let min_match = (level == ZSTD_DEFAULT_LEVEL).then_some(CParameter::MinMatch(ZSTD_MIN_MATCH));
    let parameters = [CParameter::CompressionLevel(level), CParameter::WindowLog(window_log)];
    for parameter in parameters.into_iter().chain(min_match) {
        context.set_parameter(parameter).map_err(zstd_problem)?;
    }
    Ok(context)
}

#[cold]
fn zstd_problem(code: usize) -> FormatError {
    FormatError::new(format!("zstd: {}", zstd_safe::get_error_name(code)))
}

/// For blocks up to this length, zstd chooses its parameters by the length.
///
/// For longer ones it is not told the length, as in `array_record`: the parameters for up to 16 KiB
/// and 256 KiB make files of numbers up to a tenth longer.
const ZSTD_PLEDGED_LEN: usize = 4095;

fn append_zstd(context: &mut CCtx, plain: &[u8], out: &mut Vec<u8>) -> Result<(), FormatError> {
    let begin = out.len();
    out.resize(begin + zstd_safe::compress_bound(plain.len()), 0);
    let len = if plain.len() <= ZSTD_PLEDGED_LEN {
        context.compress2(&mut out[begin..], plain).map_err(zstd_problem)?
    } else {
        stream_zstd(context, plain, &mut out[begin..])?
    };
    out.truncate(begin + len);
    Ok(())
}

/// Compresses `plain` without announcing its length; `out` has the length of the bound.
fn stream_zstd(context: &mut CCtx, plain: &[u8], out: &mut [u8]) -> Result<usize, FormatError> {
    let capacity = out.len();
    let (mut from, mut to) = (InBuffer::around(plain), OutBuffer::around(out));
    let mut step = |end| {
        let left = context.compress_stream2(&mut to, &mut from, end).map_err(zstd_problem)?;
        Ok((left, to.pos()))
    };
    step(ZSTD_EndDirective::ZSTD_e_continue)?;
    loop {
        let (left, written) = step(ZSTD_EndDirective::ZSTD_e_end)?;
        if left == 0 {
            return Ok(written);
        }
        if written == capacity {
            return Err(FormatError::fixed("zstd: compressed block exceeds its bound"));
        }
    }
}

fn append_snappy(
    encoder: &mut snap::raw::Encoder,
    plain: &[u8],
    out: &mut Vec<u8>,
) -> Result<(), FormatError> {
    let begin = out.len();
    let max_len = snap::raw::max_compress_len(plain.len());
    if max_len == 0 {
        let text =
            format!("snappy: a block of {} bytes exceeds what the codec supports", plain.len());
        return Err(FormatError::new(text));
    }
    out.resize(begin + max_len, 0);
    let len = encoder
        .compress(plain, &mut out[begin..])
        .map_err(|error| FormatError::new(format!("snappy: {error}")))?;
    out.truncate(begin + len);
    Ok(())
}

fn append_brotli(
    params: &mut BrotliEncoderParams,
    window_log: Option<u32>,
    mut plain: &[u8],
    out: &mut Vec<u8>,
) -> Result<(), FormatError> {
    // A window longer than the input only costs memory, here and in readers.
    let max_log = plain.len().max(1).ilog2() + 2;
    let window_log = window_log.unwrap_or(22).min(max_log.max(10));
    params.lgwin = window_log.cast_signed();
    params.large_window = window_log > 24;
    params.size_hint = plain.len();
    brotli::BrotliCompress(&mut plain, out, params)
        .map_err(|error| FormatError::new(format!("brotli: {error}")))?;
    Ok(())
}
