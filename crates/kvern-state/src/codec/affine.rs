//! `q8` and `q4`: evenly spaced levels from a group's least value to its largest.
//!
//! ```text
//! zero = min, rounded down to f16      scale = (max - zero) / (2^bits - 1), rounded up to f16      code = round((x - zero) / scale)
//! ```
//!
//! Because codes are found with the scale and zero as they are stored, every value is within half a scale of its own. A group of one value
//! that `f16` holds has scale 0 and is exact.

use kvern_base::f16;

use super::Scale;

/// Values that share a scale, along the head.
pub const GROUP: usize = 32;

/// A code is its own level.
pub fn levels(bits: u32) -> &'static [u8] {
    const LEVELS: [u8; 256] = {
        let mut levels = [0; 256];
        let mut i = 0;
        while i < 256 {
            levels[i] = i as u8;
            i += 1;
        }
        levels
    };
    &LEVELS[..1 << bits]
}

/// The largest `f16` that is not above `x`, which lies in the range of `f16`.
fn down(x: f32) -> f16 {
    let y = f16::from_f32(x);
    if y.to_f32() <= x {
        return y;
    }
    let bits = y.to_bits();
    // Below zero is a larger magnitude; below the positive zero, the smallest negative number.
    f16::from_bits(match bits {
        0 => 0x8001,
        _ if bits & 0x8000 != 0 => bits + 1,
        _ => bits - 1,
    })
}

/// Codes of one group, whose values are finite and in the range of `f16`, and its scale.
pub fn quantize(bits: u32, values: &[f32], codes: &mut [u8]) -> Scale {
    let (mut least, mut largest) = (f32::INFINITY, f32::NEG_INFINITY);
    for &x in values {
        (least, largest) = (least.min(x), largest.max(x));
    }
    let most = ((1u32 << bits) - 1) as f32;
    let zero = down(least);
    let scale = f16::from_f32(-down(-((largest - zero.to_f32()) / most)).to_f32());
    let (offset, step) = (zero.to_f32(), scale.to_f32());
    let inverse = if step > 0.0 { 1.0 / step } else { 0.0 };
    for (code, &x) in codes.iter_mut().zip(values) {
        *code = ((x - offset) * inverse + 0.5).min(most) as u8;
    }
    Scale { scale, zero }
}
