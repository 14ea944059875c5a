//! Requests for ranges of bytes, repeated until they succeed or a deadline has passed.
//!
//! A request that fails after some bytes continues with the next. The object must stay the one that
//! was opened, which the server checks where it can, and every answer is compared.

use std::cell::Cell;
use std::hash::{BuildHasher, RandomState};
use std::io::ErrorKind;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use grainmill_core::url::redacted;
use grainmill_core::{Error, Result, timeline};
use object_store::path::Path as ObjectPath;
use object_store::{Error as StoreError, GetOptions, GetRange, GetResult, ObjectMeta};
use tokio::time::{Instant, sleep, timeout};

use crate::access::Access;
use crate::client::{ACCESS, ANSWER, Answer, Client, chain};
use crate::location::Location;
use crate::pending::Pending;
use crate::settings::Settings;

/// The pause after the first failure, which doubles up to the maximum; a server may ask for more.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(10);
const MAX_RETRY_AFTER: Duration = Duration::from_secs(60);
/// A server that has never answered is not waited for as long as one that has: its name, or the way
/// to it, may be wrong.
const FIRST_ANSWER: Duration = Duration::from_secs(15);
/// How many bytes have to arrive so that the deadline counts anew.
const MIN_PROGRESS: u64 = 64 << 10;
/// Longer messages are cut: a server may send a page of HTML.
const MAX_TEXT_LEN: usize = 600;

/// How a request failed.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) kind: FailureKind,
    text: String,
    /// The HTTP status of the last answer; 0 if there was none.
    status: u16,
    retry_after: Option<Duration>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FailureKind {
    NotFound,
    Denied,
    Changed,
    /// The server does not send the part of an object that was requested.
    NoPart,
    /// There is an object that the request must not replace.
    Exists,
    NotImplemented,
    /// Repeating it would not help.
    Permanent,
    /// Without an answer from the server.
    Unanswered,
    /// The server is busy or broken, or the answer was incomplete.
    Transient,
}

impl Failure {
    pub(crate) fn new(kind: FailureKind, text: impl Into<String>) -> Self {
        Self { kind, text: text.into(), status: 0, retry_after: None }
    }

    /// That the server has not answered for as long as is waited.
    pub(crate) fn unanswered(stall: Duration) -> Self {
        let text = format!("no answer within {} s", stall.as_secs_f64());
        Self::new(FailureKind::Unanswered, text)
    }

    /// What `error` of the last request of this task means.
    pub(crate) fn of(error: &StoreError) -> Self {
        let Answer { status, retry_after } = ANSWER.with(Cell::get);
        let kind = match (error, status) {
            (StoreError::NotSupported { .. }, _) | (_, 200) => {
                let text = "the server does not serve ranges of bytes";
                return Self::new(FailureKind::NoPart, format!("{text} ({})", chain(error)));
            }
            // Not by the status: that may be of a service that has the credentials.
            (StoreError::NotFound { .. }, _) => FailureKind::NotFound,
            (_, 401 | 403) => FailureKind::Denied,
            (_, 412 | 416) => FailureKind::Changed,
            (StoreError::Generic { .. }, 0) => FailureKind::Unanswered,
            (_, 408 | 429) => FailureKind::Transient,
            (_, 0 | 300..=499 | 501 | 505) => FailureKind::Permanent,
            _ => FailureKind::Transient,
        };
        Self { kind, text: chain(error), status, retry_after }
    }

    /// What `error` of the last request of this task means, which was to list.
    pub(crate) fn of_list(error: &StoreError) -> Self {
        let failure = Self::of(error);
        match failure.kind {
            FailureKind::NoPart => {
                let text = format!("the answer is no list of objects ({})", chain(error));
                Self::new(FailureKind::Permanent, text)
            }
            _ if failure.status == 404 => Self { kind: FailureKind::NotFound, ..failure },
            _ => failure,
        }
    }

    /// What `error` of the last request of this task means, which was to write.
    pub(crate) fn of_write(error: &StoreError) -> Self {
        let Answer { status, retry_after } = ANSWER.with(Cell::get);
        let text = chain(error);
        let kind = match status {
            // Not by the status: that may be of a service that has the credentials, or of a batch.
            _ if matches!(error, StoreError::NotFound { .. }) => FailureKind::NotFound,
            // The environment has disabled conditional writes: there was no request.
            _ if matches!(error, StoreError::NotImplemented { .. }) => FailureKind::NotImplemented,
            // Parts that are not there, or not any more as they are an object.
            400 if text.contains("InvalidBlockList") => FailureKind::NotFound,
            // Azure has one status for an object that exists and for requests that exclude each other.
            409 if text.contains("BlobAlreadyExists") => FailureKind::Exists,
            304 | 412 => FailureKind::Exists,
            401 | 403 => FailureKind::Denied,
            501 => FailureKind::NotImplemented,
            0 if matches!(error, StoreError::Generic { .. }) => FailureKind::Unanswered,
            // S3 says so if it has waited for the body for too long; and it may state an error in
            // the body of an answer that has begun as a success.
            400 if text.contains("RequestTimeout") => FailureKind::Transient,
            200..=299 | 408 | 409 | 429 => FailureKind::Transient,
            0 | 300..=499 | 505 => FailureKind::Permanent,
            _ => FailureKind::Transient,
        };
        Self { kind, text, status, retry_after }
    }

    /// For requests whose error does not say that something is not there: the status does.
    pub(crate) fn or_not_found(self) -> Self {
        let kind = if self.status == 404 { FailureKind::NotFound } else { self.kind };
        Self { kind, ..self }
    }
}

/// The attempts of one request.
#[derive(Debug)]
pub(crate) struct Attempts<'a> {
    client: &'a Client,
    settings: &'a Settings,
    /// The URL, for messages.
    shown: &'a str,
    access: Access,
    action: &'static str,
    /// From when on the deadline counts.
    started: Instant,
    /// How many have failed since.
    pub(crate) count: u32,
    /// How many bytes the first one has sent, which were sent in vain.
    pub(crate) sent: AtomicU64,
    pending: Pending,
}

impl<'a> Attempts<'a> {
    pub(crate) fn new(
        client: &'a Client,
        settings: &'a Settings,
        shown: &'a str,
        action: &'static str,
    ) -> Self {
        let access = Access::default();
        let (started, sent, pending) = (Instant::now(), AtomicU64::new(0), Pending::new(shown));
        Self { client, settings, shown, access, action, started, count: 0, sent, pending }
    }

    /// Counts the deadline anew: what has arrived until now is not requested again.
    fn go_on(&mut self) {
        (self.started, self.count) = (Instant::now(), 0);
    }

    /// Says in reports that something has come since they began.
    pub(crate) fn has_progressed(&self) {
        self.pending.has_progressed();
    }

    /// As these, of requests that have `access`.
    pub(crate) fn with_access(self, access: &Access) -> Self {
        Self { access: access.clone(), ..self }
    }

    /// Runs one attempt; gives up one that sends nothing for too long.
    pub(crate) async fn run<T>(
        &self,
        attempt: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let attempt = ACCESS.scope(self.access.clone(), attempt);
        let result = ANSWER.scope(Cell::default(), attempt).await;
        if !matches!(&result, Err(Failure { kind: FailureKind::Unanswered, .. })) {
            self.client.has_answered.store(true, Ordering::Relaxed);
        }
        result
    }

    /// Waits before the next attempt.
    ///
    /// # Errors
    /// If there should be none. The message says what was requested, as `what` tells.
    pub(crate) async fn after(
        &mut self,
        failure: Failure,
        what: impl FnOnce() -> String,
    ) -> Result<()> {
        self.count += 1;
        self.pending.has_failed();
        if self.count == 1 && self.sent.load(Ordering::Relaxed) >= MIN_PROGRESS {
            // What has taken long to send is sent again at least once.
            self.started = Instant::now();
        }
        let limit = match failure.kind {
            FailureKind::Transient => self.settings.deadline,
            FailureKind::Unanswered if self.client.has_answered.load(Ordering::Relaxed) => {
                self.settings.deadline
            }
            FailureKind::Unanswered => self.settings.deadline.min(FIRST_ANSWER),
            _ => Duration::ZERO,
        };
        let pause =
            pause(self.count).max(failure.retry_after.unwrap_or_default().min(MAX_RETRY_AFTER));
        let elapsed = self.started.elapsed();
        if elapsed + pause < limit {
            sleep(pause).await;
            return Ok(());
        }
        if failure.kind == FailureKind::Changed {
            return Err(Error::Changed { path: self.shown.to_owned() });
        }
        let kind = match failure.kind {
            FailureKind::NotFound => ErrorKind::NotFound,
            FailureKind::Denied => ErrorKind::PermissionDenied,
            _ => ErrorKind::Other,
        };
        let mut text = format!("{}{}", what(), cut(&self.without_secrets(&failure.text)));
        if self.count > 1 {
            let seconds = elapsed.as_secs_f64();
            text = format!("{text} ({} attempts in {seconds:.1} s)", self.count);
        }
        Err(Error::io(self.shown, self.action, std::io::Error::new(kind, text)))
    }
}

impl Attempts<'_> {
    /// `text`, in which a server may have repeated what it was sent.
    fn without_secrets(&self, text: &str) -> String {
        let mut text = redacted(text).into_owned();
        for secret in self.access.secrets().into_iter().chain(self.settings.secrets()) {
            text = text.replace(&secret, "...");
        }
        text
    }
}

/// The pause after `count` failures, a random part of it left out so that not all clients of a busy
/// server return at the same time.
fn pause(count: u32) -> Duration {
    let longest = FIRST_PAUSE.saturating_mul(1 << (count - 1).min(16)).min(MAX_PAUSE);
    // The keys of each `RandomState` differ.
    let [random, ..] = RandomState::new().hash_one(count).to_le_bytes();
    longest / 2 + longest.mul_f64(f64::from(random) / 512.0)
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(MAX_TEXT_LEN) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text.to_owned(),
    }
}

/// An object as it was when it was opened.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub(crate) path: ObjectPath,
    pub(crate) shown: Arc<str>,
    pub(crate) access: Access,
    pub(crate) byte_len: u64,
    pub(crate) modified_ns: i64,
    pub(crate) e_tag: Option<String>,
}

impl Target {
    fn new(path: &ObjectPath, location: &Location, meta: &ObjectMeta) -> Self {
        Self {
            path: path.clone(),
            shown: location.shown.as_str().into(),
            access: location.access.clone(),
            byte_len: meta.size,
            modified_ns: modified_ns(meta),
            e_tag: meta.e_tag.clone(),
        }
    }

    /// Whether `meta` may be of the same content.
    fn is(&self, meta: &ObjectMeta) -> bool {
        let is_same = match (&self.e_tag, &meta.e_tag) {
            (Some(opened), Some(found)) => opened == found,
            _ => self.modified_ns == modified_ns(meta),
        };
        is_same && self.byte_len == meta.size
    }
}

fn modified_ns(meta: &ObjectMeta) -> i64 {
    meta.last_modified.timestamp_nanos_opt().unwrap_or_default()
}

/// Asks for the length of the object at `location` and its last `tail_len` bytes, where the server sends both at
/// once; else for the length only.
pub(crate) async fn open(
    client: Arc<Client>,
    settings: Arc<Settings>,
    location: Location,
    tail_len: u64,
) -> Result<(Target, Vec<Bytes>)> {
    let path = location.object()?;
    let attempts = Attempts::new(&client, &settings, &location.shown, "open");
    let mut attempts = attempts.with_access(&location.access);
    let (began, mut has_suffixes) = (timeline::begin(), true);
    loop {
        let attempt = async {
            let range = has_suffixes.then_some(GetRange::Suffix(tail_len));
            let options = GetOptions { head: range.is_none(), range, ..GetOptions::default() };
            let result = get(&client, &settings, &path, options).await?;
            let target = Target::new(&path, &location, &result.meta);
            let mut tail = Vec::new();
            if has_suffixes {
                let len = result.range.end - result.range.start;
                receive(result, len, &attempts, &mut tail, &mut 0).await?;
            }
            Ok((target, tail))
        };
        match attempts.run(attempt).await {
            Ok(opened) => {
                let (target, tail) = &opened;
                let tail_len: u64 = tail.iter().map(|bytes| bytes.len() as u64).sum();
                let range = target.byte_len.saturating_sub(tail_len)..target.byte_len;
                timeline::add_request(began, Path::new(&*target.shown), range);
                return Ok(opened);
            }
            // An empty object has no last bytes, some servers send all of them, some none.
            Err(Failure { kind: FailureKind::Changed | FailureKind::NoPart, .. })
                if has_suffixes =>
            {
                has_suffixes = false;
            }
            Err(failure) => attempts.after(failure, String::new).await?,
        }
    }
}

/// Reads `range` of an object, which it must have.
pub(crate) async fn read(
    client: Arc<Client>,
    settings: Arc<Settings>,
    target: Arc<Target>,
    range: Range<u64>,
) -> Result<Vec<Bytes>> {
    let attempts = Attempts::new(&client, &settings, &target.shown, "read");
    let mut attempts = attempts.with_access(&target.access);
    let (mut received, mut len, mut counted_len) = (Vec::new(), 0, 0);
    let (began, total) = (timeline::begin(), range.end - range.start);
    loop {
        let attempt = async {
            // An entity tag that is weak does not identify the bytes.
            let if_match = target.e_tag.clone().filter(|tag| !tag.starts_with("W/"));
            let left = GetRange::Bounded(range.start + len..range.end);
            let options = GetOptions { if_match, range: Some(left), ..GetOptions::default() };
            let result = get(&client, &settings, &target.path, options).await?;
            if !target.is(&result.meta) {
                return Err(Failure::new(FailureKind::Changed, "another object"));
            }
            receive(result, total - len, &attempts, &mut received, &mut len).await
        };
        match attempts.run(attempt).await {
            Ok(()) => {
                timeline::add_request(began, Path::new(&*target.shown), range);
                return Ok(received);
            }
            Err(failure) => {
                if len - counted_len >= MIN_PROGRESS {
                    counted_len = len;
                    attempts.go_on();
                }
                let what = || format!("{total} bytes at offset {}: ", range.start);
                attempts.after(failure, what).await?;
            }
        }
    }
}

async fn get(
    client: &Client,
    settings: &Settings,
    path: &ObjectPath,
    options: GetOptions,
) -> Result<GetResult, Failure> {
    match timeout(settings.stall, client.store.get_opts(path, options)).await {
        Ok(result) => result.map_err(|error| Failure::of(&error)),
        Err(_) => Err(Failure::unanswered(settings.stall)),
    }
}

/// Appends the body of `result`, which has `expected` bytes, to `received`, and counts them in `len`.
/// A server is given up that sends less than the settings ask for, also if it sends something.
async fn receive(
    result: GetResult,
    expected: u64,
    attempts: &Attempts<'_>,
    received: &mut Vec<Bytes>,
    len: &mut u64,
) -> Result<(), Failure> {
    let settings = attempts.settings;
    let (end, mut told_len) = (*len + expected, *len);
    let mut body = result.into_stream();
    let (mut check_at, mut checked_len) = (Instant::now() + settings.stall, *len);
    while *len < end {
        let so_far =
            || format!("after {} of {expected} bytes of the answer", expected - (end - *len));
        let Ok(next) = timeout(settings.stall, body.next()).await else {
            let text = format!("nothing for {} s {}", settings.stall.as_secs_f64(), so_far());
            return Err(Failure::new(FailureKind::Transient, text));
        };
        if Instant::now() >= check_at {
            let arrived = *len - checked_len;
            if arrived < settings.min_len {
                let stall = settings.stall.as_secs_f64();
                let text = format!("only {arrived} bytes in {stall} s, {}", so_far());
                return Err(Failure::new(FailureKind::Transient, text));
            }
            (check_at, checked_len) = (Instant::now() + settings.stall, *len);
        }
        match next {
            Some(Ok(bytes)) if bytes.len() as u64 <= end - *len => {
                *len += bytes.len() as u64;
                if *len - told_len >= MIN_PROGRESS {
                    told_len = *len;
                    attempts.has_progressed();
                }
                received.push(bytes);
            }
            Some(Ok(_)) => {
                let text = format!("more bytes than the {expected} requested");
                return Err(Failure::new(FailureKind::Permanent, text));
            }
            Some(Err(error)) => {
                let text = format!("{} {}", chain(&error), so_far());
                return Err(Failure::new(FailureKind::Transient, text));
            }
            None => {
                let text = format!("the connection ended {}", so_far());
                return Err(Failure::new(FailureKind::Transient, text));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_maximum_and_differ() {
        for count in 1..40 {
            let longest = FIRST_PAUSE.saturating_mul(1 << (count - 1).min(16)).min(MAX_PAUSE);
            let found = pause(count);
            assert!(found >= longest / 2 && found <= longest, "{count}: {found:?}");
        }
        let some: std::collections::HashSet<Duration> = (0..50).map(|_| pause(9)).collect();
        assert!(some.len() > 10);
    }

    #[test]
    fn long_messages_are_cut_between_characters() {
        assert_eq!(cut("short"), "short");
        assert_eq!(cut(&"ä".repeat(1000)).chars().count(), MAX_TEXT_LEN + 3);
    }
}
