//! Files that are a sequence of records and nothing else: `TFRecord` and lines of text, both
//! optionally compressed by gzip.

use std::io::Write;
use std::path::{Path, PathBuf};

use flate2::{Compression, GzBuilder};

use super::output::{Encoded, Encoder, OpenFile, Output, level_of};
use crate::formats::checksum::crc32c::masked as masked_crc;
use crate::formats::json_lines;
use crate::formats::sequential::RecordBlock;
use crate::io::storage::WriteFile;
use crate::{Error, Result};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Frames {
    TfRecord,
    Lines,
}

#[derive(Debug)]
pub(super) struct Framed {
    file: OutputFile,
    frames: Frames,
    gzip_level: Option<u32>,
}

#[derive(Debug)]
struct FrameEncoder {
    path: PathBuf,
    frames: Frames,
    gzip_level: Option<u32>,
    plain: Vec<u8>,
}

impl Framed {
    pub(super) fn create(
        path: &Path,
        format: &str,
        options: &str,
        open: OpenFile<'_>,
    ) -> Result<Self> {
        let frames = if format == "jsonl" { Frames::Lines } else { Frames::TfRecord };
        let mut gzip_level = None;
        for option in options.split(',').filter(|option| !option.is_empty()) {
            let level = level_of(option, "gzip", 6).unwrap_or_else(|| {
                let text = format!("unknown option `{option}`, valid option: gzip:LEVEL");
                Err(Error::InvalidArgument(text))
            })?;
            let valid = u32::try_from(level).ok().filter(|level| *level <= 9);
            gzip_level = Some(valid.ok_or_else(|| {
                Error::InvalidArgument(format!("level of `gzip` must be 0 to 9, got {level}"))
            })?);
        }
        Ok(Self { file: OutputFile::create(path, open)?, frames, gzip_level })
    }
}

impl Output for Framed {
    fn group_size(&self) -> usize {
        1
    }

    fn encoder(&self) -> Result<Box<dyn Encoder>> {
        let Self { file, frames, gzip_level } = self;
        Ok(Box::new(FrameEncoder {
            path: file.path.clone(),
            frames: *frames,
            gzip_level: *gzip_level,
            plain: Vec::new(),
        }))
    }

    fn append(&mut self, encoded: &Encoded) -> Result<()> {
        self.file.write(&encoded.bytes)
    }

    fn close(self: Box<Self>) -> Result<()> {
        self.file.close()
    }
}

impl FrameEncoder {
    fn push_frames(&self, block: &RecordBlock, out: &mut Vec<u8>) -> Result<()> {
        for (number, record) in (block.first()..).zip(block.iter()) {
            match self.frames {
                Frames::TfRecord => {
                    let len = (record.len() as u64).to_le_bytes();
                    out.extend_from_slice(&len);
                    out.extend_from_slice(&masked_crc(&len).to_le_bytes());
                    out.extend_from_slice(record);
                    out.extend_from_slice(&masked_crc(record).to_le_bytes());
                }
                Frames::Lines => {
                    let line = line_of(record).map_err(|problem| {
                        Error::InvalidArgument(format!(
                            "{}: record {number} {problem}, so it cannot be a line",
                            self.path.display()
                        ))
                    })?;
                    out.extend_from_slice(line);
                    out.push(b'\n');
                }
            }
        }
        Ok(())
    }
}

/// The line for `record`, without a byte order mark; or why it would not be read back as it is.
fn line_of(record: &[u8]) -> Result<&[u8], &'static str> {
    if record.contains(&b'\n') || record.ends_with(b"\r") && json_lines::record_of(record).is_some()
    {
        return Err("contains a line end");
    }
    json_lines::record_of(record).ok_or("is empty")
}

impl Encoder for FrameEncoder {
    fn encode(&mut self, block: &RecordBlock, out: &mut Encoded) -> Result<()> {
        out.clear();
        let Some(level) = self.gzip_level else {
            return self.push_frames(block, &mut out.bytes);
        };
        let mut plain = std::mem::take(&mut self.plain);
        plain.clear();
        self.push_frames(block, &mut plain)?;
        // A member for each block: readers take them for one stream.
        let mut gzip =
            GzBuilder::new().write(std::mem::take(&mut out.bytes), Compression::new(level));
        let written = gzip.write_all(&plain).and_then(|()| gzip.finish());
        out.bytes = written.map_err(|error| Error::io(&self.path, "compress", error))?;
        self.plain = plain;
        Ok(())
    }
}

/// A file that is written from its start to its end.
#[derive(Debug)]
pub(super) struct OutputFile {
    path: PathBuf,
    file: Box<dyn WriteFile>,
}

impl OutputFile {
    pub(super) fn create(path: &Path, open: OpenFile<'_>) -> Result<Self> {
        Ok(Self { path: path.to_owned(), file: open(path)? })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|error| Error::io(&self.path, "write", error))
    }

    pub(super) fn close(self) -> Result<()> {
        self.file.close()
    }
}
