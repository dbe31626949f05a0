//! What the kernels' tests share.

#![allow(dead_code, reason = "each test uses its own part of this")]

use kvern_backend::{Backend, Slot};
use kvern_state::{Append, Codec, GroupSpec, Kind, Pool, StateSpec, Window};

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

const HALF: (Codec, Codec) = (Codec::F16, Codec::Bf16);

/// Groups of every kind and policy; with codes where they are supported.
pub fn groups() -> Vec<GroupSpec> {
    let attention = |codecs| GroupSpec::attention(2, 2, 20, 32, codecs);
    let coded = |names: [&str; 2]| names.map(|name| Codec::from_name(name).unwrap());
    let coded = [["q8-rotated", "turbo3"], ["turbo5", "q4"], ["turbo2", "turbo6"]].map(coded).map(|[keys, values]| {
        let group = GroupSpec::attention(2, 2, 48, 32, (keys, values));
        if keys.bytes(48) > 48 {
            group.windowed(Window { size: 37, sinks: 3 })
        } else {
            GroupSpec::attention(2, 2, 48, 32, HALF).late(50, vec![keys, values])
        }
    });
    let coded = coded.into_iter().filter(|_| std::env::var("KVERN_TEST_DEVICE").as_deref() != Ok("cuda"));
    let raw = [
        attention(HALF),
        attention((Codec::F32, Codec::F16)).windowed(Window { size: 37, sinks: 3 }),
        attention((Codec::F32, Codec::F32)).late(50, vec![Codec::F16, Codec::Bf16]),
        GroupSpec::latent(1, 32, 16, Some(16), Codec::F16),
        GroupSpec::recurrent(2, &[("tail", 30)]),
        attention(HALF).companion(1),
    ];
    raw.into_iter().chain(coded).collect()
}

/// [`groups`] in pages of 16.
pub fn spec() -> StateSpec {
    StateSpec::new(16, groups()).unwrap()
}

/// Executes an append: columns and states of all groups follow from the tokens alone.
pub fn store<B: Backend>(backend: &B, pages: &mut B::Pages, pool: &Pool, append: &Append<'_>, tokens: &[u32]) {
    let step = backend.begin(append.plan(tokens, &[]).unwrap(), pages).unwrap();
    let input = |salt: u64, width: usize| {
        let row = |&token: &u32| values(salt * 10_000 + u64::from(token), width);
        tensor(backend, &tokens.iter().flat_map(row).collect::<Vec<f32>>(), width)
    };
    for (group, spec) in pool.spec().groups().iter().enumerate() {
        for layer in 0..spec.layers {
            let (slot, salt) = (Slot { group, layer }, (group * 10 + layer) as u64);
            if spec.kind == Kind::Recurrent {
                let kernel = backend.vector(&[0.25; 40]).unwrap();
                let (x, mut out) = (input(salt, 10), input(0, 10));
                backend.convolve(&step, pages, (slot, 0), &kernel, &x, &mut out).unwrap();
            } else {
                let planes = (1..).zip(&spec.planes).map(|(i, plane)| input(salt * 10 + i, plane.width()));
                let planes: Vec<B::Tensor> = planes.collect();
                backend.append(&step, pages, slot, &planes.iter().collect::<Vec<_>>()).unwrap();
            }
        }
    }
}
