//! Codecs by themselves: what they lose, what they store, and what they do with the strangest values.

use super::*;

const TURBO: [u32; 6] = [2, 3, 4, 5, 6, 8];

fn every_coding() -> impl Iterator<Item = Coding> {
    let codings = [4, 8].map(Coding::affine).into_iter().chain(TURBO.map(Coding::turbo));
    codings.flat_map(|coding| [coding.rotated(false), coding.rotated(true)])
}

/// Numbers of a normal distribution, by Box and Muller's method.
fn normal(count: usize) -> Vec<f32> {
    let mut state = 7u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    };
    let mut pair = || {
        let (radius, angle) = ((-2.0 * uniform().ln()).sqrt(), 2.0 * std::f64::consts::PI * uniform());
        [(radius * angle.cos()) as f32, (radius * angle.sin()) as f32]
    };
    (0..count / 2).flat_map(|_| pair()).collect()
}

fn round_trip(codec: Codec, values: &[f32]) -> Vec<f32> {
    let mut bytes = vec![0; codec.bytes(values.len())];
    codec.encode(values, &mut bytes);
    let mut back = vec![1.0; values.len()];
    codec.decode(&bytes, &mut back);
    back
}

fn mean_error(coding: Coding, dim: usize) -> f64 {
    let values = normal(1 << 18);
    let error = |head: &[f32]| -> f64 {
        let back = round_trip(Codec::Coded(coding), head);
        head.iter().zip(back).map(|(x, y)| f64::from(x - y).powi(2)).sum()
    };
    values.chunks_exact(dim).map(error).sum::<f64>() / values.len() as f64
}

#[test]
fn raw_codecs_keep_what_the_element_type_can_hold() {
    let values = [0.0, -1.5, 0.25, 65504.0, -0.0078125];
    for codec in [Codec::F32, Codec::F16] {
        assert_eq!(round_trip(codec, &values), values);
    }
    assert_eq!(round_trip(Codec::Bf16, &[1.0 + 1.0 / 256.0]), [1.0], "a tie rounds to even");
}

#[test]
fn names_are_read_back() {
    for codec in [Codec::F32, Codec::F16, Codec::Bf16].into_iter().chain(every_coding().map(Codec::Coded)) {
        assert_eq!(Codec::from_name(&codec.name()), Some(codec), "{}", codec.name());
    }
    assert_eq!(Codec::from_name("k8v4"), None);
    for preset in Preset::ALL {
        assert_eq!(Preset::codecs(preset.name), Some((preset.keys, preset.values)));
        let bytes = |codec: Codec| codec.bytes(128);
        assert!(bytes(preset.keys) + bytes(preset.values) <= 2 * 128 * 9 / 8, "{}", preset.name);
    }
    assert_eq!(Preset::codecs("f16"), Some((Codec::F16, Codec::F16)));
    assert_eq!(Preset::codecs("q8/turbo4-unrotated").unwrap().1.name(), "turbo4-unrotated");
    assert_eq!(Preset::codecs("q8/"), None);
}

#[test]
fn sizes_count_scales() {
    let bytes = |name: &str, dim| Codec::from_name(name).unwrap().bytes(dim);
    assert_eq!(
        ["q8", "q4", "turbo8", "turbo5", "turbo3", "turbo2"].map(|name| bytes(name, 128)),
        [144, 80, 130, 82, 50, 34]
    );
    assert_eq!(["q8", "turbo4"].map(|name| bytes(name, 80)), [80 + 3 * 4, 42]);
}

#[test]
fn codebooks_are_those_of_the_normal_distribution() {
    // Levels, rounded to integers times a step, against Max 1960.
    let level = |bits: u32, code: usize| {
        let book = turbo::codebook(bits);
        f64::from(i32::from(book.levels[code]) - MIDDLE) * book.step
    };
    for (bits, want) in [
        (2, vec![0.4528, 1.5104]),
        (3, vec![0.2451, 0.7560, 1.3439, 2.1519]),
        (4, vec![0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326]),
    ] {
        let half = want.len();
        for (i, want) in want.into_iter().enumerate() {
            assert!((level(bits, half + i) - want).abs() < 0.014, "{bits} bits, level {i}");
            assert_eq!(level(bits, half + i), -level(bits, half - 1 - i));
        }
    }
}

#[test]
fn normal_values_lose_what_the_method_promises() {
    for (bits, want) in [(2, 0.11748), (3, 0.03455), (4, 0.009501), (5, 0.002505), (6, 0.000_68), (8, 0.000_095)] {
        let error = turbo::codebook(bits).error();
        assert!(bits > 5 || (error / want - 1.0).abs() < 0.02, "{bits} bits: {error}, not {want}");
        for rotated in [false, true] {
            let error = mean_error(Coding::turbo(bits).rotated(rotated), 512);
            assert!(error < want && error > 0.8 * want, "turbo{bits}: {error}, not a little below {want}");
        }
    }
    // Small heads gain the most from a deviation of their own.
    assert!(mean_error(Coding::turbo(4), 64) < 0.0075);
}

#[test]
fn decoded_values_are_within_half_a_step() {
    for (at, scale) in [(0.0, 1.0), (3.0, 0.01), (-900.0, 5.0), (0.0, 30_000.0), (0.0, 1e-6), (60_000.0, 400.0)] {
        let values: Vec<f32> = normal(128).iter().map(|x| (at + scale * x).clamp(-LARGEST, LARGEST)).collect();
        for bits in [4, 8] {
            let back = round_trip(Codec::Coded(Coding::affine(bits)), &values);
            for (group, back) in values.chunks(affine::GROUP).zip(back.chunks(affine::GROUP)) {
                let most = ((1 << bits) - 1) as f32;
                let (least, largest) = group.iter().fold((f32::MAX, f32::MIN), |(a, b), &x| (a.min(x), b.max(x)));
                // Zero and scale are rounded to f16, to 2^-24 at least.
                let range = largest - least + least.abs() / 1024.0 + 6e-8;
                let bound = range / most * (0.5 + 1.0 / 1024.0) + 3e-8 + largest.abs() * 1e-6;
                for (x, y) in group.iter().zip(back) {
                    assert!((x - y).abs() <= bound, "q{bits}: {x} became {y}, more than {bound} away");
                }
            }
        }
    }
}

#[test]
fn strange_values_stay_finite() {
    let dim = 128;
    let mut denormal = vec![1e-40f32; dim];
    denormal[3] = -f32::MIN_POSITIVE / 3.0;
    let mut alternating = vec![LARGEST; dim];
    alternating.iter_mut().step_by(2).for_each(|x| *x = -LARGEST);
    let mut single = vec![0.0; dim];
    single[17] = LARGEST;
    let cases: [(Vec<f32>, f32); 8] = [
        (vec![0.0; dim], 0.0),
        (vec![-0.0; dim], 0.0),
        (vec![0.5; dim], 0.5),
        (vec![-3.75; dim], 3.75),
        (denormal, 1e-38),
        (alternating, LARGEST),
        (single, LARGEST),
        (vec![f32::MAX; dim], LARGEST),
    ];
    for coding in every_coding() {
        for (values, largest) in &cases {
            let back = round_trip(Codec::Coded(coding), values);
            assert!(back.iter().all(|x| x.is_finite()), "{}: {values:?}", coding.name());
            // Nothing grows beyond the head's length.
            let length = (values.len() as f32).sqrt() * largest;
            assert!(back.iter().all(|x| x.abs() <= length * 1.01 + 1e-6), "{}: {back:?}", coding.name());
        }
        for constant in [0.0, 0.5, -3.75] {
            let back = round_trip(Codec::Coded(coding), &vec![constant; dim]);
            if coding.has_zeros() && !coding.is_rotated() {
                assert_eq!(back, vec![constant; dim], "{}", coding.name());
            }
        }
    }
}

#[test]
fn what_is_not_finite_is_refused_and_poisons_its_column() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut values = normal(64);
        values[40] = bad;
        for coding in every_coding() {
            let codec = Codec::Coded(coding);
            let mut bytes = vec![0; codec.bytes(64)];
            assert!(!codec.encode(&values, &mut bytes));
            let mut back = [0.0; 64];
            codec.decode(&bytes, &mut back);
            assert!(back.iter().all(|x| x.is_nan()));
        }
    }
}

#[test]
fn a_rotation_keeps_products_and_is_undone() {
    for dim in [16, 64, 80, 96, 128, 192, 256, 512] {
        let (a, b) = (normal(dim), normal(2 * dim)[dim..].to_vec());
        let (mut x, mut y) = (a.clone(), b.clone());
        rotation::rotate(&mut x);
        rotation::rotate(&mut y);
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| f64::from(x * y)).sum::<f64>();
        assert!((dot(&x, &y) - dot(&a, &b)).abs() < 1e-4, "{dim}");
        assert!(a.iter().zip(&x).any(|(a, x)| (a - x).abs() > 0.1));
        rotation::rotate_back(&mut x);
        assert!(x.iter().zip(&a).all(|(x, a)| (x - a).abs() < 1e-5), "{dim}");
    }
    // One outlier is spread over its block.
    let mut x = vec![0.0; 64];
    x[5] = 8.0;
    rotation::rotate(&mut x);
    assert!(x.iter().all(|x| x.abs() == 1.0));
}

/// Levels and columns as numpy decodes them (`tools/oracle/codecs.py`).
#[test]
fn numpy_decodes_the_same_bits() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/codecs.json");
    let oracle: serde_json::Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    for (bits, want) in oracle["levels"].as_object().unwrap() {
        let levels = turbo::codebook(bits.parse().unwrap()).levels.iter().map(|&level| i32::from(level) - MIDDLE);
        let want: Vec<i32> = want.as_array().unwrap().iter().map(|level| level.as_i64().unwrap() as i32).collect();
        assert_eq!(levels.collect::<Vec<_>>(), want, "{bits} bits");
    }
    let bytes = |value: &serde_json::Value| -> Vec<u8> {
        let digits = value.as_str().unwrap();
        (0..digits.len() / 2).map(|i| u8::from_str_radix(&digits[2 * i..][..2], 16).unwrap()).collect()
    };
    let cases = oracle["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 2 * 2 * 8);
    for case in cases {
        let codec = Codec::from_name(case["codec"].as_str().unwrap()).unwrap();
        let want: Vec<u32> = bytes(&case["values"]).as_chunks().0.iter().map(|x| u32::from_le_bytes(*x)).collect();
        let mut values = vec![0.0; want.len()];
        codec.decode(&bytes(&case["bytes"]), &mut values);
        assert_eq!(values.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), want, "{}, {}", codec.name(), want.len());
    }
}
