//! Columns whose rows are numbers, or lists of equally many, as rows of bytes.

use arrow_array::cast::AsArray;
use arrow_array::types::ArrowPrimitiveType;
use arrow_array::{Array, ArrayRef, OffsetSizeTrait, downcast_primitive};
use arrow_schema::DataType;
use grainmill_core::bytes::{Bytes, Destination};

use crate::parts::Parts;

/// The rows of a column, all of one shape and without nulls.
#[derive(Debug)]
pub struct Dense<'a> {
    parts: &'a Parts,
    /// The values of each array, or of its lists.
    values: Vec<ArrayRef>,
    /// The type of a value.
    pub data_type: DataType,
    /// The shape of a row.
    pub row_shape: Vec<usize>,
    value_len: usize,
}

impl Parts {
    /// The rows as bytes, if they are numbers or lists of equally many numbers, none of them null.
    pub fn dense(&self) -> Option<Dense<'_>> {
        let first = self.arrays.first()?;
        let mut row_shape = Vec::new();
        let mut values = Vec::with_capacity(self.arrays.len());
        if is_list(first.data_type()) {
            let &(array, row) = self.places.first()?;
            let (_, len) = list_row(&self.arrays[array], row)?;
            row_shape.push(len);
            for &(array, row) in &self.places {
                if list_row(&self.arrays[array], row)?.1 != len {
                    return None;
                }
            }
            for array in &self.arrays {
                values.push(list_values(array)?);
            }
        } else {
            values.clone_from(&self.arrays);
        }
        if values.iter().any(|values| values.null_count() > 0) {
            return None;
        }
        let data_type = values.first()?.data_type().clone();
        let value_len = match &data_type {
            DataType::Boolean => 1,
            other => other.primitive_width().filter(|_| is_number(other))?,
        };
        Some(Dense { parts: self, values, data_type, row_shape, value_len })
    }
}

impl Dense<'_> {
    /// Copies all rows to `out`, which has their size.
    pub fn copy_to(&self, mut out: Destination<'_>) {
        let len: usize = self.row_shape.iter().product();
        if self.data_type == DataType::Boolean {
            let mut bytes = Vec::with_capacity(out.len());
            for (array, start) in self.rows() {
                let values = self.values[array].as_boolean().values();
                bytes.extend((start..start + len).map(|at| u8::from(values.value(at))));
            }
            return Bytes::from(&bytes[..]).copy_to(&mut out);
        }
        let values: Vec<&[u8]> = self.values.iter().filter_map(value_bytes).collect();
        let row_len = len * self.value_len;
        for (array, start) in self.rows() {
            let start = start * self.value_len;
            let row = &values[array][start..start + row_len];
            Bytes::from(row).copy_to(&mut out.take_front(row_len));
        }
    }

    /// The array of each row, and where its values start in it.
    fn rows(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let start = |&(array, row): &(usize, usize)| {
            let start = match self.row_shape[..] {
                [] => row,
                _ => list_row(&self.parts.arrays[array], row).map_or(0, |(start, _)| start),
            };
            (array, start)
        };
        self.parts.places.iter().map(start)
    }

    /// The size of all rows in bytes.
    pub fn byte_len(&self) -> usize {
        self.parts.places.len() * self.row_shape.iter().product::<usize>() * self.value_len
    }
}

/// Whether NumPy has values of this type in the same form.
fn is_number(data_type: &DataType) -> bool {
    use DataType::{Duration, Timestamp};
    data_type.is_integer()
        || data_type.is_floating()
        || matches!(data_type, Duration(_) | Timestamp(..))
}

fn is_list(data_type: &DataType) -> bool {
    matches!(data_type, DataType::List(_) | DataType::LargeList(_) | DataType::FixedSizeList(..))
}

/// The first value of the list at `row`, and the number of its values; None if it is null.
pub fn list_row(array: &ArrayRef, row: usize) -> Option<(usize, usize)> {
    fn of<O: OffsetSizeTrait>(array: &ArrayRef, row: usize) -> Option<(usize, usize)> {
        let offsets = array.as_list_opt::<O>()?.value_offsets();
        let start = offsets.get(row)?.as_usize();
        Some((start, offsets.get(row + 1)?.as_usize() - start))
    }
    if array.is_null(row) {
        return None;
    }
    match array.data_type() {
        DataType::List(_) => of::<i32>(array, row),
        DataType::LargeList(_) => of::<i64>(array, row),
        DataType::FixedSizeList(..) => {
            let list = array.as_fixed_size_list();
            let len = usize::try_from(list.value_length()).ok()?;
            Some((row * len, len))
        }
        _ => None,
    }
}

/// The values of all lists.
pub fn list_values(array: &ArrayRef) -> Option<ArrayRef> {
    match array.data_type() {
        DataType::List(_) => Some(ArrayRef::clone(array.as_list::<i32>().values())),
        DataType::LargeList(_) => Some(ArrayRef::clone(array.as_list::<i64>().values())),
        DataType::FixedSizeList(..) => Some(ArrayRef::clone(array.as_fixed_size_list().values())),
        _ => None,
    }
}

/// The bytes of the values of an array of numbers.
pub fn value_bytes(array: &ArrayRef) -> Option<&[u8]> {
    fn of<T: ArrowPrimitiveType>(array: &ArrayRef) -> Option<&[u8]> {
        Some(array.as_primitive_opt::<T>()?.values().inner().as_slice())
    }
    macro_rules! primitive {
        ($type:ty) => {
            of::<$type>(array)
        };
    }
    downcast_primitive! {
        array.data_type() => (primitive),
        _ => None,
    }
}
