//! Index files: what a scan has found, so that it happens once for each content of a file.
//!
//! An index file states the length, the time and a hash of the ends of the file that it was written
//! for; if one of them differs, it is not used. It is written under another name and renamed, so
//! nobody sees a part of it, and processes that write it at the same time do no harm. It ends with a
//! hash of itself, and one that does not match is not used either.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::super::format_error::FormatError;
use super::super::offsets::Offsets;
use super::super::raw_bytes::grow_to;
use super::super::riegeli::cursor::Cursor;
use super::super::riegeli::hash::{Hasher, hash};
use super::compression::Compression;
use super::index::Index;
use super::inflate::Boundary;
use super::stream::{Point, Points};
use crate::io::LocalFiles;
use crate::io::storage::{Reader, Storage, StoredFile};
use crate::io::storage_latency::StorageLatency;
use crate::varint::push_varint;
use crate::{Error, Result, platform, url};

const MAGIC: &[u8] = b"grainmill index 1\n";
const SUFFIX: &str = "grainmill_index";
/// How many bytes at each end of a file its hash covers.
const END_LEN: u64 = 4 << 10;
/// The first number of a boundary that is at a header.
const AT_HEADER: u64 = 8;

static NEXT_PART: AtomicU64 = AtomicU64::new(0);

/// Where index files are.
#[derive(Debug, Clone, Default)]
pub struct IndexPlaces {
    /// Whether they are beside the files, if they can be written there.
    pub beside: bool,
    /// The directory of those that are not.
    pub dir: Option<PathBuf>,
}

/// Identifies a file and how it is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) framing: String,
    pub(super) compression: Compression,
    pub(super) byte_len: u64,
    pub(super) modified_ns: i64,
    pub(super) tag: String,
    pub(super) ends_hash: u64,
}

/// A hash of the first and the last bytes of a file.
pub(super) fn ends_hash(reader: Reader<'_>, byte_len: u64) -> Result<(u64, Vec<u8>)> {
    let len = usize::try_from(END_LEN.min(byte_len)).unwrap_or_default();
    let mut head = vec![0; len];
    let mut hasher = Hasher::default();
    if len > 0 {
        reader.read_at(&mut head, 0)?;
        hasher.update(&head);
    }
    if byte_len > END_LEN {
        let mut tail = vec![0; len];
        reader.read_at(&mut tail, byte_len - END_LEN)?;
        hasher.update(&tail);
    }
    Ok((hasher.finish(), head))
}

impl IndexPlaces {
    /// The index of the file at `path` in `storage`, if it has a valid one.
    pub(super) fn read(
        &self,
        storage: &Arc<dyn Storage>,
        latency: &StorageLatency,
        path: &Path,
        identity: &Identity,
    ) -> Option<Index> {
        let local: Arc<dyn Storage> = Arc::new(LocalFiles);
        let beside = self.beside.then(|| (storage, beside(path)));
        let in_dir = self.dir.as_deref().map(|dir| (&local, in_dir(dir, path)));
        // A request for a file that is rarely there would cost more than all else that opening takes.
        let is_remote = storage.is_remote(path);
        let places = if is_remote { [in_dir, beside] } else { [beside, in_dir] };
        places.into_iter().flatten().find_map(|(storage, path)| {
            // Whatever is wrong with an index file, the file itself is there to be scanned.
            let (stored, bytes) = storage.open(&path?).ok()?;
            let mut raw = Vec::new();
            let raw = grow_to(&mut raw, stored.byte_len()).ok()?;
            Reader::new(&*bytes, latency).read_at(raw, 0).ok()?;
            parse(raw, identity).ok()
        })
    }

    /// Writes `index` to the first place that takes it.
    ///
    /// # Errors
    /// If none does.
    pub(super) fn write(&self, path: &Path, identity: &Identity, index: &Index) -> Result<()> {
        let bytes = encoded(identity, index)?;
        let written = |path: Option<PathBuf>, is_private: bool| {
            let path = path?;
            let result = write_atomically(&path, &bytes, is_private);
            Some(result.map_err(|error| Error::io(path, "write", error)))
        };
        let beside = if self.beside { written(beside(path), false) } else { None };
        match (beside, self.dir.as_deref()) {
            (None | Some(Err(_)), Some(dir)) => {
                // That it is missing shows when the file is written.
                let _ = fs::create_dir_all(dir);
                written(in_dir(dir, path), true).unwrap_or(Ok(()))
            }
            (beside, _) => beside.unwrap_or(Ok(())),
        }
    }
}

/// The path of an index beside `path`: hidden, so that no pattern for data files finds it. None beside
/// a signed URL: the signature is of one file.
fn beside(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.to_string_lossy();
    if path.to_str().is_some_and(|path| path.contains("://") && path.ends_with(url::HIDDEN)) {
        return None;
    }
    Some(path.with_file_name(format!(".{name}.{SUFFIX}")))
}

fn in_dir(dir: &Path, path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.to_string_lossy();
    let key = hash(path.as_os_str().as_encoded_bytes());
    Some(dir.join(format!("{name}.{key:016x}.{SUFFIX}")))
}

/// Writes a file, whose content others may not be allowed to read if it `is_private`: it has parts of
/// compressed files.
fn write_atomically(path: &Path, bytes: &[u8], is_private: bool) -> std::io::Result<()> {
    let number = NEXT_PART.fetch_add(1, Ordering::Relaxed);
    let mut part = path.as_os_str().to_owned();
    part.push(format!(".{}.{number}.part", std::process::id()));
    let part = PathBuf::from(part);
    let write = || {
        let mut options = fs::OpenOptions::new();
        options.write(true).create_new(true);
        if is_private {
            platform::make_private(&mut options);
        }
        let mut file = options.open(&part)?;
        file.write_all(bytes)?;
        // Not synced: what a crash of the system leaves of it does not match its hash.
        drop(file);
        fs::rename(&part, path)
    };
    let result = write();
    if result.is_err() {
        let _ = fs::remove_file(&part);
    }
    result
}

fn compression_number(compression: Compression) -> u64 {
    match compression {
        Compression::None => 0,
        Compression::Gzip => 1,
        Compression::Zlib => 2,
        Compression::Zstd => 3,
        Compression::Xz => 4,
        Compression::Bzip2 => 5,
    }
}

fn push_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    push_varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

fn encoded_identity(identity: &Identity) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    push_bytes(&mut out, identity.framing.as_bytes());
    push_varint(&mut out, compression_number(identity.compression));
    push_varint(&mut out, identity.byte_len);
    out.extend_from_slice(&identity.modified_ns.to_le_bytes());
    push_bytes(&mut out, identity.tag.as_bytes());
    out.extend_from_slice(&identity.ends_hash.to_le_bytes());
    out
}

fn encoded(identity: &Identity, index: &Index) -> Result<Vec<u8>> {
    let mut out = encoded_identity(identity);
    push_varint(&mut out, index.end);
    push_varint(&mut out, index.num_records());
    let mut before = 0;
    let mut begins = index.begins.reader();
    let mut at = 0;
    while let Some(begin) = begins.get(at)? {
        at += 1;
        push_varint(&mut out, begin - before);
        before = begin;
    }
    let points = index.points.as_deref().map_or(&[][..], |points| &points.all);
    push_varint(&mut out, points.len() as u64);
    for point in points {
        push_varint(&mut out, point.at);
        push_varint(&mut out, point.out_at);
        push_varint(&mut out, point.first_record);
        let (num_bits, bits) = match point.boundary {
            Boundary::Header => (AT_HEADER, 0),
            Boundary::Block(num_bits, bits) => (u64::from(num_bits), u64::from(bits)),
        };
        push_varint(&mut out, num_bits);
        push_varint(&mut out, bits);
        push_bytes(&mut out, &point.window);
        out.extend_from_slice(&point.crc.to_le_bytes());
    }
    let sum = hash(&out);
    out.extend_from_slice(&sum.to_le_bytes());
    Ok(out)
}

/// The index in an index file, if it is intact and was written for this file.
///
/// # Errors
/// If it is damaged or of another file.
pub(super) fn parse(bytes: &[u8], identity: &Identity) -> Result<Index, FormatError> {
    let invalid = || FormatError::fixed("not the index of this file");
    let (bytes, sum) = bytes.split_last_chunk::<8>().ok_or_else(invalid)?;
    if u64::from_le_bytes(*sum) != hash(bytes) {
        return Err(invalid());
    }
    let bytes = bytes.strip_prefix(&*encoded_identity(identity)).ok_or_else(invalid)?;
    let mut cursor = Cursor::new(bytes);
    let end = cursor.varint64()?;
    let num_records = cursor.varint64()?;
    let (mut begins, mut begin) = (Offsets::default(), 0_u64);
    for number in 0..num_records {
        let len = cursor.varint64()?;
        begin = begin.checked_add(len).ok_or_else(invalid)?;
        if begin >= end || (len == 0 && number > 0) {
            return Err(invalid());
        }
        begins.push(begin);
    }
    begins.shrink();
    let mut all = Vec::new();
    for _ in 0..cursor.varint64()? {
        let (at, out_at) = (cursor.varint64()?, cursor.varint64()?);
        let first_record = cursor.varint64()?;
        let boundary = match (cursor.varint64()?, cursor.varint64()?) {
            (AT_HEADER, _) => Boundary::Header,
            (num_bits, bits) => Boundary::Block(
                u8::try_from(num_bits).ok().filter(|&bits| bits < 8).ok_or_else(invalid)?,
                u8::try_from(bits).map_err(|_| invalid())?,
            ),
        };
        let window = cursor.varint64().and_then(|len| cursor.take(len))?.to_vec();
        let crc = cursor.take(4)?.try_into().map_err(|_| invalid())?;
        let crc = u32::from_le_bytes(crc);
        all.push(Point { at, out_at, first_record, boundary, window, crc });
    }
    let is_rising = |a: &Point, b: &Point| a.at < b.at && a.out_at < b.out_at;
    let is_valid = all.is_sorted_by(is_rising)
        && all.is_sorted_by_key(|point| point.first_record)
        && all
            .first()
            .is_none_or(|first| (first.at, first.out_at, first.first_record) == (0, 0, 0))
        && all.last().is_none_or(|last| {
            last.at <= identity.byte_len && last.out_at <= end && last.first_record <= num_records
        })
        && all.iter().all(|point| {
            // Frames of zstd are entered at their header only.
            identity.compression != Compression::Zstd || point.boundary == Boundary::Header
        })
        && all.iter().all(|point| {
            let first = usize::try_from(point.first_record).ok().and_then(|at| begins.get(at));
            first.is_none_or(|begin| begin >= point.out_at)
        });
    let is_compressed = identity.compression != Compression::None;
    let is_within = is_compressed || end == identity.byte_len;
    if !is_valid || !is_within || !cursor.is_empty() || is_compressed == all.is_empty() {
        return Err(invalid());
    }
    let (compression, byte_len) = (identity.compression, identity.byte_len);
    let points =
        is_compressed.then(|| Arc::new(Points { compression, all, byte_len, out_len: end }));
    Ok(Index { begins: Arc::new(begins), end, points })
}

/// The identity of `stored`, of which `head` are the first bytes.
pub(super) fn identity(
    framing: String,
    compression: Compression,
    stored: &dyn StoredFile,
    ends_hash: u64,
) -> Identity {
    let (byte_len, modified_ns) = (stored.byte_len(), stored.modified_ns());
    let tag = stored.tag().unwrap_or_default().to_owned();
    Identity { framing, compression, byte_len, modified_ns, tag, ends_hash }
}

/// Index files with arbitrary content.
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing {
    use super::super::super::riegeli::decompress::Decompressor;
    use super::super::index::extent;
    use super::*;

    /// Parses an index that has the right identity and hash, and `input` between them, whose first
    /// byte is the compression. What is accepted can be used for a file of any content.
    pub fn parsed(input: &[u8]) {
        let Some((compression, content)) = input.split_first() else { return };
        let compression = match compression % 4 {
            0 => Compression::None,
            1 => Compression::Gzip,
            2 => Compression::Zlib,
            _ => Compression::Zstd,
        };
        let (framing, tag) = ("fuzzed".to_owned(), String::new());
        let identity =
            Identity { framing, compression, byte_len: 1000, modified_ns: 0, tag, ends_hash: 0 };
        let mut bytes = encoded_identity(&identity);
        bytes.extend_from_slice(content);
        let sum = hash(&bytes);
        bytes.extend_from_slice(&sum.to_le_bytes());
        let Ok(index) = parse(&bytes, &identity) else { return };
        assert!(parse(&encoded(&identity, &index).expect("in memory"), &identity).is_ok());
        let Index { begins, end, points } = &index;
        let mut begins = begins.reader();
        let mut extent = |record| extent(&mut begins, *end, record).expect("in memory");
        let mut before = 0;
        for record in 0..index.num_records() {
            let extent = extent(record).expect("each record has an extent");
            assert!(before <= extent.start && extent.start < extent.end && extent.end <= *end);
            before = extent.end;
        }
        let Some(points) = points else { return };
        for record in (0..index.num_records()).take(40) {
            let number = points.of_record(record);
            let records = points.records(number, index.num_records());
            let point = &points.all[number];
            let begin = extent(record).map_or(0, |extent| extent.start);
            assert!(records.contains(&record) && point.out_at <= begin);
            let last = extent(records.end - 1).map_or(*end, |last| last.end);
            assert!((point.at..=identity.byte_len).contains(&points.end_of(number, last)));
            // Longer ones are refused for the limit of a chunk, which tests do not set.
            if last - point.out_at < 1 << 20 {
                let decompressor = &mut Decompressor::default();
                let _ = points.inflate(number, last, content, decompressor, &mut Vec::new());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::stream::PointsBuilder;
    use super::*;

    /// The content of an index of two records and two points; `change` replaces number `at` of it.
    fn content(at: usize, change: u64) -> Vec<u8> {
        // The end; two records, of which the second is at 30; two points: position, position in the
        // stream, first record, boundary, no window.
        let numbers = [900, 2, 0, 30, 2, 0, 0, 0, 8, 0, 0, 500, 20, 1, 8, 0, 0];
        let mut out = vec![1];
        for (number, value) in numbers.into_iter().enumerate() {
            push_varint(&mut out, if number == at { change } else { value });
            if number == 10 || number == 16 {
                out.extend_from_slice(&[0; 4]);
            }
        }
        out
    }

    #[test]
    fn an_index_of_one_compression_is_not_taken_for_one_of_another() {
        let identity = |compression| {
            let (framing, tag) = ("tested".to_owned(), String::new());
            Identity { framing, compression, byte_len: 9, modified_ns: 0, tag, ends_hash: 0 }
        };
        let index = |compression, boundary| {
            let mut points = PointsBuilder::new(compression).finish(9, 9);
            points.all[0].boundary = boundary;
            let points = (compression != Compression::None).then(|| Arc::new(points));
            let index = Index { begins: Arc::default(), end: 9, points };
            encoded(&identity(compression), &index).unwrap()
        };
        let all = [Compression::None, Compression::Gzip, Compression::Zlib, Compression::Zstd];
        for written in all {
            let bytes = index(written, Boundary::Header);
            for read in all {
                assert_eq!(parse(&bytes, &identity(read)).is_ok(), read == written);
            }
            let inside = index(written, Boundary::Block(0, 0));
            let is_valid = parse(&inside, &identity(written)).is_ok();
            assert_eq!(is_valid, written != Compression::Zstd, "frames have none inside");
        }
    }

    #[test]
    fn any_numbers_in_an_index_are_refused_or_can_be_used() {
        for compression in 0..4 {
            for at in 0..18 {
                for change in [0, 1, 2, 7, 29, 31, 499, 900, 901, 1001, 1 << 32, 1 << 60, u64::MAX]
                {
                    let mut input = content(at, change);
                    input[0] = compression;
                    fuzzing::parsed(&input);
                    for cut in 0..input.len() {
                        fuzzing::parsed(&input[..cut]);
                    }
                }
            }
        }
    }
}
