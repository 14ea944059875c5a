//! Base-128 varints, as in protocol buffers, Riegeli and Thrift.

/// The maximum length of a 64-bit varint.
pub const MAX_VARINT_LEN: usize = 10;

/// Why bytes do not begin with a varint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoVarint {
    /// They end within it.
    Short,
    /// It has too many bytes or bits.
    Long,
}

/// The varint at the start of `bytes`, which may have redundant bytes, and its length. Bits beyond 64
/// are dropped.
///
/// # Errors
/// If it is truncated or longer than [`MAX_VARINT_LEN`].
#[inline]
pub fn read_varint(bytes: &[u8]) -> Result<(u64, usize), NoVarint> {
    let mut value = 0;
    for (at, &byte) in bytes.iter().enumerate().take(MAX_VARINT_LEN) {
        value |= u64::from(byte & 0x7f) << (7 * at);
        if byte < 0x80 {
            return Ok((value, at + 1));
        }
    }
    Err(if bytes.len() < MAX_VARINT_LEN { NoVarint::Short } else { NoVarint::Long })
}

/// The same of at most `bits` bits, 64 at most.
///
/// # Errors
/// If it is truncated or does not fit.
#[inline]
pub fn read_varint_of(bits: u32, bytes: &[u8]) -> Result<(u64, usize), NoVarint> {
    let (mut value, mut shift) = (0, 0);
    for &byte in bytes {
        let bits_read = u64::from(byte & 0x7f);
        if shift + 7 > bits && bits_read >> (bits - shift) != 0 {
            return Err(NoVarint::Long);
        }
        value |= bits_read << shift;
        shift += 7;
        if byte < 0x80 {
            return Ok((value, shift as usize / 7));
        }
        if shift >= bits {
            return Err(NoVarint::Long);
        }
    }
    Err(NoVarint::Short)
}

/// How many bytes the shortest varint of `value` takes.
pub fn varint_len(value: u64) -> usize {
    (64 - (value | 1).leading_zeros()).div_ceil(7) as usize
}

/// The shortest varint of `value`, at the start of the bytes, and its length.
#[expect(clippy::cast_possible_truncation, reason = "only the low seven bits are used")]
pub fn encode_varint(mut value: u64) -> ([u8; MAX_VARINT_LEN], u8) {
    let (mut bytes, mut len) = ([0; MAX_VARINT_LEN], 0_u8);
    while value > 0x7f {
        bytes[usize::from(len)] = value as u8 | 0x80;
        value >>= 7;
        len += 1;
    }
    bytes[usize::from(len)] = value as u8;
    (bytes, len + 1)
}

/// Appends the shortest varint of `value` to `out`.
pub fn push_varint(out: &mut Vec<u8>, mut value: u64) {
    while value > 0x7f {
        out.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    out.push(value.to_le_bytes()[0]);
}
