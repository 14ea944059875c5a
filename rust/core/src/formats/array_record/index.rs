//! Reads the index of a file from its footer as a stream, without holding all of the footer.

use std::ops::Range;

use super::super::offsets::Offsets;
use super::super::riegeli::chunk::{ChunkHeader, kind};
use super::super::riegeli::stream_decoder::{ChunkSource, StreamDecoder, varint64};
use super::super::riegeli::{Decoder, FormatError, StreamError};
use super::chunk_stream::ChunkStream;
use super::footer::{Footer, FooterParser};
use super::ranges::{RangeReader, read_chunk};

/// The content of a footer.
#[derive(Debug)]
pub(super) struct Index {
    /// The header of the footer chunk, which has the hash of its data.
    pub(super) header: ChunkHeader,
    pub(super) footer: Footer,
    /// The offsets of the chunks, unless there are more than the requested maximum.
    pub(super) offsets: Option<Offsets>,
}

/// The maximum length of a footer record: valid ones hold a writer's options or three numbers.
const MAX_RECORD_LEN: u64 = 16 << 20;

/// Reads the footer that begins and must end in `extent`: its metadata, and the chunk offsets
/// unless there are more than `max_offsets`.
///
/// The footer is always checked to its end. Besides the offsets, this allocates memory for the
/// compressed lengths of its records, at most about a byte for each chunk.
pub(super) fn read(
    source: &impl RangeReader,
    extent: &Range<u64>,
    max_offsets: u64,
) -> Result<Index, StreamError> {
    let mut chunk = ChunkStream::open(source, extent)?;
    let header = *chunk.header();
    let codec = chunk.fill()?.first().copied();
    match codec {
        Some(codec) if chunk.header().kind == kind::SIMPLE && supports(codec) => {
            chunk.consume(1);
            let result = stream(codec, &mut chunk, extent.start, max_offsets);
            // A checksum error explains more than what damaged bytes decode to.
            if !matches!(result, Err(StreamError::File(_))) {
                chunk.finish()?;
            }
            let (footer, offsets) = result?;
            Ok(Index { header, footer, offsets })
        }
        _ => decode_whole(source, extent, max_offsets),
    }
}

fn supports(codec: u8) -> bool {
    StreamDecoder::<&[u8]>::supports(codec)
}

/// Parses the records of a simple chunk after its first byte.
fn stream(
    codec: u8,
    chunk: &mut ChunkStream<'_, impl RangeReader>,
    footer_offset: u64,
    max_offsets: u64,
) -> Result<(Footer, Option<Offsets>), StreamError> {
    let header = *chunk.header();
    let block = compressed_lens(chunk, header.data_len)?;
    let mut lens = StreamDecoder::new(codec, &block[..])?;
    let mut values = StreamDecoder::new(codec, chunk)?;
    let mut total = 0_u64;
    let mut next_len = || -> Result<usize, StreamError> {
        let len = lens.varint64()?;
        total = total.checked_add(len).filter(|&total| total <= header.decoded_len).ok_or(
            FormatError::fixed("record lengths exceed the decoded length of the chunk header"),
        )?;
        if len > MAX_RECORD_LEN {
            let text = format!("a record of {len} bytes, expected at most {MAX_RECORD_LEN}");
            return Err(FormatError::new(text).into());
        }
        Ok(usize::try_from(len)
            .map_err(|_| FormatError::fixed("record lengths exceed the address space"))?)
    };
    let Some(num_entries) = header.num_records.checked_sub(1) else {
        return Err(FormatError::fixed("footer has no record").into());
    };
    let mut parser =
        FooterParser::new(values.take(next_len()?)?, num_entries, footer_offset, max_offsets)?;
    for _ in 0..num_entries {
        parser.entry(values.take(next_len()?)?)?;
    }
    if total != header.decoded_len {
        let stated = header.decoded_len;
        let text = format!("records have {total} bytes, the chunk header states {stated}");
        return Err(FormatError::new(text).into());
    }
    lens.finish()?;
    values.finish()?;
    Ok(parser.finish()?)
}

/// Reads the compressed block of record lengths.
fn compressed_lens(
    chunk: &mut ChunkStream<'_, impl RangeReader>,
    data_len: u64,
) -> Result<Vec<u8>, StreamError> {
    let len = varint64(chunk)?;
    if len > data_len {
        let text = format!("record lengths take {len} bytes, but the chunk has {data_len}");
        return Err(FormatError::new(text).into());
    }
    let len = usize::try_from(len)
        .map_err(|_| FormatError::fixed("record lengths exceed the address space"))?;
    let mut block = Vec::new();
    while block.len() < len {
        let bytes = chunk.fill()?;
        if bytes.is_empty() {
            return Err(FormatError::fixed("record lengths are truncated").into());
        }
        let count = bytes.len().min(len - block.len());
        block.extend_from_slice(&bytes[..count]);
        chunk.consume(count);
    }
    Ok(block)
}

/// Reads a footer whose encoding cannot be read as a stream.
fn decode_whole(
    source: &impl RangeReader,
    extent: &Range<u64>,
    max_offsets: u64,
) -> Result<Index, StreamError> {
    let (mut raw, mut decoder) = (Vec::new(), Decoder::default());
    let (opened, data) = read_chunk(source, extent.clone(), &mut raw)??;
    let records = decoder.decode(&opened.header, &raw[data])?;
    let first = records.get(0).ok_or(FormatError::fixed("footer has no record"))?;
    let num_entries = records.len() - 1;
    let mut parser = FooterParser::new(first, num_entries as u64, extent.start, max_offsets)?;
    for entry in 1..=num_entries {
        parser.entry(records.get(entry).unwrap_or_default())?;
    }
    let (footer, offsets) = parser.finish()?;
    Ok(Index { header: opened.header, footer, offsets })
}
