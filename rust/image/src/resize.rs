//! Resizing with the results of PIL, byte by byte: each output value is a weighted sum of inputs.
//!
//! When an image is made smaller, filters widen with the ratio, so every input pixel counts. Rows
//! and columns one after the other, with 22 bits of fraction, and values rounded to 8 bits after each.

use grainmill_core::Result;
use grainmill_core::try_alloc::try_defaults;

use crate::pixels::Pixels;
use crate::simd::for_processor;

/// How output pixels are computed from input pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// The mean of the inputs that a pixel covers.
    Box,
    /// Weights that fall linearly with the distance.
    Bilinear,
    /// Cubic convolution with parameter -0.5.
    Bicubic,
    /// A sinc function, windowed to three of its periods.
    Lanczos,
}

impl Filter {
    /// How many output pixels' distances have weights, on each side.
    fn support(self) -> f64 {
        match self {
            Self::Box => 0.5,
            Self::Bilinear => 1.0,
            Self::Bicubic => 2.0,
            Self::Lanczos => 3.0,
        }
    }

    fn weight(self, x: f64) -> f64 {
        let sinc = |x: f64| {
            let x = x * std::f64::consts::PI;
            if x == 0.0 { 1.0 } else { x.sin() / x }
        };
        let far = x.abs();
        match self {
            Self::Box => f64::from(u8::from(x > -0.5 && x <= 0.5)),
            Self::Bilinear => (1.0 - far).max(0.0),
            Self::Bicubic if far < 1.0 => (1.5 * far - 2.5) * far * far + 1.0,
            Self::Bicubic if far < 2.0 => (((far - 5.0) * far + 8.0) * far - 4.0) * -0.5,
            Self::Lanczos if (-3.0..3.0).contains(&x) => sinc(x) * sinc(x / 3.0),
            Self::Bicubic | Self::Lanczos => 0.0,
        }
    }
}

const FRACTION_BITS: u32 = 22;

/// The weights of each output along one side.
struct Weights {
    /// The first input of each output, and how many there are.
    spans: Vec<(usize, usize)>,
    /// `stride` weights for each output.
    values: Vec<i32>,
    stride: usize,
}

impl Weights {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss,
        reason = "positions in an image, clamped to it"
    )]
    fn new(from: usize, to: usize, filter: Filter) -> Result<Self> {
        let ratio = from as f64 / to as f64;
        let widening = ratio.max(1.0);
        let support = filter.support() * widening;
        let stride = support.ceil() as usize * 2 + 1;
        let what = || "the weights of a resized image".to_owned();
        let mut values = try_defaults(stride.saturating_mul(to), what)?;
        let mut spans = try_defaults(to, what)?;
        let mut exact = vec![0.0; stride];
        for (index, (span, values)) in
            spans.iter_mut().zip(values.chunks_exact_mut(stride)).enumerate()
        {
            let centre = (index as f64 + 0.5) * ratio;
            let first = (centre - support + 0.5).max(0.0) as usize;
            let end = ((centre + support + 0.5) as usize).min(from);
            *span = (first, end - first);
            let exact = &mut exact[..end - first];
            for (i, weight) in exact.iter_mut().enumerate() {
                *weight = filter.weight(((i + first) as f64 - centre + 0.5) * (1.0 / widening));
            }
            let sum: f64 = exact.iter().sum();
            for (value, weight) in values.iter_mut().zip(exact) {
                let weight = if sum == 0.0 { *weight } else { *weight / sum };
                let scaled = weight * f64::from(1 << FRACTION_BITS);
                *value = (scaled + if weight < 0.0 { -0.5 } else { 0.5 }) as i32;
            }
        }
        Ok(Self { spans, values, stride })
    }

    /// For each output the first input, and the weights from there on.
    #[inline(always)]
    fn iter(&self) -> impl Iterator<Item = (usize, &[i32])> {
        self.spans
            .iter()
            .zip(self.values.chunks_exact(self.stride))
            .map(|(&(first, len), values)| (first, &values[..len]))
    }
}

/// A sum of weighted values as a byte.
#[inline(always)]
#[expect(clippy::cast_sign_loss, reason = "clamped")]
fn rounded(sum: i32) -> u8 {
    (sum >> FRACTION_BITS).clamp(0, 255) as u8
}

const HALF: i32 = 1 << (FRACTION_BITS - 1);

/// The image in another size.
///
/// # Errors
///
/// If it does not fit into memory.
pub(crate) fn resized(
    pixels: Pixels,
    (height, width): (usize, usize),
    filter: Filter,
) -> Result<Pixels> {
    if (height, width) == (pixels.height, pixels.width) {
        return Ok(pixels);
    }
    let is_transparent = pixels.is_transparent();
    let mut pixels = pixels;
    if is_transparent {
        premultiply(&mut pixels);
    }
    // The order matters for rounding. PIL 13 starts with columns where they lose more than twice as
    // many pixels as rows do.
    let lost = |from: usize, to: usize| from.cast_signed() - to.cast_signed();
    let (lost_down, lost_across) = (lost(pixels.height, height), lost(pixels.width, width));
    if lost_down > 0 && lost_down > 2 * lost_across {
        pixels = resized_across(resized_down(pixels, height, filter)?, width, filter)?;
    } else {
        pixels = resized_down(resized_across(pixels, width, filter)?, height, filter)?;
    }
    if is_transparent {
        unmultiply(&mut pixels);
    }
    Ok(pixels)
}

const WHAT: &str = "the pixels of a resized image";

fn resized_across(pixels: Pixels, width: usize, filter: Filter) -> Result<Pixels> {
    if width == pixels.width {
        return Ok(pixels);
    }
    let weights = Weights::new(pixels.width, width, filter)?;
    let mut bytes = try_defaults(width * pixels.height * pixels.channels, || WHAT.into())?;
    across(&pixels, &weights, &mut bytes);
    Ok(Pixels { width, bytes, ..pixels })
}

fn resized_down(pixels: Pixels, height: usize, filter: Filter) -> Result<Pixels> {
    if height == pixels.height {
        return Ok(pixels);
    }
    let weights = Weights::new(pixels.height, height, filter)?;
    let mut bytes = try_defaults(pixels.width * height * pixels.channels, || WHAT.into())?;
    down(&pixels, &weights, &mut bytes);
    Ok(Pixels { height, bytes, ..pixels })
}

for_processor! {
    fn across(pixels: &Pixels, weights: &Weights, out: &mut [u8]) -> () = across_any;
    fn down(pixels: &Pixels, weights: &Weights, out: &mut [u8]) -> () = down_rows;
}

#[inline(always)]
fn across_any(pixels: &Pixels, weights: &Weights, out: &mut [u8]) {
    match pixels.channels {
        1 => across_rows::<1>(pixels, weights, out),
        2 => across_rows::<2>(pixels, weights, out),
        3 => across_rows::<3>(pixels, weights, out),
        _ => across_rows::<4>(pixels, weights, out),
    }
}

#[inline(always)]
fn across_rows<const N: usize>(pixels: &Pixels, weights: &Weights, out: &mut [u8]) {
    let rows = pixels.bytes.chunks_exact(pixels.width * N);
    for (row, out) in rows.zip(out.chunks_exact_mut(weights.spans.len() * N)) {
        let (row, (out, _)) = (row.as_chunks::<N>().0, out.as_chunks_mut::<N>());
        for (out, (first, weights)) in out.iter_mut().zip(weights.iter()) {
            let mut sums = [HALF; N];
            for (pixel, &weight) in row[first..first + weights.len()].iter().zip(weights) {
                for (sum, &value) in sums.iter_mut().zip(pixel) {
                    *sum += i32::from(value) * weight;
                }
            }
            *out = sums.map(rounded);
        }
    }
}

#[inline(always)]
fn down_rows(pixels: &Pixels, weights: &Weights, out: &mut [u8]) {
    let stride = pixels.width * pixels.channels;
    let mut sums = vec![0; stride];
    for (out, (first, weights)) in out.chunks_exact_mut(stride).zip(weights.iter()) {
        sums.fill(HALF);
        let rows = pixels.bytes[first * stride..].chunks_exact(stride);
        for (row, &weight) in rows.zip(weights) {
            for (sum, &value) in sums.iter_mut().zip(row) {
                *sum += i32::from(value) * weight;
            }
        }
        for (out, &sum) in out.iter_mut().zip(&sums) {
            *out = rounded(sum);
        }
    }
}

/// Multiplies colours by alpha, so that those of transparent pixels do not count.
#[expect(clippy::cast_possible_truncation, reason = "a product of fractions")]
fn premultiply(pixels: &mut Pixels) {
    for pixel in pixels.bytes.chunks_exact_mut(pixels.channels) {
        if let [colours @ .., alpha] = pixel {
            for colour in colours {
                let product = u32::from(*colour) * u32::from(*alpha) + 128;
                *colour = (((product >> 8) + product) >> 8) as u8;
            }
        }
    }
}

/// Divides colours by alpha.
fn unmultiply(pixels: &mut Pixels) {
    for pixel in pixels.bytes.chunks_exact_mut(pixels.channels) {
        if let [colours @ .., alpha @ 1..=254] = pixel {
            for colour in colours {
                *colour = (255 * u32::from(*colour) / u32::from(*alpha)).min(255) as u8;
            }
        }
    }
}
