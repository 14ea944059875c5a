//! The Python bindings of the engine: one file per layer, with no algorithm and no policy.
#![expect(clippy::needless_pass_by_value, reason = "PyO3 passes arguments by value")]

use pyo3::prelude::*;

mod array;
mod array_bytes;
mod batch;
mod bytes_slot;
mod call;
mod error;
mod fill;
mod format;
mod order;
mod pack;
mod python_storage;
mod record_writer;
mod records;
mod shared;
mod tfrecord;

#[pymodule(gil_used = false)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    error::register(module)?;
    order::register(module)?;
    format::register(module)?;
    records::register(module)?;
    record_writer::register(module)?;
    batch::register(module)?;
    fill::register(module)?;
    shared::register(module)?;
    tfrecord::register(module)?;
    pack::register(module)
}
