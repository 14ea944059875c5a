//! Columns back into records, by the small state machine that each transposed chunk carries.
//!
//! The machine works backwards: the last byte of the last record comes first. Output is
//! therefore filled from its end towards its front. What a changer must not break: everything
//! read from the header is checked to lie in range before the machine starts, cycles of states
//! that consume nothing are refused, and the output never outgrows the stated decoded length.

use super::super::FormatError;
use super::super::chunk::ChunkHeader;
use super::super::decompress::{Decompressor, check_chunk_len, codec, max_chunk_len, reserve};
use super::super::varint::{Cursor, MAX_VARINT_LEN};

/// How many times its length the layout of a chunk takes in memory: one byte of it is the length
/// of a bucket or a buffer, two are a state.
const LAYOUT_FACTOR: u64 = 32;
/// How many moves lead from one byte of a record or its begin to the next: one, and some through
/// states without an effect where an encoder has more states than a move can reach.
const MOVES_PER_STEP: u64 = 16;
/// The most bytes that the length of a record takes where that is no message.
const MAX_LEN_LEN: u64 = 5;

/// Submessages that may be open at once: many more than an encoder opens, which stops at 100.
const DEEPEST: usize = 1 << 20;

const NOOP: u32 = 0;
const NON_PROTO: u32 = 1;
const SUBMESSAGE_START: u32 = 2;
const MESSAGE_START: u32 = 3;
/// Varint subtypes from here on stand for the value `subtype - FIRST_INLINE` itself.
const FIRST_INLINE: u8 = 10;
const LAST_INLINE: u8 = 137;

/// Decodes the data of a transposed chunk. Puts where each record ends into `ends` and the
/// records back to back into `values`.
///
/// How long the parts can be follows from the chunk's header, so that none takes memory because
/// of what it states itself: each byte in a bucket is one of a record, but for the lengths of
/// records that are no messages.
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
    check_chunk_len(header.decoded_len)?;
    let mut cursor = Cursor::new(data);
    let codec = cursor.byte()?;
    let layout_len = cursor.varint64()?;
    let mut layout_bytes = Vec::new();
    let most = max_chunk_len() / LAYOUT_FACTOR;
    let layout =
        decompressor.decompress(codec, cursor.take(layout_len)?, most, &mut layout_bytes)?;
    let mut layout = Cursor::new(layout);

    let num_buckets = layout.varint32()?;
    let num_buffers = layout.varint32()?;
    let lens_len = header.num_records.saturating_mul(MAX_LEN_LEN);
    let most = header.decoded_len.saturating_add(lens_len);
    let buckets = read_buckets(codec, num_buckets, most, &mut layout, &mut cursor, decompressor)?;
    let mut buffers = read_buffers(&buckets, num_buffers, &mut layout)?;
    let machine = DecoderStateMachine::read(&mut layout, buffers.len())?;
    let mut moves_bytes = Vec::new();
    let steps = header.decoded_len.saturating_add(header.num_records);
    let most = steps.saturating_mul(MOVES_PER_STEP);
    let moves = decompressor.decompress(codec, cursor.rest(), most, &mut moves_bytes)?;
    machine.run(header, &mut buffers, moves, ends, values)?;
    Ok(values)
}

fn read_buckets(
    codec: u8,
    num_buckets: u32,
    most: u64,
    layout: &mut Cursor<'_>,
    stored: &mut Cursor<'_>,
    decompressor: &mut Decompressor,
) -> Result<Vec<Vec<u8>>, FormatError> {
    // Each bucket has a length of a byte or more in the layout.
    if num_buckets as usize > layout.rest().len() {
        return Err(FormatError::new(format!(
            "{num_buckets} buckets where their lengths are missing"
        )));
    }
    let mut buckets = Vec::with_capacity(num_buckets as usize);
    let mut left = most;
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

/// Buffers fill the buckets in order and never cross from one into the next.
fn read_buffers<'a>(
    buckets: &'a [Vec<u8>],
    num_buffers: u32,
    layout: &mut Cursor<'_>,
) -> Result<Vec<Cursor<'a>>, FormatError> {
    if num_buffers as usize > layout.rest().len() {
        return Err(FormatError::new(format!(
            "{num_buffers} buffers where their lengths are missing"
        )));
    }
    let mut buffers = Vec::with_capacity(num_buffers as usize);
    let mut unused = buckets.iter().map(|bucket| Cursor::new(bucket));
    let mut bucket = unused.next();
    for _ in 0..num_buffers {
        let current = bucket.as_mut().ok_or(FormatError::fixed("buffers without buckets"))?;
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
        Err(FormatError::fixed("bytes of a bucket belong to no buffer"))
    }
}

/// What a state does to the output.
#[derive(Debug, Clone, Copy)]
enum Action {
    Noop,
    NonProto,
    SubmessageStart,
    SubmessageEnd,
    MessageStart,
    /// The tag and the value `inline`.
    Inline(u8),
    /// The tag and a varint of this many bytes.
    Varint(u8),
    /// The tag and this many bytes.
    Fixed(u8),
    /// The tag, a length and so many bytes.
    String,
    /// The tag alone.
    Group,
}

#[derive(Debug, Clone, Copy)]
struct State {
    action: Action,
    /// The tag that is written, as its varint: bytes and how many of them.
    tag: [u8; 5],
    tag_len: u8,
    /// Whether the next state follows without a look at the moves.
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
        // Each state has a tag and a successor of a byte or more.
        if num_states as usize > layout.rest().len() / 2 {
            return Err(FormatError::new(format!(
                "{num_states} states where their tags are missing"
            )));
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
            return Err(FormatError::new(format!("first state {first} of {num_states}")));
        }
        if !layout.is_empty() {
            return Err(FormatError::fixed("bytes left in the transposed header"));
        }
        refuse_cycles(&states)?;
        skip_noops(&mut states);
        Ok(Self { states, first, has_non_proto: tags.contains(&NON_PROTO) })
    }

    fn run(
        &self,
        header: &ChunkHeader,
        buffers: &mut [Cursor<'_>],
        moves: &[u8],
        ends: &mut Vec<usize>,
        values: &mut Vec<u8>,
    ) -> Result<(), FormatError> {
        // Lengths of non-proto records are in the last buffer, which a state may also name.
        if self.has_non_proto && buffers.is_empty() {
            return Err(FormatError::fixed("no buffer of lengths"));
        }
        let mut output = Output::new(header, ends, values);
        let mut moves = moves.iter();
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
            } else if let Some(&step) = moves.next() {
                state = current.next as usize + usize::from(step >> 2);
                repeat = step & 3;
                if state >= self.states.len() {
                    return Err(FormatError::new(format!(
                        "move to state {state} of {}",
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
            return Err(FormatError::new(format!("buffer {buffer} of {num_buffers}")));
        }
        let implicit = next >= num_states;
        let target = if implicit { next - num_states } else { next };
        if target >= num_states {
            return Err(FormatError::new(format!("next state {next} with {num_states} states")));
        }
        // The end of a submessage is told apart by wire type 6 in place of 2.
        let written = if matches!(action, Action::SubmessageEnd) { tag - 4 } else { tag };
        let (bytes, tag_len) = varint_bytes(u64::from(written));
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

/// Refuses states that follow each other for ever without a look at the moves.
fn refuse_cycles(states: &[State]) -> Result<(), FormatError> {
    // 0: not seen; else the walk that saw it first. A walk that meets itself is a cycle.
    let mut seen_in = vec![0_usize; states.len()];
    for begin in 0..states.len() {
        let mut at = begin;
        while states[at].implicit && seen_in[at] == 0 {
            seen_in[at] = begin + 1;
            at = states[at].next as usize;
        }
        if states[at].implicit && seen_in[at] == begin + 1 {
            return Err(FormatError::fixed("states follow each other in an endless cycle"));
        }
    }
    Ok(())
}

/// Lets implicit successors lead past no-ops, so that the work a chunk takes is bounded by its
/// moves and its output. Needs states without cycles.
fn skip_noops(states: &mut [State]) {
    for begin in 0..states.len() {
        if !states[begin].implicit {
            continue;
        }
        let leads_on = |at: usize| {
            let state = &states[at];
            (state.implicit && matches!(state.action, Action::Noop)).then_some(state.next)
        };
        let mut target = states[begin].next;
        while let Some(next) = leads_on(target as usize) {
            target = next;
        }
        // Every state on the way leads there too; telling them keeps this linear.
        let mut at = begin;
        while states[at].implicit && states[at].next != target {
            at = std::mem::replace(&mut states[at].next, target) as usize;
        }
    }
}

/// The output, filled from its back.
struct Output<'a> {
    /// Bytes in reverse; turned round at the end.
    reversed: &'a mut Vec<u8>,
    ends: &'a mut Vec<usize>,
    /// Open submessages: the state that ended them and the length of the output then.
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
                // States that lead here again and again need neither input nor output for it.
                if self.open.len() == DEEPEST {
                    return Err(FormatError::fixed("too many submessages within each other"));
                }
                self.open.push((state.tag, state.tag_len, self.reversed.len()));
                Ok(())
            }
            Action::SubmessageStart => {
                let (tag, tag_len, before) =
                    self.open.pop().ok_or(FormatError::fixed("submessage start without an end"))?;
                let (len, len_len) = varint_bytes((self.reversed.len() - before) as u64);
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
            // Doubling, but not past the end.
            let left = self.decoded_len - self.reversed.len() as u64;
            let double = usize::try_from(left).unwrap_or(usize::MAX).min(self.reversed.len());
            reserve(self.reversed, bytes.len().max(double))?;
        }
        self.reversed.extend(bytes.iter().rev());
        Ok(())
    }

    fn finish_record(&mut self) -> Result<(), FormatError> {
        if !self.open.is_empty() {
            return Err(FormatError::fixed("submessages still open where a record begins"));
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
                "{} records where the chunk header states {}, {} submessages open",
                self.ends.len(),
                self.num_records,
                self.open.len()
            )));
        }
        if len as u64 != self.decoded_len || self.ends.last().copied().unwrap_or(0) != len {
            return Err(FormatError::new(format!(
                "records of {len} bytes where the chunk header states {}",
                self.decoded_len
            )));
        }
        self.reversed.reverse();
        // `ends` are distances from the back to where each record, last first, begins. A record
        // ends where the next one begins.
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

#[expect(clippy::cast_possible_truncation, reason = "the low seven bits are what is wanted")]
fn varint_bytes(mut value: u64) -> ([u8; MAX_VARINT_LEN], u8) {
    let mut bytes = [0; MAX_VARINT_LEN];
    let mut len = 0_u8;
    while value > 0x7f {
        bytes[usize::from(len)] = value as u8 | 0x80;
        value >>= 7;
        len += 1;
    }
    bytes[usize::from(len)] = value as u8;
    (bytes, len + 1)
}
