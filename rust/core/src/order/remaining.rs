//! A set of integers from which elements are removed by rank.

/// The integers of `0..len` that have not been removed.
#[derive(Debug)]
pub(crate) struct Remaining {
    /// A bit for each integer, set until it is removed.
    words: Vec<u64>,
    /// The number of set bits under each node of a binary tree over the words; the root is 1.
    counts: Vec<usize>,
}

impl Remaining {
    pub(crate) fn new(len: usize) -> Self {
        let num_words = len.div_ceil(64).next_power_of_two();
        let mut words = vec![u64::MAX; num_words];
        for (number, word) in words.iter_mut().enumerate() {
            let bits = len.saturating_sub(64 * number);
            if bits < 64 {
                *word = (1 << bits) - 1;
            }
        }
        let mut counts = vec![0; 2 * num_words];
        for (count, word) in counts[num_words..].iter_mut().zip(&words) {
            *count = word.count_ones() as usize;
        }
        for node in (1..num_words).rev() {
            counts[node] = counts[2 * node] + counts[2 * node + 1];
        }
        Self { words, counts }
    }

    /// Removes and returns the element that has `rank` smaller ones; it must exist.
    pub(crate) fn remove_by_rank(&mut self, mut rank: usize) -> usize {
        let mut node = 1;
        while node < self.words.len() {
            self.counts[node] -= 1;
            node *= 2;
            if rank >= self.counts[node] {
                rank -= self.counts[node];
                node += 1;
            }
        }
        self.counts[node] -= 1;
        let number = node - self.words.len();
        let word = &mut self.words[number];
        let bit = select_bit(*word, rank);
        *word &= !(1 << bit);
        64 * number + bit
    }
}

/// The offset of the set bit of `word` that has `rank` set bits below it.
fn select_bit(word: u64, mut rank: usize) -> usize {
    let (mut bit, mut width) = (0, 32);
    while width > 0 {
        let below = ((word >> bit) & ((1 << width) - 1)).count_ones() as usize;
        if rank >= below {
            rank -= below;
            bit += width;
        }
        width /= 2;
    }
    bit
}

#[cfg(test)]
mod tests {
    use super::Remaining;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn removal_matches_removal_from_a_list(
            len in prop_oneof![1..70_usize, 1..1000_usize],
            picks in prop::collection::vec(any::<usize>(), 1..1000),
        ) {
            let mut list: Vec<usize> = (0..len).collect();
            let mut remaining = Remaining::new(len);
            for pick in picks.into_iter().take(len) {
                let rank = pick % list.len();
                prop_assert_eq!(remaining.remove_by_rank(rank), list.remove(rank));
            }
        }
    }
}
