//! The options of a writer: the text that a user passes, and the text that a file stores.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use crate::formats::riegeli::compress::Codec;
use crate::{Error, Result};

/// How a file is written; parsed from text such as `group_size:256,zstd:5`.
///
/// Printing gives the normalised text that is stored in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriterOptions {
    group_size: u32,
    codec: Codec,
    transpose: bool,
    bucket_len: u64,
    pad_to_block_boundary: bool,
}

impl Default for WriterOptions {
    fn default() -> Self {
        Self {
            group_size: 1,
            codec: Codec::Zstd { level: 3, window_log: 20 },
            transpose: false,
            bucket_len: 256,
            pad_to_block_boundary: false,
        }
    }
}

impl WriterOptions {
    /// How many records each chunk holds, except the last, which may hold fewer.
    pub fn group_size(&self) -> u32 {
        self.group_size
    }

    /// How chunks are compressed.
    pub fn codec(&self) -> Codec {
        self.codec
    }

    /// About how many bytes of columns are compressed together, where chunks are transposed.
    pub fn transposed_bucket_len(&self) -> Option<u64> {
        self.transpose.then_some(self.bucket_len)
    }

    /// Whether every chunk begins at a multiple of 64 KiB.
    pub fn pad_to_block_boundary(&self) -> bool {
        self.pad_to_block_boundary
    }
}

impl fmt::Display for WriterOptions {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "group_size:{},transpose:{}", self.group_size, self.transpose)?;
        write!(out, ",pad_to_block_boundary:{}", self.pad_to_block_boundary)?;
        if self.transpose {
            write!(out, ",transpose_bucket_size:{}", self.bucket_len)?;
        }
        match self.codec {
            Codec::Uncompressed => write!(out, ",uncompressed"),
            Codec::Snappy => write!(out, ",snappy"),
            Codec::Zstd { level, window_log } => {
                write!(out, ",zstd:{level},window_log:{window_log}")
            }
            Codec::Brotli { level, window_log: None } => write!(out, ",brotli:{level}"),
            Codec::Brotli { level, window_log: Some(log) } => {
                write!(out, ",brotli:{level},window_log:{log}")
            }
        }?;
        write!(out, ",max_parallelism:1")
    }
}

const KEYS: [&str; 12] = [
    "default",
    "group_size",
    "max_parallelism",
    "saturation_delay_ms",
    "transpose",
    "transpose_bucket_size",
    "uncompressed",
    "brotli",
    "zstd",
    "snappy",
    "window_log",
    "pad_to_block_boundary",
];

const COUNTS: RangeInclusive<i64> = 1..=2_147_483_647;

impl FromStr for WriterOptions {
    type Err = Error;

    /// Parses `key:value` items separated by commas.
    fn from_str(text: &str) -> Result<Self> {
        let items = items_of(text)?;
        if let Some((first, second)) = conflict(&items) {
            return refuse(format!("Option {second} conflicts with option {first}"));
        }
        let mut options = Self::default();
        for item in &items {
            options.set(*item)?;
        }
        if let Some(item) = items.iter().find(|item| item.key == "window_log") {
            options.set_window_log(*item)?;
        }
        Ok(options)
    }
}

impl WriterOptions {
    fn set(&mut self, item: Item<'_>) -> Result<()> {
        match item.key {
            "transpose" => self.transpose = item.boolean(true)?,
            "transpose_bucket_size" => self.bucket_len = item.byte_len(256)?,
            "pad_to_block_boundary" => self.pad_to_block_boundary = item.boolean(false)?,
            "group_size" => self.group_size = item.within(COUNTS, "")?,
            "saturation_delay_ms" => return item.within(COUNTS, "").map(|_: u32| ()),
            "max_parallelism" if item.value != "auto" => {
                return item.within(COUNTS, "auto, ").map(|_: u32| ());
            }
            "uncompressed" if item.value.is_empty() => self.codec = Codec::Uncompressed,
            "uncompressed" => return item.invalid("(empty)"),
            "snappy" => {
                item.level(1, 1..=2)?;
                self.codec = Codec::Snappy;
            }
            "zstd" => {
                self.codec = Codec::Zstd { level: item.level(3, -131_072..=22)?, window_log: 20 };
            }
            "brotli" => {
                self.codec = Codec::Brotli { level: item.level(6, 0..=11)?, window_log: None };
            }
            _ => {}
        }
        Ok(())
    }

    /// Set last, since the valid range depends on the codec, which may follow in the text.
    fn set_window_log(&mut self, item: Item<'_>) -> Result<()> {
        if item.value == "auto" {
            return Ok(());
        }
        match &mut self.codec {
            Codec::Zstd { window_log, .. } => *window_log = item.within(10..=31, "auto, ")?,
            Codec::Brotli { window_log, .. } => {
                *window_log = Some(item.within(10..=30, "auto, ")?);
            }
            Codec::Uncompressed | Codec::Snappy => {}
        }
        Ok(())
    }
}

/// One `key:value` of the text.
#[derive(Clone, Copy)]
struct Item<'a> {
    key: &'a str,
    value: &'a str,
}

fn items_of(text: &str) -> Result<Vec<Item<'_>>> {
    let mut items: Vec<Item<'_>> = Vec::new();
    for item in text.split(',').filter(|item| !item.is_empty()) {
        let (key, value) = item.split_once(':').unwrap_or((item, ""));
        if !KEYS.contains(&key) {
            let valid = KEYS.join(", ");
            return refuse(format!("Unknown option {key}, valid options: {valid}"));
        }
        if items.iter().any(|item| item.key == key) {
            return refuse(format!("Option {key} is present more than once"));
        }
        if key == "default" && !items.is_empty() {
            return refuse("Option default must be first".to_owned());
        }
        let item = Item { key, value };
        if key == "group_size" {
            item.within::<u32>(COUNTS, "")?;
        }
        items.push(item);
    }
    Ok(items)
}

/// The first pair of conflicting options.
fn conflict<'a>(items: &[Item<'a>]) -> Option<(&'a str, &'a str)> {
    let clash = |first: &str, second: &str| {
        let plain = |key| matches!(key, "uncompressed" | "snappy");
        let codec = |key| plain(key) || matches!(key, "zstd" | "brotli");
        (codec(first) && codec(second))
            || (plain(first) && second == "window_log")
            || (first == "window_log" && plain(second))
    };
    items.iter().enumerate().find_map(|(at, second)| {
        let first = items[..at].iter().find(|first| clash(first.key, second.key))?;
        Some((first.key, second.key))
    })
}

impl Item<'_> {
    fn boolean(self, when_empty: bool) -> Result<bool> {
        match self.value {
            "" => Ok(when_empty),
            "true" => Ok(true),
            "false" => Ok(false),
            _ => self.invalid("(empty), true, false"),
        }
    }

    fn level(self, when_empty: i32, range: RangeInclusive<i64>) -> Result<i32> {
        if self.value.is_empty() { Ok(when_empty) } else { self.within(range, "(empty), ") }
    }

    /// An integer of `range`; spaces around it and a plus sign are tolerated.
    fn within<T: TryFrom<i64>>(self, range: RangeInclusive<i64>, others: &str) -> Result<T> {
        let number = self.value.trim_ascii().parse::<i64>().ok();
        let number = number.filter(|number| range.contains(number));
        if let Some(number) = number.and_then(|number| T::try_from(number).ok()) {
            return Ok(number);
        }
        let (low, high) = range.into_inner();
        self.invalid(&format!("{others}integers in the range [{low}..{high}]"))
    }

    /// A length in bytes, rounded: a real number with a suffix that stands for a power of 1024.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the cast saturates, which is what a length beyond all data should do"
    )]
    fn byte_len(self, when_auto: u64) -> Result<u64> {
        if self.value == "auto" {
            return Ok(when_auto);
        }
        let (number, power) = match self.value.char_indices().next_back() {
            Some((at, suffix)) if "BkKMGTPE".contains(suffix) => {
                (&self.value[..at], "BKMGTPE".find(suffix.to_ascii_uppercase()).unwrap_or(0))
            }
            _ => (self.value, 0),
        };
        let scale = (0..power).fold(1.0, |scale, _| scale * 1024.0);
        match real(number.trim_ascii()).map(|number| (number * scale).round() as u64) {
            Some(len @ 1..) => Ok(len),
            _ => self.invalid(
                "auto, integers expressed as reals with optional suffix [BkKMGTPE], \
                 in the range [1..18446744073709551615]",
            ),
        }
    }

    fn invalid<T>(self, valid: &str) -> Result<T> {
        let value = if self.value.is_empty() { "(empty)" } else { self.value };
        refuse(format!("Option {}: invalid value: {value}, valid values: {valid}", self.key))
    }
}

#[expect(clippy::cast_precision_loss, reason = "no data is long enough for the difference")]
fn real(text: &str) -> Option<f64> {
    match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => u64::from_str_radix(digits, 16).ok().map(|number| number as f64),
        None => text.parse().ok(),
    }
}

fn refuse<T>(message: String) -> Result<T> {
    Err(Error::InvalidArgument(message))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normalised(text: &str) -> String {
        text.parse::<WriterOptions>().map_or_else(|error| error.to_string(), |o| o.to_string())
    }

    /// Pairs of option text and what `array_record` 0.8.6 stored for it.
    #[test]
    fn stored_text_is_that_of_array_record() {
        let zstd =
            "transpose:false,pad_to_block_boundary:false,zstd:3,window_log:20,max_parallelism:1";
        for text in ["", "default", "default:1", ",,", ",default", "window_log:auto", "zstd: +3"] {
            assert_eq!(normalised(text), format!("group_size:1,{zstd}"), "of {text:?}");
        }
        for (text, size) in [("group_size:\t7\n", 7), ("group_size:+2", 2), ("group_size:007", 7)] {
            assert_eq!(normalised(text), format!("group_size:{size},{zstd}"), "of {text:?}");
        }
        assert_eq!(
            normalised("window_log:30,brotli:11,pad_to_block_boundary:true,group_size:2147483647"),
            "group_size:2147483647,transpose:false,pad_to_block_boundary:true,brotli:11,\
             window_log:30,max_parallelism:1"
        );
        assert_eq!(
            normalised("transpose,snappy:2,saturation_delay_ms:5,max_parallelism:8"),
            "group_size:1,transpose:true,pad_to_block_boundary:false,transpose_bucket_size:256,\
             snappy,max_parallelism:1"
        );
    }

    #[test]
    fn bucket_sizes_are_those_of_array_record() {
        for (text, len) in [
            ("auto", 256),
            ("0.5", 1),
            ("1.5", 2),
            ("2.5", 3),
            ("1.5K", 1536),
            ("2k", 2048),
            ("1e3K", 1_024_000),
            (".5K", 512),
            ("1 K", 1024),
            ("+1", 1),
            ("0x10", 16),
            ("1E", 1 << 60),
            ("16E", u64::MAX),
            ("inf", u64::MAX),
        ] {
            let options: WriterOptions =
                format!("transpose,transpose_bucket_size:{text}").parse().unwrap();
            assert_eq!(options.transposed_bucket_len(), Some(len), "of {text}");
        }
        for text in ["", "0", "0.4", "-1", "nan", "1KB", "1m", "K", "1e", "K7"] {
            let message = normalised(&format!("transpose_bucket_size:{text}"));
            let start = "Option transpose_bucket_size: invalid value: ";
            assert!(message.starts_with(start), "of {text}: {message}");
        }
    }

    #[test]
    fn refusals_read_like_those_of_array_record() {
        for (text, message) in [
            (
                "group_size:0",
                "Option group_size: invalid value: 0, valid values: integers in the range [1..2147483647]",
            ),
            (
                "group_size",
                "Option group_size: invalid value: (empty), valid values: integers in the range [1..2147483647]",
            ),
            (
                "zstd:23",
                "Option zstd: invalid value: 23, valid values: (empty), integers in the range [-131072..22]",
            ),
            (
                "brotli,window_log:31",
                "Option window_log: invalid value: 31, valid values: auto, integers in the range [10..30]",
            ),
            (
                "window_log:",
                "Option window_log: invalid value: (empty), valid values: auto, integers in the range [10..31]",
            ),
            ("uncompressed:1", "Option uncompressed: invalid value: 1, valid values: (empty)"),
            (
                "transpose:True",
                "Option transpose: invalid value: True, valid values: (empty), true, false",
            ),
            ("zstd,brotli:99", "Option brotli conflicts with option zstd"),
            ("window_log:auto,snappy", "Option snappy conflicts with option window_log"),
            ("uncompressed,window_log:99", "Option window_log conflicts with option uncompressed"),
            ("zstd:3,brotli,brotli", "Option brotli is present more than once"),
            ("group_size:2,default,foo", "Option default must be first"),
            (
                "zstd:99,group_size:0",
                "Option group_size: invalid value: 0, valid values: integers in the range [1..2147483647]",
            ),
        ] {
            assert_eq!(normalised(text), message, "of {text}");
        }
        assert!(
            normalised("zstd:99, group_size:2")
                .starts_with("Unknown option  group_size, valid options: default, ")
        );
    }
}
