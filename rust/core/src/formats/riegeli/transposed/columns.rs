//! Splits records into tokens and columns, in the order in which a reader assembles them.
//!
//! A reader works backwards, from the last byte of the last record to the first byte of the
//! first. So records are split last to first, and the tokens of each are emitted in reverse.
//! What must not break: a record counts as a message only if serializing its fields again gives
//! the same bytes, so every varint must be the shortest.

use std::collections::HashMap;

use crate::formats::riegeli::FormatError;
use crate::varint::{push_varint, read_varint_of, varint_len};

/// The maximum depth of split submessages and groups; deeper ones are stored as strings.
const MAX_DEPTH: usize = 100;
/// With this many different fields in a chunk, further records are not split.
const MAX_FIELDS: usize = 1 << 20;
const NONE: u32 = u32::MAX;
const ROOT: u32 = 0;

/// The token for the start of a record that is a message.
const MESSAGE: u32 = 0;
/// The token for a record that is not a message.
const NON_PROTO: u32 = 1;

/// One step of a reader.
#[derive(Debug, Clone, Copy)]
pub struct Token {
    /// The tag of the state.
    pub tag: u32,
    /// For varints, the length of the value or the value itself.
    pub subtype: Option<u8>,
    /// The column that the step reads from.
    pub column: Option<u32>,
}

/// The kind of a column's values; columns of one kind are compressed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Varints.
    Varint,
    /// Numbers of four bytes.
    Fixed32,
    /// Numbers of eight bytes.
    Fixed64,
    /// Strings.
    Bytes,
    /// Whole records that are not messages.
    NonProto,
}

/// The values of one field, in a reader's order.
#[derive(Debug)]
pub struct Column {
    /// What kind of values.
    pub kind: Kind,
    /// The values, back to back.
    pub bytes: Vec<u8>,
}

/// The records of a chunk as tokens and columns.
#[derive(Debug)]
pub struct TransposedRecords {
    /// The different tokens.
    pub tokens: Vec<Token>,
    /// The sequence of tokens as indices into `tokens`, in a reader's order.
    pub trace: Vec<u32>,
    /// The columns, in no particular order.
    pub columns: Vec<Column>,
    /// The lengths of the records that are not messages, in a reader's order.
    pub non_proto_lens: Vec<u8>,
    nodes: Vec<Node>,
    by_path: HashMap<(u32, u32), u32>,
    fields: Vec<Field>,
    fragments: Vec<Fragment>,
}

/// A field by its path through the enclosing messages.
#[derive(Debug)]
struct Node {
    parent: u32,
    tag: u32,
    column: u32,
    /// By [`slot`] number.
    tokens: [u32; 14],
    /// The nodes that were last this one's first child and its next sibling.
    likely_child: u32,
    likely_sibling: u32,
}

/// The index of a node's token: for varints, the subtype; else one of these.
mod slot {
    pub(super) const WHOLE: usize = 0;
    pub(super) const SUBMESSAGE_END: usize = 1;
    pub(super) const SUBMESSAGE_START: usize = 2;
}

/// A field of a message; `start..end` is its value, a length prefix included.
#[derive(Debug, Clone, Copy)]
struct Field {
    tag: u32,
    start: usize,
    end: usize,
}

/// A token and the bytes of the record that go into its column.
#[derive(Debug, Clone, Copy)]
struct Fragment {
    token: u32,
    start: usize,
    end: usize,
}

impl Default for TransposedRecords {
    /// Without records.
    fn default() -> Self {
        let token = |tag| Token { tag, subtype: None, column: None };
        Self {
            tokens: vec![token(3), token(1)],
            trace: Vec::new(),
            columns: Vec::new(),
            non_proto_lens: Vec::new(),
            nodes: vec![Node::new(NONE, 0)],
            by_path: HashMap::new(),
            fields: Vec::new(),
            fragments: Vec::new(),
        }
    }
}

impl TransposedRecords {
    /// Cuts the record that comes before those already transposed.
    ///
    /// # Errors
    /// If the record is not a message and has 4 GiB or more.
    pub fn push_front(&mut self, record: &[u8]) -> Result<(), FormatError> {
        self.fields.clear();
        if self.nodes.len() >= MAX_FIELDS || !parse(record, 0, record.len(), &mut self.fields) {
            return self.push_non_proto(record);
        }
        self.split_message(record, 0, ROOT, 0);
        for at in (0..self.fragments.len()).rev() {
            let fragment = self.fragments[at];
            self.trace.push(fragment.token);
            self.store(fragment, record);
        }
        self.fragments.clear();
        self.trace.push(MESSAGE);
        Ok(())
    }

    fn push_non_proto(&mut self, record: &[u8]) -> Result<(), FormatError> {
        if u32::try_from(record.len()).is_err() {
            return Err(FormatError::fixed(
                "a transposed chunk cannot hold a record of 4 GiB or more",
            ));
        }
        let column = match self.tokens[NON_PROTO as usize].column {
            Some(column) => column,
            None => self.add_column(Kind::NonProto),
        };
        self.tokens[NON_PROTO as usize].column = Some(column);
        self.columns[column as usize].bytes.extend_from_slice(record);
        push_varint(&mut self.non_proto_lens, record.len() as u64);
        self.trace.push(NON_PROTO);
        Ok(())
    }

    /// Converts the fields from number `first` on, those of one message, to fragments.
    fn split_message(&mut self, record: &[u8], first: usize, parent: u32, depth: usize) {
        let (last, mut groups, mut before) = (self.fields.len(), 0, None);
        for at in first..last {
            let Field { tag, start, end } = self.fields[at];
            let node = self.node(parent, before, tag);
            before = Some(node);
            let whole = match tag & 7 {
                0 => varint_slot(&record[start..end]),
                2 if depth + groups < MAX_DEPTH
                    && self.split_submessage(record, node, start, end, depth + groups + 1) =>
                {
                    continue;
                }
                3 => {
                    groups += 1;
                    slot::WHOLE
                }
                4 => {
                    groups -= 1;
                    slot::WHOLE
                }
                _ => slot::WHOLE,
            };
            let token = self.token(node, whole);
            self.fragments.push(Fragment { token, start, end });
        }
    }

    /// Splits a length-delimited value if it is a non-empty message; returns whether it did.
    fn split_submessage(
        &mut self,
        record: &[u8],
        node: u32,
        start: usize,
        end: usize,
        depth: usize,
    ) -> bool {
        let mut inner = start;
        let first = self.fields.len();
        let opened = canonical(&record[..end], &mut inner, 32).is_some()
            && inner < end
            && parse(record, inner, end, &mut self.fields);
        if opened {
            let token = self.token(node, slot::SUBMESSAGE_START);
            self.fragments.push(Fragment { token, start: 0, end: 0 });
            self.split_message(record, first, node, depth);
            let token = self.token(node, slot::SUBMESSAGE_END);
            self.fragments.push(Fragment { token, start: 0, end: 0 });
        }
        self.fields.truncate(first);
        opened
    }

    /// The node of a field of `parent` that follows the field of node `before`.
    fn node(&mut self, parent: u32, before: Option<u32>, tag: u32) -> u32 {
        let likely = match before {
            None => self.nodes[parent as usize].likely_child,
            Some(before) => self.nodes[before as usize].likely_sibling,
        };
        if let Some(node) = self.nodes.get(likely as usize)
            && node.parent == parent
            && node.tag == tag
        {
            return likely;
        }
        let new = number(self.nodes.len());
        let node = *self.by_path.entry((parent, tag)).or_insert(new);
        if node == new {
            self.nodes.push(Node::new(parent, tag));
        }
        match before {
            None => self.nodes[parent as usize].likely_child = node,
            Some(before) => self.nodes[before as usize].likely_sibling = node,
        }
        node
    }

    fn token(&mut self, node: u32, slot: usize) -> u32 {
        let known = self.nodes[node as usize].tokens[slot];
        if known != NONE {
            return known;
        }
        let tag = self.nodes[node as usize].tag;
        let (tag, subtype, kind) = match tag & 7 {
            0 => (tag, u8::try_from(slot).ok(), (slot < 10).then_some(Kind::Varint)),
            1 => (tag, None, Some(Kind::Fixed64)),
            5 => (tag, None, Some(Kind::Fixed32)),
            2 if slot == slot::SUBMESSAGE_END => (tag + 4, None, None),
            2 if slot == slot::SUBMESSAGE_START => (2, None, None),
            2 => (tag, None, Some(Kind::Bytes)),
            _ => (tag, None, None),
        };
        let column = kind.map(|kind| self.column_of(node, kind));
        let token = number(self.tokens.len());
        self.tokens.push(Token { tag, subtype, column });
        self.nodes[node as usize].tokens[slot] = token;
        token
    }

    fn column_of(&mut self, node: u32, kind: Kind) -> u32 {
        let known = self.nodes[node as usize].column;
        if known != NONE {
            return known;
        }
        let column = self.add_column(kind);
        self.nodes[node as usize].column = column;
        column
    }

    fn add_column(&mut self, kind: Kind) -> u32 {
        self.columns.push(Column { kind, bytes: Vec::new() });
        number(self.columns.len() - 1)
    }

    fn store(&mut self, fragment: Fragment, record: &[u8]) {
        let Some(column) = self.tokens[fragment.token as usize].column else { return };
        let Column { kind, bytes } = &mut self.columns[column as usize];
        let value = &record[fragment.start..fragment.end];
        if *kind == Kind::Varint {
            bytes.extend(value.iter().map(|byte| byte & 0x7f));
        } else {
            bytes.extend_from_slice(value);
        }
    }
}

impl Node {
    fn new(parent: u32, tag: u32) -> Self {
        let tokens = [NONE; 14];
        Self { parent, tag, column: NONE, tokens, likely_child: NONE, likely_sibling: NONE }
    }
}

/// Values up to 3 are stored in the state; of others, the state has the length.
fn varint_slot(value: &[u8]) -> usize {
    match value {
        &[byte @ 0..=3] => 10 + usize::from(byte),
        _ => value.len() - 1,
    }
}

/// Appends the fields of the message in `record[pos..end]`; returns false if it is not a message.
fn parse(record: &[u8], mut pos: usize, end: usize, fields: &mut Vec<Field>) -> bool {
    let bytes = &record[..end];
    let mut groups = Vec::new();
    while pos < end {
        let Some((tag, start)) = parse_field(bytes, &mut pos) else { return false };
        match tag & 7 {
            3 => groups.push(tag >> 3),
            4 if groups.pop() != Some(tag >> 3) => return false,
            _ => {}
        }
        fields.push(Field { tag, start, end: pos });
    }
    groups.is_empty()
}

/// The tag of the field at `pos` and the start of its value; moves `pos` past the value.
fn parse_field(bytes: &[u8], pos: &mut usize) -> Option<(u32, usize)> {
    let tag = u32::try_from(canonical(bytes, pos, 32)?).ok().filter(|&tag| tag >= 8)?;
    let start = *pos;
    let len = match tag & 7 {
        0 => canonical(bytes, pos, 64).map(|_| 0)?,
        1 => 8,
        2 => usize::try_from(canonical(bytes, pos, 32)?).ok()?,
        3 | 4 => 0,
        5 => 4,
        _ => return None,
    };
    *pos = pos.checked_add(len).filter(|&pos| pos <= bytes.len())?;
    Some((tag, start))
}

/// A varint of at most `bits` bits, in its shortest encoding.
#[inline]
fn canonical(bytes: &[u8], pos: &mut usize, bits: u32) -> Option<u64> {
    let (value, len) = read_varint_of(bits, bytes.get(*pos..)?).ok()?;
    *pos += len;
    (len == varint_len(value)).then_some(value)
}

/// A number of nodes, tokens or columns: each has at least one byte of a chunk.
fn number(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(NONE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_bytes_that_serialize_again_alike_are_a_message() {
        let is_message = |record: &[u8]| parse(record, 0, record.len(), &mut Vec::new());
        for message in [
            &b""[..],
            b"\x08\x00",
            b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
            b"\x0b\x0c",
            b"\x0a\x00",
            b"\x0d\x01\x02\x03\x04",
            b"\xfa\xff\xff\xff\x0f\x01Z",
        ] {
            assert!(is_message(message), "{message:02x?}");
        }
        for other in [
            &b"\x08\x80\x00"[..],
            b"\x88\x00\x05",
            b"\x0a\x81\x00A",
            b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
            b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
            b"\xfa\xff\xff\xff\x1f\x01Z",
            b"\x0b",
            b"\x0c",
            b"\x0b\x14",
            b"\x0a\x02\x08",
            b"\x00\x01",
            b"\x0e",
            b"\x0f",
            b"\x09\x01",
        ] {
            assert!(!is_message(other), "{other:02x?}");
        }
    }

    #[test]
    fn each_path_has_its_own_column() {
        let mut transposed = TransposedRecords::default();
        // Field 1 = 300, field 3 = { field 1 = 500 }, twice.
        for _ in 0..2 {
            transposed.push_front(b"\x08\xac\x02\x1a\x03\x08\xf4\x03").unwrap();
        }
        let columns: Vec<&[u8]> =
            transposed.columns.iter().map(|column| &column.bytes[..]).collect();
        assert_eq!(columns, [b"\x2c\x02\x2c\x02", b"\x74\x03\x74\x03"]);
        let tags: Vec<u32> = transposed.trace[..5]
            .iter()
            .map(|&token| transposed.tokens[token as usize].tag)
            .collect();
        assert_eq!(tags, [0x1e, 8, 2, 8, 3], "the end of the record comes first");
    }
}
