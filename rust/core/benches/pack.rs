//! Choosing bins for sequences, and copying the sequences.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use grainmill_core::pack::{BinShape, Bins, FeatureRows, Fit, Placement};

const ROW_LEN: usize = 2048;
const NUM_SEQUENCES: usize = 20_000;

/// Lognormal lengths as of documents, about 180 tokens on average.
fn lengths(num_sequences: usize, seed: u64) -> Vec<usize> {
    let mut state = seed;
    let mut uniform = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        f64::from(u32::try_from(state >> 32).expect("32 bits are left")) / f64::from(u32::MAX)
    };
    (0..num_sequences)
        .map(|_| {
            let normal = (0..12).map(|_| uniform()).sum::<f64>() - 6.0;
            let length = (180_f64.ln() - 0.32 + 0.8 * normal).exp();
            (1..ROW_LEN)
                .find(|&tokens| {
                    u32::try_from(tokens).is_ok_and(|tokens| f64::from(tokens) >= length)
                })
                .unwrap_or(ROW_LEN)
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

fn fit(criterion: &mut Criterion) {
    let lengths = lengths(NUM_SEQUENCES, 1);
    let tokens = vec![7; 4 * ROW_LEN];
    let num_tokens = lengths.iter().sum::<usize>();
    for (name, fit) in [("first_fit", Fit::First), ("best_fit", Fit::Best)] {
        let mut group = criterion.benchmark_group(format!("pack/{name}/lognormal_180"));
        group.throughput(Throughput::Elements(num_tokens as u64));
        for num_bins in [30, 1000] {
            let (rows, num_packed) = packed(&lengths, &tokens, num_bins, fit);
            assert_eq!(num_packed, num_tokens);
            assert!(rows * ROW_LEN < num_tokens * 11 / 10, "{rows} rows waste more than a tenth");
            let id = BenchmarkId::from_parameter(format!("seq_{ROW_LEN}_bins_{num_bins}"));
            group.bench_function(id, |bencher| {
                bencher.iter(|| packed(black_box(&lengths), &tokens, num_bins, fit));
            });
        }
        group.finish();
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

/// Features of independent, equal and similar lengths.
fn workloads(num_sequences: usize) -> [(&'static str, Vec<Vec<usize>>); 4] {
    let [one, two, three] = [1, 2, 3].map(|seed| lengths(num_sequences, seed));
    let all = || one.iter().zip(&two).zip(&three);
    [
        ("two_equal_features", all().map(|((&one, _), _)| vec![one; 2]).collect()),
        ("two_features", all().map(|((&one, &two), _)| vec![one, two]).collect()),
        (
            "two_like_features",
            all().map(|((&one, &two), _)| vec![one, (7 * one + two) / 8]).collect(),
        ),
        ("three_features", all().map(|((&one, &two), &three)| vec![one, two, three]).collect()),
    ]
}

fn time_choices(
    criterion: &mut Criterion,
    name: &str,
    sequences: &[Vec<usize>],
    num_bins: usize,
    fit: Fit,
) {
    let mut group = criterion.benchmark_group(format!("pack/{name}"));
    group.throughput(Throughput::Elements(sequences.len() as u64));
    let id = BenchmarkId::from_parameter(format!("bins_{num_bins}"));
    group.bench_function(id, |bencher| {
        bencher.iter(|| chosen(black_box(sequences), num_bins, fit));
    });
    group.finish();
}

fn several_features(criterion: &mut Criterion) {
    for num_bins in [30, 1000, 10_000] {
        let num_sequences = NUM_SEQUENCES.max(12 * num_bins);
        for (workload, sequences) in workloads(num_sequences) {
            let longest = (0..sequences[0].len())
                .map(|feature| sequences.iter().map(|lengths| lengths[feature]).sum::<usize>())
                .max();
            for (name, fit) in [("first_fit", Fit::First), ("best_fit", Fit::Best)] {
                let rows = chosen(&sequences, num_bins, fit);
                let full = rows * ROW_LEN;
                assert!(
                    longest.is_some_and(|longest| longest <= full && full < longest * 4 / 3),
                    "{rows} rows"
                );
                time_choices(criterion, &format!("{name}/{workload}"), &sequences, num_bins, fit);
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
    for num_bins in [1000, 10_000] {
        let sequences = narrow(num_bins);
        for (name, fit) in [("first_fit", Fit::First), ("best_fit", Fit::Best)] {
            assert!(chosen(&sequences, num_bins, fit) > num_bins);
            time_choices(criterion, &format!("{name}/three_narrow"), &sequences, num_bins, fit);
        }
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20);
    targets = fit, several_features, no_bin_with_space_in_all
}
criterion_main!(benches);
