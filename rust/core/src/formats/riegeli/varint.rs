//! Base-128 varints as in protocol buffers, and a cursor that reads them from memory.

use super::FormatError;

/// The maximum length of a 64-bit varint.
pub const MAX_VARINT_LEN: usize = 10;

/// How many bytes the shortest varint of `value` takes.
pub fn varint_len(value: u64) -> usize {
    (64 - (value | 1).leading_zeros()).div_ceil(7) as usize
}

/// Appends the shortest varint of `value` to `out`.
#[expect(clippy::cast_possible_truncation, reason = "only the low seven bits are used")]
pub fn push_varint(out: &mut Vec<u8>, mut value: u64) {
    while value > 0x7f {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

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
        match self.rest.first() {
            Some(&byte) if byte < 0x80 => {
                self.rest = &self.rest[1..];
                Ok(u64::from(byte))
            }
            _ => self.long_varint(64),
        }
    }

    /// The next varint of at most 32 bits, which may have redundant bytes.
    ///
    /// # Errors
    /// If it is truncated or does not fit 32 bits.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "`long_varint` has checked the bits")]
    pub fn varint32(&mut self) -> Result<u32, FormatError> {
        match self.rest.first() {
            Some(&byte) if byte < 0x80 => {
                self.rest = &self.rest[1..];
                Ok(u32::from(byte))
            }
            _ => self.long_varint(32).map(|value| value as u32),
        }
    }

    #[inline]
    fn long_varint(&mut self, bits: u32) -> Result<u64, FormatError> {
        let mut value = 0_u64;
        for (at, &byte) in self.rest.iter().enumerate().take(bits.div_ceil(7) as usize) {
            let shift = 7 * u32::try_from(at).unwrap_or(u32::MAX);
            let bits_read = u64::from(byte & 0x7f);
            if shift + 7 > bits && bits_read >> (bits - shift) != 0 {
                return Err(too_long(bits));
            }
            value |= bits_read << shift;
            if byte < 0x80 {
                self.rest = &self.rest[at + 1..];
                return Ok(value);
            }
        }
        if self.rest.len() < bits.div_ceil(7) as usize {
            return Err(FormatError::fixed("varint is truncated"));
        }
        Err(too_long(bits))
    }
}

fn too_long(bits: u32) -> FormatError {
    FormatError::fixed(if bits == 32 { "varint exceeds 32 bits" } else { "varint exceeds 64 bits" })
}

#[cfg(test)]
mod tests {
    use super::*;

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
