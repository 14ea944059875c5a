//! Reads rows: decodes the units that hold them, and gathers their values in the order requested.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use arrow_array::{Array, ArrayRef, new_empty_array};
use arrow_schema::FieldRef;
use grainmill_core::io::ReadQueue;
use grainmill_core::io::storage::LastOpened;
use grainmill_core::{Error, Result};

use crate::ahead::Ahead;
use crate::cache::{Claim, Key};
use crate::decode::Unit;
use crate::fetch::JoinLimits;
use crate::files::{ParquetFiles, Pick, small};
use crate::parts::{Parts, parts_of};
use crate::plan::{UnitFinder, holds};
use crate::requests::{ClaimedUnit, requests_of};

/// Not less is decoded before rows are gathered, whatever the limit of the cache.
const MIN_PASS_BYTES: f64 = 64.0 * 1024.0 * 1024.0;

/// Rows, column by column.
#[derive(Debug)]
pub struct Rows {
    /// The name and type of each column.
    pub fields: Vec<FieldRef>,
    /// The values of each column.
    pub columns: Vec<Parts>,
    /// How many rows there are.
    pub len: usize,
}

impl ParquetFiles {
    /// Starts to read and decode the rows at `positions`, on threads of the engine. What fails is raised
    /// when the rows are read; while the result is held, that finds what is decoded.
    ///
    /// Rows that are asked for much later, which `is_beyond` says, do not take the place of others: nothing
    /// is decoded unless half of the memory has room for all of them.
    pub fn start(
        self: &Arc<Self>,
        positions: Vec<u64>,
        is_beyond: bool,
        queue: &ReadQueue,
    ) -> Ahead {
        let columns = self.fields().map_or(0, |fields| fields.len());
        Ahead::start(self, positions, (0..columns).collect(), is_beyond, queue)
    }

    /// Reads the rows at `positions`, in that order, with as many reads in flight as `queue` allows.
    ///
    /// # Errors
    /// If a position is out of range, or a file cannot be read or is damaged.
    pub fn read(self: &Arc<Self>, positions: &[u64], queue: &ReadQueue) -> Result<Rows> {
        let all: Vec<usize> = (0..self.fields()?.len()).collect();
        self.read_columns(positions, &all, queue)
    }

    /// As [`read`](Self::read), of the columns with these numbers.
    ///
    /// # Errors
    /// Those of [`read`](Self::read).
    pub fn read_columns(
        self: &Arc<Self>,
        positions: &[u64],
        columns: &[usize],
        queue: &ReadQueue,
    ) -> Result<Rows> {
        let fields = self.fields()?;
        let fields: Vec<FieldRef> =
            columns.iter().filter_map(|&column| fields.get(column).cloned()).collect();
        if positions.is_empty() {
            let none = |field: &FieldRef| Parts {
                arrays: vec![new_empty_array(field.data_type())],
                places: Vec::new(),
            };
            let columns = fields.iter().map(none).collect();
            return Ok(Rows { fields, columns, len: 0 });
        }
        // Held until the rows are gathered.
        let ahead = self.is_slow().then(|| {
            let ahead = Ahead::start(self, positions.to_vec(), columns.to_vec(), false, queue);
            ahead.wait().map(|()| ahead)
        });
        let _ahead = ahead.transpose()?;
        let picks = self.picks(positions)?;
        let columns = self.parts(&picks, columns, queue).map_err(|error| {
            // What was found first depends on timing and on the order in storage.
            self.first_error(&picks, columns).unwrap_or(error)
        })?;
        Ok(Rows { fields, columns, len: positions.len() })
    }

    /// Calls `look` with the values of a column in `rows`, in order: what is decoded at once at a time, with
    /// the rows that it has, or why these cannot be read, to their end beyond `rows`. Takes no memory for
    /// each row.
    ///
    /// # Errors
    /// If a row is out of range, a file cannot be opened, or those of `look`.
    pub fn scan(
        self: &Arc<Self>,
        rows: Range<u64>,
        column: usize,
        queue: &ReadQueue,
        mut look: impl FnMut(Range<u64>, Result<ArrayRef>) -> Result<()>,
    ) -> Result<()> {
        let mut finder = UnitFinder::new(self, column);
        let mut at = rows.start;
        while at < rows.end {
            let Some(&pick) = self.picks(&[at])?.first() else { break };
            let num_rows = self.file(pick.file as usize)?.group_len(pick.row_group as usize);
            let unit = finder.get(pick).cloned();
            let held = unit.as_ref().map_or(pick.row..num_rows, Unit::rows);
            let next = rows.end.min(at.saturating_add(held.end - pick.row));
            let arrays = unit.and_then(|unit| self.arrays(&[unit], Some(queue)));
            let index = |row: u64| usize::try_from(row).unwrap_or(usize::MAX);
            let values = arrays.and_then(|arrays| match arrays.first() {
                Some(array) => Ok(array.slice(index(pick.row - held.start), index(next - at))),
                None => Err(nothing_decoded()),
            });
            let end = if values.is_ok() { next } else { at.saturating_add(held.end - pick.row) };
            look(at..end, values)?;
            at = next;
        }
        Ok(())
    }

    /// What is wrong with the first of the picks that cannot be read; reads one unit after another.
    fn first_error(self: &Arc<Self>, picks: &[Pick], columns: &[usize]) -> Option<Error> {
        let mut units = HashSet::new();
        let mut finders = self.finders(columns);
        let mut read = |pick: Pick, finder: &mut UnitFinder<'_>| {
            let unit = finder.get(pick)?;
            if units.insert(unit.key) {
                self.arrays(std::slice::from_ref(unit), None)?;
            }
            Ok(())
        };
        picks
            .iter()
            .find_map(|&pick| finders.iter_mut().find_map(|finder| read(pick, finder).err()))
    }

    fn finders(&self, columns: &[usize]) -> Vec<UnitFinder<'_>> {
        columns.iter().map(|&column| UnitFinder::new(self, column)).collect()
    }

    /// The values of `picks` in each column.
    fn parts(
        self: &Arc<Self>,
        picks: &[Pick],
        columns: &[usize],
        queue: &ReadQueue,
    ) -> Result<Vec<Parts>> {
        let passes = self.passes(picks, columns)?;
        if let [_] = &passes[..] {
            return self.gather(picks, columns, queue);
        }
        // Too much to decode at once: gather the rows of some units, then of others.
        let mut pieces: Vec<Vec<ArrayRef>> = vec![Vec::new(); columns.len()];
        let mut places = vec![(0, 0); picks.len()];
        for (number, pass) in passes.iter().enumerate() {
            for (within, &at) in pass.iter().enumerate() {
                places[at] = (number, within);
            }
            let picks: Vec<Pick> = pass.iter().map(|&at| picks[at]).collect();
            let gathered = self.gather(&picks, columns, queue)?;
            for (pieces, column) in pieces.iter_mut().zip(gathered) {
                pieces.push(column.joined()?);
            }
        }
        let column = |arrays| Parts { arrays, places: places.clone() };
        Ok(pieces.into_iter().map(column).collect())
    }

    /// Divides the picks so that the units of each part, decoded, fit into half of the cache.
    fn passes(&self, picks: &[Pick], columns: &[usize]) -> Result<Vec<Vec<usize>>> {
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let limit = (self.cache().budget() as f64 / 2.0).max(MIN_PASS_BYTES);
        // A unit is at most a row group.
        let mut groups: Vec<(u32, u32)> =
            picks.iter().map(|pick| (pick.file, pick.row_group)).collect();
        groups.sort_unstable();
        groups.dedup();
        let mut most = 0.0;
        let known = |column: &usize| self.cache().row_byte_len(small(*column));
        let known: Vec<f64> = columns.iter().map(known).collect();
        let known_sum: f64 = known.iter().sum();
        for &(file, row_group) in &groups {
            let file = self.file(file as usize)?;
            #[expect(clippy::cast_precision_loss, reason = "an estimate")]
            let num_rows = file.group_len(row_group as usize) as f64;
            most += num_rows * file.row_byte_len().max(known_sum);
        }
        if most <= limit {
            return Ok(vec![(0..picks.len()).collect()]);
        }
        let mut order: Vec<usize> = (0..picks.len()).collect();
        order.sort_unstable_by_key(|&at| picks[at]);
        let mut passes = vec![Vec::new()];
        let mut byte_len = 0.0;
        let mut finders: Vec<_> = self.finders(columns).into_iter().zip(known).collect();
        let mut last = vec![None; finders.len()];
        for at in order {
            let mut added = 0.0;
            for ((finder, known), last) in finders.iter_mut().zip(&mut last) {
                let unit = finder.get(picks[at])?;
                if last.replace(unit.key) != Some(unit.key) {
                    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
                    let num_rows = (unit.end - unit.key.first_row) as f64;
                    added += num_rows * unit.placed.row_byte_len.max(*known);
                }
            }
            if byte_len > 0.0 && byte_len + added > limit {
                passes.push(Vec::new());
                byte_len = 0.0;
            }
            byte_len += added;
            if let Some(pass) = passes.last_mut() {
                pass.push(at);
            }
        }
        Ok(passes)
    }

    /// The rows of `picks`, for each column.
    fn gather(
        self: &Arc<Self>,
        picks: &[Pick],
        columns: &[usize],
        queue: &ReadQueue,
    ) -> Result<Vec<Parts>> {
        let mut units: Vec<Unit> = Vec::new();
        let mut numbers: HashMap<Key, usize> = HashMap::new();
        let mut places_by_column = Vec::with_capacity(columns.len());
        for mut finder in self.finders(columns) {
            let mut of_column = Vec::with_capacity(picks.len());
            let mut rest = picks;
            while let Some(&first) = rest.first() {
                let unit = finder.get(first)?;
                let number = *numbers.entry(unit.key).or_insert_with(|| {
                    units.push(unit.clone());
                    units.len() - 1
                });
                let len = 1 + rest[1..].iter().take_while(|&&pick| holds(unit, pick)).count();
                let (run, after) = rest.split_at(len);
                let index = |pick: &Pick| usize::try_from(pick.row - unit.key.first_row);
                of_column
                    .extend(run.iter().map(|pick| (number, index(pick).unwrap_or(usize::MAX))));
                rest = after;
            }
            places_by_column.push(of_column);
        }
        let arrays = self.arrays(&units, Some(queue))?;
        Ok(places_by_column.iter().map(|places| parts_of(&arrays, places)).collect())
    }

    /// The decoded units, from the cache or the files, which others read if there is a `queue` and
    /// storage is slow.
    fn arrays(
        self: &Arc<Self>,
        units: &[Unit],
        queue: Option<&ReadQueue>,
    ) -> Result<Vec<ArrayRef>> {
        let claims = self.cache().claim(units.iter().map(Unit::estimate));
        let mut arrays: Vec<Option<ArrayRef>> = vec![None; units.len()];
        let (mut slots, mut missing) = (Vec::new(), Vec::new());
        for (number, claim) in claims.into_iter().enumerate() {
            match claim {
                Claim::Found(array) => arrays[number] = Some(array),
                Claim::Wait(slot) => slots.push((number, slot)),
                Claim::Decode(slot) => {
                    missing.push(ClaimedUnit::new(units[number].clone(), &slot, &[]));
                    slots.push((number, slot));
                }
            }
        }
        match queue {
            Some(queue) if self.is_slow() && !missing.is_empty() => {
                Ahead::of_claimed(self, missing, queue).wait()?;
            }
            _ => self.decode(missing)?,
        }
        for (number, slot) in slots {
            let mut array = slot.wait()?;
            if array.is_none() {
                // Those who fetched it could not decode it: this thread finds out why. As long as the slot
                // is held, others find what it decodes.
                let unit = ClaimedUnit::new(units[number].clone(), &slot, &[]);
                self.decode(vec![unit])?;
                array = slot.wait()?;
            }
            arrays[number] = Some(array.ok_or_else(nothing_decoded)?);
        }
        Ok(arrays.into_iter().flatten().collect())
    }

    /// Fetches and decodes units on this thread.
    fn decode(&self, units: Vec<Arc<ClaimedUnit>>) -> Result<()> {
        let limits = if self.is_slow() { JoinLimits::SLOW } else { JoinLimits::FAST };
        let mut opened = LastOpened::default();
        for request in requests_of(units, limits) {
            let reopen = || self.file(request.file as usize)?.reopen();
            let file = opened.get(request.file, reopen)?;
            request.run(self, file)?;
        }
        Ok(())
    }
}

fn nothing_decoded() -> Error {
    Error::Panicked("nothing was decoded".to_owned())
}
