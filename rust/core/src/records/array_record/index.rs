//! The index of a file as it is read from the footer, at no time as a whole.

use std::ops::Range;

use super::super::riegeli::chunk::{ChunkHeader, kind};
use super::super::riegeli::inflate::{ChunkSource, Inflated, StreamError, varint64};
use super::super::riegeli::{Decoder, FormatError};
use super::footer::{Footer, Reading};
use super::offsets::Offsets;
use super::pieces::ChunkPieces;
use super::ranges::{Ranges, read_chunk};

/// What a footer says.
#[derive(Debug)]
pub(super) struct Index {
    /// The header of the chunk that the footer is, which has the hash of all of it.
    pub(super) header: ChunkHeader,
    pub(super) footer: Footer,
    /// Where the chunks begin, unless those are more than were asked for.
    pub(super) offsets: Option<Offsets>,
}

/// The most bytes of a record of a footer: what has more than the options of a writer, and three
/// numbers for each chunk, is none.
const MAX_RECORD_LEN: u64 = 16 << 20;

/// Reads the footer that begins and must end in `extent`: what it says of the file, and where
/// the chunks begin, unless those are more than `most`.
///
/// The footer is checked to its end in any case. Beside the offsets, memory is taken for the
/// compressed lengths of its records, about a byte for each chunk at most.
pub(super) fn read(
    ranges: &impl Ranges,
    extent: &Range<u64>,
    most: u64,
) -> Result<Index, StreamError> {
    let mut pieces = ChunkPieces::open(ranges, extent)?;
    let header = *pieces.header();
    let codec = pieces.fill()?.first().copied();
    match codec {
        Some(codec) if pieces.header().kind == kind::SIMPLE && takes(codec) => {
            pieces.consume(1);
            let result = stream(codec, &mut pieces, extent.start, most);
            // What damaged bytes seem to say matters less than that they are damaged.
            if !matches!(result, Err(StreamError::File(_))) {
                pieces.finish()?;
            }
            let (footer, offsets) = result?;
            Ok(Index { header, footer, offsets })
        }
        _ => decode_whole(ranges, extent, most),
    }
}

fn takes(codec: u8) -> bool {
    Inflated::<&[u8]>::takes(codec)
}

/// Reads the records of a simple chunk after its first byte.
fn stream(
    codec: u8,
    pieces: &mut ChunkPieces<'_, impl Ranges>,
    footer_offset: u64,
    most: u64,
) -> Result<(Footer, Option<Offsets>), StreamError> {
    let header = *pieces.header();
    let block = lengths(pieces, header.data_len)?;
    let mut lens = Inflated::new(codec, &block[..])?;
    let mut values = Inflated::new(codec, pieces)?;
    let mut total = 0_u64;
    let mut next_len = || -> Result<usize, StreamError> {
        let len = lens.varint64()?;
        total = total
            .checked_add(len)
            .filter(|&total| total <= header.decoded_len)
            .ok_or(FormatError::fixed("record lengths exceed the decoded length"))?;
        if len > MAX_RECORD_LEN {
            let text = format!("a record of {len} bytes, expected up to {MAX_RECORD_LEN}");
            return Err(FormatError::new(text).into());
        }
        Ok(usize::try_from(len).map_err(|_| FormatError::fixed("records exceed memory"))?)
    };
    let Some(num_entries) = header.num_records.checked_sub(1) else {
        return Err(FormatError::fixed("no footer record").into());
    };
    let mut reading = Reading::new(values.take(next_len()?)?, num_entries, footer_offset, most)?;
    for _ in 0..num_entries {
        reading.entry(values.take(next_len()?)?)?;
    }
    if total != header.decoded_len {
        let stated = header.decoded_len;
        let text = format!("records of {total} bytes where the chunk header states {stated}");
        return Err(FormatError::new(text).into());
    }
    lens.finish()?;
    values.finish()?;
    Ok(reading.finish()?)
}

/// The compressed lengths of the records.
fn lengths(
    pieces: &mut ChunkPieces<'_, impl Ranges>,
    data_len: u64,
) -> Result<Vec<u8>, StreamError> {
    let len = varint64(pieces)?;
    if len > data_len {
        let text = format!("{len} bytes of record lengths in a chunk of {data_len}");
        return Err(FormatError::new(text).into());
    }
    let len = usize::try_from(len).map_err(|_| FormatError::fixed("records exceed memory"))?;
    let mut block = Vec::new();
    while block.len() < len {
        let piece = pieces.fill()?;
        if piece.is_empty() {
            return Err(FormatError::fixed("record lengths are cut short").into());
        }
        let now = piece.len().min(len - block.len());
        block.extend_from_slice(&piece[..now]);
        pieces.consume(now);
    }
    Ok(block)
}

/// Reads a footer of a kind that cannot be read in pieces.
fn decode_whole(
    ranges: &impl Ranges,
    extent: &Range<u64>,
    most: u64,
) -> Result<Index, StreamError> {
    let (mut raw, mut decoder) = (Vec::new(), Decoder::default());
    let (opened, data) = read_chunk(ranges, extent.clone(), &mut raw)??;
    let records = decoder.decode(&opened.header, &raw[data])?;
    let first = records.get(0).ok_or(FormatError::fixed("no footer record"))?;
    let num_entries = records.len() - 1;
    let mut reading = Reading::new(first, num_entries as u64, extent.start, most)?;
    for entry in 1..=num_entries {
        reading.entry(records.get(entry).unwrap_or_default())?;
    }
    let (footer, offsets) = reading.finish()?;
    Ok(Index { header: opened.header, footer, offsets })
}
