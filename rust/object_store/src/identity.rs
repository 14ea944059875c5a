//! Length, time and tag of objects, which change when their content does.

use std::sync::Arc;

use grainmill_core::Result;

use crate::client::{Bucket, HttpRuntime};
use crate::fetch::open;
use crate::location::Location;
use crate::settings::Settings;

const MAX_IN_FLIGHT: usize = 128;

/// The length in bytes, the time in nanoseconds since 1970 and the tag of each object, as far as its
/// server states them.
pub type ObjectIdentity = (u64, i64, Option<String>);

/// The identities of the objects at `urls`.
///
/// # Errors
/// If one of them is not there, or its server cannot be reached.
pub fn identities(settings: &Arc<Settings>, urls: &[String]) -> Result<Vec<ObjectIdentity>> {
    let mut found = Vec::with_capacity(urls.len());
    for urls in urls.chunks(MAX_IN_FLIGHT) {
        let start = |url: &String| {
            let location = Location::parse(url)?;
            let client = Bucket::of(&location, settings).client()?;
            // Not all servers answer requests for headers only.
            let opened = open(client, Arc::clone(settings), location, 1);
            Ok(HttpRuntime::get()?.start(opened))
        };
        let started: Vec<_> = urls.iter().map(start).collect::<Result<_>>()?;
        for opened in started {
            let (target, _) = opened.wait()?;
            found.push((target.byte_len, target.modified_ns, target.e_tag));
        }
    }
    Ok(found)
}
