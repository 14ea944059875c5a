//! The requests of this process that are not complete, for reports of waits that last.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use grainmill_core::lock::lock;
use grainmill_core::process::PerProcess;

/// What a request waits for.
#[derive(Debug, Clone)]
pub struct PendingRequest {
    /// The URL, without its secrets.
    pub url: String,
    /// How long it has waited, since it last received, or sent, a part worth mentioning.
    pub waited: Duration,
    /// How many attempts have failed in that time.
    pub num_retries: u32,
}

#[derive(Debug)]
struct Wait {
    url: String,
    wait: Mutex<(Instant, u32)>,
}

impl Wait {
    fn lock(&self) -> MutexGuard<'_, (Instant, u32)> {
        lock(&self.wait)
    }

    fn now(&self) -> PendingRequest {
        let (since, num_retries) = *self.lock();
        PendingRequest { url: self.url.clone(), waited: since.elapsed(), num_retries }
    }
}

type Requests = HashMap<u64, Arc<Wait>>;

static REQUESTS: PerProcess<Mutex<Requests>> = PerProcess::new(Mutex::default);

fn requests() -> MutexGuard<'static, Requests> {
    REQUESTS.lock()
}

/// A request as long as it is not complete.
#[derive(Debug)]
pub(crate) struct Pending {
    number: u64,
    state: Arc<Wait>,
}

impl Pending {
    pub(crate) fn new(url: &str) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let state = Arc::new(Wait { url: url.to_owned(), wait: Mutex::new((Instant::now(), 0)) });
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        requests().insert(number, Arc::clone(&state));
        Self { number, state }
    }

    /// Counts the time anew, since a part has come.
    pub(crate) fn has_progressed(&self) {
        *self.state.lock() = (Instant::now(), 0);
    }

    /// Counts an attempt that failed.
    pub(crate) fn has_failed(&self) {
        self.state.lock().1 += 1;
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        requests().remove(&self.number);
    }
}

/// The requests that somebody who has waited for `waited` may wait for: those that are not older, else
/// all. Older ones may be of reads that were abandoned, or for later.
fn requests_of(waited: Duration) -> Vec<PendingRequest> {
    let found = requests().values().map(|state| state.now()).collect::<Vec<_>>();
    let (recent, older): (Vec<_>, Vec<_>) =
        found.into_iter().partition(|request| request.waited <= waited);
    if recent.is_empty() { older } else { recent }
}

/// How long the longest wait of a request lasts that somebody who has waited for `waited` may wait for.
pub fn longest_wait(waited: Duration) -> Option<Duration> {
    requests_of(waited).iter().map(|request| request.waited).max()
}

/// The requests that somebody who has waited for `waited` may wait for: for each object the one that has
/// waited longest, those first that have.
pub fn pending_requests(waited: Duration) -> Vec<PendingRequest> {
    let mut found = requests_of(waited);
    found.sort_by(|one, other| (other.waited, &one.url).cmp(&(one.waited, &other.url)));
    let mut seen = HashSet::new();
    found.retain(|request| seen.insert(request.url.clone()));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    fn named(name: &str, waited: Duration) -> Option<PendingRequest> {
        pending_requests(waited).into_iter().find(|found| found.url == name)
    }

    #[test]
    fn requests_are_those_that_are_not_complete() {
        let (one, other) = (Pending::new("pending://one"), Pending::new("pending://one"));
        one.has_failed();
        one.has_failed();
        assert_eq!(named("pending://one", LONG).unwrap().num_retries, 2, "it waits longer");
        one.has_progressed();
        assert_eq!(named("pending://one", LONG).unwrap().num_retries, 0);
        drop((one, other));
        assert!(named("pending://one", LONG).is_none());
    }

    #[test]
    fn older_requests_than_a_wait_are_of_others_if_there_are_any() {
        let abandoned = Pending::new("pending://abandoned");
        abandoned.state.lock().0 -= Duration::from_secs(5);
        assert!(named("pending://abandoned", LONG).is_some());
        let awaited = Pending::new("pending://awaited");
        assert!(named("pending://awaited", Duration::from_secs(1)).is_some());
        assert!(named("pending://abandoned", Duration::from_secs(1)).is_none());
        assert!(longest_wait(Duration::from_secs(1)).unwrap() <= Duration::from_secs(1));
        drop((abandoned, awaited));
    }
}
