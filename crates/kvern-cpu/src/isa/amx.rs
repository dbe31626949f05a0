//! Intel AMX: products of tiles of bf16, summed up in f32.
//!
//! Tile registers are no operands of inline assembly. [`Amx::multiply`] therefore is one block of it from the first tile to the last, between
//! [`Amx::begin`] and [`Amx::end`], which set up and release the registers' shapes; the compiler uses none of them itself.

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;

/// Bytes of a tile: 16 rows of 64.
pub const TILE: usize = 1024;
/// Parts that a value of the left factor is split into.
pub const PARTS: usize = 3;

/// Proof that the CPU has AMX tiles of bf16 and that the system lets this process use them.
#[derive(Debug, Clone, Copy)]
pub struct Amx(());

/// Shapes of the tiles, each of rows of 64 bytes.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Shapes([u8; 64]);

/// For so many rows of the left factor and of results, less one: tiles 0 to 5. Tiles 6 and 7 have 16 rows.
static SHAPES: [Shapes; 16] = {
    let mut all = [Shapes([0; 64]); 16];
    let mut rows = 0;
    while rows < 16 {
        let bytes = &mut all[rows].0;
        bytes[0] = 1;
        let mut tile = 0;
        while tile < 8 {
            bytes[16 + 2 * tile] = 64;
            bytes[48 + tile] = if tile < 6 { rows as u8 + 1 } else { 16 };
            tile += 1;
        }
        rows += 1;
    }
    all
};

impl Amx {
    /// The token, if the CPU has the tiles and the system grants them.
    pub fn detect() -> Option<Self> {
        const BF16: u32 = 1 << 22;
        const TILES: u32 = 1 << 24;
        (cfg!(target_os = "linux") && __cpuid_count(7, 0).edx & (BF16 | TILES) == BF16 | TILES && granted())
            .then_some(Self(()))
    }

    /// Sets up the tiles of this thread for `rows` rows of a block, 1 to 16.
    #[inline(always)]
    pub fn begin(self, rows: usize) {
        let shapes = &SHAPES[rows - 1];
        // SAFETY: the token proves that the CPU has the instruction; the shapes are those of the first palette.
        unsafe { asm!("ldtilecfg [{}]", in(reg) shapes, options(nostack, readonly)) }
    }

    /// Gives the tiles of this thread back.
    #[inline(always)]
    pub fn end(self) {
        // SAFETY: the token proves that the CPU has the instruction.
        unsafe { asm!("tilerelease", options(nostack, nomem)) }
    }

    /// `out[r][p] = Σ_k a[r][k] · b[p][k]` for blocks of 16 rows and panels of 16 columns: two of each, or one where the second is the first. A step `k`
    /// is 32 values: of `a` [`PARTS`] tiles, each `[row][32]`; of `b` one tile `[pair][column][2]`. `out` is `[2][2][16][16]`, of which the rows that there are are written.
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
                    "prefetcht0 [{b} + 4096 + 0]", "prefetcht0 [{b} + 4096 + 64]", "prefetcht0 [{b} + 4096 + 128]", "prefetcht0 [{b} + 4096 + 192]", "prefetcht0 [{b} + 4096 + 256]", "prefetcht0 [{b} + 4096 + 320]", "prefetcht0 [{b} + 4096 + 384]", "prefetcht0 [{b} + 4096 + 448]",
                    "prefetcht0 [{b} + 4096 + 512]", "prefetcht0 [{b} + 4096 + 576]", "prefetcht0 [{b} + 4096 + 640]", "prefetcht0 [{b} + 4096 + 704]", "prefetcht0 [{b} + 4096 + 768]", "prefetcht0 [{b} + 4096 + 832]", "prefetcht0 [{b} + 4096 + 896]", "prefetcht0 [{b} + 4096 + 960]",
                    "prefetcht0 [{d} + 4096 + 0]", "prefetcht0 [{d} + 4096 + 64]", "prefetcht0 [{d} + 4096 + 128]", "prefetcht0 [{d} + 4096 + 192]", "prefetcht0 [{d} + 4096 + 256]", "prefetcht0 [{d} + 4096 + 320]", "prefetcht0 [{d} + 4096 + 384]", "prefetcht0 [{d} + 4096 + 448]",
                    "prefetcht0 [{d} + 4096 + 512]", "prefetcht0 [{d} + 4096 + 576]", "prefetcht0 [{d} + 4096 + 640]", "prefetcht0 [{d} + 4096 + 704]", "prefetcht0 [{d} + 4096 + 768]", "prefetcht0 [{d} + 4096 + 832]", "prefetcht0 [{d} + 4096 + 896]", "prefetcht0 [{d} + 4096 + 960]",
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
