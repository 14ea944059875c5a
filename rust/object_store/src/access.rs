//! What requests to a web server have beside the name of a file: the query of a signed URL, a user and
//! a password. They are added to each request where it is sent, and are nowhere else.

use std::sync::Arc;

use object_store::client::{HttpError, HttpErrorKind, HttpRequest};
use reqwest::Url;
use reqwest::header::{AUTHORIZATION, HeaderValue};

/// Values of a query that are shorter are no secrets.
const MIN_SECRET_LEN: usize = 6;

/// The secrets of a URL.
#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct Access(Option<Arc<Secrets>>);

#[derive(PartialEq, Eq)]
struct Secrets {
    query: Option<String>,
    password: Option<String>,
    /// The header that has user and password.
    authorization: Option<String>,
}

impl std::fmt::Debug for Access {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_tuple("Access").finish_non_exhaustive()
    }
}

impl Access {
    /// Those of `url`.
    pub(crate) fn of(url: &Url) -> Self {
        let query = url.query().filter(|query| !query.is_empty()).map(str::to_owned);
        let has_user = !url.username().is_empty() || url.password().is_some();
        let password = url.password().map(decoded);
        let authorization = has_user.then(|| {
            let user = decoded(url.username());
            let both = format!("{user}:{}", password.as_deref().unwrap_or_default());
            format!("Basic {}", base64(both.as_bytes()))
        });
        let has_any = query.is_some() || has_user;
        Self(has_any.then(|| Arc::new(Secrets { query, password, authorization })))
    }

    /// Adds them to a request.
    pub(crate) fn add_to(&self, request: &mut HttpRequest) -> Result<(), HttpError> {
        let failed =
            |text: &str| HttpError::new(HttpErrorKind::Request, std::io::Error::other(text));
        let Some(Secrets { query, authorization, .. }) = self.0.as_deref() else { return Ok(()) };
        if let Some(query) = query {
            let with_query = format!("{}?{query}", request.uri());
            let uri = with_query.parse().map_err(|_| failed("the query of the URL is invalid"))?;
            *request.uri_mut() = uri;
        }
        if let Some(authorization) = authorization {
            let header = HeaderValue::from_str(authorization);
            let mut header = header.map_err(|_| failed("the user of the URL is invalid"))?;
            header.set_sensitive(true);
            request.headers_mut().insert(AUTHORIZATION, header);
        }
        Ok(())
    }

    /// What no message may have: a server may answer with what it was sent.
    pub(crate) fn secrets(&self) -> Vec<String> {
        let Some(secrets) = self.0.as_deref() else { return Vec::new() };
        let Secrets { query, password, authorization } = secrets;
        let user =
            [password.clone(), authorization.as_ref().map(|text| text["Basic ".len()..].into())];
        let pairs = query.iter().flat_map(|query| query.split('&'));
        let values = pairs.map(|pair| pair.split_once('=').map_or(pair, |(_, value)| value));
        let values = values.flat_map(|value| [value.to_owned(), decoded(value)]);
        let values = values.chain(user.into_iter().flatten());
        values.filter(|value| value.len() >= MIN_SECRET_LEN).collect()
    }

    /// The query without what a signature consists of: it may say which file is meant.
    pub(crate) fn unsigned_query(&self) -> String {
        let query = self.0.as_deref().and_then(|secrets| secrets.query.as_deref());
        let pairs = query.unwrap_or_default().split('&');
        let of_file = |pair: &&str| {
            let name = pair.split('=').next().unwrap_or_default().to_ascii_lowercase();
            !SIGNED_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
                && !SIGNED_NAMES.contains(&&*name)
        };
        pairs.filter(of_file).collect::<Vec<_>>().join("&")
    }
}

/// The parts of signed URLs of Amazon (also those of its edge), Google and Azure.
const SIGNED_PREFIXES: [&str; 3] = ["x-amz-", "x-goog-", "x-ms-"];
const SIGNED_NAMES: [&str; 26] = [
    "signature",
    "expires",
    "key-pair-id",
    "policy",
    "googleaccessid",
    "awsaccesskeyid",
    "token",
    "access_token",
    "sig",
    "se",
    "st",
    "sp",
    "sv",
    "sr",
    "ss",
    "srt",
    "spr",
    "sip",
    "si",
    "skoid",
    "sktid",
    "skt",
    "ske",
    "sks",
    "skv",
    "sdd",
];

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::new();
    for group in bytes.chunks(3) {
        let bits = group.iter().fold(0, |bits, &byte| bits << 8 | usize::from(byte));
        let bits = bits << (8 * (3 - group.len()));
        for at in 0..4 {
            let digit = char::from(DIGITS[bits >> (18 - 6 * at) & 63]);
            out.push(if at <= group.len() { digit } else { '=' });
        }
    }
    out
}

fn decoded(text: &str) -> String {
    // A query is decoded as that of a form; a plus sign of a password is one.
    let escaped = text.replace('+', "%2B");
    let pair = format!("http://h/?{}", escaped.replace('&', "%26").replace('=', "%3D"));
    let url = Url::parse(&pair).ok();
    let first = url.and_then(|url| url.query_pairs().next().map(|(name, _)| name.into_owned()));
    first.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use object_store::client::HttpRequestBody;

    use super::*;

    fn access(url: &str) -> Access {
        Access::of(&Url::parse(url).unwrap())
    }

    #[test]
    fn secrets_are_added_to_requests_and_not_shown() {
        let access = access("https://u%40x:p+w%2F%3D%26%23@h/a?sig=a%2Fb%3D%3Dcd&short=1");
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        *request.uri_mut() = "https://h/a".parse().unwrap();
        access.add_to(&mut request).unwrap();
        assert_eq!(request.uri(), "https://h/a?sig=a%2Fb%3D%3Dcd&short=1");
        assert_eq!(request.headers()[AUTHORIZATION], "Basic dUB4OnArdy89JiM=");
        assert_eq!(access.secrets(), ["a%2Fb%3D%3Dcd", "a/b==cd", "p+w/=&#", "dUB4OnArdy89JiM="]);
        assert_eq!(format!("{access:?}"), "Access(..)");
    }

    #[test]
    fn query_without_its_signature_says_which_file_is_meant() {
        let query = |url| access(url).unsigned_query();
        assert_eq!(query("https://h/get?file=7&X-Amz-Signature=s&sig=1&x=2"), "file=7&x=2");
        assert_eq!(query("https://h/get?X-Goog-Date=1"), "");
        assert_eq!(query("https://h/get"), "");
    }
}
