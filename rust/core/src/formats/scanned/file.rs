//! A file whose records a scan has found.

use std::mem::MaybeUninit;
use std::path::Path;
use std::sync::Arc;

use super::super::checksum::UnverifiedRecord;
use super::super::chunk_records::ChunkRecords;
use super::super::decode_scratch::{DecodeScratch, FormatScratch, MAX_RETAINED_LEN};
use super::super::format::{Format, OpenedFile};
use super::super::format_error::FormatError;
use super::super::index_cache::IndexHandle;
use super::super::offsets::Offsets;
use super::super::raw_bytes::{WHOLE_READ_LEN, grow_to};
use super::super::record_file::{DirectRead, Pick, RecordFile};
use super::super::riegeli::decompress::Decompressor;
use super::compression::{Compression, HEAD_LEN};
use super::framing::Framing;
use super::index::{Index, extent};
use super::index_file::{Identity, IndexPlaces, ends_hash, identity};
use super::inflate::{self, Input};
use super::scan::{ScanError, scan};
use super::stream::Points;
use crate::io::storage::{FileHandle, Reader, Storage, StoredFile};
use crate::io::storage_latency::StorageLatency;
use crate::{Error, Result};

/// A format whose files are scanned.
#[derive(Debug, Clone)]
pub struct ScannedFormat<F> {
    /// How records follow each other.
    pub framing: F,
    /// How files are compressed; `None` finds out by the first bytes of each.
    pub compression: Option<Compression>,
    /// Where indices are kept.
    pub places: IndexPlaces,
}

impl<F: Framing> Format for ScannedFormat<F> {
    fn open(&self, file: OpenedFile<'_>) -> Result<Arc<dyn RecordFile>> {
        let OpenedFile { stored, reader, storage, latency, .. } = file;
        let (ends_hash, head) = ends_hash(reader, stored.byte_len())?;
        let compression = match self.compression {
            Some(compression) => compression,
            None => self.framing.compression(stored.path(), &head)?,
        };
        if !compression.has_random_access() {
            let name = compression.name();
            let text = format!(
                "compressed by {name}, which has no random access: read lines in order with \
                 `JsonLinesIterDataset`, TFRecord with `TFRecordIterDataset`, or decompress the file"
            );
            return Err(Error::corrupt(stored.path(), "whole file", text));
        }
        let identity = identity(self.framing.name(), compression, &*stored, ends_hash);
        let index = self.index(storage, reader, latency, stored.path(), &identity, &head)?;
        let begins = IndexHandle::default();
        let (num_records, end) = (index.num_records(), index.end);
        // Offsets of a compressed file are needed to decode, so they stay.
        if index.points.is_none() {
            begins.keep(&index.begins);
        }
        let stream = index.points.map(|points| Stream { points, begins: index.begins });
        let (format, storage) = (self.clone(), Arc::clone(storage));
        Ok(Arc::new(ScannedFile {
            begins,
            stored,
            storage,
            format,
            identity,
            num_records,
            end,
            stream,
        }))
    }
}

impl<F: Framing> ScannedFormat<F> {
    /// Checks that what a file that begins with `head` decompresses to is not of another kind.
    fn check_content(
        &self,
        path: &Path,
        head: &[u8],
        reader: Reader<'_>,
        identity: &Identity,
    ) -> Result<()> {
        let input = match identity.compression {
            Compression::None => return Ok(()),
            // A block of zstd, which may be of 128 KiB, is decompressed as a whole.
            Compression::Zstd => Input::with_head(head, reader, identity.byte_len),
            _ => Input::of_bytes(head, 0),
        };
        let content = inflate::head(input, identity.compression, HEAD_LEN)
            .map_err(|problem| Error::corrupt(path, "whole file", problem))?;
        self.framing.check_content(path, &content)
    }

    /// The index of a file that begins with `head`: from its index file if there is a valid one, else by
    /// a scan.
    fn index(
        &self,
        storage: &Arc<dyn Storage>,
        reader: Reader<'_>,
        latency: &StorageLatency,
        path: &Path,
        identity: &Identity,
        head: &[u8],
    ) -> Result<Index> {
        if let Some(index) = self.places.read(storage, latency, path, identity) {
            return Ok(index);
        }
        let content = self.check_content(path, head, reader, identity);
        let is_checked = content.is_ok();
        if self.compression.is_none() {
            content?;
        }
        let Identity { compression, byte_len, .. } = *identity;
        let index =
            scan(&self.framing, compression, reader, byte_len).map_err(|error| match error {
                ScanError::File(error) => error,
                ScanError::Damaged(record, at, problem) => {
                    Error::corrupt(path, compression.place(Some(record), at), problem)
                }
            })?;
        if is_checked {
            // One that cannot be written costs another scan, not an error.
            let _ = self.places.write(path, identity, &index);
        }
        Ok(index)
    }
}

/// What is needed to decode a compressed file.
#[derive(Debug)]
struct Stream {
    points: Arc<Points>,
    begins: Arc<Offsets>,
}

/// An open file.
#[derive(Debug)]
struct ScannedFile<F> {
    begins: IndexHandle,
    stored: Box<dyn StoredFile>,
    storage: Arc<dyn Storage>,
    format: ScannedFormat<F>,
    identity: Identity,
    num_records: u64,
    /// Where the last record ends.
    end: u64,
    stream: Option<Stream>,
}

/// Memory for decoded records, and what decompresses them.
#[derive(Debug, Default)]
struct Scratch {
    decompressor: Decompressor,
    stream: Vec<u8>,
    record: Vec<u8>,
    values: Vec<u8>,
    ends: Vec<usize>,
}

impl FormatScratch for Scratch {
    fn trim(&mut self) {
        for bytes in [&mut self.stream, &mut self.record, &mut self.values] {
            if bytes.capacity() > MAX_RETAINED_LEN {
                *bytes = Vec::new();
            }
        }
    }
}

impl<F: Framing> ScannedFile<F> {
    /// Where records begin, loaded again if they were evicted.
    #[cold]
    fn load(&self, latency: &StorageLatency) -> Result<Arc<Offsets>> {
        let handle =
            FileHandle::open(&*self.stored, latency, false, |reader| self.is_same(reader))?;
        let reader = handle.reader(latency);
        let Self { format, storage, identity, .. } = self;
        let path = self.stored.path();
        let index = format.index(storage, reader, latency, path, identity, &[])?;
        if (index.num_records(), index.end) != (self.num_records, self.end) {
            return Err(Error::Changed { path: path.display().to_string() });
        }
        Ok(index.begins)
    }

    fn damaged_at(&self, record: u64, at: u64, problem: &FormatError) -> Error {
        let place = self.identity.compression.place(Some(record), at);
        Error::corrupt(self.stored.path(), place, problem)
    }

    /// The records of the chunk of `pick` of a compressed file.
    fn decode_stream<'a>(
        &self,
        stream: &Stream,
        pick: &Pick,
        raw: &[u8],
        scratch: &'a mut Scratch,
    ) -> Result<ChunkRecords<'a>> {
        let Stream { points, begins } = stream;
        let number = points.of_record(pick.record);
        let records = points.records(number, self.num_records);
        let mut begins = begins.reader();
        let mut extent_of = |record| -> Result<_> {
            Ok(extent(&mut begins, self.end, record)?.unwrap_or_default())
        };
        let Scratch { decompressor, stream: out, record: part, values, ends } = scratch;
        let (begin, last) = (points.all[number].out_at, extent_of(records.end.saturating_sub(1))?);
        points
            .inflate(number, last.end, raw, decompressor, out)
            .map_err(|problem| self.damaged_at(pick.record, begin, &problem))?;
        values.clear();
        ends.clear();
        for record in records {
            let extent = extent_of(record)?;
            let within = |at: u64| usize::try_from(at - begin).unwrap_or(usize::MAX);
            let bytes = out.get(within(extent.start)..within(extent.end)).unwrap_or_default();
            let record = self
                .format
                .framing
                .record(bytes, part)
                .map_err(|problem| self.damaged_at(record, extent.start, &problem))?;
            values.extend_from_slice(record);
            ends.push(values.len());
        }
        Ok(ChunkRecords::new(values, ends))
    }
}

impl<F: Framing> RecordFile for ScannedFile<F> {
    fn stored(&self) -> &dyn StoredFile {
        &*self.stored
    }

    fn num_records(&self) -> u64 {
        self.num_records
    }

    fn stored_len(&self) -> u64 {
        self.end
    }

    fn has_groups(&self) -> bool {
        self.stream.is_some()
    }

    fn locate(&self, picks: &mut [Pick], latency: Option<&StorageLatency>) -> Result<bool> {
        if let Some(Stream { points, begins }) = &self.stream {
            let mut begins = begins.reader();
            for pick in picks {
                let number = points.of_record(pick.record);
                let records = points.records(number, self.num_records);
                let last = extent(&mut begins, self.end, records.end.saturating_sub(1))?;
                pick.begin = points.all[number].at;
                pick.end = points.end_of(number, last.map_or(self.end, |last| last.end));
                pick.within = pick.record - records.start;
            }
            return Ok(true);
        }
        let Some(begins) = self.begins.get(latency, |latency| self.load(latency))? else {
            return Ok(false);
        };
        let mut begins = begins.reader();
        for pick in picks {
            let extent = extent(&mut begins, self.end, pick.record)?;
            let extent = extent.expect("the number of a record");
            let len = self.format.framing.record_len(extent.end - extent.start);
            let lead_len = self.format.framing.lead_len().min(extent.start);
            (pick.begin, pick.end, pick.within) = (extent.start - lead_len, extent.end, 0);
            pick.predicted_len = u32::try_from(len).unwrap_or(0);
        }
        Ok(true)
    }

    fn is_same(&self, reader: Reader<'_>) -> Result<bool> {
        Ok(ends_hash(reader, self.stored.byte_len())?.0 == self.identity.ends_hash)
    }

    fn decode<'a>(
        &self,
        pick: &Pick,
        raw: &'a mut [u8],
        scratch: &'a mut DecodeScratch,
    ) -> Result<ChunkRecords<'a>> {
        let scratch: &mut Scratch = scratch.of();
        if let Some(stream) = &self.stream {
            return self.decode_stream(stream, pick, raw, scratch);
        }
        let framing = &self.format.framing;
        let record = framing
            .after_lead(raw, pick.begin, pick.end == self.end)
            .and_then(|bytes| framing.record(bytes, &mut scratch.record))
            .map_err(|problem| self.damaged(pick, &problem))?;
        scratch.ends.clear();
        scratch.ends.push(record.len());
        Ok(ChunkRecords::new(record, &scratch.ends))
    }

    fn read_chunk<'a>(
        &self,
        reader: Reader<'_>,
        pick: &Pick,
        raw: &'a mut Vec<u8>,
        scratch: &'a mut DecodeScratch,
    ) -> Result<ChunkRecords<'a>> {
        let framing = &self.format.framing;
        let damaged = |problem: FormatError| self.damaged(pick, &problem);
        let (len, head_len) = (pick.end - pick.begin, framing.head_len() as u64);
        if self.stream.is_none() && head_len > 0 && len > WHOLE_READ_LEN {
            let head = grow_to(raw, head_len).map_err(damaged)?;
            reader.read_at(head, pick.begin)?;
            framing.check_head(head, len).map_err(damaged)?;
        }
        let bytes = grow_to(raw, len).map_err(damaged)?;
        reader.read_at(bytes, pick.begin)?;
        self.decode(pick, bytes, scratch)
    }

    fn read_direct<'a>(
        &self,
        reader: Reader<'_>,
        pick: &Pick,
        out: &'a mut [MaybeUninit<u8>],
    ) -> Result<DirectRead<'a, UnverifiedRecord<'a>>> {
        self.format.framing.read_direct(reader, pick.extent(), out)
    }

    #[cold]
    fn damaged(&self, pick: &Pick, problem: &FormatError) -> Error {
        match &self.stream {
            None => {
                let lead_len = self.format.framing.lead_len().min(pick.begin);
                self.damaged_at(pick.record, pick.begin + lead_len, problem)
            }
            Some(stream) => {
                let begin = usize::try_from(pick.record).ok().and_then(|at| stream.begins.get(at));
                self.damaged_at(pick.record, begin.unwrap_or(0), problem)
            }
        }
    }
}
