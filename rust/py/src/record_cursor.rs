//! Files of records read from begin to end, one record after the other, and the checksums of `TFRecord`.

use std::path::PathBuf;
use std::sync::{Mutex, TryLockError};

use grainmill_core::formats::checksum::crc32c;
use grainmill_core::formats::sequential::{RecordCursor, RecordStream, Start};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::convert::frames;
use crate::error::Raised;
use crate::python_input::{PythonInput, RaisedByFunction};
use crate::storage::storage_of;
use crate::waiting::{lock, wait_for, waiting};

/// The records of a file, from any byte on.
#[pyclass(frozen, name = "RecordCursor", module = "grainmill._native")]
pub(crate) struct PyRecordCursor {
    cursor: Mutex<RecordCursor>,
    raised: RaisedByFunction,
}

#[pymethods]
impl PyRecordCursor {
    /// Opens a file of format `format_name`, `tfrecord` or `jsonl`, compressed as its first bytes say.
    #[new]
    fn new(py: Python<'_>, path: PathBuf, format_name: &str) -> PyResult<Self> {
        let frames = frames(format_name).map_err(Raised)?;
        let storage = storage_of(std::iter::once(&path)).map_err(Raised::from)?;
        let stream = wait_for(py, || RecordStream::open(&*storage, &path, frames))?;
        Ok(Self { cursor: RecordCursor::new(stream).into(), raised: RaisedByFunction::default() })
    }

    /// The records of what `read` returns: it takes the maximum number of bytes and returns the next
    /// ones of a file, and none at the end. The first record begins at byte `offset` of the file. Such
    /// a stream cannot seek.
    #[staticmethod]
    fn pulled(
        path: PathBuf,
        read: Py<PyAny>,
        format_name: &str,
        offset: u64,
    ) -> Result<Self, Raised> {
        let (input, raised) = PythonInput::new(read);
        let (input, frames) = (Box::new(input), frames(format_name)?);
        let stream = RecordStream::plain_from(path, input, frames, offset, 0)?;
        Ok(Self { cursor: RecordCursor::new(stream).into(), raised })
    }

    /// The next record, or None at the end.
    fn next<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        loop {
            // A thread that fills the buffer may wait for storage, so nobody waits for it with the
            // interpreter lock.
            let cursor = match self.cursor.try_lock() {
                Ok(cursor) => Some(cursor),
                Err(TryLockError::Poisoned(cursor)) => Some(cursor.into_inner()),
                Err(TryLockError::WouldBlock) => None,
            };
            if let Some(mut cursor) = cursor
                && let Some(record) = cursor.buffered()
            {
                return Ok(Some(PyBytes::new(py, record)));
            }
            let fill = || lock(&self.cursor)?.fill();
            let has_more = waiting(py, fill)?.map_err(|error| self.raised.or(error))?;
            self.raised.raise_interruption(py)?; // the next call returns what was read
            if !has_more {
                return Ok(None);
            }
        }
    }

    /// Where the next record begins, in bytes.
    fn tell(&self, py: Python<'_>) -> PyResult<u64> {
        wait_for(py, || Ok(lock(&self.cursor)?.tell()))
    }

    /// What `tell` returns, and where decompression can start to get there: a byte of the file, and of
    /// what it decompresses to.
    fn place(&self, py: Python<'_>) -> PyResult<(u64, u64, u64)> {
        wait_for(py, || {
            let cursor = lock(&self.cursor)?;
            let start = cursor.start();
            Ok((cursor.tell(), start.stored, start.decompressed))
        })
    }

    /// Makes the record that begins at byte `offset` the next one; decompression begins at `start`.
    #[pyo3(signature = (offset, start = None))]
    fn seek(&self, py: Python<'_>, offset: u64, start: Option<(u64, u64)>) -> PyResult<()> {
        wait_for(py, || {
            let start = start.map(|(stored, decompressed)| Start { stored, decompressed });
            lock(&self.cursor)?.seek(offset, start);
            Ok(())
        })
    }
}

/// The masked CRC-32C of bytes.
#[pyfunction]
fn masked_crc32c(data: &[u8]) -> u32 {
    crc32c::masked(data)
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyRecordCursor>()?;
    module.add_function(wrap_pyfunction!(masked_crc32c, module)?)
}
