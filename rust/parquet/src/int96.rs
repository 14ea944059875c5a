//! Times of the type INT96, of which a unit in 64 bits may hold only some: the crate wraps the others.

use std::sync::atomic::{AtomicBool, Ordering};

use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef};
use arrow_schema::{DataType, TimeUnit};

use crate::dense::{list_row, list_values, value_bytes};
use crate::thrift::{PLAIN, PageHeader, PageKind, is_of_dictionary};

/// A day and the nanoseconds in it.
const VALUE_LEN: usize = 12;
/// The days, from the beginning of the Julian calendar, that nanoseconds of any unit can hold.
const NEAR_DAYS: std::ops::Range<i32> = 2_440_588 - 106_750..2_440_588 + 106_750;
const NANOS_OF_DAY: u64 = 86_400_000_000_000;

/// Sets `may_be_far` if a decompressed page with these `values`, if it is known where they are, may have a
/// time that some unit cannot hold.
pub(crate) fn look_for_far(header: &PageHeader, values: Option<&[u8]>, may_be_far: &AtomicBool) {
    let is_near = |value: &[u8; VALUE_LEN]| {
        let ([nanos @ .., _, _, _, _], [.., a, b, c, d]) = (value, value);
        let nanos = nanos.first_chunk().map_or(u64::MAX, |nanos| u64::from_le_bytes(*nanos));
        NEAR_DAYS.contains(&i32::from_le_bytes([*a, *b, *c, *d])) && nanos < NANOS_OF_DAY
    };
    let values = match (header.kind, header.encoding()) {
        (PageKind::Dictionary, _) | (_, Ok(PLAIN)) => values,
        (_, Ok(encoding)) if is_of_dictionary(encoding) => Some(&[][..]),
        _ => None,
    };
    if values.is_none_or(|values| !values.as_chunks().0.iter().all(is_near)) {
        may_be_far.store(true, Ordering::Relaxed);
    }
}

/// The first row in which a time differs from what it is `in_seconds`, and the unit that cannot hold it.
pub(crate) fn first_wrapped(array: &ArrayRef, in_seconds: &ArrayRef) -> Option<(usize, TimeUnit)> {
    (0..array.len()).find_map(|row| Some((row, wrapped(array, in_seconds, row)?)))
}

fn wrapped(array: &ArrayRef, in_seconds: &ArrayRef, row: usize) -> Option<TimeUnit> {
    if array.is_null(row) {
        return None;
    }
    if let Some((start, len)) = list_row(array, row) {
        let (values, in_seconds) = (list_values(array)?, list_values(in_seconds)?);
        return (start..start + len).find_map(|at| wrapped(&values, &in_seconds, at));
    }
    match (array.data_type(), in_seconds.data_type()) {
        (DataType::Struct(_), DataType::Struct(_)) => {
            let (fields, others) = (array.as_struct().columns(), in_seconds.as_struct().columns());
            fields.iter().zip(others).find_map(|(field, other)| wrapped(field, other, row))
        }
        (DataType::Map(..), DataType::Map(..)) => {
            let (entries, others) = (array.as_map(), in_seconds.as_map());
            let at = |row: usize| usize::try_from(entries.value_offsets()[row]).unwrap_or(0);
            (at(row)..at(row + 1)).find_map(|at| {
                wrapped(entries.keys(), others.keys(), at)
                    .or_else(|| wrapped(entries.values(), others.values(), at))
            })
        }
        (&DataType::Timestamp(unit, _), DataType::Timestamp(TimeUnit::Second, _)) => {
            let per_second = match unit {
                TimeUnit::Second => return None,
                TimeUnit::Millisecond => 1_000,
                TimeUnit::Microsecond => 1_000_000,
                TimeUnit::Nanosecond => 1_000_000_000_i64,
            };
            let value = |array: &ArrayRef| {
                Some(i64::from_ne_bytes(*value_bytes(array)?.as_chunks().0.get(row)?))
            };
            let seconds = value(array)?.div_euclid(per_second);
            // Parts of a second may be rounded.
            (seconds.abs_diff(value(in_seconds)?) > 1).then_some(unit)
        }
        _ => None,
    }
}
