//! Encodes a transposed chunk: a header, columns in buckets, transitions.

use super::columns::{Column, Kind, TransposedRecords};
use super::state_machine::{StateMachine, machine};
use crate::formats::riegeli::FormatError;
use crate::formats::riegeli::compress::{Codec, Compressor};
use crate::formats::riegeli::encode::{Group, append_with_len};
use crate::varint::push_varint;

/// The data of a transposed chunk of `group`, with buckets of about `bucket_len` bytes.
///
/// # Errors
/// If the codec fails, or a record that is not a message has 4 GiB or more.
pub fn transposed_data(
    group: &Group,
    bucket_len: u64,
    compressor: &mut Compressor,
    data: &mut Vec<u8>,
) -> Result<(), FormatError> {
    let mut transposed = transpose_group(group)?;
    let machine = machine(std::mem::take(&mut transposed.trace), transposed.tokens.len());
    let buckets = Buckets::fill(&mut transposed, bucket_len, compressor)?;
    let header = header(&transposed, &machine, &buckets);
    data.clear();
    data.push(compressor.codec().code());
    append_with_len(compressor, &header, data)?;
    data.extend_from_slice(&buckets.bytes);
    compressor.append(&machine.transitions, data)
}

fn transpose_group(group: &Group) -> Result<TransposedRecords, FormatError> {
    let lens: Vec<usize> = group.record_lens().collect();
    let mut transposed = TransposedRecords::default();
    let mut rest = group.values();
    for len in lens.into_iter().rev() {
        let (before, record) = rest.split_at(rest.len() - len);
        transposed.push_front(record)?;
        rest = before;
    }
    Ok(transposed)
}

/// The columns, packed and compressed.
#[derive(Default)]
struct Buckets {
    /// All buckets as stored.
    bytes: Vec<u8>,
    /// The length of each bucket as stored.
    stored_lens: Vec<u64>,
    /// The length of each column, in the order of the buckets.
    column_lens: Vec<u64>,
    /// The index of each column in this order.
    index_of: Vec<u64>,
}

impl Buckets {
    /// Packs columns of one kind into buckets, short ones first, until a bucket is full.
    fn fill(
        transposed: &mut TransposedRecords,
        bucket_len: u64,
        compressor: &mut Compressor,
    ) -> Result<Self, FormatError> {
        let bucket_len =
            if compressor.codec() == Codec::Uncompressed { u64::MAX } else { bucket_len };
        let mut order: Vec<usize> = (0..transposed.columns.len()).collect();
        order.sort_by_key(|&at| (transposed.columns[at].kind, transposed.columns[at].bytes.len()));
        let mut buckets = Self { index_of: vec![0; order.len()], ..Self::default() };
        let mut bucket: Vec<u8> = Vec::new();
        let mut kind = Kind::Varint;
        for (index, at) in (0..).zip(order) {
            let Column { kind: next, bytes } = &mut transposed.columns[at];
            if *next != kind || bucket.len() as u64 >= bucket_len {
                buckets.flush(&mut bucket, compressor)?;
            }
            kind = *next;
            buckets.index_of[at] = index;
            buckets.column_lens.push(bytes.len() as u64);
            if bucket.is_empty() {
                bucket = std::mem::take(bytes);
            } else {
                bucket.append(bytes);
            }
        }
        buckets.flush(&mut bucket, compressor)?;
        if !transposed.non_proto_lens.is_empty() {
            buckets.column_lens.push(transposed.non_proto_lens.len() as u64);
            buckets.flush(&mut transposed.non_proto_lens, compressor)?;
        }
        Ok(buckets)
    }

    fn flush(
        &mut self,
        bucket: &mut Vec<u8>,
        compressor: &mut Compressor,
    ) -> Result<(), FormatError> {
        if bucket.is_empty() {
            return Ok(());
        }
        let begin = self.bytes.len();
        compressor.append(bucket, &mut self.bytes)?;
        self.stored_lens.push((self.bytes.len() - begin) as u64);
        *bucket = Vec::new();
        Ok(())
    }
}

fn header(transposed: &TransposedRecords, machine: &StateMachine, buckets: &Buckets) -> Vec<u8> {
    let mut out = Vec::new();
    push_varint(&mut out, buckets.stored_lens.len() as u64);
    push_varint(&mut out, buckets.column_lens.len() as u64);
    push_all(&mut out, buckets.stored_lens.iter().copied());
    push_all(&mut out, buckets.column_lens.iter().copied());

    let tokens = || {
        machine
            .states
            .iter()
            .map(|state| state.token.map(|token| transposed.tokens[token as usize]))
    };
    push_varint(&mut out, machine.states.len() as u64);
    push_all(&mut out, tokens().map(|token| token.map_or(0, |token| u64::from(token.tag))));
    push_all(&mut out, machine.states.iter().map(|state| u64::from(state.next)));
    out.extend(tokens().flatten().filter_map(|token| token.subtype));
    let columns = tokens().flatten().filter_map(|token| token.column);
    push_all(&mut out, columns.map(|column| buckets.index_of[column as usize]));
    push_varint(&mut out, u64::from(machine.first));
    out
}

fn push_all(out: &mut Vec<u8>, values: impl Iterator<Item = u64>) {
    values.for_each(|value| push_varint(out, value));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::formats::riegeli::cursor::Cursor;

    fn numbers(cursor: &mut Cursor<'_>, len: u64) -> Vec<usize> {
        (0..len).map(|_| usize::try_from(cursor.varint64().unwrap()).unwrap()).collect()
    }

    /// Decodes an uncompressed chunk byte by byte, as the format describes it.
    /// Everything is stored in the reader's order, back to front.
    fn reference_decode(data: &[u8]) -> Vec<Vec<u8>> {
        let mut chunk = Cursor::new(data);
        assert_eq!(chunk.byte().unwrap(), 0);
        let header_len = chunk.varint64().unwrap();
        let mut header = Cursor::new(chunk.take(header_len).unwrap());
        let (num_buckets, num_columns) = (header.varint64().unwrap(), header.varint64().unwrap());
        let bucket_lens = numbers(&mut header, num_buckets);
        let column_lens = numbers(&mut header, num_columns);
        assert_eq!(bucket_lens.iter().sum::<usize>(), column_lens.iter().sum::<usize>());
        let num_states = header.varint64().unwrap();
        let tags = numbers(&mut header, num_states);
        let nexts = numbers(&mut header, num_states);
        let is_varint = |tag: usize| tag >= 8 && tag.is_multiple_of(8);
        let mut subtype_of = vec![0; tags.len()];
        for at in (0..tags.len()).filter(|&at| is_varint(tags[at])) {
            subtype_of[at] = usize::from(header.byte().unwrap());
        }
        let mut column_of = vec![0; tags.len()];
        for at in 0..tags.len() {
            let wire = if tags[at] >= 8 { tags[at] % 8 } else { 8 };
            if tags[at] == 1 || matches!(wire, 1 | 2 | 5) || (wire == 0 && subtype_of[at] < 10) {
                column_of[at] = usize::try_from(header.varint64().unwrap()).unwrap();
            }
        }
        let mut state = usize::try_from(header.varint64().unwrap()).unwrap();
        assert!(header.is_empty());
        let mut columns: Vec<Cursor<'_>> =
            column_lens.iter().map(|&len| Cursor::new(chunk.take(len as u64).unwrap())).collect();

        // Bytes in reverse, so that prepending is a push.
        let mut out: Vec<u8> = Vec::new();
        let prepend = |out: &mut Vec<u8>, bytes: &[u8]| out.extend(bytes.iter().rev());
        let (mut records, mut open, mut repeat) = (Vec::new(), Vec::new(), 0);
        loop {
            let tag = tags[state];
            let mut key = Vec::new();
            push_varint(&mut key, tag as u64);
            match (tag, tag % 8) {
                (0 | 3, _) => {}
                (1, _) => {
                    let len = columns.last_mut().unwrap().varint64().unwrap();
                    prepend(&mut out, columns[column_of[state]].take(len).unwrap());
                }
                (2, _) => {
                    let (key, size): (Vec<u8>, usize) = open.pop().unwrap();
                    let mut len = Vec::new();
                    push_varint(&mut len, (out.len() - size) as u64);
                    prepend(&mut out, &len);
                    prepend(&mut out, &key);
                }
                (_, 0) if subtype_of[state] >= 10 => {
                    prepend(&mut out, &[u8::try_from(subtype_of[state] - 10).unwrap()]);
                    prepend(&mut out, &key);
                }
                (_, 0) => {
                    let len = subtype_of[state] + 1;
                    let mut value = columns[column_of[state]].take(len as u64).unwrap().to_vec();
                    value[..len - 1].iter_mut().for_each(|byte| *byte |= 0x80);
                    prepend(&mut out, &value);
                    prepend(&mut out, &key);
                }
                (_, 1 | 5) => {
                    let len = if tag % 8 == 1 { 8 } else { 4 };
                    prepend(&mut out, columns[column_of[state]].take(len).unwrap());
                    prepend(&mut out, &key);
                }
                (_, 2) => {
                    let len = columns[column_of[state]].varint64().unwrap();
                    prepend(&mut out, columns[column_of[state]].take(len).unwrap());
                    push_varint(&mut key, len);
                    prepend(&mut out, &key);
                }
                (_, 6) => {
                    let mut key = Vec::new();
                    push_varint(&mut key, tag as u64 - 4);
                    open.push((key, out.len()));
                }
                _ => prepend(&mut out, &key),
            }
            if matches!(tag, 1 | 3) {
                assert!(open.is_empty());
                records.insert(0, out.drain(..).rev().collect());
            }
            if nexts[state] >= tags.len() {
                state = nexts[state] - tags.len();
            } else if repeat > 0 {
                repeat -= 1;
                state = nexts[state];
            } else if let Ok(byte) = chunk.byte() {
                state = nexts[state] + usize::from(byte >> 2);
                repeat = byte & 3;
            } else {
                break;
            }
        }
        assert!(out.is_empty() && columns.iter().all(Cursor::is_empty));
        records
    }

    fn check(records: &[Vec<u8>]) -> Vec<u8> {
        let mut group = Group::default();
        for record in records {
            group.push(record);
        }
        let mut compressor = Compressor::new(Codec::Uncompressed).unwrap();
        let mut data = Vec::new();
        transposed_data(&group, 256, &mut compressor, &mut data).unwrap();
        assert_eq!(reference_decode(&data), records);
        data
    }

    #[test]
    fn messages_and_other_bytes_share_a_chunk() {
        let records = [
            &b"\x08\xac\x02\x1a\x02\x08\x05"[..],
            b"\x08\x01\x12\x02\xff\x69",
            b"\xff\xfe",
            b"",
            b"\x0b\x08\x05\x0c\x09\x01\x02\x03\x04\x05\x06\x07\x08",
        ];
        check(&records.map(<[u8]>::to_vec));
    }

    #[test]
    fn submessages_deeper_than_the_limit_are_strings() {
        let mut record = b"\x08\x07".to_vec();
        for _ in 0..300 {
            let mut outer = vec![0x1a];
            push_varint(&mut outer, record.len() as u64);
            outer.extend_from_slice(&record);
            record = outer;
        }
        check(&[record]);
    }

    #[test]
    fn equal_messages_take_little_more_than_their_values() {
        let record = b"\x08\xac\x02\x1a\x03\x08\x85\x01\x25abcd".to_vec();
        let len = check(&vec![record; 1000]).len();
        assert!(len < 8000 + 350, "1000 records with 8 bytes of values take {len}");
    }

    /// Random fields of every wire type, sometimes invalid.
    fn message_like() -> impl Strategy<Value = Vec<u8>> {
        let bytes = prop::collection::vec(any::<u8>(), 0..12).boxed();
        bytes.prop_recursive(4, 64, 6, |inner| {
            let field = (1..20_u64, 0..6_u64, any::<u64>(), 0..64_u32, inner).prop_map(
                |(number, wire, value, shift, inner)| {
                    let mut out = Vec::new();
                    push_varint(&mut out, number << 3 | wire);
                    match wire {
                        0 => push_varint(&mut out, value >> shift),
                        1 => out.extend_from_slice(&value.to_le_bytes()),
                        5 => out.extend_from_slice(&value.to_le_bytes()[..4]),
                        2 => {
                            push_varint(&mut out, inner.len() as u64);
                            out.extend_from_slice(&inner);
                        }
                        3 => push_varint(&mut out, number << 3 | 4),
                        _ => {}
                    }
                    out
                },
            );
            prop::collection::vec(field, 0..6).prop_map(|fields| fields.concat())
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]
        #[test]
        fn any_records_match_reference_decoding(records in prop::collection::vec(message_like(), 1..40)) {
            check(&records);
        }
    }
}
