//! PNG: every colour type and bit depth, as 8 bits per channel; 16 bits lose their lower half.

use std::borrow::Cow;
use std::io::Cursor;
use std::ops::Range;

use grainmill_core::try_alloc::{try_defaults, try_with_capacity};
use grainmill_core::{Error, Result};
use png::{BitDepth, ColorType, DecodeOptions, DecodingError, Transformations};

use crate::common::{Header, Options, corrupt};
use crate::orientation::Orientation;
use crate::pixels::Pixels;

const SIGNATURE: [u8; 8] = *b"\x89PNG\r\n\x1a\n";

/// What a text of XMP data begins with: its name, and that it is not compressed.
const XMP: &[u8] = b"XML:com.adobe.xmp\0\0";

/// Whether `file` starts like a PNG file.
pub(crate) fn is_png(file: &[u8]) -> bool {
    file.starts_with(&SIGNATURE)
}

/// The chunks of a file: where each starts, its type, and its content as far as it is there.
fn chunks(file: &[u8]) -> impl Iterator<Item = (usize, &[u8], &[u8])> {
    let mut at = SIGNATURE.len();
    std::iter::from_fn(move || {
        let (head, rest) = file.get(at..)?.split_first_chunk::<8>()?;
        let (len, kind) = head.split_first_chunk::<4>()?;
        let len = usize::try_from(u32::from_be_bytes(*len)).ok()?;
        let start = at;
        at = at.checked_add(len)?.checked_add(12)?;
        let kind = &file[start + 4..start + 4 + kind.len()];
        Some((start, kind, &rest[..len.min(rest.len())]))
    })
}

/// The size and orientation of an image.
pub(crate) fn header(file: &[u8]) -> Result<Header> {
    let mut orientation = Orientation::default();
    let mut size = None;
    for (at, kind, content) in chunks(file) {
        match kind {
            b"IHDR" if at == SIGNATURE.len() => size = content.first_chunk::<8>(),
            b"eXIf" => orientation.add_exif(content),
            b"iTXt" => {
                if let Some(xmp) = content.strip_prefix(XMP) {
                    orientation.add_xmp(xmp);
                }
            }
            b"IDAT" | b"IEND" => break,
            _ => {}
        }
    }
    let Some(&[w3, w2, w1, w0, h3, h2, h1, h0]) = size else {
        return Err(corrupt("PNG", SIGNATURE.len(), "the first chunk is not a header".into()));
    };
    let number = |bytes: [u8; 4]| usize::try_from(u32::from_be_bytes(bytes)).unwrap_or(usize::MAX);
    let (width, height) = (number([w3, w2, w1, w0]), number([h3, h2, h1, h0]));
    if width == 0 || height == 0 {
        let text = format!("the image has {width} x {height} pixels");
        return Err(corrupt("PNG", 16, text));
    }
    Ok(Header { width, height, orientation: orientation.value() })
}

/// Decodes the pixels `x` and `y`.
pub(crate) fn decode(
    file: &[u8],
    (x, y): (&Range<usize>, &Range<usize>),
    options: &Options,
) -> Result<Pixels> {
    let is_complete = chunks(file).any(|(at, kind, _)| kind == b"IEND" && at + 12 <= file.len());
    if !is_complete && !options.allow_damaged {
        let text = "the file ends before its last chunk: it was cut short";
        return Err(corrupt("PNG", file.len(), text.into()));
    }
    let mut lenience = DecodeOptions::default();
    lenience.set_skip_ancillary_crc_failures(options.allow_damaged);
    let readable = readable(file);
    let mut decoder = png::Decoder::new_with_options(Cursor::new(&*readable), lenience);
    decoder.set_transformations(Transformations::EXPAND | Transformations::STRIP_16);
    // Text and profiles are not needed, and may be damaged without any harm to pixels.
    decoder.set_ignore_text_chunk(true);
    decoder.set_ignore_iccp_chunk(true);
    decoder.ignore_checksums(options.allow_damaged);
    let mut reader = decoder.read_info().map_err(|error| failure(file, &error))?;
    let (color, depth) = reader.output_color_type();
    let own = match color {
        ColorType::Grayscale => 1,
        ColorType::GrayscaleAlpha => 2,
        ColorType::Rgb => 3,
        ColorType::Rgba => 4,
        ColorType::Indexed => 0,
    };
    if own == 0 || depth != BitDepth::Eight {
        return Err(corrupt("PNG", 24, "the palette cannot be applied".into()));
    }
    // One byte of compressed data expands to about a thousand at most.
    let (width, height) = (reader.info().width as usize, reader.info().height as usize);
    let byte_len = reader.info().raw_bytes().saturating_sub(height);
    if byte_len / 1040 > file.len() && !options.allow_damaged {
        let text = format!("{width} x {height} pixels cannot be in {} bytes", file.len());
        return Err(corrupt("PNG", 16, text));
    }
    let what = || "the pixels of an image".to_owned();
    let mut bytes: Vec<u8> = try_with_capacity(x.len() * y.len() * own, what)?;
    let columns = x.start * own..x.end * own;
    let mut result = Ok(());
    if reader.info().interlaced {
        let mut all = try_defaults(width * height * own, what)?;
        result = reader.next_frame(&mut all).map(drop);
        for row in all.chunks_exact(width * own).skip(y.start).take(y.len()) {
            bytes.extend_from_slice(&row[columns.clone()]);
        }
    } else {
        for row in 0..y.end {
            match reader.next_row() {
                Ok(Some(found)) if row >= y.start => {
                    bytes.extend_from_slice(&found.data()[columns.clone()]);
                }
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
    }
    if result.is_ok() && y.end == height {
        // The checksums at the end.
        result = reader.finish();
    }
    match result {
        Err(error) if !options.allow_damaged => return Err(failure(file, &error)),
        _ if bytes.len() < x.len() * y.len() * own && !options.allow_damaged => {
            let text = "there are fewer rows than the header says";
            return Err(corrupt("PNG", file.len(), text.into()));
        }
        _ => bytes.resize(x.len() * y.len() * own, 0),
    }
    let pixels = Pixels { width: x.len(), height: y.len(), channels: own, bytes };
    let channels = options.channels.unwrap_or(own);
    pixels.converted(channels)
}

/// The file as the decoder reads it: without the chunks of animations, which may be wrong without any
/// harm to the first image, and with the transparent colour cut to the depth, as libpng does it.
fn readable(file: &[u8]) -> Cow<'_, [u8]> {
    let header = chunks(file).next().map_or(&[][..], |(_, _, content)| content);
    let replaced: Vec<_> = chunks(file)
        .filter_map(|chunk @ (at, kind, content)| match kind {
            b"acTL" | b"fcTL" | b"fdAT" => Some((at, content.len() + 12, Vec::new())),
            b"tRNS" => cut_to_depth(file, header, chunk).map(|new| (at, new.len(), new)),
            _ => None,
        })
        .collect();
    if replaced.is_empty() {
        return Cow::Borrowed(file);
    }
    let (mut whole, mut from) = (Vec::with_capacity(file.len()), 0);
    for (at, len, new) in replaced {
        whole.extend_from_slice(&file[from..at]);
        whole.extend_from_slice(&new);
        from = (at + len).min(file.len());
    }
    whole.extend_from_slice(&file[from..]);
    Cow::Owned(whole)
}

/// The chunk of the transparent colour with numbers of as many bits as samples have, if it has others.
fn cut_to_depth(
    file: &[u8],
    header: &[u8],
    (at, kind, content): (usize, &[u8], &[u8]),
) -> Option<Vec<u8>> {
    let [.., depth, 0 | 2, _, _, _] = *header else { return None };
    let mask = u16::MAX.checked_shr(16_u32.checked_sub(u32::from(depth))?)?;
    let numbers = content.chunks_exact(2).map(|pair| u16::from_be_bytes([pair[0], pair[1]]));
    let cut: Vec<u8> = numbers.flat_map(|number| (number & mask).to_be_bytes()).collect();
    let end = at + 8 + content.len();
    // A wrong checksum stays wrong.
    let stored = file.get(end..end + 4)?;
    if cut == content
        || cut.len() != content.len()
        || stored != crc32(&file[at + 4..end]).to_be_bytes()
    {
        return None;
    }
    let named = [kind, &cut].concat();
    Some([&file[at..at + 4], &named, &crc32(&named).to_be_bytes()].concat())
}

/// What the decoder found wrong. It does not say where, so this names the first chunk whose checksum
/// does not match its content, or else the first of the image's data.
fn failure(file: &[u8], error: &DecodingError) -> Error {
    let is_wrong = |&(at, _, content): &(usize, &[u8], &[u8])| {
        let end = at + 8 + content.len();
        let stored = file.get(end..end + 4).and_then(|sum| sum.try_into().ok());
        stored.map(u32::from_be_bytes) != Some(crc32(&file[at + 4..end]))
    };
    let place = chunks(file).find(is_wrong).or_else(|| chunks(file).find(|c| c.1 == b"IDAT"));
    corrupt("PNG", place.map_or(0, |(at, ..)| at), error.to_string())
}

/// The checksum of chunks, bit by bit: only needed once something is wrong.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |sum, &byte| {
        (0..8).fold(sum ^ u32::from(byte), |sum, _| {
            if sum & 1 == 1 { sum >> 1 ^ 0xedb8_8320 } else { sum >> 1 }
        })
    })
}
