//! The clients of buckets and servers, and the runtime that sends their requests.
//!
//! All of it is made anew in a forked child: threads and connections do not survive a fork.

use std::cell::Cell;
use std::collections::HashMap;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use grainmill_core::compute::num_cores;
use grainmill_core::io::{ReadQueue, StorageLimit};
use grainmill_core::process::PerProcess;
use grainmill_core::url::shown;
use grainmill_core::{Error, Result, interrupt};
use http::StatusCode;
use http::header::LOCATION;
use http_body_util::{BodyExt, Full, Limited};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, resolve_bucket_region};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse,
    HttpResponseBody, HttpService,
};
use object_store::gcp::{GcpCredential, GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::http::HttpBuilder;
use object_store::list::PaginatedListStore;
use object_store::multipart::MultipartStore;
use object_store::{ClientOptions, ObjectStore, RetryConfig, StaticCredentialProvider};
use reqwest::Url;
use reqwest::redirect::Policy;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Semaphore, oneshot};
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::timeout;

use crate::access::Access;
use crate::aws_profile;
use crate::list_names;
use crate::location::{Location, Service};
use crate::settings::Settings;

/// Threads that send and receive, and verify what was requested without a thread that waits; one
/// moves about a gigabyte a second.
const MAX_THREADS: usize = 8;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(4);
/// A server may close a connection that idles longer than this.
const MAX_IDLE: Duration = Duration::from_secs(30);
/// How many parts of large reads are in flight in a process, beside one for each read.
const MAX_SPARE_PARTS: usize = 16;
const MAX_REDIRECTS: usize = 10;
/// How long a request lasts that nobody waits for any more.
const GRACE: Duration = Duration::from_secs(1);
/// Answers other than parts of objects, such as lists, are not longer.
const MAX_ANSWER_LEN: usize = 64 << 20;
const USER_AGENT: &str = concat!("grainmill/", env!("CARGO_PKG_VERSION"));

/// What the clients of a process share.
#[derive(Debug)]
pub(crate) struct HttpRuntime {
    runtime: Runtime,
    /// For buckets, whose requests have credentials, and for servers.
    buckets: Http,
    servers: Http,
    pub(crate) spare_parts: Arc<Semaphore>,
}

static SHARED: PerProcess<std::result::Result<HttpRuntime, String>> =
    PerProcess::new(HttpRuntime::new);
static BUCKETS: PerProcess<Mutex<Buckets>> = PerProcess::new(Mutex::default);

/// By URL and settings.
type Buckets = HashMap<(String, Arc<Settings>), Arc<Bucket>>;

tokio::task_local! {
    /// What the server answered to the last request of a task.
    pub(crate) static ANSWER: Cell<Answer>;
    /// How many bytes of the bodies of this task's requests and of their answers have been
    /// transferred, if that is counted.
    pub(crate) static TRANSFERRED: Arc<AtomicU64>;
    /// What requests to a web server have beside the name of the file.
    pub(crate) static ACCESS: Access;
    /// Whether the answer is a list of objects.
    pub(crate) static LISTS: bool;
    /// Whether a request that completes an upload must not replace an object. `object_store` has no
    /// such argument.
    pub(crate) static IS_NEW: bool;
}

/// The head of an answer.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Answer {
    /// The HTTP status; 0 if there was no answer.
    pub(crate) status: u16,
    /// How long the server asks to wait.
    pub(crate) retry_after: Option<Duration>,
}

impl HttpRuntime {
    fn new() -> std::result::Result<Self, String> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(num_cores().min(MAX_THREADS))
            .thread_name("grainmill-http")
            .enable_all()
            .build()
            .map_err(|error| format!("cannot start threads that send requests: {error}"))?;
        // Fails if the program has chosen one already, which serves as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = |may_leave: bool| {
            let redirects = Policy::custom(move |attempt| {
                let previous = attempt.previous();
                let is_safe =
                    previous.last().is_none_or(|last| follows(last, attempt.url(), may_leave));
                if is_safe && previous.len() <= MAX_REDIRECTS {
                    attempt.follow()
                } else {
                    attempt.stop()
                }
            });
            let client = reqwest::Client::builder()
                .user_agent(USER_AGENT)
                .http1_only()
                .connect_timeout(CONNECT_TIMEOUT)
                .pool_idle_timeout(MAX_IDLE)
                .redirect(redirects)
                .referer(false) // it would tell the query of a signed URL to another server
                .build()
                .map_err(|error| format!("cannot create a client for HTTP: {}", chain(&error)))?;
            Ok::<_, String>(Http { client, may_leave })
        };
        let spare_parts = Arc::new(Semaphore::new(MAX_SPARE_PARTS));
        Ok(Self { runtime, buckets: client(false)?, servers: client(true)?, spare_parts })
    }

    pub(crate) fn get() -> Result<&'static Self> {
        SHARED.get().as_ref().map_err(|problem| {
            Error::io("requests", "start", std::io::Error::other(problem.clone()))
        })
    }

    /// Starts `work` on a thread of the runtime.
    pub(crate) fn start<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Started<T> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let task = self.spawn(async move {
            // Nobody may be waiting any more.
            let _ = sender.send(work.await);
        });
        Started { receiver, task: task.abort_handle() }
    }

    /// Runs `work` on a thread of the runtime; ends it soon if the work of the calling thread is cancelled.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        let (cancel, cancelled) = oneshot::channel::<()>();
        let hook = interrupt::on_cancel(move || drop(cancel));
        // A task is moved several times, and this is kilobytes long.
        let mut work = Box::pin(work);
        self.runtime.spawn(async move {
            if hook.is_some() {
                tokio::select! {
                    () = &mut work => return,
                    _ = cancelled => {}
                }
                // What is answered by then leaves its connection for others.
                let _ = timeout(GRACE, work).await;
            } else {
                work.await;
            }
        })
    }

    /// Starts `work`, which may wait, on a thread of its own.
    pub(crate) fn start_waiting<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Started<T> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let task = self.runtime.spawn_blocking(move || {
            let _ = sender.send(work());
        });
        Started { receiver, task: task.abort_handle() }
    }
}

/// Work on the runtime.
#[derive(Debug)]
pub(crate) struct Started<T> {
    receiver: mpsc::Receiver<Result<T>>,
    task: AbortHandle,
}

impl<T> Started<T> {
    /// Waits for the result; ends the work if the caller ends the wait.
    pub(crate) fn wait(self) -> Result<T> {
        let received = interrupt::wait(|interval| match self.receiver.recv_timeout(interval) {
            Err(RecvTimeoutError::Timeout) => None,
            received => Some(received),
        });
        match received {
            Ok(received) => received.unwrap_or_else(|_| Err(ended())),
            Err(interrupted) => {
                self.task.abort();
                Err(interrupted)
            }
        }
    }

    /// Waits for the result, whatever the caller would do: for work that soon ends.
    pub(crate) fn wait_through(self) -> Result<T> {
        self.receiver.recv().unwrap_or_else(|_| Err(ended()))
    }

    /// What ends the work if nobody needs its result.
    pub(crate) fn abort_handle(&self) -> AbortHandle {
        self.task.clone()
    }
}

/// Why there is no result.
fn ended() -> Error {
    if interrupt::is_cancelled() {
        return Error::Interrupted;
    }
    Error::Panicked("a thread that sends requests panicked".to_owned())
}

/// One client for all buckets, or all servers, with common connections; notes what servers answer.
#[derive(Debug, Clone)]
struct Http {
    client: reqwest::Client,
    /// Whether it follows a server that redirects it to another host.
    may_leave: bool,
}

/// Whether a client goes on from `last` to `next`.
fn follows(last: &Url, next: &Url, may_leave: bool) -> bool {
    let is_safe = next.scheme() == "https" || (next.scheme() == "http" && last.scheme() == "http");
    is_safe && (may_leave || last.origin() == next.origin())
}

impl HttpConnector for Http {
    fn connect(&self, _options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.clone()))
    }
}

#[async_trait]
impl HttpService for Http {
    async fn call(&self, mut request: HttpRequest) -> std::result::Result<HttpResponse, HttpError> {
        if let Ok(access) = ACCESS.try_with(Access::clone) {
            access.add_to(&mut request)?;
        }
        let note = |answer| {
            // Requests for credentials may be sent from other tasks.
            let _ = ANSWER.try_with(|last| last.set(answer));
        };
        note(Answer::default());
        let response = match TRANSFERRED.try_with(Arc::clone) {
            Ok(transferred) => self.send_counted(request, transferred).await?,
            Err(_) => HttpService::call(&self.client, request).await?,
        };
        let retry_after = response.headers().get("retry-after");
        let retry_after = retry_after.and_then(|value| value.to_str().ok()?.trim().parse().ok());
        let retry_after = retry_after.map(Duration::from_secs);
        note(Answer { status: response.status().as_u16(), retry_after });
        if response.status().is_redirection()
            && let Some(next) = response.headers().get(LOCATION)
        {
            let refused = self.redirected(&String::from_utf8_lossy(next.as_bytes()));
            return Err(HttpError::new(HttpErrorKind::Unknown, std::io::Error::other(refused)));
        }
        if response.status() == StatusCode::PARTIAL_CONTENT {
            return Ok(response); // its length is compared
        }
        let (head, body) = response.into_parts();
        let body = Limited::new(body, MAX_ANSWER_LEN);
        let body = body.map_err(failed);
        if !LISTS.try_with(|lists| *lists).unwrap_or(false) || !head.status.is_success() {
            return Ok(HttpResponse::from_parts(head, HttpResponseBody::new(body)));
        }
        let page = body.collect().await?.to_bytes();
        let page = Full::new(list_names::escaped(&page).into());
        let page = page.map_err(|never| HttpError::new(HttpErrorKind::Unknown, never));
        Ok(HttpResponse::from_parts(head, HttpResponseBody::new(page)))
    }
}

fn failed(error: Box<dyn std::error::Error + Send + Sync>) -> HttpError {
    HttpError::new(HttpErrorKind::Unknown, std::io::Error::other(error))
}

impl Http {
    /// That this client does not go where a server has redirected it.
    fn redirected(&self, next: &str) -> String {
        let problem = match Url::parse(next) {
            Ok(url) if !["http", "https"].contains(&url.scheme()) => "which is not of HTTP",
            _ if !self.may_leave => {
                "which is not followed since it would get the credentials; set the endpoint, or the \
                 region, of the bucket"
            }
            Ok(url) if url.scheme() == "http" => {
                "which is not followed from `https` since others could read what is sent there"
            }
            _ => "after more redirects than are followed",
        };
        format!("redirected to {}, {problem}", shown(next))
    }

    /// Sends a request, and counts in `transferred` what is sent of its body, and received.
    async fn send_counted(
        &self,
        request: HttpRequest,
        transferred: Arc<AtomicU64>,
    ) -> std::result::Result<HttpResponse, HttpError> {
        let failed = |error: reqwest::Error| HttpError::new(HttpErrorKind::Unknown, error);
        let (head, body) = request.into_parts();
        let url = reqwest::Url::parse(&head.uri.to_string())
            .map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))?;
        let completes = head.method == reqwest::Method::POST
            && url.query_pairs().any(|(name, _)| name == "uploadId");
        let mut request = reqwest::Request::new(head.method, url);
        *request.headers_mut() = head.headers;
        if completes && IS_NEW.try_with(|is_new| *is_new).unwrap_or(false) {
            let any = reqwest::header::HeaderValue::from_static("*");
            request.headers_mut().insert(reqwest::header::IF_NONE_MATCH, any);
        }
        *request.body_mut() = Some(match body.as_bytes() {
            Some(bytes) => bytes.clone().into(),
            None => reqwest::Body::wrap(counted(body, Arc::clone(&transferred))),
        });
        let response: http::Response<reqwest::Body> =
            self.client.execute(request).await.map_err(failed)?.into();
        let (head, body) = response.into_parts();
        let body = counted(body.map_err(failed), transferred);
        Ok(HttpResponse::from_parts(head, HttpResponseBody::new(body)))
    }
}

fn counted<B: BodyExt<Data = Bytes>>(
    body: B,
    transferred: Arc<AtomicU64>,
) -> impl BodyExt<Data = Bytes, Error = B::Error> {
    body.map_frame(move |frame| {
        let len = frame.data_ref().map_or(0, |data| data.len() as u64);
        transferred.fetch_add(len, Ordering::Relaxed);
        frame
    })
}

/// A bucket, or a server, and how it is reached.
#[derive(Debug)]
pub(crate) struct Bucket {
    location: Location,
    pub(crate) settings: Arc<Settings>,
    /// How many reads of it may be in flight.
    pub(crate) limit: Arc<StorageLimit>,
    client: PerProcess<Mutex<Option<Arc<Client>>>>,
}

/// Sends requests to a bucket.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) store: Arc<dyn ObjectStore>,
    pub(crate) lister: Option<Lister>,
    pub(crate) uploader: Option<Uploader>,
    /// Whether the server has ever answered.
    pub(crate) has_answered: AtomicBool,
}

/// Lists the names of objects page by page.
#[derive(Clone)]
pub(crate) struct Lister(pub(crate) Arc<dyn PaginatedListStore>);

impl std::fmt::Debug for Lister {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Lister").finish_non_exhaustive()
    }
}

/// Writes objects part by part.
#[derive(Clone)]
pub(crate) struct Uploader(pub(crate) Arc<dyn MultipartStore>);

impl std::fmt::Debug for Uploader {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Uploader").finish_non_exhaustive()
    }
}

type StoreInterfaces = (Arc<dyn ObjectStore>, Option<Lister>, Option<Uploader>);

impl Bucket {
    /// The bucket of `location`, one for all objects in it.
    pub(crate) fn of(location: &Location, settings: &Arc<Settings>) -> Arc<Self> {
        let mut buckets = BUCKETS.lock();
        let new = || {
            let mut location = location.clone();
            (location.key, location.access) = (String::new(), Access::default());
            let client = PerProcess::new(Mutex::default);
            let limit = Arc::new(StorageLimit::new(settings.max_in_flight));
            Arc::new(Self { location, settings: Arc::clone(settings), limit, client })
        };
        let key = (location.base.clone(), Arc::clone(settings));
        Arc::clone(buckets.entry(key).or_insert_with(new))
    }

    /// The queue of requests that nobody else has counted.
    pub(crate) fn queue(&self) -> ReadQueue {
        ReadQueue::of_process().in_storage(Some(Arc::clone(&self.limit)))
    }

    /// The client of this process.
    pub(crate) fn client(&self) -> Result<Arc<Client>> {
        let mut client = self.client.lock();
        if let Some(client) = &*client {
            return Ok(Arc::clone(client));
        }
        let shared = HttpRuntime::get()?;
        let (store, lister, uploader) = self.connect(shared).map_err(|error| {
            Error::io(&self.location.base, "connect", std::io::Error::other(chain(&error)))
        })?;
        let has_answered = AtomicBool::new(false);
        let created = Arc::new(Client { store, lister, uploader, has_answered });
        Ok(Arc::clone(client.insert(created)))
    }

    fn connect(&self, shared: &HttpRuntime) -> object_store::Result<StoreInterfaces> {
        let settings = &self.settings;
        let http = match self.location.service {
            Service::Http => shared.servers.clone(),
            _ => shared.buckets.clone(),
        };
        // Repeated by `fetch`, which knows what was received already.
        let retry = RetryConfig { max_retries: 0, ..RetryConfig::default() };
        let Location { base, bucket, .. } = &self.location;
        Ok(match self.location.service {
            Service::S3 => {
                let builder = self.s3(shared);
                for key in [AmazonS3ConfigKey::Endpoint, AmazonS3ConfigKey::S3Endpoint] {
                    check_endpoint(builder.get_config_value(&key).as_deref())?;
                }
                let builder = builder.with_http_connector(http).with_retry(retry);
                interfaces_of(Arc::new(builder.with_bucket_name(bucket).build()?))
            }
            Service::Google => {
                let mut builder = GoogleCloudStorageBuilder::new();
                for (name, value) in settings.starting_with("GOOGLE_") {
                    if let Ok(key) = name.parse() {
                        builder = builder.with_config(key, value);
                    }
                }
                if let Some(path) = settings.get("SERVICE_ACCOUNT") {
                    builder = builder.with_service_account_path(path);
                }
                if let Some(host) = settings.get("STORAGE_EMULATOR_HOST") {
                    let scheme = if host.contains("://") { "" } else { "http://" };
                    let base = format!("{scheme}{}", host.trim_end_matches('/'));
                    // Requests that write ask for credentials all the same.
                    let none = GcpCredential { bearer: "none".to_owned() };
                    let none = Arc::new(StaticCredentialProvider::new(none));
                    builder = builder.with_base_url(&base).with_skip_signature(true);
                    builder = builder.with_credentials(none);
                }
                check_endpoint(builder.get_config_value(&GoogleConfigKey::BaseUrl).as_deref())?;
                let builder = builder.with_http_connector(http).with_retry(retry);
                interfaces_of(Arc::new(builder.with_bucket_name(bucket).build()?))
            }
            Service::Azure => {
                let mut builder = MicrosoftAzureBuilder::new();
                for (name, value) in settings.starting_with("AZURE_") {
                    if let Ok(key) = name.parse() {
                        builder = builder.with_config(key, value);
                    }
                }
                check_endpoint(builder.get_config_value(&AzureConfigKey::Endpoint).as_deref())?;
                if let Some(endpoint) = settings.get("IDENTITY_ENDPOINT") {
                    builder = builder.with_msi_endpoint(endpoint);
                }
                let builder = builder.with_http_connector(http).with_retry(retry);
                // Of the form `container@account...` in the URLs of a data lake.
                let builder = if bucket.contains('@') {
                    builder.with_url(base)
                } else {
                    builder.with_container_name(bucket)
                };
                interfaces_of(Arc::new(builder.build()?))
            }
            Service::Http => {
                check_endpoint(Some(base))?;
                let builder = HttpBuilder::new().with_url(base).with_http_connector(http);
                (Arc::new(builder.with_retry(retry).build()?), None, None)
            }
        })
    }

    /// The options of S3: the environment, then the user's profile; a region that neither names is
    /// asked for.
    fn s3(&self, shared: &HttpRuntime) -> AmazonS3Builder {
        let settings = &self.settings;
        // Services that imitate S3 have no requests that remove many objects.
        let mut builder = AmazonS3Builder::new().with_disable_bulk_delete(true);
        for (name, value) in settings.starting_with("AWS_") {
            if let Ok(key) = name.parse() {
                builder = builder.with_config(key, value);
            }
        }
        let has_credentials = ["AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"]
            .iter()
            .any(|name| settings.get(name).is_some());
        for (name, value) in aws_profile::options(|name| settings.get(name)) {
            let Ok(key) = name.parse::<AmazonS3ConfigKey>() else { continue };
            let is_credential = name.starts_with("aws_");
            let is_unset = builder.get_config_value(&key).is_none();
            if if is_credential { !has_credentials } else { is_unset } {
                builder = builder.with_config(key, value);
            }
        }
        let is_unset = |key| builder.get_config_value(&key).is_none();
        if is_unset(AmazonS3ConfigKey::Region) {
            if let Some(region) = settings.get("AWS_DEFAULT_REGION") {
                return builder.with_region(region);
            }
            if is_unset(AmazonS3ConfigKey::Endpoint) && is_unset(AmazonS3ConfigKey::S3Endpoint) {
                let bucket = self.location.bucket.clone();
                let ask = async move {
                    let options = ClientOptions::new();
                    let region = resolve_bucket_region(&bucket, &options);
                    Ok(tokio::time::timeout(CONNECT_TIMEOUT, region).await)
                };
                // Without an answer the default region is tried, and the error is that of a request.
                if let Ok(Ok(Ok(region))) = shared.start(ask).wait_through() {
                    return builder.with_region(region);
                }
            }
        }
        builder
    }
}

/// Checks the URL of a service, of which `object_store` takes for granted that it is one.
fn check_endpoint(endpoint: Option<&str>) -> object_store::Result<()> {
    let Some(endpoint) = endpoint else { return Ok(()) };
    let has_host = reqwest::Url::parse(endpoint).is_ok_and(|url| url.has_host());
    let is_valid =
        has_host && ["http://", "https://"].iter().any(|scheme| endpoint.starts_with(scheme));
    is_valid.then_some(()).ok_or_else(|| {
        let text = format!("the endpoint must be a URL such as `https://host`, got {endpoint:?}");
        object_store::Error::Generic { store: "endpoint", source: text.into() }
    })
}

fn interfaces_of<T: ObjectStore + PaginatedListStore + MultipartStore>(
    store: Arc<T>,
) -> StoreInterfaces {
    let lister = Lister(Arc::clone(&store) as Arc<dyn PaginatedListStore>);
    let uploader = Uploader(Arc::clone(&store) as Arc<dyn MultipartStore>);
    (store, Some(lister), Some(uploader))
}

/// The text of `error` with those of its causes that it leaves out.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}
