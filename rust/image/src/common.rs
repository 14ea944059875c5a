//! What all formats of images have: how to decode them, what their headers say, and errors.

use grainmill_core::Error;

use crate::resize::Filter;

/// How to decode an image.
#[derive(Clone, Debug)]
pub struct Options {
    /// Channels of the result: 1, 3 or 4; as stored if `None`.
    pub channels: Option<usize>,
    /// How to resize.
    pub filter: Filter,
    /// Whether to turn the image upright as EXIF says, or XMP where EXIF says nothing.
    pub exif_orientation: bool,
    /// Whether a JPEG may be decoded at a half, a quarter or an eighth of its size where that is at
    /// least the requested size.
    pub draft: bool,
    /// Images with more pixels are refused before memory is allocated for them.
    pub max_pixels: u64,
    /// Whether what follows damage is filled with gray (JPEG) or black (PNG), rather than an error.
    pub allow_damaged: bool,
}

/// What the headers of a file say.
pub(crate) struct Header {
    pub(crate) width: usize,
    pub(crate) height: usize,
    pub(crate) orientation: u8,
}

/// An error in an image.
pub(crate) fn corrupt(format: &str, at: usize, problem: String) -> Error {
    Error::Corrupt { path: format!("{format} image"), place: format!("byte {at}"), problem }
}
