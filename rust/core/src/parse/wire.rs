//! The fields of a protocol buffer message.

use crate::varint::{NoVarint, read_varint};

/// Groups may be nested this deep, as in the usual parsers.
const MAX_DEPTH: usize = 100;

/// Why bytes are no message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The bytes end within a field.
    #[error("it ends within a field")]
    Cut,
    /// A varint has more than ten bytes.
    #[error("a varint has more than 10 bytes")]
    LongVarint,
    /// A field has a number or wire type that does not exist.
    #[error("a field has the tag {0}, which does not exist")]
    Tag(u64),
    /// A group ends that was not started, or under another number.
    #[error("a group ends that has not begun")]
    Group,
    /// Groups are nested too deep.
    #[error("groups are nested more than {MAX_DEPTH} deep")]
    Depth,
    /// The bytes of packed numbers are no whole number of them.
    #[error("packed numbers of 4 bytes have a length of {0} bytes")]
    Packed(usize),
}

impl From<NoVarint> for Malformed {
    fn from(problem: NoVarint) -> Self {
        match problem {
            NoVarint::Short => Self::Cut,
            NoVarint::Long => Self::LongVarint,
        }
    }
}

/// The content of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content<'a> {
    /// A varint, as it is encoded.
    Varint(&'a [u8]),
    /// Bytes with a length: a message, a string, packed numbers.
    Bytes(&'a [u8]),
    /// Four bytes.
    Fixed32(&'a [u8]),
    /// Eight bytes, or a group: nothing that is read here.
    Other,
}

/// The fields of a message, in order.
#[derive(Debug, Clone)]
pub struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    /// The fields of `message`.
    pub fn of(message: &'a [u8]) -> Self {
        Self { rest: message }
    }

    /// The number and content of the next field; `None` at the end.
    ///
    /// # Errors
    ///
    /// If the rest is no sequence of fields.
    #[inline]
    pub fn next_field(&mut self) -> Result<Option<(u64, Content<'a>)>, Malformed> {
        if self.rest.is_empty() {
            return Ok(None);
        }
        let (number, wire_type, tag) = self.tag()?;
        let content = match wire_type {
            0 => Content::Varint(self.varint()?.1),
            1 => {
                self.take(8)?;
                Content::Other
            }
            2 => Content::Bytes(self.delimited()?),
            3 => {
                self.skip_group(number)?;
                Content::Other
            }
            4 => return Err(Malformed::Group),
            5 => Content::Fixed32(self.take(4)?),
            _ => return Err(Malformed::Tag(tag)),
        };
        Ok(Some((number, content)))
    }

    fn tag(&mut self) -> Result<(u64, u64, u64), Malformed> {
        let (tag, _) = self.varint()?;
        let number = tag >> 3;
        if number == 0 || tag > u64::from(u32::MAX) {
            return Err(Malformed::Tag(tag));
        }
        Ok((number, tag & 7, tag))
    }

    #[inline]
    fn varint(&mut self) -> Result<(u64, &'a [u8]), Malformed> {
        let (value, len) = read_varint(self.rest)?;
        let (encoded, rest) = self.rest.split_at(len);
        self.rest = rest;
        Ok((value, encoded))
    }

    fn delimited(&mut self) -> Result<&'a [u8], Malformed> {
        let (len, _) = self.varint()?;
        self.take(usize::try_from(len).map_err(|_| Malformed::Cut)?)
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.rest.split_at_checked(len).ok_or(Malformed::Cut)?;
        self.rest = rest;
        Ok(taken)
    }

    /// Skips the fields up to the end of the group `number`, which has begun.
    fn skip_group(&mut self, number: u64) -> Result<(), Malformed> {
        let mut open = vec![number];
        while let Some(&innermost) = open.last() {
            if self.rest.is_empty() {
                return Err(Malformed::Cut);
            }
            let (number, wire_type, tag) = self.tag()?;
            match wire_type {
                0 => drop(self.varint()?),
                1 => drop(self.take(8)?),
                2 => drop(self.delimited()?),
                3 if open.len() >= MAX_DEPTH => return Err(Malformed::Depth),
                3 => open.push(number),
                4 if number == innermost => drop(open.pop()),
                4 => return Err(Malformed::Group),
                5 => drop(self.take(4)?),
                _ => return Err(Malformed::Tag(tag)),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(message: &[u8]) -> Result<Vec<u64>, Malformed> {
        let mut fields = Fields::of(message);
        let mut numbers = Vec::new();
        while let Some((number, _)) = fields.next_field()? {
            numbers.push(number);
        }
        Ok(numbers)
    }

    #[test]
    fn fields_of_all_wire_types_are_passed() {
        let message = [
            &[0x08, 0x96, 0x01][..],            // 1: a varint
            &[0x11, 1, 2, 3, 4, 5, 6, 7, 8],    // 2: eight bytes
            &[0x1a, 2, 9, 9],                   // 3: two bytes
            &[0x23, 0x2b, 0x08, 1, 0x2c, 0x24], // 4: a group in a group
            &[0x2d, 1, 2, 3, 4],                // 5: four bytes
        ]
        .concat();
        assert_eq!(numbers(&message), Ok(vec![1, 2, 3, 4, 5]));
    }

    #[test]
    fn malformed_fields_are_refused() {
        assert_eq!(numbers(&[0x0a, 3, 1]), Err(Malformed::Cut));
        assert_eq!(numbers(&[0x08]), Err(Malformed::Cut));
        assert_eq!(numbers(&[0x08, 0x80]), Err(Malformed::Cut));
        assert_eq!(numbers(&[0x02, 0]), Err(Malformed::Tag(2)));
        assert_eq!(numbers(&[0x0e]), Err(Malformed::Tag(0x0e)));
        assert_eq!(numbers(&[0x0c]), Err(Malformed::Group));
        assert_eq!(numbers(&[0x0b, 0x14]), Err(Malformed::Group));
        assert_eq!(numbers(&[0x0b]), Err(Malformed::Cut));
        assert_eq!(numbers(&[0x0b; 101]), Err(Malformed::Depth));
        assert_eq!(numbers(&[&[0x08][..], &[0xff; 10]].concat()), Err(Malformed::LongVarint));
        // A length near 2^64.
        let long = [&[0x0a][..], &[0xff; 9], &[1]].concat();
        assert_eq!(numbers(&long), Err(Malformed::Cut));
    }
}
