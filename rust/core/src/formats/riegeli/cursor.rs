//! A cursor that reads bytes and varints from memory.

use super::FormatError;
use crate::varint::{NoVarint, read_varint_of};

/// Reads bytes from start to end.
#[derive(Debug, Clone, Copy)]
pub struct Cursor<'a> {
    rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    /// Starts at the first of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// The bytes not read yet.
    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// Whether everything has been read.
    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// The next `len` bytes.
    ///
    /// # Errors
    /// If fewer are left.
    #[inline]
    pub fn take(&mut self, len: u64) -> Result<&'a [u8], FormatError> {
        match usize::try_from(len).ok().and_then(|len| self.rest.split_at_checked(len)) {
            Some((taken, rest)) => {
                self.rest = rest;
                Ok(taken)
            }
            None => Err(FormatError::new(format!(
                "expected {len} more bytes, {} left",
                self.rest.len()
            ))),
        }
    }

    /// The next byte.
    ///
    /// # Errors
    /// If none is left.
    #[inline]
    pub fn byte(&mut self) -> Result<u8, FormatError> {
        let (&byte, rest) =
            self.rest.split_first().ok_or(FormatError::fixed("expected a byte, none left"))?;
        self.rest = rest;
        Ok(byte)
    }

    /// The next varint, which may have redundant bytes.
    ///
    /// # Errors
    /// If it is truncated or does not fit 64 bits.
    #[inline]
    pub fn varint64(&mut self) -> Result<u64, FormatError> {
        self.varint(64)
    }

    /// The next varint of at most 32 bits, which may have redundant bytes.
    ///
    /// # Errors
    /// If it is truncated or does not fit 32 bits.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "it has at most 32 bits")]
    pub fn varint32(&mut self) -> Result<u32, FormatError> {
        self.varint(32).map(|value| value as u32)
    }

    #[inline]
    fn varint(&mut self, bits: u32) -> Result<u64, FormatError> {
        if let Some((&byte, rest)) = self.rest.split_first()
            && byte < 0x80
        {
            self.rest = rest;
            return Ok(u64::from(byte));
        }
        let (value, len) = read_varint_of(bits, self.rest).map_err(|problem| {
            FormatError::fixed(match problem {
                NoVarint::Short => "varint is truncated",
                NoVarint::Long if bits == 32 => "varint exceeds 32 bits",
                NoVarint::Long => "varint exceeds 64 bits",
            })
        })?;
        self.rest = &self.rest[len..];
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::varint::{push_varint, varint_len};

    #[test]
    fn varints_round_trip_at_every_length() {
        for shift in 0..64 {
            for value in [1_u64 << shift, (1 << shift) - 1, u64::MAX >> shift] {
                let mut bytes = Vec::new();
                push_varint(&mut bytes, value);
                assert_eq!(bytes.len(), varint_len(value));
                let mut cursor = Cursor::new(&bytes);
                assert_eq!(cursor.varint64().unwrap(), value);
                assert!(cursor.is_empty());
                assert_eq!(Cursor::new(&bytes).varint32().ok(), u32::try_from(value).ok());
            }
        }
    }

    #[test]
    fn overlong_varints_are_read_up_to_ten_bytes() {
        let mut bytes = vec![0x81, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x00];
        assert_eq!(Cursor::new(&bytes).varint64().unwrap(), 1);
        bytes.insert(1, 0x80);
        assert!(Cursor::new(&bytes).varint64().is_err());
        assert!(Cursor::new(&[0x80; 9]).varint64().is_err(), "truncated");
        assert!(Cursor::new(&[]).varint64().is_err(), "empty");
    }
}
