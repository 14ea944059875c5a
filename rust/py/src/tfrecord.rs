//! `TFRecord` files read from begin to end, and the checks of their records.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use grainmill_core::records::LocalFiles;
use grainmill_core::records::checksum::crc32c;
use grainmill_core::records::storage::Storage;
use grainmill_core::records::tfrecord_stream::TfRecordStream;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::Raised;

/// The records of a `TFRecord` file, from any byte on.
#[pyclass(frozen, name = "TFRecordStream", module = "grainmill._native")]
pub(crate) struct PyTfRecordStream(Mutex<TfRecordStream>);

#[pymethods]
impl PyTfRecordStream {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> Result<Self, Raised> {
        let storage: Arc<dyn Storage> = Arc::new(LocalFiles);
        let stream = py.detach(|| TfRecordStream::open(&storage, &path))?;
        Ok(Self(Mutex::new(stream)))
    }

    /// The next record, or None at the end.
    fn next<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        loop {
            // A thread that fills the buffer may wait for storage, so nobody waits for it with the
            // interpreter lock.
            if let Ok(mut stream) = self.0.try_lock()
                && let Some(record) = stream.buffered().map_err(Raised)?
            {
                return Ok(Some(PyBytes::new(py, record)));
            }
            let fill = || self.0.lock().unwrap_or_else(PoisonError::into_inner).fill();
            if !py.detach(fill).map_err(Raised)? {
                return Ok(None);
            }
        }
    }

    /// Where the next record begins, in bytes.
    fn tell(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.0.lock().unwrap_or_else(PoisonError::into_inner).tell())
    }

    /// Makes the record that begins at byte `offset` the next one.
    fn seek(&self, py: Python<'_>, offset: u64) {
        py.detach(|| self.0.lock().unwrap_or_else(PoisonError::into_inner).seek(offset));
    }
}

/// The masked CRC-32C of bytes.
#[pyfunction]
fn masked_crc32c(data: &[u8]) -> u32 {
    crc32c::masked(data)
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyTfRecordStream>()?;
    module.add_function(wrap_pyfunction!(masked_crc32c, module)?)
}
