//! Rows that Python has gathered of Arrow files, and passes on as a stream of record batches.

use arrow_ipc::reader::StreamReader;
use arrow_schema::{ArrowError, FieldRef};
use grainmill_core::{Error, Result};

use crate::parts::Parts;
use crate::read::Rows;

/// The rows of all batches of `stream`; row `order[i]` of them is number `i` of the result.
///
/// # Errors
/// If it is no stream, its values are invalid, or it has fewer rows.
pub fn rows_of_stream(stream: &[u8], order: &[usize]) -> Result<Rows> {
    let failed = |error: ArrowError| Error::InvalidArgument(error.to_string());
    let reader = StreamReader::try_new(stream, None).map_err(failed)?;
    let fields: Vec<FieldRef> = reader.schema().fields().iter().cloned().collect();
    let batches = reader.collect::<Result<Vec<_>, _>>().map_err(failed)?;
    let rows = |(number, len): (usize, usize)| (0..len).map(move |row| (number, row));
    let lens = batches.iter().map(arrow_array::RecordBatch::num_rows).enumerate();
    let all: Vec<(usize, usize)> = lens.flat_map(rows).collect();
    let places: Option<Vec<_>> = order.iter().map(|&row| all.get(row).copied()).collect();
    let Some(places) = places else {
        let text = format!("the stream has {} rows, not all that are requested", all.len());
        return Err(Error::InvalidArgument(text));
    };
    let column = |number: usize| Parts {
        arrays: batches.iter().map(|batch| batch.column(number).clone()).collect(),
        places: places.clone(),
    };
    let columns = (0..fields.len()).map(column).collect();
    Ok(Rows { fields, columns, len: order.len() })
}
