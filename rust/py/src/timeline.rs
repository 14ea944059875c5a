//! What the engine did when, for a timeline.

use std::time::Instant;

use grainmill_core::timeline::{self, Activity};
use grainmill_core::url;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// How often the clock is read to find out what it shows at an [`Instant`].
const NUM_READINGS: usize = 8;

/// What was done, the number of the thread and its name, the file, the offset and the number of bytes, and
/// when it began and ended.
type Event = (&'static str, u64, Option<String>, String, u64, u64, f64, f64);

/// One reading is for all events, so that those within others stay so.
static READING: PyOnceLock<(Instant, f64)> = PyOnceLock::new();

/// Begins a timeline of the engine, of which the last `max_events` are kept.
#[pyfunction]
fn take_timeline(max_events: usize) {
    timeline::take(max_events);
}

/// Ends it.
#[pyfunction]
fn end_timeline() {
    timeline::end();
}

/// Removes what is on it, and says how many events were dropped. A read that no thread waited for has
/// thread 0; times are those of `time.perf_counter`.
#[pyfunction]
fn drain_timeline(py: Python<'_>) -> PyResult<(Vec<Event>, u64)> {
    let &(then, then_s) = READING.get_or_try_init(py, || reading(py))?;
    let seconds = |at: Instant| match at.checked_duration_since(then) {
        Some(passed) => then_s + passed.as_secs_f64(),
        None => then_s - (then - at).as_secs_f64(),
    };
    let (events, num_dropped) = timeline::drain();
    let event = |event: timeline::Event| {
        let activity = match event.activity {
            Activity::Read => "read",
            Activity::Decode => "decode",
        };
        let (thread, name) = event.thread.unwrap_or_default();
        let path = url::shown(&event.path.to_string_lossy()).into_owned();
        let (offset, len) = (event.range.start, event.range.end - event.range.start);
        let (began_s, ended_s) = (seconds(event.time.start), seconds(event.time.end));
        (activity, thread, name, path, offset, len, began_s, ended_s)
    };
    Ok((events.into_iter().map(event).collect(), num_dropped))
}

/// An instant, and what Python's clock shows then: of several readings, that which took least.
fn reading(py: Python<'_>) -> PyResult<(Instant, f64)> {
    let clock = py.import("time")?.getattr("perf_counter")?;
    let read = |_| {
        let before = Instant::now();
        let shown = clock.call0()?.extract::<f64>()?;
        let took = before.elapsed();
        Ok((took, (before + took / 2, shown)))
    };
    let readings = (0..NUM_READINGS).map(read).collect::<PyResult<Vec<_>>>()?;
    let best = readings.into_iter().min_by_key(|&(took, _)| took);
    Ok(best.expect("it was read at least once").1)
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(take_timeline, module)?)?;
    module.add_function(wrap_pyfunction!(end_timeline, module)?)?;
    module.add_function(wrap_pyfunction!(drain_timeline, module)?)
}
