//! What a block of positions is at one leaf or tap.

/// What reaches one leaf or tap, or several that share an id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    /// The leaf or tap.
    pub id: u32,
    /// Places within the block whose positions come here, ascending; none where all do.
    pub rows: Option<Vec<i64>>,
    /// For each of those places, the index here.
    pub index: Vec<i64>,
    /// For each of those places, the part of the plan it is in; none where the id has one part.
    pub parts: Option<Vec<u32>>,
}

/// A column while the pieces of a block are followed, each of which may add to it.
#[derive(Debug, Default)]
pub(crate) struct ColumnBuilder {
    count: usize,
    rows: Vec<i64>,
    index: Vec<i64>,
    parts: Vec<u32>,
}

impl ColumnBuilder {
    /// Adds `index` at `rows`, ascending; no rows at all stand for those of a whole block.
    pub(crate) fn add(&mut self, rows: &[i64], index: &[i64], part: Option<u32>) {
        self.rows.extend_from_slice(rows);
        self.index.extend_from_slice(index);
        self.add_part(index.len(), part);
    }

    /// Makes `index` of a whole block the column.
    pub(crate) fn set(&mut self, index: Vec<i64>, part: Option<u32>) {
        self.add_part(index.len(), part);
        self.index = index;
    }

    fn add_part(&mut self, num_entries: usize, part: Option<u32>) {
        if let Some(part) = part {
            self.parts.extend(std::iter::repeat_n(part, num_entries));
        }
        self.count += 1;
    }

    /// The column for a block of `block_len` positions, none where nothing came here.
    pub(crate) fn into_column(self, id: u32, by_part: bool, block_len: usize) -> Option<Column> {
        let Self { count, rows, index, parts } = self;
        let parts = by_part.then_some(parts);
        if count == 0 {
            return None;
        }
        if count == 1 {
            let rows = if rows.len() < index.len() { None } else { Some(rows) };
            return Some(Column { id, rows, index, parts });
        }
        // The pieces' rows, each ascending, become one: by their place where most are there.
        let mut order: Vec<usize>;
        if 8 * rows.len() >= block_len {
            let mut found = vec![usize::MAX; block_len];
            for (at, &row) in rows.iter().enumerate() {
                found[usize::try_from(row).unwrap_or(0)] = at;
            }
            order = found;
            order.retain(|&at| at != usize::MAX);
        } else {
            order = (0..rows.len()).collect();
            order.sort_unstable_by_key(|&at| rows[at]);
        }
        let in_order = |values: &[i64]| order.iter().map(|&at| values[at]).collect();
        Some(Column {
            id,
            rows: (rows.len() < block_len).then(|| in_order(&rows)),
            index: in_order(&index),
            parts: parts.map(|parts| order.iter().map(|&at| parts[at]).collect()),
        })
    }
}
