//! How long it takes to choose bins for sequences and to copy them there.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use grainmill_core::pack::{Bins, Column, Fit, Layout, Placement};

const ROW: usize = 2048;
const NUM_SEQUENCES: usize = 20_000;

/// Lengths spread as those of documents are, about 180 tokens on average.
fn lengths() -> Vec<usize> {
    let mut state = 1_u64;
    let mut uniform = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        f64::from(u32::try_from(state >> 32).expect("32 bits are left")) / f64::from(u32::MAX)
    };
    (0..NUM_SEQUENCES)
        .map(|_| {
            let normal = (0..12).map(|_| uniform()).sum::<f64>() - 6.0;
            let length = (180_f64.ln() - 0.32 + 0.8 * normal).exp();
            (1..ROW)
                .find(|&cells| u32::try_from(cells).is_ok_and(|cells| f64::from(cells) >= length))
                .unwrap_or(ROW)
        })
        .collect()
}

fn bins(num_bins: usize, fit: Fit) -> Bins {
    let layout =
        Layout { capacities: vec![ROW], alignments: vec![1], num_bins, max_sequences: None };
    Bins::new(layout, fit).expect("the layout is sound")
}

/// Packs all sequences and returns how many rows that takes and how many tokens they hold.
fn packed(lengths: &[usize], tokens: &[u8], num_bins: usize, fit: Fit) -> (usize, usize) {
    let mut bins = bins(num_bins, fit);
    let mut column = Column::new(num_bins, ROW, 4, None, true);
    let (mut rows, mut cells) = (0, 0);
    for &length in lengths {
        let bin = bins.choose(&[length]).unwrap_or_else(|| {
            rows += bins.num_opened();
            bins.clear();
            column = Column::new(num_bins, ROW, 4, None, true);
            0
        });
        let segment = i32::try_from(bins.num_sequences(bin) + 1).expect("rows are short");
        let to = Placement { row: bin, start: bins.starts(bin)[0], len: length, segment };
        column.write(to, &tokens[..4 * length]);
        bins.put(bin, &[length]);
        cells += length;
    }
    (rows + bins.num_opened(), cells)
}

fn fit(criterion: &mut Criterion) {
    let lengths = lengths();
    let tokens = vec![7; 4 * ROW];
    let num_tokens = lengths.iter().sum::<usize>();
    for (name, fit) in [("first_fit", Fit::First), ("best_fit", Fit::Best)] {
        let mut group = criterion.benchmark_group(format!("pack/{name}/lognormal_180"));
        group.throughput(Throughput::Elements(num_tokens as u64));
        for num_bins in [30, 1000] {
            let (rows, cells) = packed(&lengths, &tokens, num_bins, fit);
            assert_eq!(cells, num_tokens);
            assert!(rows * ROW < num_tokens * 11 / 10, "{rows} rows waste more than a tenth");
            let id = BenchmarkId::from_parameter(format!("seq_{ROW}_bins_{num_bins}"));
            group.bench_function(id, |bencher| {
                bencher.iter(|| packed(black_box(&lengths), &tokens, num_bins, fit));
            });
        }
        group.finish();
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20);
    targets = fit
}
criterion_main!(benches);
