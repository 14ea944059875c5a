//! What the headers of a JPEG file say: sizes, components, tables, orientation.

use super::huffman::{Kind, Table};
use super::problem::{Problem, damaged, unsupported};
use crate::orientation::Orientation;

/// What XMP data begin with.
const XMP: &[u8] = b"http://ns.adobe.com/xap/1.0/\0";

/// A component of the frame, such as luminance.
#[derive(Clone, Debug)]
pub(super) struct Component {
    pub(super) id: u8,
    /// Samples per MCU in each direction, in blocks: the sampling factors.
    pub(super) h: usize,
    pub(super) v: usize,
    /// Which quantization table it uses.
    table: usize,
    /// That table, row by row, from the component's first scan on.
    pub(super) quant: Option<[u16; 64]>,
}

/// How components become colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Colours {
    Gray,
    YCbCr,
    Rgb,
    Cmyk,
    Ycck,
}

/// A frame: what all scans share.
#[derive(Clone, Debug)]
pub(super) struct Frame {
    pub(super) width: usize,
    pub(super) height: usize,
    pub(super) progressive: bool,
    pub(super) components: Vec<Component>,
    pub(super) max_h: usize,
    pub(super) max_v: usize,
}

impl Frame {
    /// The number of MCUs of an interleaved scan, across and down.
    pub(super) fn mcus(&self) -> (usize, usize) {
        (self.width.div_ceil(8 * self.max_h), self.height.div_ceil(8 * self.max_v))
    }

    /// The number of a component's blocks that contain samples of the image.
    pub(super) fn blocks(&self, component: &Component) -> (usize, usize) {
        (
            (self.width * component.h).div_ceil(8 * self.max_h),
            (self.height * component.v).div_ceil(8 * self.max_v),
        )
    }
}

/// The header of a scan.
#[derive(Clone, Debug)]
pub(super) struct Scan {
    /// The components it contains, with the numbers of their DC and AC tables.
    pub(super) components: Vec<(usize, usize, usize)>,
    /// The first and last coefficient.
    pub(super) first: usize,
    pub(super) last: usize,
    /// Bits of earlier scans of these coefficients, 0 if there are none, and of this one.
    pub(super) high: u32,
    pub(super) low: u32,
    /// Where its data starts.
    pub(super) data: usize,
}

/// What a file's markers have defined so far.
#[derive(Default)]
pub(super) struct Headers {
    pub(super) frame: Option<Frame>,
    quant: [Option<[u16; 64]>; 4],
    pub(super) dc: [Option<Table>; 4],
    pub(super) ac: [Option<Table>; 4],
    pub(super) restart_interval: usize,
    jfif: bool,
    adobe: Option<u8>,
    pub(super) orientation: Orientation,
}

/// The position of the k-th coefficient of a scan in a block that is stored row by row.
pub(super) const ZIGZAG: [u8; 64] = zigzag();

const fn zigzag() -> [u8; 64] {
    let mut order = [0; 64];
    let (mut row, mut column, mut k) = (0_u8, 0_u8, 0);
    while k < 64 {
        order[k] = 8 * row + column;
        let up = (row + column) % 2 == 0;
        if up && column == 7 || !up && row == 7 {
            if up { row += 1 } else { column += 1 }
        } else if up && row == 0 || !up && column == 0 {
            if up { column += 1 } else { row += 1 }
        } else if up {
            row -= 1;
            column += 1;
        } else {
            row += 1;
            column -= 1;
        }
        k += 1;
    }
    order
}

impl Headers {
    /// Whether the Adobe marker is there, whose writers store CMYK inverted.
    pub(super) fn has_adobe(&self) -> bool {
        self.adobe.is_some()
    }

    /// The frame's colours, guessed from markers as libjpeg does.
    pub(super) fn colours(&self) -> Colours {
        let components = self.frame.as_ref().map_or(&[][..], |frame| &frame.components);
        match components {
            [_] => Colours::Gray,
            [a, b, c] => match self.adobe {
                _ if self.jfif => Colours::YCbCr,
                Some(0) => Colours::Rgb,
                None if [a.id, b.id, c.id] == *b"RGB" => Colours::Rgb,
                _ => Colours::YCbCr,
            },
            _ if self.adobe == Some(2) => Colours::Ycck,
            _ => Colours::Cmyk,
        }
    }

    /// Reads markers up to the frame's, which gives the size.
    pub(super) fn read_frame(&mut self, file: &[u8]) -> Result<&Frame, Problem> {
        self.read_until(file, 0, true)?;
        self.frame.as_ref().ok_or_else(|| damaged(file.len(), "there is no frame, so no size"))
    }

    /// Reads markers from `at` up to and including the next scan's; `None` at the end of the image.
    pub(super) fn read_scan(&mut self, file: &[u8], at: usize) -> Result<Option<Scan>, Problem> {
        self.read_until(file, at, false)
    }

    fn read_until(
        &mut self,
        file: &[u8],
        mut at: usize,
        to_frame: bool,
    ) -> Result<Option<Scan>, Problem> {
        loop {
            let marker_at = next_marker(file, at).ok_or_else(|| {
                damaged(file.len(), "the file ends before the image does: it was cut short")
            })?;
            let marker = file[marker_at + 1];
            at = marker_at + 2;
            match marker {
                // Start of image, restarts and TEM have no content.
                0xd8 | 0xd0..=0xd7 | 0x01 => continue,
                0xd9 => return Ok(None),
                _ => {}
            }
            let len =
                file.get(at..at + 2).map(|len| usize::from(u16::from_be_bytes([len[0], len[1]])));
            let content = match len {
                Some(0 | 1) => {
                    return Err(damaged(at, "a marker segment is shorter than its length"));
                }
                Some(len) => file.get(at + 2..at + len),
                None => None,
            };
            let Some(content) = content else {
                return Err(damaged(at, "the file ends inside of a header: it was cut short"));
            };
            at += 2 + content.len();
            let result = match marker {
                0xc0..=0xc2 => self.start_frame(content, marker == 0xc2),
                0xc4 => self.define_codes(content),
                0xc3 | 0xc5..=0xc7 | 0xcb | 0xcd..=0xcf => {
                    return Err(unsupported(marker_at, "lossless or hierarchical JPEG"));
                }
                0xc9 | 0xca | 0xcc => {
                    return Err(unsupported(marker_at, "JPEG with arithmetic coding"));
                }
                0xda => return self.start_scan(content, at).map(Some).map_err(|p| p.at(marker_at)),
                0xdb => self.define_quantization(content),
                0xdd => match content {
                    [a, b] => {
                        self.restart_interval = usize::from(u16::from_be_bytes([*a, *b]));
                        Ok(())
                    }
                    _ => Err(damaged(0, "a restart interval has the wrong length")),
                },
                0xe0 => {
                    self.jfif |= content.starts_with(b"JFIF\0");
                    Ok(())
                }
                0xe1 => {
                    // Once the size is known, it stays.
                    if self.frame.is_none() {
                        if let Some(exif) = content.strip_prefix(b"Exif\0\0") {
                            self.orientation.add_exif(exif);
                        } else if let Some(xmp) = content.strip_prefix(XMP) {
                            self.orientation.add_xmp(xmp);
                        }
                    }
                    Ok(())
                }
                0xee if content.len() >= 12 && content.starts_with(b"Adobe") => {
                    self.adobe = Some(content[11]);
                    Ok(())
                }
                _ => Ok(()),
            };
            result.map_err(|problem| problem.at(marker_at))?;
            if to_frame && self.frame.is_some() {
                return Ok(None);
            }
        }
    }

    fn start_frame(&mut self, content: &[u8], progressive: bool) -> Result<(), Problem> {
        if self.frame.is_some() {
            return Err(damaged(0, "there is a second frame"));
        }
        let [precision, h1, h0, w1, w0, count, components @ ..] = content else {
            return Err(damaged(0, "the frame's header is too short"));
        };
        let height = usize::from(u16::from_be_bytes([*h1, *h0]));
        let width = usize::from(u16::from_be_bytes([*w1, *w0]));
        if *precision != 8 {
            return Err(unsupported(0, format!("JPEG with {precision} bits per sample")));
        }
        if width == 0 || height == 0 {
            return Err(damaged(0, format!("the image has {width} x {height} pixels")));
        }
        if components.len() != 3 * usize::from(*count) {
            return Err(damaged(0, "the frame's header has the wrong length"));
        }
        if !matches!(count, 1 | 3 | 4) {
            return Err(unsupported(0, format!("JPEG with {count} components")));
        }
        let mut found = Vec::with_capacity(4);
        for entry in components.chunks_exact(3) {
            let (h, v) = (usize::from(entry[1] >> 4), usize::from(entry[1] & 15));
            if !(1..=4).contains(&h) || !(1..=4).contains(&v) || entry[2] > 3 {
                return Err(damaged(0, "a component has invalid sampling factors or tables"));
            }
            if found.iter().any(|other: &Component| other.id == entry[0]) {
                return Err(damaged(0, "two components have the same number"));
            }
            found.push(Component { id: entry[0], h, v, table: entry[2].into(), quant: None });
        }
        if *count == 1 {
            // Sampling factors mean nothing without other components.
            (found[0].h, found[0].v) = (1, 1);
        }
        let max_h = found.iter().map(|c| c.h).max().unwrap_or(1);
        let max_v = found.iter().map(|c| c.v).max().unwrap_or(1);
        if found.iter().any(|c| max_h % c.h != 0 || max_v % c.v != 0) {
            return Err(unsupported(0, "JPEG with fractional sampling"));
        }
        self.frame = Some(Frame { width, height, progressive, components: found, max_h, max_v });
        Ok(())
    }

    fn define_codes(&mut self, mut content: &[u8]) -> Result<(), Problem> {
        while let [class, rest @ ..] = content {
            let (number, is_ac) = (usize::from(class & 15), class >> 4);
            let Some((counts, rest)) = rest.split_first_chunk::<16>() else {
                return Err(damaged(0, "a Huffman table is too short"));
            };
            let total = counts.iter().map(|&count| usize::from(count)).sum();
            if number > 3 || is_ac > 1 || rest.len() < total {
                return Err(damaged(0, "a Huffman table has an invalid number or length"));
            }
            let (symbols, rest) = rest.split_at(total);
            let kind = if is_ac == 1 { Kind::Ac } else { Kind::Dc };
            let table = Table::new(kind, counts, symbols).map_err(|text| damaged(0, text))?;
            let tables = if is_ac == 1 { &mut self.ac } else { &mut self.dc };
            tables[number] = Some(table);
            content = rest;
        }
        Ok(())
    }

    fn define_quantization(&mut self, mut content: &[u8]) -> Result<(), Problem> {
        while let [class, rest @ ..] = content {
            let (number, wide) = (usize::from(class & 15), usize::from(class >> 4));
            let byte_len = 64 * (wide + 1);
            if number > 3 || wide > 1 || rest.len() < byte_len {
                return Err(damaged(0, "a quantization table has an invalid number or length"));
            }
            let (values, rest) = rest.split_at(byte_len);
            let mut table = [0; 64];
            for (k, value) in values.chunks_exact(wide + 1).enumerate() {
                let value = value.iter().fold(0, |value, &byte| value << 8 | u16::from(byte));
                table[usize::from(ZIGZAG[k])] = value;
            }
            self.quant[number] = Some(table);
            content = rest;
        }
        Ok(())
    }

    fn start_scan(&mut self, content: &[u8], data: usize) -> Result<Scan, Problem> {
        let Some(frame) = &mut self.frame else {
            return Err(damaged(0, "a scan comes before the frame"));
        };
        let Some((&count, rest)) = content.split_first() else {
            return Err(damaged(0, "a scan's header is too short"));
        };
        let count = usize::from(count);
        if !(1..=4).contains(&count) || rest.len() != 2 * count + 3 {
            return Err(damaged(0, "a scan's header has the wrong length"));
        }
        let (entries, parameters) = rest.split_at(2 * count);
        let mut components: Vec<(usize, usize, usize)> = Vec::with_capacity(count);
        for entry in entries.chunks_exact(2) {
            let index = frame.components.iter().position(|component| component.id == entry[0]);
            let (dc, ac) = (usize::from(entry[1] >> 4), usize::from(entry[1] & 15));
            let Some(index) = index else {
                return Err(damaged(0, "a scan has a component that the frame does not have"));
            };
            if dc > 3 || ac > 3 || components.iter().any(|&(other, ..)| other == index) {
                return Err(damaged(0, "a scan has invalid tables, or a component twice"));
            }
            let component = &mut frame.components[index];
            if component.quant.is_none() {
                component.quant = self.quant[component.table];
            }
            if component.quant.is_none() {
                return Err(damaged(0, "a component has no quantization table"));
            }
            components.push((index, dc, ac));
        }
        if count > 1
            && components
                .iter()
                .map(|&(i, ..)| &frame.components[i])
                .map(|c| c.h * c.v)
                .sum::<usize>()
                > 10
        {
            return Err(damaged(0, "a scan has more than 10 blocks per MCU"));
        }
        let (first, last) = (usize::from(parameters[0]), usize::from(parameters[1]));
        let (high, low) = (u32::from(parameters[2] >> 4), u32::from(parameters[2] & 15));
        let scan = Scan { components, first, last, high, low, data };
        if frame.progressive {
            let valid =
                if first == 0 { last == 0 } else { first <= last && last < 64 && count == 1 };
            if !valid || low > 13 || (high != 0 && high != low + 1) {
                return Err(damaged(0, "a progressive scan has invalid parameters"));
            }
            return Ok(scan);
        }
        // Frames of Motion JPEG have no tables.
        for &(_, dc, ac) in &scan.components {
            self.dc[dc] = self.dc[dc].take().or_else(|| Table::standard(Kind::Dc, dc));
            self.ac[ac] = self.ac[ac].take().or_else(|| Table::standard(Kind::Ac, ac));
        }
        // Other values are wrong, and ignored by all decoders.
        Ok(Scan { first: 0, last: 63, high: 0, low: 0, ..scan })
    }
}

/// The position of the next marker at or after `at`, skipping what is none.
pub(super) fn next_marker(file: &[u8], at: usize) -> Option<usize> {
    let pairs = file.get(at..)?.windows(2);
    pairs
        .into_iter()
        .position(|pair| pair[0] == 0xff && !matches!(pair[1], 0 | 0xff))
        .map(|i| at + i)
}
