//! Rows of Parquet files by position.
//!
//! [`ParquetFiles`] is many files (`file_table`) as one sequence of rows. A read (`read`) finds the pages
//! that hold the rows (`plan`, `layout`), fetches those that are not decoded yet (`requests`, `fetch`), decodes them
//! with the `parquet` crate (`decode`), keeps the arrays within a limit (`cache`) and gathers the rows in the order
//! requested (`parts`). Where storage is slow, rows can be decoded before they are asked for (`ahead`), and
//! `room` limits what is read to find pages. The crate decodes values only: `pages` reads page headers
//! (`thrift`), decompresses pages (`decompress`) and checks what they claim (`delta`), and `footer` gives
//! it what it needs of a footer.

mod ahead;
mod cache;
mod decode;
mod decompress;
mod delta;
pub mod dense;
mod fetch;
mod file;
mod file_table;
mod files;
mod footer;
mod int96;
mod ipc;
mod layout;
mod pages;
mod parts;
mod placings;
mod plan;
mod read;
mod requests;
mod room;
mod schema;
mod thrift;

pub use ahead::Ahead;
pub use arrow_array;
pub use arrow_buffer;
pub use arrow_schema;
pub use files::ParquetFiles;
pub use ipc::rows_of_stream;
pub use parts::Parts;
pub use read::Rows;
pub use schema::Choice;
