//! Chunks of simple records: their lengths, then their bytes, each one compressed block.

use super::FormatError;
use super::chunk::ChunkHeader;
use super::decompress::{Decompressor, check_chunk_len, codec};
use super::varint::{Cursor, MAX_VARINT_LEN};

/// Decodes the data of a simple chunk. Puts where each record ends into `ends` and returns the
/// records back to back, in `data` itself if they are not compressed and else in `values`.
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
        check_chunk_len(header.decoded_len)?;
    }
    let sizes_len = cursor.varint64()?;
    let sizes_block = cursor.take(sizes_len)?;
    let most = header.num_records.saturating_mul(MAX_VARINT_LEN as u64);
    let sizes = decompressor.decompress(codec, sizes_block, most, values)?;
    add_up(header, sizes, ends)?;
    let values = decompressor.decompress(codec, cursor.rest(), header.decoded_len, values)?;
    if values.len() as u64 != header.decoded_len {
        return Err(FormatError::new(format!(
            "records of {} bytes where the chunk header states {}",
            values.len(),
            header.decoded_len
        )));
    }
    Ok(values)
}

/// Turns the lengths of records into where they end, up to the decoded length exactly.
fn add_up(header: &ChunkHeader, sizes: &[u8], ends: &mut Vec<usize>) -> Result<(), FormatError> {
    ends.clear();
    // Each length takes a byte or more, so this reserves eight times what there is at most.
    let num_records = usize::try_from(header.num_records)
        .ok()
        .filter(|&count| count <= sizes.len())
        .ok_or_else(|| {
            FormatError::new(format!(
                "{} records where the lengths take {} bytes",
                header.num_records,
                sizes.len()
            ))
        })?;
    ends.try_reserve(num_records)
        .map_err(|_| FormatError::new(format!("no memory for {num_records} record lengths")))?;
    let mut cursor = Cursor::new(sizes);
    let mut end = 0_u64;
    for _ in 0..num_records {
        end = end
            .checked_add(cursor.varint64()?)
            .filter(|&end| end <= header.decoded_len)
            .ok_or(FormatError::fixed("record lengths exceed the decoded length"))?;
        ends.push(usize::try_from(end).map_err(|_| FormatError::fixed("records exceed memory"))?);
    }
    if end == header.decoded_len && cursor.is_empty() {
        Ok(())
    } else {
        Err(FormatError::new(format!(
            "record lengths add up to {end} where the chunk header states {}, {} bytes left",
            header.decoded_len,
            cursor.rest().len()
        )))
    }
}
