//! Random numbers for what happens at the same time, whose order no seed of a test decides.

use std::sync::OnceLock;

/// Random bytes are taken from so many: making them up takes longer than all else.
const NOISE_LEN: usize = 1 << 16;

/// A random generator.
#[derive(Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 16).unwrap() % end.max(1)
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        static NOISE: OnceLock<Vec<u8>> = OnceLock::new();
        let noise = NOISE.get_or_init(|| {
            let mut random = Self::new(0x9e37_79b9_7f4a_7c15);
            (0..NOISE_LEN).map(|_| u8::try_from(random.below(256)).unwrap()).collect()
        });
        let begin = self.below(NOISE_LEN);
        let mut bytes = noise[begin..].to_vec();
        bytes.extend(noise.repeat(len / NOISE_LEN + 1));
        bytes.truncate(len);
        bytes
    }
}
