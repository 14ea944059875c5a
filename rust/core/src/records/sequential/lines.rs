//! Lines of text, as in JSON Lines files.

use super::{Frame, Framing};

/// One record per line, without its line end (`\n` or `\r\n`); empty lines are skipped.
#[derive(Debug, Clone, Copy, Default)]
pub struct Lines;

impl Framing for Lines {
    fn frame(&self, bytes: &[u8], at: usize, is_end: bool) -> Result<Frame, String> {
        let rest = &bytes[at..];
        let (end, next) = match memchr::memchr(b'\n', rest) {
            Some(len) => (at + len, at + len + 1),
            None if is_end => (bytes.len(), bytes.len()),
            None => return Ok(Frame::Incomplete(rest.len() + 1)),
        };
        let line = &bytes[at..end];
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.iter().all(u8::is_ascii_whitespace) {
            return Ok(Frame::Skipped(next));
        }
        Ok(Frame::Record(at..at + line.len(), next))
    }
}
