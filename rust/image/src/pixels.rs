//! Pixels in memory, and conversions between numbers of channels with the results of PIL.

use std::ops::Range;

use grainmill_core::Result;
use grainmill_core::try_alloc::{try_defaults, try_with_capacity};

/// An image of 8-bit values: row by row, the channels of a pixel side by side.
///
/// One channel is gray, two are gray and alpha, three are red, green and blue, four have alpha too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pixels {
    /// Pixels in a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
    /// Values in a pixel, from 1 to 4.
    pub channels: usize,
    /// All values.
    pub bytes: Vec<u8>,
}

impl Pixels {
    /// The same pixels with `channels` channels: alpha is dropped, or opaque where there was none.
    pub(crate) fn converted(self, channels: usize) -> Result<Self> {
        if channels == self.channels {
            return Ok(self);
        }
        let byte_len = self.width * self.height * channels;
        let mut bytes = try_defaults(byte_len, || "the pixels of an image".into())?;
        convert_row(&self.bytes, self.channels, channels, &mut bytes);
        Ok(Self { channels, bytes, ..self })
    }

    /// The pixels in columns `x` and rows `y`.
    pub(crate) fn cropped(self, x: &Range<usize>, y: &Range<usize>) -> Result<Self> {
        if x.len() == self.width && y.len() == self.height {
            return Ok(self);
        }
        let byte_len = x.len() * y.len() * self.channels;
        let mut bytes = try_with_capacity(byte_len, || "the pixels of an image".into())?;
        let rows = self.bytes.chunks_exact(self.width * self.channels);
        for row in rows.skip(y.start).take(y.len()) {
            bytes.extend_from_slice(&row[x.start * self.channels..x.end * self.channels]);
        }
        Ok(Self { width: x.len(), height: y.len(), bytes, ..self })
    }

    /// Whether a channel is alpha and some pixel is not opaque.
    pub(crate) fn is_transparent(&self) -> bool {
        let alphas = self.bytes.chunks_exact(self.channels).map(|pixel| pixel[pixel.len() - 1]);
        self.channels.is_multiple_of(2) && alphas.into_iter().any(|alpha| alpha < 255)
    }
}

/// The brightness of a colour (ITU-R 601), rounded as in PIL.
#[inline(always)]
pub(crate) fn luma(red: u8, green: u8, blue: u8) -> u8 {
    let sum = 19595 * u32::from(red) + 38470 * u32::from(green) + 7471 * u32::from(blue) + 0x8000;
    #[expect(clippy::cast_possible_truncation, reason = "the factors add up to one")]
    let value = (sum >> 16) as u8;
    value
}

/// Converts pixels of `from` channels to pixels of `to` channels.
pub(crate) fn convert_row(pixels: &[u8], from: usize, to: usize, out: &mut [u8]) {
    for (pixel, out) in pixels.chunks_exact(from).zip(out.chunks_exact_mut(to)) {
        let (gray, rgb, alpha) = match *pixel {
            [gray] => (gray, [gray; 3], 255),
            [gray, alpha] => (gray, [gray; 3], alpha),
            [red, green, blue] => (luma(red, green, blue), [red, green, blue], 255),
            [red, green, blue, alpha] => (luma(red, green, blue), [red, green, blue], alpha),
            _ => continue,
        };
        match out {
            [one] => *one = gray,
            [one, two] => (*one, *two) = (gray, alpha),
            [colours @ .., last] if to == 4 => {
                colours.copy_from_slice(&rgb);
                *last = alpha;
            }
            colours => colours.copy_from_slice(&rgb),
        }
    }
}
