//! Where the pages of a stored column are, and how many rows are decoded at once.
//!
//! If the file has an offset index, it lists the pages. Otherwise the headers of the pages are read
//! once, one after another, except for repeated values in pages of the older form: how many rows
//! such a page holds is only known once it is decoded.

use std::ops::Range;

use bytes::Bytes;
use grainmill_core::{Error, Result};
use parquet::basic::{ConvertedType, Type};
use parquet::file::metadata::ColumnChunkMetaData;

use crate::fetch::Fetched;
use crate::thrift::{self, PageHeader, PageKind, PageSpan, Problem};

/// A shorter chunk is fetched whole to read its page headers.
const MAX_WHOLE: u64 = 1 << 20;
/// The same where a read has to wait for storage.
pub(crate) const MAX_SLOW_WHOLE: u64 = 64 << 20;
/// Statistics in a page header may be long, but not longer.
const MAX_HEADER: u64 = 16 << 20;
/// An index has some bytes for each page.
const MAX_INDEX: u64 = 256 << 20;
/// Pages are decoded together up to this stored length, since each decoding has a fixed cost.
const MIN_UNIT_BYTES: u64 = 8 << 10;
/// With so many bytes once decoded, a unit gets no further page.
const MAX_UNIT_BYTES: f64 = 16.0 * 1024.0 * 1024.0;
/// More rows are not decoded at once.
const MAX_UNIT_ROWS: u64 = 1 << 20;
/// If the pages of a larger column chunk are not known, it is decoded in parts of this length, but in
/// no more parts than this: a damaged or hostile file may claim any number of rows and bytes.
const UNINDEXED_UNIT_BYTES: u64 = 64 << 20;
const MAX_UNINDEXED_UNITS: u64 = 1 << 20;
/// A chunk whose pages are not known is fetched whole up to this length, else page by page.
const MAX_FETCHED: u64 = 64 << 20;

/// The limits of what is decoded: a damaged or hostile file may claim anything.
const MAX_PAGE_BYTES: u64 = 1 << 30;
const MAX_VALUES: u64 = 1 << 27;
/// Pages beyond the length that may have any ratio of compression have this one at most.
const MAX_RATIO: u64 = 2048;
/// Old writers did not count the header of a dictionary as a part of its column chunk.
const MAX_UNCOUNTED: u64 = 100;

/// One column chunk of one row group.
#[derive(Debug)]
pub(crate) struct Layout {
    /// Its bytes, a dictionary first if there is one.
    pub(crate) chunk: Range<u64>,
    /// Its data pages, in order; None if it is not known which rows they hold.
    pub(crate) pages: Option<Vec<PageSpan>>,
    /// How many rows it has.
    pub(crate) num_rows: u64,
}

/// The place of a column chunk, for messages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place<'a> {
    pub(crate) path: &'a str,
    pub(crate) row_group: usize,
    pub(crate) column: &'a ColumnChunkMetaData,
}

impl Place<'_> {
    pub(crate) fn corrupt(&self, problem: &str) -> Error {
        let name = self.column.column_path().string();
        let place = format!("row group {}, column `{name}`", self.row_group);
        Error::corrupt(self.path, place, problem)
    }

    pub(crate) fn corrupt_page(&self, at: u64, problem: &str) -> Error {
        self.corrupt(&format!("page at byte {at}: {problem}"))
    }

    /// Refuses a page at `at` of `stored_len` bytes, of which `decoded_len` would become.
    pub(crate) fn check_len(
        &self,
        at: u64,
        stored_len: u64,
        decoded_len: u64,
        max_page_bytes: u64,
    ) -> Result<()> {
        let is_too_long = decoded_len > MAX_PAGE_BYTES;
        if !is_too_long && decoded_len <= max_page_bytes.max(stored_len * MAX_RATIO) {
            return Ok(());
        }
        let advice = if is_too_long {
            ""
        } else {
            "; `max_page_bytes`, or `GRAINMILL_MAX_PAGE_BYTES` in the environment, can allow it"
        };
        let text = format!(
            "{stored_len} bytes would be decoded to {decoded_len}, which is more than is plausible{advice}"
        );
        Err(self.corrupt_page(at, &text))
    }
}

impl Layout {
    /// Finds the pages of the column chunk at `place`, in a row group of `num_rows` rows. `fetched` may
    /// have its offset index, or all of it; otherwise that is read.
    pub(crate) fn read(place: Place<'_>, num_rows: u64, fetched: &Fetched) -> Result<Self> {
        let file_len = fetched.file().byte_len;
        let chunk = chunk(place, file_len)?;
        let descr = place.column.column_descr();
        if descr.max_rep_level() == 0 && place.column.num_values().cast_unsigned() != num_rows {
            let found = place.column.num_values();
            return Err(place.corrupt(&format!("has {found} values for {num_rows} rows")));
        }
        let index = index_range(place, file_len)?.map(|range| fetched.get(range)).transpose()?;
        let pages = match index {
            Some(bytes) => {
                let pages = thrift::offset_index(&bytes);
                let pages = pages.map_err(|_| place.corrupt("damaged offset index"))?;
                // Some writers list pages in which no row begins: then the pages are read in order.
                fits(&pages, &chunk, num_rows).then_some(pages)
            }
            None => scanned(place, &chunk, num_rows, fetched)?,
        };
        Ok(Self { chunk, pages, num_rows })
    }

    /// How many bytes of memory its pages take.
    pub(crate) fn pages_len(&self) -> usize {
        self.pages.as_ref().map_or(0, |pages| pages.capacity() * size_of::<PageSpan>())
    }

    /// The ranges of the file that hold `rows`.
    pub(crate) fn ranges(&self, rows: &Range<u64>) -> Vec<Range<u64>> {
        let Some(pages) = &self.pages else {
            let is_short = self.chunk.end - self.chunk.start <= MAX_FETCHED;
            return if is_short { vec![self.chunk.clone()] } else { Vec::new() };
        };
        let mut ranges: Vec<_> = self.dictionary().into_iter().collect();
        let held = Self::pages_of(pages, rows);
        ranges.extend(held.iter().map(|page| page.offset..page.offset + page.len));
        ranges
    }

    /// The bytes before the first data page.
    pub(crate) fn dictionary(&self) -> Option<Range<u64>> {
        let first = self.pages.as_ref()?.first()?.offset;
        (first > self.chunk.start).then_some(self.chunk.start..first)
    }

    fn pages_of<'a>(pages: &'a [PageSpan], rows: &Range<u64>) -> &'a [PageSpan] {
        let first = pages.partition_point(|page| page.first_row <= rows.start).saturating_sub(1);
        let end = pages.partition_point(|page| page.first_row < rows.end);
        &pages[first.min(end)..end]
    }

    /// Reads the headers of the pages that hold `rows`, and checks that decoding them stays within
    /// the limits; returns how many values they hold.
    pub(crate) fn check(
        &self,
        place: Place<'_>,
        rows: &Range<u64>,
        max_page_bytes: u64,
        bytes: &Fetched,
    ) -> Result<u64> {
        let mut num_values = 0;
        let mut add = |at: u64, header: &PageHeader| {
            place.check_len(at, header.stored_len, header.decoded_len, max_page_bytes)?;
            if header.kind == PageKind::Dictionary {
                // A value takes at least a byte; only a single empty one takes none.
                if header.num_values > header.decoded_len.max(1) {
                    let (found, len) = (header.num_values, header.decoded_len);
                    let text = format!("a dictionary of {found} values in {len} bytes");
                    return Err(place.corrupt_page(at, &text));
                }
            } else {
                num_values += header.num_values;
            }
            Ok(())
        };
        let Some(pages) = &self.pages else {
            let mut headers = Headers::of(place, &self.chunk, bytes);
            while let Some((at, header)) = headers.next(place, bytes)? {
                add(at, &header)?;
            }
            return checked(place, num_values);
        };
        if let Some(dictionary) = self.dictionary() {
            let header = header_at(place, dictionary.start, dictionary.end, bytes)?;
            if header.kind != PageKind::Dictionary {
                return Err(place.corrupt_page(dictionary.start, "is no dictionary"));
            }
            add(dictionary.start, &header)?;
        }
        let is_flat = place.column.column_descr().max_rep_level() == 0;
        for page in Self::pages_of(pages, rows) {
            let header = header_at(place, page.offset, page.offset + page.len, bytes)?;
            if !matches!(header.kind, PageKind::Data | PageKind::DataV2) {
                return Err(place.corrupt_page(page.offset, "is no data page"));
            }
            // An index has no checksum: a wrong one would give the rows of others.
            let after = pages.partition_point(|other| other.first_row <= page.first_row);
            let next = pages.get(after).map_or(self.num_rows, |next| next.first_row);
            let found = header.num_rows.or(is_flat.then_some(header.num_values));
            if found.is_some_and(|found| found != next - page.first_row) {
                return Err(place.corrupt_page(page.offset, "has other rows than its index says"));
            }
            add(page.offset, &header)?;
        }
        checked(place, num_values)
    }
}

fn checked(place: Place<'_>, num_values: u64) -> Result<u64> {
    if num_values > MAX_VALUES {
        let text = format!("{num_values} values at once are more than is plausible");
        return Err(place.corrupt(&text));
    }
    Ok(num_values)
}

/// The bytes of the offset index of a column chunk, if it has one.
pub(crate) fn index_range(place: Place<'_>, file_len: u64) -> Result<Option<Range<u64>>> {
    let (Some(offset), Some(len)) =
        (place.column.offset_index_offset(), place.column.offset_index_length())
    else {
        return Ok(None);
    };
    let (offset, len) = (offset.cast_unsigned(), i64::from(len).cast_unsigned());
    match offset.checked_add(len).filter(|&end| end <= file_len) {
        Some(end) if len <= MAX_INDEX => Ok(Some(offset..end)),
        _ => Err(place.corrupt("its offset index lies outside the file")),
    }
}

/// The bytes of a column chunk.
pub(crate) fn chunk(place: Place<'_>, file_len: u64) -> Result<Range<u64>> {
    let column = place.column;
    // Some writers state an offset though there is no dictionary.
    let before_data = |offset: &i64| (1..column.data_page_offset()).contains(offset);
    let dictionary = column.dictionary_page_offset().filter(before_data);
    let start = dictionary.unwrap_or(column.data_page_offset());
    let range = u64::try_from(start).ok().zip(u64::try_from(column.compressed_size()).ok());
    match range.and_then(|(start, len)| Some(start..start.checked_add(len)?)) {
        Some(chunk) if chunk.end <= file_len => Ok(chunk),
        _ => Err(place.corrupt("its pages lie outside the file")),
    }
}

/// The bytes of a column chunk once decoded, about, and whether they may be many more: a value of a
/// dictionary may be repeated.
pub(crate) fn decoded_len(column: &ColumnChunkMetaData) -> (u64, bool) {
    let descr = column.column_descr();
    let width = match (column.column_type(), descr.converted_type()) {
        (Type::BOOLEAN, _) => 0,
        (Type::INT32, ConvertedType::INT_8 | ConvertedType::UINT_8) => 1,
        (Type::INT32, ConvertedType::INT_16 | ConvertedType::UINT_16) => 2,
        (Type::INT32 | Type::FLOAT | Type::BYTE_ARRAY, _) => 4,
        (Type::INT64 | Type::DOUBLE | Type::INT96, _) => 8,
        (Type::FIXED_LEN_BYTE_ARRAY, _) => u64::try_from(descr.type_length()).unwrap_or(0),
    };
    let not_negative = |len: i64| u64::try_from(len).unwrap_or(0);
    let values = not_negative(column.num_values()).saturating_mul(width);
    let bytes = column.unencoded_byte_array_data_bytes().map(not_negative);
    let byte_len = values.saturating_add(bytes.unwrap_or(0));
    let is_rough = column.column_type() == Type::BYTE_ARRAY
        && bytes.is_none()
        && column.dictionary_page_offset().is_some();
    (byte_len.max(not_negative(column.uncompressed_size())), is_rough)
}

/// Whether an index lists pages of the chunk, in order, each with the row that it begins with.
fn fits(pages: &[PageSpan], chunk: &Range<u64>, num_rows: u64) -> bool {
    let is_in_order = pages.windows(2).all(|pair| {
        pair[0].first_row < pair[1].first_row
            && pair[0].offset.checked_add(pair[0].len).is_some_and(|end| end <= pair[1].offset)
    });
    let first = pages.first().is_none_or(|page| page.first_row == 0 && page.offset >= chunk.start);
    let last = pages.last().is_none_or(|page| {
        let end = page.offset.checked_add(page.len);
        page.first_row < num_rows && end.is_some_and(|end| end <= chunk.end)
    });
    is_in_order && first && last && pages.is_empty() == (num_rows == 0)
}

/// Reads all page headers of a chunk.
fn scanned(
    place: Place<'_>,
    chunk: &Range<u64>,
    num_rows: u64,
    fetched: &Fetched,
) -> Result<Option<Vec<PageSpan>>> {
    let file = fetched.file();
    let max_whole = if file.latency.is_slow() { MAX_SLOW_WHOLE } else { MAX_WHOLE };
    let whole;
    let fetched = if fetched.has(chunk) || chunk.end - chunk.start > max_whole {
        fetched
    } else {
        let bytes = file.read(chunk.clone())?;
        whole = Fetched::with(file.clone(), vec![(chunk.start, bytes)]);
        &whole
    };
    let is_flat = place.column.column_descr().max_rep_level() == 0;
    let (mut headers, mut row, mut pages) = (Headers::of(place, chunk, fetched), 0_u64, Vec::new());
    while let Some((at, header)) = headers.next(place, fetched)? {
        let len = header.header_len + header.stored_len;
        match (header.kind, header.num_rows) {
            (PageKind::Dictionary, _) if at == chunk.start => {}
            (PageKind::Dictionary | PageKind::Other, _) => return Ok(None),
            (_, Some(num_rows)) => {
                pages.push(PageSpan { offset: at, len, first_row: row });
                row = row.saturating_add(num_rows);
            }
            _ if is_flat => {
                pages.push(PageSpan { offset: at, len, first_row: row });
                row = row.saturating_add(header.num_values);
            }
            _ => return Ok(None),
        }
    }
    if row != num_rows {
        // Some writers state the numbers of values as those of rows.
        if !is_flat {
            return Ok(None);
        }
        return Err(place.corrupt(&format!("its pages have {row} rows of {num_rows}")));
    }
    // A page without rows has no place in such a list.
    let ends = pages.iter().skip(1).map(|page| page.first_row).chain([num_rows]);
    if pages.iter().zip(ends).any(|(page, end)| page.first_row == end) {
        return Ok(None);
    }
    Ok(Some(pages))
}

/// The page headers of a column chunk, one after another.
#[derive(Debug)]
pub(crate) struct Headers {
    at: u64,
    end: u64,
    /// Where the last page ends at most.
    limit: u64,
    /// How many values have not been seen.
    num_left: u64,
}

impl Headers {
    pub(crate) fn of(place: Place<'_>, chunk: &Range<u64>, bytes: &Fetched) -> Self {
        let limit = chunk.end.saturating_add(MAX_UNCOUNTED).min(bytes.file().byte_len);
        let num_left = u64::try_from(place.column.num_values()).unwrap_or(0);
        Self { at: chunk.start, end: chunk.end, limit, num_left }
    }

    /// Where the next page begins, and its header.
    pub(crate) fn peek(
        &self,
        place: Place<'_>,
        bytes: &Fetched,
    ) -> Result<Option<(u64, PageHeader)>> {
        let is_uncounted = self.at >= self.end;
        if is_uncounted && (self.num_left == 0 || self.at >= self.limit) {
            return Ok(None);
        }
        match header_at(place, self.at, self.limit, bytes) {
            Ok(header) => Ok(Some((self.at, header))),
            // There is no page, but something else.
            Err(Error::Corrupt { .. }) if is_uncounted => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Goes on to the page after the one with this header.
    pub(crate) fn advance(&mut self, header: &PageHeader) {
        self.at += header.header_len + header.stored_len;
        if matches!(header.kind, PageKind::Data | PageKind::DataV2) {
            self.num_left = self.num_left.saturating_sub(header.num_values);
        }
    }

    fn next(&mut self, place: Place<'_>, bytes: &Fetched) -> Result<Option<(u64, PageHeader)>> {
        let next = self.peek(place, bytes)?;
        if let Some((_, header)) = &next {
            self.advance(header);
        }
        Ok(next)
    }
}

/// The page header at `at`; header and page must end before `end`.
pub(crate) fn header_at(
    place: Place<'_>,
    at: u64,
    end: u64,
    bytes: &Fetched,
) -> Result<PageHeader> {
    let mut min_len = 1;
    let header = loop {
        let window: Bytes = bytes.window(at, end, min_len)?;
        match thrift::page_header(&window) {
            Ok(header) => break header,
            Err(Problem::Short) if (window.len() as u64) < (end - at).min(MAX_HEADER) => {
                min_len = 8 * window.len() as u64;
            }
            Err(_) => return Err(place.corrupt_page(at, "damaged header")),
        }
    };
    if header.header_len + header.stored_len > end - at {
        return Err(place.corrupt_page(at, "extends beyond the end of its column"));
    }
    Ok(header)
}

/// The first row of each unit of a column that is decoded at once, in a row group of `num_rows` rows.
/// `leaves` are the column's stored columns, with their uncompressed length; a row has about
/// `row_byte_len` bytes once decoded.
pub(crate) fn units(leaves: &[(&Layout, u64)], num_rows: u64, row_byte_len: f64) -> Vec<u64> {
    let longest = leaves.iter().max_by_key(|(layout, _)| layout.chunk.end - layout.chunk.start);
    let Some((layout, _)) = longest else { return vec![0] };
    let mut starts = vec![0];
    let uncompressed: u64 = leaves.iter().fold(0, |sum, (_, len)| sum.saturating_add(*len));
    let mut max_rows = MAX_UNIT_ROWS;
    if leaves.iter().any(|(layout, _)| layout.pages.is_none()) {
        if uncompressed > 4 * UNINDEXED_UNIT_BYTES {
            let max_units = (uncompressed / UNINDEXED_UNIT_BYTES).min(MAX_UNINDEXED_UNITS);
            max_rows = num_rows.div_ceil(max_units).clamp(1, MAX_UNIT_ROWS);
        }
    } else if let Some(pages) = &layout.pages {
        // A dictionary is decoded with each unit.
        let dictionary = layout.dictionary().map_or(0, |bytes| bytes.end - bytes.start);
        let min_len = MIN_UNIT_BYTES.max(dictionary);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a limit on an estimate"
        )]
        let enough_rows = (MAX_UNIT_BYTES / row_byte_len.max(1e-3)).max(1.0) as u64;
        let (mut len, mut start) = (0, 0);
        for page in pages {
            if len >= min_len || page.first_row - start >= enough_rows {
                starts.push(page.first_row);
                (len, start) = (0, page.first_row);
            }
            len += page.len;
        }
    }
    let ends: Vec<u64> = starts.iter().skip(1).copied().chain([num_rows]).collect();
    let mut split = Vec::with_capacity(starts.len());
    for (start, end) in starts.into_iter().zip(ends) {
        split.push(start);
        let mut next = start + max_rows;
        while next < end {
            split.push(next);
            next += max_rows;
        }
    }
    split
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_lists_pages_where_a_chunk_has_rows() {
        let page = |offset, first_row| PageSpan { offset, len: 10, first_row };
        assert!(fits(&[page(4, 0), page(14, 3)], &(4..24), 5));
        assert!(fits(&[], &(0..100), 0));
        assert!(!fits(&[], &(0..100), 5));
        for wrong in [
            [page(4, 0), page(13, 3)],
            [page(4, 0), page(14, 0)],
            [page(4, 0), page(14, 5)],
            [page(4, 0), page(15, 3)],
            [page(3, 0), page(14, 3)],
            [page(4, 1), page(14, 3)],
            [page(4, 0), page(u64::MAX, 3)],
        ] {
            assert!(!fits(&wrong, &(4..24), 5), "{wrong:?}");
        }
    }

    #[test]
    fn a_chunk_without_known_pages_has_units_of_some_length_but_not_too_many() {
        let layout = |num_rows| Layout { chunk: 0..100, pages: None, num_rows };
        let starts = |num_rows, byte_len| units(&[(&layout(num_rows), byte_len)], num_rows, 1.0);
        assert_eq!(starts(1000, 256 << 20), [0]);
        assert_eq!(starts(1000, 320 << 20), [0, 200, 400, 600, 800]);
        assert_eq!(starts(0, 320 << 20), [0]);
        assert_eq!(starts(3, 1 << 40), [0, 1, 2]);
        // Claims of a hostile file.
        for (num_rows, byte_len) in [(1 << 36, 1 << 62), ((1 << 40) - 1, u64::MAX)] {
            let starts = starts(num_rows, byte_len);
            assert_eq!(starts.len(), 1 << 20);
            assert!(starts.last() < Some(&num_rows));
        }
    }
}
