//! Local files that are being written.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::storage::WriteFile;
use crate::{Error, Result, platform};

/// A file of the local file system that is being written.
#[derive(Debug)]
pub(crate) struct NewFile {
    path: PathBuf,
    file: File,
    /// Syncs the file; tests replace it by a function that fails.
    sync: fn(&File) -> io::Result<()>,
}

impl NewFile {
    /// Creates the file at `path`, replacing any existing file.
    pub(crate) fn boxed(path: &Path) -> Result<Box<dyn WriteFile>> {
        Self::synced_by(path, File::sync_all)
    }

    /// Creates the file at `path`, at which there must be none, not even a link to nowhere.
    pub(crate) fn boxed_new(path: &Path) -> Result<Box<dyn WriteFile>> {
        let file = File::create_new(path).map_err(|error| Error::io(path, "open", error))?;
        Ok(Box::new(Self { path: path.to_owned(), file, sync: File::sync_all }))
    }

    /// A file that `sync` syncs.
    pub(crate) fn synced_by(
        path: &Path,
        sync: fn(&File) -> io::Result<()>,
    ) -> Result<Box<dyn WriteFile>> {
        let file = File::create(path).map_err(|error| Error::io(path, "open", error))?;
        Ok(Box::new(Self { path: path.to_owned(), file, sync }))
    }
}

impl Write for NewFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl WriteFile for NewFile {
    /// Syncs the file, except if it is one that cannot be synced.
    fn close(self: Box<Self>) -> Result<()> {
        match (self.sync)(&self.file) {
            Err(error) if !platform::is_not_syncable(&error) => {
                Err(Error::io(&self.path, "sync", error))
            }
            _ => Ok(()),
        }
    }
}
