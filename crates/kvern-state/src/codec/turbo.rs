//! `turbo`: levels that are best for a normal distribution, for a rotated head (TurboQuant, arXiv 2504.19874, the variant for squared error).
//!
//! A rotated head's values are nearly normal with the head's own deviation. Each goes to the nearest level of the Lloyd-Max codebook of N(0, 1)
//! (Lloyd 1982, Max 1960) times that deviation; the scale that is stored is then the one that fits these levels best.
//!
//! **Levels are integers** of up to 127, times a step: attention multiplies them as bytes. The step is the one that costs the least. Against levels of
//! any value this adds to the squared error 0.002 % at 3 bits, 0.05 % at 4, 0.6 % at 5 and 2.8 % at 6; at 8 bits levels are evenly spaced.

use std::sync::LazyLock;

use kvern_base::f16;

use super::{MIDDLE, Scale};

/// Levels of a number of bits.
pub struct Codebook {
    /// Levels plus [`MIDDLE`], ascending.
    pub levels: Vec<u8>,
    /// What a level is multiplied with, for N(0, 1).
    pub step: f64,
    /// The code whose level is nearest to `x`, at `floor(2 x) + 256` for `x` in levels.
    nearest: [u8; 512],
}

/// The codebook of 2, 3, 4, 5, 6 or 8 bits.
pub fn codebook(bits: u32) -> &'static Codebook {
    static BOOKS: [LazyLock<Codebook>; 6] = [
        LazyLock::new(|| Codebook::new(2)),
        LazyLock::new(|| Codebook::new(3)),
        LazyLock::new(|| Codebook::new(4)),
        LazyLock::new(|| Codebook::new(5)),
        LazyLock::new(|| Codebook::new(6)),
        LazyLock::new(|| Codebook::new(8)),
    ];
    &BOOKS[if bits == 8 { 5 } else { bits as usize - 2 }]
}

impl Codebook {
    fn new(bits: u32) -> Self {
        let (levels, step): (Vec<i32>, f64) = if bits == 8 {
            // The step of the least error, of tens of thousandths.
            let steps = (200..400).map(|i| f64::from(i) * 1e-4);
            let even = |step: f64| (error((-128..128).map(|i| f64::from(i) * step)), step);
            let (_, step) = steps.map(even).min_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or((0.0, 0.0307));
            ((-128..128).collect(), step)
        } else {
            rounded(&lloyd_max(1 << bits))
        };
        let mut nearest = [0; 512];
        let mut code = 0;
        for (at, nearest) in nearest.iter_mut().enumerate() {
            // Borders between levels are halves, so a value in `at .. at + 1` of halves has one nearest level.
            while code + 1 < levels.len() && levels[code] + levels[code + 1] <= at as i32 - 256 {
                code += 1;
            }
            *nearest = code as u8;
        }
        Self { levels: levels.iter().map(|level| (level + MIDDLE) as u8).collect(), step, nearest }
    }
}

/// Levels as multiples of a step, all different, at the step of the least error.
fn rounded(levels: &[f64]) -> (Vec<i32>, f64) {
    let largest = levels[levels.len() - 1];
    let candidates = (0..2000).map(|i| largest / 127.0 * (1.0 + f64::from(i) * 1e-3));
    let rounded = |step: f64| levels.iter().map(|x| (x / step).round() as i32).collect::<Vec<_>>();
    let different = candidates.filter(|&step| rounded(step).windows(2).all(|pair| pair[0] < pair[1]));
    let cost = |step: f64| error(rounded(step).into_iter().map(|level| f64::from(level) * step));
    let best = different.map(|step| (cost(step), step)).min_by(|a, b| a.0.total_cmp(&b.0));
    let step = best.map_or(largest / 127.0, |(_, step)| step);
    (rounded(step), step)
}

/// The Lloyd-Max levels of N(0, 1): each the mean of what is nearest to it, found by repetition from the levels of a compander.
fn lloyd_max(count: usize) -> Vec<f64> {
    // Levels are symmetric; the upper half is enough. The density of levels goes with the cube root of that of values: N(0, 3).
    let half = count / 2;
    let mut levels: Vec<f64> =
        (0..half).map(|i| 3f64.sqrt() * quantile(0.5 + (i as f64 + 0.5) / count as f64)).collect();
    for _ in 0..10_000 {
        let border = |i: usize| if i == 0 { 0.0 } else { f64::midpoint(levels[i - 1], levels[i]) };
        let mean = |i: usize| {
            let (from, to) = (border(i), if i + 1 < half { border(i + 1) } else { f64::INFINITY });
            (density(from) - density(to)) / (above(from) - above(to))
        };
        let next: Vec<f64> = (0..half).map(mean).collect();
        let moved = next.iter().zip(&levels).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        levels = next;
        if moved < 1e-10 {
            break;
        }
    }
    levels.iter().rev().map(|x| -x).chain(levels.iter().copied()).collect()
}

/// The mean squared error of N(0, 1) to the nearest of ascending levels.
fn error(levels: impl Iterator<Item = f64>) -> f64 {
    let levels: Vec<f64> = levels.collect();
    let mut sum = 0.0;
    for (i, &level) in levels.iter().enumerate() {
        let from = if i == 0 { f64::NEG_INFINITY } else { f64::midpoint(levels[i - 1], level) };
        let to = levels.get(i + 1).map_or(f64::INFINITY, |next| f64::midpoint(level, *next));
        // The integral of (x - level)² from `x` to infinity.
        let rest = |x: f64| {
            let edge = if x.is_finite() { (x - 2.0 * level) * density(x) } else { 0.0 };
            (1.0 + level * level) * above(x) + edge
        };
        sum += rest(from) - rest(to);
    }
    sum
}

fn density(x: f64) -> f64 {
    (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt()
}

/// The probability of values above `x`: Marsaglia's series (2004) near zero, and a continued fraction beyond.
fn above(x: f64) -> f64 {
    if x < 0.0 {
        return 1.0 - above(-x);
    }
    if x < 3.0 {
        let (mut term, mut sum, mut n) = (x, x, 1.0);
        while term > 1e-18 * sum {
            n += 2.0;
            term *= x * x / n;
            sum += term;
        }
        return 0.5 - sum * density(x);
    }
    if !x.is_finite() {
        return 0.0;
    }
    let tail = (1..=100).rev().fold(0.0, |tail, n| f64::from(n) / (x + tail));
    density(x) / (x + tail)
}

/// The value above which `1 - p` lies, for `p` from a half to one: by bisection.
fn quantile(p: f64) -> f64 {
    let (mut low, mut high) = (0.0, 10.0);
    for _ in 0..60 {
        let middle = f64::midpoint(low, high);
        if 1.0 - above(middle) < p { low = middle } else { high = middle }
    }
    low
}

/// Codes of one group, whose values are finite and in the range of `f16`, and its scale.
pub fn quantize(bits: u32, values: &[f32], codes: &mut [u8]) -> Scale {
    let book = codebook(bits);
    let squares: f32 = values.iter().map(|x| x * x).sum();
    let deviation = (squares / values.len() as f32).sqrt();
    let unit = deviation * book.step as f32;
    // Twice a value in levels; of what is too small for that, nothing.
    let inverse = if unit > 0.0 && (2.0 / unit).is_finite() { 2.0 / unit } else { 0.0 };
    let (mut length, mut product) = (0i32, 0.0);
    for (code, &x) in codes.iter_mut().zip(values) {
        *code = book.nearest[((x * inverse).floor().clamp(-256.0, 255.0) + 256.0) as usize];
        let level = i32::from(book.levels[usize::from(*code)]) - MIDDLE;
        length += level * level;
        product += x * level as f32;
    }
    // The length of what is decoded becomes that of the values (Turbo's norm correction).
    let length = length.max(1) as f32;
    let scale = if std::env::var("KEEP_NORM").is_ok() { (squares / length).sqrt() } else { product / length };
    Scale { scale: f16::from_f32(scale), zero: f16::ZERO }
}
