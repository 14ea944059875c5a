//! The offsets of the files read lately, within a bound on their memory for each process.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::offsets::Offsets;
use crate::process::PerProcess;

/// How many bytes of offsets are kept unless [`set_budget`] says otherwise.
const DEFAULT_BUDGET: usize = 256 << 20;

static BUDGET: AtomicUsize = AtomicUsize::new(DEFAULT_BUDGET);
static KEPT: PerProcess<Mutex<Kept>> = PerProcess::new(|| Mutex::new(Kept::default()));

/// Has each process keep no more than `byte_len` bytes of the indices of files; those whose last
/// use is longest ago are read again when they are needed. That of one file is kept in any case.
pub fn set_budget(byte_len: usize) {
    BUDGET.store(byte_len, Ordering::Relaxed);
}

/// How many bytes of the indices of files each process may keep.
pub fn budget() -> usize {
    BUDGET.load(Ordering::Relaxed)
}

/// How many bytes of the indices of files this process keeps.
pub fn kept_bytes() -> usize {
    with_kept(|kept| kept.byte_len)
}

#[derive(Debug, Default)]
struct Kept {
    files: HashMap<u64, (Arc<Offsets>, u64)>,
    byte_len: usize,
    clock: u64,
}

fn with_kept<T>(work: impl FnOnce(&mut Kept) -> T) -> T {
    work(&mut KEPT.get().lock().unwrap_or_else(PoisonError::into_inner))
}

impl Kept {
    fn get(&mut self, file: u64) -> Option<Arc<Offsets>> {
        self.clock += 1;
        let (offsets, last_used) = self.files.get_mut(&file)?;
        *last_used = self.clock;
        Some(Arc::clone(offsets))
    }

    fn insert(&mut self, file: u64, offsets: Arc<Offsets>, budget: usize) {
        self.remove(file);
        let byte_len = offsets.byte_len();
        if self.byte_len + byte_len > budget {
            // Somewhat more than has to be: to find the oldest takes a look at all.
            self.shrink((budget - budget / 8).saturating_sub(byte_len));
        }
        self.clock += 1;
        self.byte_len += byte_len;
        self.files.insert(file, (offsets, self.clock));
    }

    /// Forgets the files whose last use is longest ago until `byte_len` bytes are left.
    fn shrink(&mut self, byte_len: usize) {
        let mut uses: Vec<(u64, u64)> =
            self.files.iter().map(|(&file, &(_, last_used))| (last_used, file)).collect();
        uses.sort_unstable();
        for (_, file) in uses {
            if self.byte_len <= byte_len {
                return;
            }
            self.remove(file);
        }
    }

    fn remove(&mut self, file: u64) {
        if let Some((offsets, _)) = self.files.remove(&file) {
            self.byte_len -= offsets.byte_len();
        }
    }
}

/// The offsets of `file`, if they are kept.
pub(super) fn get(file: u64) -> Option<Arc<Offsets>> {
    with_kept(|kept| kept.get(file))
}

/// Keeps the offsets of `file`.
pub(super) fn keep(file: u64, offsets: &Arc<Offsets>) {
    with_kept(|kept| kept.insert(file, Arc::clone(offsets), budget()));
}

/// Lets go of the offsets of `file`.
pub(super) fn forget(file: u64) {
    with_kept(|kept| kept.remove(file));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offsets(count: u64) -> Arc<Offsets> {
        let mut offsets = Offsets::default();
        (1..=count).for_each(|offset| offsets.push(offset));
        offsets.shrink();
        Arc::new(offsets)
    }

    #[test]
    fn files_used_lately_stay_within_the_budget() {
        let mut kept = Kept::default();
        let byte_len = offsets(1000).byte_len();
        let budget = 16 * byte_len;
        for file in 0..1000 {
            kept.insert(file, offsets(1000), budget);
            assert!(kept.byte_len <= budget);
            assert_eq!(kept.byte_len, kept.files.len() * byte_len);
            assert!(kept.get(0).is_some(), "used each time");
            assert!(kept.get(file).is_some());
        }
        assert!(kept.files.len() >= 12);
        assert!(kept.get(900).is_none());
        kept.insert(2000, offsets(100_000), budget);
        assert_eq!(kept.files.len(), 1, "that of one file is kept however long");
        kept.remove(2000);
        assert_eq!(kept.byte_len, 0);
    }
}
