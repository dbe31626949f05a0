//! Matrix products with bf16 weights on AMX tiles.
//!
//! A value of an activation is split into [`PARTS`] values of bf16 that add up to it exactly: eight bits of its mantissa each. Every product with a weight is then exact, and sums
//! are f32, as elsewhere; 32 inputs at a time, of which all parts of one are added after all of another. After `RUN` steps a sum starts afresh, and the sums are added up
//! in order. A row's sums follow from its place in no tile, so its bits depend on no other row.
//!
//! ```text
//! weights   [panel of 16 outputs][step of 32 inputs][pair of inputs][output][2]
//! rows      [block of 16][step][part][row][32]
//! ```

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};

use kvern_base::{AllocError, Buffer, bf16};
use kvern_weights::Tensor as Weight;

use crate::KernelSet;
use crate::isa::amx::{Amx, FEW, PARTS, SIDE, TILE};
use crate::isa::{Isa, Kernel, LANES};
use crate::matmul::{Product, Share, write};
use crate::pack::{Body, Linear};
use crate::pool::{Disjoint, Pool};
use crate::tensor::Matrix;

/// Inputs of a step.
const STEP: usize = 32;
/// Steps of one sum.
const RUN: usize = 32;

/// Steps that cover so many inputs.
pub fn steps(inputs: usize) -> usize {
    inputs.div_ceil(STEP)
}

/// The smallest magnitudes, zero aside, that weights and parts of activations have: their products, and sums of these, are then no subnormal numbers, which tiles take for zero.
const SMALLEST: f32 = 1.0 / (1u64 << 50) as f32;

/// Packs a weight's rows into tiles, if no value is so small that a product with it would be lost.
pub fn pack(pool: &Pool, weight: &Weight) -> Result<Option<Buffer>, AllocError> {
    let (outputs, inputs) = (weight.rows(), weight.cols());
    let panel = steps(inputs) * TILE / size_of::<bf16>();
    let panels = outputs.div_ceil(LANES);
    let mut data = Buffer::of::<bf16>(panels * panel)?;
    let parts = Disjoint::new(data.view_mut::<bf16>());
    let too_small = AtomicBool::new(false);
    pool.each(panels, |index| {
        // SAFETY: panels are disjoint.
        let out = unsafe { parts.part(index * panel..(index + 1) * panel) };
        let mut row = vec![0.0; inputs];
        for lane in 0..LANES.min(outputs - index * LANES) {
            weight.decode_row(index * LANES + lane, &mut row);
            for (input, &x) in row.iter().enumerate() {
                out[place(input, lane)] = bf16::from_f32(x);
            }
            if row.iter().any(|x| *x != 0.0 && x.abs() < SMALLEST) {
                too_small.store(true, Ordering::Relaxed);
            }
        }
    });
    Ok(Some(data).filter(|_| !too_small.into_inner()))
}

/// Where an input's weight of one output lies in its panel.
fn place(input: usize, lane: usize) -> usize {
    (input / 2 * LANES + lane) * 2 + input % 2
}

/// Decodes one row of packed weights.
pub fn row(data: &Buffer, output: usize, out: &mut [f32]) {
    let panel = steps(out.len()) * TILE / size_of::<bf16>();
    let panel = &data.view::<bf16>()[output / LANES * panel..][..panel];
    out.iter_mut().enumerate().for_each(|(input, out)| *out = panel[place(input, output % LANES)].to_f32());
}

/// Rows split into parts, as large as the largest product so far.
#[derive(Debug)]
pub struct Split {
    data: Buffer,
    /// First block of each share; of few rows there is a block for each, in which parts are f32.
    first: Vec<usize>,
    steps: usize,
}

impl Split {
    /// Room for no row.
    ///
    /// # Errors
    /// Never in practice: [`AllocError`] for an empty buffer.
    pub fn empty() -> Result<Self, AllocError> {
        Ok(Self { data: Buffer::zeroed(0)?, first: Vec::new(), steps: 0 })
    }

    /// Splits the rows of each share, whose blocks have no other share's rows.
    ///
    /// # Errors
    /// [`AllocError`] when there is no memory for them.
    pub fn fill(&mut self, set: KernelSet, pool: &Pool, x: Matrix<'_>, shares: &[Share<'_>]) -> Result<(), AllocError> {
        self.steps = steps(x.width());
        self.first.clear();
        let mut blocks = Vec::new();
        for share in shares {
            self.first.push(blocks.len());
            let size = if share.rows(x) > FEW { LANES } else { 1 };
            blocks.extend((0..share.rows(x)).step_by(size).map(|row| (share, row)));
        }
        let block = self.steps * PARTS * TILE;
        if blocks.len() * block > self.data.len() {
            self.data = Buffer::zeroed(blocks.len() * block)?;
        }
        let parts = Disjoint::new(&mut self.data.bytes_mut()[..blocks.len() * block]);
        pool.run(blocks.len(), 1, |range| {
            for index in range {
                let (share, first) = blocks[index];
                // SAFETY: blocks are disjoint.
                let out = unsafe { parts.part(index * block..(index + 1) * block) };
                if share.rows(x) <= FEW {
                    let out = &mut bytemuck::cast_slice_mut(out)[..self.steps];
                    set.run(Widen { x: x.row(share.input(first)), out });
                    continue;
                }
                let out = bytemuck::cast_slice_mut(out);
                // What is in a block's other rows shows in no result that is kept.
                for row in 0..LANES.min(share.rows(x) - first) {
                    set.run(SplitRow { x: x.row(share.input(first + row)), row, out });
                }
            }
        });
        Ok(())
    }

    /// A block of a share.
    fn block(&self, share: usize, index: usize) -> &[u8] {
        let block = self.steps * PARTS * TILE;
        &self.data.bytes()[(self.first[share] + index) * block..][..block]
    }
}

/// Takes the next part of each value: its first eight bits.
#[inline(always)]
fn take(values: &mut [f32; STEP]) -> [f32; STEP] {
    let mut part = [0.0; STEP];
    for (part, value) in part.iter_mut().zip(values) {
        let high = f32::from_bits(value.to_bits() & 0xFFFF_0000);
        // What is infinite or no number stays what it is.
        *part = if high.abs() < SMALLEST { 0.0 } else { high };
        *value -= high;
    }
    part
}

/// Splits one row, in f32.
struct Widen<'a> {
    x: &'a [f32],
    out: &'a mut [[[f32; STEP]; PARTS]],
}

impl Kernel for Widen<'_> {
    #[inline(always)]
    fn run<S: Isa>(self, _isa: S) {
        for (x, parts) in self.x.chunks(STEP).zip(self.out) {
            let mut values = [0.0f32; STEP];
            values[..x.len()].copy_from_slice(x);
            for part in parts {
                *part = take(&mut values);
            }
        }
    }
}

/// Splits one row into its place in each tile of a block; zeros past its end.
struct SplitRow<'a> {
    x: &'a [f32],
    row: usize,
    out: &'a mut [u16],
}

impl Kernel for SplitRow<'_> {
    #[inline(always)]
    fn run<S: Isa>(self, _isa: S) {
        let tile = TILE / 2;
        for (x, tiles) in self.x.chunks(STEP).zip(self.out.chunks_exact_mut(PARTS * tile)) {
            let mut values = [0.0f32; STEP];
            values[..x.len()].copy_from_slice(x);
            for part in 0..PARTS {
                let out = &mut tiles[part * tile + self.row * STEP..][..STEP];
                for (out, value) in out.iter_mut().zip(take(&mut values)) {
                    *out = (value.to_bits() >> 16) as u16;
                }
            }
        }
    }
}

/// Panels of an item: so many share a block of rows while it is in the cache.
const GROUP: usize = 16;

/// Computes those products of one input whose weights are tiles, in one parallel region; `split` holds the input by the products' shares.
pub fn products(set: KernelSet, amx: Amx, pool: &Pool, (x, split): (Matrix<'_>, &Split), products: &[Product<'_>]) {
    let panels: usize = products.iter().map(|product| product.weight.panels() * product.shares.len()).sum();
    let group = (panels / (4 * pool.threads())).next_multiple_of(2).clamp(2, GROUP);
    let mut items = Vec::new();
    for product in products {
        for share in 0..product.shares.len() {
            items.extend((0..product.weight.panels()).step_by(group).map(|panel| (product, share, panel)));
        }
    }
    pool.run(items.len(), 1, |range| {
        for &(product, share, first) in &items[range] {
            let end = product.weight.panels().min(first + group);
            let panels = Panels { amx, product, x, split, share, first, end };
            if product.shares[share].rows(x) > FEW {
                amx.begin();
                set.run(panels);
                amx.end();
            } else {
                set.run(FewRows(panels));
            }
        }
    });
}

/// Some panels × all rows of a share.
struct Panels<'a> {
    amx: Amx,
    product: &'a Product<'a>,
    x: Matrix<'a>,
    split: &'a Split,
    share: usize,
    /// The panels, of the share's matrix.
    first: usize,
    end: usize,
}

thread_local! {
    /// Sums of two blocks and two panels, for each pair of an item's panels.
    static SUMS: RefCell<Vec<[[f32; 256]; 4]>> = const { RefCell::new(Vec::new()) };
}

impl<'a> Panels<'a> {
    /// The tiles of panel `panel`, or of the last one there is.
    #[inline(always)]
    fn stored(&self, panel: usize) -> &'a [[u8; TILE]] {
        let weight = self.product.weight;
        let Body::Tiles(data) = &weight.body else { return &[] };
        let matrix = self.product.shares[self.share].matrix;
        let at = matrix * weight.panels() + panel.min(self.end - 1);
        &data.bytes().as_chunks().0[at * self.split.steps..][..self.split.steps]
    }

    /// Stores the sums of a row and a panel.
    #[inline(always)]
    fn keep<S: Isa>(&self, isa: S, row: usize, panel: usize, sums: &[f32; LANES]) {
        let (weight, share) = (self.product.weight, self.product.shares[self.share]);
        let value = match &weight.bias {
            Some(bias) => {
                isa.add(isa.load(sums), isa.load(&bias.as_chunks().0[share.matrix * weight.panels() + panel]))
            }
            None => isa.load(sums),
        };
        let output = panel * LANES;
        let start = share.output(row) * weight.outputs + output;
        // SAFETY: items of a region are disjoint in panels or in rows of the output.
        let out = unsafe { self.product.out.part(start..start + LANES.min(weight.outputs - output)) };
        write(isa, value, self.product.store, out);
    }
}

impl Kernel for Panels<'_> {
    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let (rows, steps) = (self.product.shares[self.share].rows(self.x), self.split.steps);
        let blocks = rows.div_ceil(LANES);
        let mut all = SUMS.take();
        all.resize(GROUP / 2, [[0.0; 256]; 4]);
        let mut run = [[0.0f32; 256]; 4];
        for block in (0..blocks).step_by(2) {
            let last = (block + 1).min(blocks - 1);
            let a = [self.split.block(self.share, block), self.split.block(self.share, last)];
            for start in (0..steps).step_by(RUN) {
                let count = RUN.min(steps - start);
                for (pair, panel) in (self.first..self.end).step_by(2).enumerate() {
                    let a = [a[0][start * PARTS * TILE..].as_ptr(), a[1][start * PARTS * TILE..].as_ptr()];
                    let b = [self.stored(panel)[start..].as_ptr(), self.stored(panel + 1)[start..].as_ptr()];
                    let into = if start == 0 { &mut all[pair] } else { &mut run };
                    // SAFETY: the region has set up the tiles; blocks and panels have all steps.
                    unsafe { self.amx.multiply(a, b.map(<*const _>::cast), count, into) };
                    if start > 0 {
                        for (sum, run) in all[pair].as_flattened_mut().iter_mut().zip(run.as_flattened()) {
                            *sum += run;
                        }
                    }
                }
            }
            for (pair, panel) in (self.first..self.end).step_by(2).enumerate() {
                for r in 0..=last - block {
                    for p in 0..2.min(self.end - panel) {
                        let sums = all[pair][2 * r + p].as_chunks().0;
                        let first = (block + r) * LANES;
                        for (row, sums) in sums.iter().enumerate().take(rows - first) {
                            self.keep(isa, first + row, panel + p, sums);
                        }
                    }
                }
            }
        }
        SUMS.set(all);
    }
}

/// The same for up to [`FEW`] rows.
struct FewRows<'a>(Panels<'a>);

impl Kernel for FewRows<'_> {
    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let panels = self.0;
        let (rows, steps) = (panels.product.shares[panels.share].rows(panels.x), panels.split.steps);
        for panel in (panels.first..panels.end).step_by(SIDE) {
            let b = [panels.stored(panel), panels.stored(panel + 1)];
            for row in 0..rows {
                let a = &bytemuck::cast_slice(panels.split.block(panels.share, row))[..steps];
                let mut sums = [[0.0f32; LANES]; SIDE];
                for start in (0..steps).step_by(RUN) {
                    let range = start..steps.min(start + RUN);
                    let mut run = [[0.0f32; LANES]; SIDE];
                    panels.amx.multiply_row(&a[range.clone()], [&b[0][range.clone()], &b[1][range]], &mut run);
                    for (sum, run) in sums.as_flattened_mut().iter_mut().zip(run.as_flattened()) {
                        *sum = if start == 0 { *run } else { *sum + run };
                    }
                }
                for (p, sums) in sums.iter().enumerate().take(panels.end - panel) {
                    panels.keep(isa, row, panel + p, sums);
                }
            }
        }
    }
}

/// Whether a weight's products run on tiles.
pub fn has(weight: &Linear) -> bool {
    matches!(weight.body, Body::Tiles(_))
}
