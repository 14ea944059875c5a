//! Encoded numbers to the bytes of an array's row.

use super::integer::Integer;
#[cfg(target_arch = "x86_64")]
use super::varint_shuffle;
use super::wire::Malformed;
use crate::varint::read_varint;

/// The type of the numbers of an array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names of dtypes")]
pub enum Number {
    Bool,
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    F32,
    F64,
}

impl Number {
    /// Bytes of a number.
    pub fn byte_len(self) -> usize {
        match self {
            Self::Bool | Self::I8 | Self::U8 => 1,
            Self::I16 | Self::U16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }

    /// Whether it is an integer or a truth value.
    pub fn is_integer(self) -> bool {
        !matches!(self, Self::F32 | Self::F64)
    }
}

/// A value that does not fit the type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overflow(pub i64);

/// How many varints `run` holds.
///
/// # Errors
///
/// If it ends within one.
pub fn num_varints(run: &[u8]) -> Result<usize, Malformed> {
    match run.last() {
        Some(last) if *last >= 0x80 => Err(Malformed::Cut),
        // Sums of bytes are added up sixteen at a time.
        _ => Ok(run.chunks(255).map(|part| usize::from(num_ends(part))).sum()),
    }
}

fn num_ends(part: &[u8]) -> u8 {
    part.iter().map(|&byte| u8::from(byte < 0x80)).sum()
}

/// Writes the varints of `run` to the start of `out`; returns how many bytes they take.
///
/// # Errors
///
/// The first value that does not fit `number`; or `None` if a varint has more than ten bytes.
///
/// # Panics
///
/// If `number` is no integer, or `out` has no room for them.
pub fn put_varints(number: Number, run: &[u8], out: &mut [u8]) -> Result<usize, Option<Overflow>> {
    match number {
        Number::Bool => put_all::<bool>(run, out),
        Number::I8 => put_all::<i8>(run, out),
        Number::I16 => put_all::<i16>(run, out),
        Number::I32 => put_all::<i32>(run, out),
        Number::I64 => put_all::<i64>(run, out),
        Number::U8 => put_all::<u8>(run, out),
        Number::U16 => put_all::<u16>(run, out),
        Number::U32 => put_all::<u32>(run, out),
        Number::U64 => put_all::<u64>(run, out),
        Number::F32 | Number::F64 => panic!("varints are integers"),
    }
}

/// Where a varint ends is known only once the one before it was looked at, so a single row of them
/// is bound by latency. Four rows, cut from long runs, are decoded side by side.
const LANES: usize = 4;
/// Shorter runs are not worth cutting.
const MIN_CUT_LEN: usize = 128;
/// Varints with a greater mean length are decoded in rows: shuffles are for up to four bytes.
const MAX_SHUFFLED_LEN: usize = 3;

fn put_all<T: Integer>(run: &[u8], out: &mut [u8]) -> Result<usize, Option<Overflow>> {
    let mut fits = true;
    let num_values = num_varints(run).map_err(|_| None)?;
    let byte_len = num_values * T::LEN;
    let out = &mut out[..byte_len];
    if run.len() == num_values {
        for (&byte, slot) in run.iter().zip(out.chunks_exact_mut(T::LEN)) {
            fits &= T::put(i64::from(byte), slot);
        }
    } else {
        let (run, out) = if run.len() <= MAX_SHUFFLED_LEN * num_values {
            put_by_shuffles::<T>(run, &mut fits, out)?
        } else {
            (run, out)
        };
        if run.len() < MIN_CUT_LEN {
            put_row::<T>(run, &mut fits, out)?;
        } else {
            put_lanes::<T>(run, &mut fits, out)?;
        }
    }
    // What shuffles leave in lanes without a varint may have cleared it, too.
    match if fits { None } else { first_overflow::<T>(run) } {
        Some(overflow) => Err(Some(overflow)),
        None => Ok(byte_len),
    }
}

/// Decodes some varints from the start of `run` to the start of `out`, where the processor can shuffle
/// bytes; returns what is left of both.
fn put_by_shuffles<'r, 'o, T: Integer>(
    run: &'r [u8],
    fits: &mut bool,
    out: &'o mut [u8],
) -> Result<(&'r [u8], &'o mut [u8]), Option<Overflow>> {
    #[cfg(target_arch = "x86_64")]
    let (taken, written) = varint_shuffle::decode::<T>(run, out, fits).ok_or(None)?;
    #[cfg(not(target_arch = "x86_64"))]
    let (taken, written, _) = (0, 0, fits);
    Ok((&run[taken..], &mut out[written..]))
}

/// Decodes the varints of `run` in rows, side by side.
fn put_lanes<T: Integer>(
    run: &[u8],
    fits: &mut bool,
    out: &mut [u8],
) -> Result<(), Option<Overflow>> {
    let starts = cut(run);
    let mut rest = out;
    let mut rows: [&mut [u8]; LANES] = Default::default();
    for (lane, row) in rows.iter_mut().enumerate() {
        let end = starts.get(lane + 1).copied().unwrap_or(run.len());
        let num_values = num_varints(&run[starts[lane]..end]).map_err(|_| None)?;
        (*row, rest) = rest.split_at_mut(num_values * T::LEN);
    }
    put_rows::<T>(run, starts, rows, fits)
}

/// Decodes the varints from each of `starts` on to each of `rows`, as many as these hold.
fn put_rows<T: Integer>(
    run: &[u8],
    mut starts: [usize; LANES],
    rows: [&mut [u8]; LANES],
    fits: &mut bool,
) -> Result<(), Option<Overflow>> {
    let common = rows.iter().map(|row| row.len()).min().unwrap_or(0);
    let [a, b, c, d] = rows.map(|row| row.split_at_mut(common));
    let slots = a.0.chunks_exact_mut(T::LEN).zip(b.0.chunks_exact_mut(T::LEN));
    let slots = slots.zip(c.0.chunks_exact_mut(T::LEN)).zip(d.0.chunks_exact_mut(T::LEN));
    for (((a, b), c), d) in slots {
        for (at, slot) in starts.iter_mut().zip([a, b, c, d]) {
            let (value, len) = next_varint(&run[*at..])?;
            *at += len;
            *fits &= T::put(value.cast_signed(), slot);
        }
    }
    for (at, row) in starts.into_iter().zip([a.1, b.1, c.1, d.1]) {
        put_row::<T>(&run[at..], fits, row)?;
    }
    Ok(())
}

/// Decodes the varints at the start of `run`, as many as `row` holds.
fn put_row<T: Integer>(
    mut run: &[u8],
    fits: &mut bool,
    row: &mut [u8],
) -> Result<(), Option<Overflow>> {
    for slot in row.chunks_exact_mut(T::LEN) {
        let (value, len) = next_varint(run)?;
        run = &run[len..];
        *fits &= T::put(value.cast_signed(), slot);
    }
    Ok(())
}

/// `read_varint`, quicker where eight bytes are left and hold it.
#[inline(always)]
#[expect(clippy::inline_always, reason = "it is the body of a loop over millions of numbers")]
fn next_varint(bytes: &[u8]) -> Result<(u64, usize), Option<Overflow>> {
    if let Some(word) = bytes.first_chunk()
        && let Some(found) = short_varint(u64::from_le_bytes(*word))
    {
        return Ok(found);
    }
    read_varint(bytes).map_err(|_| None)
}

/// The varint at the start of a word, and its length, if it ends there.
#[inline(always)]
#[expect(clippy::inline_always, reason = "as above")]
fn short_varint(word: u64) -> Option<(u64, usize)> {
    let ends = !word & 0x8080_8080_8080_8080;
    if ends == 0 {
        return None;
    }
    // The bits up to the first end, seven of each byte, moved together in pairs.
    let bits = word & (ends ^ (ends - 1)) & 0x7f7f_7f7f_7f7f_7f7f;
    let bits = (bits & 0x007f_007f_007f_007f) | ((bits & 0x7f00_7f00_7f00_7f00) >> 1);
    let bits = (bits & 0x0000_3fff_0000_3fff) | ((bits & 0x3fff_0000_3fff_0000) >> 2);
    let bits = (bits & 0x0fff_ffff) | ((bits & 0x0fff_ffff_0000_0000) >> 4);
    Some((bits, ends.trailing_zeros() as usize / 8 + 1))
}

/// Where pieces of `run` of about the same length start, each of whole varints.
fn cut(run: &[u8]) -> [usize; LANES] {
    let mut starts = [0; LANES];
    for lane in 1..LANES {
        let about = (run.len() * lane / LANES).max(starts[lane - 1]);
        let end = run[about..].iter().position(|&byte| byte < 0x80);
        starts[lane] = end.map_or(run.len(), |end| about + end + 1);
    }
    starts
}

fn first_overflow<T: Integer>(mut run: &[u8]) -> Option<Overflow> {
    let mut slot = [0; 8];
    while let Ok((value, len)) = read_varint(run) {
        if !T::put(value.cast_signed(), &mut slot[..T::LEN]) {
            return Some(Overflow(value.cast_signed()));
        }
        run = &run[len..];
    }
    None
}

/// Writes the little-endian floats of `run` to the start of `out`; returns how many bytes they take.
///
/// # Panics
///
/// If `number` is an integer, or `out` has no room for them.
pub fn put_floats(number: Number, run: &[u8], out: &mut [u8]) -> usize {
    let floats = run.as_chunks::<4>().0;
    let out = &mut out[..floats.len() * number.byte_len()];
    match number {
        Number::F32 => {
            for (slot, bytes) in out.as_chunks_mut().0.iter_mut().zip(floats) {
                *slot = f32::from_le_bytes(*bytes).to_ne_bytes();
            }
        }
        Number::F64 => {
            for (slot, bytes) in out.as_chunks_mut().0.iter_mut().zip(floats) {
                *slot = f64::from(f32::from_le_bytes(*bytes)).to_ne_bytes();
            }
        }
        _ => panic!("floats are no integers"),
    }
    out.len()
}

/// Appends `value` to `out` as `number`; returns whether it fits.
///
/// # Panics
///
/// If `number` is no integer.
pub fn put_integer(number: Number, value: i128, out: &mut Vec<u8>) -> bool {
    macro_rules! put {
        ($of:ty) => {
            <$of>::try_from(value).map(|value| out.extend_from_slice(&value.to_ne_bytes())).is_ok()
        };
    }
    match number {
        Number::Bool => u8::try_from(value).is_ok_and(|value| {
            out.push(value);
            value <= 1
        }),
        Number::I8 => put!(i8),
        Number::I16 => put!(i16),
        Number::I32 => put!(i32),
        Number::I64 => put!(i64),
        Number::U8 => put!(u8),
        Number::U16 => put!(u16),
        Number::U32 => put!(u32),
        Number::U64 => put!(u64),
        Number::F32 | Number::F64 => panic!("floats are no integers"),
    }
}

/// Appends `value` to `out` as `number`, rounded to it.
///
/// # Panics
///
/// If `number` is an integer.
pub fn put_float(number: Number, value: f64, out: &mut Vec<u8>) {
    match number {
        #[expect(clippy::cast_possible_truncation, reason = "it rounds")]
        Number::F32 => out.extend_from_slice(&(value as f32).to_ne_bytes()),
        Number::F64 => out.extend_from_slice(&value.to_ne_bytes()),
        _ => panic!("floats are no integers"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::varint::push_varint;

    fn encoded(values: &[i64]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for &value in values {
            push_varint(&mut bytes, value.cast_unsigned());
        }
        bytes
    }

    fn number_of_any_length() -> impl Strategy<Value = i64> {
        (any::<i64>(), 0..64_u32).prop_map(|(value, shift)| value >> shift)
    }

    fn small_number_of_any_length() -> impl Strategy<Value = i64> {
        (0..1_i64 << 28, 0..28_u32).prop_map(|(value, shift)| value >> shift)
    }

    proptest! {
        #[test]
        fn varints_are_decoded_as_one_by_one(
            values in prop::collection::vec(number_of_any_length(), 0..400),
            small in prop::collection::vec(0..300_i64, 0..400),
            up_to_four_bytes in prop::collection::vec(small_number_of_any_length(), 0..400),
            few_long in prop::collection::vec(
                prop_oneof![9 => 0..300_i64, 1 => number_of_any_length()], 0..400
            ),
        ) {
            for values in [values, small, up_to_four_bytes, few_long] {
                let run = encoded(&values);
                prop_assert_eq!(num_varints(&run), Ok(values.len()));
                let mut out = vec![0xaa; 8 * values.len()];
                prop_assert_eq!(put_varints(Number::I64, &run, &mut out), Ok(8 * values.len()));
                let expected: Vec<u8> = values.iter().flat_map(|v| v.to_ne_bytes()).collect();
                prop_assert_eq!(out, expected);
                let mut out = vec![0xaa; 2 * values.len()];
                let wrong = values.iter().find(|&&v| u16::try_from(v).is_err());
                let narrow = put_varints(Number::U16, &run, &mut out);
                prop_assert_eq!(narrow.err(), wrong.map(|&v| Some(Overflow(v))));
                if wrong.is_none() {
                    let narrow = values.iter().map(|&v| u16::try_from(v).unwrap_or_default());
                    let expected: Vec<u8> = narrow.flat_map(u16::to_ne_bytes).collect();
                    prop_assert_eq!(out, expected);
                }
            }
        }
    }

    #[test]
    fn varints_of_more_than_ten_bytes_are_refused() {
        for (before, after) in [(0, 0), (300, 0), (40, 200), (300, 300)] {
            let run = [&vec![5; before][..], &[0xff; 10], &[1], &vec![5; after]].concat();
            let mut out = vec![0; 8 * num_varints(&run).expect("it ends with one")];
            assert_eq!(put_varints(Number::I64, &run, &mut out), Err(None));
        }
        let run = [&[0xff; 9][..], &[0x7f]].concat();
        let mut out = [0; 8];
        assert_eq!(put_varints(Number::I64, &run, &mut out), Ok(8));
        assert_eq!(i64::from_ne_bytes(out), -1);
    }
}
