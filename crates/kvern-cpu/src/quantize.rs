//! Activations as signed bytes, for integer dot products with quantized weights.
//!
//! A row is cut into groups of [`GROUP`] values; a group's scale is its largest magnitude over 127, and codes round to nearest, ties
//! to even. A group of zeros has scale 0 and codes 0.

use kvern_base::{AllocError, Buffer};

use crate::isa::{Isa, Kernel, LANES};
use crate::pool::{Disjoint, Pool};
use crate::{KernelSet, Tensor};

/// Values that share an activation scale.
pub const GROUP: usize = 32;

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
    /// `K` codes.
    pub codes: &'a [i8],
    /// `K / 32` scales.
    pub scales: &'a [f32],
    /// `K / 16` sums of codes.
    pub sums: &'a [i32],
    /// `K / 32` products of scale and sum of codes.
    pub weighted: &'a [f32],
}

impl Quantized {
    /// Room for no row.
    pub fn empty() -> Result<Self, AllocError> {
        let none = || Buffer::zeroed(0);
        Ok(Self { width: 0, codes: none()?, scales: none()?, sums: none()?, weighted: none()? })
    }

    /// Makes room for `rows` rows of `width` values.
    pub fn reserve(&mut self, rows: usize, width: usize) -> Result<(), AllocError> {
        let values = rows.saturating_mul(width.next_multiple_of(GROUP));
        if values > self.codes.len() {
            self.codes = Buffer::of::<i8>(values)?;
            self.scales = Buffer::of::<f32>(values / GROUP)?;
            self.sums = Buffer::of::<i32>(values / LANES)?;
            self.weighted = Buffer::of::<f32>(values / GROUP)?;
        }
        Ok(())
    }

    /// Quantizes a tensor whose width is a multiple of [`GROUP`].
    pub fn fill(&mut self, set: KernelSet, pool: &Pool, x: &Tensor) {
        self.width = x.width();
        let (rows, groups) = (x.rows(), self.width / GROUP);
        let codes = Disjoint::new(&mut self.codes.as_mut::<i8>()[..rows * self.width]);
        let scales = Disjoint::new(&mut self.scales.as_mut::<f32>()[..rows * groups]);
        let sums = Disjoint::new(&mut self.sums.as_mut::<i32>()[..2 * rows * groups]);
        let weighted = Disjoint::new(&mut self.weighted.as_mut::<f32>()[..rows * groups]);
        let width = self.width;
        pool.run(rows, 8, |range| {
            for row in range {
                let by_group = row * groups..(row + 1) * groups;
                // SAFETY: rows are disjoint.
                let (codes, scales, sums, weighted) = unsafe {
                    let codes = codes.part(row * width..(row + 1) * width);
                    let sums = sums.part(2 * by_group.start..2 * by_group.end);
                    (codes, scales.part(by_group.clone()), sums, weighted.part(by_group))
                };
                set.run(QuantizeRow { x: x.row(row), codes, scales, sums, weighted });
            }
        });
    }

    /// One row.
    pub fn row(&self, row: usize) -> Row<'_> {
        let groups = self.width / GROUP;
        Row {
            codes: &self.codes.as_ref::<i8>()[row * self.width..][..self.width],
            scales: &self.scales.as_ref::<f32>()[row * groups..][..groups],
            sums: &self.sums.as_ref::<i32>()[row * 2 * groups..][..2 * groups],
            weighted: &self.weighted.as_ref::<f32>()[row * groups..][..groups],
        }
    }
}

struct QuantizeRow<'a> {
    x: &'a [f32],
    codes: &'a mut [i8],
    scales: &'a mut [f32],
    sums: &'a mut [i32],
    weighted: &'a mut [f32],
}

impl Kernel for QuantizeRow<'_> {
    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let (x, codes) = (self.x.as_chunks().0, self.codes.as_chunks_mut().0);
        for (group, (x, codes)) in x.chunks_exact(2).zip(codes.chunks_exact_mut(2)).enumerate() {
            let (a, b) = (isa.load(&x[0]), isa.load(&x[1]));
            let largest = isa.max_lane(isa.max(isa.abs(a), isa.abs(b)));
            let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
            // Just above the smallest normal number, 127 / largest overflows; such a group counts as zero.
            let inverse = if inverse.is_finite() { isa.splat(inverse) } else { isa.splat(0.0) };
            isa.store_i8(isa.mul(a, inverse), &mut codes[0]);
            isa.store_i8(isa.mul(b, inverse), &mut codes[1]);
            let sum = |codes: &[i8; LANES]| codes.iter().map(|&code| i32::from(code)).sum::<i32>();
            let (low, high) = (sum(&codes[0]), sum(&codes[1]));
            let scale = largest / 127.0;
            self.sums[2 * group] = low;
            self.sums[2 * group + 1] = high;
            self.scales[group] = scale;
            self.weighted[group] = scale * (low + high) as f32;
        }
    }
}
