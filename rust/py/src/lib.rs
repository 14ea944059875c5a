//! What Python gets of the engine. One file per layer; no algorithm and no policy here.
#![expect(clippy::needless_pass_by_value, reason = "PyO3 hands arguments over by value")]

use pyo3::prelude::*;

mod batch;
mod cells;
mod error;
mod order;
mod pack;
mod records;

#[pymodule(gil_used = false)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    error::register(module)?;
    order::register(module)?;
    records::register(module)?;
    batch::register(module)?;
    pack::register(module)
}
