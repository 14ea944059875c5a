//! Runs every parser of untrusted bytes on files of the C++ writer, damaged files, and many mutations
//! of both, which are the same in each run. `make fuzz` searches for further inputs.
#![expect(clippy::unwrap_used, reason = "a test that cannot continue should fail")]

mod targets;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use targets::{TARGETS, other_seeds, seeds_of};

/// How many seeds are mutated, and for how long at most; an idle machine runs all, except for what writes.
const NUM_INPUTS: usize = 20_000;
const MAX_TIME: Duration = Duration::from_secs(3);

/// Longer seeds find little more.
const MAX_SEED_LEN: usize = 16 << 10;

macro_rules! target_tests {
    ($($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                run(stringify!($name));
            }
        )*

        #[test]
        fn every_target_has_a_test() {
            let names = TARGETS.map(|(name, _)| name);
            assert_eq!(names, [$(stringify!($name)),*]);
        }
    };
}

target_tests! {
    file
    chunks
    headers
    postscript
    footer
    simple_chunk
    transposed_chunk
    decompressors
    varints
    writer_options
    round_trip_simple
    round_trip_transposed
    verify
    tfrecord_stream
    lines
    example
    json
    tfrecord
    json_lines
    web_dataset
    bagz
    megatron
    mds
    fixed_len
    written
}

fn files_in(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.is_file());
    files.sort();
    files
}

/// Calls the target `name` with its seeds, the failures once found for it, and mutated seeds.
fn run(name: &str) {
    let (_, target) = TARGETS.into_iter().find(|(of, _)| *of == name).unwrap();
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data");
    let files = files_in(&data.join("array_record"));
    let damaged = files_in(&data.join("array_record/bad"));
    let mut seeds: Vec<Vec<u8>> = files
        .iter()
        .chain(&damaged)
        .flat_map(|path| seeds_of(&std::fs::read(path).unwrap()))
        .chain(other_seeds())
        .filter(|(of, _)| *of == name)
        .map(|(_, input)| input)
        .collect();
    seeds.extend(
        files_in(&data.join("fuzz").join(name)).iter().map(|path| std::fs::read(path).unwrap()),
    );
    assert!(!seeds.is_empty());
    let check = |input: &[u8]| {
        let result = std::panic::catch_unwind(|| target(input));
        assert!(result.is_ok(), "{name} panics at {:02x?}", &input[..input.len().min(2_000)]);
    };
    for seed in &seeds {
        check(seed);
    }
    let deadline = Instant::now() + MAX_TIME;
    seeds.retain(|seed| seed.len() <= MAX_SEED_LEN || matches!(name, "file" | "verify"));
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for _ in 0..NUM_INPUTS {
        if Instant::now() >= deadline || seeds.is_empty() {
            return;
        }
        let mut input = random.pick(&seeds).clone();
        for _ in 0..=random.below(4) {
            mutate(&mut input, &seeds, &mut random);
        }
        check(&input);
    }
}

/// A random generator with a fixed seed.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 16).unwrap() % end.max(1)
    }

    fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }
}

/// Boundary values of varints and other integers.
const LIMITS: [&[u8]; 8] = [
    &[0],
    &[1],
    &[0x7f],
    &[0x80],
    &[0xff],
    &[0xff, 0xff, 0xff, 0xff, 0x0f],
    &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01],
    &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
];

fn mutate(input: &mut Vec<u8>, seeds: &[Vec<u8>], random: &mut Random) {
    // Near the front, where lengths are, or anywhere.
    let len = input.len();
    let span = if random.below(2) == 0 { len.min(40) } else { len };
    let at = random.below(span);
    match random.below(6) {
        0 if len > 0 => input[at] ^= 1 << random.below(8),
        1 if len > 0 => input[at] = input[at].wrapping_add([1, 255][random.below(2)]),
        2 => {
            let put = random.pick(&LIMITS);
            let end = len.min(at + if random.below(2) == 0 { put.len() } else { 0 });
            input.splice(at..end, put.iter().copied());
        }
        3 => drop(input.drain(at..len.min(at + 1 + random.below(8)))),
        4 => input.truncate(at),
        _ => {
            let other = random.pick(seeds);
            let from = random.below(other.len());
            let to = other.len().min(from + 1 + random.below(64));
            input.splice(at..at, other[from..to].iter().copied());
        }
    }
}
