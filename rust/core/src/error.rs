//! The errors of the engine.

use std::fmt::Display;
use std::path::{Path, PathBuf};

/// An error of the engine, with its location.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument has an invalid value.
    #[error("{0}")]
    InvalidArgument(String),
    /// A position lies outside the records of a source.
    #[error("{0}")]
    OutOfRange(String),
    /// There is not enough memory for a size that an argument determines.
    #[error("{0}")]
    OutOfMemory(String),
    /// The operating system refused to open or read a file.
    #[error("{path}: {action}: {source}")]
    Io {
        /// The file.
        path: String,
        /// The operation that failed, such as `open`.
        action: &'static str,
        /// The error of the system.
        source: std::io::Error,
    },
    /// A file was changed after it had been opened.
    #[error("{path}: the file was cut short, overwritten or replaced after it had been opened")]
    Changed {
        /// The file.
        path: String,
    },
    /// A file was changed after its index had been written.
    #[error(
        "{path}: the index was written for {expected}, found {found}; delete the index file, so \
         that it is written again"
    )]
    Outdated {
        /// The file.
        path: String,
        /// The state of the file when the index was written.
        expected: String,
        /// Its state now.
        found: String,
    },
    /// What was asked for is in a part of the engine that this build lacks.
    #[error(
        "{what}: this build of grainmill was compiled without the feature `{feature}`; `make \
         develop` or `pip install .` compiles all of them"
    )]
    NotCompiled {
        /// What was asked for.
        what: String,
        /// The cargo feature that adds it.
        feature: &'static str,
    },
    /// The caller has ended a wait.
    #[error("interrupted")]
    Interrupted,
    /// A thread of the engine panicked, which is a bug.
    #[error("defect of the engine: {0}")]
    Panicked(String),
    /// A file violates its format.
    #[error("{path}: {place}: {problem}")]
    Corrupt {
        /// The file.
        path: String,
        /// The location in the file: a chunk, an offset, a record.
        place: String,
        /// What is wrong.
        problem: String,
    },
}

impl Error {
    /// An [`Error::Io`] of `action` on `path`.
    pub fn io(path: impl Into<PathBuf>, action: &'static str, source: std::io::Error) -> Self {
        Self::Io { path: path.into().display().to_string(), action, source }
    }

    /// An [`Error::Corrupt`]: what is wrong at `place` of the file at `path`.
    #[cold]
    pub fn corrupt(
        path: impl AsRef<Path>,
        place: impl Into<String>,
        problem: impl Display,
    ) -> Self {
        let path = path.as_ref().display().to_string();
        Self::Corrupt { path, place: place.into(), problem: problem.to_string() }
    }
}

/// The result of a fallible function of the engine.
pub type Result<T, E = Error> = std::result::Result<T, E>;
