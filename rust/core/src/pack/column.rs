//! One feature of all rows of a batch: its values, segment ids and positions.

use crate::Result;
use crate::bytes::Bytes;
use crate::try_alloc::try_defaults;

/// The destination of a slice of values.
#[derive(Debug, Clone, Copy)]
pub struct Placement {
    /// The row.
    pub row: usize,
    /// The offset in the row.
    pub start: usize,
    /// The number of values.
    pub len: usize,
    /// The segment id: the number of the sequence in the row, from 1.
    pub segment: i32,
}

/// Rows of equal length, of values of `value_bytes` bytes each.
#[derive(Debug)]
pub struct FeatureRows {
    value_bytes: usize,
    row_len: usize,
    num_rows: usize,
    values: Vec<u8>,
    offset: usize,
    marks: Option<Marks>,
}

#[derive(Debug)]
struct Marks {
    segment_ids: Vec<i32>,
    positions: Vec<i32>,
}

/// The alignment of the first row, so that whole cache lines are copied.
const ALIGNMENT: usize = 64;

impl FeatureRows {
    /// Rows filled with `padding`, the bytes of one value, or zeros if `None`.
    ///
    /// With `marked`, segment ids and positions are stored too, 0 in padding.
    ///
    /// # Errors
    ///
    /// If the rows do not fit into memory.
    ///
    /// # Panics
    ///
    /// If `padding` is not `value_bytes` long.
    pub fn new(
        num_rows: usize,
        row_len: usize,
        value_bytes: usize,
        padding: Option<&[u8]>,
        marked: bool,
    ) -> Result<Self> {
        let rows = || format!("{num_rows} rows of {row_len} values of {value_bytes} bytes");
        // A size that saturates does not fit into memory either.
        let num_values = num_rows.saturating_mul(row_len);
        let num_bytes = num_values.saturating_mul(value_bytes);
        let mut values: Vec<u8> = try_defaults(num_bytes.saturating_add(ALIGNMENT), rows)?;
        let offset = match values.as_ptr().align_offset(ALIGNMENT) {
            offset if offset < ALIGNMENT => offset,
            _ => 0,
        };
        if let Some(padding) = padding
            && padding.iter().any(|&byte| byte != 0)
        {
            for value in values[offset..][..num_bytes].chunks_exact_mut(value_bytes) {
                value.copy_from_slice(padding);
            }
        }
        let marks = if marked {
            let (segment_ids, positions) =
                (try_defaults(num_values, rows)?, try_defaults(num_values, rows)?);
            Some(Marks { segment_ids, positions })
        } else {
            None
        };
        Ok(Self { value_bytes, row_len, num_rows, values, offset, marks })
    }

    /// Copies `bytes`, those of `to.len` values, to `to`.
    ///
    /// # Panics
    ///
    /// If `bytes` has another length or `to` lies outside the rows.
    pub fn write<'a>(&mut self, to: Placement, bytes: impl Into<Bytes<'a>>) {
        let first = self.flat_index(to);
        let start = self.offset + first * self.value_bytes;
        let destination = &mut self.values[start..][..to.len * self.value_bytes];
        bytes.into().copy_to(&mut destination.into());
        self.mark(to);
    }

    /// Overwrites one value, but not its segment id and position.
    ///
    /// # Panics
    ///
    /// If `bytes` is not one value or it lies outside the rows.
    pub fn overwrite(&mut self, row: usize, column: usize, bytes: &[u8]) {
        let first = self.flat_index(Placement { row, start: column, len: 1, segment: 0 });
        let start = self.offset + first * self.value_bytes;
        self.values[start..][..self.value_bytes].copy_from_slice(bytes);
    }

    /// Writes segment ids and positions only, for values that are stored elsewhere.
    ///
    /// # Panics
    ///
    /// If `to` lies outside the rows.
    pub fn mark(&mut self, to: Placement) {
        let first = self.flat_index(to);
        if let Some(marks) = &mut self.marks {
            marks.segment_ids[first..][..to.len].fill(to.segment);
            for (position, slot) in (0..).zip(&mut marks.positions[first..][..to.len]) {
                *slot = position;
            }
        }
    }

    fn flat_index(&self, to: Placement) -> usize {
        assert!(
            to.row < self.num_rows && to.len <= self.row_len && to.start <= self.row_len - to.len,
            "values {}..+{} of row {} lie outside {} rows of {}",
            to.start,
            to.len,
            to.row,
            self.num_rows,
            self.row_len
        );
        to.row * self.row_len + to.start
    }

    /// The number of rows and their length.
    pub fn shape(&self) -> (usize, usize) {
        (self.num_rows, self.row_len)
    }

    /// The values of all rows: a vector, and the offset in it at which they start.
    pub fn take_values(&mut self) -> (Vec<u8>, usize) {
        (std::mem::take(&mut self.values), self.offset)
    }

    /// The bytes of all rows' values.
    pub fn values(&self) -> &[u8] {
        &self.values[self.offset..][..self.num_rows * self.row_len * self.value_bytes]
    }

    /// Replaces the values of all rows by `bytes`, of values of `value_bytes` bytes.
    ///
    /// # Errors
    ///
    /// If they do not fit into memory.
    ///
    /// # Panics
    ///
    /// If they are not as many values.
    pub fn replace_values(&mut self, value_bytes: usize, bytes: &[u8]) -> Result<()> {
        assert_eq!(bytes.len(), self.num_rows * self.row_len * value_bytes, "other values");
        let mut wider = Self::new(self.num_rows, self.row_len, value_bytes, None, false)?;
        wider.values[wider.offset..][..bytes.len()].copy_from_slice(bytes);
        *self = Self { marks: self.marks.take(), ..wider };
        Ok(())
    }

    /// Segment ids and positions of all rows, if they are stored.
    pub fn take_marks(&mut self) -> Option<(Vec<i32>, Vec<i32>)> {
        self.marks.take().map(|marks| (marks.segment_ids, marks.positions))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_beyond_memory_are_refused() {
        // Values of no bytes need memory for segment ids and positions only.
        for (row_len, bytes, marked) in
            [(1 << 35, 4, false), (1 << 60, 4, false), (1 << 35, 0, true)]
        {
            let refused = FeatureRows::new(1 << 20, row_len, bytes, None, marked).unwrap_err();
            assert!(refused.to_string().ends_with("bytes do not fit into memory"), "{refused}");
        }
    }

    #[test]
    fn values_are_written_to_their_row_with_segments_and_positions() {
        let mut column = FeatureRows::new(2, 4, 2, Some(&[7, 7]), true).unwrap();
        column.write(Placement { row: 1, start: 1, len: 2, segment: 3 }, &[1, 2, 3, 4][..]);
        column.overwrite(1, 2, &[5, 6]);
        let (values, offset) = column.take_values();
        assert_eq!(&values[offset..offset + 16], [7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 1, 2, 5, 6, 7, 7]);
        assert_eq!(values[offset..].as_ptr().align_offset(64), 0);
        let mut wider = FeatureRows::new(1, 2, 1, None, true).unwrap();
        wider.write(Placement { row: 0, start: 1, len: 1, segment: 1 }, &[9][..]);
        wider.replace_values(2, &[8, 0, 9, 0]).unwrap();
        wider.write(Placement { row: 0, start: 0, len: 1, segment: 2 }, &[1, 1][..]);
        let (values, offset) = wider.take_values();
        assert_eq!(values[offset..offset + 4], [1, 1, 9, 0]);
        assert_eq!(wider.take_marks().unwrap().0, [2, 1]);
        let (segment_ids, positions) = column.take_marks().unwrap();
        assert_eq!(segment_ids, [0, 0, 0, 0, 0, 3, 3, 0]);
        assert_eq!(positions, [0, 0, 0, 0, 0, 0, 1, 0]);
    }

    #[test]
    #[should_panic(expected = "lie outside")]
    fn values_past_the_end_of_a_row_are_refused() {
        let mut column = FeatureRows::new(2, 4, 1, None, false).unwrap();
        column.write(Placement { row: 0, start: 3, len: 2, segment: 1 }, &[1, 2][..]);
    }
}
