//! What a thread reuses from one chunk to the next, each format its own.

use std::any::Any;
use std::fmt::Debug;

/// Longer buffers are freed after use.
pub const MAX_RETAINED_LEN: usize = 8 << 20;

/// Decompressors and memory of one format.
pub trait FormatScratch: Any + Debug + Send {
    /// Frees memory that only an unusually large chunk needs.
    fn trim(&mut self);
}

/// The scratch of each format that this thread has decoded.
#[derive(Debug, Default)]
pub struct DecodeScratch(Vec<Box<dyn FormatScratch>>);

impl DecodeScratch {
    /// The scratch of type `T`, created at its first use.
    ///
    /// # Panics
    /// Never: what was just found or added is there.
    pub fn of<T: FormatScratch + Default>(&mut self) -> &mut T {
        let is_of = |scratch: &dyn FormatScratch| (scratch as &dyn Any).is::<T>();
        if !self.0.iter().any(|scratch| is_of(&**scratch)) {
            self.0.push(Box::<T>::default());
        }
        let mut all = self.0.iter_mut().map(|scratch| &mut **scratch as &mut dyn Any);
        all.find_map(<dyn Any>::downcast_mut).expect("one of that type")
    }

    /// Frees memory that only unusually large chunks need.
    pub(crate) fn trim(&mut self) {
        for scratch in &mut self.0 {
            scratch.trim();
        }
    }
}
