//! Codecs: how one side (keys or values) of a column is stored.
//!
//! The scalar functions here are the oracle of every fused kernel. A column of one head is encoded on its own, so moving a page
//! never changes a value.

use kvern_base::{Raw, bf16, f16};

/// How one side of a column is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Codec {
    /// Exact.
    F32,
    /// Rounded to half precision.
    F16,
    /// Rounded to bfloat16.
    Bf16,
}

impl Codec {
    /// The raw element type.
    pub fn raw(self) -> Raw {
        match self {
            Self::F32 => Raw::F32,
            Self::F16 => Raw::F16,
            Self::Bf16 => Raw::Bf16,
        }
    }

    /// The name users write.
    pub fn name(self) -> &'static str {
        self.raw().name()
    }

    /// The name and version that checkpoints carry: a codec whose bytes change gets another version.
    pub fn version(self) -> String {
        format!("{}@1", self.name())
    }

    /// The codec that users name so: `f32`, `f16`, `bf16`.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::F32, Self::F16, Self::Bf16].into_iter().find(|codec| codec.name() == name)
    }

    /// Bytes of one head's column of `dim` values.
    pub fn bytes(self, dim: usize) -> usize {
        self.raw().bytes() * dim
    }

    /// Encodes one head's column; `out` is `self.bytes(values.len())` long.
    pub fn encode(self, values: &[f32], out: &mut [u8]) {
        for (value, out) in values.iter().zip(out.chunks_exact_mut(self.raw().bytes())) {
            match self {
                Self::F32 => out.copy_from_slice(&value.to_le_bytes()),
                Self::F16 => out.copy_from_slice(&f16::from_f32(*value).to_le_bytes()),
                Self::Bf16 => out.copy_from_slice(&bf16::from_f32(*value).to_le_bytes()),
            }
        }
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
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trips_what_the_element_type_can_hold() {
        let values = [0.0, -1.5, 0.25, 65504.0, -0.0078125];
        for codec in [Codec::F32, Codec::F16] {
            let mut bytes = vec![0; codec.bytes(values.len())];
            codec.encode(&values, &mut bytes);
            let mut back = [1.0; 5];
            codec.decode(&bytes, &mut back);
            assert_eq!(back, values);
        }
        let mut bytes = [0; 2];
        Codec::Bf16.encode(&[1.0 + 1.0 / 256.0], &mut bytes);
        let mut back = [0.0];
        Codec::Bf16.decode(&bytes, &mut back);
        assert_eq!(back, [1.0], "a tie rounds to even");
        assert_eq!(Codec::from_name("bf16"), Some(Codec::Bf16));
        assert_eq!(Codec::from_name("k8v4"), None);
    }
}
