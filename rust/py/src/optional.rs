//! The parts that cargo features add, and what stands in for those that this build lacks.

use pyo3::prelude::*;

#[cfg(not(feature = "buckets"))]
pub(crate) use absent::missing;
#[cfg(not(all(feature = "buckets", feature = "images", feature = "parquet")))]
pub(crate) use absent::stand_in;

/// The cargo features of this build that leave something out where they are off.
fn features() -> Vec<&'static str> {
    let all = [
        ("buckets", cfg!(feature = "buckets")),
        ("images", cfg!(feature = "images")),
        ("parquet", cfg!(feature = "parquet")),
    ];
    all.into_iter().filter(|&(_, compiled)| compiled).map(|(name, _)| name).collect()
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("features", features())?;
    module.add("profile", env!("GRAINMILL_PROFILE"))
}

#[cfg(not(all(feature = "buckets", feature = "images", feature = "parquet")))]
mod absent {
    use std::ffi::CStr;

    use grainmill_core::Error;
    use pyo3::prelude::*;
    use pyo3::types::PyCFunction;

    use crate::error::Raised;

    /// The error of using `what` in a build without `feature`.
    pub(crate) fn missing(what: &str, feature: &'static str) -> Error {
        Error::NotCompiled { what: what.to_owned(), feature }
    }

    /// Adds `names` to the module, for a build without `feature`: calling one raises the error that says
    /// so. They can be imported, since a program may never call them.
    pub(crate) fn stand_in(
        module: &Bound<'_, PyModule>,
        feature: &'static str,
        names: &[&'static CStr],
    ) -> PyResult<()> {
        for &name in names {
            let shown = name.to_string_lossy();
            let raise = move |_: &Bound<'_, _>, _: Option<&Bound<'_, _>>| -> PyResult<()> {
                Err(Raised(missing(&format!("`{}`", name.to_string_lossy()), feature)).into())
            };
            let raise = PyCFunction::new_closure(module.py(), Some(name), None, raise)?;
            module.add(&*shown, raise)?;
        }
        Ok(())
    }
}
