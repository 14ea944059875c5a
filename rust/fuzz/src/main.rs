//! One libFuzzer program for all targets: `GRAINMILL_FUZZ_TARGET` selects the target. With
//! `GRAINMILL_FUZZ_SEEDS`, it writes the seed inputs to that folder instead.
#![no_main]
#![expect(clippy::print_stdout, reason = "it prints the names of the targets")]

use std::path::Path;
use std::sync::OnceLock;

use grainmill_core::records::array_record::shared_index;
use libfuzzer_sys::fuzz_target;

#[path = "../../core/tests/fuzz/targets.rs"]
mod targets;

#[path = "../../image/tests/fuzz/targets.rs"]
mod image_targets;

use targets::{TARGETS, Target, other_seeds, seeds_of};

/// A target that is not part of the public API, so only this program has it.
const OWN: Target = ("shared_index", shared_index::fuzzing::lookup);

static TARGET: OnceLock<Target> = OnceLock::new();

fuzz_target!(init: init(), |input: &[u8]| {
    if let Some((_, target)) = TARGET.get() {
        target(input);
    }
});

fn init() {
    let mut all = TARGETS.into_iter().chain(image_targets::TARGETS).chain([OWN]);
    if let Some(dir) = std::env::var_os("GRAINMILL_FUZZ_SEEDS") {
        all.for_each(|(name, _)| println!("{name}"));
        write_seeds(Path::new(&dir));
        std::process::exit(0);
    }
    let name =
        std::env::var("GRAINMILL_FUZZ_TARGET").expect("`GRAINMILL_FUZZ_TARGET` names a target");
    let target = all.find(|(of, _)| *of == name);
    TARGET.get_or_init(|| target.unwrap_or_else(|| panic!("no target is called `{name}`")));
}

/// Writes the seeds from the files of the tests, a folder for each target.
fn write_seeds(dir: &Path) {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data");
    let files = ["array_record", "array_record/bad"].map(|name| data.join(name));
    let mut seeds = other_seeds();
    seeds.extend(image_targets::seeds());
    for file in files.iter().flat_map(|dir| files_in(dir)) {
        seeds.extend(seeds_of(&std::fs::read(file).expect("a file of the tests")));
    }
    let found = data.join("fuzz");
    for (name, _) in TARGETS.into_iter().chain(image_targets::TARGETS).chain([OWN]) {
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
