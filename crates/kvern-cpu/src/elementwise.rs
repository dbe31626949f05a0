//! Row-by-row verbs: normalization, rotation, gating, capping.

use std::cell::RefCell;

use kvern_backend::Activation;

use crate::isa::{Isa, Kernel, LANES};
use crate::matmul::Store;
use crate::pool::{Disjoint, Pool};
use crate::{KernelSet, Tensor};

/// Values below which a second thread costs more than it saves.
const PARALLEL: usize = 1 << 14;

/// Runs `run(row, values of the row)` for every row of `out`.
pub fn rows(pool: &Pool, out: &mut Tensor, run: impl Fn(usize, &mut [f32]) + Sync) {
    let (rows, width) = (out.rows(), out.width());
    let grain = if rows * width < PARALLEL { rows } else { rows.div_ceil(pool.threads() * 4) };
    let parts = Disjoint::new(out.values_mut());
    pool.run(rows, grain, |range| {
        for row in range {
            // SAFETY: rows are disjoint.
            run(row, unsafe { parts.part(row * width..(row + 1) * width) });
        }
    });
}

/// `acc += x / sqrt(mean(x²) + eps) * weight` over runs of `weight.len()`.
pub fn rms_norm_add(set: KernelSet, pool: &Pool, x: &Tensor, weight: &[f32], eps: f32, acc: &mut Tensor) {
    rows(pool, acc, |row, acc| {
        NORMALIZED.with_borrow_mut(|normalized| {
            normalized.clear();
            normalized.extend_from_slice(x.row(row));
            set.run(Normalize { out: normalized, weight, eps });
            acc.iter_mut().zip(normalized.iter()).for_each(|(acc, x)| *acc += x);
        });
    });
}

thread_local! {
    /// A row between its normalization and its addition. Grows to what a model needs and stays.
    static NORMALIZED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// `out = x / sqrt(mean(x²) + eps) * weight` over runs of `weight.len()`; in place when `x` is none.
pub fn rms_norm(set: KernelSet, pool: &Pool, x: Option<&Tensor>, weight: &[f32], eps: f32, out: &mut Tensor) {
    rows(pool, out, |row, out| {
        if let Some(x) = x {
            out.copy_from_slice(x.row(row));
        }
        set.run(Normalize { out, weight, eps });
    });
}

struct Normalize<'a> {
    out: &'a mut [f32],
    weight: &'a [f32],
    eps: f32,
}

impl Kernel for Normalize<'_> {
    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        for run in self.out.chunks_exact_mut(self.weight.len()) {
            let (chunks, rest) = run.as_chunks::<LANES>();
            let mut squares = isa.splat(0.0);
            for chunk in chunks {
                let x = isa.load(chunk);
                squares = isa.fma(x, x, squares);
            }
            let sum = isa.sum(squares) + rest.iter().map(|x| x * x).sum::<f32>();
            let factor = 1.0 / (sum / self.weight.len() as f32 + self.eps).sqrt();
            let (chunks, rest) = run.as_chunks_mut::<LANES>();
            let (weights, rest_weights) = self.weight.as_chunks::<LANES>();
            let splat = isa.splat(factor);
            for (chunk, weight) in chunks.iter_mut().zip(weights) {
                isa.store(isa.mul(isa.mul(isa.load(chunk), splat), isa.load(weight)), chunk);
            }
            for (x, weight) in rest.iter_mut().zip(rest_weights) {
                *x = *x * factor * weight;
            }
        }
    }
}

/// `x = (x - mean) / sqrt(variance + eps) * weight + bias` over each row: few values, one row for each token.
pub fn layer_norm(pool: &Pool, x: &mut Tensor, weight: &[f32], bias: &[f32], eps: f32) {
    rows(pool, x, |_, x| {
        let width = x.len() as f64;
        let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / width;
        let variance = x.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / width;
        let factor = 1.0 / (variance + f64::from(eps)).sqrt();
        for ((x, &weight), &bias) in x.iter_mut().zip(weight).zip(bias) {
            *x = ((f64::from(*x) - mean) * factor * f64::from(weight) + f64::from(bias)) as f32;
        }
    });
}

/// `acc[t] = Σ_j weight of pick j * x[t * k + j]`, or `+=`.
pub fn combine(set: KernelSet, pool: &Pool, x: &Tensor, picks: &Tensor, store: Store, acc: &mut Tensor) {
    let count = picks.width() / 2;
    rows(pool, acc, |row, acc| {
        if store == Store::Set {
            acc.fill(0.0);
        }
        for (j, &weight) in picks.row(row)[count..].iter().enumerate() {
            set.run(AddScaled { x: x.row(row * count + j), weight, acc });
        }
    });
}

/// `acc += weight * x`.
struct AddScaled<'a> {
    x: &'a [f32],
    weight: f32,
    acc: &'a mut [f32],
}

impl Kernel for AddScaled<'_> {
    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let (chunks, rest) = self.acc.as_chunks_mut::<LANES>();
        let (x, x_rest) = self.x.as_chunks::<LANES>();
        let weight = isa.splat(self.weight);
        for (acc, x) in chunks.iter_mut().zip(x) {
            isa.store(isa.fma(isa.load(x), weight, isa.load(acc)), acc);
        }
        rest.iter_mut().zip(x_rest).for_each(|(acc, x)| *acc += self.weight * x);
    }
}

/// Rotates pairs `(i, i + n)` of every run of `head_dim` values by the row's `n` angles.
pub fn rope(set: KernelSet, pool: &Pool, x: &mut Tensor, angles: &Tensor, head_dim: usize) {
    rows(pool, x, |row, out| set.run(Rotate { out, angles: angles.row(row), head_dim }));
}

struct Rotate<'a> {
    out: &'a mut [f32],
    angles: &'a [f32],
    head_dim: usize,
}

impl Kernel for Rotate<'_> {
    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let pairs = self.angles.len() / 2;
        let (cos, sin) = self.angles.split_at(pairs);
        let ((cos, cos_rest), (sin, sin_rest)) = (cos.as_chunks::<LANES>(), sin.as_chunks::<LANES>());
        let minus = isa.splat(-1.0);
        for head in self.out.chunks_exact_mut(self.head_dim) {
            let (low, high) = head[..2 * pairs].split_at_mut(pairs);
            let ((low, low_rest), (high, high_rest)) = (low.as_chunks_mut::<LANES>(), high.as_chunks_mut::<LANES>());
            for i in 0..cos.len() {
                let (a, b, c, s) = (isa.load(&low[i]), isa.load(&high[i]), isa.load(&cos[i]), isa.load(&sin[i]));
                isa.store(isa.fma(a, c, isa.mul(isa.mul(b, s), minus)), &mut low[i]);
                isa.store(isa.fma(b, c, isa.mul(a, s)), &mut high[i]);
            }
            for i in 0..cos_rest.len() {
                let (a, b) = (low_rest[i], high_rest[i]);
                low_rest[i] = a * cos_rest[i] - b * sin_rest[i];
                high_rest[i] = b * cos_rest[i] + a * sin_rest[i];
            }
        }
    }
}

/// `x = activation(x)`, times `by` where there is one.
pub fn activate(set: KernelSet, pool: &Pool, activation: Activation, x: &mut Tensor, by: Option<&Tensor>) {
    rows(pool, x, |row, x| {
        let by = by.map(|by| by.row(row));
        match activation {
            Activation::Silu => set.run(Map { x, by, function: Silu }),
            Activation::Sigmoid => set.run(Map { x, by, function: Sigmoid }),
            Activation::GeluTanh => set.run(Map { x, by, function: GeluTanh }),
        }
    });
}

/// `gate = g * sigmoid(alpha g) * (u + 1)` with `g = min(gate, limit)` and `u` within the limit.
pub fn gate_clamped(set: KernelSet, pool: &Pool, (alpha, limit): (f32, f32), gate: &mut Tensor, up: &Tensor) {
    rows(pool, gate, |row, gate| set.run(GateClamped { gate, up: up.row(row), alpha, limit }));
}

/// `x = cap * tanh(x / cap)`.
pub fn softcap(set: KernelSet, pool: &Pool, cap: f32, x: &mut Tensor) {
    rows(pool, x, |_, x| set.run(Map { x, by: None, function: Softcap(cap) }));
}

/// `x = exp(-rate * log(1 + e^(x + bias)))` per channel. There is one for each head: few enough for the library's functions.
pub fn decay(pool: &Pool, rate: &[f32], bias: &[f32], x: &mut Tensor) {
    rows(pool, x, |_, x| {
        for ((x, rate), bias) in x.iter_mut().zip(rate).zip(bias) {
            let shifted = f64::from(*x) + f64::from(*bias);
            // Past 30, the sum under the logarithm is its second term.
            let softplus = if shifted > 30.0 { shifted } else { shifted.exp().ln_1p() };
            *x = (-f64::from(*rate) * softplus).exp() as f32;
        }
    });
}

/// A function of a value.
trait Function: Copy {
    fn lanes<S: Isa>(self, isa: S, x: S::F) -> S::F;
}

#[derive(Clone, Copy)]
struct Silu;

#[derive(Clone, Copy)]
struct Sigmoid;

#[derive(Clone, Copy)]
struct GeluTanh;

#[derive(Clone, Copy)]
struct Softcap(f32);

#[inline(always)]
fn one_plus_exp_minus<S: Isa>(isa: S, x: S::F) -> S::F {
    isa.add(isa.splat(1.0), isa.exp(isa.mul(x, isa.splat(-1.0))))
}

impl Function for Silu {
    #[inline(always)]
    fn lanes<S: Isa>(self, isa: S, x: S::F) -> S::F {
        isa.div(x, one_plus_exp_minus(isa, x))
    }
}

impl Function for Sigmoid {
    #[inline(always)]
    fn lanes<S: Isa>(self, isa: S, x: S::F) -> S::F {
        isa.div(isa.splat(1.0), one_plus_exp_minus(isa, x))
    }
}

impl Function for GeluTanh {
    #[inline(always)]
    fn lanes<S: Isa>(self, isa: S, x: S::F) -> S::F {
        let cube = isa.mul(isa.mul(x, x), x);
        let inner = isa.mul(isa.fma(cube, isa.splat(0.044715), x), isa.splat(0.797_884_6));
        let half = isa.mul(x, isa.splat(0.5));
        isa.fma(half, isa.tanh(inner), half)
    }
}

impl Function for Softcap {
    #[inline(always)]
    fn lanes<S: Isa>(self, isa: S, x: S::F) -> S::F {
        isa.mul(isa.tanh(isa.mul(x, isa.splat(1.0 / self.0))), isa.splat(self.0))
    }
}

struct GateClamped<'a> {
    gate: &'a mut [f32],
    up: &'a [f32],
    alpha: f32,
    limit: f32,
}

impl Kernel for GateClamped<'_> {
    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let (limit, one) = (isa.splat(self.limit), isa.splat(1.0));
        for (gate, up) in self.gate.chunks_mut(LANES).zip(self.up.chunks(LANES)) {
            let (mut g, mut u) = ([0.0; LANES], [0.0; LANES]);
            g[..gate.len()].copy_from_slice(gate);
            u[..up.len()].copy_from_slice(up);
            let x = isa.min(limit, isa.load(&g));
            let up = isa.add(isa.max(isa.splat(-self.limit), isa.min(limit, isa.load(&u))), one);
            let swish = isa.div(x, isa.add(one, isa.exp(isa.mul(x, isa.splat(-self.alpha)))));
            isa.store(isa.mul(swish, up), &mut g);
            gate.copy_from_slice(&g[..gate.len()]);
        }
    }
}

/// `x = function(x)`, times `by` where there is one.
struct Map<'a, F> {
    x: &'a mut [f32],
    by: Option<&'a [f32]>,
    function: F,
}

impl<F: Function> Kernel for Map<'_, F> {
    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let (chunks, rest) = self.x.as_chunks_mut::<LANES>();
        let (by, by_rest) = self.by.map(|by| by.as_chunks::<LANES>()).unzip();
        for (i, x) in chunks.iter_mut().enumerate() {
            let value = self.function.lanes(isa, isa.load(x));
            isa.store(by.map_or(value, |by| isa.mul(value, isa.load(&by[i]))), x);
        }
        let mut out = [0.0; LANES];
        out[..rest.len()].copy_from_slice(rest);
        let value = self.function.lanes(isa, isa.load(&out));
        isa.store(value, &mut out);
        for (i, x) in rest.iter_mut().enumerate() {
            *x = by_rest.map_or(out[i], |by| out[i] * by[i]);
        }
    }
}
