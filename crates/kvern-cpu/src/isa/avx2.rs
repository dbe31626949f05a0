//! AVX2 with FMA and F16C: 16 lanes are two registers.
//!
//! `unsafe` here is of two kinds. Calls of intrinsics need the CPU to have the feature: the token's existence proves it. Loads and
//! stores go through references to arrays of the full length, so they stay in bounds.

use std::arch::x86_64::*;

use kvern_base::{bf16, f16};

use super::{Isa, Kernel, LANES, x86};

/// Proof that the CPU has AVX2, FMA and F16C.
#[derive(Debug, Clone, Copy)]
pub struct Avx2(());

impl Avx2 {
    /// The token, if this CPU has the set.
    pub fn detect() -> Option<Self> {
        let has =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        has.then_some(Self(()))
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn trampoline<K: Kernel>(isa: Avx2, kernel: K) {
    kernel.run(isa);
}

/// Both halves through one intrinsic of the set.
macro_rules! both {
    ($f:ident, $($a:expr),+) => {{
        // SAFETY: the token proves the feature.
        unsafe { [$f($($a[0]),+), $f($($a[1]),+)] }
    }};
}

impl Avx2 {
    /// All bits of byte `i` where bit `i` of a mask is set.
    #[inline(always)]
    fn spread(self, mask: u64) -> [__m256i; 2] {
        // SAFETY: the token proves the feature.
        unsafe {
            // Byte i of the result looks at bit i % 8 of mask byte i / 8.
            let spread = _mm256_setr_epi8(
                0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3,
            );
            let select = _mm256_set1_epi64x(0x8040_2010_0804_0201u64 as i64);
            let one = |mask: u64| {
                let bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(mask as i32), spread);
                _mm256_cmpeq_epi8(_mm256_and_si256(bytes, select), select)
            };
            [one(mask), one(mask >> 32)]
        }
    }
}

impl Isa for Avx2 {
    type F = [__m256; 2];
    type I = [__m256i; 2];
    type B = [__m256i; 2];
    const WIDE: bool = false;

    fn go<K: Kernel>(self, kernel: K) {
        // SAFETY: the token proves the features that the function enables.
        unsafe { trampoline(self, kernel) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        // SAFETY: the token proves the feature.
        unsafe { [_mm256_set1_ps(x); 2] }
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::F {
        // SAFETY: the token proves the feature; 16 floats are readable.
        unsafe { [_mm256_loadu_ps(from.as_ptr()), _mm256_loadu_ps(from.as_ptr().add(8))] }
    }
    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> Self::F {
        let from = from.as_ptr().cast::<__m128i>();
        // SAFETY: the token proves the feature; 32 bytes are readable.
        unsafe { [_mm256_cvtph_ps(_mm_loadu_si128(from)), _mm256_cvtph_ps(_mm_loadu_si128(from.add(1)))] }
    }
    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> Self::F {
        let from = from.as_ptr().cast::<__m128i>();
        // SAFETY: the token proves the feature; 32 bytes are readable.
        unsafe {
            let widen = |half| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(half)));
            [widen(_mm_loadu_si128(from)), widen(_mm_loadu_si128(from.add(1)))]
        }
    }
    #[inline(always)]
    fn store(self, value: Self::F, to: &mut [f32; LANES]) {
        // SAFETY: the token proves the feature; 16 floats are writable.
        unsafe {
            _mm256_storeu_ps(to.as_mut_ptr(), value[0]);
            _mm256_storeu_ps(to.as_mut_ptr().add(8), value[1]);
        }
    }
    #[inline(always)]
    fn store_f16(self, value: Self::F, to: &mut [f16; LANES]) {
        let to = to.as_mut_ptr().cast::<__m128i>();
        // SAFETY: the token proves the feature; 32 bytes are writable.
        unsafe {
            _mm_storeu_si128(to, _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(value[0]));
            _mm_storeu_si128(to.add(1), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(value[1]));
        }
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_add_ps, a, b)
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_mul_ps, a, b)
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_div_ps, a, b)
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        both!(_mm256_fmadd_ps, a, b, c)
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_max_ps, a, b)
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_min_ps, a, b)
    }
    #[inline(always)]
    fn abs(self, a: Self::F) -> Self::F {
        let sign = self.splat(-0.0);
        both!(_mm256_andnot_ps, sign, a)
    }
    #[inline(always)]
    fn round(self, a: Self::F) -> Self::F {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        // SAFETY: the token proves the feature.
        unsafe { [_mm256_round_ps::<NEAREST>(a[0]), _mm256_round_ps::<NEAREST>(a[1])] }
    }
    #[inline(always)]
    fn floor(self, a: Self::F) -> Self::F {
        both!(_mm256_floor_ps, a)
    }
    #[inline(always)]
    fn scale2(self, a: Self::F, n: Self::F) -> Self::F {
        // Two factors, so that neither leaves the range of f32 exponents.
        // SAFETY: the token proves the feature.
        unsafe {
            let power = |n| _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, _mm256_set1_epi32(127))));
            let one = |a, n| {
                let n = _mm256_cvtps_epi32(n);
                let half = _mm256_srai_epi32::<1>(n);
                _mm256_mul_ps(_mm256_mul_ps(a, power(half)), power(_mm256_sub_epi32(n, half)))
            };
            [one(a[0], n[0]), one(a[1], n[1])]
        }
    }

    #[inline(always)]
    fn prefetch(self, bytes: &[u8]) {
        x86::prefetch(bytes);
    }

    #[inline(always)]
    fn sum(self, a: Self::F) -> f32 {
        // SAFETY: the token proves the feature.
        unsafe { x86::sum(_mm256_add_ps(a[0], a[1])) }
    }
    #[inline(always)]
    fn max_lane(self, a: Self::F) -> f32 {
        // SAFETY: the token proves the feature.
        unsafe { x86::max(_mm256_max_ps(a[0], a[1])) }
    }

    #[inline(always)]
    fn splat_i(self, x: i32) -> Self::I {
        // SAFETY: the token proves the feature.
        unsafe { [_mm256_set1_epi32(x); 2] }
    }
    #[inline(always)]
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_add_epi32, a, b)
    }
    #[inline(always)]
    fn times_256(self, a: Self::I) -> Self::I {
        // SAFETY: the token proves the feature.
        unsafe { [_mm256_slli_epi32::<8>(a[0]), _mm256_slli_epi32::<8>(a[1])] }
    }
    #[inline(always)]
    fn to_f32(self, a: Self::I) -> Self::F {
        both!(_mm256_cvtepi32_ps, a)
    }
    #[inline(always)]
    fn store_i8(self, a: Self::F, to: &mut [i8; LANES]) {
        // SAFETY: the token proves the feature; 16 bytes are writable.
        unsafe {
            let words = _mm256_packs_epi32(_mm256_cvtps_epi32(a[0]), _mm256_cvtps_epi32(a[1]));
            // Packing works within 128-bit halves; this puts the quarters back in order.
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            let bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(to.as_mut_ptr().cast(), bytes);
        }
    }

    #[inline(always)]
    fn bytes(self, from: &[u8; 64]) -> Self::B {
        let from = from.as_ptr().cast::<__m256i>();
        // SAFETY: the token proves the feature; 64 bytes are readable.
        unsafe { [_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1))] }
    }
    #[inline(always)]
    fn no_bytes(self) -> Self::B {
        self.splat_i(0)
    }
    #[inline(always)]
    fn low(self, a: Self::B) -> Self::B {
        let mask = self.splat_i(0x0F0F_0F0F);
        both!(_mm256_and_si256, a, mask)
    }
    #[inline(always)]
    fn high(self, a: Self::B) -> Self::B {
        // SAFETY: the token proves the feature.
        self.low(unsafe { [_mm256_srli_epi16::<4>(a[0]), _mm256_srli_epi16::<4>(a[1])] })
    }
    #[inline(always)]
    fn with_bit(self, a: Self::B, mask: u64, bit: u8) -> Self::B {
        let set = self.spread(mask);
        // SAFETY: the token proves the feature.
        let one = |a, set| unsafe { _mm256_or_si256(a, _mm256_and_si256(set, _mm256_set1_epi8(bit as i8))) };
        [one(a[0], set[0]), one(a[1], set[1])]
    }
    #[inline(always)]
    fn table(self, from: &[u8; 16]) -> Self::B {
        // SAFETY: the token proves the feature; 16 bytes are readable.
        unsafe { [_mm256_broadcastsi128_si256(_mm_loadu_si128(from.as_ptr().cast())); 2] }
    }
    #[inline(always)]
    fn lookup(self, table: Self::B, codes: Self::B) -> Self::B {
        both!(_mm256_shuffle_epi8, table, codes)
    }
    #[inline(always)]
    fn select(self, mask: u64, a: Self::B, b: Self::B) -> Self::B {
        let set = self.spread(mask);
        // SAFETY: the token proves the feature.
        unsafe { [_mm256_blendv_epi8(a[0], b[0], set[0]), _mm256_blendv_epi8(a[1], b[1], set[1])] }
    }
    #[inline(always)]
    fn bit(self, a: Self::B, bit: u8) -> u64 {
        // SAFETY: the token proves the feature.
        let one = |a| unsafe {
            let bit = _mm256_set1_epi8(bit as i8);
            u64::from(_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_and_si256(a, bit), bit)) as u32)
        };
        one(a[0]) | one(a[1]) << 32
    }
    #[inline(always)]
    fn dot<const BITS: u32>(self, acc: Self::I, codes: Self::B, x: [i8; 4]) -> Self::I {
        // SAFETY: the token proves the feature.
        unsafe {
            let x = _mm256_set1_epi32(i32::from_le_bytes(x.map(|x| x as u8)));
            let ones = _mm256_set1_epi16(1);
            let one = |acc, codes| {
                if BITS < 8 {
                    // Two products of a 7-bit code and a signed byte fit 16 bits: 2 * 127 * 127 < 2^15.
                    _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), ones))
                } else {
                    // Full bytes would saturate, so even and odd bytes are multiplied as 16-bit words.
                    let low = _mm256_set1_epi16(255);
                    let even = _mm256_madd_epi16(
                        _mm256_and_si256(codes, low),
                        _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(x)),
                    );
                    let odd = _mm256_madd_epi16(_mm256_srli_epi16::<8>(codes), _mm256_srai_epi16::<8>(x));
                    _mm256_add_epi32(acc, _mm256_add_epi32(even, odd))
                }
            };
            [one(acc[0], codes[0]), one(acc[1], codes[1])]
        }
    }
}
