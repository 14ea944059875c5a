//! One libFuzzer program for all targets: `GRAINMILL_FUZZ_TARGET` selects the target. With
//! `GRAINMILL_FUZZ_SEEDS`, it writes the seed inputs to that folder instead.
#![no_main]
#![expect(clippy::print_stdout, reason = "it prints the names of the targets")]

use std::path::Path;
use std::sync::OnceLock;

use grainmill_core::formats::array_record::shared_index;
use grainmill_core::formats::scanned;
use libfuzzer_sys::fuzz_target;

#[path = "../../core/tests/fuzz/targets.rs"]
mod targets;

#[path = "../../image/tests/fuzz/targets.rs"]
mod image_targets;

#[path = "../../parquet/tests/fuzz/targets.rs"]
mod parquet_targets;

use targets::{TARGETS, Target, other_seeds, seeds_of};

/// Targets that are not part of the public API, so only this program has them.
const OWN: [Target; 2] =
    [("shared_index", shared_index::fuzzing::lookup), ("index_file", scanned::fuzzing::parsed)];

static TARGET: OnceLock<Target> = OnceLock::new();

fuzz_target!(init: init(), |input: &[u8]| {
    if let Some((_, target)) = TARGET.get() {
        target(input);
    }
});

fn init() {
    let mut all = all_targets();
    if let Some(dir) = std::env::var_os("GRAINMILL_FUZZ_SEEDS") {
        all.for_each(|(name, _)| println!("{name}"));
        write_seeds(Path::new(&dir));
        std::process::exit(0);
    }
    let name =
        std::env::var("GRAINMILL_FUZZ_TARGET").expect("`GRAINMILL_FUZZ_TARGET` names a target");
    let target = all.find(|(of, _)| *of == name);
    let target = target.unwrap_or_else(|| panic!("no target is called `{name}`"));
    if parquet_targets::TARGETS.iter().any(|(of, _)| *of == name) {
        // libFuzzer's hook aborts at each panic, also at those of the `parquet` crate, which the engine
        // catches. One that leaves the target still aborts.
        std::panic::set_hook(Box::new(|_| ()));
    }
    TARGET.get_or_init(|| target);
}

fn all_targets() -> impl Iterator<Item = Target> {
    let others = image_targets::TARGETS.into_iter().chain(parquet_targets::TARGETS).chain(OWN);
    TARGETS.into_iter().chain(others)
}

/// Writes the seeds from the files of the tests, a folder for each target.
fn write_seeds(dir: &Path) {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data");
    let files = ["array_record", "array_record/bad"].map(|name| data.join(name));
    let mut seeds = other_seeds();
    seeds.extend(image_targets::seeds());
    seeds.extend(parquet_targets::seeds());
    for file in files.iter().flat_map(|dir| files_in(dir)) {
        seeds.extend(seeds_of(&std::fs::read(file).expect("a file of the tests")));
    }
    let found = data.join("fuzz");
    for (name, _) in all_targets() {
        std::fs::create_dir_all(dir.join(name)).expect("a folder for seeds");
        for file in files_in(&found.join(name)) {
            seeds.push((name, std::fs::read(file).expect("an input of the tests")));
        }
    }
    for (number, (name, input)) in seeds.into_iter().enumerate() {
        std::fs::write(dir.join(name).join(number.to_string()), input).expect("a seed");
    }
}

fn files_in(dir: &Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten();
    entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| path.is_file()).collect()
}
