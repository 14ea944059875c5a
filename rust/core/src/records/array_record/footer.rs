//! The messages at the end of an `ArrayRecord` file: postscript, metadata, one entry per chunk.

use super::super::riegeli::varint::Cursor;
use super::super::riegeli::{ChunkRecords, Problem};

/// What the postscript carries so that it can be told from other messages.
pub const MAGIC: u64 = 0x7193_0e70_4fda_e05e;
/// The only version of the layout there is.
pub const VERSION: u64 = 1;

/// A field of a message: an integer, or bytes.
enum Field<'a> {
    Integer(u64),
    Bytes(&'a [u8]),
}

/// Calls `field` with each field of a protocol buffer message.
fn fields<'a>(message: &'a [u8], mut field: impl FnMut(u32, Field<'a>)) -> Result<(), Problem> {
    let mut cursor = Cursor::new(message);
    while !cursor.is_empty() {
        let key = cursor.varint32()?;
        let value = match key & 7 {
            0 => Field::Integer(cursor.varint64()?),
            1 => Field::Bytes(cursor.take(8)?),
            2 => {
                let len = cursor.varint32()?;
                Field::Bytes(cursor.take(u64::from(len))?)
            }
            5 => Field::Bytes(cursor.take(4)?),
            wire => return Err(Problem::new(format!("wire type {wire} in a message"))),
        };
        field(key >> 3, value);
    }
    Ok(())
}

/// Where the footer chunk begins, from the records of the postscript chunk.
///
/// # Errors
/// If they hold no valid postscript.
pub fn footer_offset(records: ChunkRecords<'_>) -> Result<u64, Problem> {
    let record = records.get(0).ok_or(Problem::fixed("no postscript record"))?;
    let (mut offset, mut magic) = (None, None);
    fields(record, |number, field| match (number, field) {
        (1, Field::Integer(value)) => offset = Some(value),
        (2, Field::Integer(value)) => magic = Some(value),
        _ => {}
    })?;
    match magic {
        Some(MAGIC) => {}
        Some(magic) => return Err(Problem::new(format!("wrong magic number {magic:#x}"))),
        None => return Err(Problem::fixed("no magic number")),
    }
    offset.ok_or(Problem::fixed("no offset of the footer"))
}

/// The index of a file.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Footer {
    /// How many records the file holds.
    pub num_records: u64,
    /// How many records each chunk holds, but for the last, which may hold fewer.
    pub group_size: u64,
    /// Where each chunk begins, in rising order.
    pub offsets: Vec<u64>,
    /// The options of the writer as it noted them.
    pub writer_options: Option<String>,
}

/// The index from the records of the footer chunk that begins at `footer_offset`.
///
/// # Errors
/// If anything in it contradicts itself or could lead a reader astray.
pub fn read(records: ChunkRecords<'_>, footer_offset: u64) -> Result<Footer, Problem> {
    let first = records.get(0).ok_or(Problem::fixed("no footer record"))?;
    let (mut footer, num_chunks) = read_metadata(first)?;
    let num_entries = records.len() as u64 - 1;
    if num_entries != num_chunks {
        return Err(Problem::new(format!("{num_entries} entries for {num_chunks} chunks")));
    }
    footer.offsets.reserve_exact(records.len() - 1);
    let (mut last_offset, mut last_count, mut sum) = (None, None, 0_u64);
    for entry in 0..records.len() - 1 {
        let (offset, count) = read_entry(records.get(entry + 1).unwrap_or_default())?;
        let offset =
            offset.ok_or_else(|| Problem::new(format!("entry {entry} has no chunk offset")))?;
        if last_offset.is_some_and(|last| last >= offset) || offset >= footer_offset {
            return Err(Problem::new(format!("entry {entry}: chunk offset {offset} out of order")));
        }
        if last_count.is_some_and(|last| last != footer.group_size) {
            return Err(Problem::new(format!(
                "entry {} has {} records where each chunk but the last has {}",
                entry - 1,
                last_count.unwrap_or(0),
                footer.group_size
            )));
        }
        if entry == 0 {
            footer.group_size = count;
        }
        sum = sum.saturating_add(count);
        (last_offset, last_count) = (Some(offset), Some(count));
        footer.offsets.push(offset);
    }
    if let Some(count) = last_count
        && !(1..=footer.group_size).contains(&count)
    {
        return Err(Problem::new(format!(
            "the last entry has {count} records, expected 1 to {}",
            footer.group_size
        )));
    }
    if sum != footer.num_records {
        return Err(Problem::new(format!(
            "entries of {sum} records where the file states {}",
            footer.num_records
        )));
    }
    Ok(footer)
}

fn read_metadata(record: &[u8]) -> Result<(Footer, u64), Problem> {
    let mut metadata = None;
    fields(record, |number, field| {
        if let (1, Field::Bytes(bytes)) = (number, field) {
            metadata = Some(bytes);
        }
    })?;
    let metadata = metadata.ok_or(Problem::fixed("no ArrayRecord metadata"))?;
    let (mut version, mut num_chunks, mut footer) = (None, 0, Footer::default());
    let mut options = None;
    fields(metadata, |number, field| match (number, field) {
        (1, Field::Integer(value)) => version = Some(value),
        (2, Field::Integer(value)) => num_chunks = value,
        (3, Field::Integer(value)) => footer.num_records = value,
        (4, Field::Bytes(bytes)) => options = Some(bytes),
        _ => {}
    })?;
    match version {
        Some(VERSION) => {}
        Some(version) => return Err(Problem::new(format!("unknown version {version}"))),
        None => return Err(Problem::fixed("no version")),
    }
    footer.writer_options = options.map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    Ok((footer, num_chunks))
}

/// The chunk offset and the number of records of an entry.
fn read_entry(record: &[u8]) -> Result<(Option<u64>, u64), Problem> {
    let (mut offset, mut count) = (None, 0);
    fields(record, |number, field| match (number, field) {
        (1, Field::Integer(value)) => offset = Some(value),
        (3, Field::Integer(value)) => count = value,
        _ => {}
    })?;
    Ok((offset, count))
}
