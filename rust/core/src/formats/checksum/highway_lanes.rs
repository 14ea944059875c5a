//! Computes several hashes at once.
//!
//! Each step of a hash waits for the multiplication of the step before, so a core that interleaves
//! three hashes takes hardly longer than for one. States are exchanged with the `highway` crate as
//! its checkpoints, which start with the four vectors of a state, in this order.
#![expect(unsafe_code, reason = "vector loads, and calls that need AVX2")]

use std::arch::x86_64::{
    __m256i, _mm256_add_epi64, _mm256_loadu_si256, _mm256_mul_epu32, _mm256_set_epi64x,
    _mm256_shuffle_epi8, _mm256_srli_epi64, _mm256_storeu_si256, _mm256_xor_si256,
};

use crate::write_prefetcher::WritePrefetcher;

/// Bytes per step.
pub(super) const PACKET_LEN: usize = 32;
/// Packets per cache line.
const PACKETS_PER_LINE: usize = 2;
/// A state and the bytes that are buffered but not hashed yet.
pub(super) type Checkpoint = [u8; 164];
pub(super) type Packet = [u8; PACKET_LEN];

/// Whether this processor has AVX2.
pub(super) fn is_supported() -> bool {
    std::arch::is_x86_feature_detected!("avx2")
}

/// Advances each state by its packets, and prefetches a byte for each byte hashed.
///
/// # Panics
///
/// If the processor lacks AVX2 (see [`is_supported`]), or the lengths differ.
pub(super) fn advance<const LANES: usize>(
    states: [&mut Checkpoint; LANES],
    packets: [&[Packet]; LANES],
    prefetcher: &mut WritePrefetcher,
) {
    assert!(is_supported(), "several hashes at once need AVX2");
    // SAFETY: the processor has AVX2, as asserted.
    unsafe { advance_all(states, packets, prefetcher) }
}

#[target_feature(enable = "avx2")]
fn advance_all<const LANES: usize>(
    checkpoints: [&mut Checkpoint; LANES],
    packets: [&[Packet]; LANES],
    prefetcher: &mut WritePrefetcher,
) {
    let count = packets.first().map_or(0, |lane| lane.len());
    assert!(packets.iter().all(|lane| lane.len() == count), "lanes differ in length");
    let mut states = checkpoints.each_ref().map(|checkpoint| State::load(checkpoint));
    for at in 0..count {
        for (state, lane) in states.iter_mut().zip(&packets) {
            state.take(load(&lane[at]));
        }
        if at.is_multiple_of(PACKETS_PER_LINE) {
            prefetcher.prefetch_lines(LANES);
        }
    }
    for (state, checkpoint) in states.into_iter().zip(checkpoints) {
        state.store(checkpoint);
    }
}

struct State {
    v0: __m256i,
    v1: __m256i,
    mul0: __m256i,
    mul1: __m256i,
}

impl State {
    #[target_feature(enable = "avx2")]
    fn load(checkpoint: &Checkpoint) -> Self {
        let (vectors, _) = checkpoint.as_chunks::<PACKET_LEN>();
        let [v0, v1, mul0, mul1] = [0, 1, 2, 3].map(|at| load(&vectors[at]));
        Self { v0, v1, mul0, mul1 }
    }

    #[target_feature(enable = "avx2")]
    fn store(self, checkpoint: &mut Checkpoint) {
        let (vectors, _) = checkpoint.as_chunks_mut::<PACKET_LEN>();
        for (to, vector) in vectors.iter_mut().zip([self.v0, self.v1, self.mul0, self.mul1]) {
            // SAFETY: `to` is as long as a vector, and no alignment is required.
            unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), vector) }
        }
    }

    /// One step, as the authors of `HighwayHash` describe it (Alakuijala, Cox and Wassenberg,
    /// 2016, section 3).
    #[inline]
    #[target_feature(enable = "avx2")]
    fn take(&mut self, packet: __m256i) {
        self.v1 = _mm256_add_epi64(self.v1, _mm256_add_epi64(self.mul0, packet));
        let product = _mm256_mul_epu32(self.v1, _mm256_srli_epi64::<32>(self.v0));
        self.mul0 = _mm256_xor_si256(self.mul0, product);
        self.v0 = _mm256_add_epi64(self.v0, self.mul1);
        let product = _mm256_mul_epu32(self.v0, _mm256_srli_epi64::<32>(self.v1));
        self.mul1 = _mm256_xor_si256(self.mul1, product);
        self.v0 = _mm256_add_epi64(self.v0, zipped(self.v1));
        self.v1 = _mm256_add_epi64(self.v1, zipped(self.v0));
    }
}

/// The bytes of each half in an order that mixes strong bytes of a product with weak ones.
#[inline]
#[target_feature(enable = "avx2")]
fn zipped(vector: __m256i) -> __m256i {
    const HIGH: i64 = 0x0708_0609_0d0a_040b;
    const LOW: i64 = 0x000f_010e_0502_0c03;
    _mm256_shuffle_epi8(vector, _mm256_set_epi64x(HIGH, LOW, HIGH, LOW))
}

#[inline]
#[target_feature(enable = "avx2")]
fn load(packet: &Packet) -> __m256i {
    // SAFETY: a packet is as long as a vector, and no alignment is required.
    unsafe { _mm256_loadu_si256(packet.as_ptr().cast()) }
}
