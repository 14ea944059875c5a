//! Riegeli/records files: blocks, chunks inside them, and records inside chunks.

pub mod block;
pub mod chunk;
pub mod compress;
pub mod encode;
pub mod hash;
pub mod sink;
pub mod transposed;
pub mod varint;

use std::borrow::Cow;

/// What is wrong with some bytes, before it is known which file and place they came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem(Cow<'static, str>);

impl Problem {
    /// A problem with numbers in its text.
    #[cold]
    pub fn new(text: String) -> Self {
        Self(Cow::Owned(text))
    }

    /// A problem that is always the same.
    pub const fn fixed(text: &'static str) -> Self {
        Self(Cow::Borrowed(text))
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.0)
    }
}
