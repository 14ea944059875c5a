//! Riegeli/records files: blocks, chunks inside them, and records inside chunks.

pub mod block;
mod brotli_memory;
pub mod chunk;
pub mod compress;
pub mod cursor;
pub mod decompress;
pub mod encode;
pub mod simple;
pub mod sink;
pub mod stream_decoder;
pub mod transposed;

pub use super::checksum::highway as hash;
pub use super::chunk_records::ChunkRecords;
pub use super::format_error::{FormatError, StreamError};

use super::decode_scratch::{FormatScratch, MAX_RETAINED_LEN};

/// Decodes chunks; reuses decompressors and memory.
#[derive(Debug, Default)]
pub struct Decoder {
    decompressor: decompress::Decompressor,
    ends: Vec<usize>,
    values: Vec<u8>,
}

impl Decoder {
    /// The records of the chunk with this header and data, whose hashes have been verified.
    ///
    /// # Errors
    /// If the data are not what the format and the header demand.
    pub fn decode<'a>(
        &'a mut self,
        header: &chunk::ChunkHeader,
        data: &'a [u8],
    ) -> Result<ChunkRecords<'a>, FormatError> {
        let Self { decompressor, ends, values } = self;
        let values = match header.kind {
            chunk::kind::SIMPLE => simple::decode(header, data, decompressor, ends, values)?,
            chunk::kind::TRANSPOSED => {
                transposed::decode::decode(header, data, decompressor, ends, values)?
            }
            _ if header.num_records == 0 => {
                ends.clear();
                &[]
            }
            kind => {
                return Err(FormatError::new(format!(
                    "unknown chunk type {kind:#04x} with {} records",
                    header.num_records
                )));
            }
        };
        Ok(ChunkRecords::new(values, ends))
    }
}

impl FormatScratch for Decoder {
    fn trim(&mut self) {
        if self.values.capacity() > MAX_RETAINED_LEN {
            self.values = Vec::new();
        }
        if self.ends.capacity() > MAX_RETAINED_LEN / size_of::<usize>() {
            self.ends = Vec::new();
        }
    }
}
