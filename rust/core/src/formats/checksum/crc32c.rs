//! CRC-32C (Castagnoli), as it is and masked: stored CRCs are masked so that the CRC of bytes which
//! contain their own CRC says something.

/// The CRC-32C of `bytes`.
pub fn crc32c(bytes: &[u8]) -> u32 {
    ::crc32c::crc32c(bytes)
}

/// The masked CRC-32C of `bytes`.
#[inline]
pub fn masked(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One bit at a time, as the definition says.
    fn slow(bytes: &[u8]) -> u32 {
        let mut crc = u32::MAX;
        for &byte in bytes {
            crc ^= u32::from(byte);
            for _ in 0..8 {
                crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
            }
        }
        !crc
    }

    #[test]
    fn crcs_match_the_slow_definition_and_the_known_value() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        let bytes: Vec<u8> =
            (0..20_000_u32).map(|at| at.wrapping_mul(at).to_le_bytes()[1]).collect();
        for len in (0..600).chain([4096, 8191, 8192, 19_999]) {
            let expected = slow(&bytes[..len]);
            assert_eq!(crc32c(&bytes[..len]), expected, "of {len} bytes");
        }
    }
}
