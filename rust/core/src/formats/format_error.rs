//! What formats say about bytes that are not theirs.

use std::borrow::Cow;

use crate::Error;

/// What is wrong with some bytes; callers add the file and the offset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FormatError(Cow<'static, str>);

impl FormatError {
    /// An error with a formatted text.
    #[cold]
    pub fn new(text: String) -> Self {
        Self(Cow::Owned(text))
    }

    /// An error with a constant text.
    pub const fn fixed(text: &'static str) -> Self {
        Self(Cow::Borrowed(text))
    }
}

impl std::fmt::Display for FormatError {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.0)
    }
}

/// Why reading a stream failed.
#[derive(Debug)]
pub enum StreamError {
    /// The file cannot be read.
    File(Error),
    /// Its data are damaged.
    Data(FormatError),
}

impl From<Error> for StreamError {
    fn from(error: Error) -> Self {
        Self::File(error)
    }
}

impl From<FormatError> for StreamError {
    fn from(problem: FormatError) -> Self {
        Self::Data(problem)
    }
}
