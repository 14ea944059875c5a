//! Compares the order of records with Grain's.
//!
//! `tests/golden/order.json` has some of the cases; all of them are in `shared/data/grain_vectors`,
//! which is not part of the repository.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use grainmill_core::order::permute::SHUFFLE_ROUNDS;
use grainmill_core::order::seed::{derived_seed, philox_key};
use grainmill_core::order::window::window_order;
use grainmill_core::order::{MixSchedule, Permutation, Resolver, Tree};
use serde_json::Value;
use sha2::{Digest, Sha256};

/// A pipeline of the golden files, restricted to stages that determine order.
#[derive(Clone)]
struct Dataset {
    tree: Tree,
    len: i64,
    /// Upstream seeds with their distance from this node.
    seeds: Vec<(Vec<u32>, u32)>,
    /// For each leaf, its number of records, the value of record 0 and the step between values.
    leaves: HashMap<u32, (i64, i64, i64)>,
}

impl Dataset {
    /// The pipeline that `ops` describes; `None` if a stage is not about order.
    fn new(ops: &[Value], next_id: &mut u32) -> Option<Self> {
        let mut dataset: Option<Self> = None;
        for op in ops {
            let name = op[0].as_str()?;
            dataset = Some(match (name, dataset) {
                ("range", None) => Self::range(&op.as_array()?[1..], next_id),
                ("mix" | "concat", None) => Self::combined(op, next_id)?,
                (_, Some(parent)) => parent.with_stage(op)?,
                _ => return None,
            });
        }
        dataset
    }

    fn range(bounds: &[Value], next_id: &mut u32) -> Self {
        let bounds: Vec<i64> = bounds.iter().map(|bound| bound.as_i64().unwrap()).collect();
        let (start, end, step) = match bounds[..] {
            [end] => (0, end, 1),
            [start, end] => (start, end, 1),
            [start, end, step] => (start, end, step),
            _ => panic!("range of {bounds:?}"),
        };
        let id = *next_id;
        *next_id += 1;
        let len = (end - start + step - step.signum()) / step;
        let leaves = HashMap::from([(id, (len, start, step))]);
        Self { tree: Tree::Leaf { id, part: 0 }, len, seeds: Vec::new(), leaves }
    }

    fn combined(op: &Value, next_id: &mut u32) -> Option<Self> {
        let parts = op[1].as_array()?.iter().map(|ops| Self::new(ops.as_array()?, next_id));
        let parts = parts.collect::<Option<Vec<_>>>()?;
        let lengths: Vec<u64> = parts.iter().map(|part| part.len.try_into().unwrap()).collect();
        let children = parts.iter().map(|part| part.tree.clone()).collect();
        let mut seeds: Vec<_> = parts.iter().flat_map(|part| part.seeds.clone()).collect();
        for (_, depth) in &mut seeds {
            *depth += 1;
        }
        // Grain collects them breadth first.
        seeds.sort_by_key(|&(_, depth)| depth);
        let tree = if op[0] == "mix" {
            let proportions = proportions(&op[2], lengths.len());
            Tree::Mix { proportions, children }
        } else {
            Tree::Concatenate { lengths: lengths.clone(), children }
        };
        let len = lengths.iter().fold(0_u64, |sum, &len| sum.saturating_add(len));
        let leaves = parts.into_iter().flat_map(|part| part.leaves).collect();
        Some(Self { tree, len: i64::try_from(len).unwrap_or(i64::MAX), seeds, leaves })
    }

    fn with_stage(mut self, op: &Value) -> Option<Self> {
        for (_, depth) in &mut self.seeds {
            *depth += 1;
        }
        let len = u64::try_from(self.len).unwrap();
        let child = Box::new(self.tree.clone());
        match op[0].as_str()? {
            "seed" => {
                let seed = op[1].as_u64()?;
                let mut words = vec![u32::try_from(seed & 0xFFFF_FFFF).unwrap()];
                words.extend(u32::try_from(seed >> 32).ok().filter(|&high| high > 0));
                self.seeds = vec![(words, 0)];
            }
            "map" if op[1] == "add_one" => {
                for (_, first, _) in self.leaves.values_mut() {
                    *first += 1;
                }
            }
            "shuffle" => {
                let seed = match op[1].as_u64() {
                    Some(seed) => seed.try_into().unwrap(),
                    None => derived_seed(&self.seeds),
                };
                self.tree = Tree::Shuffle { num_records: len, seed, child };
            }
            "window_shuffle" => {
                let seed = op[2].as_u64()?.try_into().unwrap();
                let window_size = op[1].as_u64()?;
                self.tree = Tree::WindowShuffle { num_records: len, window_size, seed, child };
            }
            "repeat" => {
                let times = op[1].as_i64().unwrap_or(i64::MAX);
                if op[2]["reseed_each_epoch"] == false {
                    self.tree = Tree::Wrap { num_records: len, child };
                }
                self.len = self.len.saturating_mul(times);
            }
            "slice" | "getslice" => {
                let start = op[1].as_i64().unwrap_or(0);
                let end = op[2].as_i64().unwrap_or(self.len).min(self.len);
                let step = op[3].as_i64().unwrap_or(1);
                assert!(0 <= start && start <= end && step > 0, "{op}");
                self.len = (end - start + step - 1) / step;
                let num_records = u64::try_from(self.len).unwrap();
                self.tree = Tree::Slice { start, step, num_records, parent_len: len, child };
            }
            "reindex" => {
                let indices: Vec<i64> =
                    op[1].as_array()?.iter().map(|index| index.as_i64().unwrap()).collect();
                self.len = indices.len().try_into().unwrap();
                self.tree = Tree::Take { indices, parent_len: len, child };
            }
            _ => return None,
        }
        Some(self)
    }

    fn elements(&self, positions: &[i64]) -> Vec<i64> {
        let mut elements = vec![None; positions.len()];
        for column in Resolver::new(self.tree.clone()).unwrap().resolve(positions).unwrap() {
            let (len, first, step) = self.leaves[&column.id];
            let all = (0..positions.len()).map(|row| row.try_into().unwrap()).collect();
            for (row, index) in column.rows.unwrap_or(all).into_iter().zip(column.index) {
                let element = first + index.rem_euclid(len) * step;
                let at = usize::try_from(row).unwrap();
                assert_eq!(elements[at].replace(element), None, "two leaves have row {row}");
            }
        }
        elements.into_iter().map(|element| element.expect("every row belongs to a leaf")).collect()
    }
}

/// Grain's integers for `weights`.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "as Grain does")]
fn proportions(weights: &Value, num_parts: usize) -> Vec<u64> {
    let Some(weights) = weights.as_array() else { return vec![1; num_parts] };
    let weights: Vec<f64> = weights.iter().map(|weight| weight.as_f64().unwrap()).collect();
    let scale = 100.0 / weights.iter().copied().fold(f64::INFINITY, f64::min);
    weights.into_iter().map(|weight| (weight * scale) as u64).collect()
}

/// Elements of a mixture of finite datasets, until the chosen dataset is exhausted.
fn mixed_until_exhausted(op: &Value) -> Option<Vec<i64>> {
    let parts = op[1].as_array()?.iter().map(|ops| match ops.as_array()?.as_slice() {
        [range, to_iter] if range[0] == "range" && to_iter[0] == "to_iter" => {
            Some(range[1].as_i64()?..range[2].as_i64()?)
        }
        _ => None,
    });
    let parts = parts.collect::<Option<Vec<_>>>()?;
    let schedule = MixSchedule::new(&proportions(&op[2], parts.len())).unwrap();
    let mut elements = Vec::new();
    for position in 0.. {
        let (part, key) = schedule.choose(position);
        match parts[part as usize].clone().nth(key.try_into().unwrap()) {
            Some(element) => elements.push(element),
            None => break,
        }
    }
    Some(elements)
}

/// Elements of `0..len`, shuffled by the sequential window shuffle.
fn window_shuffled(len: u64, window_size: u64, seed: u32) -> Vec<i64> {
    let mut elements = Vec::new();
    for (start, number) in (0..len).step_by(window_size.try_into().unwrap()).zip(0..) {
        let window_len = window_size.min(len - start);
        let order = window_order(window_len, seed.wrapping_add(number)).unwrap();
        elements.extend(order.into_iter().map(|offset| offset + start.cast_signed()));
    }
    elements
}

fn pipeline_elements(case: &Value) -> Option<Vec<i64>> {
    let ops = case["ops"].as_array()?;
    match ops.as_slice() {
        [op] if op[0] == "iter_mix" => return mixed_until_exhausted(op),
        [range, to_iter, windows] if to_iter[0] == "to_iter" && windows[0] == "window_shuffle" => {
            let number = |value: &Value| value.as_u64().unwrap();
            let seed = number(&windows[2]).try_into().unwrap();
            return Some(window_shuffled(number(&range[1]), number(&windows[1]), seed));
        }
        _ => {}
    }
    let dataset = Dataset::new(ops, &mut 0)?;
    let positions: Vec<i64> = match &case["indices"] {
        Value::Array(indices) => indices.iter().map(|index| index.as_i64().unwrap()).collect(),
        Value::Number(count) => (0..count.as_i64().unwrap()).collect(),
        _ => (0..dataset.len).collect(),
    };
    if let Some(len) = case["expect"]["len"].as_i64()
        && ops.iter().all(|op| op[0] != "mix")
    {
        assert_eq!(dataset.len, len, "{}", case["id"]);
    }
    Some(dataset.elements(&positions))
}

/// Whether Grain's order is no permutation in this case, so that ours differs.
fn differs_from_grain(case: &Value) -> bool {
    ["all-65537-0", "all-65537-42", "big65537", "map-ragged"].iter().any(|id| case["id"] == *id)
}

fn matches_golden(found: &[i64], expected: &Value) -> bool {
    match expected {
        Value::Array(expected) => {
            found.iter().map(|&element| Value::from(element)).eq(expected.iter().cloned())
        }
        digest => {
            let text: Vec<String> = found.iter().map(ToString::to_string).collect();
            let digest_of = Sha256::digest(text.join(","));
            let hex =
                digest_of.iter().fold(String::new(), |hex, byte| hex + &format!("{byte:02x}"));
            digest["sha256"] == hex && digest["n"] == found.len()
        }
    }
}

/// Checks one case; returns whether it was about order.
fn check(case: &Value) -> bool {
    let shuffled = |index: u64, max_index: u64, seed: &Value, rounds: &Value| {
        let (seed, rounds) = (seed.as_u64().unwrap(), rounds.as_u64().unwrap());
        let (seed, rounds) = (seed.try_into().unwrap(), rounds.try_into().unwrap());
        let permutation = Permutation::new(max_index + 1, seed, rounds).unwrap();
        permutation.apply(index).unwrap().cast_signed()
    };
    let mut expected = case["expect"].clone();
    let found = match case["kind"].as_str().unwrap() {
        "index_shuffle" if case["points"].is_array() => {
            let points = case["points"].as_array().unwrap();
            // Skip sizes at which Grain's function is no permutation.
            let is_permutation = |point: &Value| {
                let max_index = point[1].as_u64().unwrap();
                let bits = max_index.trailing_zeros();
                !(max_index.is_power_of_two() && bits >= 16 && bits.is_multiple_of(2))
            };
            let results = expected.as_array().unwrap().clone();
            let kept = points.iter().zip(results).filter(|(point, _)| is_permutation(point));
            let (points, results): (Vec<_>, Vec<_>) = kept.unzip();
            assert!(results.len() > 8);
            expected = Value::Array(results);
            let number = |value: &Value| value.as_u64().unwrap();
            let moved = |point: &&Value| {
                shuffled(number(&point[0]), number(&point[1]), &point[2], &point[3])
            };
            points.iter().map(moved).collect()
        }
        "index_shuffle" => {
            let num_records = case["n"].as_u64().unwrap();
            let seed = u32::try_from(case["seed"].as_u64().unwrap()).unwrap();
            assert_eq!(case["rounds"], SHUFFLE_ROUNDS);
            let mut block: Vec<i64> = (0..num_records.cast_signed()).collect();
            let permutation = Permutation::new(num_records, seed, SHUFFLE_ROUNDS).unwrap();
            permutation.apply_block(&mut block).unwrap();
            block
        }
        "philox_key" => {
            let words: Vec<u32> = serde_json::from_value(case["words"].clone()).unwrap();
            let found: Vec<Value> = philox_key(&words).into_iter().map(Value::from).collect();
            assert_eq!(Value::Array(found), expected, "{}", case["id"]);
            return true;
        }
        _ => match pipeline_elements(case) {
            Some(found) => {
                if case["kind"] == "map_items" {
                    expected = expected["items"].clone();
                }
                found
            }
            None => return false,
        },
    };
    assert_eq!(
        matches_golden(&found, &expected),
        !differs_from_grain(case),
        "{}: {found:?}",
        case["id"]
    );
    true
}

fn num_checked(path: &Path) -> usize {
    let text = std::fs::read_to_string(path).unwrap();
    let file: Value = serde_json::from_str(&text).unwrap();
    file["cases"].as_array().unwrap().iter().filter(|case| check(case)).count()
}

#[test]
fn golden_cases_are_in_grains_order() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/order.json");
    assert_eq!(num_checked(Path::new(path)), 47);
}

#[test]
fn all_cases_are_in_grains_order() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/data/grain_vectors");
    let folder = PathBuf::from(folder);
    if !folder.exists() {
        return;
    }
    let files = ["index_shuffle", "shuffle", "mix", "window_shuffle", "default_seed", "reindex"];
    let found = files.map(|name| num_checked(&folder.join(name).with_extension("json")));
    assert_eq!(found, [27, 28, 23, 11, 11, 3]);
}
