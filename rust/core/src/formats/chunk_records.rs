//! The decoded records of a chunk, borrowed and owned.

/// The decoded records of one chunk.
#[derive(Debug, Clone, Copy)]
pub struct ChunkRecords<'a> {
    values: &'a [u8],
    ends: &'a [usize],
}

impl<'a> ChunkRecords<'a> {
    /// Records of which each ends in `values` at its entry of `ends`.
    pub fn new(values: &'a [u8], ends: &'a [usize]) -> Self {
        Self { values, ends }
    }

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
