//! GIF: the first image, with its colours, as PIL shows it.

use std::io::Cursor;
use std::ops::Range;

use gif::{ColorOutput, DecodeOptions, Decoder, DecodingError, MemoryLimit};
use grainmill_core::Result;
use grainmill_core::try_alloc::try_defaults;

use crate::common::{Header, Options, corrupt};
use crate::pixels::Pixels;

/// Where the first block begins, unless colours are before it.
const HEAD_LEN: usize = 13;

/// What decodes a file in memory.
type InMemory<'a> = Decoder<Cursor<&'a [u8]>>;

/// Whether `file` starts like a GIF file.
pub(crate) fn is_gif(file: &[u8]) -> bool {
    file.starts_with(b"GIF87a") || file.starts_with(b"GIF89a")
}

fn failure(error: &DecodingError) -> grainmill_core::Error {
    corrupt("GIF", HEAD_LEN, error.to_string())
}

/// A decoder whose next image is the first, and the size of the whole: images may exceed what the header
/// says.
fn opened(file: &[u8]) -> Result<(InMemory<'_>, usize, usize)> {
    let mut options = DecodeOptions::new();
    options.set_color_output(ColorOutput::Indexed);
    // `max_pixels` is the limit.
    options.set_memory_limit(MemoryLimit::Unlimited);
    options.allow_unknown_blocks(true);
    let mut decoder = options.read_info(Cursor::new(file)).map_err(|error| failure(&error))?;
    let (width, height) = (usize::from(decoder.width()), usize::from(decoder.height()));
    let Some(first) = decoder.next_frame_info().map_err(|error| failure(&error))? else {
        return Err(corrupt("GIF", HEAD_LEN, "there is no image".to_owned()));
    };
    let right = usize::from(first.left) + usize::from(first.width);
    let bottom = usize::from(first.top) + usize::from(first.height);
    let (width, height) = (width.max(right), height.max(bottom));
    if first.width == 0 || first.height == 0 {
        let text = format!("the image has {} x {} pixels", first.width, first.height);
        return Err(corrupt("GIF", HEAD_LEN, text));
    }
    Ok((decoder, width, height))
}

/// The size of the image.
pub(crate) fn header(file: &[u8]) -> Result<Header> {
    let (_, width, height) = opened(file)?;
    Ok(Header { width, height, orientation: 1 })
}

/// Decodes the pixels `x` and `y`.
pub(crate) fn decode(
    file: &[u8],
    (x, y): (&Range<usize>, &Range<usize>),
    options: &Options,
) -> Result<Pixels> {
    let (mut decoder, ..) = opened(file)?;
    let what = || "the pixels of an image".to_owned();
    let mut colours: Vec<u8> = try_defaults(decoder.buffer_size(), what)?;
    if let Err(error) = decoder.read_into_buffer(&mut colours)
        && !options.allow_damaged
    {
        return Err(failure(&error));
    }
    let missing = || corrupt("GIF", HEAD_LEN, "there are no colours".to_owned());
    let palette = decoder.palette().map_err(|_| missing())?;
    let first = decoder.current_frame_info().ok_or_else(missing)?;
    let own = if first.transparent.is_some() { 4 } else { 3 };
    let pixel = |number: u8| {
        // What has no colour is black.
        let colour = palette.get(3 * usize::from(number)..).and_then(<[u8]>::first_chunk);
        let &[red, green, blue] = colour.unwrap_or(&[0; 3]);
        [red, green, blue, if first.transparent == Some(number) { 0 } else { 255 }]
    };
    let around = pixel(first.transparent.unwrap_or(0));
    let (left, top, row_len) =
        (usize::from(first.left), usize::from(first.top), usize::from(first.width));
    let mut bytes: Vec<u8> = try_defaults(x.len() * y.len() * own, what)?;
    let places = y.clone().flat_map(|row| x.clone().map(move |column| (row, column)));
    for (out, (row, column)) in bytes.chunks_exact_mut(own).zip(places) {
        let number = row
            .checked_sub(top)
            .zip(column.checked_sub(left).filter(|&column| column < row_len))
            .and_then(|(row, column)| colours.get(row * row_len + column));
        let found = number.map_or(around, |&number| pixel(number));
        out.copy_from_slice(&found[..own]);
    }
    let pixels = Pixels { width: x.len(), height: y.len(), channels: own, bytes };
    pixels.converted(options.channels.unwrap_or(own))
}
