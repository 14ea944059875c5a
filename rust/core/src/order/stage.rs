//! The index stages, each applied to a slice of positions.

use std::sync::Arc;

use super::floor::FloorDivisor;
use super::groups::Groups;
use super::mix::{MixSchedule, RecentChoices};
use super::orders::{Run, overflow_error};
use super::window::Windows;
use crate::{Error, Result};

/// A compiled stage and its children; see `Tree` for the parameters.
#[derive(Debug)]
pub(crate) enum Stage {
    Leaf { column: usize, part: u32 },
    Numbers { column: usize, part: u32, start: i64, step: i64, num_records: FloorDivisor },
    Tap { column: usize, part: u32, child: Box<Stage> },
    Shuffle { num_records: FloorDivisor, epoch_len: i64, seed: u32, child: Box<Stage> },
    WindowShuffle { windows: Windows, seed: u32, child: Box<Stage> },
    GroupShuffle { groups: Groups, child: Box<Stage> },
    Slice { start: i64, step: i64, num_records: FloorDivisor, parent_len: i64, child: Box<Stage> },
    Wrap { num_records: FloorDivisor, child: Box<Stage> },
    Take { indices: Arc<[i64]>, num_records: FloorDivisor, parent_len: i64, child: Box<Stage> },
    Mix { number: usize, schedule: MixSchedule, children: Box<[Stage]> },
    Shared(Arc<Stage>),
    Concatenate { total: FloorDivisor, ends: Box<[i64]>, children: Box<[Stage]> },
}

/// An epoch or a window: its number, where it starts and how many records it has.
struct Span {
    number: i64,
    start: i64,
    len: i64,
}

/// Replaces positions by the numbers of a range.
pub(crate) fn range(
    index: &mut [i64],
    start: i64,
    step: i64,
    num_records: FloorDivisor,
) -> Result<()> {
    refuse_empty(num_records.is_zero(), index, "`repeat`")?;
    replace_each(index, "range", |position| {
        let (_, offset) = num_records.div_mod(position);
        start.checked_add(offset.checked_mul(step)?)
    })
}

/// Selects the records at `indices` of every epoch.
pub(crate) fn take(
    index: &mut [i64],
    indices: &[i64],
    num_records: FloorDivisor,
    parent_len: i64,
) -> Result<()> {
    refuse_empty(num_records.is_zero(), index, "`slice`")?;
    replace_each(index, "slice", |position| {
        let (epoch, offset) = num_records.div_mod(position);
        let record = *indices.get(usize::try_from(offset).ok()?)?;
        record.checked_add(epoch.checked_mul(parent_len)?)
    })
}

/// Selects every `step`-th record from `start` on of every epoch.
pub(crate) fn slice(
    index: &mut [i64],
    start: i64,
    step: i64,
    num_records: FloorDivisor,
    parent_len: i64,
) -> Result<()> {
    refuse_empty(num_records.is_zero(), index, "`slice`")?;
    replace_each(index, "slice", |position| {
        let (epoch, offset) = num_records.div_mod(position);
        let record = start.checked_add(offset.checked_mul(step)?)?;
        record.checked_add(epoch.checked_mul(parent_len)?)
    })
}

/// Repeats the first epoch.
pub(crate) fn wrap(index: &mut [i64], num_records: FloorDivisor) -> Result<()> {
    refuse_empty(num_records.is_zero(), index, "`repeat`")?;
    for position in index {
        *position = num_records.div_mod(*position).1;
    }
    Ok(())
}

/// Adds a run for each epoch in `index`, whose offset in the block is `from`.
pub(crate) fn epochs(
    index: &[i64],
    from: usize,
    num_records: FloorDivisor,
    epoch_len: i64,
    seed: u32,
    runs: &mut Vec<Run>,
) -> Result<()> {
    refuse_empty(num_records.is_zero(), index, "`shuffle`")?;
    add_runs(index, from, seed, runs, |position| {
        let number = num_records.div_mod(position).0;
        Some(Span { number, start: number.checked_mul(epoch_len)?, len: epoch_len })
    })
}

/// Adds a run for each window in `index`, whose offset in the block is `from`.
pub(crate) fn windows(
    index: &[i64],
    from: usize,
    windows: &Windows,
    seed: u32,
    runs: &mut Vec<Run>,
) -> Result<()> {
    refuse_empty(windows.is_empty(), index, "`window_shuffle`")?;
    add_runs(index, from, seed, runs, |position| {
        let window = windows.at(position)?;
        Some(Span { number: window.number, start: window.start, len: window.len })
    })
}

fn add_runs(
    index: &[i64],
    from: usize,
    seed: u32,
    runs: &mut Vec<Run>,
    span_at: impl Fn(i64) -> Option<Span>,
) -> Result<()> {
    let mut at = 0;
    while let Some(&first) = index.get(at) {
        let Span { number, start, len } =
            span_at(first).ok_or_else(|| overflow_error("shuffle", first))?;
        // A position before the span is huge as `u64`.
        let is_in =
            |position: i64| position.wrapping_sub(start).cast_unsigned() < len.cast_unsigned();
        let rest = &index[at..];
        let run_len = rest.iter().position(|&at| !is_in(at)).unwrap_or(rest.len());
        let seed = low_word(i64::from(seed).wrapping_add(number));
        runs.push(Run { seed, start, len, from: from + at, to: from + at + run_len });
        at += run_len;
    }
    Ok(())
}

/// Replaces positions by those in the datasets of a mixture, and adds the datasets to `parts`.
pub(crate) fn mix(
    index: &mut [i64],
    schedule: &MixSchedule,
    recent: &mut RecentChoices,
    parts: &mut Vec<u32>,
) {
    let mut keys = Vec::with_capacity(index.len());
    schedule.choose_block(recent, index.iter().copied(), |(part, key)| {
        parts.push(part);
        keys.push(key);
    });
    index.copy_from_slice(&keys);
}

/// Replaces positions by those in the datasets of a concatenation, and adds the datasets to
/// `parts`.
pub(crate) fn concatenate(
    index: &mut [i64],
    total: FloorDivisor,
    ends: &[i64],
    parts: &mut Vec<u32>,
) -> Result<()> {
    refuse_empty(total.is_zero(), index, "a concatenation")?;
    let (mut part, mut start, mut end) = (0, 0, 0);
    for position in index {
        let (epoch, record) = total.div_mod(*position);
        if record < start || record >= end {
            part = ends.partition_point(|&end| end <= record);
            start = if part == 0 { 0 } else { ends[part - 1] };
            end = ends[part];
        }
        let shift = epoch.checked_mul(end - start);
        let key = shift.and_then(|shift| shift.checked_add(record - start));
        *position = key.ok_or_else(|| overflow_error("concatenate", *position))?;
        parts.push(u32::try_from(part).unwrap_or(u32::MAX));
    }
    Ok(())
}

fn replace_each(index: &mut [i64], name: &str, stage: impl Fn(i64) -> Option<i64>) -> Result<()> {
    for position in index {
        *position = stage(*position).ok_or_else(|| overflow_error(name, *position))?;
    }
    Ok(())
}

fn refuse_empty(is_empty: bool, index: &[i64], name: &str) -> Result<()> {
    match index.first() {
        Some(position) if is_empty => {
            Err(Error::OutOfRange(format!("{name} of an empty dataset has no position {position}")))
        }
        _ => Ok(()),
    }
}

/// `value` modulo 2^32.
fn low_word(value: i64) -> u32 {
    let [a, b, c, d, ..] = value.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}
