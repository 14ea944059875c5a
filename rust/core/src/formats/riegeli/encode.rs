//! Collects the records of a chunk and encodes them as a simple chunk.

use super::FormatError;
use super::compress::{Codec, Compressor};
use super::cursor::Cursor;
use crate::varint::push_varint;

/// The records of the next chunk.
#[derive(Debug, Default)]
pub struct Group {
    /// The length of each record, as a varint.
    lens: Vec<u8>,
    values: Vec<u8>,
    num_records: u64,
}

impl Group {
    /// Appends a record.
    #[inline]
    pub fn push(&mut self, record: &[u8]) {
        push_varint(&mut self.lens, record.len() as u64);
        self.values.extend_from_slice(record);
        self.num_records += 1;
    }

    /// Appends all records of `other`.
    pub fn extend(&mut self, other: &Self) {
        self.lens.extend_from_slice(&other.lens);
        self.values.extend_from_slice(&other.values);
        self.num_records += other.num_records;
    }

    /// Removes the records but keeps the memory for the next ones.
    pub fn clear(&mut self) {
        self.lens.clear();
        self.values.clear();
        self.num_records = 0;
    }

    /// How many records.
    pub fn num_records(&self) -> u64 {
        self.num_records
    }

    /// The lengths of all records together.
    pub fn decoded_len(&self) -> u64 {
        self.values.len() as u64
    }

    /// All records back to back.
    pub fn values(&self) -> &[u8] {
        &self.values
    }

    /// The length of each record.
    pub fn record_lens(&self) -> impl Iterator<Item = usize> {
        let mut lens = Cursor::new(&self.lens);
        std::iter::from_fn(move || lens.varint64().ok().and_then(|len| usize::try_from(len).ok()))
    }
}

/// The data of a simple chunk of `group`, in two parts; `scratch` holds what is not in `group`.
///
/// # Errors
/// If the codec fails.
pub fn simple_data<'a>(
    group: &'a Group,
    compressor: &mut Compressor,
    scratch: &'a mut Vec<u8>,
) -> Result<[&'a [u8]; 2], FormatError> {
    scratch.clear();
    scratch.push(compressor.codec().code());
    if compressor.codec() == Codec::Uncompressed {
        push_varint(scratch, group.lens.len() as u64);
        scratch.extend_from_slice(&group.lens);
        return Ok([scratch, &group.values]);
    }
    append_with_len(compressor, &group.lens, scratch)?;
    compressor.append(&group.values, scratch)?;
    Ok([scratch, &[]])
}

/// Appends the length of the compressed block of `plain`, then the block.
///
/// # Errors
/// If the codec fails.
pub fn append_with_len(
    compressor: &mut Compressor,
    plain: &[u8],
    out: &mut Vec<u8>,
) -> Result<(), FormatError> {
    let begin = out.len();
    compressor.append(plain, out)?;
    let mut len = Vec::with_capacity(10);
    push_varint(&mut len, (out.len() - begin) as u64);
    out.splice(begin..begin, len);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data_of(codec: Codec, records: &[&[u8]]) -> Vec<u8> {
        let mut group = Group::default();
        for record in records {
            group.push(record);
        }
        let mut compressor = Compressor::new(codec).unwrap();
        simple_data(&group, &mut compressor, &mut Vec::new()).unwrap().concat()
    }

    #[test]
    fn chunks_of_hello_are_those_of_the_format_description() {
        assert_eq!(data_of(Codec::Uncompressed, &[b"hello"]), b"\x00\x01\x05hello");
        assert_eq!(
            data_of(Codec::Snappy, &[b"hello"]),
            b"\x73\x04\x01\x01\x00\x05\x05\x05\x10hello"
        );
        assert_eq!(
            data_of(Codec::Zstd { level: 3, window_log: 20 }, &[b"hello"]),
            b"\x7a\x0b\x01\x28\xb5\x2f\xfd\x20\x01\x09\x00\x00\x05\
              \x05\x28\xb5\x2f\xfd\x20\x05\x29\x00\x00hello"
        );
    }

    #[test]
    fn an_empty_record_has_a_stream() {
        assert!(data_of(Codec::Snappy, &[b""]).ends_with(b"\x00\x00"));
        let zstd = data_of(Codec::Zstd { level: 3, window_log: 20 }, &[b""]);
        assert!(zstd.ends_with(b"\x00\x28\xb5\x2f\xfd\x20\x00\x01\x00\x00"));
        let brotli = data_of(Codec::Brotli { level: 6, window_log: None }, &[b""]);
        assert!(brotli.len() > 5, "{brotli:02x?}");
    }

    #[test]
    fn lengths_round_trip_in_order() {
        let mut group = Group::default();
        for len in [0, 127, 128, 70_000, 1] {
            group.push(&vec![1; len]);
        }
        assert_eq!(group.record_lens().collect::<Vec<_>>(), [0, 127, 128, 70_000, 1]);
    }
}
