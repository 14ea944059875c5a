//! Writes an `ArrayRecord` file: data chunks, then their index.

use std::io;
use std::path::{Path, PathBuf};

use super::footer::{MAGIC, VERSION};
use super::options::WriterOptions;
use crate::formats::checksum::highway::Hasher;
use crate::formats::riegeli::FormatError;
use crate::formats::riegeli::chunk::{ChunkHeader, kind};
use crate::formats::riegeli::compress::{Codec, Compressor};
use crate::formats::riegeli::encode::{Group, simple_data};
use crate::formats::riegeli::sink::ChunkSink;
use crate::formats::riegeli::transposed::encode::transposed_data;
use crate::io::new_file::NewFile;
use crate::io::storage::WriteFile;
use crate::varint::push_varint;
use crate::{Error, Result};

/// Writes records into an `ArrayRecord` file.
///
/// A file can be read once [`close`](Self::close) has returned without error: the system has
/// written all of it then, where the file is one that it can be asked to write. A writer that
/// is dropped before, or that has failed, leaves a file that every reader refuses. At most
/// one chunk, its compressed form and 1 MiB of output are kept in memory, with about ten
/// bytes per chunk for the index.
#[derive(Debug)]
pub struct RecordWriter {
    path: PathBuf,
    options: WriterOptions,
    compressor: Compressor,
    sink: ChunkSink<Box<dyn WriteFile>>,
    group: Group,
    /// The footer's entries: one message for each chunk written.
    entries: Group,
    num_records: u64,
    scratch: Vec<u8>,
    failure: Option<Failure>,
}

/// The first failure; all later calls fail the same way.
#[derive(Debug)]
struct Failure {
    action: &'static str,
    kind: io::ErrorKind,
    errno: Option<i32>,
    message: String,
}

impl RecordWriter {
    /// Creates a file at `path`, replacing any existing file.
    ///
    /// # Errors
    /// If the file cannot be created or the codec cannot be set up.
    pub fn create(path: impl AsRef<Path>, options: WriterOptions) -> Result<Self> {
        Self::create_in(path, options, NewFile::boxed)
    }

    /// As [`create`](Self::create), in the file that `open` creates.
    ///
    /// # Errors
    /// If `open` fails or the codec cannot be set up.
    pub fn create_in(
        path: impl AsRef<Path>,
        options: WriterOptions,
        open: impl FnOnce(&Path) -> Result<Box<dyn WriteFile>>,
    ) -> Result<Self> {
        let path = path.as_ref().to_owned();
        let compressor = Compressor::new(options.codec())
            .map_err(|problem| Error::io(&path, "compress", other(&problem)))?;
        let sink =
            ChunkSink::new(open(&path)?).map_err(|error| Error::io(&path, "write", error))?;
        Ok(Self {
            path,
            options,
            compressor,
            sink,
            group: Group::default(),
            entries: Group::default(),
            num_records: 0,
            scratch: Vec::new(),
            failure: None,
        })
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How many records have been written.
    pub fn num_records(&self) -> u64 {
        self.num_records
    }

    /// Whether nothing has failed yet.
    pub fn is_ok(&self) -> bool {
        self.failure.is_none()
    }

    /// Whether the next record completes a chunk, so that it is compressed and written.
    pub fn next_completes_chunk(&self) -> bool {
        self.group.num_records() + 1 >= u64::from(self.options.group_size())
    }

    /// Appends a record.
    ///
    /// # Errors
    /// If the chunk that it completes cannot be written, or anything has failed before.
    pub fn write(&mut self, record: &[u8]) -> Result<()> {
        self.check()?;
        self.group.push(record);
        self.num_records += 1;
        if self.group.num_records() < u64::from(self.options.group_size()) {
            return Ok(());
        }
        let result = self.write_data_chunk();
        self.record_failure(result)
    }

    /// Writes the last chunk and the index, without which the file cannot be read, and syncs it.
    ///
    /// Some file systems report that a write has failed, as for want of space, only when the file
    /// is synced. Pipes and devices that cannot be synced are closed without.
    ///
    /// # Errors
    /// If that fails, or anything has failed before; the file is closed all the same.
    pub fn close(mut self) -> Result<()> {
        self.check()?;
        let result = self.write_end();
        self.record_failure(result)?;
        let Self { path, sink, .. } = self;
        let file = sink.finish().map_err(|error| Error::io(&path, "write", error))?;
        file.close()
    }

    fn write_end(&mut self) -> Result<(), WriteError> {
        if self.group.num_records() > 0 {
            self.write_data_chunk()?;
        }
        let footer_offset = self.write_footer()?;
        self.sink.pad_to_block()?;
        self.write_postscript(footer_offset)?;
        Ok(self.sink.pad_to_block()?)
    }

    /// Appends chunks that a [`ChunkEncoder`] with the same options has encoded.
    ///
    /// Each but the last of a file has `group_size` records.
    ///
    /// # Errors
    /// If they cannot be written, anything has failed before, or a chunk is incomplete that is not
    /// the last.
    pub fn write_encoded(&mut self, chunks: &EncodedChunks) -> Result<()> {
        self.check()?;
        let result = self.append_encoded(chunks);
        self.record_failure(result)
    }

    fn append_encoded(&mut self, chunks: &EncodedChunks) -> Result<(), WriteError> {
        let mut begin = 0;
        for header in &chunks.headers {
            let group_size = u64::from(self.options.group_size());
            if self.group.num_records() > 0 || !self.num_records.is_multiple_of(group_size) {
                return Err(FormatError::fixed("a chunk follows an incomplete one").into());
            }
            let end = usize::try_from(header.data_len).map_or(usize::MAX, |len| begin + len);
            let data = chunks.bytes.get(begin..end).ok_or(FormatError::fixed("a chunk is cut"))?;
            self.num_records += header.num_records;
            let at = self.sink.write_hashed(header, &[data])?;
            self.add_to_index(at, header.decoded_len, header.num_records)?;
            begin = end;
        }
        Ok(())
    }

    fn write_data_chunk(&mut self) -> Result<(), WriteError> {
        let (num_records, decoded_len) = (self.group.num_records(), self.group.decoded_len());
        let (kind, parts) =
            chunk_data(&self.group, &self.options, &mut self.compressor, &mut self.scratch)?;
        let begin = self.sink.write_chunk(kind, num_records, decoded_len, &parts)?;
        self.group.clear();
        self.add_to_index(begin, decoded_len, num_records)
    }

    fn add_to_index(
        &mut self,
        begin: u64,
        decoded_len: u64,
        num_records: u64,
    ) -> Result<(), WriteError> {
        if self.options.pad_to_block_boundary() {
            self.sink.pad_to_block()?;
        }
        self.scratch.clear();
        for (number, value) in [(1, begin), (2, decoded_len), (3, num_records)] {
            push_number(&mut self.scratch, number, value);
        }
        self.entries.push(&self.scratch);
        Ok(())
    }

    /// The index: a description of the file, then the entries of all chunks.
    fn write_footer(&mut self) -> Result<u64, WriteError> {
        let mut metadata = Vec::new();
        for (number, value) in
            [(1, VERSION), (2, self.entries.num_records()), (3, self.num_records)]
        {
            push_number(&mut metadata, number, value);
        }
        push_bytes(&mut metadata, 4, self.options.to_string().as_bytes());
        let mut description = Vec::new();
        push_bytes(&mut description, 1, &metadata);

        let mut footer = Group::default();
        footer.push(&description);
        footer.extend(&self.entries);
        let parts = simple_data(&footer, &mut self.compressor, &mut self.scratch)?;
        let (num_records, decoded_len) = (footer.num_records(), footer.decoded_len());
        Ok(self.sink.write_chunk(kind::SIMPLE, num_records, decoded_len, &parts)?)
    }

    /// Writes the chunk in the last block, which holds the footer's offset.
    fn write_postscript(&mut self, footer_offset: u64) -> Result<(), WriteError> {
        let mut message = Vec::new();
        push_number(&mut message, 1, footer_offset);
        push_number(&mut message, 2, MAGIC);
        let mut group = Group::default();
        for _ in 0..3 {
            group.push(&message);
        }
        let mut plain = Compressor::new(Codec::Uncompressed)?;
        let parts = simple_data(&group, &mut plain, &mut self.scratch)?;
        self.sink.write_chunk(kind::SIMPLE, 3, group.decoded_len(), &parts)?;
        Ok(())
    }

    fn check(&self) -> Result<()> {
        match &self.failure {
            None => Ok(()),
            Some(failure) => Err(Error::io(&self.path, failure.action, failure.to_error())),
        }
    }

    /// Stores the first failure.
    fn record_failure(&mut self, result: Result<(), WriteError>) -> Result<()> {
        let (action, error) = match result {
            Ok(()) => return Ok(()),
            Err(WriteError::Write(error)) => ("write", error),
            Err(WriteError::Encode(problem)) => ("compress", other(&problem)),
        };
        self.failure = Some(Failure {
            action,
            kind: error.kind(),
            errno: error.raw_os_error(),
            message: error.to_string(),
        });
        self.check()
    }
}

/// The kind and the data of a chunk of `group`; `scratch` holds what is not in `group`.
fn chunk_data<'a>(
    group: &'a Group,
    options: &WriterOptions,
    compressor: &mut Compressor,
    scratch: &'a mut Vec<u8>,
) -> Result<(u8, [&'a [u8]; 2]), FormatError> {
    match options.transposed_bucket_len() {
        None => Ok((kind::SIMPLE, simple_data(group, compressor, scratch)?)),
        Some(len) => {
            transposed_data(group, len, compressor, scratch)?;
            Ok((kind::TRANSPOSED, [&scratch[..], &[]]))
        }
    }
}

/// Chunks that have been encoded and not been written yet.
#[derive(Debug, Default)]
pub struct EncodedChunks {
    /// The data of all chunks back to back.
    bytes: Vec<u8>,
    headers: Vec<ChunkHeader>,
}

impl EncodedChunks {
    /// Removes the chunks but keeps the memory for the next ones.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.headers.clear();
    }
}

/// Encodes chunks of a file on any thread.
#[derive(Debug)]
pub struct ChunkEncoder {
    options: WriterOptions,
    compressor: Compressor,
    group: Group,
    scratch: Vec<u8>,
}

impl ChunkEncoder {
    /// An encoder for a file with these options.
    ///
    /// # Errors
    /// If the codec cannot be set up.
    pub fn new(options: WriterOptions) -> Result<Self, FormatError> {
        let compressor = Compressor::new(options.codec())?;
        Ok(Self { options, compressor, group: Group::default(), scratch: Vec::new() })
    }

    /// Appends to `out` the chunks of `records`, of which the first begins a chunk.
    ///
    /// # Errors
    /// If the codec fails.
    pub fn encode<'a>(
        &mut self,
        records: impl Iterator<Item = &'a [u8]>,
        out: &mut EncodedChunks,
    ) -> Result<(), FormatError> {
        let group_size = u64::from(self.options.group_size());
        for record in records {
            self.group.push(record);
            if self.group.num_records() >= group_size {
                self.encode_chunk(out)?;
            }
        }
        if self.group.num_records() > 0 {
            self.encode_chunk(out)?;
        }
        Ok(())
    }

    fn encode_chunk(&mut self, out: &mut EncodedChunks) -> Result<(), FormatError> {
        let (num_records, decoded_len) = (self.group.num_records(), self.group.decoded_len());
        let (kind, parts) =
            chunk_data(&self.group, &self.options, &mut self.compressor, &mut self.scratch)?;
        let mut hasher = Hasher::default();
        let mut data_len = 0;
        for part in parts {
            hasher.update(part);
            out.bytes.extend_from_slice(part);
            data_len += part.len() as u64;
        }
        let data_hash = hasher.finish();
        out.headers.push(ChunkHeader { data_len, data_hash, kind, num_records, decoded_len });
        self.group.clear();
        Ok(())
    }
}

/// Why a chunk could not be written.
enum WriteError {
    Encode(FormatError),
    Write(io::Error),
}

impl From<FormatError> for WriteError {
    fn from(problem: FormatError) -> Self {
        Self::Encode(problem)
    }
}

impl From<io::Error> for WriteError {
    fn from(error: io::Error) -> Self {
        Self::Write(error)
    }
}

impl Failure {
    fn to_error(&self) -> io::Error {
        match self.errno {
            Some(errno) => io::Error::from_raw_os_error(errno),
            None => io::Error::new(self.kind, self.message.clone()),
        }
    }
}

fn other(problem: &FormatError) -> io::Error {
    io::Error::other(problem.to_string())
}

/// Appends a field of a protocol buffer message.
fn push_number(out: &mut Vec<u8>, number: u64, value: u64) {
    push_varint(out, number << 3);
    push_varint(out, value);
}

/// Appends a length-delimited field of a protocol buffer message.
fn push_bytes(out: &mut Vec<u8>, number: u64, value: &[u8]) {
    push_varint(out, number << 3 | 2);
    push_varint(out, value.len() as u64);
    out.extend_from_slice(value);
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use super::*;

    fn writer(path: &Path, sync: fn(&File) -> io::Result<()>) -> RecordWriter {
        let open = |path: &Path| NewFile::synced_by(path, sync);
        let mut writer = RecordWriter::create_in(path, WriterOptions::default(), open).unwrap();
        writer.write(b"record").unwrap();
        writer
    }

    #[test]
    fn an_error_of_sync_is_the_error_of_close() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("late.array_record");
        let writer = writer(&path, |_| Err(io::ErrorKind::StorageFull.into()));
        let message = writer.close().unwrap_err().to_string();
        assert_eq!(message, format!("{}: sync: no storage space", path.display()));
    }

    #[test]
    fn all_bytes_are_written_when_the_file_is_synced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file.array_record");
        let writer = writer(&path, |file| match file.metadata()?.len() {
            0x20000 => Err(io::ErrorKind::Other.into()), // the block of the chunks, and the last
            _ => Ok(()),
        });
        assert!(writer.close().is_err());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn file_is_closed_where_it_cannot_be_synced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("late.array_record");
        let writer = writer(&path, |_| Err(io::ErrorKind::StorageFull.into()));
        let is_open = || {
            let open = fs::read_dir("/proc/self/fd").unwrap();
            open.filter_map(|entry| fs::read_link(entry.unwrap().path()).ok())
                .any(|target| target == path)
        };
        assert!(is_open());
        assert!(writer.close().is_err());
        assert!(!is_open());
    }

    #[cfg(unix)]
    #[test]
    fn files_that_do_not_support_sync_are_closed_without_error() {
        use rustix::io::Errno;

        let dir = tempfile::tempdir().unwrap();
        let refusals: [fn(&File) -> io::Result<()>; 3] = [
            |_| Err(Errno::INVAL.into()),
            |_| Err(Errno::ROFS.into()),
            |_| Err(Errno::NOTSUP.into()),
        ];
        for refusal in refusals {
            writer(&dir.path().join("file.array_record"), refusal).close().unwrap();
        }
        writer(Path::new("/dev/null"), File::sync_all).close().unwrap();
    }
}
