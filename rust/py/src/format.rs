//! The formats of record files, as Python passes them to the engine.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use grainmill_core::Error;
use grainmill_core::formats::bagz::{Bagz, BagzCompression, Dictionary, Limits};
use grainmill_core::formats::fixed_len::FixedLen;
use grainmill_core::formats::json_lines::JsonLines;
use grainmill_core::formats::mds::Mds;
use grainmill_core::formats::megatron::{Megatron, token_type_of};
use grainmill_core::formats::ranges::Ranges;
use grainmill_core::formats::scanned::{Compression, Framing, IndexPlaces, ScannedFormat};
use grainmill_core::formats::tfrecord::TfRecord;
use grainmill_core::formats::web_dataset::WebDataset;
use grainmill_core::formats::{ArrayRecord, Format};
use pyo3::prelude::*;

use crate::error::Raised;

/// A format of record files, with the options for reading them.
#[pyclass(frozen, name = "Format", module = "grainmill._native")]
pub(crate) struct PyFormat(pub(crate) Arc<dyn Format>);

impl PyFormat {
    /// The format of files for which none is given.
    pub(crate) fn array_record() -> Arc<dyn Format> {
        Arc::new(ArrayRecord)
    }
}

#[pymethods]
impl PyFormat {
    /// `TFRecord` files, compressed by `compression`: "auto", "none", "gzip", "zlib" or "zstd". Their indices
    /// are beside them, if `beside`, or else in `index_dir`.
    #[staticmethod]
    fn tfrecord(
        compression: &str,
        beside: bool,
        index_dir: Option<PathBuf>,
    ) -> Result<Self, Raised> {
        scanned(TfRecord, compression, beside, index_dir)
    }

    /// Files of JSON lines; the arguments are those of `tfrecord`.
    #[staticmethod]
    fn json_lines(
        compression: &str,
        beside: bool,
        index_dir: Option<PathBuf>,
    ) -> Result<Self, Raised> {
        scanned(JsonLines, compression, beside, index_dir)
    }

    /// Tar files of `WebDataset`; the arguments are those of `tfrecord`.
    #[staticmethod]
    fn web_dataset(
        compression: &str,
        beside: bool,
        index_dir: Option<PathBuf>,
    ) -> Result<Self, Raised> {
        scanned(WebDataset, compression, beside, index_dir)
    }

    /// Bagz files, compressed by `compression`: "auto", "none" or "zstd", with limits in separate
    /// files or not.
    #[staticmethod]
    fn bagz(
        compression: &str,
        separate_limits: bool,
        dictionary: Option<&[u8]>,
    ) -> Result<Self, Raised> {
        let compression = match (compression, dictionary) {
            ("auto", None) => BagzCompression::ByName,
            ("none", None) => BagzCompression::None,
            ("zstd", dictionary) => {
                BagzCompression::Zstd(dictionary.map(Dictionary::new).transpose()?)
            }
            ("auto" | "none", Some(_)) => {
                let text = "`dictionary` needs `compression=\"zstd\"`".to_owned();
                return Err(Error::InvalidArgument(text).into());
            }
            (other, _) => return Err(unknown(other, "`auto`, `none` or `zstd`")),
        };
        let limits = if separate_limits { Limits::Separate } else { Limits::Tail };
        Ok(Self(Arc::new(Bagz { compression, limits })))
    }

    /// Files of records of `record_len` bytes, of which one begins `stride` bytes after the other, made of
    /// values of `value_len` bytes. `extents` has where the values of a file begin and end; those of
    /// others begin at byte `header_len`.
    #[staticmethod]
    fn fixed_len(
        record_len: u64,
        stride: u64,
        value_len: u64,
        header_len: u64,
        extents: HashMap<PathBuf, (u64, u64)>,
    ) -> Self {
        let extents = extents.into_iter().map(|(path, (begin, end))| (path, begin..end)).collect();
        Self(Arc::new(FixedLen { record_len, stride, value_len, header_len, extents }))
    }

    /// Files of Megatron-LM whose tokens have the type of this code.
    #[staticmethod]
    fn megatron(token_type: u8) -> Self {
        Self(Arc::new(Megatron { token_type }))
    }

    /// Shards of Mosaic Streaming that are not compressed.
    #[staticmethod]
    fn mds() -> Self {
        Self(Arc::new(Mds))
    }

    /// Compressed shards of Mosaic Streaming; the arguments are those of `tfrecord`.
    #[staticmethod]
    fn compressed_mds(
        compression: &str,
        beside: bool,
        index_dir: Option<PathBuf>,
    ) -> Result<Self, Raised> {
        scanned(Mds, compression, beside, index_dir)
    }

    /// Files whose records are where `ranges` says for each path: where each begins and ends.
    #[staticmethod]
    fn ranges(ranges: HashMap<PathBuf, Vec<(u64, u64)>>) -> Self {
        let of_file = |ranges: Vec<(u64, u64)>| ranges.into_iter().map(|(begin, end)| begin..end);
        let ranges =
            ranges.into_iter().map(|(path, each)| (path, of_file(each).collect())).collect();
        Self(Arc::new(Ranges { ranges }))
    }
}

/// The code and the name of the type of tokens that an index of Megatron-LM has, by its first bytes.
#[pyfunction]
fn megatron_token_type(path: &str, header: &[u8]) -> Result<(u8, &'static str), Raised> {
    let found = token_type_of(header).map(|(code, name, _)| (code, name));
    Ok(found.map_err(|problem| Error::corrupt(Path::new(path), "header at byte 0", problem))?)
}

fn scanned<F: Framing>(
    framing: F,
    compression: &str,
    beside: bool,
    dir: Option<PathBuf>,
) -> Result<PyFormat, Raised> {
    let known = |each: &Compression| each.has_random_access() && each.name() == compression;
    let compression = match Compression::ALL.into_iter().find(known) {
        None if compression != "auto" => {
            return Err(unknown(compression, "`auto`, `none`, `gzip`, `zlib` or `zstd`"));
        }
        found => found,
    };
    let places = IndexPlaces { beside, dir };
    Ok(PyFormat(Arc::new(ScannedFormat { framing, compression, places })))
}

fn unknown(compression: &str, known: &str) -> Raised {
    let text = format!("`compression` must be {known}, got {compression:?}");
    Error::InvalidArgument(text).into()
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyFormat>()?;
    module.add_function(wrap_pyfunction!(megatron_token_type, module)?)
}
