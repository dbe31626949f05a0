//! What the kernels' tests share.

#![allow(dead_code, reason = "each test uses its own part of this")]

use kvern_backend::Backend;
use kvern_cpu::{Cpu, CpuOptions, KernelSet};

/// Numbers without structure: a SplitMix64 stream.
pub struct Noise(pub u64);

impl Noise {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    /// Uniform in -1..1.
    pub fn value(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

/// `count` values in -1..1.
pub fn values(seed: u64, count: usize) -> Vec<f32> {
    let mut noise = Noise(seed);
    (0..count).map(|_| noise.value()).collect()
}

/// A backend with one of this machine's instruction sets.
pub fn cpu(set: KernelSet, threads: usize, exact: bool) -> Cpu {
    Cpu::new(&CpuOptions { threads: Some(threads), isa: Some(set.name().into()), exact }).unwrap()
}

/// A tensor with the given values.
pub fn tensor<B: Backend>(backend: &B, values: &[f32], width: usize) -> B::Tensor {
    let mut tensor = backend.tensor(values.len() / width, width).unwrap();
    backend.resize(&mut tensor, values.len() / width).unwrap();
    backend.upload(values, &mut tensor).unwrap();
    tensor
}

/// Largest difference.
pub fn difference(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    // NaN anywhere must not pass as the smaller one.
    got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, |max, x| if x <= max { max } else { x })
}
