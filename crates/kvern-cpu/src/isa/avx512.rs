//! AVX-512 with VNNI: 16 lanes are one register.
//!
//! `unsafe` here is of two kinds. Calls of intrinsics need the CPU to have the feature: the token's existence proves it. Loads and
//! stores go through references to arrays of the full length, so they stay in bounds.

use std::arch::x86_64::*;

use kvern_base::{bf16, f16};

use super::{Isa, Kernel, LANES, x86};

/// Proof that the CPU has AVX-512 F, BW, VL, DQ and VNNI.
#[derive(Debug, Clone, Copy)]
pub struct Avx512(());

impl Avx512 {
    /// The token, if this CPU has the set.
    pub fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vnni");
        has.then_some(Self(()))
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn trampoline<K: Kernel>(isa: Avx512, kernel: K) {
    kernel.run(isa);
}

/// One intrinsic of the set.
macro_rules! one {
    ($f:ident $(::<$c:tt>)? ($($a:expr),*)) => {{
        // SAFETY: the token proves the feature.
        unsafe { $f$(::<$c>)?($($a),*) }
    }};
}

impl Isa for Avx512 {
    type F = __m512;
    type I = __m512i;
    type B = __m512i;
    const WIDE: bool = true;

    fn go<K: Kernel>(self, kernel: K) {
        // SAFETY: the token proves the features that the function enables.
        unsafe { trampoline(self, kernel) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        one!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::F {
        // SAFETY: the token proves the feature; 16 floats are readable.
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }
    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> Self::F {
        // SAFETY: the token proves the feature; 32 bytes are readable.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())) }
    }
    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> Self::F {
        // SAFETY: the token proves the feature; 32 bytes are readable.
        unsafe {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
        }
    }
    #[inline(always)]
    fn store(self, value: Self::F, to: &mut [f32; LANES]) {
        // SAFETY: the token proves the feature; 16 floats are writable.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), value) }
    }
    #[inline(always)]
    fn store_f16(self, value: Self::F, to: &mut [f16; LANES]) {
        // SAFETY: the token proves the feature; 32 bytes are writable.
        unsafe {
            let half = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(value);
            _mm256_storeu_si256(to.as_mut_ptr().cast(), half);
        }
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        one!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        one!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        one!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        one!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        one!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        one!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn abs(self, a: Self::F) -> Self::F {
        one!(_mm512_abs_ps(a))
    }
    #[inline(always)]
    fn round(self, a: Self::F) -> Self::F {
        one!(_mm512_roundscale_ps::<0>(a))
    }
    #[inline(always)]
    fn floor(self, a: Self::F) -> Self::F {
        one!(_mm512_roundscale_ps::<1>(a))
    }
    #[inline(always)]
    fn scale2(self, a: Self::F, n: Self::F) -> Self::F {
        one!(_mm512_scalef_ps(a, n))
    }

    #[inline(always)]
    fn prefetch(self, bytes: &[u8]) {
        x86::prefetch(bytes);
    }

    #[inline(always)]
    fn sum(self, a: Self::F) -> f32 {
        // SAFETY: the token proves the feature.
        unsafe { x86::sum(_mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a))) }
    }
    #[inline(always)]
    fn max_lane(self, a: Self::F) -> f32 {
        // SAFETY: the token proves the feature.
        unsafe { x86::max(_mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a))) }
    }

    #[inline(always)]
    fn splat_i(self, x: i32) -> Self::I {
        one!(_mm512_set1_epi32(x))
    }
    #[inline(always)]
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I {
        one!(_mm512_add_epi32(a, b))
    }
    #[inline(always)]
    fn times_256(self, a: Self::I) -> Self::I {
        one!(_mm512_slli_epi32::<8>(a))
    }
    #[inline(always)]
    fn to_f32(self, a: Self::I) -> Self::F {
        one!(_mm512_cvtepi32_ps(a))
    }
    #[inline(always)]
    fn store_i8(self, a: Self::F, to: &mut [i8; LANES]) {
        // SAFETY: the token proves the feature; 16 bytes are writable.
        unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a))) }
    }

    #[inline(always)]
    fn bytes(self, from: &[u8; 64]) -> Self::B {
        // SAFETY: the token proves the feature; 64 bytes are readable.
        unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
    }
    #[inline(always)]
    fn no_bytes(self) -> Self::B {
        one!(_mm512_setzero_si512())
    }
    #[inline(always)]
    fn low(self, a: Self::B) -> Self::B {
        one!(_mm512_and_si512(a, self.splat_i(0x0F0F_0F0F)))
    }
    #[inline(always)]
    fn high(self, a: Self::B) -> Self::B {
        self.low(one!(_mm512_srli_epi16::<4>(a)))
    }
    #[inline(always)]
    fn with_bit(self, a: Self::B, mask: u64, bit: u8) -> Self::B {
        // The byte's bit is clear, so adding under the mask sets it.
        // SAFETY: the token proves the feature.
        unsafe { _mm512_mask_add_epi8(a, mask, a, _mm512_set1_epi8(bit as i8)) }
    }
    #[inline(always)]
    fn table(self, from: &[u8; 16]) -> Self::B {
        // SAFETY: the token proves the feature; 16 bytes are readable.
        unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(from.as_ptr().cast())) }
    }
    #[inline(always)]
    fn lookup(self, table: Self::B, codes: Self::B) -> Self::B {
        one!(_mm512_shuffle_epi8(table, codes))
    }
    #[inline(always)]
    fn select(self, mask: u64, a: Self::B, b: Self::B) -> Self::B {
        one!(_mm512_mask_blend_epi8(mask, a, b))
    }
    #[inline(always)]
    fn bit(self, a: Self::B, bit: u8) -> u64 {
        // SAFETY: the token proves the feature.
        unsafe { _mm512_test_epi8_mask(a, _mm512_set1_epi8(bit as i8)) }
    }
    #[inline(always)]
    fn dot<const BITS: u32>(self, acc: Self::I, codes: Self::B, x: [i8; 4]) -> Self::I {
        let x = i32::from_le_bytes(x.map(|x| x as u8));
        one!(_mm512_dpbusd_epi32(acc, codes, self.splat_i(x)))
    }
}
