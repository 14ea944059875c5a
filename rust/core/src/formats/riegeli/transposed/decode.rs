//! Assembles records from columns, with the state machine that each transposed chunk contains.
//!
//! The machine works backwards: the last byte of the last record is first, so the output is filled
//! from its end. What must not break: everything read from the header is checked to be in range
//! before the machine starts, cycles of states that consume nothing are refused, and the output
//! never exceeds the stated decoded length.

use super::super::super::record_limit::{check_decoded_len, max_decoded_len};
use super::super::FormatError;
use super::super::chunk::ChunkHeader;
use super::super::cursor::Cursor;
use super::super::decompress::{Decompressor, codec, reserve};
use crate::varint::{MAX_VARINT_LEN, encode_varint};

/// The memory for a chunk's layout as a multiple of its length: one byte can be the length of a
/// bucket or buffer, two can be a state.
const LAYOUT_FACTOR: u64 = 32;
/// The maximum number of transitions per byte or start of a record: one, and more through no-op
/// states where an encoder has more states than one transition can reach.
const TRANSITIONS_PER_STEP: u64 = 16;
/// The maximum length of the varint that holds the length of a record that is not a message.
const MAX_LEN_LEN: u64 = 5;

/// The maximum depth of nested submessages: far above the 100 of an encoder.
const MAX_DEPTH: usize = 1 << 20;

const NOOP: u32 = 0;
const NON_PROTO: u32 = 1;
const SUBMESSAGE_START: u32 = 2;
const MESSAGE_START: u32 = 3;
/// Varint subtypes from here on stand for the value `subtype - FIRST_INLINE` itself.
const FIRST_INLINE: u8 = 10;
const LAST_INLINE: u8 = 137;

/// Decodes the data of a transposed chunk. Writes the end of each record to `ends` and the records
/// back to back to `values`.
///
/// The chunk's header bounds the length of every block, so that none allocates what it states
/// itself: each byte in a bucket is one of a record, except for the lengths of records that are
/// not messages.
///
/// # Errors
/// If the data are not what the format and the chunk's header demand.
pub fn decode<'a>(
    header: &ChunkHeader,
    data: &[u8],
    decompressor: &mut Decompressor,
    ends: &mut Vec<usize>,
    values: &'a mut Vec<u8>,
) -> Result<&'a [u8], FormatError> {
    let stored_len = data.len() as u64;
    check_decoded_len(header.decoded_len, stored_len)?;
    let mut cursor = Cursor::new(data);
    let codec = cursor.byte()?;
    let layout_len = cursor.varint64()?;
    let mut layout_bytes = Vec::new();
    let max_len = max_decoded_len(stored_len) / LAYOUT_FACTOR;
    let layout =
        decompressor.decompress(codec, cursor.take(layout_len)?, max_len, &mut layout_bytes)?;
    let mut layout = Cursor::new(layout);

    let num_buckets = layout.varint32()?;
    let num_buffers = layout.varint32()?;
    let lens_len = header.num_records.saturating_mul(MAX_LEN_LEN);
    let max_len = header.decoded_len.saturating_add(lens_len);
    let buckets =
        read_buckets(codec, num_buckets, max_len, &mut layout, &mut cursor, decompressor)?;
    let mut buffers = read_buffers(&buckets, num_buffers, &mut layout)?;
    let machine = DecoderStateMachine::read(&mut layout, buffers.len())?;
    let mut transition_bytes = Vec::new();
    let steps = header.decoded_len.saturating_add(header.num_records);
    let max_len = steps.saturating_mul(TRANSITIONS_PER_STEP).min(max_decoded_len(stored_len));
    let transitions =
        decompressor.decompress(codec, cursor.rest(), max_len, &mut transition_bytes)?;
    machine.run(header, &mut buffers, transitions, ends, values)?;
    Ok(values)
}

fn read_buckets(
    codec: u8,
    num_buckets: u32,
    max_len: u64,
    layout: &mut Cursor<'_>,
    stored: &mut Cursor<'_>,
    decompressor: &mut Decompressor,
) -> Result<Vec<Vec<u8>>, FormatError> {
    // The length of each bucket has at least one byte in the layout.
    if num_buckets as usize > layout.rest().len() {
        return Err(FormatError::new(format!("lengths of {num_buckets} buckets are missing")));
    }
    let mut buckets = Vec::with_capacity(num_buckets as usize);
    let mut left = max_len;
    for _ in 0..num_buckets {
        let block = stored.take(layout.varint64()?)?;
        let mut decoded = Vec::new();
        if codec == codec::NONE {
            decoded.extend_from_slice(block);
        } else {
            decompressor.decompress(codec, block, left, &mut decoded)?;
        }
        left = left.saturating_sub(decoded.len() as u64);
        buckets.push(decoded);
    }
    Ok(buckets)
}

/// Splits the buckets into buffers, each of which is inside one bucket.
fn read_buffers<'a>(
    buckets: &'a [Vec<u8>],
    num_buffers: u32,
    layout: &mut Cursor<'_>,
) -> Result<Vec<Cursor<'a>>, FormatError> {
    if num_buffers as usize > layout.rest().len() {
        return Err(FormatError::new(format!("lengths of {num_buffers} buffers are missing")));
    }
    let mut buffers = Vec::with_capacity(num_buffers as usize);
    let mut unused = buckets.iter().map(|bucket| Cursor::new(bucket));
    let mut bucket = unused.next();
    for _ in 0..num_buffers {
        let current =
            bucket.as_mut().ok_or(FormatError::fixed("more buffers than fit the buckets"))?;
        buffers.push(Cursor::new(current.take(layout.varint64()?)?));
        while bucket.is_some_and(|bucket| bucket.is_empty()) {
            match unused.next() {
                Some(next) => bucket = Some(next),
                None => break,
            }
        }
    }
    if bucket.into_iter().chain(unused).all(|bucket| bucket.is_empty()) {
        Ok(buffers)
    } else {
        Err(FormatError::fixed("bucket has bytes outside its buffers"))
    }
}

/// The effect of a state on the output.
#[derive(Debug, Clone, Copy)]
enum Action {
    Noop,
    NonProto,
    SubmessageStart,
    SubmessageEnd,
    MessageStart,
    /// The tag and this value.
    Inline(u8),
    /// The tag and a varint of this many bytes.
    Varint(u8),
    /// The tag and this many bytes.
    Fixed(u8),
    /// The tag, a length and that many bytes.
    String,
    /// The tag alone.
    Group,
}

#[derive(Debug, Clone, Copy)]
struct State {
    action: Action,
    /// The tag that is written, as a varint, and its length.
    tag: [u8; 5],
    tag_len: u8,
    /// Whether the next state follows without reading a transition.
    implicit: bool,
    buffer: u32,
    next: u32,
}

#[derive(Debug)]
struct DecoderStateMachine {
    states: Vec<State>,
    first: u32,
    has_non_proto: bool,
}

impl DecoderStateMachine {
    /// Reads the states; afterwards every number in them is in range.
    fn read(layout: &mut Cursor<'_>, num_buffers: usize) -> Result<Self, FormatError> {
        let num_states = layout.varint32()?;
        // The tag and the successor of each state have at least one byte.
        if num_states as usize > layout.rest().len() / 2 {
            return Err(FormatError::new(format!("tags of {num_states} states are missing")));
        }
        let list = |layout: &mut Cursor<'_>| {
            (0..num_states).map(|_| layout.varint32()).collect::<Result<Vec<_>, _>>()
        };
        let tags = list(layout)?;
        let nexts = list(layout)?;
        let num_varints = tags.iter().filter(|&&tag| is_varint(tag)).count();
        let mut subtypes = layout.take(num_varints as u64)?.iter();
        let mut states = Vec::with_capacity(tags.len());
        for (&tag, &next) in tags.iter().zip(&nexts) {
            let subtype = if is_varint(tag) { subtypes.next().copied().unwrap_or(0) } else { 0 };
            states.push(State::read(tag, subtype, next, num_states, num_buffers, layout)?);
        }
        let first = layout.varint32()?;
        if first >= num_states {
            return Err(FormatError::new(format!(
                "first state {first} is out of range, there are {num_states} states"
            )));
        }
        if !layout.is_empty() {
            return Err(FormatError::fixed("data left after the transposed header"));
        }
        refuse_cycles(&states)?;
        skip_noops(&mut states);
        Ok(Self { states, first, has_non_proto: tags.contains(&NON_PROTO) })
    }

    fn run(
        &self,
        header: &ChunkHeader,
        buffers: &mut [Cursor<'_>],
        transitions: &[u8],
        ends: &mut Vec<usize>,
        values: &mut Vec<u8>,
    ) -> Result<(), FormatError> {
        // Lengths of non-proto records are in the last buffer, which a state may also name.
        if self.has_non_proto && buffers.is_empty() {
            return Err(FormatError::fixed("no buffer for record lengths"));
        }
        let mut output = Output::new(header, ends, values);
        let mut transitions = transitions.iter();
        let mut state = self.first as usize;
        let mut repeat = 0;
        loop {
            let current = &self.states[state];
            output.perform(current, buffers)?;
            if current.implicit {
                state = current.next as usize;
            } else if repeat > 0 {
                repeat -= 1;
                state = current.next as usize;
            } else if let Some(&step) = transitions.next() {
                state = current.next as usize + usize::from(step >> 2);
                repeat = step & 3;
                if state >= self.states.len() {
                    return Err(FormatError::new(format!(
                        "transition to state {state} is out of range, there are {} states",
                        self.states.len()
                    )));
                }
            } else {
                return output.finish();
            }
        }
    }
}

fn is_varint(tag: u32) -> bool {
    tag >= 8 && tag.is_multiple_of(8)
}

impl State {
    fn read(
        tag: u32,
        subtype: u8,
        next: u32,
        num_states: u32,
        num_buffers: usize,
        layout: &mut Cursor<'_>,
    ) -> Result<Self, FormatError> {
        let action = action_of(tag, subtype)?;
        let has_buffer = matches!(
            action,
            Action::NonProto | Action::Varint(_) | Action::Fixed(_) | Action::String
        );
        let buffer = if has_buffer { layout.varint32()? } else { 0 };
        if has_buffer && buffer as usize >= num_buffers {
            return Err(FormatError::new(format!(
                "buffer {buffer} is out of range, there are {num_buffers} buffers"
            )));
        }
        let implicit = next >= num_states;
        let target = if implicit { next - num_states } else { next };
        if target >= num_states {
            return Err(FormatError::new(format!(
                "next state {next} is out of range, there are {num_states} states"
            )));
        }
        // The end of a submessage has wire type 6 instead of 2.
        let written = if matches!(action, Action::SubmessageEnd) { tag - 4 } else { tag };
        let (bytes, tag_len) = encode_varint(u64::from(written));
        let mut tag = [0; 5];
        tag.copy_from_slice(&bytes[..5]);
        Ok(Self { action, tag, tag_len, implicit, buffer, next: target })
    }

    fn tag(&self) -> &[u8] {
        &self.tag[..usize::from(self.tag_len)]
    }
}

fn action_of(tag: u32, subtype: u8) -> Result<Action, FormatError> {
    Ok(match tag {
        NOOP => Action::Noop,
        NON_PROTO => Action::NonProto,
        SUBMESSAGE_START => Action::SubmessageStart,
        MESSAGE_START => Action::MessageStart,
        4..8 => return Err(FormatError::new(format!("invalid tag {tag}"))),
        _ => match tag & 7 {
            0 if subtype > LAST_INLINE => {
                return Err(FormatError::new(format!("invalid varint subtype {subtype}")));
            }
            0 if subtype >= FIRST_INLINE => Action::Inline(subtype - FIRST_INLINE),
            0 => Action::Varint(subtype + 1),
            1 => Action::Fixed(8),
            2 => Action::String,
            3 | 4 => Action::Group,
            5 => Action::Fixed(4),
            6 => Action::SubmessageEnd,
            _ => return Err(FormatError::new(format!("invalid tag {tag}"))),
        },
    })
}

/// Refuses cycles of states that follow each other without reading a transition.
fn refuse_cycles(states: &[State]) -> Result<(), FormatError> {
    // 0: not visited; else the walk that visited it first. A walk that returns to itself is a cycle.
    let mut visited_by = vec![0_usize; states.len()];
    for begin in 0..states.len() {
        let mut at = begin;
        while states[at].implicit && visited_by[at] == 0 {
            visited_by[at] = begin + 1;
            at = states[at].next as usize;
        }
        if states[at].implicit && visited_by[at] == begin + 1 {
            return Err(FormatError::fixed("states form an endless cycle"));
        }
    }
    Ok(())
}

/// Makes implicit successors skip no-ops, so that the work for a chunk is bounded by its
/// transitions and its output. Requires states without cycles.
fn skip_noops(states: &mut [State]) {
    for begin in 0..states.len() {
        if !states[begin].implicit {
            continue;
        }
        let skipped_to = |at: usize| {
            let state = &states[at];
            (state.implicit && matches!(state.action, Action::Noop)).then_some(state.next)
        };
        let mut target = states[begin].next;
        while let Some(next) = skipped_to(target as usize) {
            target = next;
        }
        // Update every state on the path, which keeps this linear.
        let mut at = begin;
        while states[at].implicit && states[at].next != target {
            at = std::mem::replace(&mut states[at].next, target) as usize;
        }
    }
}

/// The output, filled from its end.
struct Output<'a> {
    /// Bytes in reverse order, until `finish` reverses them.
    reversed: &'a mut Vec<u8>,
    ends: &'a mut Vec<usize>,
    /// Open submessages: the tag of each and the length of the output at its end.
    open: Vec<([u8; 5], u8, usize)>,
    num_records: u64,
    decoded_len: u64,
}

impl<'a> Output<'a> {
    fn new(header: &ChunkHeader, ends: &'a mut Vec<usize>, values: &'a mut Vec<u8>) -> Self {
        ends.clear();
        values.clear();
        Self {
            reversed: values,
            ends,
            open: Vec::new(),
            num_records: header.num_records,
            decoded_len: header.decoded_len,
        }
    }

    fn perform(&mut self, state: &State, buffers: &mut [Cursor<'_>]) -> Result<(), FormatError> {
        match state.action {
            Action::Noop => Ok(()),
            Action::MessageStart => self.finish_record(),
            Action::NonProto => {
                let last = buffers.len() - 1;
                let len = buffers[last].varint32()?;
                let bytes = buffers[state.buffer as usize].take(u64::from(len))?;
                self.prepend(bytes)?;
                self.finish_record()
            }
            Action::SubmessageEnd => {
                // States can repeat this without input or output, so it needs a limit of its own.
                if self.open.len() == MAX_DEPTH {
                    return Err(FormatError::fixed("too many nested submessages"));
                }
                self.open.push((state.tag, state.tag_len, self.reversed.len()));
                Ok(())
            }
            Action::SubmessageStart => {
                let (tag, tag_len, before) =
                    self.open.pop().ok_or(FormatError::fixed("submessage start without an end"))?;
                let (len, len_len) = encode_varint((self.reversed.len() - before) as u64);
                self.prepend(&len[..usize::from(len_len)])?;
                self.prepend(&tag[..usize::from(tag_len)])
            }
            Action::Inline(value) => {
                self.prepend(&[value])?;
                self.prepend(state.tag())
            }
            Action::Varint(len) => {
                let stored = buffers[state.buffer as usize].take(u64::from(len))?;
                let mut bytes = [0; MAX_VARINT_LEN];
                let bytes = &mut bytes[..stored.len()];
                bytes.copy_from_slice(stored);
                let last = bytes.len() - 1;
                bytes[..last].iter_mut().for_each(|byte| *byte |= 0x80);
                self.prepend(bytes)?;
                self.prepend(state.tag())
            }
            Action::Fixed(len) => {
                let bytes = buffers[state.buffer as usize].take(u64::from(len))?;
                self.prepend(bytes)?;
                self.prepend(state.tag())
            }
            Action::String => {
                let buffer = &mut buffers[state.buffer as usize];
                let whole = buffer.rest();
                let len = buffer.varint32()?;
                let prefix_len = whole.len() - buffer.rest().len();
                buffer.take(u64::from(len))?;
                self.prepend(&whole[..prefix_len + len as usize])?;
                self.prepend(state.tag())
            }
            Action::Group => self.prepend(state.tag()),
        }
    }

    fn prepend(&mut self, bytes: &[u8]) -> Result<(), FormatError> {
        if (self.reversed.len() + bytes.len()) as u64 > self.decoded_len {
            return Err(FormatError::fixed(
                "records exceed the decoded length of the chunk header",
            ));
        }
        if self.reversed.capacity() - self.reversed.len() < bytes.len() {
            // Doubling, but not past the decoded length.
            let left = self.decoded_len - self.reversed.len() as u64;
            let double = usize::try_from(left).unwrap_or(usize::MAX).min(self.reversed.len());
            reserve(self.reversed, bytes.len().max(double))?;
        }
        self.reversed.extend(bytes.iter().rev());
        Ok(())
    }

    fn finish_record(&mut self) -> Result<(), FormatError> {
        if !self.open.is_empty() {
            return Err(FormatError::fixed("submessages are open at the start of a record"));
        }
        if self.ends.len() as u64 == self.num_records {
            return Err(FormatError::fixed("more records than the chunk header states"));
        }
        self.ends.push(self.reversed.len());
        Ok(())
    }

    fn finish(self) -> Result<(), FormatError> {
        let len = self.reversed.len();
        if self.ends.len() as u64 != self.num_records || !self.open.is_empty() {
            return Err(FormatError::new(format!(
                "{} records, the chunk header states {}; {} submessages are open",
                self.ends.len(),
                self.num_records,
                self.open.len()
            )));
        }
        if len as u64 != self.decoded_len || self.ends.last().copied().unwrap_or(0) != len {
            return Err(FormatError::new(format!(
                "records have {len} bytes, the chunk header states {}",
                self.decoded_len
            )));
        }
        self.reversed.reverse();
        // `ends` holds the distance of each record's start from the end, last record first. A record
        // ends where the next one starts.
        self.ends.reverse();
        let num_records = self.ends.len();
        for record in 0..num_records {
            self.ends[record] = match self.ends.get(record + 1) {
                Some(&next_begin) => len - next_begin,
                None => len,
            };
        }
        Ok(())
    }
}
