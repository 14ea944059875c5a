//! Where the values of a batch's elements go: to rows of arrays, or to lists that are stacked later.

use std::sync::Arc;

use grainmill_core::batch::count_copied;
use numpy::{PyArrayDescr, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyEllipsis, PyList, PySlice, PyString, PyTuple, PyType};

use crate::array::{RowBytes, array_byte_len, as_array, new_array, same_dtype};
use crate::batch::{MIN_DETACHED_BYTES, copy_values, scalars_to_rows};
use crate::error::is_interrupt;

/// Arrays with fewer bytes are NumPy's own: a slot costs more than it saves.
const SLOT_BYTES: usize = 2048;

/// The structure of elements, and what their leaves are.
enum Node {
    /// Arrays of one shape and dtype.
    Rows { shape: Vec<usize>, dtype: Py<PyArrayDescr> },
    /// Any other values: the first is of this type, and of this dtype if it has one.
    Values { path: Py<PyString>, kind: Py<PyType>, dtype: Option<Py<PyArrayDescr>> },
    /// Containers of exactly this type: dicts, lists, tuples, or None with no keys.
    Branch { kind: Py<PyType>, keys: Vec<Py<PyAny>>, children: Vec<Arc<Node>> },
}

/// The structure of elements, with the shape and dtype of each leaf that is an array; it refers to no
/// element.
#[pyclass(frozen, name = "Layout", module = "grainmill._native")]
pub(crate) struct PyLayout(Arc<Node>);

#[pymethods]
impl PyLayout {
    /// Arrays that are copied to rows.
    #[staticmethod]
    fn of_rows(shape: Vec<usize>, dtype: Py<PyArrayDescr>) -> Self {
        Self(Arc::new(Node::Rows { shape, dtype }))
    }

    /// Values to be stacked later; `path` is the place in the element, for messages.
    #[staticmethod]
    fn of_values(path: Py<PyString>, kind: Py<PyType>, dtype: Option<Py<PyArrayDescr>>) -> Self {
        Self(Arc::new(Node::Values { path, kind, dtype }))
    }

    /// Containers: dicts with `keys`, or others, whose keys are the numbers from 0 on.
    #[staticmethod]
    fn of_containers(
        kind: Py<PyType>,
        keys: Vec<Py<PyAny>>,
        children: Vec<PyRef<'_, Self>>,
    ) -> Self {
        let children = children.iter().map(|child| Arc::clone(&child.0)).collect();
        Self(Arc::new(Node::Branch { kind, keys, children }))
    }

    /// Whether `element` has this layout.
    fn matches(&self, element: &Bound<'_, PyAny>) -> PyResult<bool> {
        matches(&self.0, element)
    }

    /// Allocates rows for `batch_size` elements, or fewer, but at least `min_rows`, for arrays of which
    /// these would take more than `max_bytes`. `arena` allocates large ones. `as_array` converts
    /// values that are no arrays of NumPy, if it can.
    fn rows(
        &self,
        py: Python<'_>,
        batch_size: usize,
        min_rows: usize,
        max_bytes: usize,
        arena: &Bound<'_, PyAny>,
        as_array: Py<PyAny>,
    ) -> PyResult<PyRows> {
        let mut targets = Vec::new();
        for_each_leaf(&self.0, &mut |leaf| {
            targets.push(match leaf {
                Node::Rows { shape, dtype } => {
                    let dtype = dtype.bind(py);
                    let row_len = array_byte_len(shape, dtype)?;
                    let affordable = min_rows.max(max_bytes / row_len.max(1));
                    let shape = [&[batch_size.min(affordable)], &shape[..]].concat();
                    Target::Rows(allocated(&shape, dtype, arena)?.unbind())
                }
                Node::Values { path, .. } => {
                    Target::Values(PyList::empty(py).unbind(), path.clone_ref(py))
                }
                Node::Branch { .. } => unreachable!("a leaf has no children"),
            });
            Ok(())
        })?;
        Ok(PyRows { layout: Arc::clone(&self.0), targets, as_array })
    }
}

/// An array for the rows of a batch, in memory of `arena` if it is large; its contents are unspecified.
fn allocated<'py>(
    shape: &[usize],
    dtype: &Bound<'py, PyArrayDescr>,
    arena: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyUntypedArray>> {
    if array_byte_len(shape, dtype)? < SLOT_BYTES {
        return new_array(shape, dtype);
    }
    Ok(arena.call_method1("array", (PyTuple::new(dtype.py(), shape)?, dtype))?.cast_into()?)
}

/// See `allocated`.
#[pyfunction]
fn allocate_rows<'py>(
    arena: &Bound<'py, PyAny>,
    shape: Vec<usize>,
    dtype: &Bound<'py, PyArrayDescr>,
) -> PyResult<Bound<'py, PyUntypedArray>> {
    allocated(&shape, dtype, arena)
}

/// The memory of a leaf: the rows of an array, or the values so far with their place in the element.
enum Target {
    Rows(Py<PyUntypedArray>),
    Values(Py<PyList>, Py<PyString>),
}

impl Target {
    fn object<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        match self {
            Self::Rows(array) => array.bind(py).clone().into_any(),
            Self::Values(list, _) => list.bind(py).clone().into_any(),
        }
    }
}

/// The type of elements and, for each of their keys, an array or a list.
type Columns<'py> = (Option<Bound<'py, PyType>>, Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)>);

/// The memory of one batch.
#[pyclass(frozen, name = "Rows", module = "grainmill._native")]
pub(crate) struct PyRows {
    layout: Arc<Node>,
    targets: Vec<Target>,
    as_array: Py<PyAny>,
}

#[pymethods]
impl PyRows {
    /// Copies `elements` to the rows from `at` on; returns whether all have the layout. If not, rows
    /// may have been written, but no lists.
    ///
    /// Nothing else may read or write the rows meanwhile. `hot` states that the elements were just
    /// computed on this thread.
    #[pyo3(signature = (elements, at, *, hot))]
    pub(crate) fn put(&self, elements: &Bound<'_, PyList>, at: usize, hot: bool) -> PyResult<bool> {
        let py = elements.py();
        if let [Target::Values(list, _)] = &self.targets[..]
            && let Node::Values { .. } = &*self.layout
        {
            let first = if at == 0 { elements.get_item(0).ok() } else { None };
            if first.is_some_and(|first| !is_value_like(&self.layout, &first)) {
                return Ok(false);
            }
            let list = list.bind(py);
            list.set_slice(list.len(), list.len(), elements)?;
            return Ok(true);
        }
        match self.put_all(elements, at, hot) {
            Err(error) if is_interrupt(py, &error) => Err(error),
            Err(_) => Ok(false), // looking at one element after the other raises it again
            fits => fits,
        }
    }

    /// The batch of the first `num_rows` elements, and whether stacking its rows gives the same dtypes.
    /// `stacked` makes an array of a list of values, given their place in the element, and says that of
    /// it.
    fn finish<'py>(
        &self,
        py: Python<'py>,
        num_rows: usize,
        stacked: &Bound<'py, PyAny>,
    ) -> PyResult<(Bound<'py, PyAny>, bool)> {
        let mut exact = true;
        let mut leaves = Vec::with_capacity(self.targets.len());
        for target in &self.targets {
            leaves.push(match target {
                Target::Rows(array) if array.bind(py).shape()[0] == num_rows => target.object(py),
                Target::Rows(array) => {
                    let first = PySlice::new(py, 0, isize::try_from(num_rows)?, 1);
                    array.bind(py).as_any().get_item(first)?
                }
                Target::Values(list, path) => {
                    if let Some(array) = scalars_to_rows(list.bind(py)) {
                        array
                    } else {
                        let found = stacked.call1((list, path))?;
                        let (array, is_exact) = found.extract::<(_, bool)>()?;
                        exact &= is_exact;
                        array
                    }
                }
            });
        }
        Ok((built(py, &self.layout, &mut leaves.into_iter())?, exact))
    }

    /// The element in row `row`.
    fn element<'py>(&self, py: Python<'py>, row: usize) -> PyResult<Bound<'py, PyAny>> {
        let leaves: PyResult<Vec<_>> = self
            .targets
            .iter()
            .map(|target| match target {
                Target::Rows(array) => array.bind(py).as_any().get_item((row, PyEllipsis::get(py))),
                Target::Values(list, _) => list.bind(py).get_item(row),
            })
            .collect();
        built(py, &self.layout, &mut leaves?.into_iter())
    }

    /// The arrays and lists, in the order of leaves.
    #[getter]
    fn targets<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyAny>> {
        self.targets.iter().map(|target| target.object(py)).collect()
    }

    /// The type of the elements, and for each of their keys its array or list; type and key are None for
    /// elements that are leaves. None if containers are nested.
    #[getter]
    fn columns<'py>(&self, py: Python<'py>) -> Option<Columns<'py>> {
        let objects = self.targets.iter().map(|target| target.object(py));
        let Node::Branch { kind, keys, children } = &*self.layout else {
            return Some((None, objects.map(|leaf| (py.None().into_bound(py), leaf)).collect()));
        };
        if children.iter().any(|child| matches!(**child, Node::Branch { .. })) {
            return None;
        }
        let keys = keys.iter().map(|key| key.bind(py).clone());
        Some((Some(kind.bind(py).clone()), keys.zip(objects).collect()))
    }

    /// The number of rows that each array has at least; 0 if there is none.
    #[getter]
    fn num_rows(&self, py: Python<'_>) -> usize {
        self.arrays(py).map(|array| array.shape()[0]).min().unwrap_or(0)
    }

    /// Bytes of the arrays of one element.
    #[getter]
    fn row_byte_len(&self, py: Python<'_>) -> usize {
        let row_len = |array: &Bound<'_, PyUntypedArray>| {
            array.shape()[1..].iter().product::<usize>() * array.dtype().itemsize()
        };
        self.arrays(py).map(row_len).sum()
    }

    /// The same arrays with empty lists, for some of the elements.
    fn with_own_values(&self, py: Python<'_>) -> Self {
        let own = |target: &Target| match target {
            Target::Rows(array) => Target::Rows(array.clone_ref(py)),
            Target::Values(_, path) => {
                Target::Values(PyList::empty(py).unbind(), path.clone_ref(py))
            }
        };
        Self {
            layout: Arc::clone(&self.layout),
            targets: self.targets.iter().map(own).collect(),
            as_array: self.as_array.clone_ref(py),
        }
    }

    /// Adds the values in the lists of `others`, which have the same layout.
    fn add_values(&self, py: Python<'_>, others: &Self) -> PyResult<()> {
        for (target, other) in self.targets.iter().zip(&others.targets) {
            if let (Target::Values(list, _), Target::Values(values, _)) = (target, other) {
                let list = list.bind(py);
                list.set_slice(list.len(), list.len(), values.bind(py))?;
            }
        }
        Ok(())
    }
}

impl PyRows {
    fn put_all(&self, elements: &Bound<'_, PyList>, at: usize, hot: bool) -> PyResult<bool> {
        let (py, num_elements) = (elements.py(), elements.len());
        let mut columns = Vec::with_capacity(self.targets.len());
        for target in &self.targets {
            columns.push(match target {
                Target::Values(list, _) => {
                    Column::Values(list.bind(py), Vec::with_capacity(num_elements))
                }
                Target::Rows(array) => {
                    let rows = RowBytes::of(array.bind(py).clone(), at)?;
                    if rows.row_len * num_elements < MIN_DETACHED_BYTES {
                        Column::Small(rows)
                    } else {
                        Column::Large(array.bind(py), Vec::with_capacity(num_elements))
                    }
                }
            });
        }
        let as_array = self.as_array.bind(py);
        let mut put = Put { at, hot, num_elements, as_array, columns };
        for (row, element) in elements.iter().enumerate().take(num_elements) {
            if !put.element(&self.layout, &element, row, &mut 0)? {
                return Ok(false);
            }
        }
        put.finish()
    }

    fn arrays<'a, 'py: 'a>(
        &'a self,
        py: Python<'py>,
    ) -> impl Iterator<Item = &'a Bound<'py, PyUntypedArray>> {
        self.targets.iter().filter_map(move |target| match target {
            Target::Rows(array) => Some(array.bind(py)),
            Target::Values(..) => None,
        })
    }

    /// Prefetches `num_rows` rows from `at` on, which are written soon.
    pub(crate) fn prefetch_for_write(
        &self,
        py: Python<'_>,
        at: usize,
        num_rows: usize,
    ) -> PyResult<()> {
        for array in self.arrays(py) {
            RowBytes::of(array.clone(), at)?.prefetch_for_write(0, num_rows);
        }
        Ok(())
    }
}

/// The values that some elements have at a leaf.
enum Column<'a, 'py> {
    /// Copied to their rows one by one: few bytes.
    Small(RowBytes<'py>),
    /// Copied together, without the GIL.
    Large(&'a Bound<'py, PyUntypedArray>, Vec<Bound<'py, PyAny>>),
    /// Added to a list in the end.
    Values(&'a Bound<'py, PyList>, Vec<Bound<'py, PyAny>>),
}

/// Elements on their way to the rows of a batch.
struct Put<'a, 'py> {
    at: usize,
    hot: bool,
    num_elements: usize,
    as_array: &'a Bound<'py, PyAny>,
    columns: Vec<Column<'a, 'py>>,
}

impl<'py> Put<'_, 'py> {
    /// Copies what the element number `row` has at `node`, from its leaf number `leaf` on; returns
    /// whether it is like that.
    fn element(
        &mut self,
        node: &Node,
        value: &Bound<'py, PyAny>,
        row: usize,
        leaf: &mut usize,
    ) -> PyResult<bool> {
        if let Node::Branch { kind, keys, children } = node {
            return all_children(kind, keys, children, value, |child, value| {
                self.element(child, value, row, leaf)
            });
        }
        let column = &mut self.columns[*leaf];
        *leaf += 1;
        match column {
            Column::Small(rows) => {
                if rows.put(value, row)? {
                    return Ok(true);
                }
                rows.put(&self.as_array.call1((value,))?, row)
            }
            Column::Large(_, values) => {
                values.push(value.clone());
                Ok(true)
            }
            Column::Values(_, values) => {
                values.push(value.clone());
                Ok(self.at + row > 0 || is_value_like(node, value))
            }
        }
    }

    /// Copies what is copied together; returns whether all values are arrays like the rows.
    fn finish(self) -> PyResult<bool> {
        let mut added = Vec::new();
        for column in self.columns {
            match column {
                Column::Small(mut rows) => {
                    count_copied(rows.row_len * self.num_elements);
                    if self.hot {
                        // As many rows are likely to follow once their records are read.
                        rows.prefetch_for_write(self.num_elements, self.num_elements);
                    }
                }
                Column::Values(list, values) => added.push((list, values)),
                Column::Large(array, mut values) => {
                    let mut num_copied = copy_values(array.clone(), &values, self.at, self.hot)?;
                    if num_copied < values.len() {
                        for value in &mut values[num_copied..] {
                            *value = self.as_array.call1((&*value,))?;
                        }
                        let (at, rest) = (self.at + num_copied, &values[num_copied..]);
                        num_copied += copy_values(array.clone(), rest, at, true)?;
                    }
                    if num_copied < values.len() {
                        return Ok(false);
                    }
                }
            }
        }
        for (list, values) in added {
            for value in values {
                list.append(value)?;
            }
        }
        Ok(true)
    }
}

fn for_each_leaf(node: &Node, visit: &mut dyn FnMut(&Node) -> PyResult<()>) -> PyResult<()> {
    match node {
        Node::Branch { children, .. } => {
            children.iter().try_for_each(|child| for_each_leaf(child, visit))
        }
        leaf => visit(leaf),
    }
}

/// The tree of this structure with these leaves.
fn built<'py>(
    py: Python<'py>,
    node: &Node,
    leaves: &mut dyn Iterator<Item = Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let Node::Branch { kind, keys, children } = node else {
        return Ok(leaves.next().expect("each leaf has a value"));
    };
    let mut values = Vec::with_capacity(children.len());
    for child in children {
        values.push(built(py, child, leaves)?);
    }
    let kind = kind.bind(py);
    if kind.is(py.get_type::<PyDict>()) {
        let dict = PyDict::new(py);
        for (key, value) in keys.iter().zip(values) {
            dict.set_item(key, value)?;
        }
        return Ok(dict.into_any());
    }
    if kind.is(py.get_type::<PyList>()) {
        return Ok(PyList::new(py, values)?.into_any());
    }
    if kind.is(py.get_type::<PyTuple>()) {
        return Ok(PyTuple::new(py, values)?.into_any());
    }
    Ok(py.None().into_bound(py))
}

/// Whether `value`, of the first element, has the layout `node`.
fn matches(node: &Node, value: &Bound<'_, PyAny>) -> PyResult<bool> {
    match node {
        Node::Rows { shape, dtype } => Ok(as_array(value.as_borrowed())
            .is_some_and(|array| array.shape() == shape && has_dtype(&array, dtype))),
        Node::Values { .. } => Ok(is_value_like(node, value)),
        Node::Branch { kind, keys, children } => {
            Ok(has_plain_keys(value) && all_children(kind, keys, children, value, matches)?)
        }
    }
}

/// Whether keys of `value`, if it is a dict, are the same if they are equal, unlike `1` and `True`.
fn has_plain_keys(value: &Bound<'_, PyAny>) -> bool {
    value
        .cast::<PyDict>()
        .map_or(true, |dict| dict.keys().iter().all(|key| key.is_exact_instance_of::<PyString>()))
}

/// Whether `value` is a container of this type with these keys, and `fits` is true of all its children.
fn all_children<'py>(
    kind: &Py<PyType>,
    keys: &[Py<PyAny>],
    children: &[Arc<Node>],
    value: &Bound<'py, PyAny>,
    mut fits: impl FnMut(&Node, &Bound<'py, PyAny>) -> PyResult<bool>,
) -> PyResult<bool> {
    if !value.get_type().is(kind) {
        return Ok(false);
    }
    if let Ok(dict) = value.cast::<PyDict>() {
        if dict.len() != keys.len() {
            return Ok(false);
        }
        for (key, child) in keys.iter().zip(children) {
            let Some(value) = dict.get_item(key.bind(value.py()))? else { return Ok(false) };
            if !fits(child, &value)? {
                return Ok(false);
            }
        }
        return Ok(true);
    }
    if value.is_none() {
        return Ok(true);
    }
    if value.len()? != keys.len() {
        return Ok(false);
    }
    for (number, child) in children.iter().enumerate() {
        let found = match value.cast::<PyTuple>() {
            Ok(tuple) => tuple.get_item(number),
            Err(_) => value.cast::<PyList>()?.get_item(number),
        };
        if !fits(child, &found?)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether `value` is one that `node` has values of, to be stacked later, as far as the first tells.
fn is_value_like(node: &Node, value: &Bound<'_, PyAny>) -> bool {
    let Node::Values { kind, dtype, .. } = node else { return false };
    value.get_type().is(kind)
        && dtype.as_ref().is_none_or(|dtype| {
            as_array(value.as_borrowed()).is_some_and(|array| has_dtype(&array, dtype))
        })
}

fn has_dtype(array: &Bound<'_, PyUntypedArray>, dtype: &Py<PyArrayDescr>) -> bool {
    same_dtype(&array.dtype(), dtype.bind(array.py()))
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("SLOT_BYTES", SLOT_BYTES)?;
    module.add_class::<PyLayout>()?;
    module.add_class::<PyRows>()?;
    module.add_function(wrap_pyfunction!(allocate_rows, module)?)
}
