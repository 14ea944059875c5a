//! The samples of one component, in the blocks that a region needs.

use std::ops::Range;

use grainmill_core::try_alloc::try_with_capacity;

use super::frame::{Component, Frame};
use super::idct;

/// The samples of one component around a region.
pub(super) struct Plane {
    /// The block columns and rows it covers.
    pub(super) columns: Range<usize>,
    pub(super) rows: Range<usize>,
    /// How many samples wide and high a decoded block is: 8, 4, 2 or 1.
    size: usize,
    /// How many pixels a sample covers.
    pub(super) across: usize,
    pub(super) down: usize,
    /// The component's size in samples.
    pub(super) width: usize,
    pub(super) height: usize,
    samples: Vec<u8>,
    stride: usize,
}

impl Plane {
    /// The plane for the pixels `x` and `y` of an image whose blocks are decoded `size` wide.
    pub(super) fn new(
        frame: &Frame,
        component: &Component,
        size: usize,
        x: &Range<usize>,
        y: &Range<usize>,
    ) -> grainmill_core::Result<Self> {
        // Subsampled components are decoded larger, rather than enlarged afterwards.
        let mut own_size = size;
        while own_size < 8
            && (frame.max_h * size).is_multiple_of(component.h * own_size * 2)
            && (frame.max_v * size).is_multiple_of(component.v * own_size * 2)
        {
            own_size *= 2;
        }
        let across = frame.max_h * size / (component.h * own_size);
        let down = frame.max_v * size / (component.v * own_size);
        let width = (frame.width * component.h * own_size).div_ceil(frame.max_h * 8);
        let height = (frame.height * component.v * own_size).div_ceil(frame.max_v * 8);
        // Interpolation reads a neighbour on each side.
        let covering = |pixels: &Range<usize>, factor: usize, len: usize| {
            let start = (pixels.start / factor).saturating_sub(1);
            let end = (pixels.end.div_ceil(factor) + 1).min(len);
            start / own_size..end.div_ceil(own_size)
        };
        let (columns, rows) = (covering(x, across, width), covering(y, down, height));
        let stride = columns.len() * own_size;
        let byte_len = stride * rows.len() * own_size;
        let mut samples = try_with_capacity(byte_len, || "the samples of an image".into())?;
        samples.resize(byte_len, 128);
        Ok(Self { columns, rows, size: own_size, across, down, width, height, samples, stride })
    }

    /// Whether the plane covers a block.
    #[inline(always)]
    pub(super) fn contains(&self, x: usize, y: usize) -> bool {
        self.columns.contains(&x) && self.rows.contains(&y)
    }

    /// Stores the samples of a block whose last coefficient, in the order of a scan, is `last`.
    #[inline(always)]
    pub(super) fn put(&mut self, x: usize, y: usize, block: &idct::Block, last: usize) {
        let at = ((y - self.rows.start) * self.stride + x - self.columns.start) * self.size;
        let stride = self.stride;
        let out = &mut self.samples[at..at + (self.size - 1) * stride + self.size];
        match self.size {
            _ if last == 0 => idct::flat(block[0], self.size, out, stride),
            8 => idct::full(block, out, stride),
            4 => idct::half_size(block, out, stride),
            2 => idct::quarter_size(block, out, stride),
            _ => idct::flat(block[0], 1, out, stride),
        }
    }

    /// The samples `columns` of a row; both lie in the component and in the region.
    #[inline(always)]
    pub(super) fn row(&self, row: usize, columns: Range<usize>) -> &[u8] {
        let start = (row - self.rows.start * self.size) * self.stride;
        let first = self.columns.start * self.size;
        &self.samples[start..start + self.stride][columns.start - first..columns.end - first]
    }
}
