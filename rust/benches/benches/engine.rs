//! The benches of the engine, one module per layer, and a table of their results at the end.
//!
//! They are one program, since each program is optimised and linked on its own.

mod batch;
mod compute;
mod order;
mod pack;
mod record_writer;
mod records;

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion};
use grainmill_benches as table;

fn main() -> io::Result<()> {
    let dir = results_dir();
    let before = table::saved(&dir);
    let start = Instant::now();
    // For all cases together a few minutes on a slow machine; options of the command line and of
    // a group of cases come first.
    let mut criterion = Criterion::default()
        .output_directory(&dir)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_millis(1500))
        .sample_size(30)
        .nresamples(10_000)
        .configure_from_args();
    order::run(&mut criterion);
    batch::run(&mut criterion);
    pack::run(&mut criterion);
    records::run(&mut criterion);
    record_writer::run(&mut criterion);
    // Last, as it limits threads.
    compute::run(&mut criterion);
    criterion.final_summary();
    let table = table::of_run(&dir, &before, start.elapsed())?;
    io::stdout().write_all(table.as_bytes())
}

/// Where criterion would save its results, too.
fn results_dir() -> PathBuf {
    std::env::var_os("CRITERION_HOME").map_or_else(
        || Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("criterion"),
        PathBuf::from,
    )
}

/// Times `routine` as one case of `group`, with what `set_up` returns once the case is to run:
/// cases that a filter leaves out cost nothing.
fn time<T, R>(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: &str,
    mut set_up: impl FnMut() -> T,
    mut routine: impl FnMut(&mut T) -> R,
) {
    let mut parts = None;
    group.bench_function(name, |bencher| {
        let parts = parts.get_or_insert_with(&mut set_up);
        bencher.iter(|| routine(parts));
    });
}
