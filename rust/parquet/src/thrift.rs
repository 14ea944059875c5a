//! Reads the few structures of Parquet's compact Thrift encoding that are needed before a page is
//! decoded: page headers and offset indexes. Footers are rewritten with it (`footer`).

use grainmill_core::varint::{NoVarint, read_varint};

/// Structures and lists nest at most this deep; those of Parquet need eight levels.
const MAX_DEPTH: u32 = 16;

/// Why bytes are not what was expected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Problem {
    /// They end too early.
    Short,
    /// They violate the encoding.
    Invalid,
}

pub(crate) type Result<T> = std::result::Result<T, Problem>;

pub(crate) const TRUE: u8 = 1;
const FALSE: u8 = 2;
pub(crate) const BYTE: u8 = 3;
pub(crate) const I32: u8 = 5;
pub(crate) const I64: u8 = 6;
pub(crate) const BINARY: u8 = 8;
pub(crate) const LIST: u8 = 9;
pub(crate) const STRUCT: u8 = 12;

/// A position in encoded bytes.
#[derive(Debug)]
pub(crate) struct Decoder<'a> {
    bytes: &'a [u8],
    at: usize,
}

/// The next field of a structure: its number and the type of its value.
struct Field {
    id: i32,
    kind: u8,
}

impl<'a> Decoder<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    fn byte(&mut self) -> Result<u8> {
        let byte = *self.bytes.get(self.at).ok_or(Problem::Short)?;
        self.at += 1;
        Ok(byte)
    }

    fn skip_bytes(&mut self, len: u64) -> Result<()> {
        let end = usize::try_from(len).ok().and_then(|len| self.at.checked_add(len));
        match end {
            Some(end) if end <= self.bytes.len() => {
                self.at = end;
                Ok(())
            }
            _ => Err(Problem::Short),
        }
    }

    pub(crate) fn varint(&mut self) -> Result<u64> {
        let (value, len) =
            read_varint(&self.bytes[self.at..]).map_err(|problem| match problem {
                NoVarint::Short => Problem::Short,
                NoVarint::Long => Problem::Invalid,
            })?;
        self.at += len;
        Ok(value)
    }

    pub(crate) fn integer(&mut self) -> Result<i64> {
        let value = self.varint()?;
        Ok((value >> 1).cast_signed() ^ -(value & 1).cast_signed())
    }

    /// The field after the one numbered `last`; None at the end of the structure.
    fn field(&mut self, last: i32) -> Result<Option<Field>> {
        let head = self.byte()?;
        if head == 0 {
            return Ok(None);
        }
        let id = match head >> 4 {
            0 => i16::try_from(self.integer()?).ok(),
            delta => i16::try_from(last + i32::from(delta)).ok(),
        };
        let id = id.map(i32::from).ok_or(Problem::Invalid)?;
        Ok(Some(Field { id, kind: head & 15 }))
    }

    /// The number of elements of a list, and their type.
    pub(crate) fn list(&mut self) -> Result<(u64, u8)> {
        let head = self.byte()?;
        let len = if head >> 4 == 15 { self.varint()? } else { u64::from(head >> 4) };
        Ok((len, head & 15))
    }

    pub(crate) fn skip(&mut self, kind: u8, depth: u32) -> Result<()> {
        if depth > MAX_DEPTH {
            return Err(Problem::Invalid);
        }
        match kind {
            // A Boolean field has its value in its type.
            TRUE | FALSE => Ok(()),
            BYTE => self.skip_bytes(1),
            4..=6 => self.varint().map(drop),
            7 => self.skip_bytes(8),
            BINARY => {
                let len = self.varint()?;
                self.skip_bytes(len)
            }
            LIST | 10 => {
                let (len, kind) = self.list()?;
                (0..len).try_for_each(|_| self.skip_in_list(kind, depth + 1))
            }
            STRUCT => {
                let mut last = 0;
                while let Some(Field { id, kind }) = self.field(last)? {
                    self.skip(kind, depth + 1)?;
                    last = id;
                }
                Ok(())
            }
            _ => Err(Problem::Invalid),
        }
    }

    fn skip_in_list(&mut self, kind: u8, depth: u32) -> Result<()> {
        // There, a Boolean takes a byte.
        self.skip(if kind <= FALSE { BYTE } else { kind }, depth)
    }

    /// Skips an element of a list.
    pub(crate) fn skip_element(&mut self, kind: u8) -> Result<()> {
        self.skip_in_list(kind, 1)
    }

    /// The bytes of a text.
    pub(crate) fn binary(&mut self) -> Result<&'a [u8]> {
        let len = self.varint()?;
        self.bytes(len)
    }

    pub(crate) fn bytes(&mut self, len: u64) -> Result<&'a [u8]> {
        let start = self.at;
        self.skip_bytes(len)?;
        Ok(&self.bytes[start..self.at])
    }

    /// What `read` returns, and the bytes that it reads.
    pub(crate) fn consumed<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<(T, &'a [u8])> {
        let start = self.at;
        let value = read(self)?;
        Ok((value, &self.bytes[start..self.at]))
    }

    /// Calls `read` for each field of a structure, which reads its value and returns true, or
    /// returns false.
    pub(crate) fn structure(
        &mut self,
        mut read: impl FnMut(&mut Self, i32, u8) -> Result<bool>,
    ) -> Result<()> {
        let mut last = 0;
        while let Some(Field { id, kind }) = self.field(last)? {
            if !read(self, id, kind)? {
                self.skip(kind, 1)?;
            }
            last = id;
        }
        Ok(())
    }
}

/// The kind of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageKind {
    /// Values, in the older form.
    Data,
    /// Values; begins with a row.
    DataV2,
    /// The values that data pages refer to.
    Dictionary,
    /// Anything else, which readers skip.
    Other,
}

/// The encoding of values one after another.
pub(crate) const PLAIN: u32 = 0;

/// Whether values are numbers of those in a dictionary.
pub(crate) fn is_of_dictionary(encoding: u32) -> bool {
    matches!(encoding, 2 | 8)
}

/// What the header of a page says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageHeader {
    pub(crate) kind: PageKind,
    /// Length of the header.
    pub(crate) header_len: u64,
    /// Length of the page after its header.
    pub(crate) stored_len: u64,
    /// Length of the decompressed page.
    pub(crate) decoded_len: u64,
    /// Number of values, with nulls.
    pub(crate) num_values: u64,
    /// Number of rows, if stated.
    pub(crate) num_rows: Option<u64>,
    /// Checksum of the page as it is stored, if it has one.
    pub(crate) crc: Option<u32>,
    /// The other fields of the header of its kind, by their numbers.
    fields: [Option<i64>; NUM_FIELDS],
}

impl PageHeader {
    /// The value of this field of the header of its kind, a count, a length or an encoding.
    pub(crate) fn field(&self, number: usize) -> Result<u32> {
        let value = self.fields.get(number).copied().flatten();
        value.and_then(|value| i32::try_from(value).ok()?.try_into().ok()).ok_or(Problem::Invalid)
    }

    /// The encoding of its values.
    pub(crate) fn encoding(&self) -> Result<u32> {
        self.field(if self.kind == PageKind::DataV2 { 4 } else { 2 })
    }

    /// Whether a page of the newer form is compressed, as far as the column is.
    pub(crate) fn is_compressed(&self) -> bool {
        self.kind != PageKind::DataV2 || self.fields[7] != Some(0)
    }
}

/// Headers of pages have fields up to number 7, apart from statistics.
const NUM_FIELDS: usize = 8;

/// Readers find a field by its number, whatever the kind of its value: another kind than `expected` would
/// make each find other fields.
pub(crate) fn check_kind(kind: u8, expected: u8) -> Result<()> {
    let is_bool = kind == FALSE && expected == TRUE;
    if kind == expected || is_bool { Ok(()) } else { Err(Problem::Invalid) }
}

/// The page header that `bytes` begin with.
pub(crate) fn page_header(bytes: &[u8]) -> Result<PageHeader> {
    let mut decoder = Decoder::new(bytes);
    // The type, the decoded length, the stored length and the checksum.
    let mut numbers = [None; 4];
    // Of a data page, a dictionary page and a newer data page.
    let mut headers = [[None; NUM_FIELDS]; 3];
    decoder.structure(|decoder, id, kind| {
        match id {
            1..=4 => check_kind(kind, I32)?,
            5..=8 => check_kind(kind, STRUCT)?,
            _ => {}
        }
        let fields = match id {
            1..=4 => {
                numbers[usize::try_from(id - 1).unwrap_or(0)] = Some(decoder.integer()?);
                return Ok(true);
            }
            5 => &mut headers[0],
            7 => &mut headers[1],
            8 => &mut headers[2],
            _ => return Ok(false),
        };
        decoder.structure(|decoder, field, kind| {
            let value = match (id, field) {
                (5, 1..=4) | (7, 1..=2) | (8, 1..=6) => {
                    check_kind(kind, I32)?;
                    decoder.integer()?
                }
                (7, 3) | (8, 7) => {
                    check_kind(kind, TRUE)?;
                    i64::from(kind == TRUE)
                }
                _ => return Ok(false),
            };
            fields[usize::try_from(field).unwrap_or(0)] = Some(value);
            Ok(true)
        })?;
        Ok(true)
    })?;
    // They are fields of 32 bits.
    let not_negative = |value: i64| u64::try_from(i32::try_from(value).ok()?).ok();
    let count = |value: Option<i64>| value.and_then(not_negative).ok_or(Problem::Invalid);
    let [kind, decoded_len, stored_len, crc] = numbers;
    let (kind, fields) = match kind.ok_or(Problem::Invalid)? {
        0 => (PageKind::Data, headers[0]),
        2 => (PageKind::Dictionary, headers[1]),
        3 => (PageKind::DataV2, headers[2]),
        _ => (PageKind::Other, [Some(0); NUM_FIELDS]),
    };
    let is_newer = kind == PageKind::DataV2;
    Ok(PageHeader {
        kind,
        header_len: decoder.at as u64,
        stored_len: count(stored_len)?,
        decoded_len: count(decoded_len)?,
        num_values: count(fields[1])?,
        num_rows: fields[3].filter(|_| is_newer).and_then(not_negative),
        crc: crc.and_then(|crc| i32::try_from(crc).ok()).map(i32::cast_unsigned),
        fields,
    })
}

/// Where a data page is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageSpan {
    /// Where its header begins.
    pub(crate) offset: u64,
    /// Length of header and page.
    pub(crate) len: u64,
    /// The number in its row group of its first row.
    pub(crate) first_row: u64,
}

/// The pages that an offset index lists.
pub(crate) fn offset_index(bytes: &[u8]) -> Result<Vec<PageSpan>> {
    let mut decoder = Decoder::new(bytes);
    let mut pages = Vec::new();
    decoder.structure(|decoder, id, kind| {
        if (id, kind) != (1, LIST) {
            return Ok(false);
        }
        let (len, kind) = decoder.list()?;
        if kind != STRUCT {
            return Err(Problem::Invalid);
        }
        for _ in 0..len {
            let mut page = [-1_i64; 3];
            decoder.structure(|decoder, id, kind| match (id, kind) {
                (1 | 3, I64) | (2, I32) => {
                    page[usize::try_from(id - 1).unwrap_or(0)] = decoder.integer()?;
                    Ok(true)
                }
                _ => Ok(false),
            })?;
            let [offset, len, first_row] = page.map(u64::try_from);
            let (Ok(offset), Ok(len), Ok(first_row)) = (offset, len, first_row) else {
                return Err(Problem::Invalid);
            };
            pages.push(PageSpan { offset, len, first_row });
        }
        Ok(true)
    })?;
    Ok(pages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_header_is_read_and_a_cut_one_is_short() {
        // type 0, 100 bytes, 50 stored, data header of 7 values with statistics
        let bytes =
            [0x15, 0, 0x15, 200, 1, 0x15, 100, 0x2c, 0x15, 14, 0x4c, 0x18, 2, 9, 9, 0, 0, 0, 77];
        let header = page_header(&bytes).unwrap();
        assert_eq!(
            header,
            PageHeader {
                kind: PageKind::Data,
                header_len: 18,
                stored_len: 50,
                decoded_len: 100,
                num_values: 7,
                num_rows: None,
                crc: None,
                fields: [None, Some(7), None, None, None, None, None, None],
            }
        );
        for len in 0..18 {
            assert_eq!(page_header(&bytes[..len]), Err(Problem::Short));
        }
    }

    #[test]
    fn a_page_has_the_values_that_the_header_of_its_kind_says() {
        // Headers of 7 values as a data page, 5 as a dictionary, and 3 in 3 rows as a newer page.
        let of_kind = |kind: u8| {
            let start = [0x15, kind, 0x15, 2, 0x15, 2];
            let data = [0x2c, 0x15, 14, 0];
            let dictionary = [0x2c, 0x15, 10, 0];
            let newer = [0x1c, 0x15, 6, 0x25, 6, 0, 0];
            page_header(&[&start[..], &data, &dictionary, &newer].concat())
        };
        let counts = |header: PageHeader| (header.kind, header.num_values, header.num_rows);
        assert_eq!(of_kind(0).map(counts), Ok((PageKind::Data, 7, None)));
        assert_eq!(of_kind(2).map(counts), Ok((PageKind::Other, 0, None)));
        assert_eq!(of_kind(4).map(counts), Ok((PageKind::Dictionary, 5, None)));
        assert_eq!(of_kind(6).map(counts), Ok((PageKind::DataV2, 3, Some(3))));
        // 2^31 values; the same in fields of other kinds, which the crate reads all the same
        let many = [0x80, 0x80, 0x80, 0x80, 0x10, 0, 0];
        let with = |head: &[u8]| page_header(&[&[0x15, 0, 0x15, 2, 0x15, 2], head, &many].concat());
        assert_eq!(with(&[0x2c, 0x15]), Err(Problem::Invalid));
        assert_eq!(with(&[0x2c, 0x15, 2, 0, 0x0a, 10, 0x15]), Err(Problem::Invalid));
        assert_eq!(with(&[0x2c, 0x15, 2, 0x06, 2]), Err(Problem::Invalid));
        assert_eq!(with(&[0x2c, 0x15, 2, 0x05, 0x82, 0x80, 8]), Err(Problem::Invalid));
    }

    #[test]
    fn an_offset_index_is_read() {
        let bytes =
            [0x19, 0x2c, 0x16, 8, 0x15, 20, 0x16, 0, 0, 0x16, 28, 0x15, 6, 0x16, 200, 1, 0, 0];
        let spans = offset_index(&bytes).unwrap();
        assert_eq!(
            spans,
            [
                PageSpan { offset: 4, len: 10, first_row: 0 },
                PageSpan { offset: 14, len: 3, first_row: 100 }
            ]
        );
        for len in 0..bytes.len() {
            assert_eq!(offset_index(&bytes[..len]), Err(Problem::Short));
        }
    }

    #[test]
    fn nesting_without_end_is_invalid() {
        assert_eq!(page_header(&[0x9c; 100]), Err(Problem::Invalid));
        assert_eq!(page_header(&[0x15; 3]), Err(Problem::Short));
    }
}
