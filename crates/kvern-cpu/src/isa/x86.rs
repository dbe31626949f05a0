//! What both x86 sets share: the last steps of reductions, from 8 lanes on, and prefetching.
//!
//! Each function is inlined into code that is compiled for a set; whoever calls one has the token of a set with AVX.

use std::arch::x86_64::*;

/// Sum of 8 lanes: halves, then their halves.
///
/// # Safety
/// The CPU has AVX.
#[inline(always)]
pub unsafe fn sum(a: __m256) -> f32 {
    // SAFETY: the caller answers for the feature.
    unsafe {
        let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
        let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
        _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)))
    }
}

/// The largest of 8 lanes.
///
/// # Safety
/// The CPU has AVX.
#[inline(always)]
pub unsafe fn max(a: __m256) -> f32 {
    // SAFETY: the caller answers for the feature.
    unsafe {
        let a = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
        let a = _mm_max_ps(a, _mm_movehl_ps(a, a));
        _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)))
    }
}

/// Asks for bytes that are read soon.
#[inline(always)]
pub fn prefetch(bytes: &[u8]) {
    for line in bytes.chunks(64) {
        // SAFETY: every x86-64 has the instruction, which reads nothing that a program sees.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) }
    }
}
