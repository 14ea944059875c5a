//! The orientation that cameras note in EXIF, or programs in XMP, and turning pixels upright.

use std::ops::Range;

use grainmill_core::Result;
use grainmill_core::try_alloc::try_with_capacity;

use crate::pixels::Pixels;

/// The number of the tag.
const ORIENTATION: u16 = 0x112;

/// What EXIF and XMP data say, each if there are any; that in EXIF counts, as for PIL.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Orientation {
    exif: Option<u16>,
    xmp: Option<u16>,
}

impl Orientation {
    pub(crate) fn add_exif(&mut self, exif: &[u8]) {
        self.exif = find(exif);
    }

    pub(crate) fn add_xmp(&mut self, xmp: &[u8]) {
        self.xmp = find_in_xmp(xmp);
    }

    /// The orientation, from 1 to 8; 1 if there is none, or an invalid one.
    pub(crate) fn value(self) -> u8 {
        let value = self.exif.or(self.xmp).and_then(|value| u8::try_from(value).ok());
        value.filter(|value| (1..=8).contains(value)).unwrap_or(1)
    }
}

/// The value of `tiff:Orientation`, which is an attribute or an element.
fn find_in_xmp(xmp: &[u8]) -> Option<u16> {
    const NAME: &[u8] = b"tiff:Orientation";
    memchr::memmem::find_iter(xmp, NAME).find_map(|at| match &xmp[at + NAME.len()..] {
        [b'>', digit @ b'0'..=b'9', ..] | [b'=', b'"' | b'\'', digit @ b'0'..=b'9', ..] => {
            Some(u16::from(digit - b'0'))
        }
        _ => None,
    })
}

fn find(exif: &[u8]) -> Option<u16> {
    let is_little = match exif.get(..4)? {
        b"II*\0" => true,
        b"MM\0*" => false,
        _ => return None,
    };
    let short = |at: usize| {
        let bytes: [u8; 2] = exif.get(at..at.checked_add(2)?)?.try_into().ok()?;
        Some(if is_little { u16::from_le_bytes(bytes) } else { u16::from_be_bytes(bytes) })
    };
    let long = |at: usize| {
        let (a, b) = (u32::from(short(at)?), u32::from(short(at + 2)?));
        Some(if is_little { b << 16 | a } else { a << 16 | b })
    };
    let directory = usize::try_from(long(4)?).ok()?;
    let count = usize::from(short(directory)?);
    let entries = (0..count).map(|i| directory + 2 + 12 * i);
    for at in entries.take_while(|&at| at + 12 <= exif.len()) {
        if short(at) == Some(ORIENTATION) {
            // A single 16-bit number stands in the entry itself.
            return if short(at + 2) == Some(3) { short(at + 8) } else { Some(0) };
        }
    }
    None
}

/// Whether an upright image has the stored one's height as its width.
pub(crate) fn swaps_sides(orientation: u8) -> bool {
    orientation >= 5
}

/// Whether the stored columns and rows run backwards.
fn flips(orientation: u8) -> (bool, bool) {
    (matches!(orientation, 2 | 3 | 7 | 8), matches!(orientation, 3 | 4 | 6 | 7))
}

/// The stored columns and rows of a region `x`, `y` of the upright image; `width` and `height` are
/// those stored.
pub(crate) fn stored_region(
    orientation: u8,
    (width, height): (usize, usize),
    (x, y): (Range<usize>, Range<usize>),
) -> (Range<usize>, Range<usize>) {
    let (x, y) = if swaps_sides(orientation) { (y, x) } else { (x, y) };
    let flip = |range: Range<usize>, len: usize| len - range.end..len - range.start;
    let (flip_x, flip_y) = flips(orientation);
    (if flip_x { flip(x, width) } else { x }, if flip_y { flip(y, height) } else { y })
}

/// The pixels turned upright.
pub(crate) fn upright(pixels: Pixels, orientation: u8) -> Result<Pixels> {
    if orientation == 1 {
        return Ok(pixels);
    }
    let Pixels { width, height, channels, bytes } = pixels;
    let (flip_x, flip_y) = flips(orientation);
    let (new_width, new_height) =
        if swaps_sides(orientation) { (height, width) } else { (width, height) };
    let mut turned = try_with_capacity(bytes.len(), || "the pixels of an image".into())?;
    for y in 0..new_height {
        for x in 0..new_width {
            let (x, y) = if swaps_sides(orientation) { (y, x) } else { (x, y) };
            let x = if flip_x { width - 1 - x } else { x };
            let y = if flip_y { height - 1 - y } else { y };
            let at = (y * width + x) * channels;
            turned.extend_from_slice(&bytes[at..at + channels]);
        }
    }
    Ok(Pixels { width: new_width, height: new_height, channels, bytes: turned })
}
