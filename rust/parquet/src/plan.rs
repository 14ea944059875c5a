//! Which units hold rows.

use std::sync::Arc;

use grainmill_core::{Error, Result};

use crate::cache::Key;
use crate::decode::Unit;
use crate::file::{ParquetFile, Placed};
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
        let (files, column, row_group) = (self.files, self.column, pick.row_group as usize);
        let unit = self.seek(pick, |file| match file.placed(row_group, column) {
            None => Ok(file.place(row_group, Some(column), &[], files.room())?.0.pop()),
            placed => Ok(placed),
        })?;
        unit.ok_or_else(|| Error::Panicked("the pages of a column were not found".to_owned()))
    }

    /// The unit that holds a row, if it is known where its pages are.
    pub(crate) fn find(&mut self, pick: Pick) -> Result<Option<&Unit>> {
        let column = self.column;
        self.seek(pick, |file| Ok(file.placed(pick.row_group as usize, column)))
    }

    /// Goes to the unit that holds a row; `place` returns where its column is stored, if it finds that.
    fn seek(
        &mut self,
        pick: Pick,
        place: impl FnOnce(&ParquetFile) -> Result<Option<Arc<Placed>>>,
    ) -> Result<Option<&Unit>> {
        let Pick { file, row_group, row } = pick;
        if !self.last.as_ref().is_some_and(|(unit, _)| is_of_group(unit, pick)) {
            let of_file = self.files.file(file as usize)?;
            let placed = place(of_file)?;
            let key = Key { file, row_group, column: small(self.column), first_row: 0 };
            let num_rows = of_file.group_len(row_group as usize);
            self.last = placed.map(|placed| (Unit { key, end: 0, placed }, num_rows));
        }
        let Some((unit, num_rows)) = &mut self.last else { return Ok(None) };
        if !unit.rows().contains(&row) {
            (unit.key.first_row, unit.end) = unit.placed.unit(row, *num_rows);
        }
        Ok(Some(unit))
    }
}

fn is_of_group(unit: &Unit, pick: Pick) -> bool {
    (unit.key.file, unit.key.row_group) == (pick.file, pick.row_group)
}

/// Whether `unit` of some column holds a row.
pub(crate) fn holds(unit: &Unit, pick: Pick) -> bool {
    is_of_group(unit, pick) && unit.rows().contains(&pick.row)
}
