//! Decodes varints several at a time, by shuffles of 16 bytes.
//!
//! The continuation bits of 64 bytes are collected in a word, and its next twelve bits select the
//! shuffle that moves up to four varints into lanes of their own, where two multiplications join
//! their bits. No branch depends on lengths, as long as they are at most four bytes.
#![expect(unsafe_code, reason = "instructions that not all processors have")]

use std::arch::is_x86_feature_detected;
use std::arch::x86_64::{
    __m128i, _mm_and_si128, _mm_cvtsi128_si64, _mm_madd_epi16, _mm_maddubs_epi16,
    _mm_movemask_epi8, _mm_set_epi64x, _mm_set1_epi8, _mm_set1_epi16, _mm_set1_epi32,
    _mm_setzero_si128, _mm_shuffle_epi8, _mm_unpackhi_epi32, _mm_unpackhi_epi64,
    _mm_unpacklo_epi32,
};

use super::integer::Integer;
use crate::varint::read_varint;

/// Bytes whose continuation bits are looked at together.
const GROUP: usize = 64;
/// Bytes that one shuffle takes varints from.
const STEP_LEN: usize = 12;
/// Shuffles for a group, a fixed number: a branch at its end would often be predicted wrongly.
const NUM_STEPS: usize = (GROUP - 16) / STEP_LEN + 1;
/// Varints that one shuffle decodes.
const LANES: usize = 4;
/// The longest varint that a shuffle decodes.
const MAX_LANE_LEN: usize = 4;
/// What to do with the varints that begin 12 bytes, by the bits of these that continue one.
#[derive(Clone, Copy)]
struct Step {
    /// Their number; 0 if the first has more than four bytes.
    num_varints: u8,
    byte_len: u8,
    /// The index of the shuffle: the lengths of four varints less one, in base four.
    shuffle: u8,
}

static STEPS: [Step; 1 << STEP_LEN] = steps();
static SHUFFLES: [[u8; 16]; 1 << (2 * LANES)] = shuffles();

const fn steps() -> [Step; 1 << STEP_LEN] {
    let mut steps = [Step { num_varints: 0, byte_len: 0, shuffle: 0 }; 1 << STEP_LEN];
    let mut continues = 0;
    while continues < steps.len() {
        let (mut at, mut lane, mut shuffle) = (0, 0, 0);
        while lane < LANES {
            let mut len = 1;
            while at + len <= STEP_LEN && continues >> (at + len - 1) & 1 == 1 {
                len += 1;
            }
            if at + len > STEP_LEN || len > MAX_LANE_LEN {
                break;
            }
            shuffle |= (len - 1) << (2 * lane);
            at += len;
            lane += 1;
        }
        #[expect(clippy::cast_possible_truncation, reason = "they are below 256")]
        let step = Step { num_varints: lane as u8, byte_len: at as u8, shuffle: shuffle as u8 };
        steps[continues] = step;
        continues += 1;
    }
    steps
}

const fn shuffles() -> [[u8; 16]; 1 << (2 * LANES)] {
    // An index with the highest bit gives a zero.
    let mut shuffles = [[0x80; 16]; 1 << (2 * LANES)];
    let mut number = 0;
    while number < shuffles.len() {
        let (mut at, mut lane) = (0, 0);
        while lane < LANES {
            let len = (number >> (2 * lane) & 3) + 1;
            let mut byte = 0;
            while byte < len {
                shuffles[number][4 * lane + byte] = at;
                at += 1;
                byte += 1;
            }
            lane += 1;
        }
        number += 1;
    }
    shuffles
}

/// Decodes varints from the start of `run` to the start of `out`, if the processor can; clears `fits`
/// if a value may not fit its type. Returns how many bytes of `run` and of `out` that were; some
/// varints at the end are left.
///
/// `None` if a varint has more than ten bytes.
pub(super) fn decode<T: Integer>(
    run: &[u8],
    out: &mut [u8],
    fits: &mut bool,
) -> Option<(usize, usize)> {
    if !is_x86_feature_detected!("ssse3") {
        return Some((0, 0));
    }
    // SAFETY: the processor has the instructions.
    unsafe { decode_groups::<T>(run, out, fits) }
}

#[target_feature(enable = "ssse3")]
fn decode_groups<T: Integer>(
    run: &[u8],
    out: &mut [u8],
    fits: &mut bool,
) -> Option<(usize, usize)> {
    let (mut taken, mut written) = (0, 0);
    while let Some(bytes) = run[taken..].first_chunk::<GROUP>()
        && out.len() - written >= NUM_STEPS * LANES * T::LEN
    {
        let mut continues = continuation_bits(bytes);
        let mut at = 0;
        for _ in 0..NUM_STEPS {
            let step = STEPS[(continues & ((1 << STEP_LEN) - 1)) as usize];
            let slots = &mut out[written..][..LANES * T::LEN];
            let (num_varints, byte_len) = if step.num_varints == 0 {
                let (value, len) = read_varint(&bytes[at..]).ok()?;
                *fits &= T::put(value.cast_signed(), &mut slots[..T::LEN]);
                (1, len)
            } else {
                let lanes = joined(bytes[at..].first_chunk()?, step.shuffle);
                // Lanes without a varint have a value of up to seven bits, which is overwritten.
                for (slot, value) in slots.chunks_exact_mut(T::LEN).zip(lanes) {
                    *fits &= T::put(value, slot);
                }
                (usize::from(step.num_varints), usize::from(step.byte_len))
            };
            written += num_varints * T::LEN;
            at += byte_len;
            continues >>= byte_len;
        }
        taken += at;
    }
    Some((taken, written))
}

/// The values of the varints that `shuffle` moves to the four lanes.
#[target_feature(enable = "ssse3")]
fn joined(bytes: &[u8; 16], shuffle: u8) -> [i64; LANES] {
    let lanes = _mm_shuffle_epi8(vector(bytes), vector(&SHUFFLES[usize::from(shuffle)]));
    let bits = _mm_and_si128(lanes, _mm_set1_epi8(0x7f));
    // Seven bits each to fourteen, and these to twenty-eight.
    let pairs = _mm_maddubs_epi16(_mm_set1_epi16(0x8001_u16.cast_signed()), bits);
    let values = _mm_madd_epi16(pairs, _mm_set1_epi32(0x4000_0001));
    let zero = _mm_setzero_si128();
    let [low, high] = [_mm_unpacklo_epi32(values, zero), _mm_unpackhi_epi32(values, zero)];
    let second = |pair| _mm_cvtsi128_si64(_mm_unpackhi_epi64(pair, pair));
    [_mm_cvtsi128_si64(low), second(low), _mm_cvtsi128_si64(high), second(high)]
}

/// A bit for each byte that continues a varint.
#[target_feature(enable = "ssse3")]
fn continuation_bits(bytes: &[u8; GROUP]) -> u64 {
    let parts = bytes.as_chunks().0.iter();
    let bits = parts.map(|part| u64::from(_mm_movemask_epi8(vector(part)).cast_unsigned()));
    bits.enumerate().fold(0, |all, (number, bits)| all | bits << (16 * number))
}

#[target_feature(enable = "ssse3")]
fn vector(bytes: &[u8; 16]) -> __m128i {
    let value = u128::from_le_bytes(*bytes).cast_signed();
    #[expect(clippy::cast_possible_truncation, reason = "these are its halves")]
    _mm_set_epi64x((value >> 64) as i64, value as i64)
}
