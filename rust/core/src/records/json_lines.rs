//! JSON lines: each line that is not blank is a record.

use std::ffi::OsStr;
use std::path::Path;

use super::format_error::FormatError;
use super::offsets::Offsets;
use super::scanned::{Compression, Framing, MayBeCompressed, Scanner};
use super::sequential::{Frame, Frames};
use crate::Result;

/// The framing of lines. A record is a line without its end (`\n` or `\r\n`); lines of nothing but
/// blanks are none. The last line needs no end.
#[derive(Debug, Clone, Copy, Default)]
pub struct JsonLines;

/// Finds lines that are not blank.
#[derive(Debug)]
pub struct LineScanner {
    /// Where the line begins that is blank so far; `None` inside of one that is not.
    begin: Option<u64>,
}

fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\r' | b'\n')
}

/// The record in a line, which is given without `\n`; `None` if the line is blank.
pub fn record_of(line: &[u8]) -> Option<&[u8]> {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    (!line.iter().all(|&byte| is_blank(byte))).then_some(line)
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
                let rest = &bytes[from..];
                let num_blank = rest.iter().position(|&byte| !is_blank(byte)).unwrap_or(rest.len());
                // The line begins after the last line end in the blanks.
                let begin = match memchr::memrchr(b'\n', &rest[..num_blank]) {
                    Some(line_end) => at + (from + line_end + 1) as u64,
                    None => begin,
                };
                from += num_blank;
                if from == bytes.len() {
                    self.begin = Some(begin);
                    break;
                }
                begins.push(begin);
                self.begin = None;
            }
            match memchr::memchr(b'\n', &bytes[from..]) {
                Some(len) => {
                    from += len + 1;
                    self.begin = Some(at + from as u64);
                }
                None => break,
            }
        }
        Ok(at + bytes.len() as u64)
    }

    fn finish(&mut self, _: u64, _: u64) -> Result<(), (u64, FormatError)> {
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
        Ok(match record_of(&rest[..len]) {
            Some(record) => Frame::Record(at..at + record.len(), next),
            None => Frame::Skipped(next),
        })
    }
}

impl MayBeCompressed for JsonLines {
    fn detect(&self, path: &Path, head: &[u8]) -> Compression {
        // Nothing else would tell a compressed file with damaged first bytes from lines.
        match path.extension().and_then(OsStr::to_str) {
            Some("gz") => return Compression::Gzip,
            Some("zst") => return Compression::Zstd,
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
        LineScanner { begin: Some(0) }
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
            Some(len) => line[len..].iter().all(|&byte| is_blank(byte)),
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
