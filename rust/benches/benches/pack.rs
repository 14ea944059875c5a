//! Choosing bins for sequences, and copying the sequences.

use std::cell::LazyCell;
use std::hint::black_box;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput};
use grainmill_core::pack::{BinShape, Bins, FeatureRows, Fit, Placement};

use crate::time;

const ROW_LEN: usize = 2048;
const NUM_SEQUENCES: usize = 20_000;
/// Packing with this many bins is timed on fewer samples, as each takes up to a quarter second.
const MANY_BINS: usize = 10_000;
const FITS: [(&str, Fit); 2] = [("first_fit", Fit::First), ("best_fit", Fit::Best)];

pub(crate) fn run(criterion: &mut Criterion) {
    fit(criterion);
    several_features(criterion);
    no_bin_with_space_in_all(criterion);
}

/// Lognormal lengths as of documents, about 180 tokens on average.
fn lengths(num_sequences: usize, seed: u64) -> Vec<usize> {
    let mut state = seed;
    let mut uniform = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        f64::from(u32::try_from(state >> 32).expect("32 bits are left")) / f64::from(u32::MAX)
    };
    let all: Vec<f64> = (1_u32..).map(f64::from).take(ROW_LEN - 1).collect();
    (0..num_sequences)
        .map(|_| {
            let normal = (0..12).map(|_| uniform()).sum::<f64>() - 6.0;
            let length = (180_f64.ln() - 0.32 + 0.8 * normal).exp();
            1 + all.partition_point(|&tokens| tokens < length)
        })
        .collect()
}

fn bins(features: usize, num_bins: usize, fit: Fit) -> Bins {
    let (capacities, alignments) = (vec![ROW_LEN; features], vec![1; features]);
    let shape = BinShape { capacities, alignments, num_bins, max_sequences: None };
    Bins::new(shape, fit).expect("the shape is valid")
}

/// Packs all sequences; returns the number of rows and of tokens.
fn packed(lengths: &[usize], tokens: &[u8], num_bins: usize, fit: Fit) -> (usize, usize) {
    let mut bins = bins(1, num_bins, fit);
    let mut column = FeatureRows::new(num_bins, ROW_LEN, 4, None, true).expect("there is memory");
    let (mut rows, mut num_tokens) = (0, 0);
    for &length in lengths {
        let bin = bins.choose(&[length]).unwrap_or_else(|| {
            rows += bins.num_opened();
            bins.clear();
            column = FeatureRows::new(num_bins, ROW_LEN, 4, None, true).expect("there is memory");
            0
        });
        let segment = i32::try_from(bins.num_sequences(bin) + 1).expect("rows are short");
        let to = Placement { row: bin, start: bins.starts(bin)[0], len: length, segment };
        column.write(to, &tokens[..4 * length]);
        bins.put(bin, &[length]);
        num_tokens += length;
    }
    (rows + bins.num_opened(), num_tokens)
}

fn group<'a>(
    criterion: &'a mut Criterion,
    name: &str,
    num_elements: usize,
    num_bins: usize,
) -> BenchmarkGroup<'a, WallTime> {
    let mut group = criterion.benchmark_group(format!("pack/{name}"));
    group.throughput(Throughput::Elements(num_elements as u64));
    if num_bins == MANY_BINS {
        group.sample_size(10);
    }
    group
}

fn fit(criterion: &mut Criterion) {
    let lengths = lengths(NUM_SEQUENCES, 1);
    let tokens = vec![7; 4 * ROW_LEN];
    let num_tokens = lengths.iter().sum::<usize>();
    for (name, fit) in FITS {
        for num_bins in [30, 1000] {
            let set_up = || {
                let (rows, num_packed) = packed(&lengths, &tokens, num_bins, fit);
                assert_eq!(num_packed, num_tokens);
                assert!(
                    rows * ROW_LEN < num_tokens * 11 / 10,
                    "{rows} rows waste more than a tenth"
                );
            };
            let name = format!("{name}/lognormal_180");
            let mut group = group(criterion, &name, num_tokens, num_bins);
            time(&mut group, &format!("seq_{ROW_LEN}_bins_{num_bins}"), set_up, |()| {
                packed(black_box(&lengths), &tokens, num_bins, fit)
            });
        }
    }
}

/// Chooses bins for all sequences; returns the number of rows.
fn chosen(sequences: &[Vec<usize>], num_bins: usize, fit: Fit) -> usize {
    let mut bins = bins(sequences[0].len(), num_bins, fit);
    let mut rows = 0;
    for lengths in sequences {
        let bin = bins.choose(lengths).unwrap_or_else(|| {
            rows += bins.num_opened();
            bins.clear();
            0
        });
        bins.put(bin, lengths);
    }
    rows + bins.num_opened()
}

/// The lengths of one sequence in each feature, from three independent lengths.
type Features = fn([usize; 3]) -> Vec<usize>;

/// Features of independent, equal and similar lengths.
const WORKLOADS: [(&str, Features); 4] = [
    ("two_equal_features", |[one, _, _]| vec![one; 2]),
    ("two_features", |[one, two, _]| vec![one, two]),
    ("two_like_features", |[one, two, _]| vec![one, (7 * one + two) / 8]),
    ("three_features", |lengths| lengths.to_vec()),
];

fn several_features(criterion: &mut Criterion) {
    for num_bins in [30, 1000, MANY_BINS] {
        let num_sequences = NUM_SEQUENCES.max(12 * num_bins);
        let lengths = LazyCell::new(|| [1, 2, 3].map(|seed| lengths(num_sequences, seed)));
        for (workload, features) in WORKLOADS {
            let sequences = LazyCell::new(|| {
                (0..num_sequences)
                    .map(|at| features(lengths.each_ref().map(|lengths| lengths[at])))
                    .collect::<Vec<_>>()
            });
            for (name, fit) in FITS {
                let set_up = || {
                    let sequences = &*sequences;
                    let rows = chosen(sequences, num_bins, fit);
                    let longest = (0..sequences[0].len())
                        .map(|feature| sequences.iter().map(|lengths| lengths[feature]).sum())
                        .max()
                        .unwrap_or(0);
                    let full = rows * ROW_LEN;
                    assert!(longest <= full && full < longest * 4 / 3, "{rows} rows");
                    sequences
                };
                let name = format!("{name}/{workload}");
                let mut group = group(criterion, &name, num_sequences, num_bins);
                time(&mut group, &format!("bins_{num_bins}"), set_up, |sequences| {
                    chosen(black_box(sequences), num_bins, fit)
                });
            }
        }
    }
}

/// Half of the bins lack space in one of three features for the sequences of the other half.
fn narrow(num_bins: usize) -> Vec<Vec<usize>> {
    let half = num_bins / 2;
    let lacking = (0..half).map(|bin| {
        let mut lengths = vec![ROW_LEN / 4 - bin * 7 % 64; 3];
        lengths[bin % 3] = ROW_LEN - 1 - bin * 13 % 8;
        lengths
    });
    lacking.chain((half..10 * num_bins).map(|bin| vec![100 + bin % 60; 3])).collect()
}

fn no_bin_with_space_in_all(criterion: &mut Criterion) {
    for num_bins in [1000, MANY_BINS] {
        let sequences = narrow(num_bins);
        for (name, fit) in FITS {
            let set_up = || assert!(chosen(&sequences, num_bins, fit) > num_bins);
            let name = format!("{name}/three_narrow");
            let mut group = group(criterion, &name, sequences.len(), num_bins);
            time(&mut group, &format!("bins_{num_bins}"), set_up, |()| {
                chosen(black_box(&sequences), num_bins, fit)
            });
        }
    }
}
