//! The bytes of a NumPy array, where they are.

use grainmill_core::bytes::Bytes;
use numpy::npyffi::PyArrayObject;
use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;

/// The bytes of `array`. No Python code may run as long as they are used.
///
/// # Panics
///
/// If the elements do not lie one after another in memory, or hold Python objects.
#[expect(unsafe_code, reason = "NumPy gives memory of any dtype as a bare pointer only")]
pub(crate) fn bytes_of<'a>(array: &'a Bound<'_, PyUntypedArray>) -> Bytes<'a> {
    let dtype = array.dtype();
    assert!(array.is_c_contiguous() && !dtype.has_object(), "cells are not plain bytes");
    let byte_len = array.len() * dtype.itemsize();
    if byte_len == 0 {
        return (&[][..]).into();
    }
    let object: *mut PyArrayObject = array.as_array_ptr();
    // SAFETY: `array` is a live NumPy array, so the pointer is to its header.
    let data = unsafe { (*object).fields.data };
    // SAFETY: a C-contiguous array that is not empty has its `byte_len` bytes from `data` on, and
    // `array` keeps them there: `resize` refuses an array that others hold. A user who writes it
    // on another thread meanwhile gets old and new bytes (`IterDataset.batch` says so).
    unsafe { Bytes::new(data.cast::<u8>(), byte_len) }
}
