//! Intel AMX: products of tiles of bf16, summed up in f32.
//!
//! Tile registers are no operands of inline assembly. [`Amx::multiply`] therefore is one block of it from the first tile to the last, between
//! [`Amx::begin`] and [`Amx::end`], which set up and release the registers' shapes; the compiler uses none of them itself.
//!
//! The instruction's arithmetic is defined to the bit: of a pair of values, the products of the first and of the second are summed up apart over the 16 pairs of a tile, by
//! fused multiply-adds that begin at zero; both sums are added, and then added to the result; subnormal numbers count as zero. [`Amx::multiply_row`] does the same for one row with
//! AVX-512, which keeps more of the memory's reads in flight than tiles do.

use std::arch::asm;
use std::arch::x86_64::*;

/// Bytes of a tile: 16 rows of 64.
pub const TILE: usize = 1024;
/// Parts that a value of the left factor is split into.
pub const PARTS: usize = 3;

/// Proof that the CPU has AMX tiles of bf16 and AVX-512 F and BW, and that the system lets this process use the tiles.
#[derive(Debug, Clone, Copy)]
pub struct Amx(());

/// All eight tiles have 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Shapes([u8; 64]);

static SHAPES: Shapes = {
    let mut bytes = [0; 64];
    bytes[0] = 1;
    let mut tile = 0;
    while tile < 8 {
        bytes[16 + 2 * tile] = 64;
        bytes[48 + tile] = 16;
        tile += 1;
    }
    Shapes(bytes)
};

impl Amx {
    /// The token, if the CPU has the tiles and the system grants them.
    pub fn detect() -> Option<Self> {
        const BF16: u32 = 1 << 22;
        const TILES: u32 = 1 << 24;
        let has = cfg!(target_os = "linux")
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && __cpuid_count(7, 0).edx & (BF16 | TILES) == BF16 | TILES;
        (has && granted()).then_some(Self(()))
    }

    /// Sets up the tiles of this thread.
    #[inline(always)]
    pub fn begin(self) {
        // SAFETY: the token proves that the CPU has the instruction; the shapes are those of the first palette.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const SHAPES, options(nostack, readonly)) }
    }

    /// Gives the tiles of this thread back.
    #[inline(always)]
    pub fn end(self) {
        // SAFETY: the token proves that the CPU has the instruction.
        unsafe { asm!("tilerelease", options(nostack, nomem)) }
    }

    /// `out[r][p] = Σ_k a[r][k] · b[p][k]` for blocks of 16 rows and panels of 16 columns: two of each, or one where the second is the first. A step `k`
    /// is 32 values: of `a` [`PARTS`] tiles, each `[row][32]`; of `b` one tile `[pair][column][2]`. `out` is `[2][2][16][16]`.
    ///
    /// # Safety
    /// Between [`Self::begin`] and [`Self::end`] on this thread; each pointer of `a` must have `steps * PARTS` tiles behind it, each of `b` `steps` of them.
    #[inline(always)]
    pub unsafe fn multiply(self, a: [*const u8; 2], b: [*const u8; 2], steps: usize, out: &mut [[f32; 256]; 4]) {
        if steps == 0 {
            out.fill([0.0; 256]);
            return;
        }
        // One row block alone needs half of the products.
        if a[0] == a[1] {
            // SAFETY: as the caller says; the results are the first half of `out`.
            unsafe {
                asm!(
                    "tilezero tmm0", "tilezero tmm1",
                    "2:",
                    "tileloadd tmm6, [{b} + {s}*1]", "tileloadd tmm7, [{d} + {s}*1]",
                    "tileloadd tmm3, [{a} + {s}*1]", "tileloadd tmm4, [{a} + {s}*1 + 1024]", "tileloadd tmm5, [{a} + {s}*1 + 2048]",
                    "tdpbf16ps tmm0, tmm3, tmm6", "tdpbf16ps tmm1, tmm3, tmm7",
                    "tdpbf16ps tmm0, tmm4, tmm6", "tdpbf16ps tmm1, tmm4, tmm7",
                    "tdpbf16ps tmm0, tmm5, tmm6", "tdpbf16ps tmm1, tmm5, tmm7",
                    "add {a}, 3072", "add {b}, 1024", "add {d}, 1024",
                    "dec {n}", "jnz 2b",
                    "tilestored [{o} + {s}*1], tmm0", "tilestored [{o} + {s}*1 + 1024], tmm1",
                    a = inout(reg) a[0] => _, b = inout(reg) b[0] => _, d = inout(reg) b[1] => _,
                    n = inout(reg) steps => _, s = in(reg) 64usize, o = in(reg) out.as_mut_ptr(),
                    options(nostack),
                );
            }
            return;
        }
        // SAFETY: as the caller says; the results are the four parts of `out`.
        unsafe {
            asm!(
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                "2:",
                "tileloadd tmm6, [{b} + {s}*1]", "tileloadd tmm7, [{d} + {s}*1]",
                "tileloadd tmm4, [{a} + {s}*1]", "tileloadd tmm5, [{c} + {s}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6", "tdpbf16ps tmm1, tmm4, tmm7", "tdpbf16ps tmm2, tmm5, tmm6", "tdpbf16ps tmm3, tmm5, tmm7",
                "tileloadd tmm4, [{a} + {s}*1 + 1024]", "tileloadd tmm5, [{c} + {s}*1 + 1024]",
                "tdpbf16ps tmm0, tmm4, tmm6", "tdpbf16ps tmm1, tmm4, tmm7", "tdpbf16ps tmm2, tmm5, tmm6", "tdpbf16ps tmm3, tmm5, tmm7",
                "tileloadd tmm4, [{a} + {s}*1 + 2048]", "tileloadd tmm5, [{c} + {s}*1 + 2048]",
                "tdpbf16ps tmm0, tmm4, tmm6", "tdpbf16ps tmm1, tmm4, tmm7", "tdpbf16ps tmm2, tmm5, tmm6", "tdpbf16ps tmm3, tmm5, tmm7",
                "add {a}, 3072", "add {c}, 3072", "add {b}, 1024", "add {d}, 1024",
                "dec {n}", "jnz 2b",
                "tilestored [{o} + {s}*1], tmm0", "tilestored [{o} + {s}*1 + 1024], tmm1",
                "tilestored [{o} + {s}*1 + 2048], tmm2", "tilestored [{o} + {s}*1 + 3072], tmm3",
                a = inout(reg) a[0] => _, c = inout(reg) a[1] => _, b = inout(reg) b[0] => _, d = inout(reg) b[1] => _,
                n = inout(reg) steps => _, s = in(reg) 64usize, o = in(reg) out.as_mut_ptr(),
                options(nostack),
            );
        }
    }
}

/// Rows of so few that [`Amx::multiply_row`] is faster than tiles.
pub const FEW: usize = 3;
/// Panels that [`Amx::multiply_row`] walks side by side.
pub const SIDE: usize = 2;

impl Amx {
    /// What [`Self::multiply`] makes of one row, for [`SIDE`] panels. `a` is `[step][part][32]`; each of `b` has a tile for each step.
    #[inline(always)]
    pub fn multiply_row(self, a: &[[[f32; 32]; PARTS]], b: [&[[u8; TILE]]; SIDE], out: &mut [[f32; 16]; SIDE]) {
        // SAFETY: the token proves the features that the function enables.
        unsafe { multiply_row(a, b, out) }
    }
}

#[target_feature(enable = "avx512f,avx512bw")]
fn multiply_row(a: &[[[f32; 32]; PARTS]], b: [&[[u8; TILE]]; SIDE], out: &mut [[f32; 16]; SIDE]) {
    let mut sums = [_mm512_setzero_ps(); SIDE];
    let high = _mm512_set1_epi32(0xFFFF_0000_u32 as i32);
    let steps = a.len();
    for (step, a) in a.iter().enumerate() {
        // Sums of the first and the second of each pair.
        let mut first = [[_mm512_setzero_ps(); PARTS]; SIDE];
        let mut second = [[_mm512_setzero_ps(); PARTS]; SIDE];
        for pair in 0..16 {
            for p in 0..SIDE {
                let tile = &b[p][step];
                // SAFETY: a tile has 16 times 64 bytes.
                let both = unsafe { _mm512_loadu_si512(tile.as_ptr().add(64 * pair).cast()) };
                if step + 4 < steps {
                    _mm_prefetch::<_MM_HINT_T0>(b[p][step + 4].as_ptr().wrapping_add(64 * pair).cast());
                }
                let (even, odd) = (_mm512_slli_epi32::<16>(both), _mm512_and_si512(both, high));
                let (even, odd) = (_mm512_castsi512_ps(even), _mm512_castsi512_ps(odd));
                for part in 0..PARTS {
                    first[p][part] = _mm512_fmadd_ps(_mm512_set1_ps(a[part][2 * pair]), even, first[p][part]);
                    second[p][part] = _mm512_fmadd_ps(_mm512_set1_ps(a[part][2 * pair + 1]), odd, second[p][part]);
                }
            }
        }
        for p in 0..SIDE {
            for part in 0..PARTS {
                sums[p] = _mm512_add_ps(sums[p], _mm512_add_ps(first[p][part], second[p][part]));
            }
        }
    }
    for p in 0..SIDE {
        // SAFETY: 16 floats are writable.
        unsafe { _mm512_storeu_ps(out[p].as_mut_ptr(), sums[p]) };
    }
}

/// Asks Linux for the tiles' state, which a process must do once.
fn granted() -> bool {
    const ARCH_PRCTL: u64 = 158;
    const REQUEST_PERMISSION: u64 = 0x1023;
    const TILE_DATA: u64 = 18;
    let result: i64;
    // SAFETY: a system call that reads its arguments only; it changes what the process may use, and nothing that it has.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result, in("rdi") REQUEST_PERMISSION, in("rsi") TILE_DATA,
            lateout("rcx") _, lateout("r11") _, options(nostack),
        );
    }
    result == 0
}
