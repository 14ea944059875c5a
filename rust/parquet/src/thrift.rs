//! Reads the few structures of Parquet's compact Thrift encoding that are needed before a page is
//! decoded: page headers and offset indexes. Checks footers before they are decoded elsewhere.

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

type Result<T> = std::result::Result<T, Problem>;

const I32: u8 = 5;
const I64: u8 = 6;
const LIST: u8 = 9;
const STRUCT: u8 = 12;

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

    fn varint(&mut self) -> Result<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(Problem::Invalid)
    }

    fn integer(&mut self) -> Result<i64> {
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
            0 => i32::try_from(self.integer()?).map_err(|_| Problem::Invalid)?,
            delta => last.checked_add(i32::from(delta)).ok_or(Problem::Invalid)?,
        };
        Ok(Some(Field { id, kind: head & 15 }))
    }

    /// The number of elements of a list, and their type.
    fn list(&mut self) -> Result<(u64, u8)> {
        let head = self.byte()?;
        let len = if head >> 4 == 15 { self.varint()? } else { u64::from(head >> 4) };
        Ok((len, head & 15))
    }

    fn skip(&mut self, kind: u8, depth: u32) -> Result<()> {
        if depth > MAX_DEPTH {
            return Err(Problem::Invalid);
        }
        match kind {
            // A Boolean field has its value in its type.
            1 | 2 => Ok(()),
            3 => self.skip_bytes(1),
            4..=6 => self.varint().map(drop),
            7 => self.skip_bytes(8),
            8 => {
                let len = self.varint()?;
                self.skip_bytes(len)
            }
            LIST | 10 => {
                let (len, kind) = self.list()?;
                for _ in 0..len {
                    // In a list, a Boolean takes a byte.
                    self.skip(if kind <= 2 { 3 } else { kind }, depth + 1)?;
                }
                Ok(())
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

    /// Calls `read` for each field of a structure, which reads its value and returns true, or
    /// returns false.
    fn structure(
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
}

/// The page header that `bytes` begin with.
pub(crate) fn page_header(bytes: &[u8]) -> Result<PageHeader> {
    let mut decoder = Decoder::new(bytes);
    let (mut kind, mut decoded_len, mut stored_len) = (None, None, None);
    let (mut num_values, mut num_rows) = (None, None);
    decoder.structure(|decoder, id, field_kind| {
        match (id, field_kind) {
            (1, I32) => kind = Some(decoder.integer()?),
            (2, I32) => decoded_len = Some(decoder.integer()?),
            (3, I32) => stored_len = Some(decoder.integer()?),
            // The headers of data pages, dictionary pages and newer data pages.
            (5 | 7 | 8, STRUCT) => decoder.structure(|decoder, field, field_kind| {
                match (field, field_kind) {
                    (1, I32) => num_values = Some(decoder.integer()?),
                    (3, I32) if id == 8 => num_rows = Some(decoder.integer()?),
                    _ => return Ok(false),
                }
                Ok(true)
            })?,
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    let count = |value: Option<i64>| {
        value.and_then(|value| u64::try_from(value).ok()).ok_or(Problem::Invalid)
    };
    let kind = match kind.ok_or(Problem::Invalid)? {
        0 => PageKind::Data,
        2 => PageKind::Dictionary,
        3 => PageKind::DataV2,
        _ => PageKind::Other,
    };
    Ok(PageHeader {
        kind,
        header_len: decoder.at as u64,
        stored_len: count(stored_len)?,
        decoded_len: count(decoded_len)?,
        num_values: if kind == PageKind::Other { 0 } else { count(num_values)? },
        num_rows: num_rows.and_then(|rows| u64::try_from(rows).ok()),
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

/// Checks that `bytes` are a footer with as many elements in its lists as these claim: a decoder may
/// allocate memory for that many, and allocations that fail end the process.
pub(crate) fn check_footer(bytes: &[u8]) -> Result<()> {
    let mut decoder = Decoder::new(bytes);
    decoder.structure(|decoder, id, kind| {
        if (id, kind) != (2, LIST) {
            return Ok(false);
        }
        // The schema: each group says how many of the following elements are its children.
        let (len, kind) = decoder.list()?;
        if kind != STRUCT {
            return Err(Problem::Invalid);
        }
        for _ in 0..len {
            decoder.structure(|decoder, id, kind| {
                if (id, kind) != (5, I32) {
                    return Ok(false);
                }
                let num_children = u64::try_from(decoder.integer()?);
                if num_children.is_ok_and(|count| count < len) {
                    Ok(true)
                } else {
                    Err(Problem::Invalid)
                }
            })?;
        }
        Ok(true)
    })
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
        // type 0, 100 bytes, 50 stored, data header of 7 values with an unknown structure
        let bytes =
            [0x15, 0, 0x15, 200, 1, 0x15, 100, 0x2c, 0x15, 14, 0x1c, 0x18, 2, 9, 9, 0, 0, 0, 77];
        let header = page_header(&bytes).unwrap();
        assert_eq!(
            header,
            PageHeader {
                kind: PageKind::Data,
                header_len: 18,
                stored_len: 50,
                decoded_len: 100,
                num_values: 7,
                num_rows: None
            }
        );
        for len in 0..18 {
            assert_eq!(page_header(&bytes[..len]), Err(Problem::Short));
        }
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
    fn a_footer_that_claims_more_than_it_has_is_refused() {
        // A version; a schema of a group with one child, and the child; rows; no row groups.
        let footer = [0x15, 2, 0x19, 0x2c, 0x55, 2, 0, 0x15, 2, 0, 0x16, 0, 0x19, 0x0c, 0];
        assert_eq!(check_footer(&footer), Ok(()));
        let mut with = footer;
        with[5] = 4; // two children
        assert_eq!(check_footer(&with), Err(Problem::Invalid));
        with[5] = 3; // less than none
        assert_eq!(check_footer(&with), Err(Problem::Invalid));
        // 2^28 row groups
        let many = [&footer[..13], &[0xfc, 0x80, 0x80, 0x80, 0x80, 1, 0]].concat();
        assert_eq!(check_footer(&many), Err(Problem::Short));
        for len in 0..footer.len() {
            assert_eq!(check_footer(&footer[..len]), Err(Problem::Short));
        }
    }

    #[test]
    fn nesting_without_end_is_invalid() {
        assert_eq!(page_header(&[0x1c; 100]), Err(Problem::Invalid));
        assert_eq!(page_header(&[0x15; 3]), Err(Problem::Short));
    }
}
