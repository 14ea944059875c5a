//! The interface of a format: how a file that a storage has opened becomes a [`RecordFile`].

use std::fmt::Debug;
use std::sync::Arc;

use super::record_file::RecordFile;
use crate::Result;
use crate::io::storage::{ReadAt, Reader, Storage, StoredFile};
use crate::io::storage_latency::StorageLatency;

/// How records are laid out in files, with the options for reading them.
pub trait Format: Debug + Send + Sync {
    /// Opens a file of this format and finds out how many records it holds.
    ///
    /// # Errors
    /// If the file cannot be read, or is not of this format.
    fn open(&self, file: OpenedFile<'_>) -> Result<Arc<dyn RecordFile>>;
}

/// A file that a storage has just opened.
#[derive(Debug)]
pub struct OpenedFile<'a> {
    /// The file.
    pub stored: Box<dyn StoredFile>,
    /// Reads its bytes.
    pub reader: Reader<'a>,
    /// What `reader` reads: a storage may have sent the end of the file along.
    pub bytes: &'a Arc<dyn ReadAt>,
    /// Where it is, for files that belong to it.
    pub storage: &'a Arc<dyn Storage>,
    /// Measures the reads of such files.
    pub latency: &'a StorageLatency,
    /// Whether its records are read next, so that its index should be kept in memory.
    pub load_index: bool,
}
