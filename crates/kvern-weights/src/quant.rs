//! The GGML block formats, all read as affine groups.
//!
//! A block holds a fixed number of elements of one row with its scales. Every format here is an instance of
//! `w = scale * (code - zero) + bias` per group of elements, so kernels and decoders know one form, not nine.
//! Byte layouts are those that the `gguf` Python package documents by its code; tests compare with that writer bit for bit.

use kvern_base::f16;

/// The affine form of a quantized tensor: `w = scale * (code - zero) + bias` for each group of `group` elements of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Affine {
    /// Bits of a code, 2 to 8.
    pub bits: u32,
    /// Elements that share a scale.
    pub group: usize,
    /// The code that stands for zero in a symmetric format, else 0.
    pub zero: i32,
    /// Whether groups have a bias.
    pub biased: bool,
}

/// A GGML block format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the format's own")]
pub enum BlockFormat {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
    Mxfp4,
}

impl BlockFormat {
    /// The name that GGUF tools print.
    pub fn name(self) -> &'static str {
        match self {
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
            Self::Mxfp4 => "MXFP4",
        }
    }

    /// Elements of one block.
    pub fn block(self) -> usize {
        match self {
            Self::Q4K | Self::Q5K | Self::Q6K => 256,
            _ => 32,
        }
    }

    /// Bytes of one block.
    pub fn bytes(self) -> usize {
        match self {
            Self::Q4_0 => 2 + 16,
            Self::Q4_1 => 4 + 16,
            Self::Q5_0 => 2 + 4 + 16,
            Self::Q5_1 => 4 + 4 + 16,
            Self::Q8_0 => 2 + 32,
            Self::Q4K => 4 + 12 + 128,
            Self::Q5K => 4 + 12 + 32 + 128,
            Self::Q6K => 128 + 64 + 16 + 2,
            Self::Mxfp4 => 1 + 16,
        }
    }

    /// The affine form of the format.
    pub fn affine(self) -> Affine {
        let (bits, group, zero, biased) = match self {
            Self::Q4_0 => (4, 32, 8, false),
            Self::Q4_1 => (4, 32, 0, true),
            Self::Q5_0 => (5, 32, 16, false),
            Self::Q5_1 => (5, 32, 0, true),
            Self::Q8_0 => (8, 32, 128, false),
            Self::Q4K => (4, 32, 0, true),
            Self::Q5K => (5, 32, 0, true),
            Self::Q6K => (6, 16, 32, false),
            // Twice the values of FP4 are the integers in -12..=12 that `fp4` gives.
            Self::Mxfp4 => (5, 32, 12, false),
        };
        Affine { bits, group, zero, biased }
    }

    /// Splits a row of whole blocks into codes, scales and biases; see [`Affine`].
    pub(crate) fn decode(self, row: &[u8], codes: &mut [u8], scales: &mut [f32], biases: &mut [f32]) {
        let groups = self.block() / self.affine().group;
        for (index, block) in row.chunks_exact(self.bytes()).enumerate() {
            let codes = &mut codes[index * self.block()..][..self.block()];
            let scales = &mut scales[index * groups..][..groups];
            let biases = &mut biases[index * groups..][..groups];
            match self {
                Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 => self.small(block, codes, scales, biases),
                Self::Q8_0 => {
                    scales[0] = half(block, 0);
                    for (code, &byte) in codes.iter_mut().zip(&block[2..]) {
                        *code = byte ^ 0x80;
                    }
                }
                Self::Q4K => k_affine(block, &[], &block[16..], codes, scales, biases),
                Self::Q5K => k_affine(block, &block[16..48], &block[48..], codes, scales, biases),
                Self::Q6K => k_six(block, codes, scales),
                Self::Mxfp4 => {
                    scales[0] = half_power(block[0]);
                    for (i, &byte) in block[1..].iter().enumerate() {
                        (codes[i], codes[i + 16]) = (fp4(byte & 15), fp4(byte >> 4));
                    }
                }
            }
        }
    }

    /// 32 elements: scale, optional bias, optional word of fifth bits, 16 bytes of nibbles (low nibbles first).
    fn small(self, block: &[u8], codes: &mut [u8], scales: &mut [f32], biases: &mut [f32]) {
        let affine = self.affine();
        scales[0] = half(block, 0);
        let mut at = 2;
        if affine.biased {
            biases[0] = half(block, 2);
            at = 4;
        }
        let mut fifth = 0u32;
        if affine.bits == 5 {
            fifth = u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
            at += 4;
        }
        for (i, &byte) in block[at..at + 16].iter().enumerate() {
            codes[i] = byte & 15 | ((fifth >> i & 1) as u8) << 4;
            codes[i + 16] = byte >> 4 | ((fifth >> (i + 16) & 1) as u8) << 4;
        }
    }
}

/// Twice the value of an FP4 code (OCP Microscaling Formats 1.0: a sign, two bits of exponent, one of mantissa), counted from -12.
pub(crate) fn fp4(code: u8) -> u8 {
    const TWICE: [u8; 8] = [0, 1, 2, 3, 4, 6, 8, 12];
    let twice = TWICE[usize::from(code & 7)];
    if code & 8 == 0 { 12 + twice } else { 12 - twice }
}

/// Half of the power of two that an E8M0 exponent stands for: `2^(exponent - 128)`, and NaN for 255.
pub(crate) fn half_power(exponent: u8) -> f32 {
    match exponent {
        255 => f32::NAN,
        // Subnormal.
        0 | 1 => f32::from_bits(1 << (21 + exponent)),
        _ => f32::from_bits(u32::from(exponent - 1) << 23),
    }
}

fn half(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// 256 elements in 8 groups of 32: `d`, `dmin`, 12 bytes of 6-bit scales and minima, fifth bits (if any), nibbles.
fn k_affine(block: &[u8], fifth: &[u8], nibbles: &[u8], codes: &mut [u8], scales: &mut [f32], biases: &mut [f32]) {
    let (d, dmin, packed) = (half(block, 0), half(block, 2), &block[4..16]);
    for group in 0..8 {
        let (scale, min) = if group < 4 {
            (packed[group] & 63, packed[group + 4] & 63)
        } else {
            let (low, high) = (packed[group + 4], group - 4);
            (low & 15 | (packed[high] >> 6) << 4, low >> 4 | (packed[high + 4] >> 6) << 4)
        };
        scales[group] = d * f32::from(scale);
        biases[group] = -(dmin * f32::from(min));
        // Two groups share 32 bytes: the even one has the low nibbles, the odd one the high nibbles.
        for i in 0..32 {
            let byte = nibbles[group / 2 * 32 + i];
            let low = if group % 2 == 0 { byte & 15 } else { byte >> 4 };
            let high = fifth.get(i).map_or(0, |bits| bits >> group & 1);
            codes[group * 32 + i] = low | high << 4;
        }
    }
}

/// 256 elements in 16 groups of 16: low nibbles, upper bit pairs, signed 8-bit scales, `d`.
fn k_six(block: &[u8], codes: &mut [u8], scales: &mut [f32]) {
    let (low, high, packed, d) = (&block[..128], &block[128..192], &block[192..208], half(block, 208));
    for (scale, &byte) in scales.iter_mut().zip(packed) {
        *scale = d * f32::from(byte as i8);
    }
    for (i, code) in codes.iter_mut().enumerate() {
        // Each half of 128 elements has 64 bytes of nibbles and 32 bytes of bit pairs, read in four runs of 32.
        let (part, run, lane) = (i / 128, i % 128 / 32, i % 32);
        let nibble = low[part * 64 + run % 2 * 32 + lane] >> (run / 2 * 4) & 15;
        let pair = high[part * 32 + lane] >> (run * 2) & 3;
        *code = nibble | pair << 4;
    }
}
