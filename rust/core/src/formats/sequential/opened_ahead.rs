//! Files that are read one after the other, of which the next ones are opened ahead where that takes long.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use super::{Frames, RecordStream};
use crate::interrupt::{self, Cancellation};
use crate::io::storage::Storage;
use crate::io::{Job, ReadQueue, StorageLimit};
use crate::lock::lock;
use crate::{Error, Result, process};

/// How many files are opened ahead at most: each holds what its first reads bring, about a mebibyte.
const MAX_AHEAD: usize = 64;
/// A file that is waited for longer lets twice as many be opened ahead.
const LONG_WAIT: Duration = Duration::from_millis(1);

/// The records of files, file after file.
#[derive(Debug)]
pub struct RecordStreams {
    storage: Arc<dyn Storage>,
    frames: fn() -> Box<dyn Frames>,
    paths: VecDeque<PathBuf>,
    opening: VecDeque<Arc<Opening>>,
    max_ahead: usize,
    queue: ReadQueue,
    /// The process whose threads open files.
    owner: u32,
}

/// A file that is opened by the first thread that comes to it.
#[derive(Debug)]
struct Opening {
    storage: Arc<dyn Storage>,
    path: PathBuf,
    frames: fn() -> Box<dyn Frames>,
    limit: Option<Arc<StorageLimit>>,
    cancellation: Arc<Cancellation>,
    state: Mutex<State>,
    opened: Condvar,
}

#[derive(Debug)]
enum State {
    Waiting,
    Begun,
    Done(Box<Result<RecordStream>>),
}

impl RecordStreams {
    /// The records of the files at `paths`, which are opened when they are needed, or ahead.
    pub fn new(
        storage: Arc<dyn Storage>,
        paths: impl IntoIterator<Item = PathBuf>,
        frames: fn() -> Box<dyn Frames>,
    ) -> Self {
        let paths: VecDeque<_> = paths.into_iter().collect();
        let is_remote = paths.front().is_some_and(|first| storage.is_remote(first));
        Self {
            storage,
            frames,
            paths,
            opening: VecDeque::new(),
            max_ahead: if is_remote { MAX_AHEAD } else { 0 },
            queue: ReadQueue::of_process().for_another_owner(),
            owner: process::id(),
        }
    }

    /// Opens the next file, if there is one.
    ///
    /// # Errors
    /// Those of [`RecordStream::open`], and [`Error::Interrupted`] if the caller ends the wait.
    pub fn next_stream(&mut self) -> Result<Option<RecordStream>> {
        if self.owner != process::id() {
            let begun = self.opening.drain(..).map(|opening| opening.path.clone());
            self.paths = begun.chain(std::mem::take(&mut self.paths)).collect();
            self.owner = process::id();
        }
        while self.opening.len() <= self.max_ahead
            && let Some(path) = self.paths.pop_front()
        {
            let opening = Arc::new(Opening {
                limit: self.storage.limit(&path),
                storage: Arc::clone(&self.storage),
                path,
                frames: self.frames,
                cancellation: Arc::default(),
                state: Mutex::new(State::Waiting),
                opened: Condvar::new(),
            });
            if self.max_ahead > 0 {
                self.queue.submit(Arc::clone(&opening) as Arc<dyn Job>, 1);
            }
            self.opening.push_back(opening);
        }
        let Some(first) = self.opening.pop_front() else { return Ok(None) };
        let started = Instant::now();
        let stream = first.finish()?;
        if started.elapsed() >= LONG_WAIT {
            self.max_ahead = (2 * self.max_ahead).clamp(1, MAX_AHEAD);
        }
        Ok(Some(stream))
    }
}

impl Drop for RecordStreams {
    fn drop(&mut self) {
        if self.owner != process::id() {
            return; // a thread of the parent may hold the locks
        }
        for opening in &self.opening {
            let mut state = lock(&opening.state);
            if matches!(*state, State::Waiting) {
                *state = State::Begun; // nobody needs it
            }
            drop(state);
            opening.cancellation.cancel();
        }
    }
}

impl Opening {
    /// Opens the file, unless another thread has begun to.
    fn open(&self) {
        {
            let mut state = lock(&self.state);
            if !matches!(*state, State::Waiting) {
                return;
            }
            *state = State::Begun;
        }
        let open = || RecordStream::open(&*self.storage, &self.path, (self.frames)());
        let opened = self.cancellation.run(|| catch_unwind(AssertUnwindSafe(open)));
        let stream = opened.unwrap_or_else(|_| {
            Err(Error::Panicked("a thread that opens files panicked".to_owned()))
        });
        *lock(&self.state) = State::Done(Box::new(stream));
        self.opened.notify_all();
    }

    /// The file, opened by this thread if no other one has begun to: it does not wait for other reads.
    fn finish(&self) -> Result<RecordStream> {
        self.open();
        let is_open = |state: &mut State| !matches!(state, State::Done(_));
        let mut state = interrupt::wait_while(&self.state, &self.opened, is_open)?;
        match std::mem::replace(&mut *state, State::Begun) {
            State::Done(stream) => *stream,
            State::Waiting | State::Begun => unreachable!("the wait ends when it is done"),
        }
    }
}

impl Job for Opening {
    fn storage(&self) -> Option<Arc<StorageLimit>> {
        self.limit.clone()
    }

    fn run_next(self: Arc<Self>) {
        self.open();
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::PoisonError;

    use super::super::{RecordBlock, RecordStream};
    use super::*;
    use crate::formats::json_lines::JsonLines;
    use crate::io::LocalFiles;
    use crate::io::storage::{ReadAt, StoredFile};

    const NUM_FILES: usize = 150;
    const AT_ONCE: usize = 8;

    /// Files of another machine, none of which is opened before several are asked for.
    #[derive(Debug, Default)]
    struct Far {
        num_asked: Mutex<usize>,
        asked: Condvar,
    }

    impl Storage for Far {
        fn open(&self, path: &Path) -> Result<(Box<dyn StoredFile>, Arc<dyn ReadAt>)> {
            let mut num_asked = lock(&self.num_asked);
            *num_asked += 1;
            self.asked.notify_all();
            let is_early = |num_asked: &mut usize| *num_asked < AT_ONCE;
            let guard = self.asked.wait_while(num_asked, is_early);
            drop(guard.unwrap_or_else(PoisonError::into_inner));
            LocalFiles.open(path)
        }

        fn is_remote(&self, _path: &Path) -> bool {
            true
        }
    }

    fn lines(stream: Option<RecordStream>) -> Vec<Vec<u8>> {
        let (mut stream, mut block, mut lines) =
            (stream.expect("a file is left"), RecordBlock::default(), Vec::new());
        while stream.read(&mut block, 3).unwrap() {
            lines.extend(block.iter().map(<[u8]>::to_vec));
        }
        lines
    }

    #[test]
    fn a_forked_child_waits_for_no_lock_of_its_parent() {
        let dir = tempfile::tempdir().unwrap();
        let paths: Vec<_> = (0..AT_ONCE).map(|at| dir.path().join(format!("{at}"))).collect();
        for path in &paths {
            std::fs::write(path, "1\n").unwrap();
        }
        let storage = Arc::new(Far::default());
        let mut streams = RecordStreams::new(storage, paths, || Box::new(JsonLines));
        streams.next_stream().unwrap();
        let opening = Arc::clone(&streams.opening[0]);
        let held = lock(&opening.state);
        streams.owner = 0; // no process that runs has this number
        let (sender, dropped) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            drop(streams);
            let _ = sender.send(());
        });
        assert!(dropped.recv_timeout(Duration::from_secs(20)).is_ok());
        drop(held);
    }

    #[test]
    fn files_come_in_their_order_and_far_ones_are_opened_together() {
        let dir = tempfile::tempdir().unwrap();
        let paths: Vec<_> = (0..NUM_FILES).map(|at| dir.path().join(format!("{at}"))).collect();
        for (at, path) in paths.iter().enumerate() {
            if at != 140 {
                std::fs::write(path, format!("{at}\n").repeat(at % 7)).unwrap();
            }
        }
        let storages: [Arc<dyn Storage>; 2] = [Arc::new(LocalFiles), Arc::new(Far::default())];
        for storage in storages {
            let mut streams =
                RecordStreams::new(storage, paths.iter().cloned(), || Box::new(JsonLines));
            for at in 0..NUM_FILES {
                let next = streams.next_stream();
                if at == 140 {
                    assert!(next.unwrap_err().to_string().contains("140"));
                    continue;
                }
                assert_eq!(lines(next.unwrap()), vec![at.to_string().into_bytes(); at % 7]);
            }
            assert!(streams.next_stream().unwrap().is_none());
        }
    }
}
