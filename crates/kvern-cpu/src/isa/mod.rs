//! Instruction sets behind one private vector trait.
//!
//! **What.** [`Isa`] is a vocabulary of 16-lane operations. Every kernel is written once over it, as a [`Kernel`], and each
//! instruction set runs it inside one function compiled for that set.
//!
//! **Why.** Sixteen lanes everywhere (one AVX-512 register, two AVX2 registers, an array) means one panel layout, one order of
//! every reduction, and one algorithm to read.
//!
//! **Invariants.** A value of an ISA type is the proof that the running CPU has it: [`Avx2`] and [`Avx512`] can only be had from
//! `detect`. Horizontal reductions are pairwise trees over the lanes, the same tree in every set.

mod scalar;

#[cfg(target_arch = "x86_64")]
pub mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "x86_64")]
pub use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub use avx512::Avx512;
pub use scalar::Scalar;

use kvern_base::{bf16, f16};

/// Lanes of every vector, outputs of every panel, tokens of every key panel.
pub const LANES: usize = 16;

/// A computation that any instruction set can run. Implementations mark `run` and all it calls `#[inline(always)]`, so that the
/// whole of it is compiled for the set that runs it.
pub trait Kernel {
    /// The computation.
    fn run<S: Isa>(self, isa: S);
}

/// Sixteen-lane operations. `F` holds 16 `f32`, `I` 16 `i32`, `B` 64 bytes.
pub trait Isa: Copy + Send + Sync + 'static {
    /// 16 lanes of `f32`.
    type F: Copy;
    /// 16 lanes of `i32`.
    type I: Copy;
    /// 64 bytes: 16 lanes of 4.
    type B: Copy;
    /// Whether 24 accumulators fit the registers.
    const WIDE: bool;

    /// Runs a kernel compiled for this set.
    fn go<K: Kernel>(self, kernel: K);

    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::F;
    /// Reads 16 lanes.
    fn load(self, from: &[f32; LANES]) -> Self::F;
    /// Reads and widens 16 lanes.
    fn load_f16(self, from: &[f16; LANES]) -> Self::F;
    /// Reads and widens 16 lanes.
    fn load_bf16(self, from: &[bf16; LANES]) -> Self::F;
    /// Writes 16 lanes.
    fn store(self, value: Self::F, to: &mut [f32; LANES]);
    /// Rounds (to nearest, ties to even) and writes 16 lanes.
    fn store_f16(self, value: Self::F, to: &mut [f16; LANES]);
    /// `a + b`.
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b`.
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a / b`.
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, fused where the set has it.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The larger of each pair; `b` where either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// The smaller of each pair; `b` where either is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// Magnitudes.
    fn abs(self, a: Self::F) -> Self::F;
    /// Nearest integers, ties to even.
    fn round(self, a: Self::F) -> Self::F;
    /// The largest integers not above.
    fn floor(self, a: Self::F) -> Self::F;
    /// `a * 2^n` for integral `n` in `-160..=160`, rounding to zero or infinity past the range of `f32`.
    fn scale2(self, a: Self::F, n: Self::F) -> Self::F;

    /// All lanes `x`.
    fn splat_i(self, x: i32) -> Self::I;
    /// `a + b`, wrapping.
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// `a * 256`, wrapping.
    fn times_256(self, a: Self::I) -> Self::I;
    /// Rounds to nearest; exact for magnitudes up to 2^24.
    fn to_f32(self, a: Self::I) -> Self::F;
    /// Rounds to nearest even and keeps the low byte of each lane; lanes lie in `-128.0..=127.0`.
    fn store_i8(self, a: Self::F, to: &mut [i8; LANES]);

    /// Reads 64 bytes.
    fn bytes(self, from: &[u8; 64]) -> Self::B;
    /// 64 zero bytes.
    fn no_bytes(self) -> Self::B;
    /// The low four bits of each byte.
    fn low(self, a: Self::B) -> Self::B;
    /// The high four bits of each byte, moved down.
    fn high(self, a: Self::B) -> Self::B;
    /// Sets `bit` in byte `i` where bit `i` of `mask` is set and the byte's bit is clear.
    fn with_bit(self, a: Self::B, mask: u64, bit: u8) -> Self::B;
    /// Sixteen bytes, for [`Self::lookup`].
    fn table(self, from: &[u8; 16]) -> Self::B;
    /// The entries of a table at codes below 16.
    fn lookup(self, table: Self::B, codes: Self::B) -> Self::B;
    /// Byte `i` of `b` where bit `i` of `mask` is set, and of `a` elsewhere.
    fn select(self, mask: u64, a: Self::B, b: Self::B) -> Self::B;
    /// Bit `i` is set where byte `i` has `bit`.
    fn bit(self, a: Self::B, bit: u8) -> u64;
    /// `acc + Σ_j codes[4 lane + j] * x[j]` in each lane: unsigned codes, signed `x`, exact. `BITS` bounds the codes.
    fn dot<const BITS: u32>(self, acc: Self::I, codes: Self::B, x: [i8; 4]) -> Self::I;

    /// Asks for bytes that are read soon, where the set has an instruction for that.
    #[inline(always)]
    fn prefetch(self, _bytes: &[u8]) {}

    /// Sum of the lanes, as a pairwise tree: halves, then their halves.
    #[inline(always)]
    fn sum(self, a: Self::F) -> f32 {
        let mut lanes = [0.0; LANES];
        self.store(a, &mut lanes);
        let mut width = LANES / 2;
        while width > 0 {
            for i in 0..width {
                lanes[i] += lanes[i + width];
            }
            width /= 2;
        }
        lanes[0]
    }

    /// The largest lane; any number where one is NaN.
    #[inline(always)]
    fn max_lane(self, a: Self::F) -> f32 {
        let mut lanes = [0.0; LANES];
        self.store(a, &mut lanes);
        lanes.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }

    /// `tanh a`, with an absolute error under 3e-7: `1 - 2 / (e^2a + 1)`.
    #[inline(always)]
    fn tanh(self, a: Self::F) -> Self::F {
        let one = self.splat(1.0);
        let e = self.exp(self.add(a, a));
        self.fma(self.splat(-2.0), self.div(one, self.add(e, one)), one)
    }

    /// `e^a`: 0 below -103, infinite above 88.8, NaN for NaN; relative error under 3e-7 in between.
    ///
    /// Cephes' reduction `a = n ln 2 + r` with a split constant, then the Taylor polynomial of degree 7 on `|r| ≤ ln 2 / 2`.
    #[inline(always)]
    fn exp(self, a: Self::F) -> Self::F {
        let a = self.max(self.splat(-104.0), self.min(self.splat(89.0), a));
        let n = self.round(self.mul(a, self.splat(std::f32::consts::LOG2_E)));
        let r = self.fma(n, self.splat(-0.693_359_4), a);
        let r = self.fma(n, self.splat(2.121_944_4e-4), r);
        let mut p = self.splat(1.0 / 5040.0);
        for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
            p = self.fma(p, r, self.splat(c));
        }
        self.scale2(p, n)
    }
}

/// A raw element that vectors can be loaded from.
pub trait Lane: kvern_base::Element {
    /// Reads and widens 16 lanes.
    fn load<S: Isa>(isa: S, from: &[Self; LANES]) -> S::F;
    /// Rounds and writes 16 lanes.
    fn store<S: Isa>(isa: S, value: S::F, to: &mut [Self; LANES]);
}

impl Lane for f32 {
    #[inline(always)]
    fn load<S: Isa>(isa: S, from: &[Self; LANES]) -> S::F {
        isa.load(from)
    }
    #[inline(always)]
    fn store<S: Isa>(isa: S, value: S::F, to: &mut [Self; LANES]) {
        isa.store(value, to);
    }
}

impl Lane for f16 {
    #[inline(always)]
    fn load<S: Isa>(isa: S, from: &[Self; LANES]) -> S::F {
        isa.load_f16(from)
    }
    #[inline(always)]
    fn store<S: Isa>(isa: S, value: S::F, to: &mut [Self; LANES]) {
        isa.store_f16(value, to);
    }
}

impl Lane for bf16 {
    #[inline(always)]
    fn load<S: Isa>(isa: S, from: &[Self; LANES]) -> S::F {
        isa.load_bf16(from)
    }
    #[inline(always)]
    fn store<S: Isa>(isa: S, value: S::F, to: &mut [Self; LANES]) {
        let mut lanes = [0.0; LANES];
        isa.store(value, &mut lanes);
        *to = lanes.map(bf16::from_f32);
    }
}

/// The instruction set in use: the kernel set of the promise.
#[derive(Debug, Clone, Copy)]
pub enum KernelSet {
    /// Portable code.
    Scalar(Scalar),
    /// AVX2 with FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    /// AVX-512 F, BW, VL, DQ and VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    /// The same, with tiles for products with bf16 weights.
    #[cfg(target_arch = "x86_64")]
    Amx(Avx512, amx::Amx),
}

impl KernelSet {
    /// Every set that this CPU can run, the best one last.
    pub fn available() -> Vec<Self> {
        let mut sets = vec![Self::Scalar(Scalar::new())];
        #[cfg(target_arch = "x86_64")]
        {
            sets.extend(Avx2::detect().map(Self::Avx2));
            sets.extend(Avx512::detect().map(Self::Avx512));
            sets.extend(Avx512::detect().zip(amx::Amx::detect()).map(|(isa, amx)| Self::Amx(isa, amx)));
        }
        sets
    }

    /// The name that `KVERN_ISA` and reports use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Scalar(_) => "scalar",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Amx(..) => "amx",
        }
    }

    /// The tiles, if the set has them.
    #[cfg(target_arch = "x86_64")]
    pub fn tiles(self) -> Option<amx::Amx> {
        match self {
            Self::Amx(_, amx) => Some(amx),
            _ => None,
        }
    }

    /// Runs a kernel.
    #[inline]
    pub fn run<K: Kernel>(self, kernel: K) {
        match self {
            Self::Scalar(isa) => isa.go(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(isa) => isa.go(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(isa) | Self::Amx(isa, _) => isa.go(kernel),
        }
    }
}

#[cfg(test)]
mod tests;
