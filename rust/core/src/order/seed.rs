//! Derived seeds and random keys: C++'s `std::seed_seq` and NumPy's `SeedSequence`.
//!
//! Saved orders and every random number of a pipeline follow from these two functions, so
//! neither may change in a single bit; `tests/golden/order.json` pins them.

/// The words that C++ `std::seed_seq{seed}` generates.
pub fn seed_seq(seed: u32, num_words: usize) -> Vec<u32> {
    let mut words = vec![0; num_words];
    fill_seed_seq(seed, &mut words);
    words
}

/// Fills `words` as [`seed_seq`] does; a length known at compile time avoids divisions.
#[inline]
pub(super) fn fill_seed_seq(seed: u32, words: &mut [u32]) {
    let n = words.len();
    words.fill(0x8b8b_8b8b);
    if n == 0 {
        return;
    }
    let tail = match n {
        623.. => 11,
        68.. => 7,
        39.. => 5,
        7.. => 3,
        _ => (n - 1) / 2,
    };
    let p = (n - tail) / 2;
    let q = p + tail;
    let scramble = |x: u32| x ^ (x >> 27);
    let mut indices = WordIndices::new(n, p, q);
    for k in 0..n.max(2) {
        let [last, here, at_p, at_q] = indices.advance();
        let first = scramble(words[here] ^ words[at_p] ^ words[last]).wrapping_mul(1_664_525);
        let added = match k {
            0 => 1,
            1 => indices.step.wrapping_add(seed),
            _ => indices.step,
        };
        let second = first.wrapping_add(added);
        words[at_p] = words[at_p].wrapping_add(first);
        words[at_q] = words[at_q].wrapping_add(second);
        words[here] = second;
    }
    for _ in 0..n {
        let [last, here, at_p, at_q] = indices.advance();
        let sum = words[here].wrapping_add(words[at_p]).wrapping_add(words[last]);
        let third = scramble(sum).wrapping_mul(1_566_083_941);
        let fourth = third.wrapping_sub(indices.step);
        words[at_p] ^= third;
        words[at_q] ^= fourth;
        words[here] = fourth;
    }
}

/// The indices of the words that each step of [`seed_seq`] uses, modulo their number.
struct WordIndices {
    next: usize,
    n: usize,
    p: usize,
    q: usize,
    /// The number of the current step modulo the number of words, which the algorithm adds.
    step: u32,
}

impl WordIndices {
    #[inline]
    fn new(n: usize, p: usize, q: usize) -> Self {
        Self { next: 0, n, p, q, step: 0 }
    }

    #[inline]
    fn advance(&mut self) -> [usize; 4] {
        let (k, n) = (self.next, self.n);
        self.next += 1;
        self.step = u32::try_from(k % n).unwrap_or(u32::MAX);
        [(k + n - 1) % n, k % n, (k + self.p) % n, (k + self.q) % n]
    }
}

const POOL_LEN: usize = 4;

/// NumPy's `SeedSequence`: expands entropy of any length to any number of words.
#[derive(Clone, Debug)]
pub struct SeedSequence {
    pool: [u32; POOL_LEN],
}

impl SeedSequence {
    /// Mixes `entropy`: the concatenated 32-bit words, lowest first, of the integers given to
    /// NumPy. Zero is the single word 0.
    pub fn new(entropy: &[u32]) -> Self {
        let mut hash = 0x43b0_d7e5_u32;
        let mut hashed = |value: u32| {
            let value = value ^ hash;
            hash = hash.wrapping_mul(0x931e_8875);
            let value = value.wrapping_mul(hash);
            value ^ (value >> 16)
        };
        let mut pool = [0; POOL_LEN];
        for (at, word) in pool.iter_mut().enumerate() {
            *word = hashed(entropy.get(at).copied().unwrap_or(0));
        }
        for from in 0..POOL_LEN {
            for to in 0..POOL_LEN {
                if from != to {
                    pool[to] = mixed(pool[to], hashed(pool[from]));
                }
            }
        }
        for &word in entropy.iter().skip(POOL_LEN) {
            for to in &mut pool {
                *to = mixed(*to, hashed(word));
            }
        }
        Self { pool }
    }

    /// What NumPy's `generate_state(num_words, uint32)` returns.
    pub fn words(&self, num_words: usize) -> Vec<u32> {
        let mut hash = 0x8b51_f9dd_u32;
        let state = self.pool.iter().cycle().take(num_words).map(|&word| {
            let word = word ^ hash;
            hash = hash.wrapping_mul(0x58f3_8ded);
            let word = word.wrapping_mul(hash);
            word ^ (word >> 16)
        });
        state.collect()
    }
}

fn mixed(x: u32, y: u32) -> u32 {
    let mixed = x.wrapping_mul(0xca01_f9dd).wrapping_sub(y.wrapping_mul(0x4973_f715));
    mixed ^ (mixed >> 16)
}

/// The seed of a random stage without its own, derived from each upstream seed and its distance.
///
/// A seed is its 32-bit words, lowest first, at least one.
pub fn derived_seed(seeds: &[(Vec<u32>, u32)]) -> u32 {
    let mut entropy = Vec::with_capacity(2 * seeds.len());
    for (words, depth) in seeds {
        entropy.extend_from_slice(words);
        entropy.push(*depth);
    }
    SeedSequence::new(&entropy).words(1)[0]
}

/// The key of the Philox generator of a random stage; the counter is the element's index.
///
/// `seed` is its 32-bit words, lowest first, at least one.
pub fn philox_key(seed: &[u32]) -> [u64; 2] {
    let words = SeedSequence::new(seed).words(4);
    let pair = |at: usize| u64::from(words[at]) | (u64::from(words[at + 1]) << 32);
    [pair(0), pair(2)]
}

#[cfg(test)]
mod tests {
    use super::{SeedSequence, derived_seed, philox_key, seed_seq};

    #[test]
    fn seed_sequence_agrees_with_numpy() {
        assert_eq!(
            SeedSequence::new(&[42]).words(3),
            [3_444_837_047, 2_669_555_309, 2_046_530_742]
        );
        assert_eq!(
            SeedSequence::new(&[1, 2, 3, 4, 5, 6]).words(5),
            [488_360_481, 3_956_080_669, 2_986_500_235, 3_488_252_836, 3_841_783_222]
        );
        assert_eq!(derived_seed(&[(vec![42], 1)]), 3_329_053_876);
        assert_eq!(philox_key(&[5, 1]), [17_996_766_564_426_832_300, 12_826_844_651_305_701_079]);
    }

    #[test]
    fn seed_seq_agrees_with_the_standard_library() {
        assert_eq!(seed_seq(42, 4), [735_521_182, 3_707_395_978, 3_290_902_861, 980_519_533]);
        assert_eq!(seed_seq(7, 40)[..3], [2_598_027_323, 524_901_452, 2_470_868_508]);
        assert_eq!(seed_seq(7, 1024)[1022..], [422_046_185, 1_733_954_551]);
    }
}
