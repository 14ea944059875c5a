//! The bytes of a NumPy array, without a copy.

use grainmill_core::bytes::Bytes;
use numpy::npyffi::PyArrayObject;
use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;

/// The bytes of `array`. No Python code may run while they are used.
///
/// # Panics
///
/// If `array` is not C-contiguous or holds Python objects.
#[expect(unsafe_code, reason = "NumPy exposes memory of arbitrary dtypes only as a raw pointer")]
pub(crate) fn bytes_of<'a>(array: &'a Bound<'_, PyUntypedArray>) -> Bytes<'a> {
    let dtype = array.dtype();
    assert!(array.is_c_contiguous() && !dtype.has_object(), "the array is not plain bytes");
    let byte_len = array.len() * dtype.itemsize();
    if byte_len == 0 {
        return (&[][..]).into();
    }
    let object: *mut PyArrayObject = array.as_array_ptr();
    // SAFETY: `array` is a live NumPy array, so the pointer is to its header.
    let data = unsafe { (*object).fields.data };
    // SAFETY: a C-contiguous array that is not empty has `byte_len` bytes from `data` on, and
    // `array` keeps them valid: `resize` refuses an array that others reference, unless it is told not
    // to (`refcheck=False`), which NumPy leaves to the user: its own copies release the interpreter
    // lock, too. If the user writes it on another thread meanwhile, old and new bytes mix (documented in
    // `IterDataset.batch`).
    unsafe { Bytes::new(data.cast::<u8>(), byte_len) }
}
