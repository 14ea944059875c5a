//! The values of a column for some rows, in the arrays that they were decoded into.

use std::collections::HashMap;
use std::sync::Arc;

use arrow_array::{Array, ArrayRef};
use arrow_select::interleave::interleave;
use grainmill_core::{Error, Result};

/// The values of a column for some rows, in the arrays that they were decoded into.
#[derive(Debug)]
pub struct Parts {
    /// The arrays.
    pub arrays: Vec<ArrayRef>,
    /// The array of each row, and the row's index in it.
    pub places: Vec<(usize, usize)>,
}

impl Parts {
    /// One array of all rows.
    ///
    /// # Errors
    /// If it would be too large.
    pub fn joined(&self) -> Result<ArrayRef> {
        interleaved(&self.arrays, &self.places)
    }
}

/// The rows at `places` of `arrays`, of which only some belong to the column.
pub(crate) fn parts_of(arrays: &[ArrayRef], places: &[(usize, usize)]) -> Parts {
    let mut numbers = HashMap::new();
    let mut of_column = Vec::new();
    let mut last = (usize::MAX, 0);
    let places: Vec<(usize, usize)> = places
        .iter()
        .map(|&(array, row)| {
            if last.0 != array {
                let number = *numbers.entry(array).or_insert_with(|| {
                    of_column.push(Arc::clone(&arrays[array]));
                    of_column.len() - 1
                });
                last = (array, number);
            }
            (last.1, row)
        })
        .collect();
    Parts { arrays: of_column, places }
}

fn interleaved(arrays: &[ArrayRef], places: &[(usize, usize)]) -> Result<ArrayRef> {
    // Consecutive rows of one array need no copy.
    if let Some(&(array, first)) = places.first()
        && places.iter().zip(first..).all(|(&place, row)| place == (array, row))
    {
        return Ok(arrays[array].slice(first, places.len()));
    }
    let arrays: Vec<&dyn Array> = arrays.iter().map(|array| &**array).collect();
    let gathered = interleave(&arrays, places);
    gathered.map_err(|error| Error::InvalidArgument(format!("the rows cannot be joined: {error}")))
}
