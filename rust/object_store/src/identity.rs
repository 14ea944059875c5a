//! Length, time and tag of objects, which change when their content does.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use grainmill_core::Result;

use crate::client::{Bucket, HttpRuntime, Started};
use crate::fetch::{Target, open};
use crate::location::Location;
use crate::settings::Settings;

/// The length in bytes, the time in nanoseconds since 1970 and the tag of each object, as far as its
/// server states them.
pub type ObjectIdentity = (u64, i64, Option<String>);

/// The identities of the objects at `urls`.
///
/// # Errors
/// If one of them is not there, or its server cannot be reached.
pub fn identities(settings: &Arc<Settings>, urls: &[String]) -> Result<Vec<ObjectIdentity>> {
    let mut found = Vec::with_capacity(urls.len());
    let mut started = VecDeque::new();
    for url in urls {
        let location = Location::parse(url)?;
        let bucket = Bucket::of(&location, settings);
        let queue = bucket.queue();
        let permit = loop {
            if let Some(permit) = queue.enter() {
                break permit;
            }
            match started.pop_front() {
                Some(first) => found.push(finished(first)?),
                None => break queue.enter_anyway(), // others wait
            }
        };
        // Not all servers answer requests for headers only.
        let opened = open(bucket.client()?, Arc::clone(settings), location, 1);
        started.push_back(HttpRuntime::get()?.start(async move {
            let opened = opened.await;
            drop(permit);
            opened
        }));
    }
    for first in started {
        found.push(finished(first)?);
    }
    Ok(found)
}

fn finished(opened: Started<(Target, Vec<Bytes>)>) -> Result<ObjectIdentity> {
    let (target, _) = opened.wait()?;
    Ok((target.byte_len, target.modified_ns, target.e_tag))
}
