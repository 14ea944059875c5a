//! Python bindings of the layer `order`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use grainmill_core::order::{Column, MixSchedule, Permutation, RecentChoices, Resolver, Tree};
use grainmill_core::order::{resolve, seed, window};
use grainmill_core::try_alloc::try_with_capacity;
use grainmill_core::{Error, Result};
use numpy::{PyArray1, PyReadonlyArray1};
use pyo3::exceptions::{PyRecursionError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyString, PyTuple};

use crate::error::Raised;

/// Shorter blocks do not release the GIL: that would cost more than their computation.
const MIN_DETACHED_LEN: usize = 4096;
/// The maximum depth of a plan; the functions over it are recursive.
const MAX_DEPTH: usize = 1000;

/// Calls `compute`, without the GIL if the block is long.
fn detached_if_long<T: Send>(py: Python<'_>, len: usize, compute: impl FnOnce() -> T + Send) -> T {
    if len < MIN_DETACHED_LEN { compute() } else { py.detach(compute) }
}

/// A permutation of `0..num_records`, selected by a seed.
#[pyclass(name = "Permutation", module = "grainmill._native", frozen)]
struct PyPermutation(Permutation);

#[pymethods]
impl PyPermutation {
    #[new]
    #[pyo3(signature = (num_records, seed, rounds = 4))]
    fn new(num_records: u64, seed: u32, rounds: u32) -> Result<Self, Raised> {
        Ok(Self(Permutation::new(num_records, seed, rounds)?))
    }

    /// The permuted indices of `index`.
    fn apply<'py>(
        &self,
        py: Python<'py>,
        index: PyReadonlyArray1<'py, i64>,
    ) -> Result<Bound<'py, PyArray1<i64>>, Raised> {
        self.permuted(py, index.as_array().to_vec())
    }

    /// The permuted indices of the `count` records from `start` on.
    fn block<'py>(
        &self,
        py: Python<'py>,
        start: i64,
        count: usize,
    ) -> Result<Bound<'py, PyArray1<i64>>, Raised> {
        self.permuted(py, resolve::range(start, count)?)
    }

    fn __len__(&self) -> usize {
        usize::try_from(self.0.num_records()).unwrap_or(usize::MAX)
    }
}

impl PyPermutation {
    fn permuted<'py>(
        &self,
        py: Python<'py>,
        mut index: Vec<i64>,
    ) -> Result<Bound<'py, PyArray1<i64>>, Raised> {
        detached_if_long(py, index.len(), || self.0.apply_block(&mut index))?;
        Ok(PyArray1::from_vec(py, index))
    }
}

/// The order in which the datasets of a mixture alternate.
#[pyclass(name = "MixSchedule", module = "grainmill._native", frozen)]
struct PyMixSchedule {
    schedule: MixSchedule,
    recent: Mutex<RecentChoices>,
}

type Choices<'py> = (Bound<'py, PyArray1<u32>>, Bound<'py, PyArray1<i64>>);

#[pymethods]
impl PyMixSchedule {
    #[new]
    fn new(proportions: Vec<u64>) -> Result<Self, Raised> {
        let schedule = MixSchedule::new(&proportions)?;
        Ok(Self { schedule, recent: Mutex::default() })
    }

    /// For `count` positions from `start` on: the dataset, and the position in it.
    fn choose<'py>(
        &self,
        py: Python<'py>,
        start: i64,
        count: usize,
    ) -> Result<Choices<'py>, Raised> {
        let end = resolve::range_end(start, count)?;
        let (datasets, keys) = detached_if_long(py, count, || {
            let mut datasets = try_with_capacity(count, || format!("{count} choices"))?;
            let mut keys = try_with_capacity(count, || format!("{count} choices"))?;
            // Never waits: in a forked child, a thread of the parent may hold the lock.
            let mut cached = self.recent.try_lock();
            let mut fresh = RecentChoices::default();
            let recent = cached.as_deref_mut().unwrap_or(&mut fresh);
            self.schedule.choose_block(recent, start..end, |(dataset, key)| {
                datasets.push(dataset);
                keys.push(key);
            });
            Ok::<_, Error>((datasets, keys))
        })?;
        Ok((PyArray1::from_vec(py, datasets), PyArray1::from_vec(py, keys)))
    }
}

/// The index stages of a plan, compiled for blocks of positions.
#[pyclass(name = "Resolver", module = "grainmill._native", frozen)]
struct PyResolver {
    resolver: Mutex<Resolver>,
    owner: u32,
    /// Used by a forked child if a thread of the parent holds the lock.
    pristine: Resolver,
}

#[pymethods]
impl PyResolver {
    #[new]
    fn new(tree: &Bound<'_, PyTuple>) -> PyResult<Self> {
        let pristine =
            Resolver::new(tree_from(tree, 0, &mut SharedTrees::new())?).map_err(Raised::from)?;
        let resolver = Mutex::new(pristine.clone());
        Ok(Self { resolver, owner: std::process::id(), pristine })
    }

    /// Resolves the positions `index` at the leaves and taps: `{id: (rows, index, parts)}`.
    fn resolve<'py>(
        &self,
        py: Python<'py>,
        index: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let Ok(index) = index.extract::<PyReadonlyArray1<'py, i64>>() else {
            let index: Vec<i128> =
                index.try_iter()?.map(|at| at?.extract()).collect::<PyResult<_>>()?;
            return self.columns(py, index.len(), |resolver| resolver.resolve_wide(&index));
        };
        let index = index.as_array();
        if let Some(index) = index.as_slice() {
            return self.columns(py, index.len(), |resolver| resolver.resolve(index));
        }
        let index = index.to_vec();
        self.columns(py, index.len(), |resolver| resolver.resolve(&index))
    }

    /// Resolves `count` positions from `start` on at the leaves and taps.
    fn resolve_range<'py>(
        &self,
        py: Python<'py>,
        start: i128,
        count: usize,
    ) -> PyResult<Bound<'py, PyDict>> {
        self.columns(py, count, |resolver| resolver.resolve_range(start, count))
    }
}

impl PyResolver {
    fn columns<'py>(
        &self,
        py: Python<'py>,
        len: usize,
        compute: impl FnOnce(&mut Resolver) -> Result<Vec<Column>> + Send,
    ) -> PyResult<Bound<'py, PyDict>> {
        // Never waits for the lock while holding the GIL. A panic under it leaves only a cache, which
        // is still valid.
        let columns = match self.resolver.try_lock() {
            Ok(mut resolver) if len < MIN_DETACHED_LEN => compute(&mut resolver),
            Err(TryLockError::WouldBlock) if self.owner != std::process::id() => {
                py.detach(|| compute(&mut self.pristine.clone()))
            }
            other => {
                drop(other);
                let wait = || self.resolver.lock().unwrap_or_else(PoisonError::into_inner);
                py.detach(|| compute(&mut wait()))
            }
        };
        let result = PyDict::new(py);
        for Column { id, rows, index, wide, parts } in columns.map_err(Raised::from)? {
            let rows = rows.map(|rows| PyArray1::from_vec(py, rows));
            let parts = parts.map(|parts| PyArray1::from_vec(py, parts));
            let index = match wide {
                None => PyArray1::from_vec(py, index).into_any(),
                Some(wide) => integers(py, &wide)?,
            };
            result.set_item(id, (rows, index, parts))?;
        }
        Ok(result)
    }
}

/// An array of Python's integers.
fn integers<'py>(py: Python<'py>, values: &[i128]) -> PyResult<Bound<'py, PyAny>> {
    let objects: PyResult<Vec<Py<PyAny>>> =
        values.iter().map(|&value| Ok(value.into_pyobject(py)?.into_any().unbind())).collect();
    Ok(PyArray1::from_vec(py, objects?).into_any())
}

/// The shared trees until now, by the tuple that each comes from, which is kept alive.
type SharedTrees<'py> = HashMap<*mut ffi::PyObject, (Bound<'py, PyTuple>, Arc<Tree>)>;

/// Parses stages from nested tuples, each `(name, parameters..., child)`.
fn tree_from<'py>(
    node: &Bound<'py, PyTuple>,
    depth: usize,
    shared: &mut SharedTrees<'py>,
) -> PyResult<Tree> {
    if depth > MAX_DEPTH {
        return Err(PyRecursionError::new_err(format!(
            "a plan may have at most {MAX_DEPTH} nested index stages, got more"
        )));
    }
    let name = node.get_item(0)?.cast_into::<PyString>()?;
    let name = name.to_cow()?;
    let mismatch =
        || PyValueError::new_err(format!("there is no stage `{name}` with {} fields", node.len()));
    let mut child = || -> PyResult<Box<Tree>> {
        let child = node.get_item(node.len() - 1)?;
        Ok(Box::new(tree_from(child.cast::<PyTuple>()?, depth + 1, shared)?))
    };
    let signed = |field: usize| -> PyResult<i64> { node.get_item(field)?.extract() };
    let count = |field: usize| -> PyResult<u64> { node.get_item(field)?.extract() };
    let word = |field: usize| -> PyResult<u32> { node.get_item(field)?.extract() };
    Ok(match (&*name, node.len()) {
        ("leaf", 3) => Tree::Leaf { id: word(1)?, part: word(2)? },
        ("numbers", 6) => Tree::Numbers {
            id: word(1)?,
            part: word(2)?,
            start: signed(3)?,
            step: signed(4)?,
            num_records: count(5)?,
        },
        ("tap", 4) => Tree::Tap { id: word(1)?, part: word(2)?, child: child()? },
        ("shuffle", 4) => Tree::Shuffle { num_records: count(1)?, seed: word(2)?, child: child()? },
        ("window_shuffle", 5) => Tree::WindowShuffle {
            num_records: count(1)?,
            window_size: count(2)?,
            seed: word(3)?,
            child: child()?,
        },
        ("group_shuffle", 4) => {
            let lens = node.get_item(1)?.extract()?;
            Tree::GroupShuffle { lens, seed: word(2)?, child: child()? }
        }
        ("slice", 6) => Tree::Slice {
            start: signed(1)?,
            step: signed(2)?,
            num_records: count(3)?,
            parent_len: count(4)?,
            child: child()?,
        },
        ("wrap", 3) => Tree::Wrap { num_records: count(1)?, child: child()? },
        ("take", 4) => {
            let indices = node.get_item(1)?.extract::<PyReadonlyArray1<'_, i64>>()?;
            let indices = indices.as_array().to_vec();
            Tree::Take { indices, parent_len: count(2)?, child: child()? }
        }
        ("shared", 2) => {
            let key = node.as_ptr();
            if let Some((_, tree)) = shared.get(&key) {
                return Ok(Tree::Shared(Arc::clone(tree)));
            }
            let child = node.get_item(1)?;
            let tree = Arc::new(tree_from(child.cast::<PyTuple>()?, depth + 1, shared)?);
            shared.insert(key, (node.clone(), Arc::clone(&tree)));
            Tree::Shared(tree)
        }
        ("mix", 3) => {
            let children = children_from(node, depth, shared)?;
            Tree::Mix { proportions: node.get_item(1)?.extract()?, children }
        }
        ("concatenate", 3) => {
            let children = children_from(node, depth, shared)?;
            Tree::Concatenate { lengths: node.get_item(1)?.extract()?, children }
        }
        _ => return Err(mismatch()),
    })
}

fn children_from<'py>(
    node: &Bound<'py, PyTuple>,
    depth: usize,
    shared: &mut SharedTrees<'py>,
) -> PyResult<Vec<Tree>> {
    let children = node.get_item(node.len() - 1)?.cast_into::<PyTuple>()?;
    children.iter().map(|child| tree_from(child.cast::<PyTuple>()?, depth + 1, shared)).collect()
}

/// Returns the shuffled position of `index` in a pseudo-random permutation of `[0, max_index]`.
///
/// It computes one position at a time and needs no memory for the permutation: a Feistel network
/// with the round function of the block cipher Simon (Beaulieu et al., "The SIMON and SPECK families
/// of lightweight block ciphers", 2013) and cycle walking.
///
/// Args:
///     index: The index to shuffle, from 0 to `max_index`.
///     max_index: The largest index, which is the number of indices minus 1.
///     seed: Selects the permutation, from 0 to 2**32 - 1.
///     rounds: The number of rounds of the cipher, an even number from 4 to 1024; `shuffle` uses 4.
///
/// Returns:
///     The shuffled position, from 0 to `max_index`. Different indices have different positions.
///
/// Raises:
///     ValueError: `index` or `rounds` is out of range.
///     TypeError: `seed` is out of range.
///
/// Example:
///     >>> from grainmill.experimental import index_shuffle
///     >>> [index_shuffle(index, max_index=9, seed=42, rounds=4) for index in range(10)]
///     [8, 6, 7, 9, 0, 5, 1, 2, 4, 3]
#[expect(clippy::doc_markdown, reason = "it becomes a Python docstring")]
#[pyfunction]
fn index_shuffle(
    index: &Bound<'_, PyAny>,
    max_index: i64,
    seed: &Bound<'_, PyAny>,
    rounds: i64,
) -> PyResult<u64> {
    let seed: u32 = seed
        .extract()
        .map_err(|_| PyTypeError::new_err(format!("`seed` must be in [0, 2**32), got {seed}")))?;
    let rounds = u32::try_from(rounds).map_err(|_| {
        PyValueError::new_err(format!(
            "rounds must be an even integer between 4 and 1024, but got rounds = {rounds}"
        ))
    })?;
    let (Ok(position), Ok(max_index)) = (index.extract::<u64>(), u64::try_from(max_index)) else {
        return Err(PyValueError::new_err(format!(
            "index must be in [0, max_index], but got index = {index} and max_index = {max_index}"
        )));
    };
    let permutation = Permutation::new(max_index + 1, seed, rounds).map_err(Raised::from)?;
    Ok(permutation.apply(position).map_err(Raised::from)?)
}

/// The order in which the sequential window shuffle returns a window of `window_len` elements.
#[pyfunction]
fn window_order(
    py: Python<'_>,
    window_len: u64,
    seed: u32,
) -> Result<Bound<'_, PyArray1<i64>>, Raised> {
    let len = usize::try_from(window_len).unwrap_or(usize::MAX);
    let order = detached_if_long(py, len, || window::window_order(window_len, seed))?;
    Ok(PyArray1::from_vec(py, order))
}

/// The key of the Philox generator for a random stage with `seed`.
#[pyfunction]
fn philox_key(seed: &Bound<'_, PyInt>) -> PyResult<(u64, u64)> {
    let [low, high] = seed::philox_key(&words(seed)?);
    Ok((low, high))
}

/// The seed of a random stage without an explicit one, from `(seed, depth)` of each upstream seed.
#[pyfunction]
fn derived_seed(seeds: Vec<(Bound<'_, PyInt>, u32)>) -> PyResult<u32> {
    let seeds = seeds.iter().map(|(seed, depth)| Ok((words(seed)?, *depth)));
    Ok(seed::derived_seed(&seeds.collect::<PyResult<Vec<_>>>()?))
}

/// The 32-bit words of a non-negative integer, lowest first.
fn words(value: &Bound<'_, PyInt>) -> PyResult<Vec<u32>> {
    if value.lt(0)? {
        return Err(PyValueError::new_err(format!("`seed` must be at least 0, got {value}")));
    }
    let num_bits: usize = value.call_method0("bit_length")?.extract()?;
    let num_words = num_bits.div_ceil(32).max(1);
    let bytes: Vec<u8> = value.call_method1("to_bytes", (4 * num_words, "little"))?.extract()?;
    let (words, _) = bytes.as_chunks::<4>();
    Ok(words.iter().map(|&word| u32::from_le_bytes(word)).collect())
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyPermutation>()?;
    module.add_class::<PyMixSchedule>()?;
    module.add_class::<PyResolver>()?;
    module.add_function(wrap_pyfunction!(index_shuffle, module)?)?;
    module.add_function(wrap_pyfunction!(window_order, module)?)?;
    module.add_function(wrap_pyfunction!(philox_key, module)?)?;
    module.add_function(wrap_pyfunction!(derived_seed, module)?)
}
