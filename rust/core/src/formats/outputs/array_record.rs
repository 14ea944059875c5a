//! `ArrayRecord` files.

use std::path::{Path, PathBuf};

use super::output::{Encoded, Encoder, OpenFile, Output};
use crate::formats::array_record::writer::ChunkEncoder;
use crate::formats::array_record::{RecordWriter, WriterOptions};
use crate::formats::format_error::FormatError;
use crate::formats::sequential::RecordBlock;
use crate::{Error, Result};

#[derive(Debug)]
pub(super) struct ArrayRecordOutput {
    options: WriterOptions,
    writer: RecordWriter,
}

#[derive(Debug)]
struct ArrayRecordEncoder {
    path: PathBuf,
    chunks: ChunkEncoder,
}

impl ArrayRecordOutput {
    pub(super) fn create(path: &Path, options: &str, open: OpenFile<'_>) -> Result<Self> {
        let options = options.parse()?;
        Ok(Self { options, writer: RecordWriter::create_in(path, options, open)? })
    }
}

impl Output for ArrayRecordOutput {
    fn group_size(&self) -> usize {
        usize::try_from(self.options.group_size()).unwrap_or(usize::MAX)
    }

    fn encoder(&self) -> Result<Box<dyn Encoder>> {
        let path = self.writer.path().to_owned();
        let chunks = ChunkEncoder::new(self.options).map_err(|problem| refused(&path, &problem))?;
        Ok(Box::new(ArrayRecordEncoder { path, chunks }))
    }

    fn append(&mut self, encoded: &Encoded) -> Result<()> {
        self.writer.write_encoded(&encoded.chunks)
    }

    fn close(self: Box<Self>) -> Result<()> {
        self.writer.close()
    }
}

impl Encoder for ArrayRecordEncoder {
    fn encode(&mut self, block: &RecordBlock, out: &mut Encoded) -> Result<()> {
        out.clear();
        self.chunks
            .encode(block.iter(), &mut out.chunks)
            .map_err(|problem| refused(&self.path, &problem))
    }
}

#[cold]
fn refused(path: &Path, problem: &FormatError) -> Error {
    Error::io(path, "compress", std::io::Error::other(problem.to_string()))
}
