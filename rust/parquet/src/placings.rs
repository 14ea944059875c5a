//! Which column chunks jobs are finding the pages of: who else needs them is told, and holds no thread
//! meanwhile.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::Mutex;

use grainmill_core::lock::lock;

use crate::room::Held;

/// A column of a row group of a file, or all columns that have an offset index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Placing {
    pub(crate) file: u32,
    pub(crate) row_group: usize,
    pub(crate) column: Option<usize>,
}

/// Is called with the chunks that were read, also if the pages were not found.
type Then = Box<dyn FnOnce(&[Held]) + Send>;

/// What is being found.
#[derive(Default)]
pub(crate) struct Placings(Mutex<HashMap<Placing, Vec<Then>>>);

impl Placings {
    /// Returns whether the caller is to find `placing`, and to [`end`](Self::end) that; if another does,
    /// what `then` returns is called afterwards.
    pub(crate) fn begin(&self, placing: Placing, then: impl FnOnce() -> Then) -> bool {
        match lock(&self.0).entry(placing) {
            Entry::Vacant(entry) => {
                entry.insert(Vec::new());
                true
            }
            Entry::Occupied(mut entry) => {
                entry.get_mut().push(then());
                false
            }
        }
    }

    /// Whether others wait for what the caller has begun.
    pub(crate) fn is_awaited(&self, placing: Placing) -> bool {
        lock(&self.0).get(&placing).is_some_and(|waiting| !waiting.is_empty())
    }

    /// Ends what the caller has begun, which has read `chunks`.
    pub(crate) fn end(&self, placing: Placing, chunks: &[Held]) {
        let waiting = lock(&self.0).remove(&placing).unwrap_or_default();
        for then in waiting {
            then(chunks);
        }
    }
}

impl fmt::Debug for Placings {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Placings").finish_non_exhaustive()
    }
}
