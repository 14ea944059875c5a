//! Decodes JPEG, PNG, WebP and GIF images to 8-bit pixels: a region of them, turned upright, resized.
//!
//! `size` reads the headers only, so that a caller can choose a region; `decode` decodes no more of JPEG
//! and PNG than that region needs. Pixels equal those of libjpeg-turbo, libwebp and PIL; see the modules.
#![expect(clippy::inline_always, reason = "what is not inlined is not compiled for the processor")]

mod common;
mod gif;
mod jpeg;
mod orientation;
mod pixels;
mod png;
mod resize;
mod simd;
mod webp;

use grainmill_core::{Error, Result};

use common::Header;

pub use common::Options;
pub use pixels::Pixels;
pub use resize::Filter;

/// A rectangle of an upright image, in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// The first row.
    pub top: usize,
    /// The first column.
    pub left: usize,
    /// Rows.
    pub height: usize,
    /// Columns.
    pub width: usize,
}

/// Reads and checks the headers.
fn header(file: &[u8], options: &Options) -> Result<Header> {
    let mut header = if jpeg::is_jpeg(file) {
        jpeg::header(file)?
    } else if png::is_png(file) {
        png::header(file)?
    } else if webp::is_webp(file) {
        webp::header(file)?
    } else if gif::is_gif(file) {
        gif::header(file)?
    } else {
        let start = &file[..file.len().min(8)];
        let problem = format!(
            "it is neither JPEG, PNG, WebP nor GIF: {} bytes that start with {start:02x?}",
            file.len()
        );
        return Err(Error::Corrupt { path: "image".into(), place: "byte 0".into(), problem });
    };
    let num_pixels = header.width as u64 * header.height as u64;
    if num_pixels > options.max_pixels {
        return Err(Error::InvalidArgument(format!(
            "the image has {} x {} pixels, more than `max_pixels={}`",
            header.width, header.height, options.max_pixels
        )));
    }
    if !options.exif_orientation {
        header.orientation = 1;
    }
    Ok(header)
}

/// The height and width of the upright image.
///
/// # Errors
///
/// If the headers are damaged, or the image has too many pixels.
pub fn size(file: &[u8], options: &Options) -> Result<(usize, usize)> {
    let header = header(file, options)?;
    Ok(if orientation::swaps_sides(header.orientation) {
        (header.width, header.height)
    } else {
        (header.height, header.width)
    })
}

/// Decodes `region` of an image, all of it if `None`, and resizes it to height and width `size`.
///
/// # Errors
///
/// If the file is damaged or not supported, the image has too many pixels, the region does not lie
/// in it, or it does not fit into memory.
pub fn decode(
    file: &[u8],
    region: Option<Region>,
    size: Option<(usize, usize)>,
    options: &Options,
) -> Result<Pixels> {
    let Header { width, height, orientation } = header(file, options)?;
    let swaps = orientation::swaps_sides(orientation);
    let (upright_height, upright_width) = if swaps { (width, height) } else { (height, width) };
    let region =
        region.unwrap_or(Region { top: 0, left: 0, height: upright_height, width: upright_width });
    check(region, (upright_height, upright_width))?;
    let eighths = match size {
        Some((to_height, to_width)) if options.draft && jpeg::is_jpeg(file) => [1, 2, 4]
            .into_iter()
            .find(|n| region.height * n >= 8 * to_height && region.width * n >= 8 * to_width)
            .unwrap_or(8),
        _ => 8,
    };
    let x = region.left..region.left + region.width;
    let y = region.top..region.top + region.height;
    let (x, y) = orientation::stored_region(orientation, (width, height), (x, y));
    let scaled = |range: std::ops::Range<usize>| {
        range.start * eighths / 8..(range.end * eighths).div_ceil(8)
    };
    let (x, y) = (scaled(x), scaled(y));
    let pixels = if jpeg::is_jpeg(file) {
        jpeg::decode(file, (&x, &y), eighths, options)?
    } else if png::is_png(file) {
        png::decode(file, (&x, &y), options)?
    } else if webp::is_webp(file) {
        webp::decode(file, (&x, &y), options)?
    } else {
        gif::decode(file, (&x, &y), options)?
    };
    let pixels = orientation::upright(pixels, orientation)?;
    match size {
        Some(size) => resize::resized(pixels, size, options.filter),
        None => Ok(pixels),
    }
}

/// Checks that a region has pixels, all of them in an image of that height and width.
fn check(region: Region, (height, width): (usize, usize)) -> Result<()> {
    let is_inside = |start: usize, len: usize, end: usize| {
        len > 0 && start.checked_add(len).is_some_and(|at| at <= end)
    };
    if is_inside(region.top, region.height, height) && is_inside(region.left, region.width, width) {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!(
        "the crop must lie in the image, which is {height} high and {width} wide, got top {}, left \
         {}, height {}, width {}",
        region.top, region.left, region.height, region.width
    )))
}
