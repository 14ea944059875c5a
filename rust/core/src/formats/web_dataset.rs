//! `WebDataset`: tar files in which consecutive files with one key are a sample.
//!
//! The key of `a/0001.seg.png` is `a/0001`, its extension `seg.png`. Files without an extension and
//! everything that is not a regular file belong to no sample.

use std::path::Path;

use super::format_error::FormatError;
use super::offsets::Offsets;
use super::scanned::{Compression, Framing, MayBeCompressed, Scanner};
use crate::Result;

const BLOCK_LEN: usize = 512;
/// The maximum length of a name in a header of its own.
const MAX_NAME_LEN: u64 = 1 << 20;

/// Where samples have their key, so that no file of theirs may be there.
const KEY: &[u8] = b"__key__";

/// The framing of tar files. A record is a sample: the lengths of its key and of its files, then the
/// key, and the extension and the content of each file. All lengths are little-endian, `u32` of names
/// and their number, `u64` of contents.
#[derive(Debug, Clone, Copy, Default)]
pub struct WebDataset;

/// A header and what it says about the file after it.
enum Entry<'a> {
    /// A block of zeros, as at the end.
    Zeros,
    /// A regular file, or anything else that takes this many bytes.
    File { name: Option<&'a [u8]>, len: u64 },
    /// A file whose content is not simply what follows, and what it is.
    Refused { name: &'a [u8], problem: &'static str },
    /// A name or attributes for the next header, of this type and length.
    About { kind: u8, len: u64 },
}

const SPARSE: &str = "is a sparse file, which is not supported: pack it without `--sparse`";
const PART: &str = "continues a file of another volume, which is not supported: pack one volume";

fn padded(len: u64) -> Option<u64> {
    len.checked_next_multiple_of(BLOCK_LEN as u64)
}

fn until_zero(bytes: &[u8]) -> &[u8] {
    &bytes[..memchr::memchr(0, bytes).unwrap_or(bytes.len())]
}

/// A number in octal, or in binary if its first bit is set.
fn number(field: &[u8]) -> Result<u64, FormatError> {
    let invalid = || FormatError::fixed("tar header has an invalid number");
    if let Some((first, rest)) = field.split_first()
        && first & 0x80 != 0
    {
        let digits = [&[first & 0x7f][..], rest].concat();
        let zeros = digits.len().saturating_sub(8);
        let (high, low) = digits.split_at(zeros);
        if high.iter().any(|&byte| byte != 0) {
            return Err(invalid());
        }
        return Ok(low.iter().fold(0, |value, &byte| value << 8 | u64::from(byte)));
    }
    let text = until_zero(field).trim_ascii();
    text.iter().try_fold(0_u64, |value, &digit| match digit {
        b'0'..=b'7' => {
            value.checked_mul(8).map(|value| value + u64::from(digit - b'0')).ok_or_else(invalid)
        }
        _ => Err(invalid()),
    })
}

fn entry(header: &[u8; BLOCK_LEN]) -> Result<Entry<'_>, FormatError> {
    if header.iter().all(|&byte| byte == 0) {
        return Ok(Entry::Zeros);
    }
    let stored = number(&header[148..156])?;
    let bytes = || header[..148].iter().chain(&[b' '; 8]).chain(&header[156..]);
    let computed: u64 = bytes().map(|&byte| u64::from(byte)).sum();
    // Some writers of old take bytes for signed numbers.
    let signed: i64 = bytes().map(|&byte| i64::from(byte.cast_signed())).sum();
    if stored != computed && i64::try_from(stored) != Ok(signed) {
        return Err(FormatError::new(format!(
            "checksum mismatch of the tar header (stored {stored}, computed {computed})"
        )));
    }
    let len = number(&header[124..136])?;
    let name = until_zero(&header[..100]);
    Ok(match header[156] {
        b'0' | b'7' | 0 => {
            Entry::File { name: Some(name).filter(|name| !name.ends_with(b"/")), len }
        }
        kind @ (b'L' | b'K' | b'x' | b'X') => Entry::About { kind, len },
        b'S' => Entry::Refused { name, problem: SPARSE },
        b'M' => Entry::Refused { name, problem: PART },
        // Links, devices, directories and pipes have no content.
        b'1'..=b'6' => Entry::File { name: None, len: 0 },
        _ => Entry::File { name: None, len },
    })
}

/// The directory before the name of a file, in headers of the POSIX format.
fn prefix(header: &[u8; BLOCK_LEN]) -> &[u8] {
    if &header[257..263] == b"ustar\0" { until_zero(&header[345..500]) } else { &[] }
}

/// What the headers before that of a file say about it.
#[derive(Default)]
struct About<'a> {
    path: Option<&'a [u8]>,
    len: Option<u64>,
    is_sparse: bool,
}

impl<'a> About<'a> {
    /// Adds the attributes of a pax header.
    fn add(&mut self, mut attributes: &'a [u8]) -> Result<(), FormatError> {
        let invalid = || FormatError::fixed("tar has invalid pax attributes");
        while !attributes.is_empty() {
            let digits = memchr::memchr(b' ', attributes).ok_or_else(invalid)?;
            let parsed = |digits: &[u8]| std::str::from_utf8(digits).ok()?.parse::<u64>().ok();
            let line_len = parsed(&attributes[..digits]).ok_or_else(invalid)?;
            let line_len = usize::try_from(line_len).map_err(|_| invalid())?;
            let line = attributes.get(digits + 1..line_len).ok_or_else(invalid)?;
            let line = line.strip_suffix(b"\n").ok_or_else(invalid)?;
            let end = memchr::memchr(b'=', line).ok_or_else(invalid)?;
            let (name, value) = (&line[..end], &line[end + 1..]);
            match name {
                b"path" if !self.is_sparse => self.path = Some(value),
                b"size" => self.len = Some(parsed(value).ok_or_else(invalid)?),
                // GNU's three versions, the first with neither a number nor a name, and Solaris'.
                _ if name.starts_with(b"GNU.sparse.") || name == b"SUN.holesdata" => {
                    self.is_sparse = true;
                    if name == b"GNU.sparse.name" {
                        self.path = Some(value);
                    }
                }
                _ => {}
            }
            attributes = &attributes[line_len..];
        }
        Ok(())
    }
}

/// The key and the extension of a path; `None` if it belongs to no sample.
fn key_and_extension(path: &[u8]) -> Option<(&[u8], &[u8])> {
    let path = path.strip_prefix(b"./").unwrap_or(path);
    let name_at = memchr::memrchr(b'/', path).map_or(0, |slash| slash + 1);
    let dot = memchr::memchr(b'.', &path[name_at..]).filter(|&dot| dot > 0)?;
    let (key, extension) = path.split_at(name_at + dot);
    Some((key, &extension[1..]))
}

/// One file of an archive.
struct Member {
    path: Option<Vec<u8>>,
    /// Where its first header begins, and where its content does.
    begin: usize,
    content: usize,
    len: u64,
}

/// The result of looking for a file.
enum Next {
    Member(Member),
    /// There are only zeros up to here.
    Zeros(usize),
    /// More bytes are needed from here on.
    More(usize),
}

/// The next file in `bytes` from `from` on.
fn next_member(bytes: &[u8], from: usize) -> Result<Next, (usize, FormatError)> {
    let (mut at, mut about) = (from, About::default());
    loop {
        let Some(header) = bytes.get(at..).and_then(<[u8]>::first_chunk) else {
            return Ok(Next::More(from));
        };
        let refused = |name: &[u8], problem: &str| {
            let name = String::from_utf8_lossy(name);
            Err((from, FormatError::new(format!("`{name}` {problem}"))))
        };
        match entry(header).map_err(|problem| (at, problem))? {
            Entry::Zeros if at == from => return Ok(Next::Zeros(at + BLOCK_LEN)),
            Entry::Zeros => {
                return Err((at, FormatError::fixed("tar has a name without a file")));
            }
            Entry::About { kind, len } => {
                let padded = padded(len).filter(|_| len <= MAX_NAME_LEN).ok_or_else(|| {
                    (at, FormatError::new(format!("tar has a name of {len} bytes")))
                })?;
                let end = at + BLOCK_LEN + usize::try_from(padded).unwrap_or(usize::MAX / 2);
                if bytes.len() < end {
                    return Ok(Next::More(from));
                }
                let len = usize::try_from(len).unwrap_or(usize::MAX);
                let data = &bytes[at + BLOCK_LEN..][..len];
                match kind {
                    b'L' => about.path = Some(until_zero(data)),
                    // The name that a link points to.
                    b'K' => {}
                    _ => about.add(data).map_err(|problem| (at, problem))?,
                }
                at = end;
            }
            Entry::Refused { name, problem } => {
                return refused(about.path.unwrap_or(name), problem);
            }
            Entry::File { name: Some(name), .. } if about.is_sparse => {
                return refused(about.path.unwrap_or(name), SPARSE);
            }
            Entry::File { name, len } => {
                let path = name.map(|name| match (about.path, prefix(header)) {
                    (Some(long), _) => long.to_vec(),
                    (None, []) => name.to_vec(),
                    (None, prefix) => [prefix, b"/", name].concat(),
                });
                let (begin, content) = (from, at + BLOCK_LEN);
                let len = about.len.unwrap_or(len);
                return Ok(Next::Member(Member { path, begin, content, len }));
            }
        }
    }
}

/// Finds samples.
#[derive(Debug, Default)]
pub struct TarScanner {
    /// The key of the last sample.
    key: Option<Vec<u8>>,
    /// Where the last file begins, for messages.
    last: u64,
    /// Whether zeros follow it.
    has_end: bool,
}

impl Scanner for TarScanner {
    fn scan(
        &mut self,
        at: u64,
        bytes: &[u8],
        begins: &mut Offsets,
    ) -> Result<u64, (u64, FormatError)> {
        let mut from = 0;
        loop {
            let next = next_member(bytes, from)
                .map_err(|(within, problem)| (at + within as u64, problem))?;
            let member = match next {
                Next::More(from) => return Ok(at + from as u64),
                Next::Zeros(to) => {
                    self.has_end = true;
                    from = to;
                    continue;
                }
                Next::Member(member) => member,
            };
            let begin = at + member.begin as u64;
            (self.last, self.has_end) = (begin, false);
            if let Some((key, _)) = member.path.as_deref().and_then(key_and_extension)
                && self.key.as_deref() != Some(key)
            {
                begins.push(begin);
                self.key = Some(key.to_vec());
            }
            let end = padded(member.len)
                .and_then(|len| (at + member.content as u64).checked_add(len))
                .ok_or_else(|| {
                    (begin, FormatError::new(format!("tar has a file of {} bytes", member.len)))
                })?;
            match usize::try_from(end - at) {
                Ok(to) if to <= bytes.len() => from = to,
                _ => return Ok(end),
            }
        }
    }

    fn finish(&mut self, at: u64, end: u64, _: &mut Offsets) -> Result<(), (u64, FormatError)> {
        // As `tar` does, this reads archives without the zeros at the end.
        if at > end || (at < end && !self.has_end) {
            let text = "tar file is cut short: it ends inside of a file or a header";
            return Err((self.last, FormatError::fixed(text)));
        }
        Ok(())
    }
}

impl MayBeCompressed for WebDataset {
    fn detect(&self, _: &Path, head: &[u8]) -> Compression {
        Compression::detected(head)
    }
}

impl Framing for WebDataset {
    type Scanner = TarScanner;

    fn name(&self) -> String {
        "WebDataset".to_owned()
    }

    fn scanner(&self) -> TarScanner {
        TarScanner::default()
    }

    fn record_len(&self, _: u64) -> u64 {
        0
    }

    fn record<'a>(&self, bytes: &'a [u8], out: &'a mut Vec<u8>) -> Result<&'a [u8], FormatError> {
        let (mut from, mut key, mut files) = (0, Vec::new(), Vec::new());
        loop {
            let member = match next_member(bytes, from).map_err(|(_, problem)| problem)? {
                Next::More(_) => break,
                Next::Zeros(to) => {
                    from = to;
                    continue;
                }
                Next::Member(member) => member,
            };
            let len = usize::try_from(member.len).unwrap_or(usize::MAX);
            let content = bytes.get(member.content..).and_then(|rest| rest.get(..len));
            let content = content.ok_or(FormatError::fixed("file in the tar is cut short"))?;
            let path = member.path.as_deref().unwrap_or_default();
            if let Some((of_file, extension)) = key_and_extension(path) {
                if files.is_empty() {
                    key = of_file.to_vec();
                }
                let extension = extension.to_ascii_lowercase();
                if extension == KEY {
                    let path = String::from_utf8_lossy(path);
                    let text = format!("`{path}`: the extension `__key__` is reserved for keys");
                    return Err(FormatError::new(text));
                }
                if files.iter().any(|(other, _)| *other == extension) {
                    let name = String::from_utf8_lossy(&extension).into_owned();
                    let text = format!("sample has two files with the extension `{name}`");
                    return Err(FormatError::new(text));
                }
                files.push((extension, content));
            }
            from = member.content + len.next_multiple_of(BLOCK_LEN);
            if from >= bytes.len() {
                break;
            }
        }
        let len_u32 = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes();
        out.clear();
        out.extend_from_slice(&len_u32(&key));
        out.extend_from_slice(&u32::try_from(files.len()).unwrap_or(u32::MAX).to_le_bytes());
        for (extension, content) in &files {
            out.extend_from_slice(&len_u32(extension));
            out.extend_from_slice(&(content.len() as u64).to_le_bytes());
        }
        out.extend_from_slice(&key);
        for (extension, content) in &files {
            out.extend_from_slice(extension);
            out.extend_from_slice(content);
        }
        Ok(out)
    }
}
