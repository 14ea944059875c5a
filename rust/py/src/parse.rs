//! Records to dicts, or into the rows of a batch: what the parsers of the layer `parse` have in common.

use std::fmt::Display;

use grainmill_core::bytes::{Bytes, Destination};
use grainmill_core::compute;
use grainmill_core::parse::number::Number;
use numpy::{PyArray1, PyArrayDescr, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString};

use crate::array::{RowBytes, array_of, same_dtype, scalar_of};
use crate::records::PyRecords;

/// The memory of the next rows of a field, and the length of each; None if its values are appended to
/// a list.
type RowsOf<'a> = Option<(Destination<'a>, usize)>;

/// By field, the values of each record that were not written to a row.
type Kept<'a, K> = Vec<Vec<Option<<K as Kind>::Found<'a>>>>;

/// What a parser knows of a field beside what all have.
pub(crate) trait Kind: Sized + Sync {
    /// What messages call a field.
    const NAME: &'static str;
    /// A core parses so much in 100 us: calling a helper takes 40 us of CPU. Records of less than half
    /// of it together are parsed without releasing the GIL.
    const MIN_SHARE_LEN: usize;
    /// A value in a record, not yet converted.
    type Found<'a>: Clone + Send;

    /// The bytes of the numbers of `found`; `scratch` has memory for them. Needs no GIL.
    fn numbers<'s>(
        field: &Field<Self>,
        number: Number,
        found: &Self::Found<'_>,
        scratch: &'s mut Vec<u8>,
    ) -> PyResult<&'s [u8]>;

    /// `found` in an element, of a field of no numbers.
    fn object<'py>(
        field: &Field<Self>,
        py: Python<'py>,
        found: &Self::Found<'_>,
    ) -> PyResult<Bound<'py, PyAny>>;
}

/// A field as Python describes it: its name; the name and the dtype of its numbers; its shape, without
/// a first axis of any length; whether it has such an axis; what stands for it where it is missing, with
/// the bytes of its numbers unless that is None, or None.
pub(crate) type Described<'py> = (
    String,
    Option<(String, Bound<'py, PyArrayDescr>)>,
    Vec<usize>,
    bool,
    Option<(Py<PyAny>, Option<Vec<u8>>)>,
);

/// A field of records.
pub(crate) struct Field<K> {
    pub(crate) kind: K,
    pub(crate) name: String,
    pub(crate) numbers: Option<(Number, Py<PyArrayDescr>)>,
    pub(crate) shape: Vec<usize>,
    pub(crate) size: usize,
    pub(crate) any_len: bool,
    pub(crate) key: Py<PyString>,
    absent: Option<(Py<PyAny>, Option<Vec<u8>>)>,
    /// Whether each element has a copy of `absent`; numbers and texts cannot change.
    copies_absent: bool,
}

impl<K: Kind> Field<K> {
    pub(crate) fn of(py: Python<'_>, kind: K, described: Described<'_>) -> PyResult<Self> {
        let (name, numbers, shape, any_len, absent) = described;
        let numbers = match numbers {
            Some((number, dtype)) => Some((number_of(&number)?, dtype.unbind())),
            None => None,
        };
        let key = PyString::intern(py, &name).unbind();
        let size = shape.iter().product();
        let is_scalar = numbers.is_some() && shape.is_empty() && !any_len;
        let copies_absent = match &absent {
            Some((object, _)) if !is_scalar => object.bind(py).hasattr("copy")?,
            _ => false,
        };
        Ok(Self { kind, name, numbers, shape, size, any_len, key, absent, copies_absent })
    }

    pub(crate) fn error(&self, problem: impl Display) -> PyErr {
        PyValueError::new_err(format!("{} `{}`: {problem}", K::NAME, self.name))
    }

    fn missing(&self) -> PyErr {
        self.error("it is missing, and has neither a default nor `optional=True`")
    }

    pub(crate) fn absent_object<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let (object, _) = self.absent.as_ref().ok_or_else(|| self.missing())?;
        let object = object.bind(py);
        if self.copies_absent { object.call_method0("copy") } else { Ok(object.clone()) }
    }

    /// The value for an element.
    pub(crate) fn value<'py>(
        &self,
        py: Python<'py>,
        found: Option<&K::Found<'_>>,
        scratch: &mut Vec<u8>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let Some(found) = found else { return self.absent_object(py) };
        let Some((number, dtype)) = &self.numbers else { return K::object(self, py, found) };
        let numbers = K::numbers(self, *number, found, scratch)?;
        let shape = self.shape_of(numbers.len() / number.byte_len());
        if shape.is_empty() {
            scalar_of(dtype.bind(py), numbers)
        } else {
            array_of(&shape, dtype.bind(py), numbers)
        }
    }

    /// The value that consists of `objects`.
    pub(crate) fn of_objects<'py>(
        &self,
        py: Python<'py>,
        mut objects: Vec<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let shape = self.shape_of(objects.len());
        match objects.pop() {
            Some(only) if shape.is_empty() => Ok(only),
            last => object_array(py, objects.into_iter().chain(last).collect(), &shape),
        }
    }

    /// The shape of an array of `count` values.
    fn shape_of(&self, count: usize) -> Vec<usize> {
        let axis = count.checked_div(self.size).unwrap_or(0);
        self.any_len.then_some(axis).into_iter().chain(self.shape.iter().copied()).collect()
    }

    /// Whether the rows of `array` hold values of this field.
    fn fits(&self, array: &Bound<'_, PyUntypedArray>) -> bool {
        let Some((_, dtype)) = &self.numbers else { return false };
        !self.any_len
            && array.ndim() > 0
            && array.shape()[1..] == self.shape
            && same_dtype(&array.dtype(), dtype.bind(array.py()))
    }
}

fn number_of(name: &str) -> PyResult<Number> {
    Ok(match name {
        "bool" => Number::Bool,
        "int8" => Number::I8,
        "int16" => Number::I16,
        "int32" => Number::I32,
        "int64" => Number::I64,
        "uint8" => Number::U8,
        "uint16" => Number::U16,
        "uint32" => Number::U32,
        "uint64" => Number::U64,
        "float32" => Number::F32,
        "float64" => Number::F64,
        _ => return Err(PyTypeError::new_err(format!("numbers of dtype {name} are not parsed"))),
    })
}

pub(crate) fn object_array<'py>(
    py: Python<'py>,
    objects: Vec<Bound<'py, PyAny>>,
    shape: &[usize],
) -> PyResult<Bound<'py, PyAny>> {
    let objects = objects.into_iter().map(Bound::unbind).collect();
    let array = PyArray1::<Py<PyAny>>::from_vec(py, objects).into_any();
    if shape.len() == 1 { Ok(array) } else { array.call_method1("reshape", (shape.to_vec(),)) }
}

/// The records that a parser is given, a `Records` or the elements of a list. Others may change the list
/// meanwhile, so its elements are owned.
pub(crate) enum Given<'a, 'py> {
    Records(&'a PyRecords),
    Elements(Vec<Bound<'py, PyAny>>),
}

impl<'a, 'py> Given<'a, 'py> {
    pub(crate) fn of(records: &'a Bound<'py, PyAny>) -> PyResult<Self> {
        Ok(match records.cast::<PyList>() {
            Ok(list) => Self::Elements(list.iter().collect()),
            Err(_) => Self::Records(records.cast::<PyRecords>()?.get()),
        })
    }

    /// The bytes of each record, of which `str` has those of UTF-8 if `or_texts`.
    pub(crate) fn slices(&self, or_texts: bool) -> PyResult<Vec<&[u8]>> {
        let elements = match self {
            Self::Records(records) => return Ok(records.slices()),
            Self::Elements(elements) => elements,
        };
        elements.iter().map(|element| bytes_of(element, or_texts)).collect()
    }
}

fn bytes_of<'a>(record: &'a Bound<'_, PyAny>, or_texts: bool) -> PyResult<&'a [u8]> {
    if let Ok(bytes) = record.cast::<PyBytes>() {
        return Ok(bytes.as_bytes());
    }
    if let (Ok(text), true) = (record.cast::<PyString>(), or_texts) {
        return Ok(text.to_str()?.as_bytes());
    }
    let expected = if or_texts { "`bytes` or `str`" } else { "`bytes`" };
    let found = record.get_type().name()?;
    let problem = format!("a record must be {expected}, got a value of type {found}");
    Err(PyTypeError::new_err(problem))
}

/// The fields that a parser returns.
pub(crate) struct Fields<K>(pub(crate) Vec<Field<K>>);

impl<K: Kind> Fields<K> {
    pub(crate) fn names(&self) -> impl Iterator<Item = String> {
        self.0.iter().map(|field| field.name.clone())
    }

    /// A dict for each record, with a value for each field: `find` finds them in a record, `add` adds
    /// more to the dict. Each owns its arrays: a view of one for all records would keep these alive as
    /// long as an element is in a shuffle window.
    pub(crate) fn parse<'a, 'py>(
        &self,
        py: Python<'py>,
        records: &[&'a [u8]],
        find: impl Fn(&'a [u8], &mut [Option<K::Found<'a>>]) -> PyResult<()>,
        mut add: impl FnMut(&'a [u8], &Bound<'py, PyDict>, &mut Vec<u8>) -> PyResult<()>,
    ) -> PyResult<Bound<'py, PyList>> {
        let mut scratch = Vec::new();
        let mut found = vec![None; self.0.len()];
        let elements = PyList::empty(py);
        for record in records {
            find(record, &mut found)?;
            let element = PyDict::new(py);
            for (field, found) in self.0.iter().zip(&found) {
                let value = field.value(py, found.as_ref(), &mut scratch)?;
                element.set_item(field.key.bind(py), value)?;
            }
            add(record, &element, &mut scratch)?;
            elements.append(element)?;
        }
        Ok(elements)
    }

    /// Writes the numbers of `records` to the rows of `columns` from row `at` on, and appends the
    /// other values to those columns that are lists. `find` finds them in a record.
    ///
    /// Returns whether it did: not if `columns`, an array or list by name, are not those of these
    /// fields. If a record cannot be parsed, the rows have any content, and nothing is appended. Values
    /// in a list may be of any structure: stacking finds those that differ. Nothing else may read or
    /// write the columns meanwhile.
    pub(crate) fn fill<'a, 'py>(
        &self,
        py: Python<'py>,
        records: &[&'a [u8]],
        columns: &Bound<'py, PyDict>,
        at: usize,
        find: impl Fn(&'a [u8], &mut [Option<K::Found<'a>>]) -> PyResult<()> + Sync,
    ) -> PyResult<bool> {
        if columns.len() != self.0.len() {
            return Ok(false);
        }
        let mut rows: Vec<Option<RowBytes<'py>>> = Vec::new();
        let mut lists = Vec::new();
        for field in &self.0 {
            let Some(target) = columns.get_item(&field.key)? else { return Ok(false) };
            match target.cast_into::<PyList>() {
                Ok(list) => {
                    rows.push(None);
                    lists.push(Some(list));
                }
                Err(other) => {
                    let array = other.into_inner().cast_into::<PyUntypedArray>()?;
                    if !field.fits(&array) {
                        return Ok(false);
                    }
                    let own = RowBytes::of(array, at)?;
                    if own.num_rows < records.len() {
                        return Ok(false);
                    }
                    rows.push(Some(own));
                    lists.push(None);
                }
            }
        }
        let mut targets: Vec<RowsOf<'_>> = rows
            .iter_mut()
            .map(|own| {
                let own = own.as_mut()?;
                let row_len = own.row_len;
                Some((own.destination(0, records.len()), row_len))
            })
            .collect();
        let byte_len = records.iter().map(|record| record.len()).sum::<usize>();
        let kept = if byte_len < K::MIN_SHARE_LEN / 2 {
            vec![self.fill_rows(records, &mut targets, &find)?]
        } else {
            py.detach(|| self.fill_shares(records, byte_len, &mut targets, &find))?
        };
        let mut scratch = Vec::new();
        let mut added: Vec<Vec<Bound<'py, PyAny>>> = Vec::with_capacity(kept.len());
        for (number, field) in self.0.iter().enumerate() {
            let found = kept.iter().flat_map(|kept| &kept[number]);
            let values = found.map(|found| field.value(py, found.as_ref(), &mut scratch));
            added.push(values.collect::<PyResult<_>>()?);
        }
        for (list, values) in lists.iter().zip(added) {
            if let Some(list) = list {
                let values = PyList::new(py, values)?;
                list.set_slice(list.len(), list.len(), &values)?;
            }
        }
        Ok(true)
    }

    /// As `fill_rows`, of which idle threads do shares; a result for each share, in their order.
    fn fill_shares<'a>(
        &self,
        records: &[&'a [u8]],
        byte_len: usize,
        targets: &mut [RowsOf<'_>],
        find: &(impl Fn(&'a [u8], &mut [Option<K::Found<'a>>]) -> PyResult<()> + Sync),
    ) -> PyResult<Vec<Kept<'a, K>>> {
        let num_shares = compute::num_shares(byte_len, K::MIN_SHARE_LEN).min(records.len());
        let shares = records.chunks(records.len().div_ceil(num_shares)).map(|records| {
            let targets = targets.iter_mut().map(|rows| {
                let (target, row_len) = rows.as_mut()?;
                Some((target.take_front(records.len() * *row_len), *row_len))
            });
            (records, targets.collect())
        });
        let fill = |(records, mut targets): (_, Vec<RowsOf<'_>>)| {
            self.fill_rows(records, &mut targets, find)
        };
        compute::map(shares.collect(), fill).into_iter().collect()
    }

    /// Writes the numbers of each record to the next row of each target; returns the values of the
    /// fields without one. Needs no GIL.
    fn fill_rows<'a>(
        &self,
        records: &[&'a [u8]],
        targets: &mut [RowsOf<'_>],
        find: &impl Fn(&'a [u8], &mut [Option<K::Found<'a>>]) -> PyResult<()>,
    ) -> PyResult<Kept<'a, K>> {
        let mut scratch = Vec::new();
        let mut found = vec![None; self.0.len()];
        let mut kept = vec![Vec::new(); self.0.len()];
        for record in records {
            find(record, &mut found)?;
            for (at, (field, found)) in self.0.iter().zip(&mut found).enumerate() {
                let (Some((target, row_len)), Some((number, _))) =
                    (&mut targets[at], &field.numbers)
                else {
                    kept[at].push(found.take());
                    continue;
                };
                let bytes = match (found, &field.absent) {
                    (Some(found), _) => K::numbers(field, *number, found, &mut scratch)?,
                    (None, Some((_, Some(bytes)))) => bytes,
                    (None, _) => return Err(field.missing()),
                };
                assert_eq!(bytes.len(), *row_len, "a row has the bytes of its shape");
                Bytes::from(bytes).copy_to(&mut target.take_front(*row_len));
            }
        }
        Ok(kept)
    }
}
