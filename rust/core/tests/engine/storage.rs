//! A storage whose reads wait, fail, and are answered in a random order.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex};

use grainmill_core::bytes::ScatterBuffers;
use grainmill_core::io::storage::{
    FileId, ReadAt, ReadRequest, ReopenedFile, Storage, StoredFile, WhenRead,
};
use grainmill_core::{Error, Result};

use crate::files::{Fault, Place, TestFile};
use crate::random::Random;

/// Reads that wait to be answered, which [`conduct`](Self::conduct) does one by one.
#[derive(Default)]
pub(crate) struct Lot {
    parked: Mutex<Parked>,
    changed: Condvar,
}

#[derive(Default)]
struct Parked {
    answers: Vec<Box<dyn FnOnce() + Send>>,
    is_closed: bool,
}

impl Lot {
    /// Parks `answer`, which is called later, on another thread.
    fn park(&self, answer: Box<dyn FnOnce() + Send>) {
        self.parked.lock().unwrap().answers.push(answer);
        self.changed.notify_one();
    }

    /// Waits for a turn.
    fn wait(&self) {
        let (sender, receiver) = channel::<()>();
        self.park(Box::new(move || drop(sender)));
        // The sender says by its end that it is this one's turn.
        let _ = receiver.recv();
    }

    /// Gives turns in a random order until the lot is closed, some of them only after others had time
    /// to come.
    pub(crate) fn conduct(&self, random: &mut Random) {
        loop {
            let parked = self.parked.lock().unwrap();
            let is_idle = |parked: &mut Parked| parked.answers.is_empty() && !parked.is_closed;
            drop(self.changed.wait_while(parked, is_idle).unwrap());
            for _ in 0..random.below(12) {
                std::thread::yield_now();
            }
            let mut parked = self.parked.lock().unwrap();
            if parked.answers.is_empty() {
                return;
            }
            let chosen = random.below(parked.answers.len());
            let answer = parked.answers.swap_remove(chosen);
            drop(parked);
            answer();
        }
    }

    /// Ends [`conduct`](Self::conduct) once nobody waits.
    pub(crate) fn close(&self) {
        self.parked.lock().unwrap().is_closed = true;
        self.changed.notify_one();
    }
}

/// Files whose reads go through one queue.
pub(crate) struct Stored {
    pub(crate) files: HashMap<PathBuf, Arc<TestFile>>,
    pub(crate) lot: Arc<Lot>,
    /// The highest limit that the queue has had.
    pub(crate) limit: AtomicUsize,
    pub(crate) in_flight: AtomicUsize,
    pub(crate) max_in_flight: AtomicUsize,
    random: Mutex<Random>,
}

impl std::fmt::Debug for Stored {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Stored").finish_non_exhaustive()
    }
}

impl Stored {
    pub(crate) fn new(files: &[Arc<TestFile>], lot: &Arc<Lot>, limit: usize, seed: u64) -> Self {
        Self {
            files: files.iter().map(|file| (file.path.clone(), Arc::clone(file))).collect(),
            lot: Arc::clone(lot),
            limit: limit.into(),
            in_flight: AtomicUsize::new(0),
            max_in_flight: AtomicUsize::new(0),
            random: Mutex::new(Random::new(seed)),
        }
    }

    fn below(&self, end: usize) -> usize {
        self.random.lock().unwrap().below(end)
    }

    fn begin(&self) {
        let now = self.in_flight.fetch_add(1, Ordering::SeqCst) + 1;
        self.max_in_flight.fetch_max(now, Ordering::SeqCst);
    }

    fn end(&self) {
        self.in_flight.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The storage of the engine.
#[derive(Debug)]
pub(crate) struct TestStorage(pub(crate) Arc<Stored>);

/// An open file.
#[derive(Debug, Clone)]
struct Open {
    stored: Arc<Stored>,
    file: Arc<TestFile>,
}

impl Storage for TestStorage {
    fn open(&self, path: &Path) -> Result<(Box<dyn StoredFile>, Arc<dyn ReadAt>)> {
        let file = Arc::clone(&self.0.files[path]);
        if matches!(file.drawn.fault, Fault::Missing) {
            return Err(file.error(std::io::ErrorKind::NotFound));
        }
        let open = Open { stored: Arc::clone(&self.0), file };
        Ok((Box::new(open.clone()), Arc::new(open)))
    }

    fn is_remote(&self, path: &Path) -> bool {
        matches!(self.0.files[path].drawn.place, Place::Far)
    }
}

impl StoredFile for Open {
    fn path(&self) -> &Path {
        &self.file.path
    }

    fn byte_len(&self) -> u64 {
        self.file.bytes.len() as u64
    }

    fn modified_ns(&self) -> i64 {
        7
    }

    fn has_requests(&self) -> bool {
        self.file.drawn.has_requests
    }

    fn reopen(&self, _: bool) -> Result<ReopenedFile> {
        let is_changed = matches!(self.file.drawn.fault, Fault::Changed);
        if is_changed && !self.file.drawn.is_replaced {
            return Err(self.file.changed());
        }
        let new_id = self.file.drawn.is_replaced.then_some((1, 1));
        Ok(ReopenedFile { bytes: Arc::new(self.clone()), new_id })
    }

    fn accept_id(&self, _: FileId) {}
}

/// Whether the calling thread reads for a queue: not one that computes, nor one whose caller reads what
/// is near by itself.
fn is_limited() -> bool {
    let current = std::thread::current();
    let is_helper = current.name().is_some_and(|name| name.starts_with("grainmill-compute"));
    !is_helper && !crate::READS_ITSELF.get()
}

impl Open {
    /// Whether a read waits for a turn.
    fn waits(&self) -> bool {
        match self.file.drawn.place {
            Place::Near => false,
            Place::Turning => self.stored.below(2) == 0,
            Place::Far => self.stored.below(16) > 0,
        }
    }

    /// The bytes of `range`, or what is wrong with them.
    fn bytes(&self, range: Range<usize>) -> Result<&[u8]> {
        let fails = range.start < self.file.data_len
            && match self.file.drawn.fault {
                Fault::Always => true,
                Fault::Once(at) => self.file.num_reads.fetch_add(1, Ordering::SeqCst) == at,
                _ => false,
            };
        if fails { Err(self.file.unreadable()) } else { Ok(&self.file.bytes[range]) }
    }
}

impl ReadAt for Open {
    fn read_at(&self, out: &mut [u8], at: u64) -> Result<()> {
        let begin = usize::try_from(at).unwrap();
        let is_counted = begin < self.file.data_len && is_limited();
        if is_counted {
            self.stored.begin();
        }
        if self.waits() {
            self.stored.lot.wait();
        }
        let bytes = self.bytes(begin..begin + out.len());
        if is_counted {
            self.stored.end();
        }
        out.copy_from_slice(bytes?);
        Ok(())
    }

    fn read_scattered(&self, buffers: &mut ScatterBuffers<'_>, at: u64) -> Result<()> {
        let mut bytes = vec![0; buffers.byte_len()];
        self.read_at(&mut bytes, at)?;
        buffers.fill(&bytes);
        Ok(())
    }

    fn request(&self, range: Range<u64>) -> Option<Box<dyn ReadRequest>> {
        self.file.drawn.has_requests.then(|| Box::new(Requested(self.clone(), range)) as _)
    }
}

struct Requested(Open, Range<u64>);

impl ReadRequest for Requested {
    /// The bytes come in uneven pieces, or never.
    fn send(self: Box<Self>, when_read: WhenRead) {
        let Self(open, range) = *self;
        open.stored.begin();
        let lot = Arc::clone(&open.stored.lot);
        lot.park(Box::new(move || {
            let range = usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap();
            let bytes = open.bytes(range);
            open.stored.end();
            let number = open.file.num_requests.fetch_add(1, Ordering::SeqCst);
            if matches!(open.file.drawn.fault, Fault::Forgets(at) if at == number) {
                return;
            }
            match bytes {
                Ok(bytes) => {
                    let (front, rest) = bytes.split_at(open.stored.below(bytes.len() + 1));
                    let (middle, rest) = rest.split_at(rest.len().min(3));
                    when_read(Ok(&[front, middle, &[], rest]));
                }
                Err(error) => when_read(Err(error)),
            }
        }));
    }
}

impl TestFile {
    fn error(&self, kind: std::io::ErrorKind) -> Error {
        Error::io(&*self.path, "read", kind.into())
    }

    /// The error of a file that is not there.
    pub(crate) fn missing(&self) -> Error {
        self.error(std::io::ErrorKind::NotFound)
    }

    /// The error of a read that fails.
    pub(crate) fn unreadable(&self) -> Error {
        self.error(std::io::ErrorKind::HostUnreachable)
    }

    /// The error of a file that is another one now.
    pub(crate) fn changed(&self) -> Error {
        Error::Changed { path: self.path.display().to_string() }
    }
}
