//! The bytes of records, by index.

pub mod array_record;
mod descriptors;
pub mod files;
mod process;
pub mod riegeli;

pub use files::{Files, Plan, Records, Source};
