//! Bytes that a function of Python reads, in order, and functions that are told of progress.

use std::io::{self, BufReader, Read};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use grainmill_core::Error;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::call::call;
use crate::error::{Raised, is_interrupt};

/// How many bytes are asked for at once.
const READ_LEN: usize = 1 << 20;

/// What a function reads that takes the maximum number of bytes and returns `bytes`, none at the end.
pub(crate) struct PythonInput {
    read: Py<PyAny>,
    raised: RaisedByFunction,
}

/// The exception that such a function, or one that is told of progress, has raised.
#[derive(Clone, Default)]
pub(crate) struct RaisedByFunction(Arc<Mutex<Option<PyErr>>>);

impl PythonInput {
    pub(crate) fn new(read: Py<PyAny>) -> (BufReader<Self>, RaisedByFunction) {
        let raised = RaisedByFunction::default();
        let input = Self { read, raised: raised.clone() };
        (BufReader::with_capacity(READ_LEN, input), raised)
    }
}

impl RaisedByFunction {
    /// The exception that led to `error`, or else that for `error`.
    pub(crate) fn or(&self, error: Error) -> PyErr {
        self.lock().take().unwrap_or_else(|| Raised(error).into())
    }

    /// Raises what is no error, such as an interruption by the user, although enough was read before
    /// it: nobody may read further, where other exceptions are raised.
    pub(crate) fn raise_interruption(&self, py: Python<'_>) -> PyResult<()> {
        let mut raised = self.lock();
        match raised.take_if(|raised| is_interrupt(py, raised)) {
            Some(interruption) => Err(interruption),
            None => Ok(()),
        }
    }

    /// Calls `function`, if there is one, with a number of bytes and of records.
    pub(crate) fn tell(
        &self,
        function: Option<&Py<PyAny>>,
        byte_len: u64,
        num_records: u64,
    ) -> grainmill_core::Result<()> {
        let Some(function) = function else { return Ok(()) };
        let told = Python::attach(|py| call(function.bind(py), (byte_len, num_records)).map(drop));
        told.map_err(|error| {
            *self.lock() = Some(error);
            Error::Panicked("the function that is told of progress has raised an exception".into())
        })
    }

    fn lock(&self) -> MutexGuard<'_, Option<PyErr>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn has_raised() -> io::Error {
    io::Error::other("the function that reads has raised an exception")
}

impl Read for PythonInput {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        // What was read before an exception may have been enough for the caller. No more is read
        // until the exception was raised.
        if self.raised.lock().is_some() {
            return Err(has_raised());
        }
        let read = Python::attach(|py| -> PyResult<usize> {
            let read = call(self.read.bind(py), (out.len(),))?;
            let bytes = read.cast::<PyBytes>()?.as_bytes();
            let Some(begin) = out.get_mut(..bytes.len()) else {
                let text = format!("{} bytes were asked for, got {}", out.len(), bytes.len());
                return Err(PyValueError::new_err(text));
            };
            begin.copy_from_slice(bytes);
            Ok(bytes.len())
        });
        read.map_err(|error| {
            *self.raised.lock() = Some(error);
            has_raised()
        })
    }
}
