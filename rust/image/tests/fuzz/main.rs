//! Runs the decoders on the images of the tests and on many mutations of them, which are the same in
//! each run; `make fuzz` searches for further inputs. Then every truncation, and bit flips.
#![expect(clippy::unwrap_used, reason = "a test that cannot continue should fail")]

mod targets;

use std::path::Path;
use std::time::{Duration, Instant};

use targets::{TARGETS, seeds};

/// How many mutated inputs each target gets, and for how long at most; an idle machine runs all.
const NUM_INPUTS: usize = 20_000;
const MAX_TIME: Duration = Duration::from_secs(8);

#[test]
fn image() {
    run("image");
}

#[test]
fn image_options() {
    run("image_options");
}

/// The seeds of the target `name`, and the failures once found for it.
fn seeds_of(name: &str) -> Vec<Vec<u8>> {
    let found = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/fuzz").join(name);
    let seeds = seeds().into_iter().filter(|(of, _)| *of == name).map(|(_, input)| input);
    let entries = std::fs::read_dir(found).into_iter().flatten();
    seeds.chain(entries.map(|entry| std::fs::read(entry.unwrap().path()).unwrap())).collect()
}

fn check(name: &str, input: &[u8]) {
    let (_, target) = TARGETS.into_iter().find(|(of, _)| *of == name).unwrap();
    let result = std::panic::catch_unwind(|| target(input));
    assert!(result.is_ok(), "{name} panics at {:02x?}", &input[..input.len().min(4_000)]);
}

fn run(name: &str) {
    let seeds = seeds_of(name);
    assert!(!seeds.is_empty());
    for seed in &seeds {
        check(name, seed);
    }
    let deadline = Instant::now() + MAX_TIME;
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for _ in 0..NUM_INPUTS {
        if Instant::now() >= deadline {
            return;
        }
        let mut input = seeds[random.below(seeds.len())].clone();
        for _ in 0..=random.below(4) {
            mutate(&mut input, &seeds, &mut random);
        }
        check(name, &input);
    }
}

#[test]
fn every_truncation_returns() {
    for seed in seeds_of("image") {
        // In steps, but for the headers and the end.
        for len in (0..seed.len()).filter(|len| *len < 700 || len % 7 == 0 || seed.len() - len < 9)
        {
            check("image", &seed[..len]);
        }
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
}

fn mutate(input: &mut Vec<u8>, seeds: &[Vec<u8>], random: &mut Random) {
    let len = input.len();
    if len == 0 {
        return;
    }
    let at = random.below(len);
    match random.below(6) {
        0 | 1 => input[at] ^= 1 << random.below(8),
        2 => input[at] = [0, 1, 0x7f, 0x80, 0xfe, 0xff][random.below(6)],
        3 => drop(input.drain(at..len.min(at + 1 + random.below(8)))),
        4 => input.truncate(at),
        _ => {
            let other = &seeds[random.below(seeds.len())];
            let from = random.below(other.len());
            let to = other.len().min(from + 1 + random.below(64));
            input.splice(at..at, other[from..to].iter().copied());
        }
    }
}
