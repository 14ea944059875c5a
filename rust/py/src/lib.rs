//! The Python bindings of the engine: one file per layer, with no algorithm and no policy.
#![expect(clippy::needless_pass_by_value, reason = "PyO3 passes arguments by value")]

use numpy::{PyArray1, PyArrayMethods};
use pyo3::prelude::*;

mod array;
mod array_bytes;
#[cfg(feature = "parquet")]
mod arrow;
#[cfg(feature = "parquet")]
mod arrow_rows;
mod batch;
#[cfg_attr(not(feature = "buckets"), path = "buckets_missing.rs")]
mod buckets;
mod bytes_slot;
mod call;
mod convert;
mod error;
mod fill;
mod format;
#[cfg(feature = "images")]
mod image;
mod optional;
mod order;
mod pack;
#[cfg(feature = "parquet")]
mod parquet;
mod parse;
mod parse_example;
mod parse_json;
mod python_input;
mod python_storage;
mod record_cursor;
mod record_writer;
mod records;
mod rows;
mod shared;
mod storage;
mod timeline;
mod waiting;

/// Looks up now what is needed of NumPy. On first use a lock would be taken for it, and a child that is
/// forked meanwhile would wait for that lock for ever.
fn look_up_numpy(py: Python<'_>) -> PyResult<()> {
    PyArray1::<i64>::zeros(py, 0, false).try_readonly()?;
    Ok(())
}

#[pymodule(gil_used = false)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    look_up_numpy(module.py())?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    error::register(module)?;
    optional::register(module)?;
    order::register(module)?;
    format::register(module)?;
    records::register(module)?;
    #[cfg(feature = "parquet")]
    {
        parquet::register(module)?;
        arrow_rows::register(module)?;
    }
    #[cfg(not(feature = "parquet"))]
    optional::stand_in(
        module,
        "parquet",
        &[c"ParquetFiles", c"RowsAhead", c"arrow_rows", c"arrow_batch"],
    )?;
    record_writer::register(module)?;
    convert::register(module)?;
    record_cursor::register(module)?;
    batch::register(module)?;
    rows::register(module)?;
    fill::register(module)?;
    #[cfg(feature = "images")]
    image::register(module)?;
    #[cfg(not(feature = "images"))]
    optional::stand_in(module, "images", &[c"ImageDecoder"])?;
    shared::register(module)?;
    storage::register(module)?;
    buckets::register(module)?;
    pack::register(module)?;
    parse_example::register(module)?;
    parse_json::register(module)?;
    timeline::register(module)?;
    waiting::register(module)
}
