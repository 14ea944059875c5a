//! Decodes some rows of one column of a row group.

use std::iter;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use arrow_array::{Array, ArrayRef, RecordBatchReader, new_empty_array};
use arrow_schema::TimeUnit;
use grainmill_core::{Error, Result};
use parquet::arrow::FieldLevels;
use parquet::arrow::arrow_reader::{ParquetRecordBatchReader, RowGroups, RowSelection};
use parquet::column::page::PageIterator;
use parquet::errors::ParquetError;
use parquet::file::metadata::{ParquetMetaData, RowGroupMetaData};

use crate::cache::{Estimate, Key};
use crate::fetch::Fetched;
use crate::file::{ParquetFile, Placed};
use crate::int96::first_wrapped;
use crate::layout::{Layout, Place};
use crate::pages::{Noted, Pages};
use crate::schema::{Column, OneChunk};

/// More is not decoded at once.
const MAX_BYTES: u64 = 2 << 30;

/// Rows of a column that are decoded together: from that of the key up to the one before `end`.
#[derive(Debug, Clone)]
pub(crate) struct Unit {
    pub(crate) key: Key,
    pub(crate) end: u64,
    pub(crate) placed: Arc<Placed>,
}

impl Unit {
    /// The rows, numbered in their row group.
    pub(crate) fn rows(&self) -> Range<u64> {
        self.key.first_row..self.end
    }

    /// The ranges of the file that hold it.
    pub(crate) fn ranges(&self) -> Vec<Range<u64>> {
        let rows = self.rows();
        self.placed.layouts.iter().flat_map(|layout| layout.ranges(&rows)).collect()
    }

    /// The bytes of the file from the first to the last of these ranges.
    pub(crate) fn extent(&self) -> Range<u64> {
        let ranges = self.ranges();
        let begin = ranges.iter().map(|range| range.start).min().unwrap_or(0);
        begin..ranges.iter().map(|range| range.end).max().unwrap_or(begin)
    }

    /// Its key, and how many bytes it has once decoded.
    pub(crate) fn estimate(&self) -> (Key, Estimate) {
        let Placed { row_byte_len, is_rough, .. } = *self.placed;
        let num_rows = self.end - self.key.first_row;
        (self.key, Estimate { num_rows, row_byte_len, is_rough })
    }

    /// Decodes it, which is of `file`, from `bytes`.
    pub(crate) fn decode(&self, file: &ParquetFile, bytes: &Arc<Fetched>) -> Result<ArrayRef> {
        let (row_group, column) = (self.key.row_group as usize, self.key.column as usize);
        let (column, layouts) = (&file.columns()[column], &self.placed.layouts);
        Decoder { file, row_group, column, layouts, rows: self.rows() }.decode(bytes)
    }
}

/// Decodes `rows` of `column` in a row group.
#[derive(Debug)]
struct Decoder<'a> {
    file: &'a ParquetFile,
    row_group: usize,
    column: &'a Column,
    layouts: &'a [Layout],
    rows: Range<u64>,
}

impl Decoder<'_> {
    fn decode(&self, bytes: &Arc<Fetched>) -> Result<ArrayRef> {
        let rows = &self.rows;
        let place = || {
            format!(
                "row group {}, column `{}`, rows {} to {}",
                self.row_group,
                self.column.field.name(),
                rows.start,
                rows.end
            )
        };
        let path = self.file.path();
        // The crate returns errors for all damage that is known; this is for what is not.
        let outcome = catch_unwind(AssertUnwindSafe(|| self.array(bytes)));
        let array = outcome
            .unwrap_or_else(|_| Err(Error::corrupt(path, place(), "the page cannot be decoded")))
            .map_err(|error| match error {
                Error::Panicked(problem) => Error::corrupt(path, place(), problem),
                other => other,
            })?;
        let (found, num_rows) = (array.len() as u64, rows.end - rows.start);
        if found != num_rows {
            return Err(Error::corrupt(path, place(), format!("has {found} rows of {num_rows}")));
        }
        Ok(array)
    }

    fn array(&self, bytes: &Arc<Fetched>) -> Result<ArrayRef> {
        self.check(bytes)?;
        let noted = Arc::default();
        let array = self.read(&self.column.levels, bytes, &noted)?;
        if noted.may_be_far.load(Ordering::Relaxed)
            && let Some(levels) = &self.column.in_seconds
        {
            let in_seconds = self.read(levels, bytes, &noted)?;
            if let Some((at, unit)) = first_wrapped(&array, &in_seconds) {
                let row = self.file.starts()[self.row_group] + self.rows.start;
                return Err(self.wrapped(row + at as u64, unit));
            }
        }
        if self.column.is_unchecked && array.to_data().validate_full().is_err() {
            return Err(Error::Panicked("its strings are not UTF-8".to_owned()));
        }
        Ok(array)
    }

    /// The error of a time that cannot be counted in `unit`.
    fn wrapped(&self, row: u64, unit: TimeUnit) -> Error {
        let (unit, advice) = match unit {
            TimeUnit::Nanosecond => {
                ("nanoseconds (1677 to 2262)", "; `coerce_int96_timestamp_unit=\"us\"` reads it")
            }
            TimeUnit::Microsecond => {
                ("microseconds", "; `coerce_int96_timestamp_unit=\"s\"` reads it")
            }
            _ => ("such units", ""),
        };
        let place = format!("row {row}, column `{}`", self.column.field.name());
        let problem =
            format!("a time of the type INT96 is beyond what 64 bits of {unit} hold{advice}");
        Error::corrupt(self.file.path(), place, problem)
    }

    /// Reads the rows as `levels` says.
    fn read(
        &self,
        levels: &FieldLevels,
        bytes: &Arc<Fetched>,
        noted: &Arc<Noted>,
    ) -> Result<ArrayRef> {
        let failed = |error: ParquetError| {
            let name = self.column.field.name();
            let place = format!("row group {}, column `{name}`", self.row_group);
            let failure = noted.take_failure();
            failure.unwrap_or_else(|| Error::corrupt(self.file.path(), place, error))
        };
        let row_group = self.file.metadata().row_group(self.row_group);
        let num_rows = to_usize(row_group.num_rows().cast_unsigned());
        let selected = to_usize(self.rows.start)..to_usize(self.rows.end);
        let batch_rows = selected.len().max(1);
        let selection = (selected != (0..num_rows))
            .then(|| RowSelection::from_consecutive_ranges(iter::once(selected), num_rows));
        let reader = ParquetRecordBatchReader::try_new_with_row_groups(
            levels,
            &OneRowGroup { decoder: self, bytes, row_group, noted },
            batch_rows,
            selection,
        );
        let mut reader = reader.map_err(failed)?;
        let array = match reader.next() {
            Some(Ok(batch)) => Arc::clone(batch.column(0)),
            Some(Err(error)) => return Err(failed(ParquetError::from(error))),
            None => new_empty_array(reader.schema().field(0).data_type()),
        };
        if reader.next().is_some() {
            return Err(failed(ParquetError::General("has more rows than it should".to_owned())));
        }
        Ok(array)
    }

    /// Checks what the pages claim to contain.
    fn check(&self, bytes: &Arc<Fetched>) -> Result<()> {
        for (&leaf, layout) in self.column.leaves.iter().zip(self.layouts) {
            let place = self.place(leaf);
            let num_values = layout.check(place, &self.rows, self.file.max_page_bytes(), bytes)?;
            // Strings are 16 bytes that refer to those of a page.
            let value_len = place.column.column_descr().type_length().max(16);
            if num_values.saturating_mul(i64::from(value_len).cast_unsigned()) > MAX_BYTES {
                return Err(place.corrupt("its values take more memory than is plausible"));
            }
        }
        Ok(())
    }

    fn place(&self, leaf: usize) -> Place<'_> {
        let column = self.file.metadata().row_group(self.row_group).column(leaf);
        Place { path: self.file.path(), row_group: self.row_group, column }
    }

    fn pages(
        &self,
        leaf: usize,
        layout: &Layout,
        bytes: &Arc<Fetched>,
        noted: &Arc<Noted>,
    ) -> Pages {
        let place = (self.row_group, leaf);
        let (metadata, path) = (self.file.metadata(), self.file.path());
        let max_page_bytes = self.file.max_page_bytes();
        Pages::of(metadata, path, place, layout, bytes, max_page_bytes, noted)
    }
}

/// The pages of one row group, for the crate.
struct OneRowGroup<'a> {
    decoder: &'a Decoder<'a>,
    bytes: &'a Arc<Fetched>,
    row_group: &'a RowGroupMetaData,
    noted: &'a Arc<Noted>,
}

impl RowGroups for OneRowGroup<'_> {
    fn num_rows(&self) -> usize {
        to_usize(self.row_group.num_rows().cast_unsigned())
    }

    fn column_chunks(&self, leaf: usize) -> parquet::errors::Result<Box<dyn PageIterator>> {
        let at = self.decoder.column.leaves.iter().position(|&other| other == leaf);
        let Some(layout) = at.and_then(|at| self.decoder.layouts.get(at)) else {
            return Err(ParquetError::General(format!("column {leaf} was not selected")));
        };
        let pages = self.decoder.pages(leaf, layout, self.bytes, self.noted);
        Ok(Box::new(OneChunk(Some(Box::new(pages)))))
    }

    fn row_groups(&self) -> Box<dyn Iterator<Item = &RowGroupMetaData> + '_> {
        Box::new(iter::once(self.row_group))
    }

    fn metadata(&self) -> &ParquetMetaData {
        self.decoder.file.metadata()
    }
}

/// Row numbers are checked to fit into memory when a file is opened.
fn to_usize(count: u64) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}
