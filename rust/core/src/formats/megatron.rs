//! Token files of Megatron-LM: the tokens of all documents in `NAME.bin`, and where each one is in `NAME.idx`.

use std::sync::Arc;

use super::format::{Format, OpenedFile};
use super::format_error::FormatError;
use super::index_cache::IndexHandle;
use super::offsets::Offsets;
use super::raw_bytes::grow_to;
use super::record_file::{Pick, RecordFile, locate_between};
use crate::io::storage::{Reader, StoredFile};
use crate::io::storage_latency::StorageLatency;
use crate::{Error, Result};

const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
/// What the index of fairseq, and of Megatron-LM with `--dataset-impl lazy` or `cached`, begins with.
const OLD_MAGIC: &[u8] = b"TNTIDX";
/// Of the magic, the version, the type of tokens, and how many sequences and bounds of documents there are.
const HEADER_LEN: usize = 34;
/// The lengths of what the index has of a sequence: its number of tokens, and where it begins.
const COUNT_LEN: u64 = 4;
const POINTER_LEN: u64 = 8;
/// The length of a bound of documents: the number of the first sequence after it.
const BOUND_LEN: u64 = 8;
/// How many entries of the index are read at once, and from slow storage. An index with at most as many of
/// each kind is read when its file is opened, so that damage is found at once.
const STEP: u64 = 64 << 10;
const SLOW_STEP: u64 = 512 << 10;

/// The format of Megatron-LM. A record has the tokens of a document: of all sequences between two bounds.
#[derive(Debug, Clone, Copy)]
pub struct Megatron {
    /// The code of the type that tokens must have.
    pub token_type: u8,
}

/// The name of a type of tokens, and how many bytes one has.
fn token_type(code: u8) -> Option<(&'static str, u64)> {
    Some(match code {
        1 => ("uint8", 1),
        2 => ("int8", 1),
        3 => ("int16", 2),
        4 => ("int32", 4),
        5 => ("int64", 8),
        6 => ("float64", 8),
        7 => ("float32", 4),
        8 => ("uint16", 2),
        _ => return None,
    })
}

/// The type of tokens that the first bytes of an index name: its code, its name, and how many bytes one has.
///
/// # Errors
/// If they are none of an index.
pub fn token_type_of(header: &[u8]) -> Result<(u8, &'static str, u64), FormatError> {
    if header.starts_with(OLD_MAGIC) {
        return Err(FormatError::fixed(
            "an index of fairseq or an old Megatron-LM (`--dataset-impl lazy`), which is not supported: \
             write it anew by `--dataset-impl mmap`",
        ));
    }
    let Some((magic, &[version @ .., code])) = header
        .split_first_chunk::<9>()
        .and_then(|(magic, rest)| Some((magic, rest.first_chunk::<9>()?)))
    else {
        let text = format!("{} bytes are too few for a header of {HEADER_LEN}", header.len());
        return Err(FormatError::new(text));
    };
    if magic != MAGIC {
        return Err(FormatError::fixed(
            "does not begin with `MMIDIDX`: it is not an index of Megatron-LM",
        ));
    }
    let version = u64::from_le_bytes(version);
    if version != 1 {
        return Err(FormatError::new(format!("version {version}, expected 1")));
    }
    let (name, token_len) = token_type(code)
        .ok_or_else(|| FormatError::new(format!("tokens have the unknown type {code}")))?;
    Ok((code, name, token_len))
}

/// The error for a problem in the index.
fn in_index(index: &dyn StoredFile, place: &str, problem: &FormatError) -> Error {
    let problem = format!("{problem}; it is damaged, or of other tokens");
    Error::corrupt(index.path(), place, problem)
}

impl Format for Megatron {
    fn open(&self, file: OpenedFile<'_>) -> Result<Arc<dyn RecordFile>> {
        let OpenedFile { stored, storage, latency, .. } = file;
        let (index, bytes) = storage.open(&stored.path().with_extension("idx"))?;
        let reader = Reader::new(&*bytes, latency);
        let (mut header, byte_len) = ([0; HEADER_LEN], index.byte_len());
        let found = usize::try_from(byte_len).map_or(HEADER_LEN, |len| len.min(HEADER_LEN));
        let found = &mut header[..found];
        reader.read_at(found, 0)?;
        let in_header =
            |problem: &FormatError| Error::corrupt(index.path(), "header at byte 0", problem);
        let (code, name, token_len) =
            token_type_of(found).map_err(|problem| in_header(&problem))?;
        if code != self.token_type {
            let expected = token_type(self.token_type).map_or("another type", |(name, _)| name);
            let text = format!("tokens are {name}, expected {expected}");
            return Err(in_header(&FormatError::new(text)));
        }
        let count =
            |at: usize| u64::from_le_bytes(*header[at..].first_chunk().expect("in the header"));
        let (num_sequences, num_bounds) = (count(18), count(26));
        // Files with images have a byte more for each sequence, which says of what kind it is.
        let expected = u128::from(num_sequences) * u128::from(COUNT_LEN + POINTER_LEN)
            + u128::from(num_bounds) * u128::from(BOUND_LEN)
            + HEADER_LEN as u128;
        let kinds = u128::from(byte_len).checked_sub(expected);
        if byte_len < HEADER_LEN as u64
            || !kinds.is_some_and(|len| len == 0 || len == num_sequences.into())
        {
            let text = format!(
                "{num_sequences} sequences and {num_bounds} bounds of documents take {expected} bytes, the \
                 file has {byte_len}"
            );
            return Err(in_index(&*index, "header at byte 0", &FormatError::new(text)));
        }
        let offsets = IndexHandle::default();
        let file = MegatronFile { offsets, stored, index, num_sequences, num_bounds, token_len };
        if num_sequences.max(num_bounds) <= STEP {
            file.offsets.keep(&Arc::new(file.read_index(reader)?));
        }
        Ok(Arc::new(file))
    }
}

/// An open file of tokens.
#[derive(Debug)]
struct MegatronFile {
    offsets: IndexHandle,
    stored: Box<dyn StoredFile>,
    index: Box<dyn StoredFile>,
    num_sequences: u64,
    /// One more than there are documents, unless it is 0.
    num_bounds: u64,
    token_len: u64,
}

/// Entries of the index that are read one after the other, many at once.
struct Entries<'a, const LEN: usize> {
    reader: Reader<'a>,
    /// Where the next one is that has not been read, and where the last one ends.
    at: u64,
    end: u64,
    raw: Vec<u8>,
    used: usize,
}

impl<'a, const LEN: usize> Entries<'a, LEN> {
    fn new(reader: Reader<'a>, at: u64, count: u64) -> Self {
        Self { reader, at, end: at + count * LEN as u64, raw: Vec::new(), used: 0 }
    }

    /// The next one, or `None` after the last.
    fn next(&mut self, index: &dyn StoredFile) -> Result<Option<[u8; LEN]>> {
        if self.used == self.raw.len() {
            if self.at == self.end {
                return Ok(None);
            }
            let step = if self.reader.is_slow() { SLOW_STEP } else { STEP } * LEN as u64;
            let len = step.min(self.end - self.at);
            self.raw.clear();
            let bytes = grow_to(&mut self.raw, len)
                .map_err(|problem| in_index(index, &format!("byte {}", self.at), &problem))?;
            self.reader.read_at(bytes, self.at)?;
            (self.at, self.used) = (self.at + len, 0);
        }
        let entry = self.raw[self.used..].first_chunk().copied();
        self.used += LEN;
        Ok(entry)
    }
}

impl MegatronFile {
    /// Where documents begin, and where the last one ends. Sequences must follow each other from the begin
    /// of the file of tokens to its end, as every writer lets them.
    fn read_index(&self, reader: Reader<'_>) -> Result<Offsets> {
        let damaged = |place: &str, text| in_index(&*self.index, place, &FormatError::new(text));
        let (begin, byte_len) = (HEADER_LEN as u64, self.stored.byte_len());
        let mut counts = Entries::<4>::new(reader, begin, self.num_sequences);
        let begin = begin + self.num_sequences * COUNT_LEN;
        let mut pointers = Entries::<8>::new(reader, begin, self.num_sequences);
        let begin = begin + self.num_sequences * POINTER_LEN;
        let mut bounds = Entries::<8>::new(reader, begin, self.num_bounds);
        let (mut offsets, mut sequence, mut end) = (Offsets::default(), 0, 0);
        while let Some(bound) = bounds.next(&*self.index)? {
            let bound = u64::from_le_bytes(bound);
            let is_possible = if offsets.is_empty() { bound == 0 } else { bound >= sequence };
            if !is_possible || bound > self.num_sequences {
                let text = format!("is {bound}, expected {sequence} to {}", self.num_sequences);
                return Err(damaged(&format!("bound {} of documents", offsets.len()), text));
            }
            while sequence < bound
                && let Some(count) = counts.next(&*self.index)?
                && let Some(pointer) = pointers.next(&*self.index)?
            {
                let (count, pointer) = (i32::from_le_bytes(count), u64::from_le_bytes(pointer));
                let place = || format!("sequence {sequence}");
                if pointer != end {
                    let text =
                        format!("begins at byte {pointer}, the one before it ends at byte {end}");
                    return Err(damaged(&place(), text));
                }
                let count = u64::try_from(count)
                    .map_err(|_| damaged(&place(), format!("has {count} tokens")))?;
                end += count * self.token_len;
                if end > byte_len {
                    return Err(self.other_len(&place(), end));
                }
                sequence += 1;
            }
            offsets.push(end);
        }
        if sequence != self.num_sequences {
            let text = format!("documents have {sequence} of {} sequences", self.num_sequences);
            return Err(damaged("whole file", text));
        }
        if end != byte_len {
            return Err(self.other_len("whole file", end));
        }
        offsets.shrink();
        Ok(offsets)
    }

    /// The error for tokens that end elsewhere than at `end`.
    fn other_len(&self, place: &str, end: u64) -> Error {
        let name = self.index.path().file_name().unwrap_or_default().to_string_lossy();
        let (path, byte_len) = (self.stored.path(), self.stored.byte_len());
        let problem = format!("ends at byte {end} by `{name}`, but the file has {byte_len} bytes");
        Error::corrupt(path, place, problem)
    }

    #[cold]
    fn load(&self, latency: &StorageLatency) -> Result<Arc<Offsets>> {
        let reopened = self.index.reopen(false)?;
        Ok(Arc::new(self.read_index(Reader::new(&*reopened.bytes, latency))?))
    }
}

impl RecordFile for MegatronFile {
    fn stored(&self) -> &dyn StoredFile {
        &*self.stored
    }

    fn num_records(&self) -> u64 {
        self.num_bounds.saturating_sub(1)
    }

    fn stored_len(&self) -> u64 {
        self.stored.byte_len()
    }

    fn locate(&self, picks: &mut [Pick], latency: Option<&StorageLatency>) -> Result<bool> {
        let offsets = self.offsets.get(latency, |latency| self.load(latency))?;
        offsets.map_or(Ok(false), |offsets| locate_between(&offsets, picks, true))
    }
}
