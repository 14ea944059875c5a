//! Two runs of bytes hashed at once.
//!
//! One hash waits for the result of a multiplication before every next step, so a core that does
//! two in turns takes hardly longer than for one. States cross from and to the `highway` crate by
//! its checkpoints, which hold the four vectors of a state first, in this order.
#![expect(unsafe_code, reason = "vector loads, and calls that need a feature of the processor")]

use std::arch::x86_64::{
    __m256i, _mm256_add_epi64, _mm256_loadu_si256, _mm256_mul_epu32, _mm256_set_epi64x,
    _mm256_shuffle_epi8, _mm256_srli_epi64, _mm256_storeu_si256, _mm256_xor_si256,
};

/// Bytes that one step takes in.
pub(super) const PACKET_LEN: usize = 32;
/// Bytes of a state and of what has been taken in but not hashed yet.
pub(super) type Checkpoint = [u8; 164];
type Packet = [u8; PACKET_LEN];

/// Whether this processor can.
pub(super) fn is_possible() -> bool {
    std::arch::is_x86_feature_detected!("avx2")
}

/// Advances two states by as many packets of each.
///
/// # Panics
///
/// If the processor cannot; see [`is_possible`].
pub(super) fn advance(states: [&mut Checkpoint; 2], packets: [&[Packet]; 2]) {
    assert!(is_possible(), "two hashes at once need AVX2");
    // SAFETY: the processor has what the function needs.
    unsafe { advance_both(states, packets) }
}

#[target_feature(enable = "avx2")]
fn advance_both(states: [&mut Checkpoint; 2], packets: [&[Packet]; 2]) {
    let [mut first, mut second] = [State::load(states[0]), State::load(states[1])];
    for (one, other) in packets[0].iter().zip(packets[1]) {
        first.take(load(one));
        second.take(load(other));
    }
    let [one, other] = states;
    first.store(one);
    second.store(other);
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
        let [v0, v1, mul0, mul1] = [0, 1, 2, 3].map(|place| load(&vectors[place]));
        Self { v0, v1, mul0, mul1 }
    }

    #[target_feature(enable = "avx2")]
    fn store(self, checkpoint: &mut Checkpoint) {
        let (vectors, _) = checkpoint.as_chunks_mut::<PACKET_LEN>();
        for (to, vector) in vectors.iter_mut().zip([self.v0, self.v1, self.mul0, self.mul1]) {
            // SAFETY: `to` is as long as a vector, and no alignment is asked for.
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
    // SAFETY: a packet is as long as a vector, and no alignment is asked for.
    unsafe { _mm256_loadu_si256(packet.as_ptr().cast()) }
}
