//! The cost of computing the order of records, per block of 4096 positions.
#![expect(clippy::unwrap_used, reason = "a bench fails by panicking")]

use std::hint::black_box;

use criterion::{Criterion, Throughput};
use grainmill_core::order::permute::SHUFFLE_ROUNDS;
use grainmill_core::order::{MixSchedule, Permutation, RecentChoices, Resolver, Tree};

use crate::time;

const BLOCK_LEN: usize = 4096;
const BLOCK_END: i64 = 4096;

pub(crate) fn run(criterion: &mut Criterion) {
    shuffled(criterion);
    mixed(criterion);
    resolved(criterion);
}

fn shuffled(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("order/shuffled/uniform");
    group.throughput(Throughput::Elements(BLOCK_LEN as u64));
    let sizes = [("n_1e5", 100_000), ("n_1e7", 10_000_000), ("n_1e9", 1_000_000_000)];
    for (name, num_records) in sizes.into_iter().chain([("n_1e12", 1_000_000_000_000)]) {
        let set_up = || {
            let permutation = Permutation::new(num_records, 42, SHUFFLE_ROUNDS).unwrap();
            let first: Vec<i64> = (0..BLOCK_END).collect();
            let mut block = first.clone();
            permutation.apply_block(&mut block).unwrap();
            for (index, &moved) in (0..).zip(&block) {
                assert_eq!(permutation.apply(index).unwrap().cast_signed(), moved);
            }
            (permutation, first, block)
        };
        time(&mut group, name, set_up, |(permutation, first, block)| {
            block.copy_from_slice(first);
            permutation.apply_block(black_box(block))
        });
    }
}

fn mixed(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("order/mixed");
    group.throughput(Throughput::Elements(BLOCK_LEN as u64));
    let thousand: Vec<u64> = (1..=1000).collect();
    let workloads = [
        ("weights_0.3_0.7/n_2", vec![100, 233]),
        ("long_period/n_2", vec![100, 123_457]),
        ("long_period/n_1000", thousand),
    ];
    for (name, proportions) in workloads {
        let set_up = || {
            let schedule = MixSchedule::new(&proportions).unwrap();
            let mut position = 0;
            let mut recent = RecentChoices::default();
            schedule.choose_block(&mut recent, 0..BLOCK_END, |choice| {
                assert_eq!(choice, schedule.choose(position));
                position += 1;
            });
            (schedule, recent)
        };
        time(&mut group, name, set_up, |(schedule, recent)| {
            let mut sum = 0;
            schedule.choose_block(recent, black_box(0)..BLOCK_END, |(part, key)| {
                sum += i64::from(part) ^ key;
            });
            sum
        });
    }
}

fn resolved(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("order/resolved");
    group.throughput(Throughput::Elements(BLOCK_LEN as u64));
    let leaf = |id| Box::new(Tree::Leaf { id, part: 0 });
    let n = 10_000_000;
    let slice = |child| Tree::Slice { start: 3, step: 4, num_records: n / 4, parent_len: n, child };
    let trees = [
        ("leaf/n_1e7", Tree::Leaf { id: 0, part: 0 }),
        ("slice/n_1e7", slice(leaf(0))),
        ("wrap/n_1e7", Tree::Wrap { num_records: n, child: leaf(0) }),
        (
            "concatenate/n_2",
            Tree::Concatenate {
                lengths: vec![1000, n],
                children: vec![Tree::Leaf { id: 0, part: 0 }, Tree::Leaf { id: 1, part: 0 }],
            },
        ),
        (
            "mix/n_2",
            Tree::Mix {
                proportions: vec![100, 233],
                children: vec![Tree::Leaf { id: 0, part: 0 }, Tree::Leaf { id: 1, part: 0 }],
            },
        ),
        (
            "window_shuffle/window_1000",
            Tree::WindowShuffle { num_records: n, window_size: 1000, seed: 42, child: leaf(0) },
        ),
        (
            "mix/n_10000",
            Tree::Mix {
                proportions: vec![1; 10_000],
                children: (0..10_000).map(|part| Tree::Leaf { id: 0, part }).collect(),
            },
        ),
        ("shuffle/n_2", Tree::Shuffle { num_records: 2, seed: 42, child: leaf(0) }),
        ("shuffle/n_10", Tree::Shuffle { num_records: 10, seed: 42, child: leaf(0) }),
        ("shuffle/n_100", Tree::Shuffle { num_records: 100, seed: 42, child: leaf(0) }),
        ("shuffle/n_1000", Tree::Shuffle { num_records: 1000, seed: 42, child: leaf(0) }),
        ("shuffle/n_1e7", Tree::Shuffle { num_records: n, seed: 42, child: leaf(0) }),
        (
            "shuffle_slice_tap/n_1e7",
            slice(Box::new(Tree::Shuffle {
                num_records: n,
                seed: 42,
                child: Box::new(Tree::Tap { id: 1, part: 0, child: leaf(0) }),
            })),
        ),
    ];
    for (name, tree) in trees {
        let set_up = || {
            let mut resolver = Resolver::new(tree.clone()).unwrap();
            let index: Vec<i64> = (0..BLOCK_END).collect();
            let columns = resolver.resolve(&index).unwrap();
            assert_eq!(columns, resolver.resolve_range(0, BLOCK_LEN).unwrap());
            let whole = columns.iter().find(|column| column.rows.is_none());
            assert!(whole.is_none_or(|column| column.index.len() == BLOCK_LEN));
            resolver
        };
        time(&mut group, name, set_up, |resolver| resolver.resolve_range(black_box(0), BLOCK_LEN));
    }
}
