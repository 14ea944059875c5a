//! Decodes scans: Huffman codes to coefficients, and these to samples.
//!
//! Outside of the region, sequential scans are only stepped over: no coefficient is computed there.

use std::ops::Range;

use grainmill_core::try_alloc::try_defaults;

use super::bits::{BitReader, EntropyData};
use super::frame::{Frame, Headers, Scan, ZIGZAG, next_marker};
use super::huffman::{END_OF_BLOCK, Table, extend};
use super::idct;
use super::plane::Plane;
use super::problem::{Problem, damaged};

/// Which MCUs of a scan are needed: rows and columns.
#[derive(Clone)]
struct Needed {
    rows: Range<usize>,
    columns: Range<usize>,
}

impl Needed {
    /// The smallest rectangle that contains both.
    fn with(&self, other: &Self) -> Self {
        let both = |a: &Range<usize>, b: &Range<usize>| a.start.min(b.start)..a.end.max(b.end);
        Self { rows: both(&self.rows, &other.rows), columns: both(&self.columns, &other.columns) }
    }
}

/// The blocks of one component in each MCU of a scan.
struct ScanComponent<'a> {
    /// Its number in the frame.
    index: usize,
    across: usize,
    down: usize,
    dc: Option<&'a Table>,
    ac: Option<&'a Table>,
}

/// Where the MCUs of a scan lie.
struct Layout<'a> {
    components: Vec<ScanComponent<'a>>,
    columns: usize,
    rows: usize,
    needed: Needed,
    interval: usize,
}

impl<'a> Layout<'a> {
    fn new(headers: &'a Headers, frame: &Frame, scan: &Scan, planes: &[Plane]) -> Self {
        let interleaved = scan.components.len() > 1;
        let mut needed = None;
        let mut components = Vec::with_capacity(scan.components.len());
        for &(index, dc, ac) in &scan.components {
            let (component, plane) = (&frame.components[index], &planes[index]);
            let (across, down) = if interleaved { (component.h, component.v) } else { (1, 1) };
            let (columns, rows) = (&plane.columns, &plane.rows);
            let own = Needed {
                rows: rows.start / down..rows.end.div_ceil(down),
                columns: columns.start / across..columns.end.div_ceil(across),
            };
            needed = Some(needed.map_or(own.clone(), |other: Needed| other.with(&own)));
            let (dc, ac) = (headers.dc[dc].as_ref(), headers.ac[ac].as_ref());
            components.push(ScanComponent { index, across, down, dc, ac });
        }
        let (columns, rows) = if interleaved {
            frame.mcus()
        } else {
            frame.blocks(&frame.components[scan.components[0].0])
        };
        let interval = match headers.restart_interval {
            0 => columns * rows,
            interval => interval,
        };
        let needed = needed.unwrap_or(Needed { rows: 0..0, columns: 0..0 });
        Self { components, columns, rows, needed, interval }
    }

    /// Calls `mcu` with a reader, the place of each MCU, and whether it is the first of a segment,
    /// from the first segment that has a needed one to the last needed row; all that come before if
    /// `from_start`.
    #[inline(always)]
    fn walk(
        &self,
        data: &EntropyData,
        at: usize,
        from_start: bool,
        allow_damaged: bool,
        mut mcu: impl FnMut(&mut BitReader, usize, usize, bool) -> Result<(), &'static str>,
    ) -> Result<(), Problem> {
        let end = self.needed.rows.end.min(self.rows) * self.columns;
        let start = if from_start { 0 } else { self.needed.rows.start * self.columns };
        for segment in start / self.interval..end.div_ceil(self.interval) {
            let first = segment * self.interval;
            let last = end.min(first + self.interval);
            let Some(mut reader) = data.reader(segment) else {
                return Err(damaged(at, "there are fewer restart markers than intervals"));
            };
            let (mut row, mut column) = (first / self.columns, first % self.columns);
            for index in first..last {
                let mut result = mcu(&mut reader, column, row, index == first);
                if reader.is_past_end() {
                    result = Err("the coded data ends before the image does");
                }
                match result {
                    Ok(()) => {}
                    Err(_) if allow_damaged => break,
                    Err(text) => {
                        let text = format!("MCU {column} of row {row}: {text}");
                        return Err(damaged(at, text));
                    }
                }
                column += 1;
                if column == self.columns {
                    (row, column) = (row + 1, 0);
                }
            }
        }
        Ok(())
    }
}

const NO_CODE: &str = "no Huffman code matches";
const TOO_LONG: &str = "a block has more than 64 coefficients";
const NO_TABLE: &str = "a scan uses a Huffman table that is not defined";

/// The difference of a block's first coefficient to the one before.
#[inline(always)]
fn difference(table: &Table, reader: &mut BitReader) -> Result<i32, &'static str> {
    reader.refill_to(32);
    let symbol = table.next(reader);
    if symbol.len == 0 {
        return Err(NO_CODE);
    }
    Ok(symbol.value + extend(reader.take(symbol.size), symbol.size))
}

/// Decodes a sequential scan into samples of `planes`.
pub(super) fn sequential(
    headers: &mut Headers,
    frame: &Frame,
    scan: &Scan,
    data: &EntropyData,
    planes: &mut [Plane],
    allow_damaged: bool,
) -> Result<(), Problem> {
    for &(index, _, ac) in &scan.components {
        let (columns, rows) = frame.blocks(&frame.components[index]);
        let plane = &planes[index];
        // Preparing costs about as much as stepping over a few hundred blocks.
        let skipped = plane.rows.end * columns - plane.rows.len() * plane.columns.len();
        debug_assert!(plane.rows.end <= rows.next_multiple_of(frame.max_v));
        if let (true, Some(table)) = (skipped > 300, &mut headers.ac[ac]) {
            table.prepare_skipping();
        }
    }
    let layout = Layout::new(headers, frame, scan, planes);
    let mut tables = Vec::with_capacity(4);
    for component in &layout.components {
        let (Some(dc), Some(ac)) = (component.dc, component.ac) else {
            return Err(damaged(scan.data, NO_TABLE));
        };
        let quant = frame.components[component.index].quant.as_ref();
        let quant = quant.ok_or_else(|| damaged(scan.data, "no quantization table"))?;
        tables.push((dc, ac, quant.map(i32::from)));
    }
    let mut previous = [0_i32; 4];
    let needed = &layout.needed;
    layout.walk(data, scan.data, false, allow_damaged, |reader, column, row, is_first| {
        if is_first {
            previous = [0; 4];
        }
        let mcu_needed = needed.rows.contains(&row) && needed.columns.contains(&column);
        for ((component, (dc, ac, quant)), previous) in
            layout.components.iter().zip(&tables).zip(&mut previous)
        {
            for y in 0..component.down {
                for x in 0..component.across {
                    *previous = previous.wrapping_add(difference(dc, reader)?);
                    let plane = &mut planes[component.index];
                    let (x, y) = (column * component.across + x, row * component.down + y);
                    if !mcu_needed || !plane.contains(x, y) {
                        ac.skip_block(reader).ok_or("invalid codes")?;
                        continue;
                    }
                    let mut block = [0; 64];
                    block[0] = previous.wrapping_mul(quant[0]);
                    let last = coefficients(ac, reader, quant, &mut block)?;
                    plane.put(x, y, &block, last);
                }
            }
        }
        Ok(())
    })
}

/// Decodes a block's other coefficients; returns the number of the last one.
#[inline(always)]
fn coefficients(
    table: &Table,
    reader: &mut BitReader,
    quant: &[i32; 64],
    block: &mut idct::Block,
) -> Result<usize, &'static str> {
    let (mut k, mut last) = (0, 0);
    while k < 63 {
        reader.refill_to(32);
        let symbol = table.next(reader);
        if symbol.len == 0 {
            return Err(NO_CODE);
        }
        if symbol.advance == END_OF_BLOCK {
            break;
        }
        k += symbol.advance as usize;
        let value = match symbol.size {
            0 => symbol.value,
            size => extend(reader.take(size), size),
        };
        let place = *ZIGZAG.get(k).ok_or(TOO_LONG)?;
        let place = usize::from(place & 63);
        block[place] = value.wrapping_mul(quant[place]);
        last = k;
    }
    Ok(last)
}

/// The coefficients of a progressive frame's components, as far down as they are needed.
pub(super) struct Coefficients {
    components: Vec<ComponentCoefficients>,
}

struct ComponentCoefficients {
    values: Vec<i16>,
    columns: usize,
}

impl Coefficients {
    pub(super) fn new(frame: &Frame, planes: &[Plane]) -> grainmill_core::Result<Self> {
        let (mcus, _) = frame.mcus();
        let ends = frame.components.iter().zip(planes);
        let mcu_rows = ends.map(|(c, plane)| plane.rows.end.div_ceil(c.v)).max().unwrap_or(0);
        let components = frame.components.iter().map(|component| {
            let (columns, rows) = (mcus * component.h, mcu_rows * component.v);
            let values =
                try_defaults(columns * rows * 64, || "the coefficients of an image".into())?;
            Ok(ComponentCoefficients { values, columns })
        });
        Ok(Self { components: components.collect::<grainmill_core::Result<_>>()? })
    }

    /// Computes the samples of `planes`.
    pub(super) fn render(&self, frame: &Frame, planes: &mut [Plane]) {
        for ((stored, plane), component) in
            self.components.iter().zip(planes).zip(&frame.components)
        {
            let quant = component.quant.unwrap_or([0; 64]);
            for y in plane.rows.clone() {
                for x in plane.columns.clone() {
                    let at = 64 * (y * stored.columns + x);
                    let mut block = [0; 64];
                    let mut is_flat = true;
                    for (i, &value) in stored.values[at..at + 64].iter().enumerate() {
                        block[i] = i32::from(value).wrapping_mul(i32::from(quant[i]));
                        is_flat &= i == 0 || value == 0;
                    }
                    plane.put(x, y, &block, if is_flat { 0 } else { 63 });
                }
            }
        }
    }
}

/// Decodes one scan of a progressive frame.
pub(super) fn progressive(
    headers: &Headers,
    frame: &Frame,
    scan: &Scan,
    data: &EntropyData,
    (planes, coefficients): (&[Plane], &mut Coefficients),
    allow_damaged: bool,
) -> Result<(), Problem> {
    let layout = Layout::new(headers, frame, scan, planes);
    let is_missing = |component: &ScanComponent| match (scan.first, scan.high) {
        (0, 0) => component.dc.is_none(),
        (0, _) => false,
        _ => component.ac.is_none(),
    };
    if layout.components.iter().any(is_missing) {
        return Err(damaged(scan.data, NO_TABLE));
    }
    let mut previous = [0_i32; 4];
    let mut ended = 0;
    layout.walk(data, scan.data, true, allow_damaged, |reader, column, row, is_first| {
        if is_first {
            previous = [0; 4];
            ended = 0;
        }
        for (component, previous) in layout.components.iter().zip(&mut previous) {
            let stored = &mut coefficients.components[component.index];
            for y in 0..component.down {
                for x in 0..component.across {
                    let (x, y) = (column * component.across + x, row * component.down + y);
                    let at = 64 * (y * stored.columns + x);
                    let Some(block) = stored.values.get_mut(at..at + 64) else {
                        return Err("a block lies outside of the image");
                    };
                    let block: &mut [i16; 64] = block.try_into().map_err(|_| TOO_LONG)?;
                    match (scan.first, scan.high, component.dc, component.ac) {
                        (0, 0, Some(dc), _) => {
                            *previous = previous.wrapping_add(difference(dc, reader)?);
                            block[0] = truncated(*previous << scan.low);
                        }
                        (0, ..) => {
                            reader.refill_to(32);
                            block[0] |= truncated(i32::from(reader.take(1) == 1) << scan.low);
                        }
                        (_, 0, _, Some(ac)) => first_bits(ac, reader, scan, block, &mut ended)?,
                        (_, _, _, Some(ac)) => next_bit(ac, reader, scan, block, &mut ended)?,
                        _ => return Err(NO_TABLE),
                    }
                }
            }
        }
        Ok(())
    })
}

/// A coefficient, which a valid file keeps within 16 bits.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "a damaged file's values mean nothing")]
fn truncated(value: i32) -> i16 {
    value as i16
}

/// Decodes the upper bits of coefficients that no scan has touched; `ended` is the number of
/// further blocks without any.
#[inline(always)]
fn first_bits(
    table: &Table,
    reader: &mut BitReader,
    scan: &Scan,
    block: &mut [i16; 64],
    ended: &mut u32,
) -> Result<(), &'static str> {
    if *ended > 0 {
        *ended -= 1;
        return Ok(());
    }
    let mut k = scan.first;
    while k <= scan.last {
        reader.refill_to(32);
        let symbol = table.next(reader);
        if symbol.len == 0 {
            return Err(NO_CODE);
        }
        if symbol.advance == END_OF_BLOCK {
            *ended = blocks_ended(symbol.value, reader) - 1;
            return Ok(());
        }
        k += symbol.advance as usize - 1;
        if k > scan.last {
            return Err(TOO_LONG);
        }
        let value = match symbol.size {
            0 => symbol.value,
            size => extend(reader.take(size), size),
        };
        block[usize::from(ZIGZAG[k & 63])] = truncated(value << scan.low);
        k += 1;
    }
    Ok(())
}

/// How many blocks end, this one included.
#[inline(always)]
fn blocks_ended(exponent: i32, reader: &mut BitReader) -> u32 {
    let exponent = exponent.cast_unsigned();
    (1 << exponent) + reader.take(exponent)
}

/// Decodes the next lower bit of coefficients.
#[inline(always)]
fn next_bit(
    table: &Table,
    reader: &mut BitReader,
    scan: &Scan,
    block: &mut [i16; 64],
    ended: &mut u32,
) -> Result<(), &'static str> {
    let unit = 1_i16 << scan.low;
    let correct = |reader: &mut BitReader, value: &mut i16| {
        reader.refill_to(1);
        if reader.take(1) == 1 && *value & unit == 0 {
            *value = value.wrapping_add(if *value > 0 { unit } else { -unit });
        }
    };
    let mut k = scan.first;
    while *ended == 0 && k <= scan.last {
        reader.refill_to(33);
        let symbol = table.next(reader);
        if symbol.len == 0 {
            return Err(NO_CODE);
        }
        if symbol.advance == END_OF_BLOCK {
            *ended = blocks_ended(symbol.value, reader);
            break;
        }
        let value = match symbol.size {
            0 => symbol.value,
            1 => extend(reader.take(1), 1),
            _ => return Err("a correction has more than one bit"),
        };
        if value.abs() > 1 {
            return Err("a correction has more than one bit");
        }
        let mut zeros = symbol.advance - 1;
        while k <= scan.last {
            let place = &mut block[usize::from(ZIGZAG[k & 63])];
            if *place != 0 {
                correct(reader, place);
            } else if zeros == 0 {
                *place = truncated(value << scan.low);
                break;
            } else {
                zeros -= 1;
            }
            k += 1;
        }
        k += 1;
    }
    if *ended > 0 {
        for k in k..=scan.last {
            let place = &mut block[usize::from(ZIGZAG[k & 63])];
            if *place != 0 {
                correct(reader, place);
            }
        }
        *ended -= 1;
    }
    Ok(())
}

/// The position after a scan's data, where the next marker is.
pub(super) fn end_of(
    file: &[u8],
    data: &EntropyData,
    allow_damaged: bool,
) -> Result<usize, Problem> {
    match data.end {
        Some(end) => Ok(next_marker(file, end).unwrap_or(end)),
        None if allow_damaged => Ok(file.len()),
        None => Err(damaged(file.len(), "the file ends inside of the image: it was cut short")),
    }
}
