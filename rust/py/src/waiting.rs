//! Calls of the engine that may wait for storage: signals are handled meanwhile, and waits that last
//! are reported.

use std::cell::{Cell, RefCell};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use grainmill_core::interrupt::{self, interruptible};
use grainmill_core::{Error, Result, process};
#[cfg(feature = "buckets")]
use grainmill_object_store::longest_wait;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::error::Raised;

/// How often a wait for storage is reported to Python, and from when on.
const REPORT: Duration = Duration::from_secs(1);

/// Who is told of waits, in Python: `grainmill._stats.stalls`.
static REPORTS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

thread_local! {
    /// What a signal handler has raised while this thread waited, or what a report raised.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
    /// The process in which it was found out what this thread is, and that.
    static ROLE: Cell<(u32, Role)> = const { Cell::new((0, Role::Engine)) };
    static CALL: Cell<Option<Call>> = const { Cell::new(None) };
}

/// What a thread does while it waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    /// It is the main thread of Python, the only one whose signal handlers run; it reports, too.
    Main,
    /// It is a thread of the user: it reports waits that last.
    Users,
    /// It belongs to this package: whoever waits for it reports.
    Engine,
}

/// The call of the engine that this thread is in.
#[derive(Debug, Clone, Copy)]
struct Call {
    role: Role,
    began: Instant,
    report_at: Instant,
    is_reported: bool,
}

/// Calls `work` without the interpreter. If a signal comes while it waits, the handler runs, and what
/// that raises is raised at once, in place of any result. A wait for storage that lasts is reported.
pub(crate) fn waiting<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> PyResult<T> {
    let role = role(py)?;
    if role == Role::Engine {
        return Ok(py.detach(work));
    }
    let began = Instant::now();
    let call = Call { role, began, report_at: began + REPORT, is_reported: false };
    let outer = (CALL.replace(Some(call)), RAISED.take());
    let result = py.detach(|| interruptible(is_ended, work));
    let call = CALL.replace(outer.0);
    let raised = RAISED.replace(outer.1);
    let forgotten = match call {
        Some(Call { is_reported: true, .. }) => report_end(py),
        _ => Ok(()),
    };
    raised.map_or(forgotten, Err).map(|()| result)
}

/// Calls `work` as [`waiting`] does; raises its error.
pub(crate) fn wait_for<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T> + Send,
) -> PyResult<T> {
    Ok(waiting(py, work)?.map_err(Raised)?)
}

/// Whether a wait of this thread is to end, of which `RAISED` has the reason.
fn is_ended() -> bool {
    let Some(mut call) = CALL.get() else { return false };
    let is_due = Instant::now() >= call.report_at;
    if call.role != Role::Main && !is_due {
        return false;
    }
    let asked = Python::try_attach(|py| {
        py.check_signals()?;
        if is_due {
            call.report_at = Instant::now() + REPORT;
            report(py, &mut call)?;
        }
        Ok(())
    });
    CALL.set(Some(call));
    // There is no answer while the interpreter shuts down.
    let raised = asked.and_then(Result::err);
    let has_raised = raised.is_some();
    RAISED.set(raised);
    has_raised
}

/// No request is ever sent.
#[cfg(not(feature = "buckets"))]
fn longest_wait(_waited: Duration) -> Option<Duration> {
    None
}

/// Tells Python how long this thread waits for storage, or that it does not.
fn report(py: Python<'_>, call: &mut Call) -> PyResult<()> {
    let waited = longest_wait(call.began.elapsed()).unwrap_or_default().min(call.began.elapsed());
    if waited >= REPORT
        && let Some(reports) = REPORTS.get(py)
    {
        call.is_reported = true;
        reports.call_method1(py, "check", (waited.as_secs_f64(),))?;
    } else if call.is_reported {
        call.is_reported = false;
        report_end(py)?;
    }
    Ok(())
}

fn report_end(py: Python<'_>) -> PyResult<()> {
    REPORTS.get(py).map_or(Ok(()), |reports| reports.call_method0(py, "end").map(drop))
}

/// What the calling thread is, in this process.
fn role(py: Python<'_>) -> PyResult<Role> {
    let process = process::id();
    let (found_in, role) = ROLE.get();
    if found_in == process {
        return Ok(role);
    }
    let threading = py.import("threading")?;
    let main = threading.call_method0("main_thread")?.getattr("ident")?;
    let role = if main.eq(threading.call_method0("get_ident")?)? {
        Role::Main
    } else if let Some(reports) = REPORTS.get(py)
        && reports.call_method0(py, "is_due_here")?.extract(py)?
    {
        Role::Users
    } else {
        Role::Engine
    };
    ROLE.set((process, role));
    Ok(role)
}

/// Sets who is told, from then on, of waits for storage: an object with the methods `is_due_here`,
/// whether the calling thread is to tell; `check`, of how many seconds it waits; and `end`.
#[pyfunction]
fn report_waits_to(py: Python<'_>, reports: Py<PyAny>) {
    let _ = REPORTS.set(py, reports); // once a process
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(report_waits_to, module)?)
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
