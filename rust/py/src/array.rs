//! Zero-copy NumPy arrays: slots as arrays, and arrays as rows of bytes.
//!
//! Invariants: an array keeps its slot alive, and bytes are only taken of dtypes without references
//! to Python objects.
#![expect(unsafe_code, reason = "zero-copy access to NumPy's memory needs its C API")]

use std::ffi::{c_int, c_void};
use std::ptr;

use grainmill_core::batch::Slot;
use grainmill_core::bytes::{Bytes, Destination};
use grainmill_core::platform;
use grainmill_core::write_prefetcher;
use numpy::npyffi::{self, NPY_TYPES, NpyTypes, PY_ARRAY_API, npy_intp};
use numpy::{PyArrayDescr, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyList;
use pyo3::{Borrowed, ffi};

/// A writable buffer of an arena; it returns to the arena when the last array or buffer over it is
/// dropped.
#[pyclass(frozen, name = "Slot", module = "grainmill._native")]
pub(crate) struct PySlot(pub(crate) Slot);

#[pymethods]
impl PySlot {
    fn __len__(&self) -> usize {
        self.0.byte_len()
    }

    /// The id by which another process knows the slot; None if it cannot be mapped.
    #[getter]
    fn shared_id(&self) -> Option<u64> {
        self.0.shared_id()
    }

    /// A file descriptor of the slot's memory, which the caller closes, and the length in bytes, for
    /// another process to map it. None after the first call.
    fn take_file(&self) -> Option<(c_int, usize)> {
        self.0.take_file().map(|(file, byte_len)| (platform::into_descriptor(file), byte_len))
    }

    /// Removes the slot from its arena: its memory is freed when dropped, not recycled.
    fn retire(&self) {
        self.0.retire();
    }

    /// # Safety
    ///
    /// Called only by the interpreter, with a `view` to fill.
    unsafe fn __getbuffer__(
        slf: &Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        // SAFETY: the interpreter passes a view to fill.
        unsafe { Self::buffer(slf).fill(view, flags) }
    }
}

impl PySlot {
    fn buffer<'py>(slf: &Bound<'py, Self>) -> OwnedBuffer<'py> {
        let slot = &slf.get().0;
        OwnedBuffer { owner: slf.as_any().clone(), start: slot.as_ptr(), byte_len: slot.byte_len() }
    }
}

/// Whether values of `dtype` are plain bytes.
pub(crate) fn is_plain(dtype: &Bound<'_, PyArrayDescr>) -> bool {
    !dtype.has_object() && b"biufcmMSUV".contains(&dtype.kind())
}

/// The size of an array in bytes; an error if it is too large or `dtype` is not plain bytes.
pub(crate) fn array_byte_len(shape: &[usize], dtype: &Bound<'_, PyArrayDescr>) -> PyResult<usize> {
    if !is_plain(dtype) {
        return Err(PyTypeError::new_err(format!(
            "an array of dtype {dtype} cannot be stored in a slot"
        )));
    }
    let limit = isize::MAX.unsigned_abs();
    let byte_len =
        shape.iter().try_fold(dtype.itemsize(), |product, &len| product.checked_mul(len));
    byte_len.filter(|&len| len <= limit && shape.iter().all(|&len| len <= limit)).ok_or_else(|| {
        PyValueError::new_err(format!("an array of shape {shape:?} and dtype {dtype} is too large"))
    })
}

/// Memory that a Python object keeps alive.
pub(crate) struct OwnedBuffer<'py> {
    pub(crate) owner: Bound<'py, PyAny>,
    pub(crate) start: *mut u8,
    pub(crate) byte_len: usize,
}

impl OwnedBuffer<'_> {
    /// Exports the memory, writable, through `view`.
    ///
    /// # Safety
    ///
    /// `view` points to a view to fill, and `start` to `byte_len` bytes of the owner.
    pub(crate) unsafe fn fill(&self, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let len = ffi::Py_ssize_t::try_from(self.byte_len)?;
        let (owner, start) = (self.owner.as_ptr(), self.start.cast::<c_void>());
        // SAFETY: a view to fill, as the caller promises. It holds a reference to the owner, which
        // keeps the memory alive until the view is released.
        let failed = unsafe { ffi::PyBuffer_FillInfo(view, owner, start, len, 0, flags) };
        if failed < 0 { Err(PyErr::fetch(self.owner.py())) } else { Ok(()) }
    }
}

/// A C-contiguous array at the start of `slot`, which keeps the slot alive.
pub(crate) fn array_in_slot<'py>(
    slot: &Bound<'py, PySlot>,
    shape: &[usize],
    dtype: Bound<'py, PyArrayDescr>,
) -> PyResult<Bound<'py, PyAny>> {
    array_in(&PySlot::buffer(slot), 0, shape, dtype)
}

/// A writable, C-contiguous array from byte `offset` of `buffer` on, which keeps its owner alive.
pub(crate) fn array_in<'py>(
    buffer: &OwnedBuffer<'py>,
    offset: usize,
    shape: &[usize],
    dtype: Bound<'py, PyArrayDescr>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = buffer.owner.py();
    let end = offset.checked_add(array_byte_len(shape, &dtype)?);
    if end.is_none_or(|end| end > buffer.byte_len) {
        let byte_len = buffer.byte_len;
        return Err(PyValueError::new_err(format!(
            "an array of shape {shape:?} and dtype {dtype} at {offset} does not fit in a slot of \
             {byte_len} bytes"
        )));
    }
    let data = buffer.start.wrapping_add(offset).cast::<c_void>();
    // SAFETY: `shape` x `dtype` fits from `offset` on, as checked above.
    let array = unsafe { created(py, shape, dtype, data) }?;
    let base = buffer.owner.clone().into_ptr();
    // SAFETY: `array` was created above and has no base; the reference `base` is stolen.
    let failed = unsafe { PY_ARRAY_API.PyArray_SetBaseObject(py, array.as_ptr().cast(), base) };
    if failed < 0 { Err(PyErr::fetch(py)) } else { Ok(array) }
}

/// A new C-contiguous array of plain values, whose contents are unspecified.
pub(crate) fn new_array<'py>(
    shape: &[usize],
    dtype: &Bound<'py, PyArrayDescr>,
) -> PyResult<Bound<'py, PyUntypedArray>> {
    let py = dtype.py();
    array_byte_len(shape, dtype)?;
    // SAFETY: the size of the array was checked above.
    let array = unsafe { created(py, shape, dtype.clone(), ptr::null_mut()) }?;
    // SAFETY: an array, as created above.
    Ok(unsafe { array.cast_into_unchecked::<PyUntypedArray>() })
}

/// A C-contiguous array at `data`; in memory of its own, if that is null.
///
/// # Safety
///
/// `array_byte_len` has accepted `shape` and `dtype`, and `data` has as many bytes if it is not null.
unsafe fn created<'py>(
    py: Python<'py>,
    shape: &[usize],
    dtype: Bound<'py, PyArrayDescr>,
    data: *mut c_void,
) -> PyResult<Bound<'py, PyAny>> {
    let ndim = c_int::try_from(shape.len())?;
    // Lengths were checked to be at most `isize::MAX`, so the cast keeps their values.
    let dims = shape.as_ptr().cast_mut().cast::<npy_intp>();
    let flags = if data.is_null() { 0 } else { npyffi::NPY_ARRAY_WRITEABLE };
    // SAFETY: NumPy's own type object; the API table loads or panics on first use.
    let subtype = unsafe { npyffi::get_type_object(py, NpyTypes::PyArray_Type) };
    // SAFETY: as the caller promises; NumPy copies the dims and steals the reference to the dtype.
    let created = unsafe {
        PY_ARRAY_API.PyArray_NewFromDescr(
            py,
            subtype,
            dtype.into_dtype_ptr(),
            ndim,
            dims,
            ptr::null_mut(),
            data,
            flags,
            ptr::null_mut(),
        )
    };
    // SAFETY: a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, created) }
}

/// A new C-contiguous array of plain values with these bytes.
pub(crate) fn array_of<'py>(
    shape: &[usize],
    dtype: &Bound<'py, PyArrayDescr>,
    bytes: &[u8],
) -> PyResult<Bound<'py, PyAny>> {
    assert_eq!(array_byte_len(shape, dtype)?, bytes.len(), "an array has the bytes of its shape");
    let array = new_array(shape, dtype)?;
    // SAFETY: the new array has as many bytes, as asserted above, and nobody else knows it.
    let mut memory = unsafe { Destination::new(start_of(&array), bytes.len()) };
    Bytes::from(bytes).copy_to(&mut memory);
    Ok(array.into_any())
}

/// A NumPy scalar with these bytes.
pub(crate) fn scalar_of<'py>(
    dtype: &Bound<'py, PyArrayDescr>,
    bytes: &[u8],
) -> PyResult<Bound<'py, PyAny>> {
    assert!(
        is_plain(dtype) && bytes.len() == dtype.itemsize(),
        "a scalar has the bytes of one value"
    );
    let data = bytes.as_ptr().cast_mut().cast::<c_void>();
    // SAFETY: NumPy copies the bytes of a value of this dtype from `data`.
    let scalar = unsafe {
        PY_ARRAY_API.PyArray_Scalar(dtype.py(), data, dtype.as_dtype_ptr(), ptr::null_mut())
    };
    // SAFETY: a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(dtype.py(), scalar) }
}

/// The array of NumPy's scalars of numbers, if all are of the exact type of the first.
pub(crate) fn stacked_scalars<'py>(scalars: &Bound<'py, PyList>) -> Option<Bound<'py, PyAny>> {
    let py = scalars.py();
    let scalars = scalars.to_tuple();
    let kind = scalars.get_borrowed_item(0).ok()?.get_type();
    // SAFETY: NumPy's own type object; the API table loads or panics on first use.
    let generic = unsafe { npyffi::get_type_object(py, NpyTypes::PyGenericArrType_Type) };
    // SAFETY: two type objects.
    if unsafe { ffi::PyType_IsSubtype(kind.as_type_ptr(), generic) } == 0 {
        return None;
    }
    // SAFETY: the type of a scalar of NumPy.
    let dtype = unsafe { PY_ARRAY_API.PyArray_DescrFromTypeObject(py, kind.as_ptr()) };
    // SAFETY: a new reference, or null with an exception set.
    let dtype = unsafe { Bound::from_owned_ptr_or_err(py, dtype.cast()) }.ok()?;
    let dtype = dtype.cast_into::<PyArrayDescr>().ok()?;
    let is_own = dtype.num() < NPY_TYPES::NPY_USERDEF as c_int; // others have scalars of any layout
    if !is_own || !b"biufc".contains(&dtype.kind()) || !dtype.typeobj().is(&kind) {
        return None;
    }
    let array = new_array(&[scalars.len()], &dtype).ok()?;
    for (at, scalar) in scalars.iter_borrowed().enumerate() {
        if !scalar.get_type().is(&kind) {
            return None;
        }
        let row = start_of(&array).wrapping_add(at * dtype.itemsize()).cast::<c_void>();
        // SAFETY: a scalar of this dtype, and a row of the new array, which nobody else knows.
        unsafe { PY_ARRAY_API.PyArray_ScalarAsCtype(py, scalar.as_ptr(), row) };
    }
    Some(array.into_any())
}

/// `object` as an array, if it is one and of no derived class.
pub(crate) fn as_array<'a, 'py>(
    object: Borrowed<'a, 'py, PyAny>,
) -> Option<Borrowed<'a, 'py, PyUntypedArray>> {
    // SAFETY: the check is valid for any object.
    if unsafe { npyffi::PyArray_CheckExact(object.py(), object.as_ptr()) } == 0 {
        return None;
    }
    // SAFETY: an array, as checked above.
    Some(unsafe { object.cast_unchecked::<PyUntypedArray>() })
}

/// `object` as an array, if it is a C-contiguous one of plain bytes.
pub(crate) fn as_plain_array<'a, 'py>(
    object: Borrowed<'a, 'py, PyAny>,
) -> Option<Borrowed<'a, 'py, PyUntypedArray>> {
    let array = as_array(object)?;
    (array.is_c_contiguous() && is_plain(&array.dtype())).then_some(array)
}

/// The first byte of `array`.
pub(crate) fn start_of(array: &Bound<'_, PyUntypedArray>) -> *mut u8 {
    fields(array).data.cast::<u8>()
}

/// The object that owns the memory of `array`; None if `array` does.
pub(crate) fn owner_of<'py>(array: &Bound<'py, PyUntypedArray>) -> Option<Bound<'py, PyAny>> {
    // SAFETY: the base of a live array is null or an object that the array keeps alive.
    unsafe { Bound::from_borrowed_ptr_or_opt(array.py(), fields(array).base) }
}

/// Whether two dtypes are equivalent.
pub(crate) fn same_dtype(a: &Bound<'_, PyArrayDescr>, b: &Bound<'_, PyArrayDescr>) -> bool {
    a.as_dtype_ptr() == b.as_dtype_ptr() || a.is_equiv_to(b)
}

/// A writable, C-contiguous array as rows of bytes of equal length along its first axis.
pub(crate) struct RowBytes<'py> {
    array: Bound<'py, PyUntypedArray>,
    dtype: Bound<'py, PyArrayDescr>,
    start: *mut u8,
    first: usize,
    pub(crate) num_rows: usize,
    pub(crate) row_len: usize,
}

/// How an element can be copied into a row.
pub(crate) enum RowMatch<'a> {
    /// As bytes.
    Bytes(Bytes<'a>),
    /// By NumPy, since its layout differs.
    Values,
    /// Not at all: its type, dtype or shape differs.
    Mismatch,
}

impl<'py> RowBytes<'py> {
    /// The rows of `array` from row `first` on; nothing else may use them while this lives.
    pub(crate) fn of(array: Bound<'py, PyUntypedArray>, first: usize) -> PyResult<Self> {
        let dtype = array.dtype();
        let raw = fields(&array);
        let writable = raw.flags & npyffi::NPY_ARRAY_WRITEABLE != 0;
        if !writable || !array.is_c_contiguous() || array.ndim() == 0 || !is_plain(&dtype) {
            return Err(PyValueError::new_err(format!(
                "rows are copied into a writable, C-contiguous array of plain values, got {}",
                array.as_any().repr()?
            )));
        }
        let row_len = array.shape()[1..].iter().product::<usize>() * dtype.itemsize();
        let first = first.min(array.shape()[0]);
        let start = raw.data.cast::<u8>().wrapping_add(first * row_len);
        let num_rows = array.shape()[0] - first;
        Ok(Self { array, dtype, start, first, num_rows, row_len })
    }

    /// How `element` can be copied into a row of this array.
    pub(crate) fn match_row<'a>(&self, element: Borrowed<'a, 'py, PyAny>) -> RowMatch<'a> {
        let Some(element) = as_array(element) else { return RowMatch::Mismatch };
        if element.shape() != &self.array.shape()[1..] || !self.same_dtype(&element) {
            return RowMatch::Mismatch;
        }
        let start = fields(&element).data.cast::<u8>();
        let is_disjoint = start.addr() + self.row_len <= self.start.addr()
            || self.start.addr() + self.num_rows * self.row_len <= start.addr();
        if !element.is_c_contiguous() || !is_disjoint {
            return RowMatch::Values;
        }
        // SAFETY: a C-contiguous array of this dtype and shape has `row_len` bytes at `start`.
        // `element` is borrowed as long as they are and keeps them valid: `resize` refuses an array
        // that others reference, as the caller of `copy_values` does. If the user writes it before the
        // batch is complete, the row mixes old and new bytes (documented in `IterDataset.batch`).
        RowMatch::Bytes(unsafe { Bytes::new(start, self.row_len) })
    }

    /// Copies `element` to row `at`; returns whether it could be.
    pub(crate) fn put(&mut self, element: &Bound<'py, PyAny>, at: usize) -> PyResult<bool> {
        if at >= self.num_rows {
            return Ok(false);
        }
        match self.match_row(element.as_borrowed()) {
            RowMatch::Bytes(bytes) => bytes.copy_to(&mut self.destination(at, 1)),
            RowMatch::Values => self.copy_values(element, at)?,
            RowMatch::Mismatch => return Ok(false),
        }
        Ok(true)
    }

    fn same_dtype(&self, element: &Bound<'py, PyUntypedArray>) -> bool {
        let descr = fields(element).descr;
        // SAFETY: both are descriptors kept alive by their arrays.
        descr == self.dtype.as_dtype_ptr()
            || unsafe {
                PY_ARRAY_API.PyArray_EquivTypes(element.py(), descr, self.dtype.as_dtype_ptr()) != 0
            }
    }

    /// The memory of `num_rows` rows from `at` on.
    pub(crate) fn destination(&mut self, at: usize, num_rows: usize) -> Destination<'_> {
        assert!(at + num_rows <= self.num_rows, "rows beyond the end of the array");
        let start = self.start.wrapping_add(at * self.row_len);
        // SAFETY: inside the array by the assertion above. `self` keeps the array alive, and no slice
        // of it exists: NumPy and `Bytes` use its address. Nothing else uses the rows, since
        // `BatchBuilder` does not share them before the batch is complete.
        unsafe { Destination::new(start, num_rows * self.row_len) }
    }

    /// Prefetches up to `num_rows` rows from `at` on, which are written soon, during the next
    /// checksums.
    pub(crate) fn prefetch_for_write(&mut self, at: usize, num_rows: usize) {
        let num_rows = num_rows.min(self.num_rows - at);
        let start = self.start.wrapping_add(at * self.row_len);
        write_prefetcher::prefetch_for_write(ptr::slice_from_raw_parts(
            start,
            num_rows * self.row_len,
        ));
    }

    /// Copies the values of `element`, whatever its layout, into row `at`.
    pub(crate) fn copy_values(&self, element: &Bound<'py, PyAny>, at: usize) -> PyResult<()> {
        let row = self
            .array
            .as_any()
            .get_item((self.first + at, pyo3::types::PyEllipsis::get(element.py())))?;
        let (row, element) = (row.cast::<PyUntypedArray>()?, element.cast::<PyUntypedArray>()?);
        // SAFETY: two arrays of the same shape; NumPy checks the rest and sets an exception.
        let failed = unsafe {
            PY_ARRAY_API.PyArray_CopyInto(row.py(), row.as_array_ptr(), element.as_array_ptr())
        };
        if failed < 0 { Err(PyErr::fetch(row.py())) } else { Ok(()) }
    }
}

fn fields<'a>(array: &'a Bound<'_, PyUntypedArray>) -> &'a npyffi::PyArrayObject_fields {
    // SAFETY: a live array object, whose fields are valid as long as it lives.
    unsafe { &(*array.as_array_ptr()).fields }
}
