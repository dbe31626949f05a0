//! MLX affine quantization: codes in one little-endian bit stream per row, scales and biases beside them.
//!
//! Element `k` of a row occupies bits `k * bits .. (k + 1) * bits` of its row's words, least significant bit first, running on
//! across word borders for 3, 5 and 6 bits. Width and group size are inferred from shapes, since per-module overrides make the
//! checkpoint's global setting unreliable.

use std::ops::Range;
use std::sync::Arc;

use kvern_base::Raw;

use crate::mapping::Mapping;
use crate::quant::Affine;
use crate::tensor::decode_raw;

/// Where the scales and biases of an MLX tensor lie, and its affine form.
#[derive(Debug, Clone)]
pub struct MlxParts {
    pub(crate) affine: Affine,
    pub(crate) scales: Floats,
    pub(crate) biases: Floats,
}

/// A side tensor of one element per group.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    pub(crate) mapping: Arc<Mapping>,
    pub(crate) range: Range<usize>,
}

impl Part {
    /// The bytes of a row, each of which has `stride` of them.
    pub(crate) fn bytes(&self, row: usize, stride: usize) -> &[u8] {
        &self.mapping.bytes()[self.range.clone()][row * stride..(row + 1) * stride]
    }
}

/// A side tensor of raw elements.
#[derive(Debug, Clone)]
pub(crate) struct Floats {
    pub(crate) part: Part,
    pub(crate) raw: Raw,
}

impl Floats {
    fn row(&self, row: usize, out: &mut [f32]) {
        decode_raw(self.raw, self.part.bytes(row, out.len() * self.raw.bytes()), out);
    }
}

impl MlxParts {
    pub(crate) fn decode(&self, stream: &[u8], row: usize, codes: &mut [u8], scales: &mut [f32], biases: &mut [f32]) {
        self.scales.row(row, scales);
        self.biases.row(row, biases);
        let bits = self.affine.bits as usize;
        for (k, code) in codes.iter_mut().enumerate() {
            let (byte, shift) = (k * bits / 8, k * bits % 8);
            let word = u16::from(stream[byte]) | u16::from(stream.get(byte + 1).copied().unwrap_or(0)) << 8;
            *code = (word >> shift & ((1 << bits) - 1)) as u8;
        }
    }
}
