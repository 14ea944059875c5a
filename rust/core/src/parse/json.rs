//! Fields of JSON objects: the whole text is checked, and only the fields asked for are looked at.
//!
//! A text is passed once. As in Python's `json`, the last of several members with one name counts, and
//! `NaN`, `Infinity` and `-Infinity`, which Python writes, are numbers.

use std::borrow::Cow;

/// Arrays and objects may be nested this deep.
const MAX_DEPTH: u32 = 512;

/// Why a text is not JSON, and at which byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{problem} at byte {offset}")]
pub struct Invalid {
    /// What is wrong.
    pub problem: &'static str,
    /// The offset.
    pub offset: usize,
}

/// A step from a value to one inside it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Step {
    /// The member of an object.
    Member(String),
    /// The item of an array.
    Item(usize),
}

/// Where fields are in an object, as a tree of the steps to them.
#[derive(Debug, Clone, Default)]
pub struct Paths {
    nodes: Vec<Node>,
    num_fields: usize,
}

#[derive(Debug, Clone, Default)]
struct Node {
    members: Vec<(Box<[u8]>, usize)>,
    items: Vec<(usize, usize)>,
    /// The fields that are this value.
    fields: Vec<usize>,
    /// These, and all those inside it.
    all_fields: Vec<usize>,
}

impl Paths {
    /// The paths of fields, which are numbered in this order.
    pub fn new(paths: impl IntoIterator<Item = Vec<Step>>) -> Self {
        let mut tree = Self { nodes: vec![Node::default()], num_fields: 0 };
        for path in paths {
            let field = tree.num_fields;
            tree.num_fields += 1;
            let mut at = 0;
            tree.nodes[at].all_fields.push(field);
            for step in path {
                at = tree.child(at, step);
                tree.nodes[at].all_fields.push(field);
            }
            tree.nodes[at].fields.push(field);
        }
        tree
    }

    fn child(&mut self, at: usize, step: Step) -> usize {
        let (new, node) = (self.nodes.len(), &mut self.nodes[at]);
        let known = match &step {
            Step::Member(name) => node.member(name.as_bytes()),
            Step::Item(item) => node.item(*item),
        };
        if let Some(known) = known {
            return known;
        }
        match step {
            Step::Member(name) => node.members.push((name.into_bytes().into_boxed_slice(), new)),
            Step::Item(item) => node.items.push((item, new)),
        }
        self.nodes.push(Node::default());
        new
    }

    /// The texts of the fields in `text`; `None` where a field is missing.
    ///
    /// # Errors
    ///
    /// If `text` is not JSON.
    pub fn find<'a>(&self, text: &'a str, found: &mut [Option<&'a str>]) -> Result<(), Invalid> {
        found.fill(None);
        let mut scanner = Scanner { text, at: 0 };
        scanner.skip_space();
        self.take(0, &mut scanner, found, 0)?;
        scanner.skip_space();
        if scanner.at < text.len() {
            return Err(scanner.invalid("more text after the value"));
        }
        Ok(())
    }

    /// Passes the value of node `at`.
    fn take<'a>(
        &self,
        at: usize,
        scanner: &mut Scanner<'a>,
        found: &mut [Option<&'a str>],
        depth: u32,
    ) -> Result<(), Invalid> {
        let node = &self.nodes[at];
        let start = scanner.at;
        for &field in &node.all_fields {
            found[field] = None; // by an earlier member of this name
        }
        match scanner.peek() {
            Some(b'{') if !node.members.is_empty() => {
                scanner.for_each_member(depth, |scanner, name| match node.member(name) {
                    Some(child) => self.take(child, scanner, found, depth + 1),
                    None => scanner.skip_value(depth + 1),
                })?;
            }
            Some(b'[') if !node.items.is_empty() => {
                let mut number = 0;
                scanner.for_each_item(depth, |scanner| {
                    let child = node.item(number);
                    number += 1;
                    match child {
                        Some(child) => self.take(child, scanner, found, depth + 1),
                        None => scanner.skip_value(depth + 1),
                    }
                })?;
            }
            _ => scanner.skip_value(depth)?,
        }
        for &field in &node.fields {
            found[field] = Some(&scanner.text[start..scanner.at]);
        }
        Ok(())
    }
}

impl Node {
    fn member(&self, name: &[u8]) -> Option<usize> {
        self.members.iter().find(|(known, _)| **known == *name).map(|(_, node)| *node)
    }

    fn item(&self, number: usize) -> Option<usize> {
        self.items.iter().find(|(known, _)| *known == number).map(|(_, node)| *node)
    }
}

/// A place in a text.
struct Scanner<'a> {
    text: &'a str,
    at: usize,
}

impl Scanner<'_> {
    fn invalid(&self, problem: &'static str) -> Invalid {
        Invalid { problem, offset: self.at }
    }

    #[inline]
    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    #[inline]
    fn skip_space(&mut self) {
        while let Some(b' ' | b'\n' | b'\r' | b'\t') = self.peek() {
            self.at += 1;
        }
    }

    /// Passes `byte`, and the space before it.
    fn expect(&mut self, byte: u8, problem: &'static str) -> Result<(), Invalid> {
        self.skip_space();
        if self.peek() != Some(byte) {
            return Err(self.invalid(problem));
        }
        self.at += 1;
        Ok(())
    }

    /// Passes `,` and returns false, or `end` and returns true.
    fn ends(&mut self, end: u8) -> Result<bool, Invalid> {
        self.skip_space();
        let byte = self.peek();
        if byte != Some(b',') && byte != Some(end) {
            return Err(self.invalid("expected `,` or the end of an array or object"));
        }
        self.at += 1;
        Ok(byte == Some(end))
    }

    /// Passes an object; `take` passes each value, and gets its name.
    fn for_each_member(
        &mut self,
        depth: u32,
        mut take: impl FnMut(&mut Self, &[u8]) -> Result<(), Invalid>,
    ) -> Result<(), Invalid> {
        self.enter(depth)?;
        if self.peek() == Some(b'}') {
            self.at += 1;
            return Ok(());
        }
        loop {
            self.skip_space();
            let start = self.at;
            self.skip_string()?;
            let name = &self.text[start + 1..self.at - 1];
            self.expect(b':', "expected `:`")?;
            self.skip_space();
            if name.contains('\\') {
                let decoded = decoded(name)
                    .ok_or(Invalid { problem: "half a surrogate pair", offset: start })?;
                take(self, decoded.as_bytes())?;
            } else {
                take(self, name.as_bytes())?;
            }
            if self.ends(b'}')? {
                return Ok(());
            }
        }
    }

    /// Passes an array; `take` passes each item.
    fn for_each_item(
        &mut self,
        depth: u32,
        mut take: impl FnMut(&mut Self) -> Result<(), Invalid>,
    ) -> Result<(), Invalid> {
        self.enter(depth)?;
        if self.peek() == Some(b']') {
            self.at += 1;
            return Ok(());
        }
        loop {
            self.skip_space();
            take(self)?;
            if self.ends(b']')? {
                return Ok(());
            }
        }
    }

    fn enter(&mut self, depth: u32) -> Result<(), Invalid> {
        if depth >= MAX_DEPTH {
            return Err(self.invalid("arrays and objects nested too deep"));
        }
        self.at += 1;
        self.skip_space();
        Ok(())
    }

    fn skip_value(&mut self, depth: u32) -> Result<(), Invalid> {
        match self.peek() {
            Some(b'"') => self.skip_string(),
            Some(b'{') => self.for_each_member(depth, |scanner, _| scanner.skip_value(depth + 1)),
            Some(b'[') => self.for_each_item(depth, |scanner| scanner.skip_value(depth + 1)),
            Some(b't') => self.skip_word("true"),
            Some(b'f') => self.skip_word("false"),
            Some(b'n') => self.skip_word("null"),
            Some(b'N') => self.skip_word("NaN"),
            _ => self.skip_number(),
        }
    }

    fn skip_word(&mut self, word: &str) -> Result<(), Invalid> {
        if !self.text.as_bytes()[self.at..].starts_with(word.as_bytes()) {
            return Err(self.invalid("expected a value"));
        }
        self.at += word.len();
        Ok(())
    }

    fn skip_string(&mut self) -> Result<(), Invalid> {
        if self.peek() != Some(b'"') {
            return Err(self.invalid("expected a string"));
        }
        self.at += 1;
        let bytes = self.text.as_bytes();
        loop {
            self.at += plain_len(&bytes[self.at..]);
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(());
                }
                Some(b'\\') => {
                    let escape = bytes.get(self.at + 1..).unwrap_or_default();
                    self.at += match escape.first() {
                        Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => 2,
                        Some(b'u') if hex(escape).is_some() => 6,
                        _ => return Err(self.invalid("an escape that does not exist")),
                    };
                }
                Some(_) => return Err(self.invalid("a control character in a string")),
                None => return Err(self.invalid("the text ends within a string")),
            }
        }
    }

    fn skip_digits(&mut self) -> Result<(), Invalid> {
        let start = self.at;
        while self.peek().is_some_and(|byte| byte.is_ascii_digit()) {
            self.at += 1;
        }
        if start == self.at { Err(self.invalid("expected a value")) } else { Ok(()) }
    }

    fn skip_number(&mut self) -> Result<(), Invalid> {
        if self.peek() == Some(b'-') {
            self.at += 1;
        }
        if self.peek() == Some(b'I') {
            return self.skip_word("Infinity");
        }
        if self.peek() == Some(b'0') {
            self.at += 1;
        } else {
            self.skip_digits()?;
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            self.skip_digits()?;
        }
        if let Some(b'e' | b'E') = self.peek() {
            self.at += 1;
            if let Some(b'+' | b'-') = self.peek() {
                self.at += 1;
            }
            self.skip_digits()?;
        }
        Ok(())
    }
}

/// How many bytes at the start of `bytes` are neither `"` nor `\` nor control characters.
#[inline]
fn plain_len(bytes: &[u8]) -> usize {
    // Most names are short.
    if let Some(word) = bytes.first_chunk()
        && let Some(len) = plain_len_in(*word)
    {
        return len;
    }
    // The compiler compares a block at once.
    let is_special =
        |byte: u8| u8::from(byte == b'"') | u8::from(byte == b'\\') | u8::from(byte < 0x20);
    let (blocks, _) = bytes.as_chunks::<32>();
    let is_plain =
        |block: &&[u8; 32]| block.iter().fold(0, |any, &byte| any | is_special(byte)) == 0;
    let mut len = 32 * blocks.iter().take_while(is_plain).count();
    while let Some(word) = bytes[len..].first_chunk() {
        if let Some(more) = plain_len_in(*word) {
            return len + more;
        }
        len += word.len();
    }
    let rest = &bytes[len..];
    len + rest.iter().position(|&byte| is_special(byte) != 0).unwrap_or(rest.len())
}

/// `plain_len` of eight bytes, `None` if all are plain.
#[inline]
fn plain_len_in(bytes: [u8; 8]) -> Option<usize> {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const HIGH: u64 = 0x8080_8080_8080_8080;
    let word = u64::from_le_bytes(bytes);
    // The high bit of each byte below a limit; only the lowest one set is certain.
    let below = |word: u64, limit: u64| word.wrapping_sub(ONES * limit) & !word;
    let quote = below(word ^ (ONES * u64::from(b'"')), 1);
    let escape = below(word ^ (ONES * u64::from(b'\\')), 1);
    let special = (quote | escape | below(word, 0x20)) & HIGH;
    (special != 0).then(|| special.trailing_zeros() as usize / 8)
}

/// The four digits after the `u` of an escape.
fn hex(escape: &[u8]) -> Option<u32> {
    escape
        .get(1..5)?
        .iter()
        .try_fold(0, |code, &digit| Some(code << 4 | char::from(digit).to_digit(16)?))
}

/// What a string means, given without its quotes; `None` if it has half a surrogate pair.
pub fn decoded(string: &str) -> Option<Cow<'_, str>> {
    let Some(first) = string.find('\\') else { return Some(Cow::Borrowed(string)) };
    let (start, mut rest) = string.split_at(first);
    let mut decoded = start.to_owned();
    while let Some(at) = rest.find('\\') {
        decoded.push_str(&rest[..at]);
        let escape = &rest.as_bytes()[at + 1..];
        let mut len = 2;
        decoded.push(match escape.first()? {
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => {
                let code = hex(escape)?;
                len = 6;
                if (0xd800..0xdc00).contains(&code) {
                    let low = escape.get(5..).filter(|low| low.starts_with(b"\\u"))?;
                    let low = hex(&low[1..]).filter(|low| (0xdc00..0xe000).contains(low))?;
                    len = 12;
                    char::from_u32(0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00))?
                } else {
                    char::from_u32(code)?
                }
            }
            &other => char::from(other),
        });
        rest = &rest[at + len..];
    }
    decoded.push_str(rest);
    Some(Cow::Owned(decoded))
}

/// A value, of a text that `Paths::find` has checked.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value<'a> {
    /// `null`
    Null,
    /// `true` or `false`
    Bool(bool),
    /// A number, as it is written.
    Number(&'a str),
    /// A string without its quotes, as it is written.
    String(&'a str),
    /// An array: see [`for_each_item`].
    Array(&'a str),
    /// An object: see [`for_each_member`].
    Object(&'a str),
}

/// The value that `text`, a field, is.
pub fn value(text: &str) -> Value<'_> {
    match text.as_bytes().first() {
        Some(b'"') => Value::String(text.get(1..text.len() - 1).unwrap_or_default()),
        Some(b'[') => Value::Array(text),
        Some(b'{') => Value::Object(text),
        Some(b't') => Value::Bool(true),
        Some(b'f') => Value::Bool(false),
        Some(b'n') | None => Value::Null,
        Some(_) => Value::Number(text),
    }
}

/// Calls `take` with the text of each item of `array`.
///
/// # Errors
///
/// Those of `take`.
pub fn for_each_item<'a, E>(
    array: &'a str,
    mut take: impl FnMut(&'a str) -> Result<(), E>,
) -> Result<(), E> {
    let mut scanner = Scanner { text: array, at: 0 };
    let mut outcome = Ok(());
    // The text was checked, so only `take` fails.
    let _ = scanner.for_each_item(0, |scanner| {
        let start = scanner.at;
        scanner.skip_value(0)?;
        if outcome.is_ok() {
            outcome = take(&array[start..scanner.at]);
        }
        Ok(())
    });
    outcome
}

/// Calls `take` with the name, decoded, and the text of each member of `object`.
///
/// # Errors
///
/// Those of `take`.
pub fn for_each_member<'a, E>(
    object: &'a str,
    mut take: impl FnMut(&[u8], &'a str) -> Result<(), E>,
) -> Result<(), E> {
    let mut scanner = Scanner { text: object, at: 0 };
    let mut outcome = Ok(());
    let _ = scanner.for_each_member(0, |scanner, name| {
        let start = scanner.at;
        scanner.skip_value(0)?;
        if outcome.is_ok() {
            outcome = take(name, &object[start..scanner.at]);
        }
        Ok(())
    });
    outcome
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn paths(names: &[&str]) -> Paths {
        let step = |part: &str| match part.parse() {
            Ok(item) => Step::Item(item),
            Err(_) => Step::Member(part.to_owned()),
        };
        Paths::new(names.iter().map(|name| name.split('.').map(step).collect()))
    }

    fn found<'a>(text: &'a str, names: &[&str]) -> Result<Vec<Option<&'a str>>, Invalid> {
        let mut found = vec![None; names.len()];
        paths(names).find(text, &mut found)?;
        Ok(found)
    }

    #[test]
    fn fields_are_found_at_any_depth() {
        let text = r#" {"a": 1, "b": {"c": [10, {"d": "x\"y"}], "e": null}, "f\u0067": true} "#;
        let names = ["a", "b.c.1.d", "b.c.0", "b.e", "fg", "b.x", "b.c.7", "b.e.z"];
        let expected = [Some("1"), Some(r#""x\"y""#), Some("10"), Some("null"), Some("true")];
        assert_eq!(found(text, &names).map(|all| all[..5].to_vec()), Ok(expected.to_vec()));
        assert_eq!(found(text, &names).map(|all| all[5..].to_vec()), Ok(vec![None; 3]));
    }

    #[test]
    fn the_last_member_of_a_name_counts() {
        let text = r#"{"a": {"b": 1, "c": 2}, "a": {"c": 3}}"#;
        assert_eq!(found(text, &["a.b", "a.c"]), Ok(vec![None, Some("3")]));
    }

    #[test]
    fn strings_are_decoded() {
        assert_eq!(decoded(r"a\n\u00e9\ud83d\ude00\/"), Some("a\né😀/".into()));
        assert_eq!(decoded(r"\ud83d"), None);
        assert_eq!(decoded(r"\ude00"), None);
        assert_eq!(decoded(r"\ud83d\u0041"), None);
    }

    #[test]
    fn deep_texts_are_refused() {
        assert!(found(&format!("{}1{}", "[".repeat(512), "]".repeat(512)), &[]).is_ok());
        assert!(found(&"[".repeat(100_000), &["0.0"]).is_err());
        assert!(found(&r#"{"a":"#.repeat(100_000), &["a.a"]).is_err());
    }

    proptest! {
        #[test]
        fn plain_bytes_are_counted_as_one_by_one(
            bytes in prop::collection::vec(prop_oneof![9 => 0x23..0x5c_u8, 1 => any::<u8>()], 0..200)
        ) {
            let is_special = |&byte: &u8| byte == b'"' || byte == b'\\' || byte < 0x20;
            let expected = bytes.iter().position(is_special).unwrap_or(bytes.len());
            prop_assert_eq!(plain_len(&bytes), expected);
        }
    }
}
