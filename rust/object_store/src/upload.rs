//! Objects that are written: parts are sent while the next ones are made, and nothing is visible
//! before the last request, which makes all of them one object.
//!
//! Every request may be repeated, since its answer may have been lost. A part that is sent again replaces
//! itself; on Azure it has another name, and the first one is dropped with the last request. An object is
//! known to be this one by a random number among its attributes. Azure has none for an object made of
//! parts: there its length is compared, and that it is not the one that was there before.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use grainmill_core::io::storage::WriteFile;
use grainmill_core::{Error, Result};
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path as ObjectPath;
use object_store::{
    Attribute, Attributes, GetOptions, GetResult, ObjectMeta, ObjectStoreExt, PutMode,
    PutMultipartOptions, PutOptions, PutPayload,
};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use crate::client::{Bucket, Client, HttpRuntime, IS_NEW, Started, TRANSFERRED};
use crate::fetch::{Attempts, Failure, FailureKind};
use crate::location::{Location, Service};
use crate::settings::Settings;

/// The length of the first parts. Services take 10,000 parts, and some want them to be of equal
/// length, so they become longer where only the largest objects have any.
const PART_LEN: usize = 8 << 20;
const PARTS_OF_ONE_LEN: usize = 2000;
const MAX_PARTS: usize = 10_000;
/// How many parts of an object are sent at a time, if those of other objects leave room.
const MAX_IN_FLIGHT: usize = 4;
/// The unit in which progress is seen.
const FRAME_LEN: usize = 128 << 10;
/// For how long to try to remove the parts of a failed upload.
const ABORT_DEADLINE: Duration = Duration::from_secs(10);
/// How long a request may take that sends or receives next to nothing.
const MAX_SLOW: Duration = Duration::from_secs(600);
/// The attribute of an object that says which upload wrote it; not all services take punctuation.
const UPLOAD_ATTRIBUTE: &str = "grainmillupload";
const ENDED: &str = "the upload was ended";

/// An object that is being written.
///
/// It is visible, with all of its bytes, once it is closed; if it is dropped instead, its parts are
/// removed. A part and those that are being sent are in memory, 40 MiB at most for objects of up to
/// 16 GB.
#[derive(Debug)]
pub struct Upload {
    target: Arc<Target>,
    control: UploadControl,
    buffer: Vec<u8>,
    num_parts: usize,
    sending: VecDeque<Started<PartId>>,
    sent: Vec<PartId>,
    /// Why a part is missing, so that nothing can be written any more.
    failure: Option<(io::ErrorKind, String)>,
    is_complete: bool,
    process: u32,
}

/// What other threads see and do of an upload.
#[derive(Debug, Clone)]
pub struct UploadControl(Arc<Control>);

#[derive(Debug)]
struct Control {
    is_cancelled: watch::Sender<bool>,
    id: OnceLock<String>,
    may_be_visible: AtomicBool,
    num_written: AtomicU64,
    num_sent: AtomicU64,
}

impl UploadControl {
    /// Makes the upload fail, also while it waits for the server.
    pub fn cancel(&self) {
        self.0.is_cancelled.send_replace(true);
    }

    /// What the service calls the upload, if it has parts.
    pub fn id(&self) -> Option<&str> {
        self.0.id.get().map(String::as_str)
    }

    /// Whether the request that makes the object visible has been sent, so that it is there unless that
    /// has failed.
    pub fn may_be_visible(&self) -> bool {
        self.0.may_be_visible.load(Ordering::Relaxed)
    }

    fn set_may_be_visible(&self, may_be: bool) {
        self.0.may_be_visible.store(may_be, Ordering::Relaxed);
    }

    /// How many bytes have been written to it.
    pub fn num_written(&self) -> u64 {
        self.0.num_written.load(Ordering::Relaxed)
    }

    /// How many of them the server has received.
    pub fn num_sent(&self) -> u64 {
        self.0.num_sent.load(Ordering::Relaxed)
    }
}

/// The object, and how it is written.
struct Target {
    client: Arc<Client>,
    store: Arc<dyn MultipartStore>,
    settings: Arc<Settings>,
    service: Service,
    path: ObjectPath,
    shown: String,
    replaces: bool,
    number: String,
}

impl Debug for Target {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_tuple("Target").field(&self.shown).finish()
    }
}

impl Upload {
    /// An object at `url`, which replaces an existing one if it `replaces`. Sends nothing yet.
    ///
    /// # Errors
    /// If `url` names no object in a bucket, or how to reach it is not known.
    pub fn new(url: &str, settings: Settings, replaces: bool) -> Result<Self> {
        let target = Arc::new(Target::new(url, Arc::new(settings), replaces)?);
        let (is_cancelled, _) = watch::channel(false);
        let control = UploadControl(Arc::new(Control {
            is_cancelled,
            id: OnceLock::new(),
            may_be_visible: AtomicBool::new(false),
            num_written: AtomicU64::new(0),
            num_sent: AtomicU64::new(0),
        }));
        Ok(Self {
            target,
            control,
            buffer: Vec::new(),
            num_parts: 0,
            sending: VecDeque::new(),
            sent: Vec::new(),
            failure: None,
            is_complete: false,
            process: std::process::id(),
        })
    }

    /// The URL, for messages.
    pub fn shown(&self) -> &str {
        &self.target.shown
    }

    /// What other threads may use.
    pub fn control(&self) -> UploadControl {
        self.control.clone()
    }

    fn part_len(&self) -> usize {
        PART_LEN << (self.num_parts / PARTS_OF_ONE_LEN)
    }

    /// Runs `work` on the runtime until it ends or the upload is cancelled.
    fn start<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<Started<T>> {
        let mut is_cancelled = self.control.0.is_cancelled.subscribe();
        let target = Arc::clone(&self.target);
        Ok(HttpRuntime::get()?.start(async move {
            tokio::select! {
                biased; // after that no request begins
                _ = is_cancelled.wait_for(|is| *is) => Err(target.error(ENDED)),
                result = work => result,
            }
        }))
    }

    /// Starts to send what is buffered as the next part.
    fn send(&mut self) -> Result<()> {
        if self.num_parts >= MAX_PARTS {
            return Err(self.target.error("the object is too large; write more, smaller ones"));
        }
        if self.control.id().is_none() {
            let target = Arc::clone(&self.target);
            let id = self.start(async move { target.begin().await })?.wait()?;
            let _ = self.control.0.id.set(id);
        }
        let shared = HttpRuntime::get()?;
        let permit = loop {
            if self.sending.is_empty() {
                break None;
            }
            let has_room = self.sending.len() < MAX_IN_FLIGHT;
            match Arc::clone(&shared.spare_parts).try_acquire_owned() {
                Ok(permit) if has_room => break Some(permit),
                _ => self.wait_for_first()?,
            }
        };
        let next = Vec::with_capacity(self.buffer.len().min(self.part_len()));
        let part = Bytes::from(std::mem::replace(&mut self.buffer, next));
        let (target, control, number) =
            (Arc::clone(&self.target), self.control.clone(), self.num_parts);
        self.num_parts += 1;
        self.sending.push_back(self.start(async move {
            let len = part.len() as u64;
            let sent = target.put_part(control.id().unwrap_or_default(), number, part).await;
            drop(permit);
            if sent.is_ok() {
                control.0.num_sent.fetch_add(len, Ordering::Relaxed);
            }
            sent
        })?);
        Ok(())
    }

    fn wait_for_first(&mut self) -> Result<()> {
        if let Some(first) = self.sending.pop_front() {
            self.sent.push(first.wait()?);
        }
        Ok(())
    }

    /// Whether more may be written.
    fn check(&self) -> io::Result<()> {
        // A forked child has a copy of what is its parent's, and none of the threads that send it.
        if self.process != std::process::id() {
            return Err(io::Error::other(
                "a forked process cannot write what its parent has begun",
            ));
        }
        if *self.control.0.is_cancelled.borrow() {
            return Err(io::Error::other(ENDED));
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        self.check().map_err(|error| Error::io(self.shown(), "write", error))?;
        if let Some((kind, text)) = self.failure.take() {
            return Err(Error::io(self.shown(), "write", io::Error::new(kind, text)));
        }
        let (target, control) = (Arc::clone(&self.target), self.control.clone());
        if self.control.id().is_none() {
            let content = Bytes::from(std::mem::take(&mut self.buffer));
            let len = content.len() as u64;
            self.start(async move { target.put(&control, content).await })?.wait()?;
            self.control.0.num_sent.fetch_add(len, Ordering::Relaxed);
            return Ok(());
        }
        if !self.buffer.is_empty() {
            self.send()?;
        }
        while !self.sending.is_empty() {
            self.wait_for_first()?;
        }
        let parts = std::mem::take(&mut self.sent);
        self.start(async move { target.complete(&control, parts).await })?.wait()
    }
}

impl Write for Upload {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.check()?;
        if let Some((kind, text)) = &self.failure {
            return Err(io::Error::new(*kind, text.clone()));
        }
        let room = self.part_len() - self.buffer.len();
        let now = &bytes[..room.min(bytes.len())];
        self.buffer.extend_from_slice(now);
        self.control.0.num_written.fetch_add(now.len() as u64, Ordering::Relaxed);
        if now.len() == room {
            self.send().map_err(|error| {
                let error = of_error(error);
                self.failure = Some((error.kind(), error.to_string()));
                error
            })?;
        }
        Ok(now.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl WriteFile for Upload {
    /// Sends the rest and makes the object visible.
    fn close(mut self: Box<Self>) -> Result<()> {
        self.finish()?;
        self.is_complete = true;
        Ok(())
    }
}

impl Drop for Upload {
    /// Removes the parts of an upload that has not been closed.
    fn drop(&mut self) {
        let Some(id) = self.control.id().map(str::to_owned) else { return };
        // A forked child has a copy of what is its parent's.
        if self.is_complete || self.process != std::process::id() {
            return;
        }
        self.control.cancel();
        // A part that arrives after the others are removed would stay.
        for part in self.sending.drain(..) {
            let _ = part.wait();
        }
        let target = Arc::clone(&self.target);
        if let Ok(shared) = HttpRuntime::get() {
            // Nobody can do more about an error. S3 and Google keep the parts, and bill them, unless a
            // rule of the bucket removes them; Azure removes them after some days.
            let _ = shared.start(async move { target.abort(&id).await }).wait();
        }
    }
}

/// Removes the parts of the upload `id` of the object at `url`, whose process has ended.
///
/// # Errors
/// If the service refuses or cannot be reached.
pub fn abort(url: &str, settings: Settings, id: &str) -> Result<()> {
    let target = Target::new(url, Arc::new(settings), true)?;
    let id = id.to_owned();
    HttpRuntime::get()?.start(async move { target.abort(&id).await }).wait()
}

/// Removes the object at `url`, if there is one.
///
/// # Errors
/// If the service refuses or cannot be reached.
pub fn remove(url: &str, settings: Settings) -> Result<()> {
    let target = Target::new(url, Arc::new(settings), true)?;
    HttpRuntime::get()?.start(async move { target.remove().await }).wait()
}

impl Target {
    fn new(url: &str, settings: Arc<Settings>, replaces: bool) -> Result<Self> {
        let location = Location::parse(url)?;
        let path = location.object()?;
        let bucket = Bucket::of(&location, &settings);
        let client = bucket.client()?;
        let Some(store) = client.uploader.clone() else {
            return Err(Error::InvalidArgument(format!(
                "{}: a file of a web server cannot be written; name one in a bucket (s3://, gs://, \
                 az://), or a local one",
                location.shown
            )));
        };
        // The keys of each `RandomState` differ.
        let number = RandomState::new().hash_one(url);
        let number = format!("{number:016x}{:08x}", std::process::id());
        let service = location.service;
        Ok(Self {
            client,
            store: store.0,
            settings,
            service,
            path,
            shown: location.shown,
            replaces,
            number,
        })
    }

    fn error(&self, problem: &str) -> Error {
        Error::io(&self.shown, "write", io::Error::other(problem))
    }

    fn attempts(&self) -> Attempts<'_> {
        Attempts::new(&self.client, &self.settings, &self.shown, "write")
    }

    /// Runs one attempt of a request, which fails if for too long nothing of it is sent and nothing of
    /// its answer comes, or less than the settings ask for when it has taken long. A service may send
    /// white space while it makes many parts one object.
    async fn attempt<T>(
        &self,
        attempts: &Attempts<'_>,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, Failure> {
        let transferred = Arc::new(AtomicU64::new(0));
        let sent = Arc::clone(&transferred);
        let watched = async {
            let mut request = std::pin::pin!(TRANSFERRED.scope(Arc::clone(&transferred), request));
            let (mut seen, started) = (0, Instant::now());
            loop {
                if let Ok(result) = timeout(self.settings.stall, &mut request).await {
                    return result.map_err(|error| Failure::of_write(&error));
                }
                let now = transferred.load(Ordering::Relaxed);
                let is_slow = now - seen < self.settings.min_len && started.elapsed() > MAX_SLOW;
                if now == seen || is_slow {
                    return Err(Failure::unanswered(self.settings.stall));
                }
                seen = now;
                attempts.has_progressed();
            }
        };
        let result = attempts.run(watched).await;
        if attempts.count == 0 {
            attempts.sent.store(sent.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        result
    }

    fn attributes(&self) -> Attributes {
        let name = Attribute::Metadata(UPLOAD_ATTRIBUTE.into());
        Attributes::from_iter([(name, self.number.clone())])
    }

    async fn begin(&self) -> Result<String> {
        let mut attempts = self.attempts();
        loop {
            // Azure takes attributes with the last request only, and no upload has an id there.
            let attributes = match self.service {
                Service::Azure => Attributes::new(),
                _ => self.attributes(),
            };
            let options = PutMultipartOptions { attributes, ..PutMultipartOptions::default() };
            let request = self.store.create_multipart_opts(&self.path, options);
            match self.attempt(&attempts, request).await {
                Ok(id) => return Ok(id),
                Err(failure) => attempts.after(failure, String::new).await?,
            }
        }
    }

    async fn put_part(&self, id: &str, number: usize, part: Bytes) -> Result<PartId> {
        let (payload, id) = (payload(&part), id.to_owned());
        let mut attempts = self.attempts();
        loop {
            let request = self.store.put_part(&self.path, &id, number, payload.clone());
            match self.attempt(&attempts, request).await {
                Ok(part) => return Ok(part),
                Err(failure) => {
                    let what = || format!("part {number} of {} bytes: ", part.len());
                    attempts.after(failure, what).await?;
                }
            }
        }
    }

    /// Makes the parts one object.
    async fn complete(&self, control: &UploadControl, parts: Vec<PartId>) -> Result<()> {
        let has_no_number = self.service == Service::Azure;
        let before = if self.replaces && !has_no_number { None } else { self.found().await? };
        if !self.replaces && before.is_some() {
            return Err(self.exists_error());
        }
        let before = before.map(|found| found.meta);
        let ours = if has_no_number {
            Ours::OfLength(control.num_written(), before)
        } else {
            Ours::Numbered
        };
        let id = control.id().unwrap_or_default().to_owned();
        // Where the service has it, also an object that was created since is not replaced.
        let mut is_new = !self.replaces && self.service == Service::S3;
        let mut attempts = self.attempts();
        control.set_may_be_visible(true);
        loop {
            let request = self.store.complete_multipart(&self.path, &id, parts.clone());
            let Err(failure) = self.attempt(&attempts, IS_NEW.scope(is_new, request)).await else {
                return Ok(());
            };
            if is_new && failure.kind == FailureKind::NotImplemented {
                is_new = false;
                continue;
            }
            let failure = failure.or_not_found();
            if self.is_done(control, &mut attempts, failure, &ours).await? {
                return Ok(());
            }
        }
    }

    /// Writes an object of one part.
    async fn put(&self, control: &UploadControl, content: Bytes) -> Result<()> {
        let payload = payload(&content);
        let mut is_new = !self.replaces;
        let mut attempts = self.attempts();
        control.set_may_be_visible(true);
        loop {
            let mode = if is_new { PutMode::Create } else { PutMode::Overwrite };
            let options =
                PutOptions { mode, attributes: self.attributes(), ..PutOptions::default() };
            let request = self.client.store.put_opts(&self.path, payload.clone(), options);
            let Err(failure) = self.attempt(&attempts, request).await else { return Ok(()) };
            if is_new && failure.kind == FailureKind::NotImplemented {
                control.set_may_be_visible(false);
                if self.found().await?.is_some() {
                    return Err(self.exists_error());
                }
                control.set_may_be_visible(true);
                is_new = false;
                continue;
            }
            if self.is_done(control, &mut attempts, failure, &Ours::Numbered).await? {
                return Ok(());
            }
        }
    }

    /// Waits before a request that makes the object visible is repeated. Returns whether an attempt
    /// before this one has succeeded, so that only its answer was lost.
    async fn is_done(
        &self,
        control: &UploadControl,
        attempts: &mut Attempts<'_>,
        failure: Failure,
        ours: &Ours,
    ) -> Result<bool> {
        let is_answer = !matches!(failure.kind, FailureKind::Unanswered | FailureKind::Transient);
        if is_answer && attempts.count == 0 {
            control.set_may_be_visible(false);
        }
        let is_refused = matches!(failure.kind, FailureKind::NotFound | FailureKind::Exists);
        if is_refused && attempts.count > 0 && self.is_ours(ours).await? {
            return Ok(true);
        }
        if failure.kind == FailureKind::Exists {
            control.set_may_be_visible(false);
            return Err(self.exists_error());
        }
        attempts.after(failure, String::new).await.map(|()| false)
    }

    fn exists_error(&self) -> Error {
        Error::io(&self.shown, "write", io::Error::new(io::ErrorKind::AlreadyExists, "it exists"))
    }

    /// The head of the object; none if there is none, or if reading it is not allowed.
    async fn found(&self) -> Result<Option<GetResult>> {
        let mut attempts = self.attempts();
        loop {
            let options = GetOptions { head: true, ..GetOptions::default() };
            match self.attempt(&attempts, self.client.store.get_opts(&self.path, options)).await {
                Ok(found) => return Ok(Some(found)),
                Err(Failure { kind: FailureKind::NotFound | FailureKind::Denied, .. }) => {
                    return Ok(None);
                }
                Err(failure) => attempts.after(failure, String::new).await?,
            }
        }
    }

    /// Whether the object is the one that this upload has written.
    async fn is_ours(&self, ours: &Ours) -> Result<bool> {
        let Some(found) = self.found().await? else { return Ok(false) };
        let name = Attribute::Metadata(UPLOAD_ATTRIBUTE.into());
        let number = found.attributes.get(&name).map(AsRef::as_ref);
        Ok(match ours {
            Ours::Numbered => number == Some(self.number.as_str()),
            Ours::OfLength(len, before) => {
                let is_before = before.as_ref().is_some_and(|before| {
                    before.e_tag == found.meta.e_tag
                        && before.last_modified == found.meta.last_modified
                });
                number.is_none() && found.meta.size == *len && !is_before
            }
        })
    }

    async fn abort(&self, id: &str) -> Result<()> {
        let id = id.to_owned();
        let aborting = async {
            let mut attempts = self.attempts();
            loop {
                let request = self.store.abort_multipart(&self.path, &id);
                match self.attempt(&attempts, request).await {
                    Ok(()) | Err(Failure { kind: FailureKind::NotFound, .. }) => return Ok(()),
                    Err(failure) => attempts.after(failure, String::new).await?,
                }
            }
        };
        timeout(ABORT_DEADLINE, aborting)
            .await
            .unwrap_or_else(|_| Err(self.error("the parts of the upload could not be removed")))
    }

    async fn remove(&self) -> Result<()> {
        let mut attempts = self.attempts();
        loop {
            match self.attempt(&attempts, self.client.store.delete(&self.path)).await {
                Ok(()) | Err(Failure { kind: FailureKind::NotFound, .. }) => return Ok(()),
                Err(failure) => attempts.after(failure, String::new).await?,
            }
        }
    }
}

/// What tells the object that an upload has written from others.
enum Ours {
    /// It has the upload's number.
    Numbered,
    /// It has so many bytes, and it is not the one that was there before.
    OfLength(u64, Option<ObjectMeta>),
}

/// `content`, in frames that are counted when they are sent.
fn payload(content: &Bytes) -> PutPayload {
    let begins = (0..content.len()).step_by(FRAME_LEN);
    begins.map(|begin| content.slice(begin..content.len().min(begin + FRAME_LEN))).collect()
}

/// What `write` may return: the path is added again there.
fn of_error(error: Error) -> io::Error {
    match error {
        Error::Io { source, .. } => source,
        other => io::Error::other(other.to_string()),
    }
}
