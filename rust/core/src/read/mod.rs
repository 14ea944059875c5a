//! Records of many files by lists of positions, in order, on threads.
//!
//! Positions become a [`Plan`] of the byte ranges to read ([`files`], [`plan`]); spans of it are read,
//! decoded and copied to their destinations, on the calling thread or ahead of it ([`read_ahead`]).

pub mod chunk_cache;
pub mod copy;
pub mod files;
pub mod open;
pub mod plan;
pub mod read_ahead;
pub mod records;

pub use files::{FileInfo, FileSet, Files, SortedPositions, SourceFile};
pub use plan::{Plan, PlanSpan};
pub use read_ahead::{Pending, Reading, begin, read, start, start_unready};
pub use records::{Outcome, Records, Scratch, SpanRecords};
