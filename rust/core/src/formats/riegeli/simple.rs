//! Decodes simple chunks: the record lengths, then their bytes, each as one compressed block.

use super::super::record_limit::check_decoded_len;
use super::FormatError;
use super::chunk::ChunkHeader;
use super::cursor::Cursor;
use super::decompress::{Decompressor, codec};
use crate::varint::MAX_VARINT_LEN;

/// Decodes the data of a simple chunk. Writes the end of each record to `ends` and returns the
/// records back to back, in `data` itself if they are not compressed, else in `values`.
///
/// # Errors
/// If the data are not what the format and the chunk's header demand.
pub fn decode<'a>(
    header: &ChunkHeader,
    data: &'a [u8],
    decompressor: &mut Decompressor,
    ends: &mut Vec<usize>,
    values: &'a mut Vec<u8>,
) -> Result<&'a [u8], FormatError> {
    let mut cursor = Cursor::new(data);
    let codec = cursor.byte()?;
    if codec != codec::NONE {
        check_decoded_len(header.decoded_len, data.len() as u64)?;
    }
    let sizes_len = cursor.varint64()?;
    let sizes_block = cursor.take(sizes_len)?;
    let max_len = header.num_records.saturating_mul(MAX_VARINT_LEN as u64);
    let sizes = decompressor.decompress(codec, sizes_block, max_len, values)?;
    sum_lens(header, sizes, ends)?;
    let values = decompressor.decompress(codec, cursor.rest(), header.decoded_len, values)?;
    if values.len() as u64 != header.decoded_len {
        return Err(FormatError::new(format!(
            "records have {} bytes, the chunk header states {}",
            values.len(),
            header.decoded_len
        )));
    }
    Ok(values)
}

/// Converts record lengths to ends, which must add up to the decoded length.
fn sum_lens(header: &ChunkHeader, sizes: &[u8], ends: &mut Vec<usize>) -> Result<(), FormatError> {
    ends.clear();
    // Each length has at least one byte, so this reserves at most eight times their bytes.
    let num_records = usize::try_from(header.num_records)
        .ok()
        .filter(|&count| count <= sizes.len())
        .ok_or_else(|| {
            FormatError::new(format!(
                "chunk header states {} records, their lengths have only {} bytes",
                header.num_records,
                sizes.len()
            ))
        })?;
    ends.try_reserve(num_records)
        .map_err(|_| FormatError::new(format!("no memory for {num_records} record lengths")))?;
    let mut cursor = Cursor::new(sizes);
    let mut end = 0_u64;
    for _ in 0..num_records {
        end = end.checked_add(cursor.varint64()?).filter(|&end| end <= header.decoded_len).ok_or(
            FormatError::fixed("record lengths exceed the decoded length of the chunk header"),
        )?;
        ends.push(
            usize::try_from(end)
                .map_err(|_| FormatError::fixed("record lengths exceed the address space"))?,
        );
    }
    if end == header.decoded_len && cursor.is_empty() {
        Ok(())
    } else {
        Err(FormatError::new(format!(
            "record lengths add up to {end}, the chunk header states {}; {} bytes left",
            header.decoded_len,
            cursor.rest().len()
        )))
    }
}
