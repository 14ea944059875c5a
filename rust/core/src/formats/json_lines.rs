//! JSON lines: each line that is not blank is a record.

use std::ffi::OsStr;
use std::ops::Range;
use std::path::Path;

use super::format_error::FormatError;
use super::offsets::Offsets;
use super::scanned::{Compression, Framing, MayBeCompressed, Scanner, other_kind};
use super::sequential::{Frame, Frames};
use crate::Result;

/// The framing of lines. A record is a line without its end (`\n` or `\r\n`) and without a byte order
/// mark before it; lines of nothing but blanks are none. The last line needs no end.
#[derive(Debug, Clone, Copy, Default)]
pub struct JsonLines;

/// What some programs write before a text in UTF-8. JSON does not begin with it, so it may precede any
/// line: files that have one may have been joined.
pub const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Finds lines that are not blank.
#[derive(Debug)]
pub struct LineScanner {
    /// Where the line begins that is blank so far; `None` inside of one that is not.
    begin: Option<u64>,
    /// How many bytes of byte order marks it begins with.
    marked: usize,
}

impl LineScanner {
    /// Whether there is only a part of a mark so far.
    fn is_in_mark(&self) -> bool {
        !self.marked.is_multiple_of(BYTE_ORDER_MARK.len())
    }
}

fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\r' | b'\n')
}

/// The record in a line, which is given without `\n`; `None` if the line is blank.
pub fn record_of(line: &[u8]) -> Option<&[u8]> {
    range_of(line).map(|range| &line[range])
}

fn range_of(line: &[u8]) -> Option<Range<usize>> {
    let end = line.len() - usize::from(line.ends_with(b"\r"));
    let mut record = &line[..end];
    while let Some(rest) = record.strip_prefix(BYTE_ORDER_MARK) {
        record = rest;
    }
    (!record.iter().all(|&byte| is_blank(byte))).then(|| end - record.len()..end)
}

impl Scanner for LineScanner {
    fn scan(
        &mut self,
        at: u64,
        bytes: &[u8],
        begins: &mut Offsets,
    ) -> Result<u64, (u64, FormatError)> {
        let mut from = 0;
        while from < bytes.len() {
            if let Some(begin) = self.begin {
                let mut rest = &bytes[from..];
                if self.is_in_mark() {
                    rest = &[]; // blanks inside of a mark are none
                }
                let num_blank = rest.iter().position(|&byte| !is_blank(byte)).unwrap_or(rest.len());
                // The line begins after the last line end in the blanks.
                let begin = match memchr::memrchr(b'\n', &rest[..num_blank]) {
                    Some(line_end) => {
                        self.marked = 0;
                        at + (from + line_end + 1) as u64
                    }
                    None => begin,
                };
                from += num_blank;
                self.begin = Some(begin);
                let Some(&byte) = bytes.get(from) else { break };
                if byte == BYTE_ORDER_MARK[self.marked % BYTE_ORDER_MARK.len()]
                    && begin + self.marked as u64 == at + from as u64
                {
                    self.marked += 1;
                    from += 1;
                    continue;
                }
                begins.push(begin);
                self.begin = None;
            }
            match memchr::memchr(b'\n', &bytes[from..]) {
                Some(len) => {
                    from += len + 1;
                    (self.begin, self.marked) = (Some(at + from as u64), 0);
                }
                None => break,
            }
        }
        Ok(at + bytes.len() as u64)
    }

    fn finish(&mut self, _: u64, _: u64, begins: &mut Offsets) -> Result<(), (u64, FormatError)> {
        if let Some(begin) = self.begin.filter(|_| self.is_in_mark()) {
            begins.push(begin); // a part of a mark is none
        }
        Ok(())
    }

    fn is_undecided(&self, at: u64) -> bool {
        self.begin.is_some_and(|begin| begin < at)
    }
}

impl Frames for JsonLines {
    fn frame(
        &self,
        bytes: &[u8],
        at: usize,
        searched: usize,
        left: Option<u64>,
    ) -> Result<Frame, FormatError> {
        let rest = &bytes[at..];
        let line_end = memchr::memchr(b'\n', rest.get(searched..).unwrap_or_default());
        let (len, next) = match line_end.map(|len| searched + len) {
            Some(len) => (len, at + len + 1),
            None if left == Some(rest.len() as u64) => (rest.len(), bytes.len()),
            None => return Ok(Frame::Incomplete(rest.len() as u64 + 1)),
        };
        Ok(match range_of(&rest[..len]) {
            Some(record) => Frame::Record(at + record.start..at + record.end, next),
            None => Frame::Skipped(next),
        })
    }
}

impl MayBeCompressed for JsonLines {
    fn other_kind(&self, head: &[u8]) -> Option<&'static str> {
        match head {
            [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => {
                Some("text in UTF-16, which is not supported: convert it to UTF-8")
            }
            _ => other_kind(head),
        }
    }

    /// No text has these bytes, of which even short files of other kinds have some; JSON has none of
    /// the other control characters either, but lines may be other text.
    fn not_plain(&self, head: &[u8]) -> Option<&'static str> {
        let is_binary = head.iter().any(|byte| matches!(byte, 0..=6 | 14..=26));
        is_binary.then_some("binary data, not lines of text")
    }

    fn detect(&self, path: &Path, head: &[u8]) -> Compression {
        // Nothing else would tell a compressed file with damaged first bytes from lines.
        match path.extension().and_then(OsStr::to_str) {
            Some("gz") => return Compression::Gzip,
            Some("zst") => return Compression::Zstd,
            Some("xz") => return Compression::Xz,
            Some("bz2") => return Compression::Bzip2,
            _ => {}
        }
        match (Compression::detected(head), head) {
            // No JSON begins like this; others of the headers that zlib may have are text.
            (Compression::None, [b'x', 0x01 | 0x5e | 0x9c | 0xda, ..]) => Compression::Zlib,
            (detected, _) => detected,
        }
    }
}

impl Framing for JsonLines {
    type Scanner = LineScanner;

    fn name(&self) -> String {
        "JSON lines".to_owned()
    }

    fn scanner(&self) -> LineScanner {
        LineScanner { begin: Some(0), marked: 0 }
    }

    fn record_len(&self, _: u64) -> u64 {
        0
    }

    fn lead_len(&self) -> u64 {
        1
    }

    fn after_lead<'a>(
        &self,
        bytes: &'a [u8],
        begin: u64,
        is_last: bool,
    ) -> Result<&'a [u8], FormatError> {
        let line = match bytes.split_first() {
            Some((b'\n', line)) => line,
            _ if begin == 0 => bytes,
            _ => return Err(FormatError::fixed("no line begins here, the file has changed")),
        };
        let line_end = memchr::memchr(b'\n', line);
        let is_whole = match line_end {
            Some(len) => line[len..].split(|&byte| byte == b'\n').all(|l| record_of(l).is_none()),
            None => is_last,
        };
        if is_whole {
            Ok(line)
        } else {
            Err(FormatError::fixed("no line ends here, the file has changed"))
        }
    }

    fn record<'a>(&self, bytes: &'a [u8], _: &'a mut Vec<u8>) -> Result<&'a [u8], FormatError> {
        let line = &bytes[..memchr::memchr(b'\n', bytes).unwrap_or(bytes.len())];
        record_of(line).ok_or(FormatError::fixed("line is blank, the index has a record here"))
    }
}
