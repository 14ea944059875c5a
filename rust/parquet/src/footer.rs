//! Rewrites a footer for the crate that decodes it: with what is needed of it, in the form of the format.
//!
//! What must not break: the crate allocates memory for as many elements as a list claims and calls itself
//! for each group of a schema, and what fails there ends the process; it reads a field by its number,
//! whatever its kind says. So each list that is written has the elements that it claims, groups nest at
//! most [`MAX_SCHEMA_DEPTH`] deep, and fields have the kinds of the format. What is not needed is left out,
//! such as statistics and most key-value pairs, in which writers deviate.

use std::collections::BTreeSet;

use grainmill_core::varint::push_varint;

use crate::thrift::{
    BINARY, BYTE, Decoder, I32, I64, LIST, Problem, Result, STRUCT, TRUE, check_kind,
};

/// Groups of a schema nest at most this deep.
const MAX_SCHEMA_DEPTH: usize = 100;
/// The crate numbers row groups in 16 bits.
const MAX_GROUPS: usize = 1 << 15;
/// The pair whose value is the schema that a writer had in memory.
const ARROW_SCHEMA: &[u8] = b"ARROW:schema";

/// A footer as the crate decodes it.
#[derive(Debug, Default)]
pub(crate) struct Footer {
    /// The footer, with as many of the row groups at a time as the crate takes.
    pub(crate) parts: Vec<Vec<u8>>,
    /// The numbers of the stored columns that are encrypted.
    pub(crate) encrypted: BTreeSet<usize>,
}

/// Row groups, encoded.
#[derive(Debug, Default)]
struct Groups {
    count: usize,
    bytes: Vec<u8>,
}

/// Writes the fields of a structure.
struct Fields<'a> {
    out: &'a mut Vec<u8>,
    last: i32,
}

impl<'a> Fields<'a> {
    fn of(out: &'a mut Vec<u8>) -> Self {
        Self { out, last: 0 }
    }

    fn head(&mut self, id: i32, kind: u8) {
        if let Ok(delta @ 1..=15) = u8::try_from(id - self.last) {
            self.out.push(delta << 4 | kind);
        } else {
            self.out.push(kind);
            push_varint(self.out, u64::from(id.unsigned_abs()) << 1);
        }
        self.last = id;
    }

    /// Writes a field with the bytes that `read` reads.
    fn copy<'b, T>(
        &mut self,
        decoder: &mut Decoder<'b>,
        (id, kind): (i32, u8),
        read: impl FnOnce(&mut Decoder<'b>) -> Result<T>,
    ) -> Result<T> {
        let (value, bytes) = decoder.consumed(read)?;
        self.head(id, kind);
        self.out.extend_from_slice(bytes);
        Ok(value)
    }

    /// Writes a field that is a number or text.
    fn copy_value(&mut self, decoder: &mut Decoder<'_>, id: i32, kind: u8) -> Result<()> {
        self.copy(decoder, (id, kind), |decoder| decoder.skip(kind, 1))
    }

    fn end(self) {
        self.out.push(0);
    }
}

fn list_head(out: &mut Vec<u8>, len: usize, kind: u8) {
    if let Ok(len @ 0..15) = u8::try_from(len) {
        out.push(len << 4 | kind);
    } else {
        out.push(0xf0 | kind);
        push_varint(out, len as u64);
    }
}

/// Reads the beginning of a list of structures. Some writers state another kind if it is empty.
fn structures(decoder: &mut Decoder<'_>, kind: u8) -> Result<usize> {
    check_kind(kind, LIST)?;
    let (len, kind) = decoder.list()?;
    if len > 0 {
        check_kind(kind, STRUCT)?;
    }
    usize::try_from(len).map_err(|_| Problem::Invalid)
}

/// The footer in `bytes`.
pub(crate) fn rewritten(bytes: &[u8]) -> Result<Footer> {
    let mut decoder = Decoder::new(bytes);
    let mut head = Vec::with_capacity(bytes.len());
    let mut fields = Fields::of(&mut head);
    let mut groups: Option<Vec<Groups>> = None;
    let mut has_schema = false;
    let mut footer = Footer::default();
    decoder.structure(|decoder, id, kind| {
        match id {
            1 => check_kind(kind, I32).and_then(|()| fields.copy_value(decoder, id, kind))?,
            3 => check_kind(kind, I64).and_then(|()| fields.copy_value(decoder, id, kind))?,
            2 if has_schema => return Err(Problem::Invalid),
            2 => {
                has_schema = true;
                let len = structures(decoder, kind)?;
                fields.head(id, LIST);
                schema(decoder, len, fields.out)?;
            }
            4 if groups.is_some() => return Err(Problem::Invalid),
            4 => {
                let len = structures(decoder, kind)?;
                groups = Some(row_groups(decoder, len, &mut footer.encrypted)?);
            }
            5 if kind == LIST => {
                if let Some(value) = arrow_schema(decoder)? {
                    fields.head(id, LIST);
                    list_head(fields.out, 1, STRUCT);
                    let mut pair = Fields::of(fields.out);
                    for (id, text) in [(1, ARROW_SCHEMA), (2, value)] {
                        pair.head(id, BINARY);
                        push_varint(pair.out, text.len() as u64);
                        pair.out.extend_from_slice(text);
                    }
                    pair.end();
                }
            }
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    let last = fields.last;
    for Groups { count, bytes } in groups.ok_or(Problem::Invalid)? {
        let mut part = head.clone();
        let mut fields = Fields { out: &mut part, last };
        fields.head(4, LIST);
        list_head(fields.out, count, STRUCT);
        fields.out.extend_from_slice(&bytes);
        fields.end();
        footer.parts.push(part);
    }
    Ok(footer)
}

/// Copies a schema: each group says how many of the elements that follow are its children.
fn schema(decoder: &mut Decoder<'_>, len: usize, out: &mut Vec<u8>) -> Result<()> {
    // How many children the groups that have not ended still have, and how many all of them claim.
    let (mut open, mut claimed) = (Vec::new(), 0_usize);
    list_head(out, len, STRUCT);
    for _ in 0..len {
        let (mut num_children, mut is_null) = (0, false);
        let mut fields = Fields::of(out);
        decoder.structure(|decoder, id, kind| {
            match id {
                1..=3 | 5..=9 => check_kind(kind, I32)?,
                4 => check_kind(kind, BINARY)?,
                10 => check_kind(kind, STRUCT)?,
                _ => return Ok(false),
            }
            match id {
                5 => num_children = fields.copy(decoder, (id, kind), Decoder::integer)?,
                6 => match u8::try_from(decoder.integer()?) {
                    Ok(converted @ 0..=21) => {
                        fields.head(id, kind);
                        fields.out.push(converted << 1);
                    }
                    // A type of nulls, by interim versions of parquet-cpp; others mean nothing to readers.
                    converted => is_null |= matches!(converted, Ok(24 | 25)),
                },
                10 => fields.copy(decoder, (id, kind), check_logical_type)?,
                _ => fields.copy_value(decoder, id, kind)?,
            }
            Ok(true)
        })?;
        if is_null {
            fields.head(10, STRUCT);
            let mut logical = Fields::of(fields.out);
            logical.head(11, STRUCT);
            Fields::of(logical.out).end();
            logical.end();
        }
        fields.end();
        let num_children = usize::try_from(num_children).map_err(|_| Problem::Invalid)?;
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

/// Copies row groups; adds the numbers of the columns that are encrypted in one of them.
fn row_groups(
    decoder: &mut Decoder<'_>,
    len: usize,
    encrypted: &mut BTreeSet<usize>,
) -> Result<Vec<Groups>> {
    let mut parts = vec![Groups::default()];
    for _ in 0..len {
        if parts.last().is_some_and(|part| part.count == MAX_GROUPS) {
            parts.push(Groups::default());
        }
        let Some(part) = parts.last_mut() else { continue };
        part.count += 1;
        let mut fields = Fields::of(&mut part.bytes);
        let mut has_columns = false;
        decoder.structure(|decoder, id, kind| {
            match id {
                1 if has_columns => return Err(Problem::Invalid),
                1 => {
                    has_columns = true;
                    let len = structures(decoder, kind)?;
                    fields.head(id, LIST);
                    list_head(fields.out, len, STRUCT);
                    for number in 0..len {
                        if column_chunk(decoder, fields.out)? {
                            encrypted.insert(number);
                        }
                    }
                }
                2 | 3 => {
                    check_kind(kind, I64)?;
                    fields.copy_value(decoder, id, kind)?;
                }
                _ => return Ok(false),
            }
            Ok(true)
        })?;
        fields.end();
    }
    Ok(parts)
}

/// Copies where a column of a row group is stored; returns whether it is encrypted.
fn column_chunk(decoder: &mut Decoder<'_>, out: &mut Vec<u8>) -> Result<bool> {
    let mut fields = Fields::of(out);
    // It is required, and means nothing.
    fields.head(2, I64);
    fields.out.push(0);
    let (mut is_encrypted, mut has_metadata) = (false, false);
    decoder.structure(|decoder, id, kind| {
        match id {
            1 => check_kind(kind, BINARY)?,
            3 => {
                check_kind(kind, STRUCT)?;
                has_metadata = true;
                fields.head(id, kind);
                column_metadata(decoder, fields.out)?;
                return Ok(true);
            }
            4 => check_kind(kind, I64)?,
            5 => check_kind(kind, I32)?,
            8 => {
                is_encrypted = true;
                return Ok(false);
            }
            _ => return Ok(false),
        }
        fields.copy_value(decoder, id, kind)?;
        Ok(true)
    })?;
    if is_encrypted && !has_metadata {
        fields.head(3, STRUCT);
        // All of them 0, as nobody will read the column.
        let mut metadata = Fields::of(fields.out);
        for (id, kind) in [(1, I32), (2, LIST), (4, I32), (5, I64), (6, I64), (7, I64), (9, I64)] {
            metadata.head(id, kind);
            metadata.out.push(if kind == LIST { I32 } else { 0 });
        }
        metadata.end();
    }
    fields.end();
    Ok(is_encrypted)
}

fn column_metadata(decoder: &mut Decoder<'_>, out: &mut Vec<u8>) -> Result<()> {
    let mut fields = Fields::of(out);
    // The encodings are required; pages state theirs.
    fields.head(2, LIST);
    list_head(fields.out, 0, I32);
    decoder.structure(|decoder, id, kind| {
        match id {
            1 | 4 => check_kind(kind, I32)?,
            5..=7 | 9 | 11 => check_kind(kind, I64)?,
            16 if kind == STRUCT => {
                fields.head(id, kind);
                let mut sizes = Fields::of(fields.out);
                decoder.structure(|decoder, id, kind| {
                    let is_needed = (id, kind) == (1, I64);
                    if is_needed {
                        sizes.copy_value(decoder, id, kind)?;
                    }
                    Ok(is_needed)
                })?;
                sizes.end();
                return Ok(true);
            }
            _ => return Ok(false),
        }
        fields.copy_value(decoder, id, kind)?;
        Ok(true)
    })?;
    fields.end();
    Ok(())
}

/// Reads key-value pairs; returns the value of the one that is needed.
fn arrow_schema<'a>(decoder: &mut Decoder<'a>) -> Result<Option<&'a [u8]>> {
    let (len, kind) = decoder.list()?;
    let mut found = None;
    for _ in 0..len {
        if kind != STRUCT {
            decoder.skip_element(kind)?;
            continue;
        }
        let (mut key, mut value) = (None, None);
        decoder.structure(|decoder, id, kind| {
            // Some writers have numbers as values.
            match (id, kind) {
                (1, BINARY) => key = Some(decoder.binary()?),
                (2, BINARY) => value = Some(decoder.binary()?),
                _ => return Ok(false),
            }
            Ok(true)
        })?;
        if key == Some(ARROW_SCHEMA) {
            found = value.filter(|value| std::str::from_utf8(value).is_ok());
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a footer is one; what is rewritten has what is needed.
    fn check(bytes: &[u8]) -> Result<()> {
        rewritten(bytes).map(drop)
    }

    #[test]
    fn a_footer_that_claims_more_than_it_has_is_refused() {
        // A version; a schema of a group with one child, and the child; rows; no row groups.
        let footer = [0x15, 2, 0x19, 0x2c, 0x55, 2, 0, 0x15, 2, 0, 0x16, 0, 0x19, 0x0c, 0];
        assert_eq!(check(&footer), Ok(()));
        let mut with = footer;
        with[5] = 4; // two children
        assert_eq!(check(&with), Err(Problem::Invalid));
        with[5] = 3; // less than none
        assert_eq!(check(&with), Err(Problem::Invalid));
        // 2^28 row groups
        let many = [&footer[..13], &[0xfc, 0x80, 0x80, 0x80, 0x80, 1, 0]].concat();
        assert_eq!(check(&many), Err(Problem::Short));
        for len in 0..footer.len() {
            assert_eq!(check(&footer[..len]), Err(Problem::Short));
        }
    }

    /// A footer with groups that have as many children as `nums_children` says, and a leaf.
    fn footer_of_groups(nums_children: impl ExactSizeIterator<Item = usize>) -> Vec<u8> {
        let varint = |value: usize| {
            let mut bytes = Vec::new();
            push_varint(&mut bytes, value as u64);
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
        let nested = |depth| check(&footer_of_groups((0..depth).map(|_| 1)));
        assert_eq!(nested(MAX_SCHEMA_DEPTH), Ok(()));
        assert_eq!(nested(MAX_SCHEMA_DEPTH + 1), Err(Problem::Invalid));
        assert_eq!(nested(100_000), Err(Problem::Invalid));
        let all = |depth| check(&footer_of_groups((0..depth).map(|at| depth - at)));
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
            assert_eq!(check(&with), Err(Problem::Invalid));
        }
        let number = [&footer[..4], &[0x05, 0x8a, 0x80, 8], &footer[5..]].concat();
        assert_eq!(check(&number), Err(Problem::Invalid));
        // The scale of a decimal as a string, in which the crate would find fields.
        let decimal = |kind: u8| {
            let element = [0x55, 0, 0x5c, 0x5c, kind, 2, 0, 0, 0];
            check(&[&footer[..3], &[0x1c], &element, &footer[10..]].concat())
        };
        assert_eq!(decimal(0x18), Err(Problem::Invalid));
        assert_eq!(decimal(0x15), Ok(()));
    }

    #[test]
    fn what_is_not_needed_is_left_out_and_numbers_of_fields_may_go_back() {
        // A version; a schema of a group of one child, of a type of nulls and a field number; rows; a row
        // group of one column; key-value pairs of which one has a number; the name of the writer.
        let root = [0x48, 1, b's', 0x15, 2, 0];
        let leaf = [0x15, 2, 0x25, 2, 0x18, 1, b'x', 0x25, 48, 0x35, 8, 0];
        let chunk = [0x26, 8, 0x1c, 0x15, 2, 0x19, 0x15, 0, 0x36, 6, 0x0c, 32, 0, 0, 0];
        let group = [&[0x19, 0x1c][..], &chunk, &[0x16, 0, 0x16, 6, 0]].concat();
        let pairs = [0x19, 0x1c, 0x18, 1, b'k', 0x16, 2, 0];
        let footer = [
            &[0x15, 2, 0x19, 0x2c][..],
            &root,
            &leaf,
            &[0x16, 6, 0x19, 0x1c],
            &group,
            &pairs,
            &[0x18, 1, b'w', 0],
        ];
        let found = rewritten(&footer.concat()).unwrap();
        // The field number comes before the logical type, which is written last.
        let leaf = [0x15, 2, 0x25, 2, 0x18, 1, b'x', 0x55, 8, 0x1c, 0xbc, 0, 0, 0];
        // Offset and encodings are written first.
        let metadata = [0x29, 0x05, 0x05, 2, 2, 0x46, 6, 0xbc, 0, 0];
        let chunk = [&[0x26, 0, 0x1c][..], &metadata, &[0]].concat();
        let expected = [
            &[0x15, 2, 0x19, 0x2c][..],
            &root,
            &leaf,
            &[0x16, 6, 0x19, 0x1c, 0x19, 0x1c],
            &chunk,
            &[0x16, 0, 0x16, 6, 0, 0],
        ];
        assert_eq!(found.parts, [expected.concat()]);
        assert!(found.encrypted.is_empty());
    }

    #[test]
    fn row_groups_are_divided_as_the_crate_takes_them() {
        let footer = |count: usize| {
            let mut footer = vec![0x15, 2, 0x19, 0x1c, 0x48, 1, b's', 0, 0x16, 0, 0x19];
            list_head(&mut footer, count, STRUCT);
            // No columns, no bytes, no rows.
            footer.extend([0x19, 0x0c, 0x16, 0, 0x16, 0, 0].repeat(count));
            footer.push(0);
            rewritten(&footer).unwrap().parts.len()
        };
        assert_eq!([0, 1, MAX_GROUPS, MAX_GROUPS + 1].map(footer), [1, 1, 1, 2]);
    }
}
