//! URLs of objects: the service, the bucket or server, and the name of the object there.

use grainmill_core::url::shown;
use grainmill_core::{Error, Result};
use object_store::path::{Path as ObjectPath, PathPart};
use reqwest::Url;

use crate::access::Access;

const BAD_PART: &str = "objects whose names begin with `/`, or have `//`, a part `.` or `..`, or a \
                        control character are listed, but cannot be read; copy it to another name";

/// A kind of service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Service {
    S3,
    Google,
    Azure,
    Http,
}

/// Where an object is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Location {
    pub(crate) service: Service,
    /// The URL up to the name of the object: its bucket, or its server.
    pub(crate) base: String,
    /// The bucket or container; empty for a server.
    pub(crate) bucket: String,
    /// The name of the object, with `/` between its parts.
    pub(crate) key: String,
    /// The URL for messages.
    pub(crate) shown: String,
    /// What requests to a web server have beside the name: secrets.
    pub(crate) access: Access,
}

/// Whether `path` is a URL of a supported kind instead of the path of a local file.
pub fn is_url(path: &str) -> bool {
    split_scheme(path).is_some()
}

fn split_scheme(url: &str) -> Option<(Service, &str)> {
    let (scheme, rest) = url.split_once("://")?;
    let service = match &*scheme.to_ascii_lowercase() {
        "s3" | "s3a" => Service::S3,
        "gs" | "gcs" => Service::Google,
        "az" | "abfs" | "abfss" => Service::Azure,
        "http" | "https" => Service::Http,
        _ => return None,
    };
    Some((service, rest))
}

impl Location {
    /// Parses `url`. The key of an object in a bucket is taken as it is; the path of a URL of a
    /// server is percent-encoded.
    pub(crate) fn parse(url: &str) -> Result<Self> {
        let shown = shown(url);
        let invalid = |problem: &str| Error::InvalidArgument(format!("{shown}: {problem}"));
        let (service, rest) = split_scheme(url).ok_or_else(|| invalid("not a supported URL"))?;
        let scheme = url[..url.len() - rest.len()].to_ascii_lowercase();
        if service == Service::Http {
            let rest = rest.split_once('#').map_or(rest, |(rest, _)| rest);
            let (named, _) = rest.split_once('?').unwrap_or((rest, ""));
            let (server, key) = named.split_once('/').unwrap_or((named, ""));
            let server = server.rsplit_once('@').map_or(server, |(_, server)| server);
            if server.is_empty() {
                return Err(invalid("it names no server"));
            }
            // What it says of an invalid URL, such as one with a bad port, has no part of it.
            let parsed = Url::parse(url).map_err(|error| invalid(&error.to_string()))?;
            let has_empty_part = key.split('/').rev().skip(1).any(str::is_empty);
            let decoded = ObjectPath::from_url_path(key).ok().filter(|_| !has_empty_part);
            let decoded = decoded.ok_or_else(|| invalid(BAD_PART))?;
            let slash = if key.ends_with('/') { "/" } else { "" };
            return Ok(Self {
                service,
                base: format!("{scheme}{server}/"),
                bucket: String::new(),
                key: format!("{decoded}{slash}"),
                shown: shown.into_owned(),
                access: Access::of(&parsed),
            });
        }
        let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() {
            return Err(invalid("it names no bucket"));
        }
        if shown != url || (service != Service::Azure && bucket.contains('@')) {
            return Err(invalid(
                "the URL of a bucket has no user and password; set the environment variables of \
                 its service",
            ));
        }
        Ok(Self {
            service,
            base: format!("{scheme}{bucket}"),
            bucket: bucket.to_owned(),
            key: key.to_owned(),
            shown: url.to_owned(),
            access: Access::default(),
        })
    }

    /// The name of the object.
    pub(crate) fn object(&self) -> Result<ObjectPath> {
        let invalid = |problem: &str| Error::InvalidArgument(format!("{}: {problem}", self.shown));
        if self.key.is_empty() || self.key.ends_with('/') {
            return Err(invalid("it names no object; a directory has to be listed"));
        }
        let is_bad = |part: &str| part.is_empty() || PathPart::parse(part).is_err();
        if self.key.split('/').any(is_bad) {
            return Err(invalid(BAD_PART));
        }
        ObjectPath::parse(&self.key).map_err(|error| invalid(&error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_urls_of_known_services_are_urls() {
        for url in ["s3://b/k", "gs://b/k", "az://c/k", "http://h/k", "https://h/k", "s3://b"] {
            assert!(is_url(url), "{url}");
        }
        for path in ["/data/s3://b/k", "s3:/b/k", "data/file", "ftp://h/k", "://", ""] {
            assert!(!is_url(path), "{path}");
        }
    }

    #[test]
    fn urls_have_a_base_and_a_key() {
        let parts = |url| {
            let Location { base, bucket, key, shown, .. } = Location::parse(url).unwrap();
            (base, bucket, key, shown)
        };
        let of = |a: &str, b: &str, c: &str, d: &str| (a.into(), b.into(), c.into(), d.into());
        assert_eq!(parts("s3://b/x/y%20z?w"), of("s3://b", "b", "x/y%20z?w", "s3://b/x/y%20z?w"));
        assert_eq!(
            parts("https://h:1/a%20b/c?sig=secret#x"),
            of("https://h:1/", "", "a b/c", "https://h:1/a%20b/c?...")
        );
        assert_eq!(parts("http://h"), of("http://h/", "", "", "http://h"));
    }

    #[test]
    fn urls_without_an_object_are_errors() {
        let parts = ["http://h//x", "http://h/x//y", "http://h:x/y", "http://h/../x"];
        let secrets = ["s3://key:sesame@b/x", "s3://sesame@b/x", "az://c:sesame@a/x"];
        for url in ["s3://", "http:///x"].iter().chain(&parts).chain(&secrets) {
            let error = Location::parse(url).unwrap_err().to_string();
            assert!(!error.contains("sesame"), "{error}");
        }
        for url in [
            "s3://b",
            "s3://b/",
            "gs://b/x/",
            "http://h/",
            "s3://b/x//y",
            "s3://b//x",
            "s3://b/../x",
        ] {
            let error = Location::parse(url).unwrap().object().unwrap_err().to_string();
            assert!(error.starts_with(url), "{error}");
        }
    }
}
