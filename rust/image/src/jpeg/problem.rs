//! What is wrong with a JPEG file.

use grainmill_core::Error;

use crate::common::corrupt;

/// What is wrong with a file, and where.
#[derive(Debug)]
pub(super) struct Problem {
    at: usize,
    text: String,
}

impl Problem {
    pub(super) fn at(self, at: usize) -> Self {
        Self { at: self.at.max(at), ..self }
    }
}

impl From<Problem> for Error {
    fn from(Problem { at, text }: Problem) -> Self {
        corrupt("JPEG", at, text)
    }
}

pub(super) fn damaged(at: usize, text: impl Into<String>) -> Problem {
    Problem { at, text: text.into() }
}

pub(super) fn unsupported(at: usize, what: impl std::fmt::Display) -> Problem {
    Problem { at, text: format!("{what} is not supported") }
}
