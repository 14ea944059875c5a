//! JPEG: baseline, extended and progressive with Huffman codes and 8 bits per sample.
//!
//! Pixels equal those of libjpeg-turbo with its default methods (`islow`, smooth upsampling), which
//! a changer must not break: tests compare whole images and regions with it, byte by byte. What
//! makes this faster is that outside of the region blocks are stepped over, several codes at once.

mod bits;
mod frame;
mod huffman;
mod idct;
mod plane;
mod problem;
mod render;
mod scan;

use std::ops::Range;

use grainmill_core::try_alloc::try_defaults;
use grainmill_core::{Error, Result};

use crate::common::{Header, Options};
use crate::pixels::Pixels;
use crate::simd::for_processor;
use bits::EntropyData;
use frame::{Colours, Headers};
use plane::Plane;
use problem::damaged;
use scan::Coefficients;

/// Whether `file` starts like a JPEG file.
pub(crate) fn is_jpeg(file: &[u8]) -> bool {
    file.starts_with(&[0xff, 0xd8])
}

/// The size and orientation of an image.
pub(crate) fn header(file: &[u8]) -> Result<Header> {
    let mut headers = Headers::default();
    let frame = headers.read_frame(file)?;
    let (width, height) = (frame.width, frame.height);
    Ok(Header { width, height, orientation: headers.orientation.value() })
}

/// Decodes the pixels `x` and `y` of the image at `eighths` of its size.
pub(crate) fn decode(
    file: &[u8],
    (x, y): (&Range<usize>, &Range<usize>),
    eighths: usize,
    options: &Options,
) -> Result<Pixels> {
    let mut headers = Headers::default();
    let planes = decode_planes(file, &mut headers, x, y, eighths, options)?;
    let colours = headers.colours();
    let channels = options.channels.unwrap_or(if colours == Colours::Gray { 1 } else { 3 });
    // Four components become colours first, and colours a fourth channel last.
    let own = match (colours, channels) {
        (_, 2) | (Colours::Cmyk | Colours::Ycck, 1) => 3,
        (_, channels) => channels,
    };
    let byte_len = x.len() * y.len() * own;
    let mut bytes = try_defaults(byte_len, || "the pixels of an image".into())?;
    let colours = (colours, headers.has_adobe());
    rendered(&planes, colours, (x, y), eighths > 1, own, &mut bytes);
    Pixels { width: x.len(), height: y.len(), channels: own, bytes }.converted(channels)
}

for_processor! {
    fn rendered(
        planes: &[Plane],
        colours: (Colours, bool),
        region: (&Range<usize>, &Range<usize>),
        is_smooth: bool,
        channels: usize,
        out: &mut [u8]
    ) -> () = render::render;
}

/// Decodes the samples of the region.
fn decode_planes(
    file: &[u8],
    headers: &mut Headers,
    x: &Range<usize>,
    y: &Range<usize>,
    eighths: usize,
    options: &Options,
) -> Result<Vec<Plane>> {
    let Some(mut scan) = headers.read_scan(file, 0)? else {
        return Err(damaged(file.len(), "there is no image data").into());
    };
    let frame = headers.frame.clone().ok_or_else(|| damaged(0, "there is no frame"))?;
    // A block takes at least one bit. What is shorter need not get memory.
    let num_blocks: u64 = frame
        .components
        .iter()
        .map(|component| {
            let (columns, rows) = frame.blocks(component);
            columns as u64 * rows as u64
        })
        .sum();
    let is_complete = num_blocks <= 8 * (file.len() - scan.data) as u64;
    if !is_complete && !options.allow_damaged {
        let text = format!(
            "{} x {} pixels cannot be in {} bytes: it was cut short",
            frame.width,
            frame.height,
            file.len() - scan.data
        );
        return Err(damaged(scan.data, text).into());
    }
    let planes = frame.components.iter().map(|c| Plane::new(&frame, c, eighths, x, y));
    let mut planes = planes.collect::<Result<Vec<_>>>()?;
    let mut coefficients =
        frame.progressive.then(|| Coefficients::new(&frame, &planes)).transpose()?;
    let mut frame = frame;
    let mut found = [false; 4];
    for number in 0.. {
        // The quantization tables of components that have just appeared.
        if let Some(current) = &headers.frame {
            frame.components.clone_from(&current.components);
        }
        let data = EntropyData::new(file, scan.data).ok_or_else(|| {
            Error::OutOfMemory("the bits of an image do not fit into memory".into())
        })?;
        scan.components.iter().for_each(|&(index, ..)| found[index] = true);
        let result = match &mut coefficients {
            None => {
                scan::sequential(headers, &frame, &scan, &data, &mut planes, options.allow_damaged)
            }
            Some(coefficients) => {
                let target = (&planes[..], coefficients);
                scan::progressive(headers, &frame, &scan, &data, target, options.allow_damaged)
            }
        };
        result?;
        let end = scan::end_of(file, &data, options.allow_damaged)?;
        if !frame.progressive && found[..planes.len()].iter().all(|&found| found) {
            break;
        }
        if number == MAX_SCANS {
            return Err(damaged(end, format!("there are more than {MAX_SCANS} scans")).into());
        }
        match headers.read_scan(file, end) {
            Ok(Some(next)) => scan = next,
            Ok(None) => break,
            Err(_) if options.allow_damaged => break,
            Err(problem) => return Err(problem.into()),
        }
    }
    if !found[..planes.len()].iter().all(|&found| found) && !options.allow_damaged {
        return Err(damaged(file.len(), "a component has no scan").into());
    }
    if let Some(coefficients) = &coefficients {
        coefficients.render(&frame, &mut planes);
    }
    Ok(planes)
}

/// More scans than any encoder writes: each costs as much as a whole image, in a few bytes.
const MAX_SCANS: usize = 500;
