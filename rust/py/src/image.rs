//! Images to arrays.

use std::path::Path;

use grainmill_core::bytes::{Bytes, Destination};
use grainmill_core::compute;
use grainmill_core::timeline::{self, Activity};
use grainmill_image::{Filter, Options, Pixels, Region};
use numpy::{
    PyArray1, PyArray3, PyArrayDescr, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::array::{RowBytes, same_dtype};
use crate::error::Raised;

/// A core decodes so much of a file in 50 us.
const MIN_SHARE_LEN: usize = 4 << 10;

/// The first row and column, the height and the width of a rectangle.
type Crop = (usize, usize, usize, usize);

/// How to decode images: JPEG, PNG, WebP and GIF to arrays of bytes.
#[pyclass(frozen, name = "ImageDecoder", module = "grainmill._native")]
pub(crate) struct PyImageDecoder(Options);

#[pymethods]
impl PyImageDecoder {
    #[new]
    #[pyo3(signature = (*, channels, resample, exif_orientation, draft, max_pixels, allow_damaged))]
    fn new(
        channels: Option<usize>,
        resample: &str,
        exif_orientation: bool,
        draft: bool,
        max_pixels: u64,
        allow_damaged: bool,
    ) -> PyResult<Self> {
        let filter = match resample {
            "box" => Filter::Box,
            "bilinear" => Filter::Bilinear,
            "bicubic" => Filter::Bicubic,
            "lanczos" => Filter::Lanczos,
            _ => return Err(PyValueError::new_err(format!("there is no filter `{resample}`"))),
        };
        Ok(Self(Options { channels, filter, exif_orientation, draft, max_pixels, allow_damaged }))
    }

    /// The height and width of an image, which only its headers are read for.
    fn size(&self, file: &[u8]) -> Result<(usize, usize), Raised> {
        Ok(grainmill_image::size(file, &self.0)?)
    }

    /// The pixels of an image or of its rectangle `crop` (top, left, height, width), resized to
    /// height and width `size`, of shape [height, width, channels].
    #[pyo3(signature = (file, crop=None, size=None))]
    fn decode<'py>(
        &self,
        py: Python<'py>,
        file: &[u8],
        crop: Option<Crop>,
        size: Option<(usize, usize)>,
    ) -> PyResult<Bound<'py, PyArray3<u8>>> {
        let pixels = py.detach(|| self.pixels(file, crop, size)).map_err(Raised::from)?;
        array_of(py, pixels)
    }

    /// The pixels of each of `files`, as `decode` returns them.
    fn decode_block<'py>(
        &self,
        py: Python<'py>,
        files: Vec<Bound<'py, PyBytes>>,
        crops: Vec<Option<Crop>>,
        size: Option<(usize, usize)>,
    ) -> PyResult<Vec<Bound<'py, PyArray3<u8>>>> {
        let files: Vec<&[u8]> = files.iter().map(PyBytesMethods::as_bytes).collect();
        let decode = |(files, crops): (&[&[u8]], &[Option<Crop>])| {
            let pixels = files.iter().zip(crops).map(|(file, &crop)| self.pixels(file, crop, size));
            pixels.collect::<grainmill_core::Result<Vec<Pixels>>>()
        };
        let decoded = py.detach(|| {
            let share_len = share_len(&files);
            let shares = files.chunks(share_len).zip(crops.chunks(share_len)).collect();
            compute::map(shares, decode)
        });
        let mut arrays = Vec::with_capacity(files.len());
        for decoded in decoded {
            for pixels in decoded.map_err(Raised::from)? {
                arrays.push(array_of(py, pixels)?);
            }
        }
        Ok(arrays)
    }

    /// Writes the pixels of `files` to the rows of `target` from row `at` on.
    ///
    /// Returns whether it did: not if the pixels of one have another shape than a row. The rows have
    /// any content then, and if an image cannot be decoded. Nothing else may use them meanwhile.
    fn fill<'py>(
        &self,
        py: Python<'py>,
        files: Vec<Bound<'py, PyBytes>>,
        crops: Vec<Option<Crop>>,
        size: Option<(usize, usize)>,
        target: Bound<'py, PyUntypedArray>,
        at: usize,
    ) -> PyResult<bool> {
        let &[_, height, width, channels] = target.shape() else { return Ok(false) };
        if !same_dtype(&target.dtype(), &PyArrayDescr::of::<u8>(py)) {
            return Ok(false);
        }
        let mut rows = RowBytes::of(target, at)?;
        if rows.num_rows < files.len() {
            return Ok(false);
        }
        let files: Vec<&[u8]> = files.iter().map(PyBytesMethods::as_bytes).collect();
        let row_len = rows.row_len;
        let mut out = rows.destination(0, files.len());
        let fill = |(files, crops, mut out): (&[&[u8]], &[Option<Crop>], Destination<'_>)| {
            for (file, &crop) in files.iter().zip(crops) {
                let pixels = self.pixels(file, crop, size)?;
                if [pixels.height, pixels.width, pixels.channels] != [height, width, channels] {
                    return Ok(false);
                }
                Bytes::from(pixels.bytes.as_slice()).copy_to(&mut out.take_front(row_len));
            }
            Ok(true)
        };
        let filled: Vec<grainmill_core::Result<bool>> = py.detach(|| {
            let share_len = share_len(&files);
            let shares = files.chunks(share_len).zip(crops.chunks(share_len));
            let shares = shares
                .map(|(files, crops)| (files, crops, out.take_front(files.len() * row_len)))
                .collect();
            compute::map(shares, fill)
        });
        // The first image that does not fit or cannot be decoded decides.
        for filled in filled {
            if !filled.map_err(Raised::from)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl PyImageDecoder {
    fn pixels(
        &self,
        file: &[u8],
        crop: Option<Crop>,
        size: Option<(usize, usize)>,
    ) -> grainmill_core::Result<Pixels> {
        let region = crop.map(|(top, left, height, width)| Region { top, left, height, width });
        let began = timeline::begin();
        let pixels = grainmill_image::decode(file, region, size, &self.0);
        timeline::add(began, Activity::Decode, Path::new(""), 0..file.len() as u64);
        pixels
    }
}

/// How many of `files` idle threads decode at a time.
fn share_len(files: &[&[u8]]) -> usize {
    let byte_len = files.iter().map(|file| file.len()).sum();
    files.len().div_ceil(compute::num_shares(byte_len, MIN_SHARE_LEN)).max(1)
}

fn array_of(py: Python<'_>, pixels: Pixels) -> PyResult<Bound<'_, PyArray3<u8>>> {
    PyArray1::from_vec(py, pixels.bytes).reshape([pixels.height, pixels.width, pixels.channels])
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyImageDecoder>()
}
