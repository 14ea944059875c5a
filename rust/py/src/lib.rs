//! The Python bindings of the engine: one file per layer, with no algorithm and no policy.
#![expect(clippy::needless_pass_by_value, reason = "PyO3 passes arguments by value")]

use pyo3::prelude::*;

mod array;
mod array_bytes;
mod arrow;
mod batch;
mod bytes_slot;
mod call;
mod convert;
mod error;
mod fill;
mod format;
mod image;
mod order;
mod pack;
mod parquet;
mod parse;
mod parse_json;
mod python_input;
mod python_storage;
mod record_writer;
mod records;
mod shared;
mod storage;
mod tfrecord;

#[pymodule(gil_used = false)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    error::register(module)?;
    order::register(module)?;
    format::register(module)?;
    records::register(module)?;
    parquet::register(module)?;
    record_writer::register(module)?;
    convert::register(module)?;
    batch::register(module)?;
    fill::register(module)?;
    image::register(module)?;
    shared::register(module)?;
    storage::register(module)?;
    pack::register(module)?;
    parse::register(module)?;
    parse_json::register(module)?;
    tfrecord::register(module)
}
