//! Activations as 16-bit integers in two planes of bytes, for integer dot products with quantized weights.
//!
//! A row is cut into groups of [`GROUP`] values; a group's scale is its largest magnitude over [`MAX`], and `q = round(x / scale)`, ties
//! to even. A code is kept as `q = 256 * high + low` in two signed bytes, because byte dot products are what CPUs have. A group of zeros
//! has scale 0 and codes 0.
//!
//! **Why 16 bits.** Transformers' activations have outlier channels, and eight bits over 32 values lose what stands beside one:
//! measured on SmolLM2 Q4_1, eight bits cost a mean divergence of 3.8e-3 from `f32`, as much as a bit of weight precision.

use kvern_base::{AllocError, Buffer};

use crate::KernelSet;
use crate::isa::{Isa, Kernel, LANES};
use crate::pool::{Disjoint, Pool};
use crate::tensor::Matrix;

/// Values that share an activation scale.
pub const GROUP: usize = 32;
/// The largest code; its high byte is 127.
pub const MAX: f32 = 32512.0;
/// High bytes, then low bytes, of 16 consecutive codes, in steps of four inputs.
pub type Planes = [[[i8; 4]; 4]; 2];

/// Quantized rows, as large as the largest tensor that was announced.
#[derive(Debug)]
pub struct Quantized {
    width: usize,
    codes: Buffer,
    scales: Buffer,
    sums: Buffer,
    weighted: Buffer,
}

/// One quantized row of `K` values.
#[derive(Debug, Clone, Copy)]
pub struct Row<'a> {
    /// `K / 16` blocks of codes.
    pub codes: &'a [Planes],
    /// `K / 32` scales.
    pub scales: &'a [f32],
    /// `K / 16` sums of codes.
    pub sums: &'a [i32],
    /// `K / 32` products of scale and sum of codes.
    pub weighted: &'a [f32],
}

impl Quantized {
    /// Room for no row.
    ///
    /// # Errors
    /// Never in practice: [`AllocError`] for empty buffers.
    pub fn empty() -> Result<Self, AllocError> {
        let none = || Buffer::zeroed(0);
        Ok(Self { width: 0, codes: none()?, scales: none()?, sums: none()?, weighted: none()? })
    }

    /// Makes room for `rows` rows of `width` values.
    ///
    /// # Errors
    /// [`AllocError`] when there is no memory for them.
    pub fn reserve(&mut self, rows: usize, width: usize) -> Result<(), AllocError> {
        let values = rows.saturating_mul(width.next_multiple_of(GROUP));
        if 2 * values > self.codes.len() {
            self.codes = Buffer::of::<Planes>(values / LANES)?;
            self.scales = Buffer::of::<f32>(values / GROUP)?;
            self.sums = Buffer::of::<i32>(values / LANES)?;
            self.weighted = Buffer::of::<f32>(values / GROUP)?;
        }
        Ok(())
    }

    /// Quantizes rows whose width is a multiple of [`GROUP`].
    pub fn fill(&mut self, set: KernelSet, pool: &Pool, x: Matrix<'_>) {
        self.width = x.width();
        let (rows, groups) = (x.rows(), self.width / GROUP);
        let codes = Disjoint::new(&mut self.codes.view_mut::<Planes>()[..2 * rows * groups]);
        let scales = Disjoint::new(&mut self.scales.view_mut::<f32>()[..rows * groups]);
        let sums = Disjoint::new(&mut self.sums.view_mut::<i32>()[..2 * rows * groups]);
        let weighted = Disjoint::new(&mut self.weighted.view_mut::<f32>()[..rows * groups]);
        pool.run(rows, 8, |range| {
            for row in range {
                let by_group = row * groups..(row + 1) * groups;
                // SAFETY: rows are disjoint.
                let (codes, scales, sums, weighted) = unsafe {
                    let by_block = 2 * by_group.start..2 * by_group.end;
                    let (codes, sums) = (codes.part(by_block.clone()), sums.part(by_block));
                    (codes, scales.part(by_group.clone()), sums, weighted.part(by_group))
                };
                set.run(QuantizeRow { x: x.row(row), codes, scales, sums, weighted });
            }
        });
    }

    /// The rows that [`Self::fill`] wrote last.
    pub fn rows(&self) -> Rows<'_> {
        Rows {
            groups: self.width / GROUP,
            codes: self.codes.view(),
            scales: self.scales.view(),
            sums: self.sums.view(),
            weighted: self.weighted.view(),
        }
    }
}

/// Quantized rows, as slices: what a kernel takes its rows from.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    /// Groups of a row.
    groups: usize,
    codes: &'a [Planes],
    scales: &'a [f32],
    sums: &'a [i32],
    weighted: &'a [f32],
}

impl<'a> Rows<'a> {
    /// One row.
    #[inline(always)]
    pub fn row(&self, row: usize) -> Row<'a> {
        let groups = self.groups;
        Row {
            codes: &self.codes[row * 2 * groups..][..2 * groups],
            scales: &self.scales[row * groups..][..groups],
            sums: &self.sums[row * 2 * groups..][..2 * groups],
            weighted: &self.weighted[row * groups..][..groups],
        }
    }
}

struct QuantizeRow<'a> {
    x: &'a [f32],
    codes: &'a mut [Planes],
    scales: &'a mut [f32],
    sums: &'a mut [i32],
    weighted: &'a mut [f32],
}

impl Kernel for QuantizeRow<'_> {
    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let x = self.x.as_chunks().0;
        for (group, (x, codes)) in x.chunks_exact(2).zip(self.codes.chunks_exact_mut(2)).enumerate() {
            let (a, b) = (isa.load(&x[0]), isa.load(&x[1]));
            let largest = isa.max_lane(isa.max(isa.abs(a), isa.abs(b)));
            let (inverse, scale) = scale(largest);
            let inverse = isa.splat(inverse);
            // Sixteen codes of up to 2^15 add up exactly in f32.
            let [first, second] = [(a, 0), (b, 1)].map(|(x, block)| {
                let [high, low] = split(isa, isa.mul(x, inverse), &mut codes[block]);
                isa.sum(isa.fma(high, isa.splat(256.0), low)) as i32
            });
            self.sums[2 * group] = first;
            self.sums[2 * group + 1] = second;
            self.scales[group] = scale;
            self.weighted[group] = scale * (first + second) as f32;
        }
    }
}

/// What values of a largest magnitude are multiplied with to become codes, and codes to become values.
#[inline(always)]
pub fn scale(largest: f32) -> (f32, f32) {
    let inverse = if largest > 0.0 { MAX / largest } else { 0.0 };
    // For the smallest numbers, the inverse overflows; such values count as zero.
    if inverse.is_finite() { (inverse, largest / MAX) } else { (0.0, 0.0) }
}

/// Rounds 16 values to codes and splits these into their planes, which it also gives.
#[inline(always)]
pub fn split<S: Isa>(isa: S, x: S::F, planes: &mut Planes) -> [S::F; 2] {
    let code = isa.round(x);
    // Rounds up at a half, so that the low byte lies in -128..=127.
    let high = isa.floor(isa.fma(code, isa.splat(1.0 / 256.0), isa.splat(0.5)));
    let low = isa.fma(high, isa.splat(-256.0), code);
    let [highs, lows] = planes;
    isa.store_i8(high, bytemuck::must_cast_mut(highs));
    isa.store_i8(low, bytemuck::must_cast_mut(lows));
    [high, low]
}
