//! The frames of a `TFRecord` file: length, checksum of the length, data, checksum of the data.

use super::{Frame, Framing};
use crate::records::checksum::crc32c::masked as masked_crc;

const HEADER_LEN: usize = 12;
const FOOTER_LEN: usize = 4;

/// Records with their length before and checksums around them, all of which are verified.
#[derive(Debug, Clone, Copy, Default)]
pub struct TfRecords;

/// Whether `first` begins with a length and its checksum.
pub(super) fn begins_with(first: &[u8]) -> bool {
    let Some(header) = first.first_chunk::<HEADER_LEN>() else { return false };
    stored_crc(&header[8..]) == masked_crc(&header[..8])
}

fn stored_crc(bytes: &[u8]) -> u32 {
    bytes.first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

impl Framing for TfRecords {
    #[inline]
    fn frame(&self, bytes: &[u8], at: usize, is_end: bool) -> Result<Frame, String> {
        let rest = &bytes[at..];
        let Some((header, data)) = rest.split_first_chunk::<HEADER_LEN>() else {
            let len = rest.len();
            return incomplete(HEADER_LEN, is_end, || {
                format!("truncated: {len} bytes, but the header of a record has {HEADER_LEN}")
            });
        };
        let (stored, computed) = (stored_crc(&header[8..]), masked_crc(&header[..8]));
        if stored != computed {
            return Err(mismatch("length", stored, computed));
        }
        let len = header.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let found = data.len();
        let needed = usize::try_from(len)
            .ok()
            .and_then(|len| len.checked_add(HEADER_LEN + FOOTER_LEN).map(|whole| (len, whole)));
        let Some((len, whole)) = needed else {
            return Err(format!("a length of {len} bytes exceeds the address space"));
        };
        if rest.len() < whole {
            return incomplete(whole, is_end, || {
                let needed = len + FOOTER_LEN;
                format!("truncated: {found} bytes, but data and checksum have {needed}")
            });
        }
        let (data, rest) = data.split_at(len);
        let (stored, computed) = (stored_crc(rest), masked_crc(data));
        if stored != computed {
            return Ok(Frame::Damaged(mismatch("data", stored, computed), at + whole));
        }
        let begin = at + HEADER_LEN;
        Ok(Frame::Record(begin..begin + len, at + whole))
    }
}

fn incomplete(
    needed: usize,
    is_end: bool,
    problem: impl FnOnce() -> String,
) -> Result<Frame, String> {
    if is_end { Err(problem()) } else { Ok(Frame::Incomplete(needed)) }
}

#[cold]
fn mismatch(part: &str, stored: u32, computed: u32) -> String {
    format!("checksum mismatch in the {part} (stored {stored:#x}, computed {computed:#x})")
}
