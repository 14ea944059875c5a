//! Reads damaged files: any bytes must give rows or an error, without a panic that escapes, a hang,
//! or memory beyond the limits. The inputs are the same in each run; `make fuzz` searches for others.

mod targets;

use std::path::Path;
use std::time::{Duration, Instant};

use targets::{TARGETS, read};

/// How many inputs are tried, and for how long at most; an idle machine tries all.
const NUM_INPUTS: u64 = 4000;
const MAX_TIME: Duration = Duration::from_secs(8);

fn seeds() -> Vec<Vec<u8>> {
    targets::seeds().into_iter().map(|(_, file)| file).collect()
}

/// The next number of a fixed sequence.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state >> 33
}

#[test]
fn the_seeds_are_read() {
    for seed in seeds() {
        assert!(read(seed).unwrap() > 0);
    }
}

#[test]
fn failures_once_found_return() {
    std::panic::set_hook(Box::new(|_| ()));
    for (name, target) in TARGETS {
        let found = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/fuzz").join(name);
        for entry in std::fs::read_dir(found).into_iter().flatten() {
            let path = entry.unwrap().path();
            let input = std::fs::read(&path).unwrap();
            let result = std::panic::catch_unwind(|| target(&input));
            assert!(result.is_ok(), "{} panics", path.display());
        }
    }
}

#[test]
fn damaged_files_give_rows_or_an_error() {
    // The crate's own panics are caught and would fill the output.
    std::panic::set_hook(Box::new(|_| ()));
    let seeds = seeds();
    let started = Instant::now();
    let mut state = 1;
    let (mut num_errors, mut num_inputs) = (0, 0);
    for number in 0..NUM_INPUTS {
        if started.elapsed() > MAX_TIME {
            break;
        }
        let mut input = seeds[usize::try_from(number).unwrap() % seeds.len()].clone();
        let footer_len = u32::from_le_bytes(*input[..input.len() - 4].last_chunk().unwrap());
        let len = input.len() as u64;
        for _ in 0..=next(&mut state) % 3 {
            // Half of the changes go to the footer, which decides most.
            let at = if next(&mut state).is_multiple_of(2) {
                len - 1 - next(&mut state) % (u64::from(footer_len) + 8)
            } else {
                next(&mut state) % len
            };
            let at = usize::try_from(at).unwrap();
            match next(&mut state) % 4 {
                0 => input[at] ^= 1 << (next(&mut state) % 8),
                1 => input[at] = u8::try_from(next(&mut state) % 256).unwrap(),
                2 => {
                    input[at] =
                        [0, 1, 0x7f, 0x80, 0xff][usize::try_from(next(&mut state) % 5).unwrap()];
                }
                _ => {
                    let from = usize::try_from(next(&mut state) % len).unwrap();
                    input[at] = input[from];
                }
            }
        }
        let copy = input.clone();
        let result = std::panic::catch_unwind(|| read(input));
        let Ok(result) = result else {
            drop(std::panic::take_hook());
            panic!("input {number} panics: {copy:02x?}");
        };
        num_errors += u64::from(result.is_err());
        num_inputs += 1;
    }
    drop(std::panic::take_hook());
    assert!(num_inputs < 20 || num_errors > num_inputs / 10, "{num_errors} of {num_inputs}");
}
