//! Samples of components to pixels: upsampling and colours with the results of libjpeg.

use std::ops::Range;

use super::frame::Colours;
use super::plane::Plane;

/// How a component gets its missing samples.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Upsampling {
    None,
    /// Weights of three quarters and one quarter for the two nearest samples, in these directions.
    Across,
    Down,
    Both,
    /// Each sample several times.
    Repeat,
}

impl Upsampling {
    fn of(plane: &Plane, is_smooth: bool) -> Self {
        match (plane.across, plane.down) {
            (1, 1) => Self::None,
            (2, 1) if is_smooth && plane.width > 2 => Self::Across,
            (1, 2) if is_smooth => Self::Down,
            (2, 2) if is_smooth && plane.width > 2 => Self::Both,
            _ => Self::Repeat,
        }
    }
}

/// Lines of samples at full resolution, one for each component.
struct Lines {
    lines: Vec<Vec<u8>>,
    sums: Vec<i16>,
}

/// Writes the pixels `x` and `y`, `channels` bytes each (1, 3 or 4), row by row.
///
/// `is_smooth` interpolates subsampled components; images decoded at an eighth are not.
#[inline(always)]
pub(super) fn render(
    planes: &[Plane],
    (colours, is_inverted): (Colours, bool),
    (x, y): (&Range<usize>, &Range<usize>),
    is_smooth: bool,
    channels: usize,
    out: &mut [u8],
) {
    let width = x.len();
    let used = if channels == 1 && matches!(colours, Colours::Gray | Colours::YCbCr) {
        1
    } else {
        planes.len()
    };
    let mut lines = Lines { lines: vec![vec![0; width]; used], sums: Vec::new() };
    for (row, out) in y.clone().zip(out.chunks_exact_mut(width * channels)) {
        for (index, plane) in planes[..used].iter().enumerate() {
            lines.fill(index, plane, Upsampling::of(plane, is_smooth), row, x);
        }
        match &lines.lines[..] {
            [gray] if channels == 1 => out.copy_from_slice(gray),
            [gray] => match channels {
                3 => spread::<3>(gray, out),
                _ => spread::<4>(gray, out),
            },
            [first, second, third] if colours == Colours::YCbCr => match channels {
                3 => from_ycc::<3>([first, second, third], out),
                _ => from_ycc::<4>([first, second, third], out),
            },
            [red, green, blue] => store([red, green, blue], channels, out),
            [cyan, magenta, yellow, black] => {
                let (mut inks, mut rgb) = (vec![0; 3 * width], vec![0; 3 * width]);
                if colours == Colours::Ycck {
                    from_ycc::<3>([cyan, magenta, yellow], &mut inks);
                    for ink in &mut inks {
                        *ink = 255 - *ink;
                    }
                } else {
                    store([cyan, magenta, yellow], 3, &mut inks);
                }
                for ((rgb, ink), &black) in
                    rgb.chunks_exact_mut(3).zip(inks.chunks_exact(3)).zip(black)
                {
                    for (value, &ink) in rgb.iter_mut().zip(ink) {
                        *value = without_ink(ink, black, is_inverted);
                    }
                }
                match channels {
                    3 => out.copy_from_slice(&rgb),
                    _ => crate::pixels::convert_row(&rgb, 3, channels, out),
                }
            }
            _ => {}
        }
    }
}

/// What an ink and black leave of white, rounded as in PIL.
fn without_ink(ink: u8, black: u8, is_inverted: bool) -> u8 {
    let flip = if is_inverted { 255 } else { 0 };
    let (ink, left) = (u32::from(ink ^ flip), 255 - u32::from(black ^ flip));
    let product = ink * left + 128;
    #[expect(clippy::cast_possible_truncation, reason = "at most `left`")]
    let value = left.saturating_sub(((product >> 8) + product) >> 8) as u8;
    value
}

/// Three components that are colours already.
fn store([a, b, c]: [&[u8]; 3], channels: usize, out: &mut [u8]) {
    let rgb = a.iter().zip(b).zip(c);
    if channels == 1 {
        for (out, ((&a, &b), &c)) in out.iter_mut().zip(rgb) {
            *out = crate::pixels::luma(a, b, c);
        }
        return;
    }
    for (out, ((&a, &b), &c)) in out.chunks_exact_mut(channels).zip(rgb) {
        out[..3].copy_from_slice(&[a, b, c]);
        out[3..].fill(255);
    }
}

/// Gray as colours; a fourth channel is opaque.
#[inline(always)]
fn spread<const N: usize>(gray: &[u8], out: &mut [u8]) {
    for (out, &value) in out.as_chunks_mut::<N>().0.iter_mut().zip(gray) {
        *out = [value; N];
        if let Some(alpha) = out.get_mut(3) {
            *alpha = 255;
        }
    }
}

/// A factor of the colour conversion, in 16-bit fixed point.
#[expect(clippy::cast_possible_truncation, reason = "a small constant")]
const fn fix(value: f64) -> i32 {
    (value * 65536.0 + 0.5) as i32
}

#[inline(always)]
#[expect(clippy::cast_sign_loss, reason = "clamped")]
fn clamp(value: i32) -> u8 {
    value.clamp(0, 255) as u8
}

/// Luminance and chrominance as colours; a fourth channel is opaque.
#[inline(always)]
fn from_ycc<const N: usize>([y, cb, cr]: [&[u8]; 3], out: &mut [u8]) {
    const HALF: i32 = 1 << 15;
    let (out, _) = out.as_chunks_mut::<N>();
    for (((out, &y), &cb), &cr) in out.iter_mut().zip(y).zip(cb).zip(cr) {
        let (y, cb, cr) = (i32::from(y), i32::from(cb) - 128, i32::from(cr) - 128);
        out[0] = clamp(y + ((fix(1.402) * cr + HALF) >> 16));
        out[1] = clamp(y + ((HALF - fix(0.344_14) * cb - fix(0.714_14) * cr) >> 16));
        out[2] = clamp(y + ((fix(1.772) * cb + HALF) >> 16));
        if N == 4 {
            out[3] = 255;
        }
    }
}

impl Lines {
    /// Computes the samples of `plane` for the pixels `x` of row `y`.
    #[inline(always)]
    fn fill(&mut self, index: usize, plane: &Plane, how: Upsampling, y: usize, x: &Range<usize>) {
        let line = &mut self.lines[index][..];
        let row = y / plane.down;
        match how {
            Upsampling::None => line.copy_from_slice(plane.row(row, x.clone())),
            Upsampling::Repeat => {
                let first = x.start / plane.across;
                let samples = plane.row(row, first..(x.end - 1) / plane.across + 1);
                for (value, x) in line.iter_mut().zip(x.clone()) {
                    *value = samples[x / plane.across - first];
                }
            }
            Upsampling::Down => {
                let (near, far) = neighbours(plane, y, x.clone());
                let bias = if y.is_multiple_of(2) { 1 } else { 2 };
                for ((value, &near), &far) in line.iter_mut().zip(near).zip(far) {
                    *value = quarters(near, far, bias);
                }
            }
            Upsampling::Across | Upsampling::Both => {
                let columns = x.start / 2..(x.end - 1) / 2 + 1;
                // With one more on each side; the image's outermost samples are repeated.
                let wide = columns.start.saturating_sub(1)..(columns.end + 1).min(plane.width);
                let sums = &mut self.sums;
                sums.clear();
                sums.resize(columns.len() + 2, 0);
                let skipped = usize::from(columns.start == 0);
                let inner = &mut sums[skipped..skipped + wide.len()];
                if how == Upsampling::Both {
                    let (near, far) = neighbours(plane, y, wide);
                    for ((sum, &near), &far) in inner.iter_mut().zip(near).zip(far) {
                        *sum = 3 * i16::from(near) + i16::from(far);
                    }
                } else {
                    for (sum, &value) in inner.iter_mut().zip(plane.row(row, wide)) {
                        *sum = i16::from(value);
                    }
                }
                let len = sums.len();
                if columns.start == 0 {
                    sums[0] = sums[1];
                }
                if columns.end == plane.width {
                    sums[len - 1] = sums[len - 2];
                }
                let offset = x.start % 2;
                match how {
                    Upsampling::Both => interpolate::<4, 8, 7>(sums, offset, line),
                    _ => interpolate::<2, 1, 2>(sums, offset, line),
                }
            }
        }
    }
}

/// Three quarters of one sample and one quarter of another.
#[inline(always)]
fn quarters(near: u8, far: u8, bias: u16) -> u8 {
    let sum = 3 * u16::from(near) + u16::from(far) + bias;
    #[expect(clippy::cast_possible_truncation, reason = "an average of bytes")]
    let value = (sum >> 2) as u8;
    value
}

/// The row of samples that row `y` of pixels falls into, and the next nearest.
#[inline(always)]
fn neighbours(plane: &Plane, y: usize, columns: Range<usize>) -> (&[u8], &[u8]) {
    let row = y / 2;
    let other =
        if y.is_multiple_of(2) { row.saturating_sub(1) } else { (row + 1).min(plane.height - 1) };
    (plane.row(row, columns.clone()), plane.row(other, columns))
}

/// Two values for each of `sums` except for the first and last: three quarters of it and a quarter
/// of its neighbour, divided by `1 << SHIFT` after `LEFT` or `RIGHT` was added.
#[inline(always)]
fn interpolate<const SHIFT: i16, const LEFT: i16, const RIGHT: i16>(
    sums: &[i16],
    offset: usize,
    line: &mut [u8],
) {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "an average of bytes"
    )]
    let pair = |left: i16, middle: i16, right: i16| {
        [((3 * middle + left + LEFT) >> SHIFT) as u8, ((3 * middle + right + RIGHT) >> SHIFT) as u8]
    };
    let (mut sums, mut line) = (sums, line);
    if offset == 1 {
        line[0] = pair(sums[0], sums[1], sums[2])[1];
        (sums, line) = (&sums[1..], &mut line[1..]);
    }
    let (pairs, rest) = line.as_chunks_mut::<2>();
    let neighbours = sums.iter().zip(&sums[1..]).zip(&sums[2..]);
    for (out, ((&left, &middle), &right)) in pairs.iter_mut().zip(neighbours) {
        *out = pair(left, middle, right);
    }
    if let [last] = rest {
        let at = pairs.len();
        *last = pair(sums[at], sums[at + 1], sums[at + 2])[0];
    }
}
