//! Bagz files: records, each compressed on its own, and the end of each at the end of the file.

use std::path::{Path, PathBuf};

use zstd_safe::{CCtx, CParameter};

use super::framed::OutputFile;
use super::output::{Encoded, Encoder, OpenFile, Output, level_of};
use crate::formats::sequential::RecordBlock;
use crate::{Error, Result};

#[derive(Debug)]
pub(super) struct BagzOutput {
    file: OutputFile,
    /// The level of zstd, if records are compressed.
    level: Option<i32>,
    /// The end of each record, as the file stores it.
    limits: Vec<u8>,
    end: u64,
}

struct BagzEncoder {
    path: PathBuf,
    context: Option<CCtx<'static>>,
}

impl std::fmt::Debug for BagzEncoder {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("BagzEncoder").field("path", &self.path).finish_non_exhaustive()
    }
}

impl BagzOutput {
    pub(super) fn create(path: &Path, options: &str, open: OpenFile<'_>) -> Result<Self> {
        let mut level = Some(3);
        for option in options.split(',').filter(|option| !option.is_empty()) {
            level = match level_of(option, "zstd", 3) {
                Some(level) => Some(level?),
                None if option == "uncompressed" => None,
                None => {
                    let valid = "valid options: zstd:LEVEL, uncompressed";
                    let text = format!("unknown option `{option}`, {valid}");
                    return Err(Error::InvalidArgument(text));
                }
            };
        }
        Ok(Self { file: OutputFile::create(path, open)?, level, limits: Vec::new(), end: 0 })
    }
}

impl Output for BagzOutput {
    fn group_size(&self) -> usize {
        1
    }

    fn encoder(&self) -> Result<Box<dyn Encoder>> {
        let path = self.file.path().to_owned();
        let context = match self.level {
            None => None,
            Some(level) => {
                let mut context = CCtx::create();
                context
                    .set_parameter(CParameter::CompressionLevel(level))
                    .map_err(|code| refused(&path, code))?;
                Some(context)
            }
        };
        Ok(Box::new(BagzEncoder { path, context }))
    }

    fn append(&mut self, encoded: &Encoded) -> Result<()> {
        for len in &encoded.lens {
            self.end += len;
            self.limits.extend_from_slice(&self.end.to_le_bytes());
        }
        self.file.write(&encoded.bytes)
    }

    fn close(mut self: Box<Self>) -> Result<()> {
        self.file.write(&self.limits)?;
        self.file.close()
    }
}

impl Encoder for BagzEncoder {
    fn encode(&mut self, block: &RecordBlock, out: &mut Encoded) -> Result<()> {
        out.clear();
        for record in block.iter() {
            let begin = out.bytes.len();
            match &mut self.context {
                // An empty record is stored as no bytes.
                Some(context) if !record.is_empty() => {
                    out.bytes.resize(begin + zstd_safe::compress_bound(record.len()), 0);
                    let len = context
                        .compress2(&mut out.bytes[begin..], record)
                        .map_err(|code| refused(&self.path, code))?;
                    out.bytes.truncate(begin + len);
                }
                _ => out.bytes.extend_from_slice(record),
            }
            out.lens.push((out.bytes.len() - begin) as u64);
        }
        Ok(())
    }
}

#[cold]
fn refused(path: &Path, code: usize) -> Error {
    let problem = format!("zstd: {}", zstd_safe::get_error_name(code));
    Error::io(path, "compress", std::io::Error::other(problem))
}
