//! Shards of Mosaic Streaming (MDS): the number of samples, where each begins and the last one ends, the layout of
//! columns as JSON, and the samples.

use std::path::Path;
use std::sync::Arc;

use super::format::{Format, OpenedFile};
use super::format_error::FormatError;
use super::index_cache::IndexHandle;
use super::offsets::Offsets;
use super::raw_bytes::grow_to;
use super::record_file::{Pick, RecordFile, locate_between};
use super::scanned::{Compression, Framing, MayBeCompressed, Scanner};
use crate::io::storage::{Reader, StoredFile};
use crate::io::storage_latency::StorageLatency;
use crate::{Error, Result};

/// The bytes of the number of samples, and of each offset.
const WORD: usize = 4;
const WORD_LEN: u64 = WORD as u64;
/// Offsets up to as many bytes are read when the file is opened, so that damage is found at once.
const MAX_EAGER: u64 = 256 << 10;

/// The format of uncompressed shards. A record is the bytes of a sample.
#[derive(Debug, Clone, Copy)]
pub struct Mds;

/// The numbers in the header.
fn words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word).into())
}

fn next_offset(offset: u64, last: u64) -> Result<u64, FormatError> {
    if offset < last {
        return Err(FormatError::new(format!("is at byte {offset}, expected at least {last}")));
    }
    Ok(offset)
}

fn check_end(last: u64, byte_len: u64) -> Result<(), FormatError> {
    if last != byte_len {
        let text = format!("samples end at byte {last}, but there are {byte_len} bytes");
        return Err(FormatError::new(text));
    }
    Ok(())
}

impl Format for Mds {
    fn open(&self, file: OpenedFile<'_>) -> Result<Arc<dyn RecordFile>> {
        let OpenedFile { stored, reader, .. } = file;
        let byte_len = stored.byte_len();
        let damaged = |problem| Error::corrupt(stored.path(), "header at byte 0", problem);
        if byte_len < 2 * WORD_LEN {
            return Err(damaged(format!("has {byte_len} bytes, fewer than a header")));
        }
        let mut count = [0; WORD];
        reader.read_at(&mut count, 0)?;
        let num_samples = u64::from(u32::from_le_bytes(count));
        let data_begin = (num_samples + 2) * WORD_LEN;
        if data_begin > byte_len {
            return Err(damaged(format!(
                "{num_samples} samples need a header of {data_begin} bytes, the file has {byte_len}"
            )));
        }
        let shard = Shard { offsets: IndexHandle::default(), stored, num_samples, data_begin };
        if data_begin <= MAX_EAGER {
            shard.offsets.keep(&Arc::new(shard.read_offsets(reader)?));
        }
        Ok(Arc::new(shard))
    }
}

/// As a framing it finds the samples of compressed shards, whose offsets are those in what they decompress to.
impl Framing for Mds {
    type Scanner = SampleScanner;

    fn name(&self) -> String {
        "MDS".to_owned()
    }

    fn scanner(&self) -> SampleScanner {
        SampleScanner::default()
    }

    fn record_len(&self, byte_len: u64) -> u64 {
        byte_len
    }

    fn record<'a>(&self, bytes: &'a [u8], _: &'a mut Vec<u8>) -> Result<&'a [u8], FormatError> {
        Ok(bytes)
    }
}

impl MayBeCompressed for Mds {
    fn detect(&self, _: &Path, head: &[u8]) -> Compression {
        Compression::detected(head)
    }
}

/// Finds the samples of a shard.
#[derive(Debug, Default)]
pub struct SampleScanner {
    /// The header, as far as it was seen.
    header: Vec<u8>,
    /// How many samples have begun.
    num_begun: usize,
}

impl SampleScanner {
    /// The length of the header, once it is known.
    fn header_len(&self) -> Option<usize> {
        let count = words(&self.header).next()?;
        usize::try_from((count + 2) * WORD_LEN).ok()
    }

    /// Where sample number `at` begins, or where the last one ends.
    fn offset(&self, at: usize) -> Option<u64> {
        words(self.header.get((at + 1) * WORD..)?).next()
    }
}

impl Scanner for SampleScanner {
    fn scan(
        &mut self,
        at: u64,
        bytes: &[u8],
        begins: &mut Offsets,
    ) -> Result<u64, (u64, FormatError)> {
        let end = at + bytes.len() as u64;
        let mut rest = bytes;
        while let len = self.header_len().unwrap_or(WORD)
            && self.header.len() < len
        {
            if rest.is_empty() {
                return Ok(end);
            }
            let (part, after) = rest.split_at(rest.len().min(len - self.header.len()));
            self.header.extend_from_slice(part);
            rest = after;
        }
        // The last offset is where the samples end.
        while let Some(offset) = self.offset(self.num_begun)
            && self.offset(self.num_begun + 1).is_some()
            && offset < end
        {
            let before = self.num_begun.checked_sub(1).and_then(|before| self.offset(before));
            let last = before.unwrap_or(self.header.len() as u64);
            begins.push(next_offset(offset, last).map_err(|problem| (offset, problem))?);
            self.num_begun += 1;
        }
        Ok(end)
    }

    fn finish(
        &mut self,
        at: u64,
        end: u64,
        begins: &mut Offsets,
    ) -> Result<(), (u64, FormatError)> {
        let is_whole = self.header_len().is_some_and(|len| len == self.header.len());
        if !is_whole {
            return Err((at, FormatError::fixed("ends within the header")));
        }
        let last = words(&self.header).last().unwrap_or(0);
        check_end(last, end).map_err(|problem| (at, problem))?;
        // Samples of no bytes at the end.
        while let Some(offset) = self.offset(self.num_begun)
            && self.offset(self.num_begun + 1).is_some()
        {
            next_offset(last, offset).map_err(|problem| (at, problem))?;
            begins.push(next_offset(offset, last).map_err(|problem| (at, problem))?);
            self.num_begun += 1;
        }
        Ok(())
    }
}

/// An open shard.
#[derive(Debug)]
struct Shard {
    offsets: IndexHandle,
    stored: Box<dyn StoredFile>,
    num_samples: u64,
    /// Where the offsets end.
    data_begin: u64,
}

impl Shard {
    /// Where samples begin, and where the last one ends.
    fn read_offsets(&self, reader: Reader<'_>) -> Result<Offsets> {
        let damaged = |place: String, problem: &FormatError| {
            Error::corrupt(self.stored.path(), place, problem)
        };
        let mut raw = Vec::new();
        let bytes = grow_to(&mut raw, self.data_begin - WORD_LEN)
            .map_err(|problem| damaged("header at byte 0".to_owned(), &problem))?;
        reader.read_at(bytes, WORD_LEN)?;
        let (mut offsets, mut last) = (Offsets::default(), self.data_begin);
        for word in words(bytes) {
            last = next_offset(word, last)
                .map_err(|problem| damaged(format!("offset {}", offsets.len()), &problem))?;
            offsets.push(last);
        }
        check_end(last, self.stored.byte_len())
            .map_err(|problem| damaged("whole file".to_owned(), &problem))?;
        offsets.shrink();
        Ok(offsets)
    }

    #[cold]
    fn load(&self, latency: &StorageLatency) -> Result<Arc<Offsets>> {
        let reopened = self.stored.reopen(false)?;
        Ok(Arc::new(self.read_offsets(Reader::new(&*reopened.bytes, latency))?))
    }
}

impl RecordFile for Shard {
    fn stored(&self) -> &dyn StoredFile {
        &*self.stored
    }

    fn num_records(&self) -> u64 {
        self.num_samples
    }

    fn stored_len(&self) -> u64 {
        self.stored.byte_len() - self.data_begin
    }

    fn locate(&self, picks: &mut [Pick], latency: Option<&StorageLatency>) -> Result<bool> {
        let offsets = self.offsets.get(latency, |latency| self.load(latency))?;
        offsets.map_or(Ok(false), |offsets| locate_between(&offsets, picks, true))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What the scanner of a compressed shard finds in `pieces` of it.
    fn scanned(pieces: &[&[u8]]) -> Result<Vec<u64>, (u64, FormatError)> {
        let (mut scanner, mut begins, mut at) = (SampleScanner::default(), Offsets::default(), 0);
        for piece in pieces {
            at = scanner.scan(at, piece, &mut begins)?;
        }
        scanner.finish(at, at, &mut begins)?;
        Ok((0..begins.len()).filter_map(|number| begins.get(number)).collect())
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2000) })]

        #[test]
        fn samples_are_found_where_offsets_do_not_decrease_from_the_header_to_the_end(
            mut offsets in proptest::collection::vec(0..12_u32, 1..6),
            is_sorted in any::<bool>(),
            len in 0..12_u32,
            piece_len in 1..9_usize,
        ) {
            if is_sorted {
                offsets.sort_unstable();
            }
            let num_offsets = u32::try_from(offsets.len()).unwrap();
            let header_len = 4 * (1 + num_offsets);
            let words = [num_offsets - 1].into_iter();
            let words = words.chain(offsets.iter().map(|offset| header_len + offset));
            let mut shard: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
            shard.resize((header_len + len) as usize, 7);
            let expected: Vec<u64> = offsets.iter().map(|&at| u64::from(header_len + at)).collect();
            let pieces: Vec<&[u8]> = shard.chunks(piece_len).collect();
            match scanned(&pieces) {
                Ok(found) => {
                    prop_assert!(offsets.is_sorted() && offsets.last() == Some(&len));
                    prop_assert_eq!(&found, &expected[..offsets.len() - 1]);
                }
                Err(_) => prop_assert!(!offsets.is_sorted() || offsets.last() != Some(&len)),
            }
        }
    }
}
