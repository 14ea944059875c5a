//! Which columns are read, and as which types.

use std::collections::HashSet;
use std::sync::Arc;

use arrow_array::RecordBatchReader;
use arrow_schema::{DataType, Field, FieldRef, Fields};
use grainmill_core::Error;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader, RowGroups,
};
use parquet::arrow::{FieldLevels, ProjectionMask, parquet_to_arrow_field_levels};
use parquet::column::page::{PageIterator, PageReader};
use parquet::errors::ParquetError;
use parquet::file::metadata::{ParquetMetaData, RowGroupMetaData};
use parquet::schema::types::SchemaDescriptor;

/// A column of the schema's top level, or the selected fields of it.
#[derive(Debug)]
pub(crate) struct Column {
    /// Its name and type.
    pub(crate) field: FieldRef,
    /// How the crate assembles it.
    pub(crate) levels: FieldLevels,
    /// The numbers of its leaves, the columns that are stored.
    pub(crate) leaves: Vec<usize>,
}

/// The columns called `names`, in that order; all if there are no `names`. A dotted name selects a
/// field of a nested column.
pub(crate) fn columns(
    metadata: &Arc<ParquetMetaData>,
    names: Option<&[String]>,
    path: &str,
) -> Result<Vec<Column>, Error> {
    let schema = metadata.file_metadata().schema_descr();
    let hint = hint(metadata);
    let mut columns = Vec::new();
    let mut known = HashSet::new();
    for leaves in selected(schema, names, path)? {
        let name = leaves.first().map(|&leaf| schema.get_column_root(leaf).name().to_owned());
        if let Some(name) = name.filter(|name| !known.insert(name.clone())) {
            let message =
                format!("{path}: two columns are called `{name}`; select others with `columns`");
            return Err(Error::InvalidArgument(message));
        }
        let levels = |hint: Option<&Fields>| {
            let mask = ProjectionMask::leaves(schema, leaves.iter().copied());
            parquet_to_arrow_field_levels(schema, mask, hint)
        };
        // A written Arrow schema may not fit the file; without it the types are simpler.
        let levels = levels(hint.as_ref()).or_else(|_| levels(None));
        let levels = levels.map_err(|error| corrupt(path, "schema", &error))?;
        let no_rows = NoRows { metadata };
        let reader = ParquetRecordBatchReader::try_new_with_row_groups(&levels, &no_rows, 1, None);
        let reader = reader.map_err(|error| corrupt(path, "schema", &error))?;
        let Some(field) = reader.schema().fields().first().cloned() else { continue };
        columns.push(Column { field, levels, leaves });
    }
    Ok(columns)
}

/// No row group; a reader of it knows the types of its columns.
struct NoRows<'a> {
    metadata: &'a ParquetMetaData,
}

struct NoPages;

impl Iterator for NoPages {
    type Item = parquet::errors::Result<Box<dyn PageReader>>;

    fn next(&mut self) -> Option<Self::Item> {
        None
    }
}

impl PageIterator for NoPages {}

impl RowGroups for NoRows<'_> {
    fn num_rows(&self) -> usize {
        0
    }

    fn column_chunks(&self, _leaf: usize) -> parquet::errors::Result<Box<dyn PageIterator>> {
        Ok(Box::new(NoPages))
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

/// The types to read as: those that the writer had in memory, with dictionaries decoded.
fn hint(metadata: &Arc<ParquetMetaData>) -> Option<Fields> {
    let read =
        ArrowReaderMetadata::try_new(Arc::clone(metadata), ArrowReaderOptions::default()).ok()?;
    Some(read.schema().fields().iter().map(plain_field).collect())
}

fn plain_field(field: &FieldRef) -> FieldRef {
    let data_type = plain(field.data_type());
    Arc::new(Field::new(field.name(), data_type, field.is_nullable()))
}

fn plain(data_type: &DataType) -> DataType {
    match data_type {
        DataType::Dictionary(_, values) => plain(values),
        DataType::RunEndEncoded(_, values) => plain(values.data_type()),
        DataType::Utf8View => DataType::Utf8,
        DataType::BinaryView => DataType::Binary,
        DataType::List(item) | DataType::ListView(item) => DataType::List(plain_field(item)),
        DataType::LargeList(item) | DataType::LargeListView(item) => {
            DataType::LargeList(plain_field(item))
        }
        DataType::FixedSizeList(item, len) => DataType::FixedSizeList(plain_field(item), *len),
        DataType::Struct(fields) => DataType::Struct(fields.iter().map(plain_field).collect()),
        DataType::Map(entries, sorted) => DataType::Map(plain_field(entries), *sorted),
        other => other.clone(),
    }
}

/// `problem` at `place` of the file at `path`; or the error of the storage that the crate passed on.
pub(crate) fn raised(path: &str, place: &str, problem: ParquetError) -> Error {
    match problem {
        ParquetError::External(inner) => match inner.downcast::<Error>() {
            Ok(error) => *error,
            Err(other) => corrupt(path, place, &other),
        },
        other => corrupt(path, place, &other),
    }
}

/// An error in the file at `path`.
pub(crate) fn corrupt(path: &str, place: &str, problem: &dyn ToString) -> Error {
    Error::Corrupt { path: path.to_owned(), place: place.to_owned(), problem: problem.to_string() }
}
