//! Shares the indices of files among the processes of a pool: the first process that needs an index
//! reads it for all.
//!
//! The memory is an array of words. The first is the offset of unused words; a hash table of files
//! follows, and then their indices. Nothing is ever removed, so references to an index stay valid.
//! Once all words are used, each process keeps further indices in its own memory.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::super::offsets::Offsets;
use super::super::riegeli::chunk::ChunkHeader;
use super::footer::Footer;
use crate::platform::{self, BorrowedFile, OwnedFile};
use crate::shared_memory::Words;
use crate::{Result, process};

/// Words per table entry: the key of a file and the offset of its index.
const ENTRY_LEN: usize = 2;
/// How many entries are probed for a file; if all have other keys, its index is not shared.
const MAX_PROBES: usize = 32;
/// Memory per table entry: an index with fewer chunks is shorter than a page.
const WORDS_PER_ENTRY: usize = 64;
/// Values of an entry's second word other than an offset: no process has read the index yet; the
/// process with the id in the other bits is reading it; there was not enough space for it.
const UNREAD: u64 = 0;
const READ_BY: u64 = 1 << 63;
const NO_SPACE: u64 = u64::MAX;

/// How often to check whether another process is done, and for how long.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
const MAX_WAIT: Duration = Duration::from_secs(60);

static SHARED: OnceLock<SharedIndex> = OnceLock::new();

/// Makes this process share the indices of files with all processes that pass the same file, which
/// [`create`] created for `byte_len` bytes. Only the first call has an effect.
///
/// # Errors
///
/// If the file has another length or cannot be mapped.
pub fn share(file: BorrowedFile<'_>, byte_len: usize) -> Result<()> {
    let words = Words::open(file, num_words(byte_len))?;
    SHARED.get_or_init(|| SharedIndex::new(words));
    Ok(())
}

/// A file of `byte_len` bytes for [`share`]; it takes memory only as indices are added.
///
/// # Errors
///
/// If the system has no memory or no descriptor left for it.
pub fn create(byte_len: usize) -> Result<OwnedFile> {
    Words::file(num_words(byte_len))
}

fn num_words(byte_len: usize) -> usize {
    (byte_len / size_of::<u64>()).max(WORDS_PER_ENTRY)
}

/// How many bytes of indices this process and others share.
pub fn shared_bytes() -> u64 {
    let used = |shared: &SharedIndex| shared.words[0].load(Ordering::Relaxed) - shared.first_free();
    SHARED.get().map_or(0, |shared| used(shared) * size_of::<u64>() as u64)
}

/// The shared memory, if this process has any.
pub(super) fn shared() -> Option<&'static SharedIndex> {
    SHARED.get()
}

/// Identifies a file: the hash of its footer and other values of the footer's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Key {
    hash: u64,
    others: [u64; 2],
}

impl Key {
    /// The key of a file whose footer is the chunk with this header and begins at `footer_offset`.
    pub(super) fn of(header: &ChunkHeader, footer_offset: u64) -> Self {
        // 0 marks an unused entry.
        Self { hash: header.data_hash.max(1), others: [footer_offset, header.decoded_len] }
    }
}

/// The indices of files in shared memory.
#[derive(Debug)]
pub(crate) struct SharedIndex {
    words: Arc<Words>,
    num_entries: usize,
}

/// The result of looking up a file.
#[derive(Debug)]
pub(super) enum Found<'a> {
    /// Its index.
    Index(Footer, Offsets),
    /// No index yet: this process should read it, and others wait until it is published.
    Unpublished(Publisher<'a>),
    /// No index, and it cannot be shared.
    Unavailable,
}

/// The exclusive right to publish the index of one file, released when dropped.
#[derive(Debug)]
pub(super) struct Publisher<'a> {
    shared: &'a SharedIndex,
    key: Key,
    entry: usize,
}

impl SharedIndex {
    fn new(words: Words) -> Self {
        let num_entries = 1 << (words.len() / WORDS_PER_ENTRY).max(1).ilog2();
        let shared = Self { words: Arc::new(words), num_entries };
        // Only the first process changes it.
        let begin = shared.first_free();
        let _ = shared.words[0].compare_exchange(0, begin, Ordering::AcqRel, Ordering::Acquire);
        shared
    }

    /// The initial offset of unused words.
    fn first_free(&self) -> u64 {
        (1 + self.num_entries * ENTRY_LEN) as u64
    }

    /// The index of the file with `key`, or the right to publish it; waits while another process
    /// reads it.
    pub(super) fn find(&self, key: Key) -> Found<'_> {
        let Some(entry) = self.entry(key) else { return Found::Unavailable };
        let word = &self.words[entry + 1];
        let own_mark = READ_BY | u64::from(process::id());
        let deadline = Instant::now() + MAX_WAIT;
        loop {
            let seen = word.load(Ordering::Acquire);
            if seen == NO_SPACE {
                return Found::Unavailable;
            }
            if seen != UNREAD && seen & READ_BY == 0 {
                return self.read(key, seen).unwrap_or(Found::Unavailable);
            }
            if seen == UNREAD || !is_alive(seen & !READ_BY) {
                if word
                    .compare_exchange(seen, own_mark, Ordering::AcqRel, Ordering::Acquire)
                    .is_ok()
                {
                    return Found::Unpublished(Publisher { shared: self, key, entry });
                }
                continue;
            }
            if Instant::now() >= deadline {
                return Found::Unavailable;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// The entry of `key`, added if missing.
    fn entry(&self, key: Key) -> Option<usize> {
        let first = usize::try_from(key.hash % self.num_entries as u64).ok()?;
        (first..first + MAX_PROBES.min(self.num_entries))
            .map(|number| 1 + number % self.num_entries * ENTRY_LEN)
            .find(|&entry| {
                let found = self.words[entry].compare_exchange(
                    0,
                    key.hash,
                    Ordering::AcqRel,
                    Ordering::Acquire,
                );
                found.map_or_else(|found| found == key.hash, |_| true)
            })
    }

    fn read(&self, key: Key, offset: u64) -> Option<Found<'static>> {
        let mut at = usize::try_from(offset).ok().filter(|_| offset >= self.first_free())?;
        let mut next = || {
            let word = self.words.get(at)?.load(Ordering::Relaxed);
            at += 1;
            Some(word)
        };
        if [next()?, next()?] != key.others {
            return None;
        }
        let footer = Footer {
            num_records: next()?,
            num_chunks: next()?,
            group_size: next()?,
            first_offset: next()?,
            writer_options: None,
        };
        let options_len = next()?;
        let num_high = next()?;
        let writer_options = match options_len.checked_sub(1) {
            None => None,
            Some(len) => {
                let mut bytes = Vec::new();
                for _ in 0..len.div_ceil(8) {
                    bytes.extend_from_slice(&next()?.to_le_bytes());
                }
                bytes.truncate(usize::try_from(len).ok()?);
                Some(String::from_utf8(bytes).ok()?)
            }
        };
        let mut high = Vec::new();
        for _ in 0..num_high {
            high.push((usize::try_from(next()?).ok()?, u32::try_from(next()?).ok()?));
        }
        let len = usize::try_from(footer.num_chunks).ok()?;
        let offsets = Offsets::shared(Arc::clone(&self.words), at, len, high)?;
        Some(Found::Index(Footer { writer_options, ..footer }, offsets))
    }

    fn write(&self, key: Key, footer: &Footer, offsets: &Offsets) -> Option<u64> {
        let options = footer.writer_options.as_deref().map(str::as_bytes);
        let high = offsets.high();
        let mut head = vec![
            key.others[0],
            key.others[1],
            footer.num_records,
            footer.num_chunks,
            footer.group_size,
            footer.first_offset,
            options.map_or(0, |options| options.len() as u64 + 1),
            high.len() as u64,
        ];
        for bytes in options.unwrap_or_default().chunks(8) {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            head.push(u64::from_le_bytes(word));
        }
        head.extend(high.iter().flat_map(|&(from, half)| [from as u64, u64::from(half)]));
        let len = head.len() + offsets.len().div_ceil(2);
        let all = self.words.len() as u64;
        let offset = self.words[0].fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
            let end = used.checked_add(len as u64).filter(|&end| end <= all);
            end.filter(|_| used >= self.first_free())
        });
        let offset = offset.ok()?;
        let to = self.words.part(usize::try_from(offset).ok()?, len)?;
        let low_pairs = offsets.low_pairs();
        for (word, value) in to.iter().zip(head.into_iter().map(Ok).chain(low_pairs)) {
            word.store(value.ok()?, Ordering::Relaxed);
        }
        Some(offset)
    }
}

impl Publisher<'_> {
    /// Publishes the index to all processes; returns the shared offsets, or the given ones if there
    /// is not enough space.
    pub(super) fn publish(self, footer: &Footer, offsets: Offsets) -> Offsets {
        let offset = self.shared.write(self.key, footer, &offsets);
        let word = &self.shared.words[self.entry + 1];
        word.store(offset.unwrap_or(NO_SPACE), Ordering::Release);
        match offset.and_then(|offset| self.shared.read(self.key, offset)) {
            Some(Found::Index(_, shared)) => shared,
            _ => offsets,
        }
    }
}

impl Drop for Publisher<'_> {
    fn drop(&mut self) {
        // If the index was not published: the file could not be read.
        let own_mark = READ_BY | u64::from(process::id());
        let word = &self.shared.words[self.entry + 1];
        let _ = word.compare_exchange(own_mark, UNREAD, Ordering::AcqRel, Ordering::Acquire);
    }
}

/// Whether the process with this id seems to be alive.
fn is_alive(number: u64) -> bool {
    u32::try_from(number).is_ok_and(platform::is_alive)
}

/// Lookups in shared memory with arbitrary content.
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing {
    use super::*;

    /// Looks up files in memory that starts with `input`, and publishes an index where it can.
    pub fn lookup(input: &[u8]) {
        const NUM_WORDS: usize = 512;
        let Ok((words, _file)) = Words::create(NUM_WORDS) else { return };
        for (word, bytes) in words.iter().zip(input.chunks(8)) {
            let value = bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte));
            // Clear the mark of another process, for which `find` would wait.
            word.store(if value == NO_SPACE { value } else { value & !READ_BY }, Ordering::Relaxed);
        }
        let shared = SharedIndex::new(words);
        for hash in
            [1, shared.words[shared.num_entries / 2 * ENTRY_LEN + 1].load(Ordering::Relaxed)]
        {
            match shared.find(Key { hash: hash.max(1), others: [0, 0] }) {
                Found::Index(footer, offsets) => {
                    let len = usize::try_from(footer.num_chunks).unwrap_or(usize::MAX);
                    assert!(offsets.get(0).is_some() == (len > 0) && offsets.get(len).is_none());
                }
                Found::Unpublished(publisher) => {
                    let mut offsets = Offsets::default();
                    (1..20).for_each(|offset| offsets.push(offset << 30));
                    let footer = Footer { num_chunks: 19, ..Footer::default() };
                    let shared = publisher.publish(&footer, offsets);
                    assert!(shared.get(18).is_some() && shared.get(19).is_none());
                }
                Found::Unavailable => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::option;
    use proptest::prelude::*;

    use super::*;

    /// The memory as mapped by two processes.
    fn two_processes(num_words: usize) -> (SharedIndex, SharedIndex) {
        let (words, file) = Words::create(num_words).unwrap();
        let other = Words::open(platform::borrowed(&file), num_words).unwrap();
        (SharedIndex::new(words), SharedIndex::new(other))
    }

    fn key(hash: u64) -> Key {
        Key { hash, others: [7, 9] }
    }

    fn index(offsets: &[u64], options: Option<&str>) -> (Footer, Offsets) {
        let mut all = Offsets::default();
        for &offset in offsets {
            all.push(offset);
        }
        let num_chunks = offsets.len() as u64;
        let footer = Footer {
            num_records: num_chunks.wrapping_mul(3),
            num_chunks,
            group_size: 3,
            first_offset: offsets.first().copied().unwrap_or(1),
            writer_options: options.map(str::to_owned),
        };
        (footer, all)
    }

    fn publish(shared: &SharedIndex, key: Key, offsets: &[u64]) -> Offsets {
        let Found::Unpublished(publisher) = shared.find(key) else { panic!("expected no index") };
        let (footer, offsets) = index(offsets, Some("group_size:3"));
        publisher.publish(&footer, offsets)
    }

    fn is_unpublished(found: &Found<'_>) -> bool {
        matches!(found, Found::Unpublished(_))
    }

    proptest! {
        #[test]
        fn a_published_index_is_found_by_other_processes(
            mut offsets in vec(any::<u64>(), 0..300),
            options in option::of("[a-z:]{0,20}"),
        ) {
            offsets.sort_unstable();
            let (ours, theirs) = two_processes(4096);
            let (footer, expected) = index(&offsets, options.as_deref());
            let Found::Unpublished(publisher) = ours.find(key(5)) else { panic!("expected no index") };
            let shared = publisher.publish(&footer, index(&offsets, None).1);
            let Found::Index(found_footer, found) = theirs.find(key(5)) else {
                panic!("expected an index")
            };
            prop_assert_eq!(&found_footer, &footer);
            prop_assert!(found == expected && shared == expected);
            prop_assert_eq!(found.get(offsets.len()), None);
        }
    }

    proptest! {
        #[test]
        fn lookups_in_arbitrary_memory_do_not_panic(
            begin in vec(prop_oneof![any::<u64>(), 0_u64..600], 0..40),
            rest in vec(prop_oneof![any::<u64>(), 0_u64..600], 0..40),
        ) {
            let words = begin.iter().chain(&rest).flat_map(|word| word.to_le_bytes());
            fuzzing::lookup(&words.collect::<Vec<u8>>());
        }
    }

    #[test]
    fn unused_words_that_start_inside_the_table_are_not_used() {
        for begin in 1..17_u64 {
            fuzzing::lookup(&begin.to_le_bytes());
        }
    }

    #[test]
    fn an_index_without_enough_space_is_not_shared() {
        let (ours, theirs) = two_processes(128);
        let offsets: Vec<u64> = (1..=400).collect();
        let private = publish(&ours, key(1), &offsets);
        assert_eq!(private.get(399), Some(400));
        assert!(matches!(theirs.find(key(1)), Found::Unavailable));
        assert_eq!(
            publish(&theirs, key(2), &offsets[..20]).get(19),
            Some(20),
            "a shorter index fits"
        );
        assert!(matches!(ours.find(key(2)), Found::Index(..)));
    }

    #[test]
    fn shared_offsets_take_no_private_memory() {
        let (ours, _) = two_processes(4096);
        let offsets: Vec<u64> = (1..=4000).collect();
        assert!(publish(&ours, key(1), &offsets).byte_len() < 100);
        assert!(index(&offsets, None).1.byte_len() >= 16_000);
    }

    #[test]
    fn more_files_than_entries_are_not_shared() {
        let (ours, _) = two_processes(1024);
        let num_unpublished =
            (1..=100).filter(|&hash| is_unpublished(&ours.find(key(hash)))).count();
        assert_eq!(num_unpublished, 16);
    }

    #[test]
    fn a_dropped_right_to_publish_can_be_taken_again() {
        let (ours, theirs) = two_processes(1024);
        assert!(is_unpublished(&ours.find(key(1))));
        assert!(is_unpublished(&theirs.find(key(1))));
        // The mark of a process that has ended.
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let entry = ours.entry(key(1)).unwrap();
        ours.words[entry + 1].store(READ_BY | u64::from(child.id()), Ordering::Release);
        child.wait().unwrap();
        assert!(is_unpublished(&theirs.find(key(1))));
    }

    #[test]
    fn another_process_is_waited_for() {
        let (ours, theirs) = two_processes(1024);
        let Found::Unpublished(publisher) = ours.find(key(1)) else { panic!("expected no index") };
        std::thread::scope(|scope| {
            let found = scope.spawn(|| matches!(theirs.find(key(1)), Found::Index(..)));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!found.is_finished());
            let (footer, offsets) = index(&[4, 5], None);
            publisher.publish(&footer, offsets);
            assert!(found.join().unwrap());
        });
    }

    #[test]
    fn files_with_equal_hashes_are_distinguished() {
        let (ours, theirs) = two_processes(1024);
        publish(&ours, key(1), &[2, 3]);
        assert!(matches!(theirs.find(Key { hash: 1, others: [8, 9] }), Found::Unavailable));
    }
}
