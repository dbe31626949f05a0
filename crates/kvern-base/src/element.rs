//! The raw floating-point element types of weights and state.

use bytemuck::Pod;
use half::{bf16, f16};

/// A raw element type, named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Raw {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of an IEEE single.
    Bf16,
}

impl Raw {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// The name users write: `f32`, `f16`, `bf16`.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}

impl std::fmt::Display for Raw {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A raw element as a Rust type; conversion from `f32` rounds to nearest, ties to even.
pub trait Element: Pod + Send + Sync {
    /// The type's name as a value.
    const RAW: Raw;
    /// The nearest element.
    fn from_f32(value: f32) -> Self;
    /// The exact value.
    fn to_f32(self) -> f32;
}

impl Element for f32 {
    const RAW: Raw = Raw::F32;
    fn from_f32(value: f32) -> Self {
        value
    }
    fn to_f32(self) -> f32 {
        self
    }
}

impl Element for f16 {
    const RAW: Raw = Raw::F16;
    fn from_f32(value: f32) -> Self {
        f16::from_f32(value)
    }
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
}

impl Element for bf16 {
    const RAW: Raw = Raw::Bf16;
    fn from_f32(value: f32) -> Self {
        bf16::from_f32(value)
    }
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
}
