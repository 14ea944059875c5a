//! The messages at the end of an `ArrayRecord` file: postscript, metadata, one entry per chunk.

use super::super::offsets::Offsets;
use super::super::riegeli::cursor::Cursor;
use super::super::riegeli::{ChunkRecords, FormatError};
use crate::parse::wire::{Content, Fields};
use crate::varint::read_varint;

/// The number that identifies a postscript.
pub const MAGIC: u64 = 0x7193_0e70_4fda_e05e;
/// The only existing version of the layout.
pub const VERSION: u64 = 1;

/// Calls `field` with each field of a protocol buffer message.
fn fields<'a>(
    message: &'a [u8],
    mut field: impl FnMut(u64, Content<'a>),
) -> Result<(), FormatError> {
    let mut fields = Fields::of(message);
    let malformed = |problem| FormatError::new(format!("malformed message: {problem}"));
    while let Some((number, content)) = fields.next_field().map_err(malformed)? {
        field(number, content);
    }
    Ok(())
}

/// The value of a varint that [`fields`] has found.
fn integer(encoded: &[u8]) -> u64 {
    read_varint(encoded).map_or(0, |(value, _)| value)
}

/// The offset of the footer chunk, from the records of the postscript chunk.
///
/// # Errors
/// If they hold no valid postscript.
pub fn footer_offset(records: ChunkRecords<'_>) -> Result<u64, FormatError> {
    let record = records.get(0).ok_or(FormatError::fixed("postscript has no record"))?;
    let (mut offset, mut magic) = (None, None);
    fields(record, |number, field| match (number, field) {
        (1, Content::Varint(value)) => offset = Some(integer(value)),
        (2, Content::Varint(value)) => magic = Some(integer(value)),
        _ => {}
    })?;
    match magic {
        Some(MAGIC) => {}
        Some(magic) => {
            return Err(FormatError::new(format!(
                "magic number of the postscript must be {MAGIC:#x}, got {magic:#x}"
            )));
        }
        None => return Err(FormatError::fixed("postscript has no magic number")),
    }
    offset.ok_or(FormatError::fixed("postscript has no footer offset"))
}

/// The metadata of a file from its footer.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Footer {
    /// How many records the file holds.
    pub num_records: u64,
    /// How many chunks the file holds.
    pub num_chunks: u64,
    /// How many records each chunk holds, except the last, which may hold fewer.
    pub group_size: u64,
    /// The offset of the first chunk, or of the footer if there are no chunks.
    pub first_offset: u64,
    /// The text of the writer's options, as stored in the file.
    pub writer_options: Option<String>,
}

/// Parses a footer record by record.
#[derive(Debug)]
pub struct FooterParser {
    footer: Footer,
    footer_offset: u64,
    offsets: Option<Offsets>,
    num_entries: u64,
    last_offset: Option<u64>,
    last_count: u64,
    sum: u64,
}

impl FooterParser {
    /// Starts with the first record of the footer at `footer_offset`, which `num_entries` follow.
    /// Collects the offsets of chunks unless there are more than `max_offsets`.
    ///
    /// # Errors
    /// If the record does not describe a file of this many chunks.
    pub fn new(
        record: &[u8],
        num_entries: u64,
        footer_offset: u64,
        max_offsets: u64,
    ) -> Result<Self, FormatError> {
        let mut footer = read_metadata(record)?;
        if num_entries != footer.num_chunks {
            let num_chunks = footer.num_chunks;
            return Err(FormatError::new(format!(
                "footer has {num_entries} chunk entries, its metadata states {num_chunks}"
            )));
        }
        footer.first_offset = footer_offset;
        let offsets = (num_entries <= max_offsets).then(Offsets::default);
        Ok(Self {
            footer,
            footer_offset,
            offsets,
            num_entries: 0,
            last_offset: None,
            last_count: 0,
            sum: 0,
        })
    }

    /// Adds the next record, which describes a chunk.
    ///
    /// # Errors
    /// If it is invalid or contradicts earlier records.
    #[inline]
    pub fn entry(&mut self, record: &[u8]) -> Result<(), FormatError> {
        let entry = self.num_entries;
        let (offset, count) = read_entry(record)?;
        let offset =
            offset.ok_or_else(|| FormatError::new(format!("entry {entry} has no chunk offset")))?;
        if self.last_offset.is_some_and(|last| last >= offset) || offset >= self.footer_offset {
            return Err(FormatError::new(format!(
                "entry {entry}: chunk offset {offset} is out of order"
            )));
        }
        if entry == 0 {
            self.footer.group_size = count;
            self.footer.first_offset = offset;
        } else if self.last_count != self.footer.group_size {
            return Err(FormatError::new(format!(
                "entry {} has {} records, expected {} as in each chunk except the last",
                entry - 1,
                self.last_count,
                self.footer.group_size
            )));
        }
        self.sum = self.sum.saturating_add(count);
        (self.last_offset, self.last_count) = (Some(offset), count);
        self.num_entries += 1;
        if let Some(offsets) = &mut self.offsets {
            offsets.push(offset);
        }
        Ok(())
    }

    /// The metadata and the collected offsets, after the last record.
    ///
    /// # Errors
    /// If its records contradict each other.
    pub fn finish(self) -> Result<(Footer, Option<Offsets>), FormatError> {
        let Self { footer, mut offsets, last_count, .. } = self;
        if self.num_entries > 0 && !(1..=footer.group_size).contains(&last_count) {
            return Err(FormatError::new(format!(
                "the last entry has {last_count} records, expected 1 to {}",
                footer.group_size
            )));
        }
        if self.sum != footer.num_records {
            return Err(FormatError::new(format!(
                "entries add up to {} records, the metadata states {}",
                self.sum, footer.num_records
            )));
        }
        if let Some(offsets) = &mut offsets {
            offsets.shrink();
        }
        Ok((footer, offsets))
    }
}

fn read_metadata(record: &[u8]) -> Result<Footer, FormatError> {
    let mut metadata = None;
    fields(record, |number, field| {
        if let (1, Content::Bytes(bytes)) = (number, field) {
            metadata = Some(bytes);
        }
    })?;
    let metadata = metadata.ok_or(FormatError::fixed("footer has no ArrayRecord metadata"))?;
    let (mut version, mut footer) = (None, Footer::default());
    let mut options = None;
    fields(metadata, |number, field| match (number, field) {
        (1, Content::Varint(value)) => version = Some(integer(value)),
        (2, Content::Varint(value)) => footer.num_chunks = integer(value),
        (3, Content::Varint(value)) => footer.num_records = integer(value),
        (4, Content::Bytes(bytes)) => options = Some(bytes),
        _ => {}
    })?;
    match version {
        Some(VERSION) => {}
        Some(version) => {
            return Err(FormatError::new(format!(
                "unsupported version {version}, expected {VERSION}"
            )));
        }
        None => return Err(FormatError::fixed("metadata has no version")),
    }
    footer.writer_options = options.map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    Ok(footer)
}

/// The chunk offset and the number of records of an entry.
#[inline]
fn read_entry(record: &[u8]) -> Result<(Option<u64>, u64), FormatError> {
    let (mut offset, mut count) = (None, 0);
    let mut cursor = Cursor::new(record);
    // The three fields that writers store; an entry with any other is parsed by the general code.
    while !cursor.is_empty() {
        match cursor.byte()? {
            0x08 => offset = Some(cursor.varint64()?),
            0x10 => drop(cursor.varint64()?),
            0x18 => count = cursor.varint64()?,
            _ => return read_unusual_entry(record),
        }
    }
    Ok((offset, count))
}

#[cold]
fn read_unusual_entry(record: &[u8]) -> Result<(Option<u64>, u64), FormatError> {
    let (mut offset, mut count) = (None, 0);
    fields(record, |number, field| match (number, field) {
        (1, Content::Varint(value)) => offset = Some(integer(value)),
        (3, Content::Varint(value)) => count = integer(value),
        _ => {}
    })?;
    Ok((offset, count))
}
