//! Inverse cosine transforms with the results of libjpeg's `islow`, at full and reduced sizes.
//!
//! Loeffler, Ligtenberg and Moschytz, "Practical fast 1-D DCT algorithms with 11 multiplications",
//! ICASSP 1989, in fixed point: columns first, which keep two more bits, then rows.

/// Coefficients of a block, dequantized, row by row.
pub(super) type Block = [i32; 64];

const CONST_BITS: u32 = 13;
const PASS1_BITS: u32 = 2;

/// A constant in fixed point.
#[expect(clippy::cast_possible_truncation, reason = "a small constant")]
const fn fix(value: f64) -> i32 {
    (value * (1 << CONST_BITS) as f64 + if value < 0.0 { -0.5 } else { 0.5 }) as i32
}

/// Divides by `1 << bits`, rounding.
#[inline(always)]
fn descale(value: i32, bits: u32) -> i32 {
    value.wrapping_add(1 << (bits - 1)) >> bits
}

/// A sample of an 8-bit image.
#[inline(always)]
#[expect(clippy::cast_sign_loss, reason = "clamped")]
fn sample(value: i32) -> u8 {
    value.wrapping_add(128).clamp(0, 255) as u8
}

type Lanes = [i32; 8];

#[inline(always)]
fn each(f: impl Fn(usize) -> i32) -> Lanes {
    [f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)]
}

#[inline(always)]
fn add(a: Lanes, b: Lanes) -> Lanes {
    each(|i| a[i].wrapping_add(b[i]))
}

#[inline(always)]
fn sub(a: Lanes, b: Lanes) -> Lanes {
    each(|i| a[i].wrapping_sub(b[i]))
}

#[inline(always)]
fn times(a: Lanes, factor: i32) -> Lanes {
    each(|i| a[i].wrapping_mul(factor))
}

/// Eight transforms of eight values side by side, divided by `1 << bits`.
#[inline(always)]
fn transform(v: &[Lanes; 8], bits: u32) -> [Lanes; 8] {
    let z1 = times(add(v[2], v[6]), fix(0.541_196_100));
    let tmp2 = sub(z1, times(v[6], fix(1.847_759_065)));
    let tmp3 = add(z1, times(v[2], fix(0.765_366_865)));
    let tmp0 = times(add(v[0], v[4]), 1 << CONST_BITS);
    let tmp1 = times(sub(v[0], v[4]), 1 << CONST_BITS);
    let even = [add(tmp0, tmp3), add(tmp1, tmp2), sub(tmp1, tmp2), sub(tmp0, tmp3)];

    let z5 = times(add(add(v[7], v[3]), add(v[5], v[1])), fix(1.175_875_602));
    let z1 = times(add(v[7], v[1]), -fix(0.899_976_223));
    let z2 = times(add(v[5], v[3]), -fix(2.562_915_447));
    let z3 = add(times(add(v[7], v[3]), -fix(1.961_570_560)), z5);
    let z4 = add(times(add(v[5], v[1]), -fix(0.390_180_644)), z5);
    let odd = [
        add(times(v[1], fix(1.501_321_110)), add(z1, z4)),
        add(times(v[3], fix(3.072_711_026)), add(z2, z3)),
        add(times(v[5], fix(2.053_119_869)), add(z2, z4)),
        add(times(v[7], fix(0.298_631_336)), add(z1, z3)),
    ];
    let mut out = [[0; 8]; 8];
    for i in 0..4 {
        out[i] = add(even[i], odd[i]).map(|x| descale(x, bits));
        out[7 - i] = sub(even[i], odd[i]).map(|x| descale(x, bits));
    }
    out
}

#[inline(always)]
fn transposed(v: &[Lanes; 8]) -> [Lanes; 8] {
    let mut out = [[0; 8]; 8];
    for (i, row) in v.iter().enumerate() {
        for (j, &value) in row.iter().enumerate() {
            out[j][i] = value;
        }
    }
    out
}

/// A whole block.
#[inline]
pub(super) fn full(block: &Block, out: &mut [u8], stride: usize) {
    #[cfg(target_arch = "x86_64")]
    if crate::simd::has_avx2() {
        #[expect(unsafe_code, reason = "half of the cost of the portable version")]
        // SAFETY: the processor has AVX2, as `has_avx2` found.
        return unsafe { avx2::full(block, out, stride) };
    }
    full_portable(block, out, stride);
}

/// The same for any processor.
fn full_portable(block: &Block, out: &mut [u8], stride: usize) {
    let mut rows = [[0; 8]; 8];
    for (row, values) in rows.iter_mut().zip(block.chunks_exact(8)) {
        row.copy_from_slice(values);
    }
    let columns = transform(&rows, CONST_BITS - PASS1_BITS);
    let rows = transform(&transposed(&columns), CONST_BITS + PASS1_BITS + 3);
    for (line, row) in out.chunks_mut(stride).zip(transposed(&rows)) {
        line[..8].copy_from_slice(&row.map(sample));
    }
}

/// A block whose only coefficient is the first, `size` samples wide.
pub(super) fn flat(first: i32, size: usize, out: &mut [u8], stride: usize) {
    let value = sample(descale(first, 3));
    for line in out.chunks_mut(stride).take(size) {
        line[..size].fill(value);
    }
}

/// Four values from eight, divided by `1 << bits`.
#[inline(always)]
fn half(v: [i32; 8], bits: u32) -> [i32; 4] {
    let sum = |terms: [(i32, f64); 4]| {
        terms.iter().fold(0_i32, |sum, &(x, factor)| sum.wrapping_add(x.wrapping_mul(fix(factor))))
    };
    let tmp0 = v[0].wrapping_mul(1 << (CONST_BITS + 1));
    let tmp2 = sum([(v[2], 1.847_759_065), (v[6], -0.765_366_865), (0, 0.0), (0, 0.0)]);
    let (even0, even1) = (tmp0.wrapping_add(tmp2), tmp0.wrapping_sub(tmp2));
    let odd1 = sum([
        (v[7], -0.211_164_243),
        (v[5], 1.451_774_981),
        (v[3], -2.172_734_803),
        (v[1], 1.061_594_337),
    ]);
    let odd0 = sum([
        (v[7], -0.509_795_579),
        (v[5], -0.601_344_887),
        (v[3], 0.899_976_223),
        (v[1], 2.562_915_447),
    ]);
    [
        even0.wrapping_add(odd0),
        even1.wrapping_add(odd1),
        even1.wrapping_sub(odd1),
        even0.wrapping_sub(odd0),
    ]
    .map(|x| descale(x, bits))
}

/// A block at half its size.
pub(super) fn half_size(block: &Block, out: &mut [u8], stride: usize) {
    let mut columns = [[0; 8]; 4];
    for i in [0, 1, 2, 3, 5, 6, 7] {
        let column = std::array::from_fn(|row| block[8 * row + i]);
        for (row, value) in half(column, CONST_BITS - PASS1_BITS + 1).into_iter().enumerate() {
            columns[row][i] = value;
        }
    }
    for (line, row) in out.chunks_mut(stride).zip(columns) {
        let values = half(row, CONST_BITS + PASS1_BITS + 3 + 1);
        line[..4].copy_from_slice(&values.map(sample));
    }
}

/// Two values from eight, divided by `1 << bits`.
#[inline(always)]
fn quarter(v: [i32; 8], bits: u32) -> [i32; 2] {
    let even = v[0].wrapping_mul(1 << (CONST_BITS + 2));
    let odd = [(7, -0.720_959_822), (5, 0.850_430_095), (3, -1.272_758_580), (1, 3.624_509_785)]
        .iter()
        .fold(0_i32, |sum, &(i, factor)| {
            let i: usize = i;
            sum.wrapping_add(v[i].wrapping_mul(fix(factor)))
        });
    [even.wrapping_add(odd), even.wrapping_sub(odd)].map(|x| descale(x, bits))
}

/// A block at a quarter of its size.
pub(super) fn quarter_size(block: &Block, out: &mut [u8], stride: usize) {
    let mut columns = [[0; 8]; 2];
    for i in [0, 1, 3, 5, 7] {
        let column = std::array::from_fn(|row| block[8 * row + i]);
        for (row, value) in quarter(column, CONST_BITS - PASS1_BITS + 2).into_iter().enumerate() {
            columns[row][i] = value;
        }
    }
    for (line, row) in out.chunks_mut(stride).zip(columns) {
        let values = quarter(row, CONST_BITS + PASS1_BITS + 3 + 2);
        line[..2].copy_from_slice(&values.map(sample));
    }
}

/// The transform with one vector for each row.
#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::{
        __m256i, _mm256_add_epi32, _mm256_extract_epi64, _mm256_mullo_epi32, _mm256_packs_epi32,
        _mm256_packus_epi16, _mm256_permute2x128_si256, _mm256_permutevar8x32_epi32,
        _mm256_set1_epi32, _mm256_setr_epi32, _mm256_slli_epi32, _mm256_srai_epi32,
        _mm256_sub_epi32, _mm256_unpackhi_epi32, _mm256_unpackhi_epi64, _mm256_unpacklo_epi32,
        _mm256_unpacklo_epi64,
    };

    use super::{Block, CONST_BITS, PASS1_BITS, fix};

    const PASS1: i32 = (CONST_BITS - PASS1_BITS).cast_signed();
    const PASS2: i32 = (CONST_BITS + PASS1_BITS + 3).cast_signed();

    #[target_feature(enable = "avx2")]
    #[inline]
    fn times(a: __m256i, factor: i32) -> __m256i {
        _mm256_mullo_epi32(a, _mm256_set1_epi32(factor))
    }

    /// Eight transforms side by side, with `bias` added before the division by `1 << BITS`.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn transform<const BITS: i32>(v: &[__m256i; 8], bias: i32) -> [__m256i; 8] {
        let add = _mm256_add_epi32;
        let sub = _mm256_sub_epi32;
        let bias = _mm256_set1_epi32(bias);
        let z1 = times(add(v[2], v[6]), fix(0.541_196_100));
        let tmp2 = sub(z1, times(v[6], fix(1.847_759_065)));
        let tmp3 = add(z1, times(v[2], fix(0.765_366_865)));
        let tmp0 = add(_mm256_slli_epi32::<13>(add(v[0], v[4])), bias);
        let tmp1 = add(_mm256_slli_epi32::<13>(sub(v[0], v[4])), bias);
        let even = [add(tmp0, tmp3), add(tmp1, tmp2), sub(tmp1, tmp2), sub(tmp0, tmp3)];

        let z3 = add(v[7], v[3]);
        let z4 = add(v[5], v[1]);
        let z5 = times(add(z3, z4), fix(1.175_875_602));
        let z1 = times(add(v[7], v[1]), -fix(0.899_976_223));
        let z2 = times(add(v[5], v[3]), -fix(2.562_915_447));
        let z3 = add(times(z3, -fix(1.961_570_560)), z5);
        let z4 = add(times(z4, -fix(0.390_180_644)), z5);
        let odd = [
            add(times(v[1], fix(1.501_321_110)), add(z1, z4)),
            add(times(v[3], fix(3.072_711_026)), add(z2, z3)),
            add(times(v[5], fix(2.053_119_869)), add(z2, z4)),
            add(times(v[7], fix(0.298_631_336)), add(z1, z3)),
        ];
        let mut out = *v;
        for i in 0..4 {
            out[i] = _mm256_srai_epi32::<BITS>(add(even[i], odd[i]));
            out[7 - i] = _mm256_srai_epi32::<BITS>(sub(even[i], odd[i]));
        }
        out
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    fn transposed(v: &[__m256i; 8]) -> [__m256i; 8] {
        let low = |i: usize| _mm256_unpacklo_epi32(v[i], v[i + 1]);
        let high = |i: usize| _mm256_unpackhi_epi32(v[i], v[i + 1]);
        let halves = |a: [__m256i; 4]| {
            [
                _mm256_unpacklo_epi64(a[0], a[1]),
                _mm256_unpackhi_epi64(a[0], a[1]),
                _mm256_unpacklo_epi64(a[2], a[3]),
                _mm256_unpackhi_epi64(a[2], a[3]),
            ]
        };
        let top = halves([low(0), low(2), high(0), high(2)]);
        let bottom = halves([low(4), low(6), high(4), high(6)]);
        let mut out = *v;
        for i in 0..4 {
            out[i] = _mm256_permute2x128_si256::<0x20>(top[i], bottom[i]);
            out[i + 4] = _mm256_permute2x128_si256::<0x31>(top[i], bottom[i]);
        }
        out
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn full(block: &Block, out: &mut [u8], stride: usize) {
        let row = |i: usize| {
            let v = &block[8 * i..8 * i + 8];
            _mm256_setr_epi32(v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7])
        };
        let rows = [row(0), row(1), row(2), row(3), row(4), row(5), row(6), row(7)];
        let columns = transform::<PASS1>(&rows, 1 << (PASS1 - 1));
        // With the middle of the range of samples.
        let bias = (1 << (PASS2 - 1)) + (128 << PASS2);
        let rows = transposed(&transform::<PASS2>(&transposed(&columns), bias));
        let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        for (four, lines) in rows.as_chunks::<4>().0.iter().zip(out.chunks_mut(4 * stride)) {
            let pair = _mm256_packs_epi32(four[0], four[1]);
            let other = _mm256_packs_epi32(four[2], four[3]);
            let bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(pair, other), order);
            let words = [
                _mm256_extract_epi64::<0>(bytes),
                _mm256_extract_epi64::<1>(bytes),
                _mm256_extract_epi64::<2>(bytes),
                _mm256_extract_epi64::<3>(bytes),
            ];
            for (line, word) in lines.chunks_mut(stride).zip(words) {
                line[..8].copy_from_slice(&word.to_le_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_match_portable() {
        let mut state = 1_u32;
        for round in 0..10_000 {
            let mut block = [0; 64];
            for value in &mut block {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let is_used = state >> 28 < round % 16;
                *value = if is_used { (state >> 8 & 0x3ff).cast_signed() - 512 } else { 0 };
            }
            let (mut fast, mut slow) = ([0; 80], [0; 80]);
            full(&block, &mut fast, 10);
            full_portable(&block, &mut slow, 10);
            assert_eq!(fast, slow);
        }
    }
}
