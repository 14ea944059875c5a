//! Blocks of objects on a local disk, shared by the processes of a host.
//!
//! The cache is one sparse file of fixed size: a table of slot headers, then the slots, each for one
//! block. A block may only be in the few slots of its set, and a new one replaces the one of its set
//! that was not used for longest, so that nothing has to be scanned or deleted.
//!
//! There is no lock. Processes may write the same slot at the same time, or end while they write; a
//! header then has a wrong checksum, or bytes that are not the ones of its header. So whoever reads a
//! block verifies the checksum of all of it, and what does not match is not there.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use grainmill_core::platform;
use grainmill_core::process::PerProcess;
use grainmill_core::{Error, Result};
use highway::{HighwayHash, HighwayHasher, Key};

/// The length of a block; only the last of an object is shorter.
pub const BLOCK_LEN: u64 = 128 << 10;
const HEADER_LEN: u64 = HEADER_BYTES as u64;
const HEADER_BYTES: usize = 64;
/// How many slots a block may be in.
const SET_LEN: u64 = (SET_BYTES / HEADER_BYTES) as u64;
const SET_BYTES: usize = 8 * HEADER_BYTES;
/// The name of a file of the present layout starts with this; the number of its slots follows.
const NAME: &str = "grainmill-blocks-v1-";
/// A header says to the minute when its block was used: a read seldom writes.
const USE_INTERVAL_S: u64 = 60;

const CHECKSUM: Key = Key([0x6772_6169_6e6d_696c, 0x6c2d_626c_6f63_6b73, 1, 2]);

/// Identifies a block: what object it is of, in which state, and which of its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockKey(u64, u64);

impl BlockKey {
    /// Block number `block` of the object that `identity` describes.
    pub fn new(identity: &str, block: u64) -> Self {
        let mut hasher = HighwayHasher::new(CHECKSUM);
        hasher.append(&block.to_le_bytes());
        hasher.append(identity.as_bytes());
        let [low, high] = hasher.finalize128();
        Self(low, high)
    }

    /// A number that differs between blocks.
    pub fn number(self) -> u64 {
        self.0
    }
}

/// A header of a slot whose own checksum is right.
#[derive(Debug, Clone, Copy)]
struct Header {
    key: BlockKey,
    checksum: u64,
    len: u64,
}

impl Header {
    fn parse(bytes: &[u8]) -> Option<Self> {
        let number = |at: usize| {
            let bytes = bytes.get(at..at + 8)?.try_into().ok()?;
            Some(u64::from_le_bytes(bytes))
        };
        let own = HighwayHasher::new(CHECKSUM).hash64(bytes.get(..32)?);
        let header =
            Self { key: BlockKey(number(0)?, number(8)?), checksum: number(16)?, len: number(24)? };
        (number(32)? == own && header.len <= BLOCK_LEN).then_some(header)
    }

    fn bytes(self, used_s: u64) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let numbers = [self.key.0, self.key.1, self.checksum, self.len];
        for (out, number) in bytes.chunks_exact_mut(8).zip(numbers) {
            out.copy_from_slice(&number.to_le_bytes());
        }
        let own = HighwayHasher::new(CHECKSUM).hash64(&bytes[..32]);
        bytes[32..40].copy_from_slice(&own.to_le_bytes());
        bytes[40..48].copy_from_slice(&used_s.to_le_bytes());
        bytes
    }
}

/// When a header says its block was last used, which its checksum does not cover.
fn used_s(bytes: &[u8]) -> u64 {
    bytes[40..48].try_into().map_or(0, u64::from_le_bytes)
}

/// A file of blocks.
#[derive(Debug)]
pub struct BlockCache {
    file: File,
    num_sets: u64,
}

/// By directory and size.
type Caches = HashMap<(PathBuf, u64), Arc<BlockCache>>;

static CACHES: PerProcess<Mutex<Caches>> = PerProcess::new(Mutex::default);

impl BlockCache {
    /// The cache in `dir`, of at most `byte_len` bytes, one for all callers of a process. A cache of
    /// another size there is deleted.
    ///
    /// # Errors
    /// If it is too small for a set of blocks, or cannot be created.
    pub fn open(dir: &Path, byte_len: u64) -> Result<Arc<Self>> {
        let mut caches = CACHES.lock();
        let key = (dir.to_owned(), byte_len);
        if let Some(cache) = caches.get(&key) {
            return Ok(Arc::clone(cache));
        }
        let cache = Arc::new(Self::create(dir, byte_len)?);
        caches.insert(key, Arc::clone(&cache));
        Ok(cache)
    }

    fn create(dir: &Path, byte_len: u64) -> Result<Self> {
        let num_sets = byte_len / (SET_LEN * (BLOCK_LEN + HEADER_LEN));
        if num_sets == 0 {
            return Err(Error::InvalidArgument(format!(
                "a cache of blocks needs at least {} bytes, got {byte_len}",
                SET_LEN * (BLOCK_LEN + HEADER_LEN)
            )));
        }
        let failed = |error| Error::io(dir, "create a cache of blocks", error);
        platform::create_private_dirs(dir).map_err(failed)?;
        let name = format!("{NAME}{}", num_sets * SET_LEN);
        for entry in fs::read_dir(dir).map_err(failed)?.flatten() {
            let other = entry.file_name();
            if other.to_str().is_some_and(|other| other.starts_with(NAME) && other != name) {
                // Processes that still use it keep their open file.
                let _ = fs::remove_file(entry.path());
            }
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        platform::make_private(&mut options);
        let file = options.open(dir.join(name)).map_err(failed)?;
        file.set_len(num_sets * SET_LEN * (BLOCK_LEN + HEADER_LEN)).map_err(failed)?;
        Ok(Self { file, num_sets })
    }

    fn headers_of(&self, key: BlockKey) -> (u64, io::Result<[u8; SET_BYTES]>) {
        let set = key.1 % self.num_sets;
        let mut headers = [0; SET_BYTES];
        let read = read_at(&self.file, &mut headers, set * SET_BYTES as u64);
        (set * SET_LEN, read.map(|()| headers))
    }

    /// Where the bytes of a slot are.
    fn place(&self, slot: u64) -> u64 {
        self.num_sets * SET_BYTES as u64 + slot * BLOCK_LEN
    }

    /// Whether a block is probably there.
    pub fn contains(&self, key: BlockKey) -> bool {
        let (_, Ok(headers)) = self.headers_of(key) else { return false };
        let mut headers = headers.chunks_exact(HEADER_BYTES);
        headers.any(|bytes| Header::parse(bytes).is_some_and(|header| header.key == key))
    }

    /// Reads a block of `len` bytes into `out`; returns whether it is there and intact.
    pub fn read(&self, key: BlockKey, len: u64, out: &mut Vec<u8>) -> bool {
        let (first, Ok(headers)) = self.headers_of(key) else { return false };
        for (slot, bytes) in (first..).zip(headers.chunks_exact(HEADER_BYTES)) {
            let Some(header) = Header::parse(bytes) else { continue };
            if header.key != key || header.len != len {
                continue;
            }
            out.resize(usize::try_from(len).unwrap_or(0), 0);
            if read_at(&self.file, out, self.place(slot)).is_err()
                || HighwayHasher::new(CHECKSUM).hash64(out) != header.checksum
            {
                continue;
            }
            let now = now_s();
            if now.abs_diff(used_s(bytes)) > USE_INTERVAL_S {
                let _ = write_at(&self.file, &now.to_le_bytes(), slot * HEADER_LEN + 40);
            }
            return true;
        }
        false
    }

    /// Keeps a block, if the disk has room for it.
    pub fn write(&self, key: BlockKey, block: &[u8]) {
        let (first, Ok(headers)) = self.headers_of(key) else { return };
        let slots = (first..).zip(headers.chunks_exact(HEADER_BYTES));
        // The slot that claims to have it, or an empty one, or the one that is least recently used.
        let rank = |bytes: &[u8]| match Header::parse(bytes) {
            Some(header) if header.key == key => (0, 0),
            None => (1, 0),
            Some(_) => (2, used_s(bytes)),
        };
        let Some((slot, _)) = slots.min_by_key(|(_, bytes)| rank(bytes)) else { return };
        let checksum = HighwayHasher::new(CHECKSUM).hash64(block);
        let header = Header { key, checksum, len: block.len() as u64 };
        if write_at(&self.file, block, self.place(slot)).is_ok() {
            let _ = write_at(&self.file, &header.bytes(now_s()), slot * HEADER_LEN);
        }
    }
}

fn now_s() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}

#[cfg(unix)]
fn read_at(file: &File, out: &mut [u8], at: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, at)
}

#[cfg(unix)]
fn write_at(file: &File, bytes: &[u8], at: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, at)
}

#[cfg(windows)]
fn read_at(file: &File, mut out: &mut [u8], mut at: u64) -> io::Result<()> {
    while !out.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, out, at)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            len => {
                out = &mut out[len..];
                at += len as u64;
            }
        }
    }
    Ok(())
}

#[cfg(windows)]
fn write_at(file: &File, mut bytes: &[u8], mut at: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        let len = std::os::windows::fs::FileExt::seek_write(file, bytes, at)?;
        bytes = &bytes[len..];
        at += len as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALLEST: u64 = SET_LEN * (BLOCK_LEN + HEADER_LEN);

    fn block(seed: u64, len: usize) -> Vec<u8> {
        (0..len as u64)
            .map(|at| (at.wrapping_mul(31) ^ seed.wrapping_mul(0x9e37)).to_le_bytes()[0])
            .collect()
    }

    fn found(cache: &BlockCache, key: BlockKey, len: usize) -> Option<Vec<u8>> {
        let mut out = Vec::new();
        cache.read(key, len as u64, &mut out).then_some(out)
    }

    #[test]
    fn written_blocks_are_found_by_all_who_open_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        let [one, other] = [(); 2].map(|()| BlockCache::create(dir.path(), 4 * SMALLEST).unwrap());
        for number in 0..6 {
            let len = if number == 5 { 77 } else { 128 << 10 };
            let key = BlockKey::new("object", number);
            assert_eq!(found(&other, key, len), None);
            assert!(!other.contains(key));
            one.write(key, &block(number, len));
            assert_eq!(found(&other, key, len), Some(block(number, len)));
            assert!(other.contains(key));
            assert_eq!(found(&other, BlockKey::new("changed object", number), len), None);
            assert_eq!(found(&other, key, len - 1), None);
        }
    }

    #[test]
    fn file_never_exceeds_its_size_and_the_oldest_block_goes_first() {
        let dir = tempfile::tempdir().unwrap();
        let cache = BlockCache::create(dir.path(), SMALLEST + 5).unwrap();
        let key = |number| BlockKey::new("object", number);
        for number in 0..SET_LEN {
            cache.write(key(number), &block(number, 1000));
            // As if each had been used a second after the one before.
            let (_, headers) = cache.headers_of(key(number));
            let slot = headers.unwrap().chunks_exact(HEADER_BYTES).position(|bytes| {
                Header::parse(bytes).is_some_and(|header| header.key == key(number))
            });
            write_at(
                &cache.file,
                &(1000 + number).to_le_bytes(),
                slot.unwrap() as u64 * HEADER_LEN + 40,
            )
            .unwrap();
        }
        // It is used now, which makes it the newest.
        assert!(found(&cache, key(0), 1000).is_some());
        cache.write(key(100), &block(100, 1000));
        let kept: Vec<u64> = (0..SET_LEN).filter(|&number| cache.contains(key(number))).collect();
        assert_eq!(kept, [0, 2, 3, 4, 5, 6, 7]);
        for number in 200..300 {
            cache.write(key(number), &block(number, 128 << 10));
        }
        let len = cache.file.metadata().unwrap().len();
        assert_eq!(len, SMALLEST);
        let names: Vec<_> =
            fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names.len(), 1, "{names:?}");
    }

    #[test]
    fn damaged_blocks_are_not_found_until_written_again() {
        let dir = tempfile::tempdir().unwrap();
        let cache = BlockCache::create(dir.path(), SMALLEST).unwrap();
        let (key, data) = (BlockKey::new("object", 0), block(1, 5000));
        cache.write(key, &data);
        let len = cache.file.metadata().unwrap().len();
        let mut intact = vec![0; usize::try_from(len).unwrap()];
        read_at(&cache.file, &mut intact, 0).unwrap();
        let used: Vec<usize> = (0..intact.len()).filter(|&at| intact[at] != 0).collect();
        let mut num_damaged = 0;
        for step in 0..2000_usize {
            let at = used[step * 7919 % used.len()];
            write_at(&cache.file, &[intact[at] ^ (1 << (step % 8))], at as u64).unwrap();
            match found(&cache, key, 5000) {
                // When it was used is not covered by a checksum.
                Some(read) => assert_eq!(read, data, "byte {at}"),
                None => num_damaged += 1,
            }
            cache.write(key, &data);
            assert_eq!(found(&cache, key, 5000), Some(data.clone()));
        }
        assert!(num_damaged > 1500, "{num_damaged}");
    }

    #[test]
    fn threads_that_share_slots_read_what_was_written_or_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let cache = BlockCache::create(dir.path(), SMALLEST).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                let cache = &cache;
                scope.spawn(move || {
                    for step in 0..400_u64 {
                        let number = (step * 7 + thread * 3) % 24;
                        let key = BlockKey::new("object", number);
                        match found(cache, key, 60_000) {
                            Some(read) => assert!(read == block(number, 60_000)),
                            None => cache.write(key, &block(number, 60_000)),
                        }
                    }
                });
            }
        });
    }

    #[cfg(unix)]
    #[test]
    fn others_cannot_read_a_cache_and_links_are_not_followed() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("blocks");
        BlockCache::create(&dir, SMALLEST).unwrap();
        let (name, mode) = {
            let entry = fs::read_dir(&dir).unwrap().next().unwrap().unwrap();
            (entry.path(), entry.metadata().unwrap().permissions().mode() & 0o777)
        };
        assert_eq!(mode, 0o600);
        assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
        fs::remove_file(&name).unwrap();
        let other = parent.path().join("other");
        fs::write(&other, b"kept").unwrap();
        symlink(&other, &name).unwrap();
        assert!(BlockCache::create(&dir, SMALLEST).is_err());
        assert_eq!(fs::read(&other).unwrap(), b"kept");
    }

    #[test]
    fn cache_of_another_size_is_replaced_and_too_small_ones_are_errors() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("other"), b"kept").unwrap();
        BlockCache::create(dir.path(), 3 * SMALLEST).unwrap();
        BlockCache::create(dir.path(), 2 * SMALLEST).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
        assert!(dir.path().join("other").exists());
        let error = BlockCache::create(dir.path(), SMALLEST - 1).unwrap_err().to_string();
        assert!(error.contains("at least"), "{error}");
        let error =
            BlockCache::create(&dir.path().join("other"), SMALLEST).unwrap_err().to_string();
        assert!(error.contains("create a cache of blocks"), "{error}");
    }
}
