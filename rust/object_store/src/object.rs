//! Objects as files of the engine.

use std::collections::VecDeque;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use grainmill_core::bytes::ScatterBuffers;
use grainmill_core::io::storage::{
    FileId, ReadAt, ReadRequest, ReopenedFile, StartedRead, Storage, StoredFile, WhenRead,
};
use grainmill_core::io::{LocalFiles, Permit, SingleFlight, StorageLimit};
use grainmill_core::{Error, Result};
use tokio::task::AbortHandle;

use crate::block_cache::{BLOCK_LEN, BlockCache, BlockKey};
use crate::client::{Bucket, Client, HttpRuntime, Started};
use crate::fetch::{self, Target};
use crate::location::{Location, is_url};
use crate::settings::Settings;

/// How many bytes come with the request that asks for an object's length: formats that can be read
/// at random have their index at the end.
const TAIL_LEN: u64 = 128 << 10;
/// Longer reads are split into parts, some of which are in flight at a time.
const PART_LEN: u64 = 8 << 20;
const MAX_PARTS: usize = 4;

/// Objects by their URL, and local files by their path.
#[derive(Debug)]
pub struct Buckets {
    settings: Arc<Settings>,
    local: LocalFiles,
}

impl Buckets {
    /// Objects that are reached as `settings` say.
    pub fn new(settings: Settings) -> Self {
        Self { settings: Arc::new(settings), local: LocalFiles }
    }
}

impl Storage for Buckets {
    fn open(&self, path: &Path) -> Result<(Box<dyn StoredFile>, Arc<dyn ReadAt>)> {
        let Some(url) = path.to_str().filter(|path| is_url(path)) else {
            return self.local.open(path);
        };
        let (object, tail) = Object::open(url, &self.settings)?;
        let object = Arc::new(object);
        let bytes = Arc::new(OpenObject { object: Arc::clone(&object), tail });
        Ok((Box::new(StoredObject(object)), bytes))
    }

    fn is_remote(&self, path: &Path) -> bool {
        path.to_str().is_some_and(is_url)
    }

    fn limit(&self, path: &Path) -> Option<Arc<StorageLimit>> {
        let Some(url) = path.to_str().filter(|path| is_url(path)) else {
            return self.local.limit(path);
        };
        let location = Location::parse(url).ok()?;
        Some(Arc::clone(&Bucket::of(&location, &self.settings).limit))
    }
}

/// An object that has been opened once.
#[derive(Debug)]
struct Object {
    path: PathBuf,
    bucket: Arc<Bucket>,
    target: Arc<Target>,
    cache: Option<Cached>,
}

/// The cache for the blocks of an object.
#[derive(Debug)]
struct Cached {
    blocks: Arc<BlockCache>,
    /// Describes the object and its state.
    identity: String,
}

/// Blocks that threads of this process are reading.
static FLIGHTS: SingleFlight = SingleFlight::new();

impl Object {
    /// Opens the object at `url`; returns the end of it as well.
    fn open(url: &str, settings: &Arc<Settings>) -> Result<(Self, Vec<Bytes>)> {
        let location = Location::parse(url)?;
        location.object()?;
        let bucket = Bucket::of(&location, settings);
        let client = bucket.client()?;
        let opening = fetch::open(client, Arc::clone(settings), location, TAIL_LEN);
        let (target, tail) = HttpRuntime::get()?.start(opening).wait()?;
        let cache = match &settings.cache {
            Some((dir, byte_len)) => {
                let blocks = BlockCache::open(dir, *byte_len)?;
                let Target { shown, access, byte_len, modified_ns, e_tag, .. } = &target;
                let tag = e_tag.as_deref().unwrap_or_default();
                // Without either, nothing would tell a changed object from the cached one.
                let is_identified = !tag.is_empty() || *modified_ns != 0;
                // Only a hash of it is stored.
                let query = access.unsigned_query();
                let identity = format!("{shown}{query}\n{tag}\n{modified_ns}\n{byte_len}");
                is_identified.then_some(Cached { blocks, identity })
            }
            None => None,
        };
        let path = PathBuf::from(&*target.shown);
        Ok((Self { path, bucket, target: Arc::new(target), cache }, tail))
    }

    /// Passes the bytes of `range`, which the object must have, to `sink` in order.
    fn read(&self, range: Range<u64>, sink: &mut dyn FnMut(&[u8])) -> Result<()> {
        match &self.cache {
            None => self.request(range, sink),
            Some(cached) => self.read_cached(cached, range, sink),
        }
    }

    /// Starts reading the bytes of `range`, which the object must have, with `permit` until they are there.
    fn start(self: &Arc<Self>, range: Range<u64>, permit: Permit) -> Result<Started<Vec<u8>>> {
        let shared = HttpRuntime::get()?;
        if self.cache.is_some() {
            // It reads and writes a file.
            let object = Arc::clone(self);
            return Ok(shared.start_waiting(move || {
                let mut bytes = Vec::new();
                object.read(range, &mut |part| bytes.extend_from_slice(part))?;
                drop(permit);
                Ok(bytes)
            }));
        }
        let reading = self.reading(self.bucket.client()?, range);
        Ok(shared.start(async move {
            let read = reading.await;
            drop(permit);
            Ok(read?.concat())
        }))
    }

    /// Reads `range` from the server when it is polled.
    fn reading(
        &self,
        client: Arc<Client>,
        range: Range<u64>,
    ) -> impl Future<Output = Result<Vec<Bytes>>> + Send + use<> {
        let (settings, target) = (Arc::clone(&self.bucket.settings), Arc::clone(&self.target));
        fetch::read(client, settings, target, range)
    }

    /// Reads from the server.
    fn request(&self, range: Range<u64>, sink: &mut dyn FnMut(&[u8])) -> Result<()> {
        let (client, shared) = (self.bucket.client()?, HttpRuntime::get()?);
        let start = |part, permit| {
            let reading = self.reading(Arc::clone(&client), part);
            shared.start(async move {
                let read = reading.await;
                drop(permit);
                read
            })
        };
        // The first part is counted as the read.
        let queue = self.bucket.queue();
        let mut next = range.start;
        let mut next_part = || {
            let part = next..range.end.min(next + PART_LEN);
            next = part.end;
            (!part.is_empty()).then_some(part)
        };
        let mut parts: VecDeque<Started<Vec<Bytes>>> = VecDeque::new();
        loop {
            if parts.is_empty() {
                let Some(part) = next_part() else { return Ok(()) };
                parts.push_back(start(part, None));
            }
            while parts.len() < MAX_PARTS
                && range.end - range.start > PART_LEN
                && let Ok(spare) = Arc::clone(&shared.spare_parts).try_acquire_owned()
                && let Some(permit) = queue.enter()
                && let Some(part) = next_part()
            {
                parts.push_back(start(part, Some((spare, permit))));
            }
            if let Some(first) = parts.pop_front() {
                first.wait()?.iter().for_each(|bytes| sink(bytes));
            }
        }
    }

    /// Reads blocks from the cache, and missing ones from the server.
    fn read_cached(
        &self,
        cached: &Cached,
        range: Range<u64>,
        sink: &mut dyn FnMut(&[u8]),
    ) -> Result<()> {
        let extent =
            |block: u64| block * BLOCK_LEN..self.target.byte_len.min((block + 1) * BLOCK_LEN);
        let key = |block| BlockKey::new(&cached.identity, block);
        let mut deliver = |block: u64, bytes: &[u8]| {
            let start = extent(block).start;
            let from = range.start.saturating_sub(start);
            let to = (range.end - start).min(bytes.len() as u64);
            let index = |at| usize::try_from(at).unwrap_or(usize::MAX);
            sink(&bytes[index(from)..index(to)]);
        };
        let end = range.end.div_ceil(BLOCK_LEN);
        let (mut block, mut bytes) = (range.start / BLOCK_LEN, Vec::new());
        let read = |block: u64, bytes: &mut Vec<u8>| {
            let extent = extent(block);
            cached.blocks.read(key(block), extent.end - extent.start, bytes)
        };
        while block < end {
            if read(block, &mut bytes) {
                deliver(block, &bytes);
                block += 1;
                continue;
            }
            // Another thread may be reading it: wait for it instead of reading it twice.
            let _guard = FLIGHTS.enter(key(block).number())?;
            if read(block, &mut bytes) {
                continue;
            }
            let missing = (block..end)
                .take_while(|&other| other == block || !cached.blocks.contains(key(other)));
            let until = missing.last().unwrap_or(block) + 1;
            bytes.clear();
            self.request(extent(block).start..extent(until - 1).end, &mut |part| {
                // Blocks are complete one after the other, however the parts are cut.
                bytes.extend_from_slice(part);
                let mut done = 0;
                while block < until {
                    let extent = extent(block);
                    let len = usize::try_from(extent.end - extent.start).unwrap_or(usize::MAX);
                    let Some(whole) = bytes.get(done..).and_then(|rest| rest.get(..len)) else {
                        break;
                    };
                    cached.blocks.write(key(block), whole);
                    deliver(block, whole);
                    done += len;
                    block += 1;
                }
                bytes.drain(..done);
            })?;
        }
        Ok(())
    }
}

#[derive(Debug)]
struct StoredObject(Arc<Object>);

impl StoredFile for StoredObject {
    fn path(&self) -> &Path {
        &self.0.path
    }

    fn byte_len(&self) -> u64 {
        self.0.target.byte_len
    }

    fn modified_ns(&self) -> i64 {
        self.0.target.modified_ns
    }

    fn tag(&self) -> Option<&str> {
        self.0.target.e_tag.as_deref()
    }

    // Each request checks that the object is the same, so none is needed before.
    fn reopen(&self, _was_checked: bool) -> Result<ReopenedFile> {
        let bytes = Arc::new(OpenObject { object: Arc::clone(&self.0), tail: Vec::new() });
        Ok(ReopenedFile { bytes, new_id: None })
    }

    fn accept_id(&self, _id: FileId) {}

    // A cache of blocks is a file, which is read and written by threads that wait.
    fn has_requests(&self) -> bool {
        self.0.cache.is_none()
    }
}

/// Reads an object.
#[derive(Debug)]
struct OpenObject {
    object: Arc<Object>,
    /// Its last bytes, if they came with its length.
    tail: Vec<Bytes>,
}

impl OpenObject {
    fn tail_begin(&self) -> u64 {
        let tail_len: u64 = self.tail.iter().map(|bytes| bytes.len() as u64).sum();
        self.object.target.byte_len - tail_len
    }

    fn read(&self, range: Range<u64>, sink: &mut dyn FnMut(&[u8])) -> Result<()> {
        let mut at = self.tail_begin();
        if range.start < at {
            return self.object.read(range, sink);
        }
        for bytes in &self.tail {
            let index = |position: u64| {
                let within = position.saturating_sub(at).min(bytes.len() as u64);
                usize::try_from(within).unwrap_or(usize::MAX)
            };
            sink(&bytes[index(range.start)..index(range.end)]);
            at += bytes.len() as u64;
        }
        Ok(())
    }
}

impl ReadAt for OpenObject {
    fn read_at(&self, out: &mut [u8], at: u64) -> Result<()> {
        let end = at.saturating_add(out.len() as u64);
        if end > self.object.target.byte_len {
            return Err(Error::Changed { path: self.object.target.shown.to_string() });
        }
        let mut filled = 0;
        self.read(at..end, &mut |bytes| {
            out[filled..filled + bytes.len()].copy_from_slice(bytes);
            filled += bytes.len();
        })
    }

    fn read_scattered(&self, buffers: &mut ScatterBuffers<'_>, at: u64) -> Result<()> {
        let end = at.saturating_add(buffers.byte_len() as u64);
        let end = end.min(self.object.target.byte_len);
        self.read(at.min(end)..end, &mut |bytes| buffers.fill(bytes))
    }

    fn start(&self, range: Range<u64>, permit: Permit) -> Option<Box<dyn StartedRead>> {
        if range.start >= self.tail_begin() {
            return None; // it is there already
        }
        // Whatever is wrong, reading it will say so.
        let started = self.object.start(range, permit).ok()?;
        let (task, process) = (started.abort_handle(), std::process::id());
        Some(Box::new(InFlight { started: Some(started), task, process }))
    }

    fn request(&self, range: Range<u64>) -> Option<Box<dyn ReadRequest>> {
        let object = &self.object;
        let is_one_part = range.end - range.start <= PART_LEN;
        let is_there = range.end <= object.target.byte_len && range.start < self.tail_begin();
        if object.cache.is_some() || !is_there || !is_one_part {
            return None;
        }
        let (client, shared) = (object.bucket.client().ok()?, HttpRuntime::get().ok()?);
        Some(Box::new(UnsentRead { shared, reading: object.reading(client, range) }))
    }
}

/// A read of an object that has not been sent.
struct UnsentRead<F> {
    shared: &'static HttpRuntime,
    reading: F,
}

impl<F: Future<Output = Result<Vec<Bytes>>> + Send + 'static> ReadRequest for UnsentRead<F> {
    fn send(self: Box<Self>, when_read: WhenRead) {
        self.shared.spawn(async move {
            match self.reading.await {
                Ok(parts) => when_read(Ok(&parts.iter().map(|part| &**part).collect::<Vec<_>>())),
                Err(error) => when_read(Err(error)),
            }
        });
    }
}

/// A read of an object that has been started.
#[derive(Debug)]
struct InFlight {
    started: Option<Started<Vec<u8>>>,
    task: AbortHandle,
    /// The process that has started it.
    process: u32,
}

impl StartedRead for InFlight {
    fn wait(mut self: Box<Self>) -> Result<Vec<u8>> {
        self.started.take().map_or_else(|| Ok(Vec::new()), Started::wait)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        // In a forked child, nothing of the parent's runtime runs, and its locks may be held.
        if self.process == std::process::id() {
            self.task.abort();
        }
    }
}
