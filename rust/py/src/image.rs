//! Images to arrays.

use grainmill_image::{Filter, Options, Region};
use numpy::{PyArray1, PyArray3, PyArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::error::Raised;

/// How to decode images: JPEG and PNG to arrays of bytes.
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
        crop: Option<(usize, usize, usize, usize)>,
        size: Option<(usize, usize)>,
    ) -> PyResult<Bound<'py, PyArray3<u8>>> {
        let region = crop.map(|(top, left, height, width)| Region { top, left, height, width });
        let pixels = py
            .detach(|| grainmill_image::decode(file, region, size, &self.0))
            .map_err(Raised::from)?;
        PyArray1::from_vec(py, pixels.bytes).reshape([pixels.height, pixels.width, pixels.channels])
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyImageDecoder>()
}
