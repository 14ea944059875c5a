//! Decodes some rows of one column of a row group.

use std::iter;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arrow_array::{Array, ArrayRef};
use arrow_schema::TimeUnit;
use arrow_select::concat::concat;
use grainmill_core::{Error, Result};
use parquet::arrow::FieldLevels;
use parquet::arrow::arrow_reader::{ParquetRecordBatchReader, RowGroups, RowSelection};
use parquet::basic::Type;
use parquet::column::page::{Page, PageIterator, PageReader};
use parquet::errors::ParquetError;
use parquet::file::metadata::{ParquetMetaData, RowGroupMetaData};

use crate::cache::Key;
use crate::fetch::Fetched;
use crate::file::{ParquetFile, Placed};
use crate::int96::first_wrapped;
use crate::layout::{Contents, Layout, Place};
use crate::pages::Pages;
use crate::schema::{Column, corrupt, raised};

/// Rows that refer to a dictionary are decoded in batches of about this many bytes.
const BATCH_BYTES: u64 = 256 << 20;
/// More is not decoded at once.
const MAX_BYTES: u64 = 2 << 30;

/// What is decoded: `rows` of `column` in a row group.
#[derive(Debug)]
pub(crate) struct Unit<'a> {
    pub(crate) file: &'a ParquetFile,
    pub(crate) row_group: usize,
    pub(crate) column: &'a Column,
    pub(crate) layouts: Vec<Arc<Layout>>,
    pub(crate) rows: Range<u64>,
}

impl<'a> Unit<'a> {
    /// The unit with this key, up to the row before `end`.
    pub(crate) fn of(file: &'a ParquetFile, key: Key, end: u64, placed: &Placed) -> Self {
        Self {
            file,
            row_group: key.row_group as usize,
            column: &file.columns()[key.column as usize],
            layouts: placed.layouts.clone(),
            rows: key.first_row..end,
        }
    }

    /// The ranges of the file that hold it.
    pub(crate) fn ranges(&self) -> Vec<Range<u64>> {
        self.layouts.iter().flat_map(|layout| layout.ranges(&self.rows)).collect()
    }

    /// Decodes it from `bytes`.
    pub(crate) fn decode(&self, bytes: &Arc<Fetched>) -> Result<ArrayRef> {
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
        let outcome = catch_unwind(AssertUnwindSafe(|| self.arrays(bytes)));
        let arrays = outcome
            .unwrap_or_else(|_| Err(corrupt(path, &place(), &"the page cannot be decoded")))
            .map_err(|error| match error {
                Error::Panicked(problem) => corrupt(path, &place(), &problem),
                other => other,
            })?;
        let found: usize = arrays.iter().map(Array::len).sum();
        let num_rows = rows.end - rows.start;
        if found as u64 != num_rows {
            return Err(corrupt(path, &place(), &format!("has {found} rows of {num_rows}")));
        }
        match &arrays[..] {
            [array] => Ok(Arc::clone(array)),
            several => {
                let several: Vec<&dyn Array> = several.iter().map(|array| &**array).collect();
                concat(&several).map_err(|error| corrupt(path, &place(), &error))
            }
        }
    }

    fn arrays(&self, bytes: &Arc<Fetched>) -> Result<Vec<ArrayRef>> {
        let batch_rows = self.batch_rows(bytes)?;
        let may_be_far = Arc::default();
        let arrays = self.read(&self.column.levels, batch_rows, bytes, &may_be_far)?;
        if may_be_far.load(Ordering::Relaxed)
            && let Some(levels) = &self.column.in_seconds
        {
            let mut row = self.file.starts()[self.row_group] + self.rows.start;
            let in_seconds = self.read(levels, batch_rows, bytes, &may_be_far)?;
            for (array, in_seconds) in arrays.iter().zip(&in_seconds) {
                if let Some((at, unit)) = first_wrapped(array, in_seconds) {
                    return Err(self.wrapped(row + at as u64, unit));
                }
                row += array.len() as u64;
            }
        }
        Ok(arrays)
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
        corrupt(self.file.path(), &place, &problem)
    }

    /// Reads the rows as `levels` says, some at a time.
    fn read(
        &self,
        levels: &FieldLevels,
        batch_rows: usize,
        bytes: &Arc<Fetched>,
        may_be_far: &Arc<AtomicBool>,
    ) -> Result<Vec<ArrayRef>> {
        let place = |error| {
            let name = self.column.field.name();
            let place = format!("row group {}, column `{name}`", self.row_group);
            raised(self.file.path(), &place, error)
        };
        let row_group = self.file.metadata().row_group(self.row_group);
        let num_rows = to_usize(row_group.num_rows().cast_unsigned());
        let selected = to_usize(self.rows.start)..to_usize(self.rows.end);
        let selection = (selected != (0..num_rows))
            .then(|| RowSelection::from_consecutive_ranges(iter::once(selected), num_rows));
        let reader = ParquetRecordBatchReader::try_new_with_row_groups(
            levels,
            &OneRowGroup { unit: self, bytes, row_group, may_be_far },
            batch_rows,
            selection,
        );
        let (mut arrays, mut byte_len) = (Vec::new(), 0);
        for batch in reader.map_err(place)? {
            let batch = batch.map_err(|error| place(ParquetError::from(error)))?;
            let array = Arc::clone(batch.column(0));
            byte_len += array.get_array_memory_size() as u64;
            arrays.push(array);
            if byte_len > MAX_BYTES {
                let text = format!("its rows take more than {MAX_BYTES} bytes");
                return Err(place(ParquetError::General(text)));
            }
        }
        Ok(arrays)
    }

    /// How many rows to decode at once. Checks what the pages claim to contain.
    fn batch_rows(&self, bytes: &Arc<Fetched>) -> Result<usize> {
        let num_rows = self.rows.end - self.rows.start;
        let mut batch_rows = num_rows;
        for (&leaf, layout) in self.column.leaves.iter().zip(&self.layouts) {
            let place = self.place(leaf);
            let contents = layout.check(place, &self.rows, self.file.max_page_bytes(), bytes)?;
            let type_len = place.column.column_descr().type_length().max(8);
            let Contents { num_values, dictionary_len } = contents;
            if num_values.saturating_mul(i64::from(type_len).cast_unsigned()) > MAX_BYTES {
                return Err(place.corrupt("its values take more memory than is plausible"));
            }
            let is_bytes = place.column.column_type() == Type::BYTE_ARRAY;
            if !is_bytes || num_values.saturating_mul(dictionary_len) <= BATCH_BYTES {
                continue;
            }
            // Each value may be the longest of the dictionary.
            let longest = self.longest_of_dictionary(leaf, layout, bytes)?;
            if num_values.saturating_mul(longest) > BATCH_BYTES {
                if place.column.column_descr().max_rep_level() > 0
                    && num_values.saturating_mul(longest) > MAX_BYTES
                {
                    return Err(place.corrupt("its values take more memory than is plausible"));
                }
                batch_rows = batch_rows.min((BATCH_BYTES / longest.max(1)).max(1));
            }
        }
        Ok(to_usize(batch_rows.max(1)))
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
        may_be_far: &Arc<AtomicBool>,
    ) -> Pages {
        let place = (self.row_group, leaf);
        Pages::of(self.file.metadata(), self.file.path(), place, layout, bytes, may_be_far)
    }

    /// The length of the longest value of a dictionary.
    fn longest_of_dictionary(
        &self,
        leaf: usize,
        layout: &Layout,
        bytes: &Arc<Fetched>,
    ) -> Result<u64> {
        let first = self.pages(leaf, layout, bytes, &Arc::default()).get_next_page();
        let first = first.map_err(|error| raised(self.file.path(), "a dictionary", error))?;
        let Some(Page::DictionaryPage { buf, .. }) = first else { return Ok(0) };
        let (mut longest, mut rest) = (0, &buf[..]);
        while let Some((len, after)) = rest.split_first_chunk::<4>() {
            let len = u32::from_le_bytes(*len);
            longest = longest.max(u64::from(len));
            rest = after.get(to_usize(u64::from(len))..).unwrap_or_default();
        }
        Ok(longest.min(buf.len() as u64))
    }
}

/// The pages of one row group, for the crate.
struct OneRowGroup<'a> {
    unit: &'a Unit<'a>,
    bytes: &'a Arc<Fetched>,
    row_group: &'a RowGroupMetaData,
    may_be_far: &'a Arc<AtomicBool>,
}

impl RowGroups for OneRowGroup<'_> {
    fn num_rows(&self) -> usize {
        to_usize(self.row_group.num_rows().cast_unsigned())
    }

    fn column_chunks(&self, leaf: usize) -> parquet::errors::Result<Box<dyn PageIterator>> {
        let at = self.unit.column.leaves.iter().position(|&other| other == leaf);
        let Some(layout) = at.and_then(|at| self.unit.layouts.get(at)) else {
            return Err(ParquetError::General(format!("column {leaf} was not selected")));
        };
        let pages = self.unit.pages(leaf, layout, self.bytes, self.may_be_far);
        Ok(Box::new(OneChunk(Some(Box::new(pages)))))
    }

    fn row_groups(&self) -> Box<dyn Iterator<Item = &RowGroupMetaData> + '_> {
        Box::new(iter::once(self.row_group))
    }

    fn metadata(&self) -> &ParquetMetaData {
        self.unit.file.metadata()
    }
}

/// The only column chunk of a column.
struct OneChunk(Option<Box<dyn PageReader>>);

impl Iterator for OneChunk {
    type Item = parquet::errors::Result<Box<dyn PageReader>>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.take().map(Ok)
    }
}

impl PageIterator for OneChunk {}

/// Row numbers are checked to fit into memory when a file is opened.
fn to_usize(count: u64) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}
