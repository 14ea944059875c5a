//! The points at which decompression of a stream can start, and the chunks between them.

use super::super::format_error::{FormatError, StreamError};
use super::super::record_limit::check_decoded_len;
use super::super::riegeli::decompress::{Decompressor, codec};
use super::compression::Compression;
use super::inflate::{Boundary, Inflate, Input, WINDOW_LEN};

/// How many decompressed bytes are between two points, at least.
const SPACING: u64 = 1 << 20;
/// The same of zstd, whose points have no window, so they may be closer.
const ZSTD_SPACING: u64 = 64 << 10;
/// How many bytes all points may take; with more, every second one is dropped.
const MAX_POINTS_LEN: usize = 64 << 20;
/// How many decompressed bytes of zstd may be between two points: as frames of `pzstd` have at high
/// levels. What is between two points is decompressed for each record unless it is cached.
const MAX_FRAME_LEN: u64 = 128 << 20;
const FRAME_PROBLEM: &str = "no zstd frame begins within 128 MiB, so records can only be read in order \
                             (`JsonLinesIterDataset`, `TFRecordIterDataset`); decompress the file \
                             by `zstd -d`, write many frames, by `pzstd`, as seekable zstd, or by \
                             `zstd` of parts that `cat` joins, or convert it by `grainmill convert`";
/// A decompressor is given this many bytes more than it should need.
const SLACK: u64 = 8;

/// A point at which decompression can start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Point {
    /// The position in the file.
    pub(super) at: u64,
    /// The position in the decompressed stream.
    pub(super) out_at: u64,
    /// The number of the first record that begins here or later.
    pub(super) first_record: u64,
    pub(super) boundary: Boundary,
    /// The decompressed bytes before it, compressed by zstd; empty at a header.
    pub(super) window: Vec<u8>,
    /// The CRC-32C of the decompressed bytes from here to the next point or the end.
    pub(super) crc: u32,
}

/// The points of a stream, in order; the first is its begin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Points {
    pub(super) compression: Compression,
    pub(super) all: Vec<Point>,
    /// The lengths of the file and of the decompressed stream.
    pub(super) byte_len: u64,
    pub(super) out_len: u64,
}

/// Collects points during a scan.
#[derive(Debug)]
pub(super) struct PointsBuilder {
    compression: Compression,
    all: Vec<Point>,
    spacing: u64,
    points_len: usize,
}

impl Point {
    /// How much memory it takes.
    fn memory_len(&self) -> usize {
        size_of::<Self>() + self.window.len()
    }
}

impl PointsBuilder {
    pub(super) fn new(compression: Compression) -> Self {
        let begin = Point {
            at: 0,
            out_at: 0,
            first_record: 0,
            boundary: Boundary::Header,
            window: Vec::new(),
            crc: 0,
        };
        let spacing = if compression == Compression::Zstd { ZSTD_SPACING } else { SPACING };
        Self { compression, all: vec![begin], spacing, points_len: 0 }
    }

    /// Adds decompressed bytes, which end at `out_end`, to the checksum.
    pub(super) fn update(&mut self, piece: &[u8], out_end: u64) -> Result<(), FormatError> {
        let Some(point) = self.all.last_mut() else { return Ok(()) };
        if self.compression == Compression::Zstd && out_end - point.out_at > MAX_FRAME_LEN {
            return Err(FormatError::fixed(FRAME_PROBLEM));
        }
        point.crc = ::crc32c::crc32c_append(point.crc, piece);
        Ok(())
    }

    /// Adds a point at `out_at`, where the stream is, if the last one is far enough away.
    pub(super) fn offer(
        &mut self,
        inflate: &Inflate<'_>,
        out_at: u64,
        first_record: u64,
    ) -> Result<(), FormatError> {
        let last = self.all.last().map_or(0, |last| last.out_at);
        if out_at - last < self.spacing {
            return Ok(());
        }
        let Some(boundary) = inflate.boundary() else { return Ok(()) };
        let window = match boundary {
            Boundary::Header => Vec::new(),
            Boundary::Block(..) => {
                let mut packed = Vec::with_capacity(zstd_safe::compress_bound(WINDOW_LEN));
                zstd_safe::compress(&mut packed, &inflate.window(), 1)
                    .map_err(|_| FormatError::fixed("no memory for a zstd compressor"))?;
                packed.shrink_to_fit();
                packed
            }
        };
        let point = Point { at: inflate.at(), out_at, first_record, boundary, window, crc: 0 };
        self.points_len += point.memory_len();
        self.all.push(point);
        if self.points_len > MAX_POINTS_LEN {
            self.thin_out();
        }
        Ok(())
    }

    /// Drops every second point. The last one, whose checksum is not complete, stays the last.
    fn thin_out(&mut self) {
        self.spacing *= 2;
        let all = std::mem::take(&mut self.all);
        let out_ends: Vec<u64> = all.iter().skip(1).map(|point| point.out_at).collect();
        let last = all.len() - 1;
        for (number, point) in all.into_iter().enumerate() {
            if number % 2 == 0 || number == last {
                self.all.push(point);
            } else if let Some(before) = self.all.last_mut() {
                let len = usize::try_from(out_ends[number] - point.out_at).unwrap_or(usize::MAX);
                before.crc = ::crc32c::crc32c_combine(before.crc, point.crc, len);
            }
        }
        self.points_len = self.all.iter().map(Point::memory_len).sum();
    }

    pub(super) fn finish(self, byte_len: u64, out_len: u64) -> Points {
        Points { compression: self.compression, all: self.all, byte_len, out_len }
    }
}

impl Points {
    /// The number of the point before `record`, of which the next records begin.
    pub(super) fn of_record(&self, record: u64) -> usize {
        self.all.partition_point(|point| point.first_record <= record).saturating_sub(1)
    }

    /// The records that begin between point `number` and the next.
    pub(super) fn records(&self, number: usize, num_records: u64) -> std::ops::Range<u64> {
        let end = self.all.get(number + 1).map_or(num_records, |next| next.first_record);
        self.all[number].first_record..end
    }

    /// The first point from `number` on that is not before `out_at`, or the number of points.
    fn reached(&self, number: usize, out_at: u64) -> usize {
        number + self.all[number..].partition_point(|point| point.out_at < out_at)
    }

    /// Where the compressed bytes end from which the stream up to `out_at` follows.
    pub(super) fn end_of(&self, number: usize, out_at: u64) -> u64 {
        let point = self.all.get(self.reached(number, out_at).max(number + 1));
        point.map_or(self.byte_len, |point| (point.at + SLACK).min(self.byte_len))
    }

    /// Decompresses `raw`, the bytes of the file from point `number` on; `out` gets the stream from
    /// there up to a point at or after `out_at`. All of it is verified.
    pub(super) fn inflate(
        &self,
        number: usize,
        out_at: u64,
        raw: &[u8],
        decompressor: &mut Decompressor,
        out: &mut Vec<u8>,
    ) -> Result<(), FormatError> {
        let begin = &self.all[number];
        let reached = self.reached(number, out_at).max(number + 1);
        let out_end = self.all.get(reached).map_or(self.out_len, |point| point.out_at);
        let len = out_end - begin.out_at;
        check_decoded_len(len, raw.len() as u64)?;
        if self.compression == Compression::Zstd {
            let end = self.all.get(reached).map_or(self.byte_len, |point| point.at);
            let frames = usize::try_from(end - begin.at).ok().and_then(|len| raw.get(..len));
            decompressor.decompress_stream(codec::ZSTD, frames.unwrap_or(raw), len, out)?;
        } else {
            self.inflate_blocks(begin, raw, len, out)?;
        }
        let mut rest = &out[..];
        for (at, point) in self.all[number..reached].iter().enumerate() {
            let end = self.all.get(number + at + 1).map_or(self.out_len, |next| next.out_at);
            let len = usize::try_from(end - point.out_at).unwrap_or(usize::MAX);
            let (part, after) = rest.split_at_checked(len).unwrap_or((rest, &[]));
            if ::crc32c::crc32c(part) != point.crc {
                return Err(FormatError::fixed(
                    "decompressed data differ from those that were indexed",
                ));
            }
            rest = after;
        }
        Ok(())
    }

    /// Decompresses `raw`, which is gzip or zlib from the point `begin` on, to `len` bytes.
    fn inflate_blocks(
        &self,
        begin: &Point,
        raw: &[u8],
        len: u64,
        out: &mut Vec<u8>,
    ) -> Result<(), FormatError> {
        let mut window = Vec::with_capacity(WINDOW_LEN);
        if !begin.window.is_empty() {
            zstd_safe::decompress(&mut window, &begin.window)
                .map_err(|_| FormatError::fixed("the index has a damaged window"))?;
        }
        let input = Input::of_bytes(raw, begin.at);
        let mut inflate = Inflate::new(input, self.compression, begin.boundary, &window)?;
        out.clear();
        let len = usize::try_from(len).map_err(|_| FormatError::fixed("no memory for a chunk"))?;
        out.try_reserve(len).map_err(|_| FormatError::fixed("no memory for a chunk"))?;
        while out.len() < len {
            let piece = match inflate.next() {
                Ok(Some(piece)) => piece,
                Ok(None) => return Err(FormatError::fixed("compressed data end too early")),
                Err(StreamError::Data(problem)) => return Err(problem),
                Err(StreamError::File(error)) => return Err(FormatError::new(error.to_string())),
            };
            out.extend_from_slice(&piece[..piece.len().min(len - out.len())]);
        }
        Ok(())
    }
}
