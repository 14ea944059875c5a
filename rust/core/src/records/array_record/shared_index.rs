//! The indices of files as the processes of a pool share them: each is read by whoever needs it
//! first, for all of them.
//!
//! The memory is a row of words. The first is where unused ones begin; then comes a table of files
//! and then what their indices say. Nothing is ever taken out again, so whoever has found an index
//! may keep looking at it. Once all words are used, each process keeps further ones for itself.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::super::riegeli::chunk::ChunkHeader;
use super::footer::Footer;
use super::offsets::Offsets;
use crate::platform::{self, BorrowedFile, OwnedFile};
use crate::shared_memory::Words;
use crate::{Result, process};

/// Words of an entry of the table: the key of a file, and where its index is.
const ENTRY_LEN: usize = 2;
/// How many entries a file may have; where all are others', its index is not shared.
const MAX_TRIES: usize = 32;
/// For how many words there is one entry: an index of fewer chunks is below a page.
const WORDS_PER_ENTRY: usize = 64;
/// What the second word of an entry is besides a place: no process has read the index yet, the
/// process of that number is reading it, there was no room for it.
const UNREAD: u64 = 0;
const READ_BY: u64 = 1 << 63;
const NO_ROOM: u64 = u64::MAX;

/// How often to look whether another process is done, and for how long.
const LOOK_EVERY: Duration = Duration::from_millis(1);
const MAX_WAIT: Duration = Duration::from_secs(60);

static SHARED: OnceLock<Arc<SharedIndex>> = OnceLock::new();

/// Has this process share the indices of files with all others that are given the same file, which
/// [`create`] made for `byte_len` bytes. Only the first call has an effect.
///
/// # Errors
///
/// If the file is another one, or cannot be mapped.
pub fn share(file: BorrowedFile<'_>, byte_len: usize) -> Result<()> {
    let words = Words::open(file, num_words(byte_len))?;
    SHARED.get_or_init(|| Arc::new(SharedIndex::new(words)));
    Ok(())
}

/// A file of `byte_len` bytes for [`share`]; memory is used only as indices come.
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

/// How many bytes of indices the processes share that this one shares them with.
pub fn shared_bytes() -> u64 {
    let used =
        |shared: &Arc<SharedIndex>| shared.words[0].load(Ordering::Relaxed) - shared.first_free();
    SHARED.get().map_or(0, |shared| used(shared) * size_of::<u64>() as u64)
}

/// The memory that this process shares, if it does.
pub(super) fn shared() -> Option<&'static Arc<SharedIndex>> {
    SHARED.get()
}

/// What tells files apart: the hash of what the footer says, and what else its header has.
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
pub(super) struct SharedIndex {
    words: Words,
    num_entries: usize,
}

/// What is known of a file that was asked for.
#[derive(Debug)]
pub(super) enum Found<'a> {
    /// Its index.
    Index(Footer, Offsets),
    /// Nothing yet, and the others wait for this process to tell.
    Claim(Claim<'a>),
    /// Nothing, and it cannot be shared.
    Nothing,
}

/// The right to write the index of one file; others may try when it goes.
#[derive(Debug)]
pub(super) struct Claim<'a> {
    shared: &'a Arc<SharedIndex>,
    key: Key,
    entry: usize,
}

impl SharedIndex {
    fn new(words: Words) -> Self {
        let num_entries = 1 << (words.len() / WORDS_PER_ENTRY).max(1).ilog2();
        let shared = Self { words, num_entries };
        // The first process to come sets it.
        let begin = shared.first_free();
        let _ = shared.words[0].compare_exchange(0, begin, Ordering::AcqRel, Ordering::Acquire);
        shared
    }

    /// Where unused words begin at first.
    fn first_free(&self) -> u64 {
        (1 + self.num_entries * ENTRY_LEN) as u64
    }

    /// The words from `at` on, if there are so many.
    pub(super) fn words(&self, at: usize, len: usize) -> Option<&[AtomicU64]> {
        self.words.get(at..at.checked_add(len)?)
    }

    /// The index of the file with `key`, or the right to add it; waits for a process that is at it.
    pub(super) fn find(self: &Arc<Self>, key: Key) -> Found<'_> {
        let Some(entry) = self.entry(key) else { return Found::Nothing };
        let place = &self.words[entry + 1];
        let mine = READ_BY | u64::from(process::id());
        let deadline = Instant::now() + MAX_WAIT;
        loop {
            let seen = place.load(Ordering::Acquire);
            if seen == NO_ROOM {
                return Found::Nothing;
            }
            if seen != UNREAD && seen & READ_BY == 0 {
                return self.read(key, seen).unwrap_or(Found::Nothing);
            }
            if seen == UNREAD || !is_alive(seen & !READ_BY) {
                if place.compare_exchange(seen, mine, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                    return Found::Claim(Claim { shared: self, key, entry });
                }
                continue;
            }
            if Instant::now() >= deadline {
                return Found::Nothing;
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// The entry of `key`, which is made if there is none.
    fn entry(&self, key: Key) -> Option<usize> {
        let first = usize::try_from(key.hash % self.num_entries as u64).ok()?;
        (first..first + MAX_TRIES.min(self.num_entries))
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

    fn read(self: &Arc<Self>, key: Key, place: u64) -> Option<Found<'static>> {
        let mut at = usize::try_from(place).ok().filter(|_| place >= self.first_free())?;
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
        let offsets = Offsets::shared(Arc::clone(self), at, len, high)?;
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
        let place = self.words[0].fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
            let end = used.checked_add(len as u64).filter(|&end| end <= all);
            end.filter(|_| used >= self.first_free())
        });
        let place = place.ok()?;
        let to = self.words(usize::try_from(place).ok()?, len)?;
        for (word, value) in to.iter().zip(head.into_iter().chain(offsets.low_pairs())) {
            word.store(value, Ordering::Relaxed);
        }
        Some(place)
    }
}

impl Claim<'_> {
    /// Tells all processes; returns the offsets as they share them, or as they were without room.
    pub(super) fn tell(self, footer: &Footer, offsets: Offsets) -> Offsets {
        let place = self.shared.write(self.key, footer, &offsets);
        let word = &self.shared.words[self.entry + 1];
        word.store(place.unwrap_or(NO_ROOM), Ordering::Release);
        match place.and_then(|place| self.shared.read(self.key, place)) {
            Some(Found::Index(_, shared)) => shared,
            _ => offsets,
        }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        // Nothing was told: the file could not be read.
        let mine = READ_BY | u64::from(process::id());
        let word = &self.shared.words[self.entry + 1];
        let _ = word.compare_exchange(mine, UNREAD, Ordering::AcqRel, Ordering::Acquire);
    }
}

/// Whether there is a process of this number, as far as can be told.
fn is_alive(number: u64) -> bool {
    u32::try_from(number).is_ok_and(platform::is_alive)
}

/// What a process does with shared memory in which anything may lie.
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing {
    use super::*;

    /// Looks up a file in memory that begins as `input` says, and tells of one.
    pub fn look(input: &[u8]) {
        const NUM_WORDS: usize = 512;
        let Ok((words, _file)) = Words::create(NUM_WORDS) else { return };
        for (word, bytes) in words.iter().zip(input.chunks(8)) {
            let value = bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte));
            // Another process may be at work for as long as it likes.
            word.store(if value == NO_ROOM { value } else { value & !READ_BY }, Ordering::Relaxed);
        }
        let shared = Arc::new(SharedIndex::new(words));
        for hash in
            [1, shared.words[shared.num_entries / 2 * ENTRY_LEN + 1].load(Ordering::Relaxed)]
        {
            match shared.find(Key { hash: hash.max(1), others: [0, 0] }) {
                Found::Index(footer, offsets) => {
                    let len = usize::try_from(footer.num_chunks).unwrap_or(usize::MAX);
                    assert!(offsets.get(0).is_some() == (len > 0) && offsets.get(len).is_none());
                }
                Found::Claim(claim) => {
                    let mut offsets = Offsets::default();
                    (1..20).for_each(|offset| offsets.push(offset << 30));
                    let footer = Footer { num_chunks: 19, ..Footer::default() };
                    let told = claim.tell(&footer, offsets);
                    assert!(told.get(18).is_some() && told.get(19).is_none());
                }
                Found::Nothing => {}
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

    /// The memory as two processes see it.
    fn two(num_words: usize) -> (Arc<SharedIndex>, Arc<SharedIndex>) {
        let (words, file) = Words::create(num_words).unwrap();
        let other = Words::open(platform::borrowed(&file), num_words).unwrap();
        (Arc::new(SharedIndex::new(words)), Arc::new(SharedIndex::new(other)))
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

    fn told(shared: &Arc<SharedIndex>, key: Key, offsets: &[u64]) -> Offsets {
        let Found::Claim(claim) = shared.find(key) else { panic!("somebody else was there") };
        let (footer, offsets) = index(offsets, Some("group_size:3"));
        claim.tell(&footer, offsets)
    }

    fn is_claim(found: &Found<'_>) -> bool {
        matches!(found, Found::Claim(_))
    }

    proptest! {
        #[test]
        fn what_one_tells_the_others_find(
            mut offsets in vec(any::<u64>(), 0..300),
            options in option::of("[a-z:]{0,20}"),
        ) {
            offsets.sort_unstable();
            let (ours, theirs) = two(4096);
            let (footer, expected) = index(&offsets, options.as_deref());
            let Found::Claim(claim) = ours.find(key(5)) else { panic!("nobody has told") };
            let shared = claim.tell(&footer, index(&offsets, None).1);
            let Found::Index(found_footer, found) = theirs.find(key(5)) else {
                panic!("it was told")
            };
            prop_assert_eq!(&found_footer, &footer);
            prop_assert!(found == expected && shared == expected);
            prop_assert_eq!(found.get(offsets.len()), None);
        }
    }

    proptest! {
        #[test]
        fn memory_in_which_anything_lies_is_looked_at_without_a_panic(
            begin in vec(prop_oneof![any::<u64>(), 0_u64..600], 0..40),
            rest in vec(prop_oneof![any::<u64>(), 0_u64..600], 0..40),
        ) {
            let words = begin.iter().chain(&rest).flat_map(|word| word.to_le_bytes());
            fuzzing::look(&words.collect::<Vec<u8>>());
        }
    }

    #[test]
    fn unused_words_that_begin_inside_the_table_are_not_used() {
        for begin in 1..17_u64 {
            fuzzing::look(&begin.to_le_bytes());
        }
    }

    #[test]
    fn what_has_no_room_is_not_shared() {
        let (ours, theirs) = two(128);
        let offsets: Vec<u64> = (1..=400).collect();
        let kept = told(&ours, key(1), &offsets);
        assert_eq!(kept.get(399), Some(400));
        assert!(matches!(theirs.find(key(1)), Found::Nothing));
        assert_eq!(told(&theirs, key(2), &offsets[..20]).get(19), Some(20), "a shorter one has");
        assert!(matches!(ours.find(key(2)), Found::Index(..)));
    }

    #[test]
    fn shared_offsets_take_no_memory_of_a_process() {
        let (ours, _) = two(4096);
        let offsets: Vec<u64> = (1..=4000).collect();
        assert!(told(&ours, key(1), &offsets).byte_len() < 100);
        assert!(index(&offsets, None).1.byte_len() >= 16_000);
    }

    #[test]
    fn more_files_than_entries_are_not_shared() {
        let (ours, _) = two(1024);
        let num_claims = (1..=100).filter(|&hash| is_claim(&ours.find(key(hash)))).count();
        assert_eq!(num_claims, 16);
    }

    #[test]
    fn a_claim_that_is_dropped_is_free_again() {
        let (ours, theirs) = two(1024);
        assert!(is_claim(&ours.find(key(1))));
        assert!(is_claim(&theirs.find(key(1))));
        // Of a process that has ended.
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let entry = ours.entry(key(1)).unwrap();
        ours.words[entry + 1].store(READ_BY | u64::from(child.id()), Ordering::Release);
        child.wait().unwrap();
        assert!(is_claim(&theirs.find(key(1))));
    }

    #[test]
    fn another_process_is_waited_for() {
        let (ours, theirs) = two(1024);
        let Found::Claim(claim) = ours.find(key(1)) else { panic!("nobody has told") };
        std::thread::scope(|scope| {
            let found = scope.spawn(|| matches!(theirs.find(key(1)), Found::Index(..)));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!found.is_finished());
            let (footer, offsets) = index(&[4, 5], None);
            claim.tell(&footer, offsets);
            assert!(found.join().unwrap());
        });
    }

    #[test]
    fn files_of_equal_hashes_are_told_apart() {
        let (ours, theirs) = two(1024);
        told(&ours, key(1), &[2, 3]);
        assert!(matches!(theirs.find(Key { hash: 1, others: [8, 9] }), Found::Nothing));
    }
}
