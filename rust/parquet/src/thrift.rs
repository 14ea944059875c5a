//! Reads the few structures of Parquet's compact Thrift encoding that are needed before a page is
//! decoded: page headers and offset indexes. Checks footers before they are decoded elsewhere.

/// Structures and lists nest at most this deep; those of Parquet need eight levels.
const MAX_DEPTH: u32 = 16;
/// Groups of a schema nest at most this deep: the crate calls itself for each level.
const MAX_SCHEMA_DEPTH: usize = 100;

/// Why bytes are not what was expected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Problem {
    /// They end too early.
    Short,
    /// They violate the encoding.
    Invalid,
}

type Result<T> = std::result::Result<T, Problem>;

const TRUE: u8 = 1;
const FALSE: u8 = 2;
const BYTE: u8 = 3;
const I32: u8 = 5;
const I64: u8 = 6;
const BINARY: u8 = 8;
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
            0 => i16::try_from(self.integer()?).ok(),
            delta => i16::try_from(last + i32::from(delta)).ok(),
        };
        let id = id.map(i32::from).ok_or(Problem::Invalid)?;
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
                for _ in 0..len {
                    // In a list, a Boolean takes a byte.
                    self.skip(if kind <= FALSE { BYTE } else { kind }, depth + 1)?;
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

    /// Whether a page of the newer form is compressed, as far as the column is.
    pub(crate) fn is_compressed(&self) -> bool {
        self.kind != PageKind::DataV2 || self.fields[7] != Some(0)
    }
}

/// Headers of pages have fields up to number 7, apart from statistics.
const NUM_FIELDS: usize = 8;

/// Readers find a field by its number, whatever the kind of its value: another kind than `expected` would
/// make each find other fields.
fn check_kind(kind: u8, expected: u8) -> Result<()> {
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

/// Checks that `bytes` are a footer with as many elements in its lists as these claim, and a schema
/// that the crate can decode: it allocates memory for as many children as a group claims and calls
/// itself for each, and what fails there ends the process.
pub(crate) fn check_footer(bytes: &[u8]) -> Result<()> {
    let mut decoder = Decoder::new(bytes);
    let mut has_schema = false;
    decoder.structure(|decoder, id, kind| match id {
        1 if !has_schema => check_kind(kind, I32).map(|()| false),
        2 if !has_schema => {
            check_kind(kind, LIST)?;
            has_schema = true;
            check_schema(decoder).map(|()| true)
        }
        // The crate decodes no second schema, and nothing that may hide one lies before the first.
        _ if has_schema => Ok(false),
        _ => Err(Problem::Invalid),
    })
}

/// Reads a schema: each group says how many of the elements that follow are its children.
fn check_schema(decoder: &mut Decoder<'_>) -> Result<()> {
    let (len, kind) = decoder.list()?;
    check_kind(kind, STRUCT)?;
    // How many children the groups that have not ended still have, and how many all of them claim.
    let (mut open, mut claimed) = (Vec::new(), 0);
    for _ in 0..len {
        let mut num_children = 0;
        decoder.structure(|decoder, id, kind| {
            match id {
                1..=3 | 5..=9 => check_kind(kind, I32)?,
                4 => check_kind(kind, BINARY)?,
                10 => check_kind(kind, STRUCT)?,
                _ => {}
            }
            match id {
                5 => num_children = decoder.integer()?,
                10 => check_logical_type(decoder)?,
                _ => return Ok(false),
            }
            Ok(true)
        })?;
        let num_children = u64::try_from(num_children).map_err(|_| Problem::Invalid)?;
        claimed = num_children.saturating_add(claimed);
        if let Some(left) = open.last_mut() {
            *left -= 1;
        }
        if num_children > 0 {
            open.push(num_children);
        }
        while open.last() == Some(&0) {
            open.pop();
        }
        if claimed >= len || open.len() > MAX_SCHEMA_DEPTH {
            return Err(Problem::Invalid);
        }
    }
    Ok(())
}

/// Reads a logical type, which is a structure with one field, a structure.
fn check_logical_type(decoder: &mut Decoder<'_>) -> Result<()> {
    decoder.structure(|decoder, id, kind| {
        check_kind(kind, STRUCT)?;
        decoder.structure(|decoder, field, kind| {
            match (id, field) {
                (5, 1 | 2) | (18, 2) => check_kind(kind, I32)?,
                (7 | 8, 1) | (10, 2) => check_kind(kind, TRUE)?,
                (10 | 16, 1) => check_kind(kind, BYTE)?,
                (17 | 18, 1) => check_kind(kind, BINARY)?,
                // The unit of a time.
                (7 | 8, 2) => {
                    check_kind(kind, STRUCT)?;
                    decoder.structure(|_, _, kind| check_kind(kind, STRUCT).map(|()| false))?;
                    return Ok(true);
                }
                _ => {}
            }
            Ok(false)
        })?;
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

    /// A footer with groups that have as many children as `nums_children` says, and a leaf.
    fn footer_of_groups(nums_children: impl ExactSizeIterator<Item = usize>) -> Vec<u8> {
        let varint = |mut value: usize| {
            let mut bytes = Vec::new();
            while value >= 0x80 {
                bytes.push(u8::try_from(value & 0x7f).unwrap() | 0x80);
                value >>= 7;
            }
            bytes.push(u8::try_from(value).unwrap());
            bytes
        };
        let mut footer = [&[0x15, 2, 0x19, 0xfc][..], &varint(nums_children.len() + 1)].concat();
        for num_children in nums_children {
            footer
                .extend([&[0x35, 0, 0x18, 1, b'g', 0x15][..], &varint(2 * num_children)].concat());
            footer.push(0);
        }
        footer.extend([0x15, 2, 0x25, 0, 0x18, 1, b'x', 0, 0x16, 0, 0x19, 0x0c, 0]);
        footer
    }

    #[test]
    fn a_schema_that_nests_without_end_or_claims_all_elements_for_each_group_is_refused() {
        let nested = |depth| check_footer(&footer_of_groups((0..depth).map(|_| 1)));
        assert_eq!(nested(MAX_SCHEMA_DEPTH), Ok(()));
        assert_eq!(nested(MAX_SCHEMA_DEPTH + 1), Err(Problem::Invalid));
        assert_eq!(nested(100_000), Err(Problem::Invalid));
        let all = |depth| check_footer(&footer_of_groups((0..depth).map(|at| depth - at)));
        assert_eq!(all(1), Ok(()));
        assert_eq!(all(2), Err(Problem::Invalid));
    }

    #[test]
    fn a_footer_with_values_of_other_kinds_is_refused() {
        let footer = [0x15, 2, 0x19, 0x2c, 0x55, 2, 0, 0x15, 2, 0, 0x16, 0, 0x19, 0x0c, 0];
        // The version as a string, the schema as a set, the number of children with 64 bits, and that
        // field as number 2^16 + 5.
        for (at, kind) in [(0, 0x18), (2, 0x1a), (4, 0x56)] {
            let mut with = footer;
            with[at] = kind;
            assert_eq!(check_footer(&with), Err(Problem::Invalid));
        }
        let number = [&footer[..4], &[0x05, 0x8a, 0x80, 8], &footer[5..]].concat();
        assert_eq!(check_footer(&number), Err(Problem::Invalid));
        // The scale of a decimal as a string, in which the crate would find fields.
        let decimal = |kind: u8| {
            let element = [0x55, 0, 0x5c, 0x5c, kind, 2, 0, 0, 0];
            check_footer(&[&footer[..3], &[0x1c], &element, &[0]].concat())
        };
        assert_eq!(decimal(0x18), Err(Problem::Invalid));
        assert_eq!(decimal(0x15), Ok(()));
    }

    #[test]
    fn nesting_without_end_is_invalid() {
        assert_eq!(page_header(&[0x9c; 100]), Err(Problem::Invalid));
        assert_eq!(page_header(&[0x15; 3]), Err(Problem::Short));
    }
}
