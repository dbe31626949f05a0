//! The rotation that spreads a head's outliers over all its values: fixed signs, then an orthonormal Walsh-Hadamard transform.
//!
//! `rotate(x) = H D x`, with `D` diagonal, its signs the highest bits of SplitMix64 (Steele, Lea and Flood 2014) seeded with the index. `H` is its
//! own inverse, so `rotate_back(y) = D H y`. Scores are products, which a rotation of both sides keeps: a query is rotated once for all keys. Outputs
//! are sums of values, and are rotated back once. A head whose size is no power of two is rotated in blocks of the largest power of two that
//! divides it.
//!
//! The order of every sum is that of the fast transform, so all machines store the same bytes.

use std::sync::LazyLock;

/// Signs of the first values; later ones repeat them.
static SIGNS: LazyLock<[f32; 1024]> = LazyLock::new(|| std::array::from_fn(|index| sign(index as u64)));

fn sign(index: u64) -> f32 {
    let mut z = index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    if (z ^ (z >> 31)) >> 63 == 0 { 1.0 } else { -1.0 }
}

/// Values that are mixed with each other, in a head of `dim`.
pub fn block(dim: usize) -> usize {
    1 << dim.trailing_zeros()
}

fn transform(x: &mut [f32]) {
    let mut half = 1;
    while half < x.len() {
        for pair in x.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
    let factor = 1.0 / (x.len() as f32).sqrt();
    x.iter_mut().for_each(|x| *x *= factor);
}

fn flip(x: &mut [f32]) {
    for x in x.chunks_mut(SIGNS.len()) {
        x.iter_mut().zip(SIGNS.iter()).for_each(|(x, sign)| *x *= sign);
    }
}

/// Rotates one head's values in place.
pub fn rotate(x: &mut [f32]) {
    flip(x);
    x.chunks_exact_mut(block(x.len())).for_each(transform);
}

/// Undoes [`rotate`], up to rounding.
pub fn rotate_back(x: &mut [f32]) {
    x.chunks_exact_mut(block(x.len())).for_each(transform);
    flip(x);
}
