//! Portable code: arrays of 16, which compilers turn into whatever the target has (NEON among it).

use kvern_base::{bf16, f16};

use super::{Isa, Kernel, LANES};

/// The portable set; every CPU has it.
#[derive(Debug, Clone, Copy)]
pub struct Scalar(());

impl Scalar {
    /// The portable set.
    pub fn new() -> Self {
        Self(())
    }
}

impl Default for Scalar {
    fn default() -> Self {
        Self::new()
    }
}

#[inline(always)]
fn zip(a: [f32; LANES], b: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

impl Isa for Scalar {
    type F = [f32; LANES];
    type I = [i32; LANES];
    type B = [u8; 64];
    const WIDE: bool = false;

    fn go<K: Kernel>(self, kernel: K) {
        kernel.run(self);
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [x; LANES]
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::F {
        *from
    }
    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> Self::F {
        from.map(f16::to_f32)
    }
    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> Self::F {
        from.map(bf16::to_f32)
    }
    #[inline(always)]
    fn store(self, value: Self::F, to: &mut [f32; LANES]) {
        *to = value;
    }
    #[inline(always)]
    fn store_f16(self, value: Self::F, to: &mut [f16; LANES]) {
        *to = value.map(f16::from_f32);
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // Not `mul_add`: without hardware for it, that is a slow library call.
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn abs(self, a: Self::F) -> Self::F {
        a.map(f32::abs)
    }
    #[inline(always)]
    fn round(self, a: Self::F) -> Self::F {
        a.map(f32::round_ties_even)
    }
    #[inline(always)]
    fn floor(self, a: Self::F) -> Self::F {
        a.map(f32::floor)
    }
    #[inline(always)]
    fn scale2(self, a: Self::F, n: Self::F) -> Self::F {
        // Two factors, so that neither leaves the range of f32 exponents.
        let power = |n: i32| f32::from_bits(((127 + n) << 23) as u32);
        zip(a, n, |a, n| {
            let half = (n as i32) >> 1;
            a * power(half) * power(n as i32 - half)
        })
    }

    #[inline(always)]
    fn splat_i(self, x: i32) -> Self::I {
        [x; LANES]
    }
    #[inline(always)]
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I {
        std::array::from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn times_256(self, a: Self::I) -> Self::I {
        a.map(|x| x << 8)
    }
    #[inline(always)]
    fn to_f32(self, a: Self::I) -> Self::F {
        a.map(|x| x as f32)
    }
    #[inline(always)]
    fn store_i8(self, a: Self::F, to: &mut [i8; LANES]) {
        *to = a.map(|x| x.round_ties_even() as i8);
    }

    #[inline(always)]
    fn bytes(self, from: &[u8; 64]) -> Self::B {
        *from
    }
    #[inline(always)]
    fn no_bytes(self) -> Self::B {
        [0; 64]
    }
    #[inline(always)]
    fn low(self, a: Self::B) -> Self::B {
        a.map(|x| x & 15)
    }
    #[inline(always)]
    fn high(self, a: Self::B) -> Self::B {
        a.map(|x| x >> 4)
    }
    #[inline(always)]
    fn with_bit(self, a: Self::B, mask: u64, bit: u8) -> Self::B {
        std::array::from_fn(|i| a[i] | if mask >> i & 1 == 1 { bit } else { 0 })
    }
    #[inline(always)]
    fn table(self, from: &[u8; 16]) -> Self::B {
        std::array::from_fn(|i| from[i % 16])
    }
    #[inline(always)]
    fn lookup(self, table: Self::B, codes: Self::B) -> Self::B {
        codes.map(|code| table[usize::from(code)])
    }
    #[inline(always)]
    fn select(self, mask: u64, a: Self::B, b: Self::B) -> Self::B {
        std::array::from_fn(|i| if mask >> i & 1 == 1 { b[i] } else { a[i] })
    }
    #[inline(always)]
    fn bit(self, a: Self::B, bit: u8) -> u64 {
        a.iter().rev().fold(0, |mask, byte| mask << 1 | u64::from(byte & bit != 0))
    }
    #[inline(always)]
    fn dot<const BITS: u32>(self, acc: Self::I, codes: Self::B, x: [i8; 4]) -> Self::I {
        let x = x.map(i32::from);
        std::array::from_fn(|i| {
            let code = |j: usize| i32::from(codes[4 * i + j]);
            acc[i] + code(0) * x[0] + code(1) * x[1] + code(2) * x[2] + code(3) * x[3]
        })
    }
}
