//! Every way the engine can fail.

use std::path::PathBuf;

/// A failure of the engine, with the place it happened at.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument lies outside what the called function is defined for.
    #[error("{0}")]
    InvalidArgument(String),
    /// A position lies outside the records of a source.
    #[error("{0}")]
    OutOfRange(String),
    /// There is no memory for what an argument asks for.
    #[error("{0}")]
    OutOfMemory(String),
    /// The operating system refused to open or read a file.
    #[error("{path}: {action}: {source}")]
    Io {
        /// The file.
        path: String,
        /// What was being done, such as `open`.
        action: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file is no longer the one that was opened.
    #[error("{path}: the file was cut short, overwritten or replaced after it had been opened")]
    Changed {
        /// The file.
        path: String,
    },
    /// A file is not the one that an index was made of.
    #[error(
        "{path}: the index says {noted}, found {found}; delete the index file, so that it is \
         written anew"
    )]
    Outdated {
        /// The file.
        path: String,
        /// What it was when the index was made.
        noted: String,
        /// What it is.
        found: String,
    },
    /// A thread of the engine panicked, which is a defect of the engine.
    #[error("defect of the engine: {0}")]
    Panicked(String),
    /// Bytes of a file are not what its format demands.
    #[error("{path}: {place}: {problem}")]
    Corrupt {
        /// The file.
        path: String,
        /// Where in the file: a chunk, an offset, a record.
        place: String,
        /// What is wrong there.
        problem: String,
    },
}

impl Error {
    /// The failure of `action` on `path`.
    pub fn io(path: impl Into<PathBuf>, action: &'static str, source: std::io::Error) -> Self {
        Self::Io { path: path.into().display().to_string(), action, source }
    }
}

/// What a fallible function of the engine returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;
