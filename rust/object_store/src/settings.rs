//! The environment variables that say how to reach buckets and how long to try.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use grainmill_core::{Error, Result};

use crate::aws_profile;

const DEADLINE: &str = "GRAINMILL_BUCKET_DEADLINE_S";
const STALL: &str = "GRAINMILL_BUCKET_STALL_S";
const MIN_RATE: &str = "GRAINMILL_BUCKET_MIN_BYTES_PER_S";
const CACHE_DIR: &str = "GRAINMILL_BUCKET_CACHE_DIR";
const MAX_IN_FLIGHT: &str = "GRAINMILL_BUCKET_MAX_IN_FLIGHT";
const CACHE_BYTES: &str = "GRAINMILL_BUCKET_CACHE_BYTES";
/// For how long a request is repeated, and for how long one may send nothing.
const DEFAULT_DEADLINE_S: f64 = 120.0;
const DEFAULT_STALL_S: f64 = 20.0;
/// A server that sends less is given up, whatever else it sends.
const DEFAULT_MIN_RATE: f64 = 1024.0;
const DEFAULT_CACHE_BYTES: u64 = 16 << 30;

/// Variables that start with one of these are copied, and those with these names.
const PREFIXES: [&str; 4] = ["AWS_", "GOOGLE_", "AZURE_", "GRAINMILL_BUCKET_"];
const NAMES: [&str; 5] =
    ["HOME", "USERPROFILE", "IDENTITY_ENDPOINT", "SERVICE_ACCOUNT", "STORAGE_EMULATOR_HOST"];

/// Parts of the names of variables whose values are secrets; shorter values are none.
const SECRET_NAMES: [&str; 6] = ["SECRET", "TOKEN", "PASSWORD", "ACCOUNT_KEY", "ACCESS_KEY", "SAS"];
const MIN_SECRET_LEN: usize = 6;

/// How buckets are reached, as the environment said when it was asked.
///
/// The variables are copied since the program may change them while threads of the engine read.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Settings {
    pub(crate) variables: BTreeMap<String, String>,
    /// For how long a failed request is repeated.
    pub(crate) deadline: Duration,
    /// After how long without a byte a request has failed.
    pub(crate) stall: Duration,
    /// How many bytes at least have to arrive in that time.
    pub(crate) min_len: u64,
    /// How many reads of a bucket may be in flight, if there is a number for that.
    pub(crate) max_in_flight: Option<usize>,
    /// The directory of the block cache and its size in bytes.
    pub(crate) cache: Option<(PathBuf, u64)>,
}

impl Settings {
    /// The settings in the environment of this process.
    ///
    /// # Errors
    /// If a variable has an invalid value.
    pub fn from_env() -> Result<Self> {
        let variables = std::env::vars_os().filter_map(|(name, value)| {
            let name = name.into_string().ok()?;
            let is_used = PREFIXES.iter().any(|prefix| name.starts_with(prefix))
                || NAMES.contains(&name.as_str());
            Some((name, value.into_string().ok()?)).filter(|_| is_used)
        });
        Self::from_variables(variables.collect())
    }

    fn from_variables(variables: BTreeMap<String, String>) -> Result<Self> {
        let given = |name: &str| variables.get(name).filter(|value| !value.is_empty());
        let seconds = |name: &str, default: f64| {
            let Some(text) = given(name) else { return Ok(Duration::from_secs_f64(default)) };
            let seconds = text.parse().ok().filter(|&seconds: &f64| seconds > 0.0);
            let duration = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
            duration.ok_or_else(|| invalid(name, "a positive number of seconds", text))
        };
        let cache_bytes = match given(CACHE_BYTES) {
            None => DEFAULT_CACHE_BYTES,
            Some(text) => {
                text.parse().map_err(|_| invalid(CACHE_BYTES, "a number of bytes", text))?
            }
        };
        let max_in_flight = match given(MAX_IN_FLIGHT) {
            None => None,
            Some(text) => {
                let number = text.parse().ok().filter(|&number: &usize| number > 0);
                Some(number.ok_or_else(|| invalid(MAX_IN_FLIGHT, "a positive number", text))?)
            }
        };
        let cache = given(CACHE_DIR).map(|dir| (PathBuf::from(dir), cache_bytes));
        let (deadline, stall) =
            (seconds(DEADLINE, DEFAULT_DEADLINE_S)?, seconds(STALL, DEFAULT_STALL_S)?);
        let min_rate = match given(MIN_RATE) {
            None => DEFAULT_MIN_RATE,
            Some(text) => {
                let rate = text.parse().ok().filter(|rate: &f64| rate.is_finite() && *rate >= 0.0);
                rate.ok_or_else(|| invalid(MIN_RATE, "a number of bytes per second", text))?
            }
        };
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates")]
        let min_len = (min_rate * stall.as_secs_f64()) as u64;
        Ok(Self { variables, deadline, stall, min_len, max_in_flight, cache })
    }

    /// The variables that start with `prefix`, by their names in lower case.
    pub(crate) fn starting_with(&self, prefix: &str) -> impl Iterator<Item = (String, &str)> {
        self.variables
            .iter()
            .filter(move |(name, _)| name.starts_with(prefix))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.as_str()))
    }

    /// What no message may have: a server may answer with what it was sent.
    pub(crate) fn secrets(&self) -> impl Iterator<Item = String> {
        let is_secret = |name: &str| {
            let name = name.to_ascii_uppercase();
            SECRET_NAMES.iter().any(|part| name.contains(part)) && !name.ends_with("_FILE")
        };
        let set = self.variables.iter().filter(move |(name, _)| is_secret(name));
        let profile = aws_profile::options(|name| self.get(name));
        let profile = profile.into_iter().filter(move |(name, _)| is_secret(name));
        let values = set.map(|(_, value)| value.clone()).chain(profile.map(|(_, value)| value));
        values.filter(|value| value.len() >= MIN_SECRET_LEN)
    }

    /// The value of a variable, unless it is empty.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }
}

impl std::fmt::Debug for Settings {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The variables have secrets.
        out.debug_struct("Settings").field("deadline", &self.deadline).finish_non_exhaustive()
    }
}

fn invalid(name: &str, expected: &str, found: &str) -> Error {
    Error::InvalidArgument(format!(
        "the environment variable {name} must be {expected}, got {found:?}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(variables: &[(&str, &str)]) -> Result<Settings> {
        let owned = variables.iter().map(|&(name, value)| (name.to_owned(), value.to_owned()));
        Settings::from_variables(owned.collect())
    }

    #[test]
    fn variables_set_times_and_the_cache() {
        let default = settings(&[(STALL, "")]).unwrap();
        assert_eq!((default.deadline, default.cache), (Duration::from_secs(120), None));
        let set =
            settings(&[(DEADLINE, "1.5"), (STALL, "0.25"), (CACHE_DIR, "/c"), (CACHE_BYTES, "9")]);
        let set = set.unwrap();
        assert_eq!(
            (set.deadline, set.stall),
            (Duration::from_millis(1500), Duration::from_millis(250))
        );
        assert_eq!(set.cache, Some((PathBuf::from("/c"), 9)));
    }

    #[test]
    fn invalid_values_name_their_variable() {
        for (name, value) in [
            (DEADLINE, "soon"),
            (STALL, "0"),
            (STALL, "-1"),
            (STALL, "inf"),
            (CACHE_BYTES, "1.5"),
            (MIN_RATE, "-1"),
            (MIN_RATE, "inf"),
            (MAX_IN_FLIGHT, "0"),
        ] {
            let error = settings(&[(name, value)]).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(value), "{error}");
        }
    }
}
