//! One feature of all rows of a batch: cells, and for each cell its segment and position.

use crate::Result;
use crate::bytes::Bytes;
use crate::try_alloc::try_defaults;

/// Where a run of cells goes.
#[derive(Debug, Clone, Copy)]
pub struct Placement {
    /// The row.
    pub row: usize,
    /// The first cell in it.
    pub start: usize,
    /// How many cells.
    pub len: usize,
    /// Which sequence of the row it is, from 1.
    pub segment: i32,
}

/// Rows of equal length whose cells are `cell_bytes` bytes each.
#[derive(Debug)]
pub struct FeatureRows {
    cell_bytes: usize,
    row_cells: usize,
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

/// What rows begin at, so that whole cache lines are copied.
const ALIGNMENT: usize = 64;

impl FeatureRows {
    /// Rows with every cell `padding`, the bytes of one cell, or zero where that is `None`.
    ///
    /// With `marked`, segment ids and positions are kept, zero where no sequence is.
    ///
    /// # Errors
    ///
    /// If the rows do not fit into memory.
    ///
    /// # Panics
    ///
    /// If `padding` is not `cell_bytes` long.
    pub fn new(
        num_rows: usize,
        row_cells: usize,
        cell_bytes: usize,
        padding: Option<&[u8]>,
        marked: bool,
    ) -> Result<Self> {
        let rows = || format!("{num_rows} rows of {row_cells} cells of {cell_bytes} bytes");
        // More than the address space is more than memory, too.
        let num_cells = num_rows.saturating_mul(row_cells);
        let num_bytes = num_cells.saturating_mul(cell_bytes);
        let mut values: Vec<u8> = try_defaults(num_bytes.saturating_add(ALIGNMENT), rows)?;
        let offset = match values.as_ptr().align_offset(ALIGNMENT) {
            offset if offset < ALIGNMENT => offset,
            _ => 0,
        };
        if let Some(padding) = padding
            && padding.iter().any(|&byte| byte != 0)
        {
            for cell in values[offset..][..num_bytes].chunks_exact_mut(cell_bytes) {
                cell.copy_from_slice(padding);
            }
        }
        let marks = if marked {
            let (segment_ids, positions) =
                (try_defaults(num_cells, rows)?, try_defaults(num_cells, rows)?);
            Some(Marks { segment_ids, positions })
        } else {
            None
        };
        Ok(Self { cell_bytes, row_cells, num_rows, values, offset, marks })
    }

    /// Copies `cells`, the bytes of `to.len` cells, to their place.
    ///
    /// # Panics
    ///
    /// If they are not that many bytes or the place lies outside the row.
    pub fn write<'a>(&mut self, to: Placement, cells: impl Into<Bytes<'a>>) {
        let first = self.first_cell(to);
        let place = self.offset + first * self.cell_bytes;
        let room = &mut self.values[place..][..to.len * self.cell_bytes];
        cells.into().copy_to(&mut room.into());
        self.mark(to);
    }

    /// Overwrites one cell and leaves its segment and position.
    ///
    /// # Panics
    ///
    /// If `bytes` is not one cell or the place lies outside the row.
    pub fn overwrite(&mut self, row: usize, cell: usize, bytes: &[u8]) {
        let first = self.first_cell(Placement { row, start: cell, len: 1, segment: 0 });
        let place = self.offset + first * self.cell_bytes;
        self.values[place..][..self.cell_bytes].copy_from_slice(bytes);
    }

    /// Writes segment ids and positions alone, where the cells are kept elsewhere.
    ///
    /// # Panics
    ///
    /// If the place lies outside the row.
    pub fn mark(&mut self, to: Placement) {
        let first = self.first_cell(to);
        if let Some(marks) = &mut self.marks {
            marks.segment_ids[first..][..to.len].fill(to.segment);
            for (position, cell) in (0..).zip(&mut marks.positions[first..][..to.len]) {
                *cell = position;
            }
        }
    }

    fn first_cell(&self, to: Placement) -> usize {
        assert!(
            to.row < self.num_rows
                && to.len <= self.row_cells
                && to.start <= self.row_cells - to.len,
            "cells {}..+{} of row {} lie outside {} rows of {}",
            to.start,
            to.len,
            to.row,
            self.num_rows,
            self.row_cells
        );
        to.row * self.row_cells + to.start
    }

    /// The cells from the first row on: a vector and where in it they begin.
    pub fn take_values(&mut self) -> (Vec<u8>, usize) {
        (std::mem::take(&mut self.values), self.offset)
    }

    /// Segment ids and positions of all cells, where they are kept.
    pub fn take_marks(&mut self) -> Option<(Vec<i32>, Vec<i32>)> {
        self.marks.take().map(|marks| (marks.segment_ids, marks.positions))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_beyond_memory_are_refused() {
        // Cells of no bytes need memory for their marks alone.
        for (cells, bytes, marked) in [(1 << 35, 4, false), (1 << 60, 4, false), (1 << 35, 0, true)]
        {
            let refused = FeatureRows::new(1 << 20, cells, bytes, None, marked).unwrap_err();
            assert!(refused.to_string().ends_with("bytes do not fit into memory"), "{refused}");
        }
    }

    #[test]
    fn cells_land_in_their_row_with_segments_and_positions() {
        let mut column = FeatureRows::new(2, 4, 2, Some(&[7, 7]), true).unwrap();
        column.write(Placement { row: 1, start: 1, len: 2, segment: 3 }, &[1, 2, 3, 4][..]);
        column.overwrite(1, 2, &[5, 6]);
        let (values, offset) = column.take_values();
        assert_eq!(&values[offset..offset + 16], [7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 1, 2, 5, 6, 7, 7]);
        assert_eq!(values[offset..].as_ptr().align_offset(64), 0);
        let (segment_ids, positions) = column.take_marks().unwrap();
        assert_eq!(segment_ids, [0, 0, 0, 0, 0, 3, 3, 0]);
        assert_eq!(positions, [0, 0, 0, 0, 0, 0, 1, 0]);
    }

    #[test]
    #[should_panic(expected = "lie outside")]
    fn cells_past_the_row_are_refused() {
        let mut column = FeatureRows::new(2, 4, 1, None, false).unwrap();
        column.write(Placement { row: 0, start: 3, len: 2, segment: 1 }, &[1, 2][..]);
    }
}
