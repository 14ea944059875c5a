//! The engine's scheduler, thread pools and caches, in the hands of a model checker.
//!
//! The files are the engine's own. What they share and wait on is the checker's (`sync`), which runs a model
//! again and again, each time with the threads in another order, and reports when nobody can go on. Each run is
//! a process of its own to the engine, as a forked child is: it starts with nothing.
#![expect(dead_code, reason = "the engine uses more of its files than the models do")]
#![allow(
    missing_docs,
    unnameable_types,
    unreachable_pub,
    missing_debug_implementations,
    clippy::missing_errors_doc,
    clippy::missing_panics_doc,
    reason = "the engine's files are checked where they belong, and models fail by panics"
)]

// What other crates are called in these files.
extern crate self as arrow_array;
extern crate self as grainmill_core;
extern crate self as rayon;

#[path = "../../core/src/compute.rs"]
pub mod compute;
#[path = "../../core/src/error.rs"]
pub mod error;
#[path = "../../core/src/interrupt.rs"]
pub mod interrupt;
#[path = "../../core/src/lock.rs"]
pub mod lock;
pub mod models;
#[path = "../../core/src/process.rs"]
pub mod process;
mod stubs;
pub mod sync;
#[path = "../../parquet/src/cache.rs"]
mod unit_cache;

#[path = "../../core/src/io"]
pub mod io {
    pub mod lru;
    pub mod parallel;
    pub mod pool;
    pub mod read_queue;
    pub mod single_flight;

    pub use single_flight::{FlightGuard, SingleFlight};
}

#[path = "../../core/src/formats"]
pub mod formats {
    pub mod chunk_records;
}

#[path = "../../core/src/read"]
pub mod read {
    pub mod chunk_cache;
}

pub use error::{Error, Result};
pub use stubs::{Array, ArrayRef, ThreadPool, ThreadPoolBuilder};
