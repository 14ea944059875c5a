//! WebP, lossy and lossless, with the pixels of libwebp; of an animation, the first image.

use std::io::Cursor;
use std::ops::Range;

use grainmill_core::Result;
use grainmill_core::try_alloc::try_defaults;
use image_webp::{DecodingError, WebPDecoder};

use crate::common::{Header, Options, corrupt};
use crate::orientation::Orientation;
use crate::pixels::Pixels;

/// Before the length of what follows, and with the mark of the format behind it.
const HEAD_LEN: usize = 8;
const MARK_LEN: usize = 12;

/// Whether `file` starts like a WebP file.
pub(crate) fn is_webp(file: &[u8]) -> bool {
    file.len() >= MARK_LEN && file.starts_with(b"RIFF") && file[HEAD_LEN..].starts_with(b"WEBP")
}

fn failure(error: &DecodingError) -> grainmill_core::Error {
    corrupt("WebP", MARK_LEN, error.to_string())
}

/// A decoder that has read the headers.
fn opened(file: &[u8]) -> Result<WebPDecoder<Cursor<&[u8]>>> {
    let mut decoder = WebPDecoder::new(Cursor::new(file)).map_err(|error| failure(&error))?;
    // A chunk of metadata is allocated by the length that it states.
    decoder.set_memory_limit(file.len());
    Ok(decoder)
}

/// The size and orientation of an image.
pub(crate) fn header(file: &[u8]) -> Result<Header> {
    let mut decoder = opened(file)?;
    let (width, height) = decoder.dimensions();
    if width == 0 || height == 0 {
        return Err(corrupt("WebP", MARK_LEN, format!("the image has {width} x {height} pixels")));
    }
    let mut orientation = Orientation::default();
    // Metadata are not needed, and may be damaged without any harm to pixels.
    if let Ok(Some(exif)) = decoder.exif_metadata() {
        orientation.add_exif(exif.strip_prefix(b"Exif\0\0").unwrap_or(&exif));
    }
    if let Ok(Some(xmp)) = decoder.xmp_metadata() {
        orientation.add_xmp(&xmp);
    }
    let (width, height) = (width as usize, height as usize);
    Ok(Header { width, height, orientation: orientation.value() })
}

/// Decodes the pixels `x` and `y`.
pub(crate) fn decode(
    file: &[u8],
    (x, y): (&Range<usize>, &Range<usize>),
    options: &Options,
) -> Result<Pixels> {
    let stated = file[4..HEAD_LEN].first_chunk().map_or(0, |&len| u32::from_le_bytes(len));
    let end = HEAD_LEN.saturating_add(stated as usize);
    if end > file.len() && !options.allow_damaged {
        let text = format!("the file should have {end} bytes: it was cut short");
        return Err(corrupt("WebP", file.len(), text));
    }
    let mut decoder = opened(file)?;
    let (width, height) = decoder.dimensions();
    let own = if decoder.has_alpha() { 4 } else { 3 };
    let what = || "the pixels of an image".to_owned();
    let mut bytes: Vec<u8> = try_defaults(width as usize * height as usize * own, what)?;
    if let Err(error) = decoder.read_image(&mut bytes) {
        if !options.allow_damaged {
            return Err(failure(&error));
        }
        bytes.fill(0);
    }
    let whole = Pixels { width: width as usize, height: height as usize, channels: own, bytes };
    whole.cropped(x, y)?.converted(options.channels.unwrap_or(own))
}
