//! Which columns are read, and as which types.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::slice;
use std::sync::Arc;

use arrow_array::RecordBatchReader;
use arrow_ipc::convert::fb_to_schema;
use arrow_ipc::root_as_message;
use arrow_schema::{DataType, Field, FieldRef, Fields, TimeUnit};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use grainmill_core::Error;
use parquet::arrow::ARROW_SCHEMA_META_KEY;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader, RowGroups,
};
use parquet::arrow::{FieldLevels, ProjectionMask, parquet_to_arrow_field_levels};
use parquet::basic::{ConvertedType, Type};
use parquet::column::page::{PageIterator, PageReader};
use parquet::errors::ParquetError;
use parquet::file::metadata::{ParquetMetaData, RowGroupMetaData};
use parquet::schema::types::SchemaDescriptor;

/// What is read of files, and how.
#[derive(Debug, Clone)]
pub struct Choice {
    /// The names of the columns to read; all if there are none. A dotted name selects a field.
    pub columns: Option<Vec<String>>,
    /// What times of the type INT96 count; without, what the writer states, or nanoseconds.
    pub int96_unit: Option<TimeUnit>,
    /// Pages of up to this length may be compressed as much as they like; longer ones must be
    /// compressed as data are.
    pub max_page_bytes: u64,
}

impl Default for Choice {
    fn default() -> Self {
        Self { columns: None, int96_unit: None, max_page_bytes: 16 << 20 }
    }
}

/// A column of the schema's top level, or the selected fields of it.
#[derive(Debug)]
pub(crate) struct Column {
    /// Its name and type.
    pub(crate) field: FieldRef,
    /// How the crate assembles it: with strings that refer to the bytes of a page, so that one of a
    /// dictionary takes memory once.
    pub(crate) levels: FieldLevels,
    /// The same with times of the type INT96 in seconds, which are right for each of them, if there are
    /// some.
    pub(crate) in_seconds: Option<FieldLevels>,
    /// Whether it has strings of which the crate does not check that they are UTF-8, such as JSON.
    pub(crate) is_unchecked: bool,
    /// The numbers of its leaves, the columns that are stored.
    pub(crate) leaves: Vec<usize>,
}

/// The columns to read, in the order of their names if there are some.
pub(crate) fn columns(
    metadata: &Arc<ParquetMetaData>,
    choice: &Choice,
    path: &str,
) -> Result<Vec<Column>, Error> {
    let schema = metadata.file_metadata().schema_descr();
    // Made once: each has all columns.
    let hints: Vec<_> = hints(metadata, choice.int96_unit)
        .into_iter()
        .map(|plain| (viewed(&plain), plain))
        .collect();
    let in_seconds: Vec<_> =
        self::hints(metadata, Some(TimeUnit::Second)).iter().map(viewed).collect();
    let levels_of = |leaves: &[usize], hint: Option<&Fields>| {
        let mask = ProjectionMask::leaves(schema, leaves.iter().copied());
        parquet_to_arrow_field_levels(schema, mask, hint)
    };
    let selected = selected(schema, choice.columns.as_deref(), path)?;
    // Of each column, all are looked at. So types are derived of all columns together, if they can be.
    let mut fields = HashMap::new();
    if let Some((_, plain)) = hints.first()
        && let Ok(levels) = levels_of(&selected.concat(), Some(plain))
        && let Ok(found) = fields_of(metadata, &levels)
        && found.len() == selected.len()
    {
        let roots = selected.iter().flatten().map(|&leaf| schema.get_column_root_idx(leaf));
        fields.extend(roots.collect::<BTreeSet<_>>().into_iter().zip(found.iter().cloned()));
    }
    let mut columns = Vec::new();
    let mut known = HashSet::new();
    for leaves in selected {
        let name = leaves.first().map(|&leaf| schema.get_column_root(leaf).name().to_owned());
        if let Some(name) = name.filter(|name| !known.insert(name.clone())) {
            let message =
                format!("{path}: two columns are called `{name}`; select others with `columns`");
            return Err(Error::InvalidArgument(message));
        }
        let hinted = |hint: Option<&Fields>| levels_of(&leaves, hint);
        let typed =
            leaves.first().and_then(|&leaf| fields.remove(&schema.get_column_root_idx(leaf)));
        let viewed = hints.first().filter(|_| typed.is_some());
        let viewed = viewed.and_then(|(views, _)| hinted(Some(views)).ok());
        let (field, levels) = if let Some(found) = typed.zip(viewed) {
            found
        } else {
            let found = hints.iter().find_map(|(views, plain)| {
                hinted(Some(plain)).ok().map(|levels| (levels, Some(views)))
            });
            let (levels, views) = match found {
                Some(found) => found,
                None => {
                    (hinted(None).map_err(|error| Error::corrupt(path, "schema", error))?, None)
                }
            };
            let found = fields_of(metadata, &levels);
            let found = found.map_err(|error| Error::corrupt(path, "schema", error))?;
            let Some(field) = found.first().cloned() else { continue };
            (field, views.and_then(|views| hinted(Some(views)).ok()).unwrap_or(levels))
        };
        if let Some(name) = repeated_field(&field) {
            let message =
                format!("{path}: two fields are called `{name}`; select others with `columns`");
            return Err(Error::InvalidArgument(message));
        }
        let is_int96 = |&leaf: &usize| schema.column(leaf).physical_type() == Type::INT96;
        let has_int96 = leaves.iter().any(is_int96);
        let in_seconds =
            in_seconds.iter().filter(|_| has_int96).find_map(|views| hinted(Some(views)).ok());
        let (mut is_unchecked, mut rest) = (false, leaves.iter());
        with_leaves(&field, &mut |leaf| {
            let column = rest.next().map(|&leaf| schema.column(leaf));
            let is_checked = column.is_some_and(|of| of.converted_type() == ConvertedType::UTF8);
            is_unchecked |= matches!(leaf, DataType::Utf8 | DataType::LargeUtf8) && !is_checked;
            leaf.clone()
        });
        let levels = levels.clone(); // the crate's has room for all columns of the schema
        columns.push(Column { field, levels, in_seconds, is_unchecked, leaves });
    }
    Ok(columns)
}

/// Whether two files have the same columns, of which the same is known.
pub(crate) fn is_same(a: &ParquetMetaData, b: &ParquetMetaData) -> bool {
    let [a, b] = [a, b].map(ParquetMetaData::file_metadata);
    a.schema() == b.schema() && a.key_value_metadata() == b.key_value_metadata()
}

/// The fields of a table that is read as `levels` says.
fn fields_of(metadata: &ParquetMetaData, levels: &FieldLevels) -> Result<Fields, ParquetError> {
    let no_rows = NoRows { metadata };
    let reader = ParquetRecordBatchReader::try_new_with_row_groups(levels, &no_rows, 1, None)?;
    Ok(reader.schema().fields().clone())
}

/// A field of a structure in `field` that another one has the name of.
fn repeated_field(field: &Field) -> Option<String> {
    let fields = match field.data_type() {
        DataType::Struct(fields) => fields.as_ref(),
        DataType::List(item) | DataType::Map(item, _) => slice::from_ref(item),
        _ => return None,
    };
    let mut known = HashSet::new();
    let found = fields.iter().find_map(|each| {
        if known.insert(each.name()) { repeated_field(each) } else { Some(each.name().clone()) }
    })?;
    Some(format!("{}.{found}", field.name()))
}

/// Checks that none of the columns is among the stored ones that are encrypted.
pub(crate) fn check_not_encrypted(
    metadata: &ParquetMetaData,
    columns: &[Column],
    encrypted: &BTreeSet<usize>,
    path: &str,
) -> Result<(), Error> {
    let mut leaves = columns.iter().flat_map(|column| &column.leaves);
    let Some(&leaf) = leaves.find(|leaf| encrypted.contains(leaf)) else { return Ok(()) };
    let name = metadata.file_metadata().schema_descr().column(leaf).path().string();
    let problem = "encrypted, which is not supported; select others with `columns`";
    Err(Error::corrupt(path, format!("column `{name}`"), problem))
}

/// No row group; a reader of it knows the types of its columns.
struct NoRows<'a> {
    metadata: &'a ParquetMetaData,
}

/// The column chunks of a column in one row group: one, if there is one.
pub(crate) struct OneChunk(pub(crate) Option<Box<dyn PageReader>>);

impl Iterator for OneChunk {
    type Item = parquet::errors::Result<Box<dyn PageReader>>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.take().map(Ok)
    }
}

impl PageIterator for OneChunk {}

impl RowGroups for NoRows<'_> {
    fn num_rows(&self) -> usize {
        0
    }

    fn column_chunks(&self, _leaf: usize) -> parquet::errors::Result<Box<dyn PageIterator>> {
        Ok(Box::new(OneChunk(None)))
    }

    fn row_groups(&self) -> Box<dyn Iterator<Item = &RowGroupMetaData> + '_> {
        Box::new(std::iter::empty())
    }

    fn metadata(&self) -> &ParquetMetaData {
        self.metadata
    }
}

/// The leaves of each selected column.
fn selected(
    schema: &SchemaDescriptor,
    names: Option<&[String]>,
    path: &str,
) -> Result<Vec<Vec<usize>>, Error> {
    let mut by_root: Vec<(usize, Vec<usize>)> = Vec::new();
    let mut add = |leaf: usize| {
        let root = schema.get_column_root_idx(leaf);
        match by_root.iter_mut().find(|(other, _)| *other == root) {
            Some((_, leaves)) if leaves.contains(&leaf) => {}
            Some((_, leaves)) => leaves.push(leaf),
            None => by_root.push((root, vec![leaf])),
        }
    };
    let Some(names) = names else {
        (0..schema.num_columns()).for_each(add);
        return Ok(by_root.into_iter().map(|(_, leaves)| leaves).collect());
    };
    for name in names {
        let leaves = 0..schema.num_columns();
        let is_column = |&leaf: &usize| schema.get_column_root(leaf).name() == name;
        // A column may have a dot in its name.
        let is_field = |&leaf: &usize| {
            let path = schema.column(leaf);
            let parts = path.path().parts();
            (1..=parts.len()).any(|count| parts[..count].join(".") == *name)
        };
        let mut found: Vec<usize> = leaves.clone().filter(is_column).collect();
        if found.is_empty() {
            found = leaves.filter(is_field).collect();
        }
        for &leaf in &found {
            add(leaf);
        }
        if found.is_empty() {
            let known: Vec<_> =
                schema.root_schema().get_fields().iter().map(|field| field.name()).collect();
            let message = format!("{path}: there is no column `{name}` among {known:?}");
            return Err(Error::InvalidArgument(message));
        }
    }
    let mut columns: Vec<_> = by_root.into_iter().map(|(_, leaves)| leaves).collect();
    for leaves in &mut columns {
        leaves.sort_unstable();
    }
    Ok(columns)
}

/// The types to read as: those that the writer had in memory, with dictionaries decoded, and times of the
/// type INT96 in a unit. As what is written of these may not fit the file, then those without.
fn hints(metadata: &Arc<ParquetMetaData>, int96_unit: Option<TimeUnit>) -> Vec<Fields> {
    let schema = metadata.file_metadata().schema_descr();
    let mut zones = writers_zones(metadata).unwrap_or_default();
    if zones.len() != schema.num_columns() {
        zones = vec![None; schema.num_columns()];
    }
    let hint = |skip| {
        let options = ArrowReaderOptions::default().with_skip_arrow_metadata(skip);
        let read = ArrowReaderMetadata::try_new(Arc::clone(metadata), options).ok()?;
        let mut leaves = schema.columns().iter().zip(&zones);
        let mut leaf = |leaf: &DataType| match (leaves.next(), leaf) {
            (Some((column, other)), DataType::Timestamp(unit, zone)) => {
                // A time without a zone is one on the clock, whatever the writer says.
                let zone = zone.clone().map(|zone| other.clone().unwrap_or(zone));
                let is_int96 = column.physical_type() == Type::INT96;
                DataType::Timestamp(int96_unit.filter(|_| is_int96).unwrap_or(*unit), zone)
            }
            (_, DataType::Utf8View) => DataType::Utf8,
            (_, DataType::BinaryView) => DataType::Binary,
            (_, other) => other.clone(),
        };
        let fields = read.schema().fields();
        Some(fields.iter().map(|field| with_leaves(field, &mut leaf)).collect())
    };
    [false, true].into_iter().filter_map(hint).collect()
}

/// The same with strings that refer to the bytes of a page.
fn viewed(fields: &Fields) -> Fields {
    let mut leaf = |leaf: &DataType| match leaf {
        DataType::Utf8 | DataType::LargeUtf8 => DataType::Utf8View,
        DataType::Binary | DataType::LargeBinary => DataType::BinaryView,
        other => other.clone(),
    };
    fields.iter().map(|field| with_leaves(field, &mut leaf)).collect()
}

/// The time zones that the writer had in memory, of all leaves. The crate leaves out those of seconds,
/// which files have as milliseconds.
fn writers_zones(metadata: &ParquetMetaData) -> Option<Vec<Option<Arc<str>>>> {
    let pairs = metadata.file_metadata().key_value_metadata()?;
    let text = pairs.iter().find(|pair| pair.key == ARROW_SCHEMA_META_KEY)?.value.as_ref()?;
    let bytes = BASE64_STANDARD.decode(text).ok()?;
    let message = match bytes.strip_prefix(&[0xff; 4]) {
        Some(rest) => rest.get(4..)?, // its length
        None => &bytes,
    };
    let schema = root_as_message(message).ok()?.header_as_schema().map(fb_to_schema)?;
    let mut zones = Vec::new();
    for field in schema.fields() {
        add_zones(field.data_type(), &mut zones);
    }
    Some(zones)
}

fn add_zones(data_type: &DataType, zones: &mut Vec<Option<Arc<str>>>) {
    match data_type {
        DataType::List(item)
        | DataType::ListView(item)
        | DataType::LargeList(item)
        | DataType::LargeListView(item)
        | DataType::FixedSizeList(item, _)
        | DataType::Map(item, _) => add_zones(item.data_type(), zones),
        DataType::Struct(fields) => {
            for field in fields {
                add_zones(field.data_type(), zones);
            }
        }
        DataType::Dictionary(_, values) => add_zones(values, zones),
        DataType::RunEndEncoded(_, values) => add_zones(values.data_type(), zones),
        DataType::Timestamp(_, zone) => zones.push(zone.clone()),
        _ => zones.push(None),
    }
}

/// A field with the types that `leaf` returns for those of its leaves, in their order.
fn with_leaves(field: &FieldRef, leaf: &mut dyn FnMut(&DataType) -> DataType) -> FieldRef {
    let data_type = type_with_leaves(field.data_type(), leaf);
    Arc::new(Field::new(field.name(), data_type, field.is_nullable()))
}

fn type_with_leaves(data_type: &DataType, leaf: &mut dyn FnMut(&DataType) -> DataType) -> DataType {
    match data_type {
        DataType::List(item) | DataType::ListView(item) => DataType::List(with_leaves(item, leaf)),
        DataType::LargeList(item) | DataType::LargeListView(item) => {
            DataType::LargeList(with_leaves(item, leaf))
        }
        DataType::FixedSizeList(item, len) => {
            DataType::FixedSizeList(with_leaves(item, leaf), *len)
        }
        DataType::Struct(fields) => {
            DataType::Struct(fields.iter().map(|field| with_leaves(field, leaf)).collect())
        }
        DataType::Map(entries, sorted) => DataType::Map(with_leaves(entries, leaf), *sorted),
        DataType::Dictionary(_, values) => type_with_leaves(values, leaf),
        DataType::RunEndEncoded(_, values) => type_with_leaves(values.data_type(), leaf),
        other => leaf(other),
    }
}
