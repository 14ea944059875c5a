//! The fuzz targets for images: functions that must return for any input, without a panic, in little
//! memory, with valid results.

use std::path::Path;

use grainmill_image::{Filter, Options, Region, decode, size};

/// The name of a target and its function.
pub(crate) type Target = (&'static str, fn(&[u8]));

/// All targets.
pub(crate) const TARGETS: [Target; 2] = [("image", image), ("image_options", image_options)];

/// The largest image that is decoded here, so that unbounded memory fails a run.
const MAX_PIXELS: u64 = 1 << 18;

/// The input as a whole image.
fn image(input: &[u8]) {
    let mut options = Options {
        channels: None,
        filter: Filter::Bilinear,
        exif_orientation: false,
        draft: false,
        max_pixels: MAX_PIXELS,
        allow_damaged: false,
    };
    let strict = decode(input, None, None, &options);
    options.allow_damaged = true;
    let lenient = decode(input, None, None, &options);
    if let Ok(pixels) = strict {
        assert_eq!(pixels.bytes.len(), pixels.width * pixels.height * pixels.channels);
        assert_eq!(size(input, &options).expect("it was decoded"), (pixels.height, pixels.width));
        assert!(lenient.is_ok_and(|lenient| lenient == pixels), "the lenient call differs");
    }
}

/// The first bytes of the input choose options, the rest is an image. A crop of it equals that part
/// of the whole.
fn image_options(input: &[u8]) {
    let Some(([flags, channels, top, left, height, width], file)) = input.split_first_chunk()
    else {
        return;
    };
    let mut options = Options {
        channels: [None, Some(1), Some(3), Some(4)][usize::from(channels % 4)],
        filter: [Filter::Box, Filter::Bilinear, Filter::Bicubic, Filter::Lanczos]
            [usize::from(channels >> 2) % 4],
        exif_orientation: flags & 1 != 0,
        draft: false,
        max_pixels: MAX_PIXELS,
        allow_damaged: flags & 2 != 0,
    };
    let Ok((image_height, image_width)) = size(file, &options) else { return };
    let within = |start: u8, len: u8, end: usize| {
        let start = usize::from(start) % end;
        (start, usize::from(len) % (end - start) + 1)
    };
    let (top, height) = within(*top, *height, image_height);
    let (left, width) = within(*left, *width, image_width);
    let region = Region { top, left, height, width };
    let part = decode(file, Some(region), None, &options);
    // Damage below or beside a crop is not seen.
    if let (Ok(part), Ok(whole)) = (&part, decode(file, None, None, &options)) {
        let channels = whole.channels;
        let rows = whole.bytes.chunks_exact(whole.width * channels).skip(top).take(height);
        let cut = rows.flat_map(|row| &row[left * channels..(left + width) * channels]);
        assert!(options.allow_damaged || cut.eq(&part.bytes), "{region:?} differs");
    }
    options.draft = true;
    let to = (height.div_ceil(3), width.div_ceil(2));
    if let Ok(pixels) = decode(file, Some(region), Some(to), &options) {
        assert_eq!((pixels.height, pixels.width), to);
    }
}

/// Inputs to begin with: for each target the images of the tests.
pub(crate) fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/images");
    let entries = std::fs::read_dir(&folder).expect("the images of the tests");
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("a file").path()).collect();
    paths.sort();
    let mut seeds = Vec::new();
    for (number, path) in (0_u8..).zip(paths) {
        let file = std::fs::read(path).expect("an image");
        let options = [number % 4, number, 3, 5, 20, 30];
        seeds.push(("image_options", [&options[..], &file[..]].concat()));
        seeds.push(("image", file));
    }
    seeds
}
