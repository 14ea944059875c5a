//! The objects of a bucket by the start of their names.

use std::collections::HashSet;
use std::sync::Arc;

use grainmill_core::{Error, Result};
use object_store::ObjectMeta;
use object_store::list::PaginatedListOptions;
use tokio::time::timeout;

use crate::client::{Bucket, Client, HttpRuntime, LISTS, Lister};
use crate::fetch::{Attempts, Failure};
use crate::list_names;
use crate::location::Location;
use crate::settings::Settings;

/// How many pages without an object may follow each other, and how many objects a list may have.
const MAX_EMPTY: usize = 1000;
const MAX_OBJECTS: usize = 100_000_000;

/// The URLs and sizes in bytes of all objects whose URL starts with `prefix`, in order of their
/// URLs.
///
/// # Errors
/// If `prefix` names no bucket, or the service cannot be reached.
pub fn list(settings: &Arc<Settings>, prefix: &str) -> Result<Vec<(String, u64)>> {
    let location = Location::parse(prefix)?;
    let bucket = Bucket::of(&location, settings);
    let client = bucket.client()?;
    let Some(lister) = client.lister.clone() else {
        return Err(Error::InvalidArgument(format!(
            "{}: an HTTP server does not list its files; pass the URL of each",
            location.shown
        )));
    };
    let settings = Arc::clone(settings);
    let permit = bucket.queue().enter_anyway(); // the caller waits for one request at a time
    let pages = async move {
        let pages = all_pages(&client, &lister, &settings, &location).await;
        drop(permit);
        pages
    };
    HttpRuntime::get()?.start(pages).wait()
}

async fn all_pages(
    client: &Client,
    lister: &Lister,
    settings: &Settings,
    location: &Location,
) -> Result<Vec<(String, u64)>> {
    let (mut found, mut page_token) = (Vec::new(), None);
    let (mut seen, mut num_empty) = (HashSet::new(), 0);
    let endless = |problem: &str| {
        Error::io(&location.shown, "list", std::io::Error::other(problem.to_owned()))
    };
    loop {
        let mut attempts = Attempts::new(client, settings, &location.shown, "list");
        let page = loop {
            let attempt = async {
                let options = PaginatedListOptions {
                    page_token: page_token.clone(),
                    ..PaginatedListOptions::default()
                };
                let prefix = Some(location.key.as_str()).filter(|key| !key.is_empty());
                let page = lister.0.list_paginated(prefix, options);
                match timeout(settings.stall, LISTS.scope(true, page)).await {
                    Ok(page) => page.map_err(|error| Failure::of_list(&error)),
                    Err(_) => Err(Failure::unanswered(settings.stall)),
                }
            };
            match attempts.run(attempt).await {
                Ok(page) => break page,
                Err(failure) => attempts.after(failure, String::new).await?,
            }
        };
        let objects = page.result.objects.iter();
        let name = |object: &ObjectMeta| list_names::original(object.location.as_ref());
        let first = page.result.objects.first().map(name);
        found.extend(
            objects.map(|object| (format!("{}/{}", location.base, name(object)), object.size)),
        );
        if page.page_token.is_none() {
            break;
        }
        // A page that begins as one before does not end the list, nor do many without an object.
        num_empty = if first.is_none() { num_empty + 1 } else { 0 };
        if page.page_token == page_token || first.is_some_and(|first| !seen.insert(first)) {
            return Err(endless("the server repeats a page of the list, which never ends"));
        }
        if num_empty > MAX_EMPTY || found.len() > MAX_OBJECTS {
            return Err(endless("the list of the server does not end"));
        }
        page_token = page.page_token;
    }
    found.sort_unstable();
    Ok(found)
}
