//! Presets: names for the codecs of both sides.
//!
//! `k8v4` means 8-bit keys and 4-bit values; which method serves a side was chosen by models' own quality (`docs/kv-quality.md`): keys of 8 bits are affine
//! and rotated, everything below is `turbo`. `q8` and `q4` have about as many bits on both sides.

use super::{Codec, Coding};

/// A name for codecs of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preset {
    /// What users write.
    pub name: &'static str,
    /// Of keys.
    pub keys: Codec,
    /// Of values.
    pub values: Codec,
}

const fn of(name: &'static str, keys: Coding, values: Coding) -> Preset {
    Preset { name, keys: Codec::Coded(keys), values: Codec::Coded(values) }
}

impl Preset {
    /// All presets, from the largest state to the smallest.
    pub const ALL: [Self; 9] = [
        of("k8v8", Coding::affine(8).rotated(true), Coding::affine(8)),
        of("q8", Coding::affine(8).rotated(true), Coding::turbo(8)),
        of("k8v4", Coding::affine(8).rotated(true), Coding::turbo(4)),
        of("k8v3", Coding::affine(8).rotated(true), Coding::turbo(3)),
        of("q4", Coding::affine(4).rotated(true), Coding::affine(4).rotated(true)),
        of("k5v4", Coding::turbo(5), Coding::turbo(4)),
        of("k4v4", Coding::turbo(4), Coding::turbo(4)),
        of("k4v3", Coding::turbo(4), Coding::turbo(3)),
        of("k4v2", Coding::turbo(4), Coding::turbo(2)),
    ];

    /// Codecs of keys and values: a preset's, one raw or `turbo` codec's for both sides, or those of two codecs named `KEYS/VALUES`.
    pub fn codecs(name: &str) -> Option<(Codec, Codec)> {
        if let Some(preset) = Self::ALL.iter().find(|preset| preset.name == name) {
            return Some((preset.keys, preset.values));
        }
        let (keys, values) = name.split_once('/').unwrap_or((name, name));
        Some((Codec::from_name(keys)?, Codec::from_name(values)?))
    }
}
