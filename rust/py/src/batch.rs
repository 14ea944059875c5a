//! Python bindings of the layer `batch`.

use grainmill_core::batch::{self, Arena};
use grainmill_core::bytes::Bytes;
use grainmill_core::compute;
use numpy::{Element, PyArray1, PyArrayDescr, PyUntypedArray};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyFloat, PyInt, PyList};

use crate::array::{PySlot, RowBytes, RowMatch, array_byte_len, array_in_slot, stacked_scalars};
use crate::error::Raised;

/// Copies of at least this many bytes release the GIL.
pub(crate) const MIN_DETACHED_BYTES: usize = 64 << 10;

/// An allocator for the memory of batches, which recycles it when they are dropped.
#[pyclass(frozen, name = "Arena", module = "grainmill._native")]
struct PyArena(Arena);

#[pymethods]
impl PyArena {
    #[new]
    #[pyo3(signature = (max_free_bytes = 1_073_741_824, *, poison = None, shared = false))]
    fn new(max_free_bytes: usize, poison: Option<bool>, shared: bool) -> Self {
        let poison = poison.unwrap_or_else(batch::poison_by_default);
        Self(if shared {
            Arena::shared(poison)
        } else {
            Arena::with_poison(max_free_bytes, poison)
        })
    }

    /// Allocates a slot of `byte_len` bytes, whose contents are unspecified.
    fn slot(&self, byte_len: usize) -> Result<PySlot, Raised> {
        Ok(PySlot(self.0.slot(byte_len)?))
    }

    /// Allocates an array in a slot of its own; its contents are unspecified.
    fn array<'py>(
        &self,
        py: Python<'py>,
        shape: Vec<usize>,
        dtype: Bound<'py, PyArrayDescr>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let slot = self.slot(array_byte_len(&shape, &dtype)?)?;
        array_in_slot(&Bound::new(py, slot)?, &shape, dtype)
    }

    /// Bytes of the free slots.
    #[getter]
    fn free_bytes(&self) -> usize {
        self.0.free_bytes()
    }

    /// Bytes of all slots, in use and free.
    #[getter]
    fn total_bytes(&self) -> usize {
        self.0.total_bytes()
    }

    /// Bytes of memory that the arena would have to allocate for a slot of `byte_len` bytes.
    fn growth(&self, byte_len: usize) -> usize {
        self.0.growth(byte_len)
    }

    /// Returns free slots to the system until at most `max_free_bytes` are free; returns the ids by
    /// which other processes know them.
    fn trim(&self, max_free_bytes: usize) -> Vec<u64> {
        self.0.trim(max_free_bytes)
    }
}

/// Copies `elements` into the rows of `array` from row `at` on, up to the first element that is not
/// an array of the dtype and shape of a row; returns the number of rows copied.
///
/// Nothing else may read or write these rows meanwhile. `hot` states that the elements were just
/// computed on this thread.
#[pyfunction]
#[pyo3(signature = (array, elements, at, *, hot))]
fn copy_rows<'py>(
    array: Bound<'py, PyUntypedArray>,
    elements: Bound<'py, PyList>,
    at: usize,
    hot: bool,
) -> PyResult<usize> {
    // The list may change while the copy runs without the GIL: own its elements.
    copy_values(array, &elements.iter().collect::<Vec<_>>(), at, hot)
}

/// See `copy_rows`.
pub(crate) fn copy_values<'py>(
    array: Bound<'py, PyUntypedArray>,
    values: &[Bound<'py, PyAny>],
    at: usize,
    hot: bool,
) -> PyResult<usize> {
    let py = array.py();
    let mut rows = RowBytes::of(array, at)?;
    let mut pending = Vec::with_capacity(values.len());
    let mut num_copied = 0;
    for value in values.iter().take(rows.num_rows) {
        match rows.match_row(value.as_borrowed()) {
            RowMatch::Bytes(bytes) => pending.push(bytes),
            RowMatch::Values => {
                num_copied += copy_bytes(py, &mut rows, num_copied, &mut pending, hot);
                rows.copy_values(value, num_copied)?;
                num_copied += 1;
            }
            RowMatch::Mismatch => break,
        }
    }
    num_copied += copy_bytes(py, &mut rows, num_copied, &mut pending, hot);
    if hot {
        // As many rows are likely to follow once their records are read.
        rows.prefetch_for_write(num_copied, num_copied);
    }
    Ok(num_copied)
}

/// Moves `pending` into consecutive rows from `at` on; returns how many there were.
fn copy_bytes(
    py: Python<'_>,
    rows: &mut RowBytes<'_>,
    at: usize,
    pending: &mut Vec<Bytes<'_>>,
    hot: bool,
) -> usize {
    let (num_rows, row_len) = (pending.len(), rows.row_len);
    let out = rows.destination(at, num_rows);
    if out.len() < MIN_DETACHED_BYTES {
        batch::copy_rows(pending, row_len, out);
    } else if hot {
        // They are in the cache of this core, and would have to leave it first.
        py.detach(|| batch::copy_rows(pending, row_len, out));
    } else {
        py.detach(|| batch::copy_rows_shared(pending, row_len, out));
    }
    pending.clear();
    num_rows
}

/// An array of numbers of one exact type, as NumPy would stack them: `int` becomes int64, `float`
/// float64, `bool` bool, and scalars of NumPy keep their dtype. None for any other list, and for
/// integers beyond 64 bits.
#[pyfunction]
pub(crate) fn scalars_to_rows<'py>(elements: &Bound<'py, PyList>) -> Option<Bound<'py, PyAny>> {
    let first = elements.get_item(0).ok()?;
    if first.is_exact_instance_of::<PyInt>() {
        stacked::<i64, PyInt>(elements)
    } else if first.is_exact_instance_of::<PyFloat>() {
        stacked::<f64, PyFloat>(elements)
    } else if first.is_exact_instance_of::<PyBool>() {
        stacked::<bool, PyBool>(elements)
    } else {
        stacked_scalars(elements)
    }
}

fn stacked<'py, T, P>(elements: &Bound<'py, PyList>) -> Option<Bound<'py, PyAny>>
where
    T: Element + for<'a> FromPyObject<'a, 'py>,
    P: pyo3::PyTypeInfo,
{
    let mut values = Vec::with_capacity(elements.len());
    for element in elements.to_tuple().iter_borrowed() {
        let value = element.is_exact_instance_of::<P>().then(|| element.extract::<T>().ok());
        values.push(value??);
    }
    Some(PyArray1::from_vec(elements.py(), values).into_any())
}

/// The cores that this process may use, by its affinity and the quota of its control group.
#[pyfunction]
fn num_cores() -> usize {
    compute::num_cores()
}

/// Limits the threads that share loops of the engine to `count`, the calling ones included.
#[pyfunction]
fn limit_threads(count: usize) {
    compute::limit_threads(count);
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyArena>()?;
    module.add_class::<PySlot>()?;
    module.add_function(wrap_pyfunction!(copy_rows, module)?)?;
    module.add_function(wrap_pyfunction!(num_cores, module)?)?;
    module.add_function(wrap_pyfunction!(limit_threads, module)?)?;
    module.add_function(wrap_pyfunction!(scalars_to_rows, module)?)
}
