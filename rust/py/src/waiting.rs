//! Calls of the engine that may wait for storage: signals are handled meanwhile.

use std::cell::{Cell, RefCell};
use std::sync::{Mutex, MutexGuard, PoisonError};

use grainmill_core::interrupt::{self, interruptible};
use grainmill_core::{Error, Result, process};
use pyo3::prelude::*;

use crate::error::Raised;

thread_local! {
    /// What a signal handler has raised while this thread waited.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
    /// The process in which it was found out whether signals are handled on this thread, and that.
    static HANDLES_SIGNALS: Cell<(u32, bool)> = const { Cell::new((0, false)) };
}

/// Calls `work` without the interpreter. If a signal comes while it waits, the handler runs, and what
/// that raises is raised at once, in place of any result.
pub(crate) fn waiting<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> PyResult<T> {
    if !handles_signals(py)? {
        return Ok(py.detach(work));
    }
    let before = RAISED.take();
    let result = py.detach(|| interruptible(handler_has_raised, work));
    RAISED.replace(before).map_or(Ok(result), Err)
}

/// Calls `work` as [`waiting`] does; raises its error.
pub(crate) fn wait_for<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T> + Send,
) -> PyResult<T> {
    Ok(waiting(py, work)?.map_err(Raised)?)
}

fn handler_has_raised() -> bool {
    let raised = Python::attach(|py| py.check_signals().err());
    let has_raised = raised.is_some();
    RAISED.set(raised);
    has_raised
}

/// Whether this is the main thread of Python, the only one whose signal handlers run.
fn handles_signals(py: Python<'_>) -> PyResult<bool> {
    let process = process::id();
    let (found_in, handles) = HANDLES_SIGNALS.get();
    if found_in == process {
        return Ok(handles);
    }
    let threading = py.import("threading")?;
    let main = threading.call_method0("main_thread")?.getattr("ident")?;
    let handles = main.eq(threading.call_method0("get_ident")?)?;
    HANDLES_SIGNALS.set((process, handles));
    Ok(handles)
}

/// Locks what a read may keep locked while it waits.
///
/// # Errors
/// If a signal handler asks for what the read that it interrupts has locked.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> Result<MutexGuard<'_, T>> {
    if interrupt::is_answering() {
        return mutex.try_lock().map_err(|_| {
            let text = "a signal handler used a reader in the middle of a read that it interrupts";
            Error::InvalidArgument(text.to_owned())
        });
    }
    Ok(mutex.lock().unwrap_or_else(PoisonError::into_inner))
}
