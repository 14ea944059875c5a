//! The pages of one column chunk, checked and decompressed, for the crate that decodes their values.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use grainmill_core::lock::lock;
use parquet::basic::{Compression, Encoding, Type};
use parquet::column::page::{Page, PageMetadata, PageReader};
use parquet::errors::{ParquetError, Result};
use parquet::file::metadata::ParquetMetaData;
use parquet::schema::types::ColumnDescriptor;

use crate::decompress::Decompressor;
use crate::delta;
use crate::fetch::Fetched;
use crate::int96;
use crate::layout::{Headers, Layout, Place, header_at};
use crate::thrift::{PLAIN, PageHeader, PageKind, Problem};

/// What is found in pages while the crate decodes them.
#[derive(Debug, Default)]
pub(crate) struct Noted {
    /// Whether a time may be one that some unit cannot hold.
    pub(crate) may_be_far: AtomicBool,
    /// Why a page could not be read, of which the crate keeps the text only.
    failure: Mutex<Option<grainmill_core::Error>>,
}

impl Noted {
    /// Why pages could not be read, if that is known.
    pub(crate) fn take_failure(&self) -> Option<grainmill_core::Error> {
        lock(&self.failure).take()
    }

    fn fail(&self, error: grainmill_core::Error) -> ParquetError {
        let text = error.to_string();
        *lock(&self.failure) = Some(error);
        ParquetError::General(text)
    }
}

/// Reads the pages of a column chunk in order.
pub(crate) struct Pages {
    metadata: Arc<ParquetMetaData>,
    path: String,
    row_group: usize,
    leaf: usize,
    bytes: Arc<Fetched>,
    /// The pages that are left, if it is known where they are.
    known: Option<VecDeque<Known>>,
    /// What is left of a chunk whose pages are not known.
    rest: Headers,
    decompressor: Decompressor,
    max_page_bytes: u64,
    noted: Arc<Noted>,
}

/// A page with a known place.
struct Known {
    range: Range<u64>,
    /// None for a dictionary.
    num_rows: Option<u64>,
}

impl Pages {
    /// The pages of column number `leaf` of a row group, which lie as `layout` says.
    pub(crate) fn of(
        metadata: &Arc<ParquetMetaData>,
        path: &str,
        (row_group, leaf): (usize, usize),
        layout: &Layout,
        bytes: &Arc<Fetched>,
        max_page_bytes: u64,
        noted: &Arc<Noted>,
    ) -> Self {
        let column = metadata.row_group(row_group).column(leaf);
        let place = Place { path, row_group, column };
        let known = layout.pages.as_ref().map(|pages| {
            let dictionary = layout.dictionary().map(|range| Known { range, num_rows: None });
            let ends = pages.iter().skip(1).map(|page| page.first_row).chain([layout.num_rows]);
            let data = pages.iter().zip(ends).map(|(page, end)| Known {
                range: page.offset..page.offset + page.len,
                num_rows: Some(end - page.first_row),
            });
            dictionary.into_iter().chain(data).collect()
        });
        Self {
            metadata: Arc::clone(metadata),
            path: path.to_owned(),
            row_group,
            leaf,
            bytes: Arc::clone(bytes),
            known,
            rest: Headers::of(place, &layout.chunk, bytes),
            decompressor: Decompressor::default(),
            max_page_bytes,
            noted: Arc::clone(noted),
        }
    }

    fn place(&self) -> Place<'_> {
        let column = self.metadata.row_group(self.row_group).column(self.leaf);
        Place { path: &self.path, row_group: self.row_group, column }
    }

    /// The next page and its header, without pages of other kinds where places are not known.
    fn peek(&mut self) -> grainmill_core::Result<Option<(u64, PageHeader)>> {
        if let Some(pages) = &self.known {
            let Some(Known { range, .. }) = pages.front() else { return Ok(None) };
            let header = header_at(self.place(), range.start, range.end, &self.bytes)?;
            return Ok(Some((range.start, header)));
        }
        loop {
            let next = self.rest.peek(self.place(), &self.bytes)?;
            match &next {
                Some((_, header)) if header.kind == PageKind::Other => self.rest.advance(header),
                _ => return Ok(next),
            }
        }
    }

    fn next_page(&mut self) -> grainmill_core::Result<Option<Page>> {
        let Some((at, header)) = self.peek()? else { return Ok(None) };
        self.advance(&header);
        let start = at + header.header_len;
        let stored = self.bytes.get(start..start + header.stored_len)?;
        if header.crc.is_some_and(|crc| crc != crc32fast::hash(&stored)) {
            return Err(self.place().corrupt_page(at, "does not match its checksum"));
        }
        let contents = self.contents(&header, &stored);
        let contents = contents.map_err(|problem| self.place().corrupt_page(at, &problem))?;
        let column = self.place().column;
        let values = values_of(&header, &contents, column.column_descr());
        if column.column_type() == Type::INT96 {
            int96::look_for_far(&header, values, &self.noted.may_be_far);
        }
        let has_values = values.is_none_or(|values| !values.is_empty());
        if has_values && let Ok(encoding) = header.encoding() {
            let len = delta::decoded_len(encoding, values.unwrap_or_default(), header.num_values);
            let len =
                len.map_err(|_| self.place().corrupt_page(at, "damaged lengths of values"))?;
            self.place().check_len(at, header.stored_len, len, self.max_page_bytes)?;
        }
        let page = page_of(&header, contents, has_values);
        page.map(Some).map_err(|_| self.place().corrupt_page(at, "damaged header"))
    }

    fn advance(&mut self, header: &PageHeader) {
        match &mut self.known {
            Some(pages) => drop(pages.pop_front()),
            None => self.rest.advance(header),
        }
    }

    /// The decompressed bytes of a page. Levels of the newer form, which come first, never are compressed.
    fn contents(&mut self, header: &PageHeader, stored: &Bytes) -> Result<Bytes, String> {
        let levels_len = match header.kind {
            PageKind::DataV2 => {
                let lens = header.field(5).and_then(|len| Ok((len, header.field(6)?)));
                let (definition, repetition) = lens.map_err(|_| "damaged header".to_owned())?;
                u64::from(definition) + u64::from(repetition)
            }
            _ => 0,
        };
        if levels_len > header.decoded_len || levels_len > header.stored_len {
            return Err("its levels are longer than the page".to_owned());
        }
        let count = |len| usize::try_from(len).map_err(|_| "is too long".to_owned());
        let column = self.metadata.row_group(self.row_group).column(self.leaf);
        let compression =
            if header.is_compressed() { column.compression() } else { Compression::UNCOMPRESSED };
        let (levels_len, decoded_len) = (count(levels_len)?, count(header.decoded_len)?);
        if compression == Compression::UNCOMPRESSED && column.column_type() == Type::BYTE_ARRAY {
            // Decoded values refer to it, and would keep all that was fetched together.
            return Ok(Bytes::copy_from_slice(stored));
        }
        self.decompressor.decompress(compression, stored, levels_len, decoded_len)
    }
}

/// The bytes of a decompressed page after its levels; None if it is not known where these end.
fn values_of<'a>(
    header: &PageHeader,
    contents: &'a [u8],
    column: &ColumnDescriptor,
) -> Option<&'a [u8]> {
    const RLE: u32 = 3;
    let count = |field| usize::try_from(header.field(field).ok()?).ok();
    match header.kind {
        PageKind::DataV2 => contents.get(count(5)?.checked_add(count(6)?)?..),
        PageKind::Data => {
            let mut rest = contents;
            for (max_level, encoding) in [(column.max_rep_level(), 4), (column.max_def_level(), 3)]
            {
                if max_level > 0 {
                    let (len, after) = rest.split_first_chunk()?;
                    let len = usize::try_from(u32::from_le_bytes(*len)).ok()?;
                    rest = after.get(len..).filter(|_| header.field(encoding) == Ok(RLE))?;
                }
            }
            Some(rest)
        }
        PageKind::Dictionary | PageKind::Other => Some(contents),
    }
}

/// The page that the crate decodes.
fn page_of(header: &PageHeader, buf: Bytes, has_values: bool) -> Result<Page, Problem> {
    let num_values = header.field(1)?;
    // If all values are null, old writers left out what begins others; the crate would look for it.
    let encoding_of_values = || encoding(if has_values { header.encoding()? } else { PLAIN });
    Ok(match header.kind {
        PageKind::Dictionary => Page::DictionaryPage {
            buf,
            num_values,
            encoding: encoding(header.field(2)?)?,
            is_sorted: header.field(3) == Ok(1),
        },
        PageKind::Data => Page::DataPage {
            buf,
            num_values,
            encoding: encoding_of_values()?,
            def_level_encoding: encoding(header.field(3)?)?,
            rep_level_encoding: encoding(header.field(4)?)?,
            statistics: None,
        },
        PageKind::DataV2 => Page::DataPageV2 {
            buf,
            num_values,
            num_nulls: header.field(2)?,
            num_rows: header.field(3)?,
            encoding: encoding_of_values()?,
            def_levels_byte_len: header.field(5)?,
            rep_levels_byte_len: header.field(6)?,
            is_compressed: header.is_compressed(),
            statistics: None,
        },
        PageKind::Other => return Err(Problem::Invalid),
    })
}

fn encoding(number: u32) -> Result<Encoding, Problem> {
    Ok(match number {
        0 => Encoding::PLAIN,
        2 => Encoding::PLAIN_DICTIONARY,
        3 => Encoding::RLE,
        #[expect(deprecated, reason = "old files have it")]
        4 => Encoding::BIT_PACKED,
        5 => Encoding::DELTA_BINARY_PACKED,
        6 => Encoding::DELTA_LENGTH_BYTE_ARRAY,
        7 => Encoding::DELTA_BYTE_ARRAY,
        8 => Encoding::RLE_DICTIONARY,
        9 => Encoding::BYTE_STREAM_SPLIT,
        _ => return Err(Problem::Invalid),
    })
}

impl Iterator for Pages {
    type Item = Result<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

impl PageReader for Pages {
    fn get_next_page(&mut self) -> Result<Option<Page>> {
        self.next_page().map_err(|error| self.noted.fail(error))
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>> {
        let count = |count: u64| usize::try_from(count).ok();
        if let Some(pages) = &self.known {
            return Ok(pages.front().map(|page| PageMetadata {
                num_rows: page.num_rows.and_then(count),
                num_levels: None,
                is_dict: page.num_rows.is_none(),
            }));
        }
        let header = self.peek().map_err(|error| self.noted.fail(error))?;
        // Of lists, some writers state other numbers of rows.
        let is_flat = self.place().column.column_descr().max_rep_level() == 0;
        Ok(header.map(|(_, header)| {
            let is_dict = header.kind == PageKind::Dictionary;
            let num_levels = count(header.num_values).filter(|_| !is_dict);
            let num_rows = header.num_rows.filter(|_| is_flat).and_then(count);
            PageMetadata { num_rows, num_levels, is_dict }
        }))
    }

    fn skip_next_page(&mut self) -> Result<()> {
        if let Some(pages) = &mut self.known {
            pages.pop_front();
        } else if let Some((_, header)) = self.peek().map_err(|error| self.noted.fail(error))? {
            self.advance(&header);
        }
        Ok(())
    }

    /// Rows may extend over pages of the older form, but not where it is known which rows they hold.
    fn at_record_boundary(&mut self) -> Result<bool> {
        if self.known.is_some() {
            return Ok(true);
        }
        Ok(self.peek_next_page()?.is_none_or(|page| page.num_rows.is_some()))
    }
}
