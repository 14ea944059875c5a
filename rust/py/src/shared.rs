//! Python bindings for arrays sent between processes in shared slots.

use std::ffi::c_int;

use grainmill_core::batch::SharedBudget;
use grainmill_core::batch::{self, ALIGNMENT, BorrowedSlot, RemoteSlots};
use grainmill_core::bytes::Destination;
use grainmill_core::platform;
use numpy::{
    PyArray1, PyArray2, PyArrayDescr, PyArrayDescrMethods, PyArrayMethods, PyReadonlyArray2,
    PyUntypedArray, PyUntypedArrayMethods,
};
use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::array::{
    OwnedBuffer, PySlot, array_byte_len, array_in, as_plain_array, owner_of, same_dtype, start_of,
};
use crate::array_bytes::bytes_of;
use crate::error::Raised;

/// The slots of one other process that this one has mapped.
///
/// The bytes of a slot are reserved in `shared_budget`, if given, except while it is borrowed: memory
/// that the user holds does not count.
#[pyclass(frozen, name = "RemoteSlots", module = "grainmill._native")]
struct PyRemoteSlots {
    remote_slots: RemoteSlots,
    shared_budget: Option<Py<PySharedBudget>>,
}

/// A slot of another process, as writable bytes; it is returned when the last array or buffer over it
/// is dropped.
#[pyclass(frozen, name = "BorrowedSlot", module = "grainmill._native")]
struct PyBorrowedSlot(BorrowedSlot);

#[pymethods]
impl PyRemoteSlots {
    #[new]
    #[pyo3(signature = (shared_budget = None, *, poison = None))]
    fn new(shared_budget: Option<Py<PySharedBudget>>, poison: Option<bool>) -> Self {
        Self {
            remote_slots: RemoteSlots::new(poison.unwrap_or_else(batch::poison_by_default)),
            shared_budget,
        }
    }

    /// Maps slot `slot`. Closes the descriptor.
    #[expect(unsafe_code, reason = "Python passes file descriptors as integers")]
    fn add(&self, slot: u64, file: c_int, byte_len: usize) -> PyResult<()> {
        // SAFETY: the caller received the descriptor from the slot's owner and transfers its ownership.
        let file = unsafe { platform::from_descriptor(file) }?;
        Ok(self.remote_slots.add(slot, platform::borrowed(&file), byte_len).map_err(Raised)?)
    }

    /// Borrows slot `slot`, which its owner has just sent.
    fn borrow(&self, slot: u64) -> Result<PyBorrowedSlot, Raised> {
        let borrowed = self.remote_slots.borrow(slot)?;
        if let Some(shared_budget) = &self.shared_budget {
            shared_budget.get().0.release(borrowed.byte_len() as u64)?;
        }
        Ok(PyBorrowedSlot(borrowed))
    }

    /// The slots returned since the last call, to be reported to their owner.
    fn take_returned(&self) -> Vec<u64> {
        let (slots, byte_len) = self.remote_slots.take_returned();
        if let Some(shared_budget) = &self.shared_budget {
            shared_budget.get().0.reserve_anyway(byte_len as u64);
        }
        slots
    }

    /// The slots retired since the last call, because a forked child may see them, to be reported to
    /// their owner.
    fn take_retired_by_fork(&self) -> Vec<u64> {
        self.remote_slots.take_retired_by_fork()
    }

    /// Forgets slot `slot`; its memory is unmapped with its last user.
    fn forget(&self, slot: u64) {
        self.remote_slots.forget(slot);
    }
}

#[pymethods]
impl PyBorrowedSlot {
    fn __len__(&self) -> usize {
        self.0.byte_len()
    }

    /// A writable array over the bytes from `offset` on.
    fn array<'py>(
        slf: &Bound<'py, Self>,
        offset: usize,
        shape: Vec<usize>,
        dtype: Bound<'py, PyArrayDescr>,
    ) -> PyResult<Bound<'py, PyAny>> {
        array_in(&Self::buffer(slf), offset, &shape, dtype)
    }

    /// Arrays in order from `offset` on, as `write_arrays` writes them; `shapes` has a row for each.
    fn arrays<'py>(
        slf: &Bound<'py, Self>,
        offset: usize,
        shapes: PyReadonlyArray2<'py, i64>,
        dtype: Bound<'py, PyArrayDescr>,
    ) -> PyResult<Bound<'py, PyList>> {
        let buffer = Self::buffer(slf);
        let list = PyList::empty(slf.py());
        let mut at = offset;
        let mut shape = Vec::new();
        for row in shapes.as_array().rows() {
            shape.clear();
            for &len in row {
                shape.push(usize::try_from(len)?);
            }
            list.append(array_in(&buffer, at, &shape, dtype.clone())?)?;
            at += padded(array_byte_len(&shape, &dtype)?);
        }
        Ok(list)
    }

    /// # Safety
    ///
    /// Called only by the interpreter, with a `view` to fill.
    #[expect(unsafe_code, reason = "the buffer protocol is a C interface")]
    unsafe fn __getbuffer__(
        slf: &Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        // SAFETY: the interpreter passes a view to fill.
        unsafe { Self::buffer(slf).fill(view, flags) }
    }
}

impl PyBorrowedSlot {
    fn buffer<'py>(slf: &Bound<'py, Self>) -> OwnedBuffer<'py> {
        let slot = &slf.get().0;
        OwnedBuffer { owner: slf.as_any().clone(), start: slot.as_ptr(), byte_len: slot.byte_len() }
    }
}

/// The size of an array of `byte_len` bytes in a slot, including padding for alignment.
fn padded(byte_len: usize) -> usize {
    byte_len.next_multiple_of(ALIGNMENT)
}

/// The dtype, the shapes, one per row, and the number of bytes that `write_arrays` needs.
type PackedArrays<'py> = (Bound<'py, PyArrayDescr>, Bound<'py, PyArray2<i64>>, usize);

/// The common layout of `elements`, if they are plain C-contiguous arrays of one dtype and number of
/// dimensions.
#[pyfunction]
fn common_layout<'py>(elements: &Bound<'py, PyList>) -> PyResult<Option<PackedArrays<'py>>> {
    let py = elements.py();
    let elements = elements.to_tuple();
    let mut common: Option<(Bound<'py, PyArrayDescr>, usize)> = None;
    let mut shapes = Vec::with_capacity(elements.len());
    let mut byte_len = 0;
    for element in elements.iter_borrowed() {
        let Some(array) = as_plain_array(element) else { return Ok(None) };
        let (dtype, ndim) = common.get_or_insert_with(|| (array.dtype(), array.ndim()));
        if array.ndim() != *ndim || !same_dtype(&array.dtype(), dtype) {
            return Ok(None);
        }
        for &len in array.shape() {
            shapes.push(i64::try_from(len)?);
        }
        byte_len += padded(array.len() * dtype.itemsize());
    }
    let Some((dtype, ndim)) = common else { return Ok(None) };
    let shapes = PyArray1::from_vec(py, shapes).reshape([elements.len(), ndim])?;
    Ok(Some((dtype, shapes, byte_len)))
}

/// Copies arrays with a `common_layout` in order into `slot` from byte `offset` on, each aligned to
/// 64 bytes. Nothing else may use these bytes meanwhile.
#[pyfunction]
fn write_arrays(
    slot: &Bound<'_, PySlot>,
    offset: usize,
    elements: &Bound<'_, PyList>,
) -> PyResult<()> {
    let slot = &slot.get().0;
    let mut at = offset;
    for element in elements.to_tuple().iter_borrowed() {
        let array = as_plain_array(element).ok_or_else(|| {
            PyValueError::new_err("elements must be C-contiguous arrays of plain values")
        })?;
        let byte_len = array.len() * array.dtype().itemsize();
        if at.checked_add(byte_len).is_none_or(|end| end > slot.byte_len()) {
            return Err(PyValueError::new_err("the arrays do not fit in the slot"));
        }
        if byte_len > 0
            && start_of(&array).addr().wrapping_sub(slot.as_ptr().addr()) < slot.byte_len()
        {
            return Err(PyValueError::new_err(
                "an array to be written to a slot must lie elsewhere, got one in that slot",
            ));
        }
        let bytes = bytes_of(&array);
        #[expect(unsafe_code, reason = "a slot that Python holds returns only a raw pointer")]
        // SAFETY: inside the slot, as checked above, and `slot` keeps it alive. No slice of a slot that
        // Python holds exists. Nothing else uses these bytes, since `SharedArena` does not share a
        // new slot before its message is sent.
        let destination = unsafe { Destination::new(slot.as_ptr().wrapping_add(at), byte_len) };
        batch::copy_rows(&[bytes], byte_len, destination);
        at += padded(byte_len);
    }
    Ok(())
}

/// Dicts with the keys `names`, one per row of `columns`, of which each has the values of a name; all
/// are of equal length. Several times as fast as Python for many dicts.
#[pyfunction]
fn dicts_of<'py>(
    names: &Bound<'py, PyList>,
    columns: Vec<Bound<'py, PyList>>,
) -> PyResult<Bound<'py, PyList>> {
    let (py, names) = (names.py(), names.to_tuple());
    let columns: Vec<_> = columns.iter().map(PyListMethods::to_tuple).collect();
    let count = columns.first().map_or(0, PyTupleMethods::len);
    if columns.len() != names.len() || columns.iter().any(|column| column.len() != count) {
        return Err(PyValueError::new_err(
            "`columns` must have one list per name, all of equal length",
        ));
    }
    let dicts = PyList::empty(py);
    for row in 0..count {
        let dict = PyDict::new(py);
        for (name, column) in names.iter_borrowed().zip(&columns) {
            dict.set_item(name, column.get_borrowed_item(row)?)?;
        }
        dicts.append(dict)?;
    }
    Ok(dicts)
}

/// The shared slot that holds the bytes of `array`, and their offset in it; None if `array` is not a
/// C-contiguous array in a shared slot.
#[pyfunction]
fn slot_of<'py>(array: &Bound<'py, PyAny>) -> Option<(Bound<'py, PySlot>, usize)> {
    let array = as_plain_array(array.as_borrowed())?;
    let mut owner = owner_of(&array)?;
    while let Ok(base) = owner.cast::<PyUntypedArray>() {
        owner = owner_of(base)?;
    }
    let slot = owner.cast_into::<PySlot>().ok()?;
    slot.get().0.shared_id()?;
    let offset = start_of(&array).addr().checked_sub(slot.get().0.as_ptr().addr())?;
    Some((slot, offset))
}

/// Must be called before this process forks: the child sees the slots that are borrowed now.
#[pyfunction]
fn before_fork() {
    batch::before_fork();
}

/// Must be called in parent and child after a fork that was announced by `before_fork`.
#[pyfunction]
fn after_fork() {
    batch::after_fork();
}

/// The number of bytes that the engine has copied in this process.
#[pyfunction]
fn copied_bytes() -> u64 {
    batch::copied_bytes()
}

/// A page shared by a pool of processes: their common memory budget, and the progress of each.
#[pyclass(frozen, name = "SharedBudget", module = "grainmill._native")]
struct PySharedBudget(SharedBudget);

#[pymethods]
impl PySharedBudget {
    /// Creates a page for `num_processes`; returns it with its file descriptor, which the caller closes.
    #[staticmethod]
    fn create(num_processes: usize, budget_bytes: u64) -> Result<(Self, c_int), Raised> {
        let (shared_budget, file) = SharedBudget::create(num_processes, budget_bytes)?;
        Ok((Self(shared_budget), platform::into_descriptor(file)))
    }

    /// Maps the page of a file descriptor in another process. Closes the descriptor.
    #[staticmethod]
    #[expect(unsafe_code, reason = "Python passes file descriptors as integers")]
    fn open(file: c_int, num_processes: usize, budget_bytes: u64) -> PyResult<Self> {
        // SAFETY: the caller received the descriptor from the page's owner and transfers its ownership.
        let file = unsafe { platform::from_descriptor(file) }?;
        let file = platform::borrowed(&file);
        Ok(Self(SharedBudget::open(file, num_processes, budget_bytes).map_err(Raised)?))
    }

    /// Reserves `byte_len` bytes if `spare_bytes` more would fit, too; returns whether it did.
    #[pyo3(signature = (byte_len, spare_bytes = 0))]
    fn reserve(&self, byte_len: u64, spare_bytes: u64) -> bool {
        self.0.reserve(byte_len, spare_bytes)
    }

    /// Reserves `byte_len` bytes even beyond the budget; returns whether they are within it.
    fn reserve_anyway(&self, byte_len: u64) -> bool {
        self.0.reserve_anyway(byte_len)
    }

    /// Releases reserved bytes; an error if fewer are reserved.
    fn release(&self, byte_len: u64) -> Result<(), Raised> {
        Ok(self.0.release(byte_len)?)
    }

    /// The number of bytes reserved.
    #[getter]
    fn reserved(&self) -> u64 {
        self.0.reserved()
    }

    /// Sets the progress of process `number`.
    fn set_progress(&self, number: usize, progress: u64) -> Result<(), Raised> {
        Ok(self.0.set_progress(number, progress)?)
    }

    /// The progress of process `number`, 0 at first.
    fn progress(&self, number: usize) -> Result<u64, Raised> {
        Ok(self.0.progress(number)?)
    }
}

/// Makes the system kill this process when the thread of its parent that created it exits; returns
/// false if `parent` is not, or no longer, its parent.
#[pyfunction]
fn die_with_parent(parent: u32) -> PyResult<bool> {
    Ok(platform::die_with_parent(parent)?)
}

/// An anonymous file of `byte_len` zero bytes that cannot be resized; returns its descriptor, which the
/// caller closes. Not every Python for Linux has `os.memfd_create`.
#[pyfunction]
fn create_shared_file(name: &str, byte_len: u64) -> PyResult<c_int> {
    Ok(platform::into_descriptor(platform::shared_file(name, byte_len)?))
}

/// The descriptor of a file that becomes readable when the process `pid` ends; the caller closes it.
/// Not every Python for Linux has `os.pidfd_open`.
#[pyfunction]
fn open_process_file(pid: u32) -> PyResult<c_int> {
    Ok(platform::into_descriptor(platform::process_file(pid)?))
}

/// CPU seconds of the thread `native_id` of this process, and seconds in which it waited for a core;
/// `None` where the system has none. A signal handler cannot raise between its steps, as it could
/// while Python reads the file.
#[pyfunction]
fn thread_times(native_id: u32) -> Option<(f64, f64)> {
    let (cpu, waited) = platform::thread_times(native_id)?;
    Some((cpu.as_secs_f64(), waited.as_secs_f64()))
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyRemoteSlots>()?;
    module.add_class::<PyBorrowedSlot>()?;
    module.add_class::<PySharedBudget>()?;
    module.add_function(wrap_pyfunction!(common_layout, module)?)?;
    module.add_function(wrap_pyfunction!(write_arrays, module)?)?;
    module.add_function(wrap_pyfunction!(dicts_of, module)?)?;
    module.add_function(wrap_pyfunction!(slot_of, module)?)?;
    module.add_function(wrap_pyfunction!(before_fork, module)?)?;
    module.add_function(wrap_pyfunction!(after_fork, module)?)?;
    module.add_function(wrap_pyfunction!(copied_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(die_with_parent, module)?)?;
    module.add_function(wrap_pyfunction!(create_shared_file, module)?)?;
    module.add_function(wrap_pyfunction!(open_process_file, module)?)?;
    module.add_function(wrap_pyfunction!(thread_times, module)?)
}
