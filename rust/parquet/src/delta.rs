//! What pages of the delta encodings of strings take once decoded. They say so themselves, and the crate
//! believes them: a few bytes may claim any number of values, each with all of the one before.

use crate::thrift::{Decoder, Problem, Result};

/// The lengths of values, then their bytes.
const DELTA_LENGTH_BYTE_ARRAY: u32 = 6;
/// How much values have of the ones before, then the rest of each, encoded as above.
pub(crate) const DELTA_BYTE_ARRAY: u32 = 7;

/// The bytes, at most, of the values that `page` has in this encoding; 0 if it is another one.
///
/// # Errors
/// If they are more than `max_count`, or are damaged.
pub(crate) fn decoded_len(encoding: u32, page: &[u8], max_count: u64) -> Result<u64> {
    let mut decoder = Decoder::new(page);
    let prefixes = match encoding {
        DELTA_BYTE_ARRAY => packed_sum(&mut decoder, max_count)?,
        DELTA_LENGTH_BYTE_ARRAY => 0,
        _ => return Ok(0),
    };
    packed_sum(&mut decoder, max_count)?;
    Ok(prefixes.saturating_add(page.len() as u64))
}

/// The sum of at most `max_count` numbers, none of them negative, each stored as the difference from the
/// one before: in blocks of a least difference and some equally long rows of bits beyond it.
fn packed_sum(decoder: &mut Decoder<'_>, max_count: u64) -> Result<u64> {
    let (block_len, num_rows) = (decoder.varint()?, decoder.varint()?);
    let row_len = block_len.checked_div(num_rows).ok_or(Problem::Invalid)?;
    let count = decoder.varint()?;
    let mut value = decoder.integer()?;
    if count > max_count || !row_len.is_multiple_of(32) || row_len == 0 {
        return Err(Problem::Invalid);
    }
    let mut sum = 0_u64;
    let mut add = |value: i64| match u64::try_from(value) {
        Ok(value) => {
            sum = sum.saturating_add(value);
            Ok(())
        }
        Err(_) => Err(Problem::Invalid),
    };
    let mut num_left = count;
    if num_left > 0 {
        add(value)?;
        num_left -= 1;
    }
    while num_left > 0 {
        let least = decoder.integer()?;
        for &width in decoder.bytes(num_rows)? {
            let len = num_left.min(row_len);
            if len == 0 {
                break;
            }
            if width > 64 {
                return Err(Problem::Invalid);
            }
            let row = decoder.bytes(u64::from(width).saturating_mul(row_len / 8))?;
            for number in 0..len {
                let beyond = bits(row, number * u64::from(width), u32::from(width));
                value = value.wrapping_add(least).wrapping_add(beyond.cast_signed());
                add(value)?;
            }
            num_left -= len;
        }
    }
    Ok(sum)
}

/// The number of `width` bits, at most 64, that begins at bit `at`.
fn bits(row: &[u8], at: u64, width: u32) -> u64 {
    let (first, shift) = (usize::try_from(at / 8).unwrap_or(usize::MAX), at % 8);
    let bytes = row.get(first..).unwrap_or_default().iter().take(9).zip((0..).step_by(8));
    let number = bytes.fold(0_u128, |number, (&byte, at)| number | u128::from(byte) << at) >> shift;
    let mask = (1_u128 << width) - 1;
    u64::try_from(number & mask).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use grainmill_core::varint::push_varint;

    use super::*;

    /// `values` in blocks of `4 * row_len`, each row as wide as it has to be.
    fn packed(values: &[i64], row_len: usize) -> Vec<u8> {
        let mut out = Vec::new();
        let zigzag = |value: i64| ((value << 1) ^ (value >> 63)).cast_unsigned();
        push_varint(&mut out, 4 * row_len as u64);
        push_varint(&mut out, 4);
        push_varint(&mut out, values.len() as u64);
        push_varint(&mut out, zigzag(values.first().copied().unwrap_or(0)));
        let deltas: Vec<i64> = values.windows(2).map(|pair| pair[1] - pair[0]).collect();
        for block in deltas.chunks(4 * row_len) {
            let least = *block.iter().min().unwrap();
            push_varint(&mut out, zigzag(least));
            let rows: Vec<Vec<u64>> = block
                .chunks(row_len)
                .map(|row| row.iter().map(|delta| (delta - least).cast_unsigned()).collect())
                .collect();
            let width = |row: &Vec<u64>| 64 - row.iter().max().unwrap().leading_zeros();
            let widths = rows.iter().map(|row| width(row).to_le_bytes()[0]);
            out.extend(widths.chain([0; 4]).take(4));
            for row in &rows {
                let width = width(row) as usize;
                let mut bytes = vec![0_u8; width * row_len / 8];
                for (number, value) in row.iter().enumerate() {
                    for bit in (0..width).filter(|bit| value >> bit & 1 == 1) {
                        let at = number * width + bit;
                        bytes[at / 8] |= 1 << (at % 8);
                    }
                }
                out.extend(bytes);
            }
        }
        out
    }

    #[test]
    fn numbers_are_summed_and_what_is_cut_is_damaged() {
        let mut state = 1_u64;
        for case in 0..300 {
            let mut next = |below: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 33) % below
            };
            let (count, most) = (next(400), [1, 2, 9, 1000, 1 << 30][case % 5]);
            let values: Vec<i64> = (0..count).map(|_| next(most).cast_signed()).collect();
            let bytes = packed(&values, if case % 2 == 0 { 32 } else { 64 });
            let sum = values.iter().sum::<i64>().cast_unsigned();
            assert_eq!(packed_sum(&mut Decoder::new(&bytes), count), Ok(sum));
            for len in 0..bytes.len() {
                assert!(packed_sum(&mut Decoder::new(&bytes[..len]), count).is_err());
            }
            if count > 0 {
                let too_many = packed_sum(&mut Decoder::new(&bytes), count - 1);
                assert_eq!(too_many, Err(Problem::Invalid));
            }
        }
    }

    #[test]
    fn values_may_be_many_more_bytes_than_their_page() {
        let lens = |prefix: i64| [[0].as_slice(), &[prefix; 999]].concat();
        let suffixes = [[1000].as_slice(), &[0; 999]].concat();
        let page =
            |prefix| [packed(&lens(prefix), 32), packed(&suffixes, 32), vec![7; 1000]].concat();
        let len = |prefix| decoded_len(DELTA_BYTE_ARRAY, &page(prefix), 1000);
        let page_len = page(0).len() as u64;
        assert_eq!(len(0), Ok(page_len));
        assert!(matches!(len(1000), Ok(1_000_000..1_001_500)));
        let lens = [packed(&[3; 5], 32), vec![7; 15]].concat();
        assert_eq!(decoded_len(DELTA_LENGTH_BYTE_ARRAY, &lens, 5), Ok(lens.len() as u64));
        assert_eq!(decoded_len(DELTA_LENGTH_BYTE_ARRAY, &lens, 4), Err(Problem::Invalid));
        assert_eq!(decoded_len(0, &lens, 4), Ok(0));
        assert_eq!(
            decoded_len(DELTA_LENGTH_BYTE_ARRAY, &packed(&[3, -1], 32), 5),
            Err(Problem::Invalid)
        );
    }
}
