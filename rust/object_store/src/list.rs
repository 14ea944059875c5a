//! The objects of a bucket by the start of their names.

use std::sync::Arc;

use grainmill_core::{Error, Result};
use object_store::list::PaginatedListOptions;
use tokio::time::timeout;

use crate::client::{Bucket, Client, Lister, Shared};
use crate::fetch::{Attempts, Failure};
use crate::location::Location;
use crate::settings::Settings;

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
    let pages = async move { all_pages(&client, &lister, &settings, &location).await };
    Shared::get()?.start(pages).wait()
}

async fn all_pages(
    client: &Client,
    lister: &Lister,
    settings: &Settings,
    location: &Location,
) -> Result<Vec<(String, u64)>> {
    let (mut found, mut page_token) = (Vec::new(), None);
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
                match timeout(settings.stall, page).await {
                    Ok(page) => page.map_err(|error| Failure::of(&error).or_not_found()),
                    Err(_) => Err(Failure::unanswered(settings.stall)),
                }
            };
            match attempts.run(attempt).await {
                Ok(page) => break page,
                Err(failure) => attempts.after(failure, String::new).await?,
            }
        };
        let objects = page.result.objects.iter();
        found.extend(
            objects.map(|object| (format!("{}/{}", location.base, object.location), object.size)),
        );
        if page.page_token.is_none() {
            break;
        }
        page_token = page.page_token;
    }
    found.sort_unstable();
    Ok(found)
}
