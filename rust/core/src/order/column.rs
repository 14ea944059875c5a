//! The indices that a block of positions has at one leaf or tap.

/// The entries of one leaf or tap, or of several that share an id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    /// The leaf or tap.
    pub id: u32,
    /// Offsets in the block of the positions that reach this column, ascending; `None` if all do.
    pub rows: Option<Vec<i64>>,
    /// The index of each of those positions at the leaf or tap.
    pub index: Vec<i64>,
    /// Stands in for `index`, then empty, where one of them does not fit into 64 bits.
    pub wide: Option<Vec<i128>>,
    /// The `part` of the leaf or tap that each of those positions reaches; `None` if the id has
    /// only one.
    pub parts: Option<Vec<u32>>,
}

/// Collects a column from the segments of a block.
#[derive(Debug, Default)]
pub(crate) struct ColumnBuilder {
    num_segments: usize,
    rows: Vec<i64>,
    index: Vec<i64>,
    parts: Vec<u32>,
}

impl ColumnBuilder {
    /// Adds `index` at `rows`, ascending; empty `rows` mean the whole block.
    pub(crate) fn add(&mut self, rows: &[i64], index: &[i64], part: Option<u32>) {
        self.rows.extend_from_slice(rows);
        self.index.extend_from_slice(index);
        self.add_part(index.len(), part);
    }

    /// Sets the column to `index`, which covers the whole block.
    pub(crate) fn set(&mut self, index: Vec<i64>, part: Option<u32>) {
        self.add_part(index.len(), part);
        self.index = index;
    }

    fn add_part(&mut self, num_entries: usize, part: Option<u32>) {
        if let Some(part) = part {
            self.parts.extend(std::iter::repeat_n(part, num_entries));
        }
        self.num_segments += 1;
    }

    /// The column for a block of `block_len` positions, or `None` if no position reached it.
    pub(crate) fn into_column(self, id: u32, has_parts: bool, block_len: usize) -> Option<Column> {
        let Self { num_segments, rows, index, parts } = self;
        let parts = has_parts.then_some(parts);
        if num_segments == 0 {
            return None;
        }
        if num_segments == 1 {
            let rows = if rows.len() < index.len() { None } else { Some(rows) };
            return Some(Column { id, rows, index, wide: None, parts });
        }
        // Merge the ascending `rows` of all segments: by a table if dense, otherwise by sorting.
        let mut order: Vec<usize>;
        if 8 * rows.len() >= block_len {
            let mut at_row = vec![usize::MAX; block_len];
            for (at, &row) in rows.iter().enumerate() {
                at_row[usize::try_from(row).unwrap_or(0)] = at;
            }
            order = at_row;
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
            wide: None,
            parts: parts.map(|parts| order.iter().map(|&at| parts[at]).collect()),
        })
    }
}
