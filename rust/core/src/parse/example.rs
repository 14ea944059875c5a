//! `tf.train.Example` and `tf.train.SequenceExample` messages: the lists of the features asked for.
//!
//! Messages are read as protocol buffers are: unknown fields are passed over, of several entries for
//! a name the last counts, and parts of a message that come separately are joined. As in
//! TensorFlow, an entry without a list does not count.

use std::borrow::Cow;
use std::collections::HashMap;

use super::number::{Number, Overflow, num_varints, put_floats, put_varints};
use super::wire::{Content, Fields, Malformed};

/// The kind of a list of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `bytes_list`.
    Bytes,
    /// `float_list`.
    Float,
    /// `int64_list`.
    Int64,
}

impl Kind {
    /// Its name in a message.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bytes => "bytes_list",
            Self::Float => "float_list",
            Self::Int64 => "int64_list",
        }
    }

    fn of_field(number: u64) -> Option<Self> {
        match number {
            1 => Some(Self::Bytes),
            2 => Some(Self::Float),
            3 => Some(Self::Int64),
            _ => None,
        }
    }
}

/// Why the values of a feature cannot be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The bytes are no message.
    #[error("{0}")]
    Malformed(#[from] Malformed),
    /// A value does not fit the type that was asked for.
    #[error("the value {} does not fit the dtype", .0.0)]
    Overflow(Overflow),
}

/// Features by name.
#[derive(Debug, Clone)]
pub struct Names {
    names: Vec<Box<[u8]>>,
    by_name: HashMap<Box<[u8]>, usize>,
}

/// Up to this many names are compared one by one.
const MAX_COMPARED: usize = 12;

impl Names {
    /// The features `names`, numbered in this order.
    pub fn new(names: impl IntoIterator<Item = String>) -> Self {
        let names: Vec<Box<[u8]>> =
            names.into_iter().map(|name| name.into_bytes().into_boxed_slice()).collect();
        let by_name = names.iter().cloned().enumerate().map(|(at, name)| (name, at)).collect();
        Self { names, by_name }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// The number of `name`; `guess` is looked at first.
    fn find(&self, name: &[u8], guess: usize) -> Option<usize> {
        if self.names.get(guess).is_some_and(|guessed| **guessed == *name) {
            return Some(guess);
        }
        if self.names.len() <= MAX_COMPARED {
            return self.names.iter().position(|known| **known == *name);
        }
        self.by_name.get(name).copied()
    }
}

/// The values of a feature.
#[derive(Debug, Clone)]
pub struct Values<'a> {
    /// Their kind.
    pub kind: Kind,
    list: Cow<'a, [u8]>,
}

/// The steps of a feature of a sequence.
#[derive(Debug, Clone)]
pub struct Steps<'a>(Cow<'a, [u8]>);

/// Finds features of an `Example`, or of the context of a `SequenceExample`.
///
/// # Errors
///
/// If `record` is not such a message.
pub fn features<'a>(
    record: &'a [u8],
    names: &Names,
    found: &mut [Option<Values<'a>>],
) -> Result<(), Malformed> {
    found.fill(None);
    for_each_entry(record, 1, names, |feature, value| {
        if let Some(values) = Values::of_feature(value)? {
            found[feature] = Some(values);
        }
        Ok(())
    })
}

/// Finds the features of the steps of a `SequenceExample`.
///
/// # Errors
///
/// If `record` is not such a message.
pub fn feature_lists<'a>(
    record: &'a [u8],
    names: &Names,
    found: &mut [Option<Steps<'a>>],
) -> Result<(), Malformed> {
    found.fill(None);
    for_each_entry(record, 2, names, |feature, value| {
        found[feature] = Some(Steps(value));
        Ok(())
    })
}

/// Calls `take` with the number and value of each entry of the maps in field `map` of `record`.
#[inline]
fn for_each_entry<'a>(
    record: &'a [u8],
    map: u64,
    names: &Names,
    mut take: impl FnMut(usize, Cow<'a, [u8]>) -> Result<(), Malformed>,
) -> Result<(), Malformed> {
    let mut fields = Fields::of(record);
    let mut guess = 0;
    while let Some((number, content)) = fields.next_field()? {
        let Content::Bytes(message) = content else { continue };
        if number != map {
            continue;
        }
        let mut entries = Fields::of(message);
        while let Some((number, content)) = entries.next_field()? {
            let (1, Content::Bytes(entry)) = (number, content) else { continue };
            let (name, value) = entry_of(entry)?;
            if let Some(feature) = names.find(name, guess) {
                guess = feature + 1;
                take(feature, value)?;
            }
        }
    }
    Ok(())
}

/// The name and value of an entry of a map.
fn entry_of(entry: &[u8]) -> Result<(&[u8], Cow<'_, [u8]>), Malformed> {
    let mut fields = Fields::of(entry);
    let (mut name, mut value): (&[u8], Option<Cow<'_, [u8]>>) = (&[], None);
    while let Some((number, content)) = fields.next_field()? {
        match (number, content) {
            (1, Content::Bytes(bytes)) => name = bytes,
            (2, Content::Bytes(bytes)) => join(&mut value, bytes),
            _ => {}
        }
    }
    Ok((name, value.unwrap_or_default()))
}

/// Joins two parts of one message, which is what their bytes in a row mean.
fn join<'a>(message: &mut Option<Cow<'a, [u8]>>, part: &'a [u8]) {
    match message {
        None => *message = Some(Cow::Borrowed(part)),
        Some(parts) => parts.to_mut().extend_from_slice(part),
    }
}

/// The values of a `Feature`; `None` if it has no list.
fn values_of(feature: &[u8]) -> Result<Option<Values<'_>>, Malformed> {
    let mut fields = Fields::of(feature);
    let mut values: Option<Values<'_>> = None;
    while let Some((number, content)) = fields.next_field()? {
        let (Some(kind), Content::Bytes(part)) = (Kind::of_field(number), content) else {
            continue;
        };
        match &mut values {
            // A list of another kind replaces the one before.
            Some(values) if values.kind == kind => values.list.to_mut().extend_from_slice(part),
            _ => values = Some(Values { kind, list: Cow::Borrowed(part) }),
        }
    }
    Ok(values)
}

impl<'a> Values<'a> {
    /// A list without values.
    pub fn empty(kind: Kind) -> Self {
        Self { kind, list: Cow::Borrowed(&[]) }
    }

    /// The values of a `Feature`; `None` if it has no list.
    ///
    /// # Errors
    ///
    /// If it is no message.
    pub fn of_feature(feature: Cow<'a, [u8]>) -> Result<Option<Self>, Malformed> {
        match feature {
            Cow::Borrowed(feature) => values_of(feature),
            Cow::Owned(feature) => Ok(values_of(&feature)?.map(|values| Self {
                kind: values.kind,
                list: Cow::Owned(values.list.into_owned()),
            })),
        }
    }

    /// Calls `take` with each run of encoded values: packed ones, or a single one.
    fn for_each_run<'s>(
        &'s self,
        mut take: impl FnMut(&'s [u8]) -> Result<(), Problem>,
    ) -> Result<(), Problem> {
        let mut fields = Fields::of(&self.list);
        while let Some((number, content)) = fields.next_field()? {
            match (number, self.kind, content) {
                (1, Kind::Int64, Content::Varint(run))
                | (1, Kind::Float, Content::Fixed32(run))
                | (1, _, Content::Bytes(run)) => take(run)?,
                _ => {}
            }
        }
        Ok(())
    }

    /// How many values there are.
    ///
    /// # Errors
    ///
    /// If the list is malformed.
    pub fn count(&self) -> Result<usize, Problem> {
        let mut count = 0;
        self.for_each_run(|run| {
            count += match self.kind {
                Kind::Bytes => 1,
                Kind::Int64 => num_varints(run)?,
                Kind::Float if run.len() % 4 == 0 => run.len() / 4,
                Kind::Float => return Err(Malformed::Packed(run.len()).into()),
            };
            Ok(())
        })?;
        Ok(count)
    }

    /// Writes the numbers to `out`, as `number`.
    ///
    /// # Errors
    ///
    /// If the list is malformed, or a value does not fit.
    ///
    /// # Panics
    ///
    /// If they are not of that kind, or `out` is not as long as [`count`](Self::count) of them.
    pub fn put_numbers(&self, number: Number, out: &mut [u8]) -> Result<(), Problem> {
        assert_eq!(self.kind == Kind::Int64, number.is_integer(), "another kind of list");
        let mut written = 0;
        self.for_each_run(|run| {
            let out = &mut out[written..];
            written += if self.kind == Kind::Float {
                put_floats(number, run, out)
            } else {
                put_varints(number, run, out).map_err(|overflow| match overflow {
                    Some(overflow) => Problem::Overflow(overflow),
                    None => Malformed::LongVarint.into(),
                })?
            };
            Ok(())
        })?;
        assert_eq!(written, out.len(), "another number of values");
        Ok(())
    }

    /// Calls `take` with each of the byte strings.
    ///
    /// # Errors
    ///
    /// If the list is malformed.
    pub fn for_each_bytes<'s>(&'s self, mut take: impl FnMut(&'s [u8])) -> Result<(), Problem> {
        self.for_each_run(|run| {
            take(run);
            Ok(())
        })
    }
}

impl Steps<'_> {
    /// Calls `take` with the values of each step, `None` where a step has no list.
    ///
    /// # Errors
    ///
    /// If they are malformed, and those of `take`.
    pub fn for_each<'s, E: From<Malformed>>(
        &'s self,
        mut take: impl FnMut(Option<Values<'s>>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut fields = Fields::of(&self.0);
        while let Some((number, content)) = fields.next_field()? {
            if let (1, Content::Bytes(feature)) = (number, content) {
                take(values_of(feature)?)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(number: u8, content: &[u8]) -> Vec<u8> {
        let len = u8::try_from(content.len()).expect("a short message");
        [&[number << 3 | 2, len][..], content].concat()
    }

    fn entry(name: &str, feature: &[u8]) -> Vec<u8> {
        part(1, &[part(1, name.as_bytes()), part(2, feature)].concat())
    }

    fn ints(list: &[u8]) -> Vec<u8> {
        part(3, list)
    }

    fn numbers(record: &[u8]) -> Result<Option<Vec<u8>>, Problem> {
        let mut found = [None];
        features(record, &Names::new(["x".to_owned()]), &mut found)?;
        let [Some(values)] = found else { return Ok(None) };
        let mut out = vec![0; values.count()?];
        values.put_numbers(Number::U8, &mut out)?;
        Ok(Some(out))
    }

    #[test]
    fn lists_are_read_however_they_are_split() {
        let packed = ints(&part(1, &[5, 6]));
        let single = ints(&[8, 5, 8, 6]);
        let mixed = ints(&[&part(1, &[5])[..], &[8, 6]].concat());
        let lists = [ints(&[8, 5]), ints(&[8, 6])].concat();
        let other_kind = [part(2, &part(1, &[0; 4])), packed.clone()].concat();
        for feature in [&packed, &single, &mixed, &lists, &other_kind] {
            let record = part(1, &entry("x", feature));
            assert_eq!(numbers(&record), Ok(Some(vec![5, 6])));
        }
        let values = [part(1, b"x"), part(2, &ints(&[8, 5])), part(2, &ints(&[8, 6]))].concat();
        assert_eq!(numbers(&part(1, &part(1, &values))), Ok(Some(vec![5, 6])));
    }

    #[test]
    fn the_last_entry_with_a_list_counts() {
        let [first, last] = [entry("x", &ints(&[8, 1])), entry("x", &ints(&[8, 2]))];
        let unset = entry("x", &[]);
        let joined = [first, last, unset, entry("y", &ints(&[8, 3]))].concat();
        assert_eq!(numbers(&part(1, &joined)), Ok(Some(vec![2])));
        assert_eq!(numbers(&[]), Ok(None));
        assert_eq!(numbers(&part(1, &entry("x", &ints(&[])))), Ok(Some(vec![])));
    }

    #[test]
    fn every_truncation_is_refused_or_a_shorter_message() {
        let record = part(1, &entry("x", &ints(&part(1, &[5, 6]))));
        for len in 1..record.len() {
            assert_eq!(numbers(&record[..len]), Err(Malformed::Cut.into()), "{len} bytes");
        }
    }

    #[test]
    fn values_that_do_not_fit_are_named() {
        let record = part(1, &entry("x", &ints(&[8, 1, 8, 0xac, 2])));
        assert_eq!(numbers(&record), Err(Problem::Overflow(Overflow(300))));
    }
}
