//! Arrow arrays as NumPy arrays and Python objects.

use std::collections::HashMap;

use grainmill_parquet::Parts;
use grainmill_parquet::arrow_array::cast::AsArray;
use grainmill_parquet::arrow_array::types::{
    ByteViewType, Decimal32Type, Decimal64Type, Decimal128Type, Decimal256Type, DecimalType,
};
use grainmill_parquet::arrow_array::{Array, ArrayRef, GenericByteViewArray};
use grainmill_parquet::arrow_schema::{DataType, TimeUnit};
use grainmill_parquet::dense::{Dense, list_row, list_values, value_bytes};
use numpy::{PyArray1, PyUntypedArray};
use pyo3::exceptions::{PyNotImplementedError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString, PyTuple};

use crate::array::RowBytes;

/// So long a value is one object for all rows that refer to it.
const MIN_SHARED_BYTES: usize = 16 << 10;

/// Copies of at least this many bytes release the GIL.
const MIN_DETACHED_BYTES: usize = 64 << 10;

/// What a null becomes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Nulls<'a> {
    /// `None`; the other values of the column keep their type.
    None,
    /// NaN or `NaT` among numbers and times, for which integers become floats; `None` elsewhere. Within
    /// structures and maps, `.1`, there are Python's objects.
    AsPandas(&'a NullTree, bool),
}

/// Whether a column of which some rows are converted has nulls in any of its rows, and likewise for
/// the columns nested in it.
#[derive(Debug, Default)]
pub(crate) struct NullTree {
    has_nulls: bool,
    children: Vec<Self>,
}

impl NullTree {
    /// Adds the nulls of `array`.
    pub(crate) fn add(&mut self, array: &ArrayRef) {
        self.has_nulls |= array.logical_null_count() > 0;
        let children: Vec<ArrayRef> = match array.data_type() {
            DataType::Struct(_) => array.as_struct().columns().to_vec(),
            DataType::Map(..) => {
                let map = array.as_map();
                vec![ArrayRef::clone(map.keys()), ArrayRef::clone(map.values())]
            }
            _ => list_values(array).into_iter().collect(),
        };
        self.children.resize_with(children.len(), Self::default);
        for (tree, child) in self.children.iter_mut().zip(&children) {
            tree.add(child);
        }
    }

    /// Whether nulls in a column of this type change how its other values are converted.
    pub(crate) fn matters(data_type: &DataType) -> bool {
        match data_type {
            DataType::Struct(fields) => fields.iter().any(|field| Self::matters(field.data_type())),
            DataType::List(field)
            | DataType::LargeList(field)
            | DataType::FixedSizeList(field, _)
            | DataType::Map(field, _) => Self::matters(field.data_type()),
            other => other.is_integer() || *other == DataType::Boolean,
        }
    }
}

impl Nulls<'_> {
    fn are_none(self) -> bool {
        matches!(self, Self::None)
    }

    /// Those of a nested column.
    fn child(self, number: usize) -> Self {
        static NO_NULLS: NullTree = NullTree { has_nulls: false, children: Vec::new() };
        match self {
            Self::None => Self::None,
            Self::AsPandas(tree, is_within) => {
                Self::AsPandas(tree.children.get(number).unwrap_or(&NO_NULLS), is_within)
            }
        }
    }

    /// Those of a column nested in structures or maps.
    fn within(self, number: usize) -> Self {
        match self.child(number) {
            Self::AsPandas(tree, _) => Self::AsPandas(tree, true),
            Self::None => Self::None,
        }
    }

    /// Whether lists of this type are of `datetime.datetime`, which counts microseconds.
    fn are_datetimes(self, data_type: &DataType) -> bool {
        let is_nano = matches!(data_type, DataType::Timestamp(TimeUnit::Nanosecond, _));
        matches!(self, Self::AsPandas(_, true))
            && matches!(data_type, DataType::Timestamp(..))
            && !is_nano
    }
}

type Cells<'py> = Vec<Bound<'py, PyAny>>;

/// A column of some rows.
pub(crate) enum Gathered {
    /// In one array.
    Joined(ArrayRef),
    /// Strings or bytes, which are copied from the arrays that they are in.
    Views(Parts),
}

impl Gathered {
    pub(crate) fn of(parts: Parts) -> grainmill_core::Result<Self> {
        let are_all = |kind| parts.arrays.iter().all(|array| *array.data_type() == kind);
        if are_all(DataType::Utf8View) || are_all(DataType::BinaryView) {
            return Ok(Self::Views(parts));
        }
        parts.joined().map(Self::Joined)
    }

    /// The values as objects.
    pub(crate) fn cells<'py>(&self, py: Python<'py>, nulls: Nulls<'_>) -> PyResult<Cells<'py>> {
        let parts = match self {
            Self::Joined(array) => return cells(py, array, nulls),
            Self::Views(parts) => parts,
        };
        let is_text = parts.arrays.iter().any(|array| *array.data_type() == DataType::Utf8View);
        let places = parts.places.iter().copied();
        Ok(if is_text {
            let arrays: Vec<_> = parts.arrays.iter().map(AsArray::as_string_view).collect();
            views(py, &arrays, places, PyString::new)
        } else {
            let arrays: Vec<_> = parts.arrays.iter().map(AsArray::as_binary_view).collect();
            views(py, &arrays, places, PyBytes::new)
        })
    }
}

/// The values of `array` as objects.
pub(crate) fn cells<'py>(
    py: Python<'py>,
    array: &ArrayRef,
    nulls: Nulls<'_>,
) -> PyResult<Cells<'py>> {
    use DataType::{
        Binary, BinaryView, Decimal32, Decimal64, Decimal128, Decimal256, FixedSizeBinary,
        FixedSizeList, LargeBinary, LargeList, LargeUtf8, List, Map, Null, Struct, Time32, Time64,
        Utf8, Utf8View,
    };
    if dtype_name(array.data_type()).is_some() {
        return number_cells(py, array, nulls);
    }
    match array.data_type() {
        Null => Ok(vec![none(py); array.len()]),
        Utf8 => Ok(strings(py, array.as_string::<i32>().iter())),
        LargeUtf8 => Ok(strings(py, array.as_string::<i64>().iter())),
        Utf8View => Ok(views(py, &[array.as_string_view()], rows_of(array), PyString::new)),
        BinaryView => Ok(views(py, &[array.as_binary_view()], rows_of(array), PyBytes::new)),
        Binary => Ok(binaries(py, array.as_binary::<i32>().iter())),
        LargeBinary => Ok(binaries(py, array.as_binary::<i64>().iter())),
        FixedSizeBinary(_) => Ok(binaries(py, array.as_fixed_size_binary().iter())),
        List(_) | LargeList(_) | FixedSizeList(..) => lists(py, array, nulls),
        Struct(_) => structs(py, array, nulls),
        Map(..) => maps(py, array, nulls),
        Time32(_) | Time64(_) => times(py, array),
        Decimal32(..) => decimals::<Decimal32Type>(py, array),
        Decimal64(..) => decimals::<Decimal64Type>(py, array),
        Decimal128(..) => decimals::<Decimal128Type>(py, array),
        Decimal256(..) => decimals::<Decimal256Type>(py, array),
        other => Err(PyNotImplementedError::new_err(format!(
            "columns of type {other} cannot be read; select others with `columns`"
        ))),
    }
}

/// The rows whose values the columns of these names have, as dicts.
pub(crate) fn rows_of_cells<'py>(
    py: Python<'py>,
    names: &[Py<PyString>],
    columns: Vec<Cells<'py>>,
    num_rows: usize,
) -> PyResult<Bound<'py, PyList>> {
    let mut columns: Vec<_> = columns.into_iter().map(IntoIterator::into_iter).collect();
    let rows = PyList::empty(py);
    for _ in 0..num_rows {
        let row = PyDict::new(py);
        for (name, column) in names.iter().zip(&mut columns) {
            row.set_item(name, column.next())?;
        }
        rows.append(row)?;
    }
    Ok(rows)
}

/// The rows of columns as a batch, with arrays as of [`batch_column`]; None if one has none.
pub(crate) fn batch_of<'py>(
    py: Python<'py>,
    names: &[Py<PyString>],
    columns: &[Parts],
    allocate: &Bound<'py, PyAny>,
) -> PyResult<Option<Bound<'py, PyDict>>> {
    let batch = PyDict::new(py);
    for (name, parts) in names.iter().zip(columns) {
        let Some(column) = batch_column(py, parts, allocate)? else { return Ok(None) };
        batch.set_item(name, column)?;
    }
    Ok(Some(batch))
}

/// The rows of a column as an array with a row for each, allocated by `allocate(shape, dtype)`; a
/// column of structures is a dict of arrays. None if they do not have one shape, or are no numbers.
fn batch_column<'py>(
    py: Python<'py>,
    parts: &Parts,
    allocate: &Bound<'py, PyAny>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    if let Some(first) = parts.arrays.first()
        && let DataType::Struct(fields) = first.data_type()
    {
        if parts.arrays.iter().any(|array| array.null_count() > 0) {
            return Ok(None);
        }
        let row = PyDict::new(py);
        for (number, field) in fields.iter().enumerate() {
            let child = |array: &ArrayRef| ArrayRef::clone(array.as_struct().column(number));
            let arrays = parts.arrays.iter().map(child).collect();
            let child = Parts { arrays, places: parts.places.clone() };
            let Some(column) = batch_column(py, &child, allocate)? else { return Ok(None) };
            row.set_item(field.name(), column)?;
        }
        return Ok(Some(row.into_any()));
    }
    let Some(dense) = parts.dense() else { return Ok(None) };
    let Some(dtype) = dtype_name(&dense.data_type) else { return Ok(None) };
    let mut shape = vec![parts.places.len()];
    shape.extend(&dense.row_shape);
    let out = allocate.call1((PyTuple::new(py, shape)?, dtype))?;
    let array = out.cast::<PyUntypedArray>()?.clone();
    copy(py, &dense, array, parts.places.len())?;
    Ok(Some(out))
}

fn copy<'py>(
    py: Python<'py>,
    dense: &Dense<'_>,
    array: Bound<'py, PyUntypedArray>,
    num_rows: usize,
) -> PyResult<()> {
    let mut rows = RowBytes::of(array, 0)?;
    let out = rows.destination(0, num_rows);
    if out.len() < MIN_DETACHED_BYTES {
        dense.copy_to(out);
    } else {
        py.detach(|| dense.copy_to(out));
    }
    Ok(())
}

fn none(py: Python<'_>) -> Bound<'_, PyAny> {
    py.None().into_bound(py)
}

/// The dtype of arrays of this type; None if its values are no numbers or times of NumPy.
fn dtype_name(data_type: &DataType) -> Option<&'static str> {
    Some(match data_type {
        DataType::Boolean => "bool",
        DataType::Int8 => "int8",
        DataType::Int16 => "int16",
        DataType::Int32 => "int32",
        DataType::Int64 => "int64",
        DataType::UInt8 => "uint8",
        DataType::UInt16 => "uint16",
        DataType::UInt32 => "uint32",
        DataType::UInt64 => "uint64",
        DataType::Float16 => "float16",
        DataType::Float32 => "float32",
        DataType::Float64 => "float64",
        DataType::Timestamp(unit, _) => match unit {
            TimeUnit::Second => "datetime64[s]",
            TimeUnit::Millisecond => "datetime64[ms]",
            TimeUnit::Microsecond => "datetime64[us]",
            TimeUnit::Nanosecond => "datetime64[ns]",
        },
        DataType::Date32 | DataType::Date64 => "datetime64[D]",
        DataType::Duration(unit) => match unit {
            TimeUnit::Second => "timedelta64[s]",
            TimeUnit::Millisecond => "timedelta64[ms]",
            TimeUnit::Microsecond => "timedelta64[us]",
            TimeUnit::Nanosecond => "timedelta64[ns]",
        },
        _ => return None,
    })
}

/// The values of `array`, which are numbers, as a NumPy array; what stands in place of nulls is
/// unspecified.
fn numbers<'py>(py: Python<'py>, array: &ArrayRef) -> PyResult<Bound<'py, PyAny>> {
    let dtype = dtype_name(array.data_type()).unwrap_or("uint8");
    match array.data_type() {
        DataType::Boolean => {
            let values = array.as_boolean().values().iter().collect();
            Ok(PyArray1::<bool>::from_vec(py, values).into_any())
        }
        DataType::Date32 => {
            // NumPy counts days in 64 bits.
            let days = value_bytes(array).unwrap_or_default().as_chunks::<4>().0.iter();
            let days = days.map(|&day| i64::from(i32::from_ne_bytes(day))).collect();
            PyArray1::<i64>::from_vec(py, days).call_method1("view", (dtype,))
        }
        DataType::Date64 => {
            let times = value_bytes(array).unwrap_or_default().as_chunks::<8>().0.iter();
            let days = times.map(|&time| i64::from_ne_bytes(time).div_euclid(86_400_000)).collect();
            PyArray1::<i64>::from_vec(py, days).call_method1("view", (dtype,))
        }
        DataType::Float64 => Ok(values_of(py, array, f64::from_ne_bytes)),
        DataType::Float32 => Ok(values_of(py, array, f32::from_ne_bytes)),
        DataType::Int64 => Ok(values_of(py, array, i64::from_ne_bytes)),
        DataType::Int32 => Ok(values_of(py, array, i32::from_ne_bytes)),
        DataType::UInt8 => Ok(values_of(py, array, u8::from_ne_bytes)),
        _ => {
            let bytes = value_bytes(array).unwrap_or_default();
            PyArray1::<u8>::from_slice(py, bytes).call_method1("view", (dtype,))
        }
    }
}

fn values_of<'py, T: numpy::Element, const N: usize>(
    py: Python<'py>,
    array: &ArrayRef,
    from_bytes: fn([u8; N]) -> T,
) -> Bound<'py, PyAny> {
    let (values, _) = value_bytes(array).unwrap_or_default().as_chunks::<N>();
    let values = values.iter().map(|&bytes| from_bytes(bytes)).collect();
    PyArray1::<T>::from_vec(py, values).into_any()
}

/// The values of `array` as pandas has them: a NumPy array; of objects where that needs `None`.
fn numbers_like_pandas<'py>(
    py: Python<'py>,
    array: &ArrayRef,
    has_nulls: bool,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let values = numbers(py, array)?;
    if !has_nulls && array.null_count() == 0 {
        return Ok(Some(values));
    }
    let (values, missing) = match array.data_type() {
        DataType::Boolean => return Ok(None),
        other if other.is_integer() => {
            (values.call_method1("astype", ("float64",))?, f64::NAN.into_pyobject(py)?.into_any())
        }
        other if other.is_floating() => (values, f64::NAN.into_pyobject(py)?.into_any()),
        _ => (values, PyString::new(py, "NaT").into_any()),
    };
    let mask: Vec<bool> = (0..array.len()).map(|at| array.is_null(at)).collect();
    values.set_item(PyArray1::from_vec(py, mask), missing)?;
    Ok(Some(values))
}

fn number_cells<'py>(py: Python<'py>, array: &ArrayRef, nulls: Nulls<'_>) -> PyResult<Cells<'py>> {
    let values = match nulls {
        Nulls::AsPandas(tree, _) => numbers_like_pandas(py, array, tree.has_nulls)?,
        Nulls::None => None,
    };
    if let Some(values) = values {
        return values.try_iter()?.collect();
    }
    let mut values = numbers(py, array)?;
    if !nulls.are_none() {
        values = values.call_method0("tolist")?;
    }
    let cells = values.try_iter()?.collect::<PyResult<_>>()?;
    Ok(with_none(py, array, cells))
}

/// `cells` with `None` where `array` has a null.
fn with_none<'py>(py: Python<'py>, array: &ArrayRef, mut cells: Cells<'py>) -> Cells<'py> {
    if array.null_count() > 0 {
        for (at, cell) in cells.iter_mut().enumerate() {
            if array.is_null(at) {
                *cell = none(py);
            }
        }
    }
    cells
}

fn strings<'a, 'py>(py: Python<'py>, values: impl Iterator<Item = Option<&'a str>>) -> Cells<'py> {
    let cell = |text: Option<&str>| match text {
        Some(text) => PyString::new(py, text).into_any(),
        None => none(py),
    };
    values.map(cell).collect()
}

fn binaries<'a, 'py>(
    py: Python<'py>,
    values: impl Iterator<Item = Option<&'a [u8]>>,
) -> Cells<'py> {
    let cell = |bytes: Option<&[u8]>| match bytes {
        Some(bytes) => PyBytes::new(py, bytes).into_any(),
        None => none(py),
    };
    values.map(cell).collect()
}

/// As [`strings`] and [`binaries`], for the values at `places` of `arrays`, with one object for a long value
/// of a dictionary, which may be that of many rows.
fn views<'py, T: ByteViewType, P>(
    py: Python<'py>,
    arrays: &[&GenericByteViewArray<T>],
    places: impl Iterator<Item = (usize, usize)>,
    object: impl Fn(Python<'py>, &T::Native) -> Bound<'py, P>,
) -> Cells<'py> {
    let mut long: HashMap<(usize, u128), Bound<'py, PyAny>> = HashMap::new();
    let cell = |(number, row): (usize, usize)| {
        let array = arrays[number];
        if array.is_null(row) {
            return none(py);
        }
        let value = array.value(row);
        let bytes: &[u8] = value.as_ref();
        if bytes.len() < MIN_SHARED_BYTES {
            return object(py, value).into_any();
        }
        let key = (number, array.views()[row]);
        long.entry(key).or_insert_with(|| object(py, value).into_any()).clone()
    };
    places.map(cell).collect()
}

/// All rows of the only array.
fn rows_of(array: &ArrayRef) -> impl Iterator<Item = (usize, usize)> + use<> {
    (0..array.len()).map(|row| (0, row))
}

/// Lists as arrays: of numbers, or of objects where the values are none or have nulls.
fn lists<'py>(py: Python<'py>, array: &ArrayRef, nulls: Nulls<'_>) -> PyResult<Cells<'py>> {
    let rows: Vec<_> = (0..array.len()).map(|row| list_row(array, row)).collect();
    let Some(values) = list_values(array) else { return Ok(Vec::new()) };
    // Only the values of these rows, which may be few of many.
    let first = rows.iter().flatten().map(|&(start, _)| start).min().unwrap_or(0);
    let end = rows.iter().flatten().map(|&(start, len)| start + len).max().unwrap_or(first);
    let values = values.slice(first, end - first);
    let is_number = dtype_name(values.data_type()).is_some();
    let nulls = nulls.child(0);
    let are_datetimes = nulls.are_datetimes(values.data_type());
    let as_numbers = match nulls {
        _ if !is_number || are_datetimes => None,
        Nulls::AsPandas(tree, _) => numbers_like_pandas(py, &values, tree.has_nulls)?,
        Nulls::None if values.null_count() == 0 => Some(numbers(py, &values)?),
        Nulls::None => None,
    };
    if let Some(numbers) = as_numbers {
        let copy = PyString::intern(py, "copy");
        let cell = |row: &Option<(usize, usize)>| match *row {
            Some((start, len)) => {
                let slice = pyo3::types::PySlice::new(
                    py,
                    (start - first).cast_signed(),
                    (start - first + len).cast_signed(),
                    1,
                );
                // A view would keep the memory of all rows.
                numbers.get_item(slice)?.call_method0(&copy)
            }
            None => Ok(none(py)),
        };
        return rows.iter().map(cell).collect();
    }
    if matches!(values.data_type(), DataType::Utf8View | DataType::BinaryView) {
        let cells = cells(py, &values, nulls)?;
        let cell = |row: &Option<(usize, usize)>| match *row {
            Some((start, len)) => object_array(py, cells[start - first..][..len].to_vec()),
            None => none(py),
        };
        return Ok(rows.iter().map(cell).collect());
    }
    let has_nulls = |start: usize, len: usize| {
        values.null_count() > 0 && values.slice(start, len).null_count() > 0
    };
    let cell = |row: &Option<(usize, usize)>| -> PyResult<Bound<'py, PyAny>> {
        let Some((start, len)) = *row else { return Ok(none(py)) };
        let start = start - first;
        let of_row = values.slice(start, len);
        if is_number && nulls.are_none() && !has_nulls(start, len) {
            return numbers(py, &of_row);
        }
        let cells = if are_datetimes {
            nested_cells(py, &of_row, nulls)
        } else {
            cells(py, &of_row, nulls)
        };
        Ok(object_array(py, cells?))
    };
    rows.iter().map(cell).collect()
}

/// A NumPy array of these objects.
fn object_array<'py>(py: Python<'py>, cells: Cells<'py>) -> Bound<'py, PyAny> {
    let cells = cells.into_iter().map(Bound::unbind).collect();
    PyArray1::<Py<PyAny>>::from_vec(py, cells).into_any()
}

fn structs<'py>(py: Python<'py>, array: &ArrayRef, nulls: Nulls<'_>) -> PyResult<Cells<'py>> {
    let structs = array.as_struct();
    let mut names = Vec::new();
    let mut columns = Vec::new();
    for (field, child) in structs.fields().iter().zip(structs.columns()) {
        names.push(PyString::intern(py, field.name()));
        columns.push(nested_cells(py, child, nulls.within(columns.len()))?.into_iter());
    }
    let mut rows = Vec::with_capacity(array.len());
    for row in 0..array.len() {
        let values: Vec<_> = columns.iter_mut().map(Iterator::next).collect();
        if array.is_null(row) {
            rows.push(none(py));
            continue;
        }
        let dict = PyDict::new(py);
        for (name, value) in names.iter().zip(values) {
            dict.set_item(name, value)?;
        }
        rows.push(dict.into_any());
    }
    Ok(rows)
}

/// The values of a column in structures or maps. There, pandas has Python's numbers, and no NaN.
fn nested_cells<'py>(py: Python<'py>, array: &ArrayRef, nulls: Nulls<'_>) -> PyResult<Cells<'py>> {
    if let Nulls::AsPandas(tree, _) = nulls
        && dtype_name(array.data_type()).is_some()
        && let Some(values) = numbers_like_pandas(py, array, tree.has_nulls)?
    {
        let mut cells = values.call_method0("tolist")?.try_iter()?.collect::<PyResult<_>>()?;
        if let DataType::Timestamp(_, Some(zone)) = array.data_type() {
            cells = in_zone(py, zone, cells)?;
        }
        return Ok(with_none(py, array, cells));
    }
    cells(py, array, nulls)
}

/// Each `datetime.datetime`, in UTC, as that of a time zone: one with a name, or `+01:30`.
fn in_zone<'py>(py: Python<'py>, zone: &str, cells: Cells<'py>) -> PyResult<Cells<'py>> {
    let module = py.import("datetime")?;
    let class = module.getattr("datetime")?;
    let offset = zone.strip_prefix(['+', '-']).and_then(|offset| offset.split_once(':'));
    let offset = offset.and_then(|(hours, minutes)| {
        Some(60 * hours.parse::<i32>().ok()? + minutes.parse::<i32>().ok()?)
    });
    let zone = match offset {
        Some(minutes) => {
            let minutes = if zone.starts_with('-') { -minutes } else { minutes };
            module
                .getattr("timezone")?
                .call1((module.getattr("timedelta")?.call1((0, 60 * minutes))?,))
        }
        None => py.import("zoneinfo")?.getattr("ZoneInfo")?.call1((zone,)),
    }?;
    let kwargs = PyDict::new(py);
    kwargs.set_item("tzinfo", module.getattr("timezone")?.getattr("utc")?)?;
    let cell = |cell: Bound<'py, PyAny>| {
        if !cell.is_instance(&class)? {
            return Ok(cell); // none, or beyond what the class holds
        }
        cell.call_method("replace", (), Some(&kwargs))?.call_method1("astimezone", (&zone,))
    };
    cells.into_iter().map(cell).collect()
}

/// Maps as lists of pairs.
fn maps<'py>(py: Python<'py>, array: &ArrayRef, nulls: Nulls<'_>) -> PyResult<Cells<'py>> {
    let maps = array.as_map();
    let offsets = maps.value_offsets();
    let first = offsets.first().copied().map_or(0, to_usize);
    let len = offsets.last().copied().map_or(first, to_usize) - first;
    // Only those of these rows, which may be few of many.
    let keys = nested_cells(py, &maps.keys().slice(first, len), nulls.within(0))?;
    let values = nested_cells(py, &maps.values().slice(first, len), nulls.within(1))?;
    let cell = |row: usize| {
        if array.is_null(row) {
            return Ok(none(py));
        }
        let range = to_usize(offsets[row]) - first..to_usize(offsets[row + 1]) - first;
        let pairs = range.map(|at| (keys[at].clone(), values[at].clone()));
        Ok(PyList::new(py, pairs.collect::<Vec<_>>())?.into_any())
    };
    (0..array.len()).map(cell).collect()
}

/// Offsets are checked not to be negative.
fn to_usize(offset: i32) -> usize {
    usize::try_from(offset).unwrap_or(0)
}

/// Times of day as `datetime.time`.
fn times<'py>(py: Python<'py>, array: &ArrayRef) -> PyResult<Cells<'py>> {
    let class = py.import("datetime")?.getattr("time")?;
    let cell = |row: usize| match time_of_day(array, row) {
        None => Ok(none(py)),
        Some(Ok((seconds, micros))) => {
            class.call1((seconds / 3600, seconds / 60 % 60, seconds % 60, micros))
        }
        Some(Err(problem)) => Err(PyValueError::new_err(problem)),
    };
    (0..array.len()).map(cell).collect()
}

/// The time of day in a row, in seconds and microseconds, or why it is none of Python.
fn time_of_day(array: &ArrayRef, row: usize) -> Option<Result<(i64, i64), String>> {
    if array.is_null(row) {
        return None;
    }
    let bytes = value_bytes(array)?;
    let short = || Some(i64::from(i32::from_ne_bytes(*bytes.as_chunks().0.get(row)?)));
    let long = || Some(i64::from_ne_bytes(*bytes.as_chunks().0.get(row)?));
    let (count, per_second, unit) = match array.data_type() {
        DataType::Time32(TimeUnit::Second) => (short()?, 1, "seconds"),
        DataType::Time32(_) => (short()?, 1_000, "milliseconds"),
        DataType::Time64(TimeUnit::Nanosecond) => (long()?, 1_000_000_000, "nanoseconds"),
        DataType::Time64(_) => (long()?, 1_000_000_i64, "microseconds"),
        _ => return None,
    };
    if !(0..86_400 * per_second).contains(&count) {
        return Some(Err(format!("a time of day of {count} {unit} is not in a day")));
    }
    let (seconds, rest) = (count / per_second, count % per_second);
    if per_second > 1_000_000 && rest % 1_000 != 0 {
        return Some(Err(format!(
            "a time of day of {count} {unit} is no `datetime.time`, which has microseconds; select other \
             columns with `columns`"
        )));
    }
    let micros =
        if per_second > 1_000_000 { rest / 1_000 } else { rest * (1_000_000 / per_second) };
    Some(Ok((seconds, micros)))
}

/// Whether values of a type may be none of Python.
pub(crate) fn may_misfit(data_type: &DataType) -> bool {
    match data_type {
        DataType::Time32(_) | DataType::Time64(_) => true,
        DataType::Struct(fields) => fields.iter().any(|field| may_misfit(field.data_type())),
        DataType::List(field)
        | DataType::LargeList(field)
        | DataType::FixedSizeList(field, _)
        | DataType::Map(field, _) => may_misfit(field.data_type()),
        _ => false,
    }
}

/// Why a row cannot be a value of Python.
pub(crate) fn misfit(array: &ArrayRef, row: usize) -> Option<String> {
    if array.is_null(row) || !may_misfit(array.data_type()) {
        return None;
    }
    match array.data_type() {
        DataType::Struct(_) => {
            array.as_struct().columns().iter().find_map(|column| misfit(column, row))
        }
        DataType::Map(..) => {
            let map = array.as_map();
            let offsets = map.value_offsets();
            (to_usize(offsets[row])..to_usize(offsets[row + 1]))
                .find_map(|at| misfit(map.keys(), at).or_else(|| misfit(map.values(), at)))
        }
        DataType::Time32(_) | DataType::Time64(_) => time_of_day(array, row)?.err(),
        _ => {
            let ((start, len), values) = (list_row(array, row)?, list_values(array)?);
            (start..start + len).find_map(|at| misfit(&values, at))
        }
    }
}

fn decimals<'py, T: DecimalType>(py: Python<'py>, array: &ArrayRef) -> PyResult<Cells<'py>> {
    let class = py.import("decimal")?.getattr("Decimal")?;
    let array = array.as_primitive::<T>();
    let cell = |row: usize| {
        if array.is_null(row) {
            return Ok(none(py));
        }
        class.call1((array.value_as_string(row),))
    };
    (0..array.len()).map(cell).collect()
}
