//! The engine of grainmill, lowest layer first: [`error`], [`bytes`], [`sync`], [`lock`], [`platform`], [`process`], [`interrupt`],
//! [`compute`], [`timeline`], [`try_alloc`], [`url`], [`varint`], [`shared_memory`] and [`write_prefetcher`], [`order`] (the order of records),
//! [`parse`] (records to values), [`batch`] and [`pack`] (rows of a slot), [`io`] (files), [`formats`] (records in them),
//! [`read`] (records by position).
//! A layer uses only those before it; none knows Python.

pub mod batch;
pub mod bytes;
pub mod compute;
pub mod error;
pub mod formats;
pub mod interrupt;
pub mod io;
pub mod lock;
pub mod order;
pub mod pack;
pub mod parse;
pub mod platform;
pub mod process;
pub mod read;
pub mod shared_memory;
pub mod sync;
pub mod timeline;
pub mod try_alloc;
pub mod url;
pub mod varint;
pub mod write_prefetcher;

pub use error::{Error, Result};
