//! Rows of Parquet files by position.
//!
//! [`ParquetFiles`] is many files as one sequence of rows. A read finds the pages that hold the rows
//! (`layout`), fetches those that are not decoded yet (`fetch`), decodes them with the `parquet`
//! crate (`decode`), keeps the arrays within a limit (`cache`) and gathers the rows in the order
//! requested. Page headers are checked before the crate sees a page (`thrift`).

mod cache;
mod decode;
pub mod dense;
mod fetch;
mod file;
mod files;
mod layout;
mod schema;
mod thrift;

pub use arrow_array;
pub use arrow_buffer;
pub use arrow_schema;
pub use files::{ParquetFiles, Parts, Rows};
