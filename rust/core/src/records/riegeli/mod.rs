//! Riegeli/records files: blocks, chunks inside them, and records inside chunks.

pub mod block;
mod brotli_memory;
pub mod chunk;
pub mod compress;
pub mod decompress;
pub mod encode;
pub mod hash;
#[cfg(target_arch = "x86_64")]
mod hash_lanes;
pub mod simple;
pub mod sink;
pub mod stream_decoder;
pub mod transposed;
pub mod varint;

use std::borrow::Cow;

/// What is wrong with some bytes; callers add the file and the offset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FormatError(Cow<'static, str>);

impl FormatError {
    /// An error with a formatted text.
    #[cold]
    pub fn new(text: String) -> Self {
        Self(Cow::Owned(text))
    }

    /// An error with a constant text.
    pub const fn fixed(text: &'static str) -> Self {
        Self(Cow::Borrowed(text))
    }
}

impl std::fmt::Display for FormatError {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.0)
    }
}

/// The decoded records of one chunk.
#[derive(Debug, Clone, Copy)]
pub struct ChunkRecords<'a> {
    values: &'a [u8],
    ends: &'a [usize],
}

impl<'a> ChunkRecords<'a> {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The bytes of `record`, or `None` past the last.
    #[inline]
    pub fn get(&self, record: usize) -> Option<&'a [u8]> {
        let end = *self.ends.get(record)?;
        let begin = if record == 0 { 0 } else { self.ends[record - 1] };
        self.values.get(begin..end)
    }
}

impl ChunkRecords<'_> {
    /// How many bytes they take in memory.
    pub(crate) fn byte_len(&self) -> usize {
        self.values.len() + size_of_val(self.ends)
    }

    /// A copy that owns its memory.
    pub(crate) fn to_chunk(self) -> DecodedChunk {
        DecodedChunk { values: self.values.to_vec(), ends: self.ends.to_vec() }
    }
}

/// The decoded records of one chunk, owned.
#[derive(Debug)]
pub(crate) struct DecodedChunk {
    values: Vec<u8>,
    ends: Vec<usize>,
}

impl DecodedChunk {
    /// Records of which each ends in `values` at its entry of `ends`.
    #[cfg(test)]
    pub(crate) fn new(values: Vec<u8>, ends: Vec<usize>) -> Self {
        Self { values, ends }
    }

    pub(crate) fn records(&self) -> ChunkRecords<'_> {
        ChunkRecords { values: &self.values, ends: &self.ends }
    }

    pub(crate) fn byte_len(&self) -> usize {
        self.records().byte_len()
    }
}

/// Decodes chunks; reuses decompressors and memory.
#[derive(Debug, Default)]
pub struct Decoder {
    decompressor: decompress::Decompressor,
    ends: Vec<usize>,
    values: Vec<u8>,
}

/// Longer buffers of decoded records are freed after use.
const MAX_RETAINED_LEN: usize = 8 << 20;

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
        Ok(ChunkRecords { values, ends })
    }

    /// Frees memory that only an unusually large chunk needs.
    pub fn trim(&mut self) {
        if self.values.capacity() > MAX_RETAINED_LEN {
            self.values = Vec::new();
        }
        if self.ends.capacity() > MAX_RETAINED_LEN / size_of::<usize>() {
            self.ends = Vec::new();
        }
    }
}
