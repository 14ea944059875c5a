//! JSON lines: each line that is not blank is a record.

use std::path::Path;

use super::format_error::FormatError;
use super::offsets::Offsets;
use super::scanned::{Compression, Framing, Scanner};
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
}

impl Framing for JsonLines {
    type Scanner = LineScanner;

    fn name(&self) -> String {
        "JSON lines".to_owned()
    }

    fn scanner(&self) -> LineScanner {
        LineScanner { begin: Some(0) }
    }

    fn detected(&self, path: &Path, head: &[u8]) -> Compression {
        // Nothing else would tell a gzip file with damaged first bytes from lines.
        if path.extension().is_some_and(|end| end == "gz") {
            return Compression::Gzip;
        }
        Compression::gzip_or_none(head)
    }

    fn record_len(&self, _: u64) -> u64 {
        0
    }

    fn record<'a>(&self, bytes: &'a [u8], _: &'a mut Vec<u8>) -> Result<&'a [u8], FormatError> {
        let line = &bytes[..memchr::memchr(b'\n', bytes).unwrap_or(bytes.len())];
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.iter().all(|&byte| is_blank(byte)) {
            return Err(FormatError::fixed("line is blank, the index has a record here"));
        }
        Ok(line)
    }
}
