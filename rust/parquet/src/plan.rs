//! Which units hold rows.

use grainmill_core::{Error, Result};

use crate::cache::Key;
use crate::decode::Unit;
use crate::files::{ParquetFiles, Pick, small};

/// Finds the units of a column that hold rows, quickest for consecutive ones.
pub(crate) struct UnitFinder<'a> {
    files: &'a ParquetFiles,
    column: usize,
    /// The last unit, and the number of rows of its row group.
    last: Option<(Unit, u64)>,
}

impl<'a> UnitFinder<'a> {
    /// Of column number `column`.
    pub(crate) fn new(files: &'a ParquetFiles, column: usize) -> Self {
        Self { files, column, last: None }
    }

    /// The unit that holds a row; finds out where its pages are if need be.
    pub(crate) fn get(&mut self, pick: Pick) -> Result<&Unit> {
        if !self.seek(pick)? {
            let file = self.files.file(pick.file as usize)?;
            self.files.place(file, pick.row_group as usize, Some(self.column), &[])?;
            self.seek(pick)?;
        }
        let unknown = || Error::Panicked("the pages of a column were not found".to_owned());
        self.last.as_ref().map(|(unit, _)| unit).ok_or_else(unknown)
    }

    /// The unit that holds a row, if it is known where its pages are.
    pub(crate) fn find(&mut self, pick: Pick) -> Result<Option<&Unit>> {
        self.seek(pick)?;
        Ok(self.last.as_ref().map(|(unit, _)| unit))
    }

    /// Goes to the unit that holds a row; returns whether it is known where its pages are.
    fn seek(&mut self, pick: Pick) -> Result<bool> {
        let Pick { file, row_group, row } = pick;
        if !self.last.as_ref().is_some_and(|(unit, _)| is_of_group(unit, pick)) {
            let of_file = self.files.file(file as usize)?;
            let placed = of_file.placed(row_group as usize, self.column);
            let key = Key { file, row_group, column: small(self.column), first_row: 0 };
            let num_rows = of_file.group_len(row_group as usize);
            self.last = placed.map(|placed| (Unit { key, end: 0, placed }, num_rows));
        }
        let Some((unit, num_rows)) = &mut self.last else { return Ok(false) };
        if !unit.rows().contains(&row) {
            (unit.key.first_row, unit.end) = unit.placed.unit(row, *num_rows);
        }
        Ok(true)
    }
}

fn is_of_group(unit: &Unit, pick: Pick) -> bool {
    (unit.key.file, unit.key.row_group) == (pick.file, pick.row_group)
}

/// Whether `unit` of some column holds a row.
pub(crate) fn holds(unit: &Unit, pick: Pick) -> bool {
    is_of_group(unit, pick) && unit.rows().contains(&pick.row)
}
