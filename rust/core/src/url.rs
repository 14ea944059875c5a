//! URLs in texts: what of them is a secret is left out.
//!
//! The query of a URL may hold a signature, and what stands in front of its host a password.

use std::borrow::Cow;

/// What names a bucket, so that a question mark is a part of the name of an object.
const BUCKETS: [&str; 7] = ["s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"];
/// In front of the `@` is the container.
const WITH_CONTAINER: [&str; 3] = ["az", "abfs", "abfss"];
/// A URL in a text ends before one of these, or before white space.
const ENDS: [char; 7] = ['"', '\'', '`', '<', '>', ')', ']'];
/// What stands for a query.
pub const HIDDEN: &str = "?...";

/// `path` as messages, files and logs may have it: if it is a URL, without user and password, and with
/// [`HIDDEN`] in place of its query.
pub fn shown(path: &str) -> Cow<'_, str> {
    let Some((scheme, rest)) = path.split_once("://") else { return path.into() };
    let is_scheme = |c: char| c.is_ascii_alphanumeric() || "+-.".contains(c);
    if scheme.is_empty() || !scheme.chars().all(is_scheme) {
        return path.into();
    }
    let known = scheme.to_ascii_lowercase();
    let is_bucket = BUCKETS.contains(&&*known);
    let (named, hidden) = match rest.find(['?', '#']) {
        Some(at) if !is_bucket => {
            let has_query = rest[at..].starts_with('?') && rest.len() > at + 1;
            (&rest[..at], if has_query { HIDDEN } else { "" })
        }
        _ => (rest, ""),
    };
    let begin = user_len(named, WITH_CONTAINER.contains(&&*known));
    if begin == 0 && named.len() == rest.len() {
        return path.into();
    }
    format!("{scheme}://{}{hidden}", &named[begin..]).into()
}

/// The length of the user and the password in front of a host.
fn user_len(named: &str, has_container: bool) -> usize {
    let authority = named.split('/').next().unwrap_or_default();
    if let Some(at) = authority.rfind('@') {
        return if has_container && !authority[..at].contains(':') { 0 } else { at + 1 };
    }
    // A password with a slash: what seems to be a port is none.
    let port = authority.rsplit_once(':').map_or("", |(_, port)| port);
    let is_port = port.bytes().all(|byte| byte.is_ascii_digit()) || authority.ends_with(']');
    if is_port { 0 } else { named.rfind('@').map_or(0, |at| at + 1) }
}

/// `text` with its URLs as [`shown`] has them.
pub fn redacted(text: &str) -> Cow<'_, str> {
    let mut out = String::new();
    let mut left = text;
    while let Some(at) = left.find("://") {
        let is_scheme = |c: char| c.is_ascii_alphanumeric() || "+-.".contains(c);
        let begin = left[..at].trim_end_matches(is_scheme).len();
        let is_end = |c: char| c.is_whitespace() || ENDS.contains(&c);
        // The brackets of an address are a part of it.
        let host = at
            + 3
            + left[at + 3..]
                .find('[')
                .filter(|&open| open == 0)
                .map_or(0, |_| left[at + 3..].find(']').map_or(0, |close| close + 1));
        let end = left[host..].find(is_end).map_or(left.len(), |end| host + end);
        let url = left[begin..end].trim_end_matches([':', ',', ';']);
        out += &left[..begin];
        out += &shown(url);
        left = &left[begin + url.len()..];
    }
    if out.is_empty() { text.into() } else { (out + left).into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_not_shown_and_all_else_is() {
        for (path, expected) in [
            ("https://h:1/a%20b?sig=secret#x", "https://h:1/a%20b?..."),
            ("https://h/a#x?y", "https://h/a"),
            ("https://h/a?", "https://h/a"),
            ("HTTPS://user:secret@h/a?sig", "HTTPS://h/a?..."),
            ("http://user:se/cr@et@h/a", "http://h/a"),
            ("http://secret@[::1]:80/a@2", "http://[::1]:80/a@2"),
            ("http://[::1]/a@2", "http://[::1]/a@2"),
            ("http://h:80/a@2.x", "http://h:80/a@2.x"),
            ("ftp://user:secret@h/a?secret", "ftp://h/a?..."),
            ("s3://b/what?.x", "s3://b/what?.x"),
            ("s3://key:secret@b/x", "s3://b/x"),
            ("abfss://c@account.net/x", "abfss://c@account.net/x"),
            ("abfss://c:secret@account.net/x", "abfss://account.net/x"),
            ("/data/a?b@c:d", "/data/a?b@c:d"),
            ("/data/http://h/a?b", "/data/http://h/a?b"),
        ] {
            assert_eq!(shown(path), expected);
            assert_eq!(shown(&shown(path)), expected);
        }
    }

    #[test]
    fn urls_in_texts_have_no_secrets() {
        let text = "https://h/a?k=v: for url (https://u:p@h/a?sig=secret): `http://[::1]:8/x?k=v` s3://b/a?b, no URL: x://";
        let expected = "https://h/a?...: for url (https://h/a?...): `http://[::1]:8/x?...` s3://b/a?b, no URL: x://";
        assert_eq!(redacted(text), expected);
        assert_eq!(redacted(expected), expected);
        assert_eq!(redacted("a ? b @ c"), "a ? b @ c");
    }
}
