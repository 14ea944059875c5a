//! Files and ranges of their bytes, and the threads that read them.
//!
//! A [`storage`] reads bytes and knows no format. The measured latency decides whether many reads should be
//! in flight at once ([`storage_latency`]); a [`ReadQueue`] limits how many are.

pub(crate) mod buffer_pool;
pub(crate) mod file_bytes;
pub(crate) mod forward_reads;
mod local;
pub mod lru;
pub(crate) mod new_file;
mod parallel;
pub mod pool;
pub mod read_queue;
mod single_flight;
pub(crate) mod spill;
pub mod storage;
pub mod storage_latency;
mod try_once;

pub use file_bytes::FileBytes;
pub use local::LocalFiles;
pub use parallel::for_each_parallel;
pub use read_queue::{Job, Permit, ReadQueue, StorageLimit};
pub use single_flight::{FlightGuard, SingleFlight};
pub use try_once::TryOnce;
