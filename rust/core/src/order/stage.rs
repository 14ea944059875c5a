//! One index stage over one column of positions.

use std::sync::Arc;

use super::floor::Floor;
use super::mix::MixSchedule;
use super::recent::RecentPermutations;
use super::resolve::Column;
use super::window::Windows;
use crate::{Error, Result};

/// A prepared stage and those below it; what the parameters mean is said at `Tree`.
#[derive(Clone, Debug)]
pub(crate) enum Stage {
    Leaf { id: u32 },
    Tap { id: u32, child: Box<Stage> },
    Shuffle { num_records: Floor, epoch_len: i64, orders: Orders, child: Box<Stage> },
    WindowShuffle { windows: Windows, orders: Orders, child: Box<Stage> },
    Slice { start: i64, step: i64, num_records: Floor, parent_len: i64, child: Box<Stage> },
    Wrap { num_records: Floor, child: Box<Stage> },
    Take { indices: Arc<[i64]>, num_records: Floor, parent_len: i64, child: Box<Stage> },
    Divide { by: Floor, child: Box<Stage> },
    Mix { schedule: MixSchedule, children: Box<[Stage]> },
    Concatenate { total: Floor, ends: Box<[i64]>, children: Box<[Stage]> },
}

/// The orders of a shuffled stage: one per epoch or window, by its number.
#[derive(Clone, Debug)]
pub(crate) struct Orders {
    seed: u32,
    recent: RecentPermutations,
}

/// A run of records that is shuffled on its own: an epoch or a window.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Span {
    number: i64,
    start: i64,
    len: i64,
}

/// Where runs of positions in one span are shorter than this on average, sorting pays.
const MIN_RUN_LEN: usize = 16;

/// Places within the block, ascending; none stands for all of them.
type Rows = Option<Vec<i64>>;

impl Stage {
    pub(crate) fn shuffle(num_records: u64, seed: u32, child: Box<Stage>) -> Self {
        let orders = Orders { seed, recent: RecentPermutations::default() };
        let epoch_len = num_records.cast_signed();
        Self::Shuffle { num_records: Floor::new(num_records), epoch_len, orders, child }
    }

    pub(crate) fn window_shuffle(windows: Windows, seed: u32, child: Box<Stage>) -> Self {
        let orders = Orders { seed, recent: RecentPermutations::default() };
        Self::WindowShuffle { windows, orders, child }
    }

    /// Follows `index`, the positions at the places `rows`, down to every leaf.
    pub(crate) fn resolve(
        &mut self,
        mut index: Vec<i64>,
        rows: Rows,
        columns: &mut Vec<Column>,
    ) -> Result<()> {
        let mut stage = self;
        loop {
            stage = match stage {
                Self::Leaf { id } => {
                    columns.push(Column { id: *id, rows, index });
                    return Ok(());
                }
                Self::Tap { id, child } => {
                    columns.push(Column { id: *id, rows: rows.clone(), index: index.clone() });
                    child
                }
                Self::Mix { schedule, children } => {
                    let parts = mixed(schedule, &index);
                    return resolve_parts(children, parts, &rows, columns);
                }
                Self::Concatenate { total, ends, children } => {
                    refuse_empty(total.is_zero(), &index, "a concatenation")?;
                    let parts = concatenated(*total, ends, &index)?;
                    return resolve_parts(children, parts, &rows, columns);
                }
                straight => straight.apply(&mut index)?,
            };
        }
    }

    /// Applies a stage with one child to `index`, and names that child.
    fn apply(&mut self, index: &mut [i64]) -> Result<&mut Stage> {
        match self {
            Self::Shuffle { num_records, epoch_len, orders, child } => {
                refuse_empty(num_records.is_zero(), index, "`shuffle`")?;
                let (num_records, len) = (*num_records, *epoch_len);
                orders.apply(index, |position| {
                    let number = num_records.split(position).0;
                    Some(Span { number, start: number.checked_mul(len)?, len })
                })?;
                Ok(child)
            }
            Self::WindowShuffle { windows, orders, child } => {
                refuse_empty(windows.is_empty(), index, "`window_shuffle`")?;
                orders.apply(index, |position| {
                    let window = windows.at(position)?;
                    Some(Span { number: window.number, start: window.start, len: window.len })
                })?;
                Ok(child)
            }
            Self::Slice { start, step, num_records, parent_len, child } => {
                refuse_empty(num_records.is_zero(), index, "`slice`")?;
                let (start, step, parent_len) = (*start, *step, *parent_len);
                for_each(index, "slice", |position| {
                    let (epoch, place) = num_records.split(position);
                    let record = start.checked_add(place.checked_mul(step)?)?;
                    record.checked_add(epoch.checked_mul(parent_len)?)
                })?;
                Ok(child)
            }
            Self::Wrap { num_records, child } => {
                refuse_empty(num_records.is_zero(), index, "`repeat`")?;
                for position in index {
                    *position = num_records.split(*position).1;
                }
                Ok(child)
            }
            Self::Take { indices, num_records, parent_len, child } => {
                refuse_empty(num_records.is_zero(), index, "`slice`")?;
                for_each(index, "slice", |position| {
                    let (epoch, place) = num_records.split(position);
                    let record = *indices.get(usize::try_from(place).ok()?)?;
                    record.checked_add(epoch.checked_mul(*parent_len)?)
                })?;
                Ok(child)
            }
            Self::Divide { by, child } => {
                for position in index {
                    *position = by.split(*position).0;
                }
                Ok(child)
            }
            Self::Leaf { .. } | Self::Tap { .. } | Self::Mix { .. } | Self::Concatenate { .. } => {
                unreachable!("`resolve` follows these itself")
            }
        }
    }
}

impl Orders {
    /// Moves every position within its span, as that span's order says.
    fn apply(&mut self, index: &mut [i64], span_at: impl Fn(i64) -> Option<Span>) -> Result<()> {
        let spans = |position| span_at(position).ok_or_else(|| leaves_range("shuffle", position));
        let runs = runs(index, spans)?;
        if runs.len() <= index.len() / MIN_RUN_LEN + 1 {
            return self.apply_runs(index, &runs);
        }
        // Positions jump between spans: bring those of one span together, then put them back.
        let mut places: Vec<usize> = (0..index.len()).collect();
        places.sort_unstable_by_key(|&place| index[place]);
        let mut sorted: Vec<i64> = places.iter().map(|&place| index[place]).collect();
        let runs = self::runs(&sorted, spans)?;
        self.apply_runs(&mut sorted, &runs)?;
        for (place, moved) in places.into_iter().zip(sorted) {
            index[place] = moved;
        }
        Ok(())
    }

    fn apply_runs(&mut self, index: &mut [i64], runs: &[(Span, usize)]) -> Result<()> {
        let mut rest = index;
        for &(span, run_len) in runs {
            let (run, behind) = rest.split_at_mut(run_len);
            for position in &mut *run {
                *position -= span.start;
            }
            let seed = low_word(i64::from(self.seed).wrapping_add(span.number));
            self.recent.apply(span.len.cast_unsigned(), seed, run)?;
            // Only a span that begins right before the end of the range can lead out of it.
            let fits = span.start.checked_add(span.len - 1).is_some();
            if !fits && run.iter().any(|position| position.checked_add(span.start).is_none()) {
                return Err(leaves_range("shuffle", span.start));
            }
            for position in run {
                *position += span.start;
            }
            rest = behind;
        }
        Ok(())
    }
}

/// The spans that `index` goes through, each with the number of positions in a row in it.
fn runs(index: &[i64], span_at: impl Fn(i64) -> Result<Span>) -> Result<Vec<(Span, usize)>> {
    let mut runs = Vec::new();
    let mut rest = index;
    while let Some(&first) = rest.first() {
        let span = span_at(first)?;
        // A position before the span is huge as `u64`.
        let is_in = |position: i64| {
            position.wrapping_sub(span.start).cast_unsigned() < span.len.cast_unsigned()
        };
        let run_len = rest.iter().position(|&at| !is_in(at)).unwrap_or(rest.len());
        runs.push((span, run_len));
        rest = &rest[run_len..];
    }
    Ok(runs)
}

/// The positions that reach one child: their places in the column before, and their indices.
#[derive(Default)]
struct Part {
    places: Vec<i64>,
    index: Vec<i64>,
}

impl Part {
    #[inline]
    fn push(&mut self, place: i64, index: i64) {
        self.places.push(place);
        self.index.push(index);
    }
}

fn parts(num_parts: usize) -> Vec<Part> {
    let mut parts = Vec::new();
    parts.resize_with(num_parts, Part::default);
    parts
}

fn mixed(schedule: &MixSchedule, index: &[i64]) -> Vec<Part> {
    let mut parts = parts(schedule.num_parts());
    let mut place = 0;
    schedule.choose_block(index.iter().copied(), |(part, key)| {
        parts[part as usize].push(place, key);
        place += 1;
    });
    parts
}

fn concatenated(total: Floor, ends: &[i64], index: &[i64]) -> Result<Vec<Part>> {
    let mut parts = parts(ends.len());
    let (mut part, mut start, mut end) = (0, 0, 0);
    for (place, &position) in (0..).zip(index) {
        let (epoch, record) = total.split(position);
        if record < start || record >= end {
            part = ends.partition_point(|&end| end <= record);
            start = if part == 0 { 0 } else { ends[part - 1] };
            end = ends[part];
        }
        let shift = epoch.checked_mul(end - start);
        let key = shift.and_then(|shift| shift.checked_add(record - start));
        parts[part].push(place, key.ok_or_else(|| leaves_range("concatenate", position))?);
    }
    Ok(parts)
}

fn resolve_parts(
    children: &mut [Stage],
    parts: Vec<Part>,
    rows: &Rows,
    columns: &mut Vec<Column>,
) -> Result<()> {
    let num_places: usize = parts.iter().map(|part| part.index.len()).sum();
    for (child, part) in children.iter_mut().zip(parts) {
        let part_rows = match rows {
            _ if part.index.len() == num_places => rows.clone(),
            None => Some(part.places),
            // A place is a position in `rows`, counted from 0.
            Some(rows) => {
                let row = |place: i64| usize::try_from(place).map_or(place, |place| rows[place]);
                Some(part.places.into_iter().map(row).collect())
            }
        };
        child.resolve(part.index, part_rows, columns)?;
    }
    Ok(())
}

fn for_each(index: &mut [i64], name: &str, stage: impl Fn(i64) -> Option<i64>) -> Result<()> {
    for position in index {
        *position = stage(*position).ok_or_else(|| leaves_range(name, *position))?;
    }
    Ok(())
}

fn refuse_empty(is_empty: bool, index: &[i64], name: &str) -> Result<()> {
    match index.first() {
        Some(position) if is_empty => {
            Err(Error::OutOfRange(format!("{name} of no records has no position {position}")))
        }
        _ => Ok(()),
    }
}

fn leaves_range(name: &str, position: i64) -> Error {
    Error::OutOfRange(format!("`{name}`: position {position} leads outside the 64-bit range"))
}

/// `value` modulo 2^32.
fn low_word(value: i64) -> u32 {
    let [a, b, c, d, ..] = value.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}
