//! Writes chunks to a file, interrupted by a block header at every multiple of 64 KiB.

use std::io::{self, Write};

use super::block::{BLOCK_HEADER_LEN, BLOCK_LEN, BlockHeader, headers_between};
use super::chunk::{CHUNK_HEADER_LEN, ChunkHeader, kind};
use super::hash::Hasher;

/// How many bytes are buffered before they are written.
const BUFFER_LEN: usize = 1 << 20;

/// Writes chunks in order, starting with the signature.
#[derive(Debug)]
pub struct ChunkSink<W> {
    out: W,
    buffer: Vec<u8>,
    pos: u64,
}

/// The extent of the chunk being written.
#[derive(Clone, Copy)]
struct Extent {
    begin: u64,
    end: u64,
}

impl<W: Write> ChunkSink<W> {
    /// Starts a file in `out`, which must be empty.
    ///
    /// # Errors
    /// If `out` fails.
    pub fn new(out: W) -> io::Result<Self> {
        let buffer = Vec::with_capacity(BUFFER_LEN + usize::try_from(BLOCK_LEN).unwrap_or(0));
        let mut sink = Self { out, buffer, pos: 0 };
        sink.write_chunk(kind::SIGNATURE, 0, 0, &[])?;
        Ok(sink)
    }

    /// Where the next chunk begins.
    pub fn pos(&self) -> u64 {
        self.pos
    }

    /// Writes a chunk whose data are `parts` back to back; returns where it begins.
    ///
    /// # Errors
    /// If the underlying writer fails or the file would exceed 2^64 bytes.
    pub fn write_chunk(
        &mut self,
        kind: u8,
        num_records: u64,
        decoded_len: u64,
        parts: &[&[u8]],
    ) -> io::Result<u64> {
        let mut hasher = Hasher::default();
        let mut data_len = 0;
        for part in parts {
            hasher.update(part);
            data_len += part.len() as u64;
        }
        let header =
            ChunkHeader { data_len, data_hash: hasher.finish(), kind, num_records, decoded_len };
        self.write_hashed(&header, parts)
    }

    /// Writes the chunk of `header`, whose data are `parts` back to back; returns where it begins.
    ///
    /// # Errors
    /// If the underlying writer fails or the file would exceed 2^64 bytes.
    pub fn write_hashed(&mut self, header: &ChunkHeader, parts: &[&[u8]]) -> io::Result<u64> {
        let extent = self.extent(header)?;
        self.append(extent, &header.to_bytes())?;
        for part in parts {
            self.append(extent, part)?;
        }
        self.append_zeros(extent)?;
        Ok(extent.begin)
    }

    /// Fills the file up to a block boundary with a padding chunk, if it does not end at one.
    ///
    /// # Errors
    /// If the underlying writer fails.
    pub fn pad_to_block(&mut self) -> io::Result<()> {
        if self.pos.is_multiple_of(BLOCK_LEN) {
            return Ok(());
        }
        let header_len = CHUNK_HEADER_LEN as u64;
        let mut end = self.pos.next_multiple_of(BLOCK_LEN);
        if end - self.pos < header_len {
            end += BLOCK_LEN;
        }
        let headers = headers_between(self.pos, end) * BLOCK_HEADER_LEN;
        let zeros = vec![0; usize::try_from(end - self.pos - headers - header_len).unwrap_or(0)];
        self.write_chunk(kind::PADDING, 0, 0, &[&zeros])?;
        debug_assert_eq!(self.pos, end, "padding ends at the boundary");
        Ok(())
    }

    /// Writes the buffered bytes and returns the underlying writer.
    ///
    /// # Errors
    /// If the underlying writer fails.
    pub fn finish(mut self) -> io::Result<W> {
        self.flush_buffer()?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn extent(&self, header: &ChunkHeader) -> io::Result<Extent> {
        let end = header.end(self.pos).ok_or_else(|| {
            io::Error::new(io::ErrorKind::FileTooLarge, "file exceeds 2^64 bytes")
        })?;
        Ok(Extent { begin: self.pos, end })
    }

    /// Appends bytes of a chunk.
    #[inline]
    fn append(&mut self, extent: Extent, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(self.free_in_block(extent, bytes.len() as u64));
            self.buffer.extend_from_slice(now);
            self.advance(now.len())?;
            bytes = later;
        }
        Ok(())
    }

    /// Fills the rest of a chunk with zeros.
    fn append_zeros(&mut self, extent: Extent) -> io::Result<()> {
        while self.pos < extent.end {
            let free = self.free_in_block(extent, extent.end - self.pos);
            // `free_in_block` may have written a block header, which uses some of the extent.
            let now = free.min(usize::try_from(extent.end - self.pos).unwrap_or(free));
            self.buffer.resize(self.buffer.len() + now, 0);
            self.advance(now)?;
        }
        Ok(())
    }

    /// How many of `len` bytes fit the current block; writes the block's header if it is missing.
    #[inline]
    fn free_in_block(&mut self, extent: Extent, len: u64) -> usize {
        let mut in_block = self.pos % BLOCK_LEN;
        if in_block == 0 {
            let header = BlockHeader::inside(extent.begin, extent.end, self.pos);
            self.buffer.extend_from_slice(&header.to_bytes());
            self.pos += BLOCK_HEADER_LEN;
            in_block = BLOCK_HEADER_LEN;
        }
        usize::try_from(len.min(BLOCK_LEN - in_block)).unwrap_or(usize::MAX)
    }

    #[inline]
    fn advance(&mut self, len: usize) -> io::Result<()> {
        self.pos += len as u64;
        if self.buffer.len() >= BUFFER_LEN { self.flush_buffer() } else { Ok(()) }
    }

    fn flush_buffer(&mut self) -> io::Result<()> {
        self.out.write_all(&self.buffer)?;
        self.buffer.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_starts_with_the_signature() {
        let bytes = ChunkSink::new(Vec::new()).unwrap().finish().unwrap();
        assert_eq!(bytes.len(), 64);
        assert_eq!(&bytes[..8], &[0x83, 0xaf, 0x70, 0xd1, 0x0d, 0x88, 0x4a, 0x3f]);
        assert_eq!(
            &bytes[16..32],
            &[0x40, 0, 0, 0, 0, 0, 0, 0, 0x91, 0xba, 0xc2, 0x3c, 0x92, 0x87, 0xe1, 0xa9]
        );
    }

    #[test]
    fn padding_always_ends_at_a_block() {
        for len in (65_250..65_500).chain([0, 1, 131_000, 131_050]) {
            let mut sink = ChunkSink::new(Vec::new()).unwrap();
            sink.write_chunk(b'r', 1, len as u64, &[&vec![7; len]]).unwrap();
            sink.pad_to_block().unwrap();
            let end = sink.pos();
            assert!(end.is_multiple_of(BLOCK_LEN), "after {len} bytes");
            assert_eq!(sink.finish().unwrap().len() as u64, end, "after {len} bytes");
        }
    }

    #[test]
    fn a_chunk_spans_a_byte_for_each_record() {
        for num_records in [1000, 65_472, 65_490, 200_000] {
            let mut sink = ChunkSink::new(Vec::new()).unwrap();
            assert_eq!(sink.write_chunk(b'r', num_records, 0, &[b"x"]).unwrap(), 64);
            let end = sink.pos();
            assert!(end >= 64 + num_records, "{num_records} records end at {end}");
            assert!(super::super::block::is_boundary(end), "{num_records} records end at {end}");
            assert_eq!(sink.finish().unwrap().len() as u64, end);
        }
    }
}
