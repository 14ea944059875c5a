//! The bytes of a NumPy array, read in place.

use numpy::npyffi::PyArrayObject;
use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;

/// Hands the bytes of `array` to `read`, which must not run Python code.
///
/// # Panics
///
/// If the elements do not lie one after another in memory, or hold Python objects.
#[expect(unsafe_code, reason = "NumPy gives memory of any dtype as a bare pointer only")]
pub(crate) fn with_bytes<R>(array: &Bound<'_, PyUntypedArray>, read: impl FnOnce(&[u8]) -> R) -> R {
    let dtype = array.dtype();
    assert!(array.is_c_contiguous() && !dtype.has_object(), "cells are not plain bytes");
    let byte_len = array.len() * dtype.itemsize();
    if byte_len == 0 {
        return read(&[]);
    }
    let object: *mut PyArrayObject = array.as_array_ptr();
    // SAFETY: `array` is a live NumPy array, so the pointer is to its header.
    let data = unsafe { (*object).fields.data };
    // SAFETY: a C-contiguous array that is not empty has its `byte_len` bytes from `data` on;
    // `array` keeps them alive, and `read` runs no Python code that could resize it.
    read(unsafe { std::slice::from_raw_parts(data.cast::<u8>(), byte_len) })
}
