//! Reads rows: decodes the units that hold them, and gathers their values in the order requested.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use arrow_array::{Array, ArrayRef, new_empty_array};
use arrow_schema::FieldRef;
use grainmill_core::pipeline::ReadQueue;
use grainmill_core::{Error, Result};

use crate::ahead::Ahead;
use crate::cache::{Cache, Claim, Key, Slot};
use crate::decode::Unit;
use crate::fetch::{Fetched, OpenFile};
use crate::file::{ParquetFile, Placed};
use crate::files::{ParquetFiles, Pick, small};
use crate::parts::{Parts, parts_of};

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
    pub fn start(self: &Arc<Self>, positions: Vec<u64>, queue: &ReadQueue) -> Ahead {
        let columns = self.fields().map_or(0, |fields| fields.len());
        Ahead::start(self, positions, (0..columns).collect(), false, queue)
    }

    /// As [`start`](Self::start), for rows that are asked for much later, and do not take the place of
    /// others: nothing is decoded unless half of the memory has room for all of them.
    pub fn start_beyond(self: &Arc<Self>, positions: Vec<u64>, queue: &ReadQueue) -> Ahead {
        let columns = self.fields().map_or(0, |fields| fields.len());
        Ahead::start(self, positions, (0..columns).collect(), true, queue)
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
            self.first_error(&picks, columns, queue).unwrap_or(error)
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
        &self,
        rows: Range<u64>,
        column: usize,
        queue: &ReadQueue,
        mut look: impl FnMut(Range<u64>, Result<ArrayRef>) -> Result<()>,
    ) -> Result<()> {
        let mut opened = Opened { files: HashMap::new(), queue };
        let mut at = rows.start;
        while at < rows.end {
            let Some(&pick) = self.picks(&[at])?.first() else { break };
            let (file, row_group) = (self.file(pick.file as usize)?, pick.row_group as usize);
            let num_rows = file.group_len(row_group);
            let placed = self.placed(file, row_group, column);
            let unit = placed.as_ref().map(|placed| placed.unit(pick.row, num_rows));
            let (first_row, end) = unit.unwrap_or((pick.row, num_rows));
            let next = rows.end.min(at.saturating_add(end - pick.row));
            let Pick { file, row_group, row } = pick;
            let key = Key { file, row_group, column: small(column), first_row };
            let arrays = placed.and_then(|placed| self.arrays(&[(key, end, placed)], &mut opened));
            let index = |row: u64| usize::try_from(row).unwrap_or(usize::MAX);
            let values = arrays.and_then(|arrays| match arrays.first() {
                Some(array) => Ok(array.slice(index(row - first_row), index(next - at))),
                None => Err(Error::Panicked("nothing was decoded".to_owned())),
            });
            let end = if values.is_ok() { next } else { at.saturating_add(end - pick.row) };
            look(at..end, values)?;
            at = next;
        }
        Ok(())
    }

    /// What is wrong with the first of the picks that cannot be read; reads one unit after another.
    fn first_error(&self, picks: &[Pick], columns: &[usize], queue: &ReadQueue) -> Option<Error> {
        let mut opened = Opened { files: HashMap::new(), queue };
        let mut units = HashSet::new();
        let mut read = |pick: &Pick, column: usize| {
            let (file, row_group) = (self.file(pick.file as usize)?, pick.row_group as usize);
            let placed = self.placed(file, row_group, column)?;
            let (first_row, end) = placed.unit(pick.row, file.group_len(row_group));
            let Pick { file, row_group, .. } = *pick;
            let key = Key { file, row_group, column: small(column), first_row };
            if units.insert(key) {
                self.arrays(&[(key, end, placed)], &mut opened)?;
            }
            Ok(())
        };
        picks.iter().find_map(|pick| columns.iter().find_map(|&column| read(pick, column).err()))
    }

    /// The values of `picks` in each column.
    fn parts(&self, picks: &[Pick], columns: &[usize], queue: &ReadQueue) -> Result<Vec<Parts>> {
        let mut opened = Opened { files: HashMap::new(), queue };
        let passes = self.passes(picks, columns)?;
        if let [_] = &passes[..] {
            return self.gather(picks, columns, &mut opened);
        }
        // Too much to decode at once: gather the rows of some units, then of others.
        let mut pieces: Vec<Vec<ArrayRef>> = vec![Vec::new(); columns.len()];
        let mut places = vec![(0, 0); picks.len()];
        for (number, pass) in passes.iter().enumerate() {
            for (within, &at) in pass.iter().enumerate() {
                places[at] = (number, within);
            }
            let picks: Vec<Pick> = pass.iter().map(|&at| picks[at]).collect();
            let gathered = self.gather(&picks, columns, &mut opened)?;
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
        let mut last: HashMap<usize, (u32, u32, u64)> = HashMap::new();
        for at in order {
            let Pick { file: number, row_group, row } = picks[at];
            let file = self.file(number as usize)?;
            let group = row_group as usize;
            let mut added = 0.0;
            for (&column, known) in columns.iter().zip(&known) {
                let placed = self.placed(file, group, column)?;
                let (start, end) = placed.unit(row, file.group_len(group));
                let unit = (number, row_group, start);
                if last.insert(column, unit) != Some(unit) {
                    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
                    let num_rows = (end - start) as f64;
                    added += num_rows * placed.row_byte_len.max(*known);
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

    fn placed(&self, file: &ParquetFile, row_group: usize, column: usize) -> Result<Arc<Placed>> {
        if let Some(placed) = file.placed(row_group, column) {
            return Ok(placed);
        }
        self.place(file, row_group, Some(column), &[])?;
        file.placed(row_group, column)
            .ok_or_else(|| Error::Panicked("the pages of a column were not found".to_owned()))
    }

    /// The rows of `picks`, for each column.
    fn gather(
        &self,
        picks: &[Pick],
        columns: &[usize],
        opened: &mut Opened<'_>,
    ) -> Result<Vec<Parts>> {
        let mut units: Vec<(Key, u64, Arc<Placed>)> = Vec::new();
        let mut numbers: HashMap<Key, usize> = HashMap::new();
        let mut places_by_column = Vec::with_capacity(columns.len());
        for &column in columns {
            let mut of_column = Vec::with_capacity(picks.len());
            let mut group: Option<(u32, u32, Arc<Placed>, u64)> = None;
            let mut unit: Option<(usize, u64, u64)> = None;
            for pick in picks {
                if group.as_ref().is_none_or(|&(file, row_group, ..)| {
                    (file, row_group) != (pick.file, pick.row_group)
                }) {
                    let file = self.file(pick.file as usize)?;
                    let row_group = pick.row_group as usize;
                    let placed = self.placed(file, row_group, column)?;
                    group = Some((pick.file, pick.row_group, placed, file.group_len(row_group)));
                    unit = None;
                }
                let Some((.., placed, num_rows)) = &group else { continue };
                if unit.is_none_or(|(_, start, end)| !(start..end).contains(&pick.row)) {
                    let (start, end) = placed.unit(pick.row, *num_rows);
                    let Pick { file, row_group, .. } = *pick;
                    let key = Key { file, row_group, column: small(column), first_row: start };
                    let number = *numbers.entry(key).or_insert_with(|| {
                        units.push((key, end, Arc::clone(placed)));
                        units.len() - 1
                    });
                    unit = Some((number, start, end));
                }
                let Some((number, start, _)) = unit else { continue };
                of_column.push((number, usize::try_from(pick.row - start).unwrap_or(usize::MAX)));
            }
            places_by_column.push(of_column);
        }
        let arrays = self.arrays(&units, opened)?;
        Ok(places_by_column.iter().map(|places| parts_of(&arrays, places)).collect())
    }

    /// The decoded units, from the cache or the files.
    fn arrays(
        &self,
        units: &[(Key, u64, Arc<Placed>)],
        opened: &mut Opened<'_>,
    ) -> Result<Vec<ArrayRef>> {
        let estimate = |(key, end, placed): &(Key, u64, Arc<Placed>)| {
            (*key, placed.estimate(key.first_row..*end))
        };
        let claims = self.cache().claim(units.iter().map(estimate));
        let mut arrays: Vec<Option<ArrayRef>> = vec![None; units.len()];
        let (mut missing, mut waiting) = (Vec::new(), Vec::new());
        let mut claimed = Claimed { cache: self.cache(), slots: HashMap::new() };
        for (number, claim) in claims.into_iter().enumerate() {
            match claim {
                Claim::Found(array) => arrays[number] = Some(array),
                Claim::Wait(slot) => waiting.push((number, slot)),
                Claim::Decode(slot) => {
                    claimed.slots.insert(units[number].0, slot);
                    missing.push(number);
                }
            }
        }
        if !missing.is_empty() {
            let decoded = self.decoded(&missing, units, opened, &mut claimed)?;
            for (number, array) in missing.into_iter().zip(decoded) {
                arrays[number] = Some(array);
            }
        }
        for (number, slot) in waiting {
            let array = if let Some(array) = slot.wait()? {
                array
            } else {
                // Another thread could not decode it: this one finds out why.
                let array = self
                    .decoded(&[number], units, opened, &mut claimed)?
                    .pop()
                    .ok_or_else(|| Error::Panicked("nothing was decoded".to_owned()))?;
                // As long as the slot is held, others find it.
                self.cache().finish(units[number].0, &slot, Some(Arc::clone(&array)));
                array
            };
            arrays[number] = Some(array);
        }
        Ok(arrays.into_iter().flatten().collect())
    }

    /// Decodes the units of these numbers, and ends the claims to them.
    fn decoded(
        &self,
        numbers: &[usize],
        units: &[(Key, u64, Arc<Placed>)],
        opened: &mut Opened<'_>,
        claimed: &mut Claimed<'_>,
    ) -> Result<Vec<ArrayRef>> {
        // In the order of the files, each with its units.
        let mut by_file: Vec<(u32, Vec<Unit<'_>>)> = Vec::new();
        let mut at_file: HashMap<u32, usize> = HashMap::new();
        let mut order = Vec::with_capacity(numbers.len());
        for &number in numbers {
            let (key, end, placed) = &units[number];
            let file = self.file(key.file as usize)?;
            let unit = Unit::of(file, *key, *end, placed);
            let at = *at_file.entry(key.file).or_insert_with(|| {
                by_file.push((key.file, Vec::new()));
                by_file.len() - 1
            });
            order.push((at, by_file[at].1.len(), *key));
            by_file[at].1.push(unit);
        }
        let mut requests = Vec::with_capacity(by_file.len());
        for (number, units) in &by_file {
            let handle = match opened.files.get(number) {
                Some(handle) => handle.clone(),
                None => self.reopened(*number)?,
            };
            opened.files.insert(*number, handle.clone());
            requests.push((handle, units.iter().flat_map(Unit::ranges).collect()));
        }
        let fetched = Fetched::of(requests, opened.queue)?;
        let mut arrays = Vec::with_capacity(order.len());
        for (at, unit, key) in order {
            let array = by_file[at].1[unit].decode(&fetched[at])?;
            claimed.finish(key, &array);
            arrays.push(array);
        }
        Ok(arrays)
    }
}

/// The files that a thread has opened for its reads, and the queue of these.
struct Opened<'a> {
    files: HashMap<u32, OpenFile>,
    queue: &'a ReadQueue,
}

/// Claims of a thread, which end even if it fails.
struct Claimed<'a> {
    cache: &'a Cache,
    slots: HashMap<Key, Arc<Slot>>,
}

impl Claimed<'_> {
    fn finish(&mut self, key: Key, array: &ArrayRef) {
        if let Some(slot) = self.slots.remove(&key) {
            self.cache.finish(key, &slot, Some(Arc::clone(array)));
        }
    }
}

impl Drop for Claimed<'_> {
    fn drop(&mut self) {
        for (key, slot) in self.slots.drain() {
            self.cache.finish(key, &slot, None);
        }
    }
}
