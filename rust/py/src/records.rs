//! The layer `records` of the engine, for Python.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use grainmill_core::pipeline::{self, Pending};
use grainmill_core::records::{ArrayRecordFile, Files, Plan, Records, Source};
use grainmill_core::{Error, Result};
use numpy::PyReadonlyArray1;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::bytes_slot::{Slot, new_slot};
use crate::error::Raised;

/// Longer records are read before their `bytes` is made, since an index may claim anything.
const MAX_SLOT_LEN: usize = 64 << 20;

/// The `bytes` that are made ahead for records whose length is known, in the order asked for.
type Made = Vec<Option<Py<PyBytes>>>;

/// Reads of which threads of the engine may still write into `bytes`, though nobody waits.
static ABANDONED: Mutex<Vec<InFlight>> = Mutex::new(Vec::new());

struct InFlight {
    pending: Pending<Slot>,
    made: Made,
}

/// Many `ArrayRecord` files, or parts of them, as one sequence of records.
#[pyclass(frozen, name = "RecordFiles", module = "grainmill._native")]
pub(crate) struct PyRecordFiles(Arc<Files>);

#[pymethods]
impl PyRecordFiles {
    /// Opens `(path, skip, take)` files: `take` records (all, if None) after `skip` records.
    #[new]
    fn new(py: Python<'_>, paths: Vec<(PathBuf, u64, Option<u64>)>) -> Result<Self, Raised> {
        let sources = paths.into_iter().map(|(path, skip, take)| Source { path, skip, take });
        py.detach(|| Files::open(sources)).map(|files| Self(Arc::new(files))).map_err(Raised::from)
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(usize::try_from(self.0.len())?)
    }

    /// How many records of each file there are.
    #[getter]
    fn num_records(&self) -> Vec<u64> {
        self.0.num_records().collect()
    }

    /// The files.
    #[getter]
    fn paths(&self) -> Vec<String> {
        self.0.files().map(|file| file.path().display().to_string()).collect()
    }

    /// The options of each file's writer, as it noted them.
    #[getter]
    fn writer_options(&self) -> Vec<Option<String>> {
        self.0.files().map(|file| file.writer_options().map(str::to_owned)).collect()
    }

    /// How many records the chunks of each file hold.
    #[getter]
    fn group_sizes(&self) -> Vec<u64> {
        self.0.files().map(ArrayRecordFile::group_size).collect()
    }

    /// About how many bytes a record takes where it is stored.
    #[getter]
    fn mean_byte_len(&self) -> f64 {
        self.0.mean_byte_len()
    }

    /// Reads the records at `indices`, in that order.
    fn read<'py>(
        &self,
        py: Python<'py>,
        indices: PyReadonlyArray1<'py, i64>,
    ) -> PyResult<Bound<'py, PyList>> {
        self.read_at(py, &positions(&indices)?)
    }

    /// Reads the record at `index`.
    fn read_one<'py>(&self, py: Python<'py>, index: i64) -> PyResult<Bound<'py, PyBytes>> {
        let (plan, mut made, slots) = self.prepare(py, &[position(index)?])?;
        let records = py.detach(|| pipeline::read(&self.0, plan, slots)).map_err(Raised::from)?;
        object(py, records.iter_unslotted().next().flatten(), made.pop().flatten())
    }

    /// Begins to read the records at `indices` on threads of the engine.
    fn start<'py>(
        &self,
        py: Python<'py>,
        indices: PyReadonlyArray1<'py, i64>,
    ) -> PyResult<PyPendingRead> {
        bury();
        let (plan, made, slots) = self.prepare(py, &positions(&indices)?)?;
        let pending = py.detach(|| pipeline::start(&self.0, plan, slots));
        Ok(PyPendingRead(Mutex::new(Some(InFlight { pending, made }))))
    }
}

impl PyRecordFiles {
    /// The records at `positions`, in that order.
    pub(crate) fn read_at<'py>(
        &self,
        py: Python<'py>,
        positions: &[u64],
    ) -> PyResult<Bound<'py, PyList>> {
        let (plan, made, slots) = self.prepare(py, positions)?;
        let records = py.detach(|| pipeline::read(&self.0, plan, slots)).map_err(Raised::from)?;
        list(py, &records, made)
    }

    /// A plan for `positions`, and `bytes` for those records whose length is known.
    fn prepare(
        &self,
        py: Python<'_>,
        positions: &[u64],
    ) -> PyResult<(Plan, Made, Vec<Option<Slot>>)> {
        let files = &self.0;
        let (plan, lens) = py
            .detach(|| {
                let plan = files.plan(positions)?;
                let lens = files.predicted_lens(&plan);
                Ok((plan, lens))
            })
            .map_err(|error: Error| Raised::from(error))?;
        let (mut made, mut slots) =
            (Vec::with_capacity(lens.len()), Vec::with_capacity(lens.len()));
        for len in lens {
            if let Some(len @ 1..=MAX_SLOT_LEN) = len {
                let (object, slot) = new_slot(py, len)?;
                made.push(Some(object.unbind()));
                slots.push(Some(slot));
            } else {
                made.push(None);
                slots.push(None);
            }
        }
        Ok((plan, made, slots))
    }
}

/// Records that are being read while Python does something else.
#[pyclass(frozen, name = "PendingRead", module = "grainmill._native")]
pub(crate) struct PyPendingRead(Mutex<Option<InFlight>>);

#[pymethods]
impl PyPendingRead {
    /// Waits for the records and returns them in the order asked for; can be called once.
    fn finish<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let taken = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(InFlight { pending, made }) = taken else {
            let message = "the records of this read have been taken already".to_owned();
            return Err(Raised::from(Error::InvalidArgument(message)).into());
        };
        let records = py.detach(|| pending.finish()).map_err(Raised::from)?;
        list(py, &records, made)
    }
}

impl Drop for PyPendingRead {
    fn drop(&mut self) {
        let taken = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(in_flight) = taken {
            in_flight.pending.abandon();
            if in_flight.pending.is_running() {
                ABANDONED.lock().unwrap_or_else(PoisonError::into_inner).push(in_flight);
            }
        }
    }
}

/// Lets go of abandoned reads that no thread is at any more.
fn bury() {
    let mut abandoned = ABANDONED.lock().unwrap_or_else(PoisonError::into_inner);
    let done: Vec<_> =
        abandoned.extract_if(.., |in_flight| !in_flight.pending.is_running()).collect();
    drop(abandoned);
    drop(done);
}

pub(crate) fn positions(indices: &PyReadonlyArray1<'_, i64>) -> PyResult<Vec<u64>> {
    indices.as_array().iter().map(|&index| position(index)).collect()
}

fn position(index: i64) -> PyResult<u64> {
    u64::try_from(index).map_err(|_| {
        let message = format!("record {index} was asked for; indices begin at 0");
        Raised::from(Error::OutOfRange(message)).into()
    })
}

fn list<'py>(py: Python<'py>, records: &Records, made: Made) -> PyResult<Bound<'py, PyList>> {
    let objects = records
        .iter_unslotted()
        .zip(made)
        .map(|(record, made)| object(py, record, made))
        .collect::<PyResult<Vec<_>>>()?;
    PyList::new(py, objects)
}

/// The `bytes` of a record: the one made ahead if the record is in it, else a new one.
fn object<'py>(
    py: Python<'py>,
    record: Option<&[u8]>,
    made: Option<Py<PyBytes>>,
) -> PyResult<Bound<'py, PyBytes>> {
    match (record, made) {
        (Some(record), _) => Ok(PyBytes::new(py, record)),
        (None, Some(made)) => Ok(made.into_bound(py)),
        (None, None) => {
            let message = "a record is neither in its slot nor elsewhere".to_owned();
            Err(Raised::from(Error::Panicked(message)).into())
        }
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyRecordFiles>()?;
    module.add_class::<PyPendingRead>()
}
