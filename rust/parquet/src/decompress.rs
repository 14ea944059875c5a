//! Decompresses pages, with each codec that the format has.

use std::io::Read;

use bytes::Bytes;
use grainmill_core::formats::riegeli::decompress::{self, codec};
use parquet::basic::Compression;

/// Decompressors, reused for the pages of a column.
#[derive(Debug, Default)]
pub(crate) struct Decompressor {
    streams: decompress::Decompressor,
    out: Vec<u8>,
}

impl Decompressor {
    /// The `decoded_len` bytes of a page, whose first `plain_len` bytes are stored as they are.
    ///
    /// # Errors
    /// If it is damaged, has another length, or does not fit into memory.
    pub(crate) fn decompress(
        &mut self,
        compression: Compression,
        stored: &Bytes,
        plain_len: usize,
        decoded_len: usize,
    ) -> Result<Bytes, String> {
        if compression == Compression::UNCOMPRESSED {
            return Ok(stored.clone());
        }
        let (plain, stream) = stored.split_at(plain_len);
        // A page of nulls may have no stream.
        let stream_len = decoded_len - plain_len;
        if stream_len == 0 {
            return Ok(stored.slice(..plain_len));
        }
        self.stream(compression, stream, stream_len)?;
        if self.out.len() != stream_len {
            let found = plain_len + self.out.len();
            return Err(format!("has {found} bytes, its header says {decoded_len}"));
        }
        let decoded = std::mem::take(&mut self.out);
        Ok(if plain.is_empty() { decoded.into() } else { [plain, &decoded].concat().into() })
    }

    fn stream(
        &mut self,
        compression: Compression,
        stream: &[u8],
        len: usize,
    ) -> Result<(), String> {
        let codec = match compression {
            Compression::ZSTD(_) => codec::ZSTD,
            Compression::SNAPPY => codec::SNAPPY,
            Compression::BROTLI(_) => codec::BROTLI,
            Compression::GZIP(_) => {
                reserve(&mut self.out, len)?;
                let plain = flate2::read::MultiGzDecoder::new(stream);
                let read = plain.take(len as u64 + 1).read_to_end(&mut self.out);
                return read.map(drop).map_err(|error| format!("gzip: {error}"));
            }
            Compression::LZ4_RAW => return self.lz4(len, |out| lz4_block(stream, out)),
            Compression::LZ4 => return self.lz4(len, |out| lz4_any(stream, out)),
            Compression::LZO | Compression::UNCOMPRESSED => {
                return Err(format!("compressed with {compression}, which cannot be read"));
            }
        };
        let done = self.streams.decompress_stream(codec, stream, len as u64, &mut self.out);
        done.map_err(|error| error.to_string())
    }

    fn lz4(
        &mut self,
        len: usize,
        decompress: impl FnOnce(&mut [u8]) -> Result<usize, String>,
    ) -> Result<(), String> {
        reserve(&mut self.out, len)?;
        self.out.resize(len, 0);
        let len = decompress(&mut self.out)?;
        self.out.truncate(len);
        Ok(())
    }
}

fn reserve(out: &mut Vec<u8>, len: usize) -> Result<(), String> {
    out.clear();
    out.try_reserve_exact(len).map_err(|_| format!("no memory for {len} bytes"))
}

fn lz4_block(stream: &[u8], out: &mut [u8]) -> Result<usize, String> {
    lz4_flex::block::decompress_into(stream, out).map_err(|error| format!("LZ4: {error}"))
}

/// The format does not say what the older `LZ4` is: Hadoop's blocks, or a frame, or one block.
fn lz4_any(stream: &[u8], out: &mut [u8]) -> Result<usize, String> {
    if let Some(len) = lz4_hadoop(stream, out) {
        return Ok(len);
    }
    let mut frame = lz4_flex::frame::FrameDecoder::new(stream);
    let (mut len, mut beyond) = (0, [0]);
    loop {
        let rest = if len < out.len() { &mut out[len..] } else { &mut beyond[..] };
        match frame.read(rest) {
            Ok(0) if len > 0 => return Ok(len),
            Ok(0) | Err(_) => return lz4_block(stream, out),
            Ok(_) if len == out.len() => return Err("LZ4: a longer frame".to_owned()),
            Ok(more) => len += more,
        }
    }
}

/// Blocks, each after its decompressed and compressed length, big-endian.
fn lz4_hadoop(mut stream: &[u8], out: &mut [u8]) -> Option<usize> {
    let mut len = 0;
    while !stream.is_empty() {
        let (decoded_len, rest) = stream.split_first_chunk()?;
        let (stored_len, rest) = rest.split_first_chunk()?;
        let decoded_len = u32::from_be_bytes(*decoded_len) as usize;
        let (block, rest) = rest.split_at_checked(u32::from_be_bytes(*stored_len) as usize)?;
        let part = out[len..].get_mut(..decoded_len)?;
        if lz4_flex::block::decompress_into(block, part).ok() != Some(decoded_len) {
            return None;
        }
        len += decoded_len;
        stream = rest;
    }
    Some(len)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::write::GzEncoder;
    use lz4_flex::block::compress;
    use parquet::basic::{BrotliLevel, GzipLevel, ZstdLevel};

    use super::*;

    /// Each codec with `plain` as it compresses it; LZ4 in each of its forms.
    fn compressed(plain: &[u8]) -> Vec<(Compression, Vec<u8>)> {
        let mut gzip = GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(plain).unwrap();
        let mut frame = lz4_flex::frame::FrameEncoder::new(Vec::new());
        frame.write_all(plain).unwrap();
        let hadoop = |part: &[u8]| {
            let block = compress(part);
            let lens = [part.len(), block.len()].map(|len| u32::try_from(len).unwrap());
            [&lens[0].to_be_bytes()[..], &lens[1].to_be_bytes(), &block].concat()
        };
        let (first, second) = plain.split_at(plain.len() / 3);
        // One block of stored bytes, and the last, empty one.
        let len = u32::try_from(plain.len()).unwrap();
        let mut snappy = vec![plain.len().to_le_bytes()[0] | 0x80, (len >> 7).to_le_bytes()[0]];
        snappy.extend([0xf4, (len - 1).to_le_bytes()[0], (len - 1).to_le_bytes()[1]]);
        snappy.extend(plain);
        vec![
            (Compression::GZIP(GzipLevel::default()), gzip.finish().unwrap()),
            (Compression::LZ4_RAW, compress(plain)),
            (Compression::LZ4, compress(plain)),
            (Compression::LZ4, frame.finish().unwrap()),
            (Compression::LZ4, hadoop(plain)),
            (Compression::LZ4, [hadoop(first), hadoop(second)].concat()),
            (Compression::SNAPPY, snappy),
        ]
    }

    #[test]
    fn pages_are_decompressed_and_damaged_ones_are_refused() {
        let plain: Vec<u8> = (0..1000_u32).map(|n| (n * n % 251).to_le_bytes()[0]).collect();
        let levels = b"levels";
        for (number, (compression, stream)) in compressed(&plain).into_iter().enumerate() {
            let mut decompressor = Decompressor::default();
            let mut page = |stored: &[u8], levels_len, decoded_len| {
                let stored = Bytes::copy_from_slice(stored);
                decompressor.decompress(compression, &stored, levels_len, decoded_len)
            };
            assert_eq!(page(&stream, 0, 1000).as_deref(), Ok(&plain[..]), "{number}");
            let with_levels = [&levels[..], &stream].concat();
            let expected = [&levels[..], &plain].concat();
            assert_eq!(page(&with_levels, 6, 1006).as_deref(), Ok(&expected[..]), "{number}");
            assert_eq!(page(&with_levels, 6, 6).as_deref(), Ok(&levels[..]), "{number}");
            for other_len in [1, 999, 1001, 5000] {
                assert!(page(&stream, 0, other_len).is_err(), "{number} {other_len}");
            }
            for len in 0..stream.len() {
                // The end of a frame may be missing, but no byte of the page.
                let cut = page(&stream[..len], 0, 1000);
                assert!(cut.is_err() || cut.as_deref() == Ok(&plain[..]), "{number} {len}");
            }
        }
    }

    #[test]
    fn what_cannot_be_decompressed_is_refused_and_what_is_not_compressed_is_as_stored() {
        let page = |compression, stored: &'static [u8]| {
            Decompressor::default().decompress(compression, &Bytes::from_static(stored), 0, 4)
        };
        assert_eq!(page(Compression::UNCOMPRESSED, b"abcd").as_deref(), Ok(&b"abcd"[..]));
        let problem = page(Compression::LZO, b"abcd").unwrap_err();
        assert_eq!(problem, "compressed with LZO, which cannot be read");
        for compression in
            [Compression::ZSTD(ZstdLevel::default()), Compression::BROTLI(BrotliLevel::default())]
        {
            assert!(page(compression, b"abcd").is_err());
        }
    }
}
