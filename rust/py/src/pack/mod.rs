//! Python bindings of the layer `pack`: elements in, rows of arrays out.

use pyo3::prelude::*;

mod bins;
mod concat_split;
mod locked;
mod rows;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<bins::BinPacker>()?;
    module.add_class::<concat_split::RowPacker>()
}
