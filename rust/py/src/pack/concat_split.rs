//! Python bindings for concatenating sequences and splitting them into rows.

use std::sync::Mutex;

use grainmill_core::pack::{FeatureSlice, Limits, Placement, RowFill, Taken};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::error::{Raised, is_interrupt};
use crate::pack::locked::locked;
use crate::pack::rows::{Array, Features, Rows};

/// The whole feature that ended a row early: its name, its length and the capacity left for it.
type Limited = Option<(String, usize, usize)>;

/// By feature, the range of values left of a split sequence.
type Remainder = Option<Vec<(usize, usize)>>;

struct State {
    fill: RowFill,
    rows: Vec<Rows>,
    /// Rows with a single sequence.
    alone: Vec<Vec<Rows>>,
}

/// Concatenates the features of elements and splits them into rows.
#[pyclass(module = "grainmill._native", frozen)]
pub(crate) struct RowPacker {
    features: Features,
    /// By feature, the token that starts its segments.
    begin_tokens: Vec<Option<Py<PyAny>>>,
    state: Mutex<State>,
}

#[pymethods]
impl RowPacker {
    #[new]
    #[pyo3(signature = (*, names, capacities, whole, alone, begin_tokens, cells))]
    fn new(
        py: Python<'_>,
        names: Vec<String>,
        capacities: Vec<usize>,
        whole: Vec<bool>,
        alone: bool,
        begin_tokens: Vec<Option<Py<PyAny>>>,
        cells: Py<PyAny>,
    ) -> PyResult<Self> {
        let key = |name: &String| Ok(vec![name.into_pyobject(py)?.into_any().unbind()]);
        let paths = names.iter().map(key).collect::<PyResult<_>>()?;
        let marked = whole.iter().map(|whole| !whole).collect();
        let features = Features { paths, names: names.clone(), marked, exact: true, cells };
        let limits = Limits { names, capacities, whole, alone };
        let fill = RowFill::new(limits).map_err(Raised)?;
        let state = Mutex::new(State { fill, rows: Vec::new(), alone: Vec::new() });
        Ok(Self { features, begin_tokens, state })
    }

    /// Packs `elements` from `start` on into the row, until it is complete.
    ///
    /// Returns the number of elements packed entirely, whether the row is complete, and the whole
    /// feature that ended it, if any. The rest of the next element belongs to the next row. An
    /// invalid element raises only if it is the first.
    fn push(&self, elements: &Bound<'_, PyList>, start: usize) -> PyResult<(usize, bool, Limited)> {
        let mut state = locked(&self.state)?;
        let (mut arrays, mut lengths) = (Vec::new(), Vec::new());
        let mut num_packed = 0;
        for index in start..elements.len() {
            let element = elements.get_item(index)?;
            match self.add(&mut state, &element, &mut arrays, &mut lengths) {
                Ok(Taken::All | Taken::Alone) => num_packed += 1,
                Ok(Taken::Part) => return Ok((num_packed, true, None)),
                Ok(Taken::Nothing { limited_by }) => {
                    let limited = limited_by.map(|(feature, capacity)| {
                        (self.features.names[feature].clone(), lengths[feature], capacity)
                    });
                    return Ok((num_packed, true, limited));
                }
                Err(failure) if num_packed == 0 || is_interrupt(elements.py(), &failure) => {
                    return Err(failure);
                }
                Err(_) => return Ok((num_packed, false, None)),
            }
        }
        Ok((num_packed, false, None))
    }

    /// Returns the row, if it has a sequence, and the rows of single sequences; starts the next row.
    fn take<'py>(&self, py: Python<'py>) -> PyResult<Vec<Vec<Bound<'py, PyTuple>>>> {
        let mut state = locked(&self.state)?;
        state.fill.next_row();
        let mut all = std::mem::take(&mut state.alone);
        let row = std::mem::take(&mut state.rows);
        if !row.is_empty() {
            all.insert(0, row);
        }
        all.into_iter()
            .map(|row| row.into_iter().map(|rows| rows.into_python(py)).collect())
            .collect()
    }

    /// What is left of the next element; `None` if all of it.
    #[getter]
    fn remainder(&self) -> PyResult<Remainder> {
        Ok(locked(&self.state)?.fill.remainder().map(<[_]>::to_vec))
    }

    /// Starts over with an empty row and `remainder` of the next element.
    fn restart(&self, remainder: Remainder) -> PyResult<()> {
        let mut state = locked(&self.state)?;
        state.fill.restart(remainder);
        state.rows.clear();
        state.alone.clear();
        Ok(())
    }
}

impl RowPacker {
    fn add<'py>(
        &self,
        state: &mut State,
        element: &Bound<'py, PyAny>,
        arrays: &mut Vec<Array<'py>>,
        lengths: &mut Vec<usize>,
    ) -> PyResult<Taken> {
        self.features.gather(element, &state.rows, arrays, lengths)?;
        let before = (!Features::fits(&state.rows, arrays)).then(|| state.fill.clone());
        let taken = state.fill.add(lengths).map_err(Raised)?;
        match taken {
            Taken::Nothing { .. } => {}
            Taken::Alone => {
                // In a row of its own it keeps its own dtypes.
                self.features.gather(element, &[], arrays, lengths)?;
                let mut rows = self.new_rows(state, arrays)?;
                let whole = lengths.iter().map(|&len| FeatureSlice { from: 0, start: 0, len });
                self.write(&mut rows, arrays, whole, 1)?;
                state.alone.push(rows);
            }
            Taken::All | Taken::Part => {
                if state.rows.is_empty() {
                    state.rows = self.new_rows(state, arrays)?;
                }
                let segment = i32::try_from(state.fill.num_sequences())?;
                if let Err(failure) = self.features.fit(&mut state.rows, arrays) {
                    if let Some(before) = before {
                        state.fill = before;
                    }
                    return Err(failure);
                }
                let slices = state.fill.pieces().iter().copied();
                self.write(&mut state.rows, arrays, slices, segment)?;
            }
        }
        Ok(taken)
    }

    fn new_rows(&self, state: &State, arrays: &[Array<'_>]) -> PyResult<Vec<Rows>> {
        let capacities = &state.fill.limits().capacities;
        let rows = arrays.iter().zip(capacities).enumerate().map(|(feature, (array, &cells))| {
            Rows::for_array(array, &self.features, feature, (1, cells))
        });
        rows.collect()
    }

    fn write(
        &self,
        rows: &mut [Rows],
        arrays: &[Array<'_>],
        slices: impl Iterator<Item = FeatureSlice>,
        segment: i32,
    ) -> PyResult<()> {
        for (feature, (array, slice)) in arrays.iter().zip(slices).enumerate() {
            let to = Placement { row: 0, start: slice.start, len: slice.len, segment };
            rows[feature].write(array, slice.from, to)?;
            if let Some(token) = &self.begin_tokens[feature] {
                rows[feature].write_begin_token(
                    &self.features,
                    feature,
                    token.bind(array.py()),
                    to,
                )?;
            }
        }
        Ok(())
    }
}
