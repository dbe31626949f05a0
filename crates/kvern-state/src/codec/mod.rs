//! Codecs: how one side (keys or values) of a column is stored.
//!
//! **What.** A [`Codec`] is an element type, or a [`Coding`]: codes of a few bits with scales. Every coding has one form,
//! `value = scale * level(code) + zero`, with one scale (and zero) for a group of values, and levels that are bytes, so that one kernel serves
//! all of them. What differs is how the scale is found and what the levels are: [`affine`], [`turbo`]; and whether values were [rotated](rotation)
//! first.
//!
//! ```text
//! one head's column: codes, a little-endian bit stream | a scale of each group, f16 | a zero of each group, f16 (affine)
//! ```
//!
//! | codec | bits per value of a head of 128 | levels |
//! |---|---|---|
//! | `q8`, `q4` | 9, 5 | evenly spaced from a group's least value to its largest; groups of 32 |
//! | `turbo8`, `6`, `5`, `4`, `3`, `2` | 8.125 .. 2.125 | best for a normal distribution; the head is the group, and is rotated |
//!
//! **Invariants.** A column of one head is encoded on its own, so moving a page never changes a value. Finite values, clamped to the range of
//! `f16` (before and after a rotation, which keeps a head's length), decode to finite values. The scalar functions here are the oracle of every fused kernel, and use no fused multiply-adds: every
//! machine stores the same bytes.
//!
//! ```
//! use kvern_state::Codec;
//! let codec = Codec::from_name("turbo4").unwrap();
//! let key: Vec<f32> = (0..128).map(|i| (i as f32).sin()).collect();
//! let mut bytes = vec![0; codec.bytes(key.len())];
//! assert!(codec.encode(&key, &mut bytes));
//! assert_eq!(bytes.len(), 128 / 2 + 2);
//! let mut back = vec![0.0; key.len()];
//! codec.decode(&bytes, &mut back);
//! let error: f32 = key.iter().zip(&back).map(|(x, y)| (x - y) * (x - y)).sum();
//! assert!(error < 0.02 * key.iter().map(|x| x * x).sum::<f32>());
//! ```

mod affine;
mod preset;
pub mod rotation;
mod turbo;

use kvern_base::{Raw, bf16, f16};

pub use preset::Preset;

/// How one side of a column is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Codec {
    /// Exact.
    F32,
    /// Rounded to half precision.
    F16,
    /// Rounded to bfloat16.
    Bf16,
    /// Codes with scales.
    Coded(Coding),
}

/// How codes are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Method {
    Affine,
    Turbo,
}

/// Codes of a few bits with scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Coding {
    method: Method,
    bits: u32,
    rotated: bool,
}

/// Scale and zero of a group: `value = scale * level + zero`.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Scale {
    /// What a level is multiplied with.
    pub scale: f16,
    /// What is added; of `turbo`, whose levels are symmetric, nothing is stored.
    pub zero: f16,
}

/// What is added to a level of `turbo` to make it a byte.
pub const MIDDLE: i32 = 128;

impl Coding {
    /// `q8` and `q4`.
    const fn affine(bits: u32) -> Self {
        assert!(bits == 4 || bits == 8);
        Self { method: Method::Affine, bits, rotated: false }
    }

    /// `turbo2` to `turbo8`.
    const fn turbo(bits: u32) -> Self {
        assert!(matches!(bits, 2 | 3 | 4 | 5 | 6 | 8));
        Self { method: Method::Turbo, bits, rotated: true }
    }

    /// With values rotated first, or not.
    const fn rotated(self, rotated: bool) -> Self {
        Self { rotated, ..self }
    }

    /// Bits of a code.
    pub fn bits(self) -> u32 {
        self.bits
    }

    /// Whether values are rotated before they are encoded.
    pub fn is_rotated(self) -> bool {
        self.rotated
    }

    /// Whether groups have a zero of their own; otherwise a level is [`MIDDLE`] above what it stands for.
    pub fn has_zeros(self) -> bool {
        self.method == Method::Affine
    }

    /// Values that share a scale, in a head of `dim`; the last group may be shorter.
    pub fn group(self, dim: usize) -> usize {
        match self.method {
            Method::Affine => affine::GROUP,
            Method::Turbo => dim,
        }
    }

    /// Groups of a head of `dim` values.
    pub fn groups(self, dim: usize) -> usize {
        dim.div_ceil(self.group(dim))
    }

    /// The byte that each code stands for; of 8 bits, the code itself.
    pub fn levels(self) -> &'static [u8] {
        match self.method {
            Method::Affine => affine::levels(self.bits),
            Method::Turbo => &turbo::codebook(self.bits).levels,
        }
    }

    /// Bytes of the codes of a head.
    fn code_bytes(self, dim: usize) -> usize {
        (dim * self.bits as usize).div_ceil(8)
    }

    fn bytes(self, dim: usize) -> usize {
        self.code_bytes(dim) + self.groups(dim) * if self.has_zeros() { 4 } else { 2 }
    }

    fn name(self) -> String {
        let method = if self.method == Method::Affine { "q" } else { "turbo" };
        let usual = self.rotated == (self.method == Method::Turbo);
        format!(
            "{method}{}{}",
            self.bits,
            if usual {
                ""
            } else if self.rotated {
                "-rotated"
            } else {
                "-unrotated"
            }
        )
    }

    fn from_name(name: &str) -> Option<Self> {
        let affine = [8, 4].map(Self::affine);
        let turbo = [8, 6, 5, 4, 3, 2].map(Self::turbo);
        let both = affine.into_iter().chain(turbo).flat_map(|coding| [coding.rotated(false), coding.rotated(true)]);
        both.into_iter().find(|coding| coding.name() == name)
    }

    /// Codes of one head's column, a byte each, and the scale of each group. Changes `values`, which are rotated in place.
    ///
    /// Gives false when a value is not finite; the column then decodes to NaN.
    pub fn quantize(self, values: &mut [f32], codes: &mut [u8], scales: &mut [Scale]) -> bool {
        let finite = values.iter().all(|x| x.is_finite());
        if !finite {
            codes.fill(0);
            scales.fill(Scale { scale: f16::NAN, zero: f16::NAN });
            return false;
        }
        let clamp = |values: &mut [f32]| values.iter_mut().for_each(|x| *x = x.clamp(-LARGEST, LARGEST));
        clamp(values);
        if self.rotated {
            rotation::rotate(values);
            // One value may hold the length of the whole head; `f16`, in which the ends of a range are stored, may not.
            clamp(values);
        }
        let group = self.group(values.len());
        for ((values, codes), scale) in values.chunks(group).zip(codes.chunks_mut(group)).zip(scales) {
            *scale = match self.method {
                Method::Affine => affine::quantize(self.bits, values, codes),
                Method::Turbo => turbo::quantize(self.bits, values, codes),
            };
        }
        true
    }

    /// The inverse of [`Self::quantize`], up to rounding.
    fn dequantize(self, codes: &[u8], scales: &[Scale], values: &mut [f32]) {
        let (group, levels) = (self.group(values.len()), self.levels());
        let middle = if self.has_zeros() { 0 } else { MIDDLE };
        for ((values, codes), scale) in values.chunks_mut(group).zip(codes.chunks(group)).zip(scales) {
            let (scale, zero) = (scale.scale.to_f32(), scale.zero.to_f32());
            for (value, &code) in values.iter_mut().zip(codes) {
                *value = scale * (i32::from(levels[usize::from(code)]) - middle) as f32 + zero;
            }
        }
        if self.rotated {
            rotation::rotate_back(values);
        }
    }

    /// Writes what [`Self::quantize`] found in canonical order.
    pub fn write(self, codes: &[u8], scales: &[Scale], out: &mut [u8]) {
        let (bytes, rest) = out.split_at_mut(self.code_bytes(codes.len()));
        pack(codes, self.bits, bytes);
        let (scale_bytes, zero_bytes) = rest.split_at_mut(2 * scales.len());
        scale_bytes.chunks_exact_mut(2).zip(scales).for_each(|(out, x)| out.copy_from_slice(&x.scale.to_le_bytes()));
        zero_bytes.chunks_exact_mut(2).zip(scales).for_each(|(out, x)| out.copy_from_slice(&x.zero.to_le_bytes()));
    }

    /// The inverse of [`Self::write`].
    pub fn read(self, bytes: &[u8], codes: &mut [u8], scales: &mut [Scale]) {
        let (code_bytes, rest) = bytes.split_at(self.code_bytes(codes.len()));
        unpack(code_bytes, self.bits, codes);
        let (scale_bytes, zero_bytes) = rest.split_at(2 * scales.len());
        let half = |bytes: &[u8], i: usize| f16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]);
        for (i, scale) in scales.iter_mut().enumerate() {
            let zero = if self.has_zeros() { half(zero_bytes, i) } else { f16::ZERO };
            *scale = Scale { scale: half(scale_bytes, i), zero };
        }
    }
}

/// The largest magnitude that is encoded; larger ones count as this.
const LARGEST: f32 = 65504.0;

/// Codes as a little-endian bit stream: code `i` has the bits from `i * bits` on.
fn pack(codes: &[u8], bits: u32, out: &mut [u8]) {
    let (mut held, mut count) = (0u32, 0);
    let mut out = out.iter_mut();
    for &code in codes {
        held |= u32::from(code) << count;
        count += bits;
        while count >= 8 {
            out.by_ref().take(1).for_each(|out| *out = held as u8);
            (held, count) = (held >> 8, count - 8);
        }
    }
    out.take(1).for_each(|out| *out = held as u8);
}

fn unpack(bytes: &[u8], bits: u32, codes: &mut [u8]) {
    let (mut held, mut count) = (0u32, 0);
    let mut bytes = bytes.iter();
    for code in codes {
        while count < bits {
            held |= u32::from(bytes.next().copied().unwrap_or(0)) << count;
            count += 8;
        }
        *code = (held & ((1 << bits) - 1)) as u8;
        (held, count) = (held >> bits, count - bits);
    }
}

impl Codec {
    /// The raw element type; nothing for codes.
    pub fn raw(self) -> Option<Raw> {
        match self {
            Self::F32 => Some(Raw::F32),
            Self::F16 => Some(Raw::F16),
            Self::Bf16 => Some(Raw::Bf16),
            Self::Coded(_) => None,
        }
    }

    /// How its codes are found, if it has codes.
    pub fn coding(self) -> Option<Coding> {
        if let Self::Coded(coding) = self { Some(coding) } else { None }
    }

    /// The name users write.
    pub fn name(self) -> String {
        match self {
            Self::F32 => Raw::F32.name().into(),
            Self::F16 => Raw::F16.name().into(),
            Self::Bf16 => Raw::Bf16.name().into(),
            Self::Coded(coding) => coding.name(),
        }
    }

    /// The name and version that checkpoints carry: a codec whose bytes change gets another version.
    pub fn version(self) -> String {
        format!("{}@1", self.name())
    }

    /// The codec that users name so: `f32`, `f16`, `bf16`, `q8`, `q4`, `turbo8` to `turbo2`; `-rotated` or `-unrotated` for what is not usual.
    pub fn from_name(name: &str) -> Option<Self> {
        let raw = [Self::F32, Self::F16, Self::Bf16].into_iter().find(|codec| codec.name() == name);
        raw.or_else(|| Coding::from_name(name).map(Self::Coded))
    }

    /// Bytes of one head's column of `dim` values.
    pub fn bytes(self, dim: usize) -> usize {
        match self {
            Self::F32 => 4 * dim,
            Self::F16 | Self::Bf16 => 2 * dim,
            Self::Coded(coding) => coding.bytes(dim),
        }
    }

    /// Encodes one head's column; `out` is `self.bytes(values.len())` long. Gives false for codes of what is not finite.
    pub fn encode(self, values: &[f32], out: &mut [u8]) -> bool {
        match self {
            Self::F32 => values.iter().zip(out.as_chunks_mut().0).for_each(|(x, out)| *out = x.to_le_bytes()),
            Self::F16 => {
                values.iter().zip(out.as_chunks_mut().0).for_each(|(x, out)| *out = f16::from_f32(*x).to_le_bytes())
            }
            Self::Bf16 => {
                values.iter().zip(out.as_chunks_mut().0).for_each(|(x, out)| *out = bf16::from_f32(*x).to_le_bytes())
            }
            Self::Coded(coding) => {
                let dim = values.len();
                let (mut codes, mut scales) = (vec![0; dim], vec![Scale::default(); coding.groups(dim)]);
                let finite = coding.quantize(&mut values.to_vec(), &mut codes, &mut scales);
                coding.write(&codes, &scales, out);
                return finite;
            }
        }
        true
    }

    /// Decodes one head's column.
    pub fn decode(self, bytes: &[u8], out: &mut [f32]) {
        match self {
            Self::F32 => bytes.as_chunks().0.iter().zip(out).for_each(|(b, out)| *out = f32::from_le_bytes(*b)),
            Self::F16 => {
                bytes.as_chunks().0.iter().zip(out).for_each(|(b, out)| *out = f16::from_le_bytes(*b).to_f32())
            }
            Self::Bf16 => {
                bytes.as_chunks().0.iter().zip(out).for_each(|(b, out)| *out = bf16::from_le_bytes(*b).to_f32())
            }
            Self::Coded(coding) => {
                let (mut codes, mut scales) = (vec![0; out.len()], vec![Scale::default(); coding.groups(out.len())]);
                coding.read(bytes, &mut codes, &mut scales);
                coding.dequantize(&codes, &scales, out);
            }
        }
    }
}

#[cfg(test)]
mod tests;
