//! Matrix products with bf16 weights on AMX tiles.
//!
//! A value of an activation is split into [`PARTS`] values of bf16 that add up to it exactly: eight bits of its mantissa each. Every product with a weight is then exact, and sums
//! are f32, as elsewhere; 32 inputs at a time, of which all parts of one are added after all of another. After [`RUN`] steps a sum starts afresh, and the sums are added up
//! in order. A row's sums follow from its place in no tile, so its bits depend on no other row.
//!
//! ```text
//! weights   [panel of 16 outputs][step of 32 inputs][pair of inputs][output][2]
//! rows      [block of 16][step][part][row][32]
//! ```

use kvern_base::{AllocError, Buffer, bf16};
use kvern_weights::Tensor as Weight;

use crate::KernelSet;
use crate::isa::amx::{Amx, PARTS, TILE};
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

/// Packs a weight's rows into tiles.
pub fn pack(pool: &Pool, weight: &Weight) -> Result<Buffer, AllocError> {
    let (outputs, inputs) = (weight.rows(), weight.cols());
    let panel = steps(inputs) * TILE / size_of::<bf16>();
    let panels = outputs.div_ceil(LANES);
    let mut data = Buffer::of::<bf16>(panels * panel)?;
    let parts = Disjoint::new(data.view_mut::<bf16>());
    pool.each(panels, |index| {
        // SAFETY: panels are disjoint.
        let out = unsafe { parts.part(index * panel..(index + 1) * panel) };
        let mut row = vec![0.0; inputs];
        for lane in 0..LANES.min(outputs - index * LANES) {
            weight.decode_row(index * LANES + lane, &mut row);
            for (input, &x) in row.iter().enumerate() {
                out[place(input, lane)] = bf16::from_f32(x);
            }
        }
    });
    Ok(data)
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
    /// First block of each share.
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
            blocks.extend((0..share.rows(x)).step_by(LANES).map(|row| (share, row)));
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
        for (step, tiles) in self.out.chunks_exact_mut(PARTS * tile).enumerate() {
            let mut values = [0.0f32; STEP];
            let x = &self.x[(step * STEP).min(self.x.len())..(step * STEP + STEP).min(self.x.len())];
            values[..x.len()].copy_from_slice(x);
            for part in 0..PARTS {
                let out = &mut tiles[part * tile + self.row * STEP..][..STEP];
                for (value, out) in values.iter_mut().zip(out) {
                    let high = value.to_bits() & 0xFFFF_0000;
                    *out = (high >> 16) as u16;
                    *value -= f32::from_bits(high);
                }
            }
        }
    }
}

/// Computes those products of one input whose weights are tiles, in one parallel region; `split` holds the input by the products' shares.
pub fn products(set: KernelSet, amx: Amx, pool: &Pool, (x, split): (Matrix<'_>, &Split), products: &[Product<'_>]) {
    let mut items = Vec::new();
    for product in products {
        for share in 0..product.shares.len() {
            items.extend((0..product.weight.panels()).step_by(2).map(|panel| (product, share, panel)));
        }
    }
    pool.run(items.len(), items.len().div_ceil(pool.threads() * 6), |range| {
        let (mut shape, mut sums) = (0, [[[0.0; 256]; 4]; 2]);
        for &(product, share, panel) in &items[range] {
            let rows = product.shares[share].rows(x).clamp(1, LANES);
            if rows != shape {
                amx.begin(rows);
                shape = rows;
            }
            set.run(Panels { amx, product, x, split, share, panel, sums: &mut sums });
        }
        amx.end();
    });
}

/// Two panels × all rows of a share.
struct Panels<'a> {
    amx: Amx,
    product: &'a Product<'a>,
    x: Matrix<'a>,
    split: &'a Split,
    share: usize,
    panel: usize,
    /// Of all runs, and of one.
    sums: &'a mut [[[f32; 256]; 4]; 2],
}

impl Kernel for Panels<'_> {
    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let Self { amx, product, x, split, share: index, panel, sums: [sums, run] } = self;
        let (weight, share) = (product.weight, product.shares[index]);
        let Body::Tiles(data) = &weight.body else { return };
        let (rows, each) = (share.rows(x), weight.panels());
        let bytes = split.steps * TILE;
        let panels = 2.min(each - panel);
        let stored = |p: usize| {
            let at = share.matrix * each + panel + p.min(panels - 1);
            &data.bytes()[at * bytes..][..bytes]
        };
        let (first, second) = (stored(0), stored(1));
        for block in (0..rows.div_ceil(LANES)).step_by(2) {
            let blocks = 2.min(rows.div_ceil(LANES) - block);
            let a = [split.block(index, block), split.block(index, block + blocks - 1)];
            for start in (0..split.steps).step_by(RUN) {
                let count = RUN.min(split.steps - start);
                let into = if start == 0 { &mut *sums } else { &mut *run };
                let (a_at, b_at) = (start * PARTS * TILE, start * TILE);
                let a = [a[0][a_at..].as_ptr(), a[1][a_at..].as_ptr()];
                let b = [first[b_at..].as_ptr(), second[b_at..].as_ptr()];
                // SAFETY: the region has set up the tiles; blocks and panels have all steps.
                unsafe { amx.multiply(a, b, count, into) };
                if start > 0 {
                    for (sum, run) in sums.iter_mut().flatten().zip(run.iter().flatten()) {
                        *sum += run;
                    }
                }
            }
            for r in 0..blocks {
                let left = rows - (block + r) * LANES;
                for (p, row) in (0..panels).flat_map(|p| (0..LANES.min(left)).map(move |row| (p, row))) {
                    let output = (panel + p) * LANES;
                    let value = isa.load(&sums[2 * r + p].as_chunks().0[row]);
                    let value = match &weight.bias {
                        Some(bias) => isa.add(value, isa.load(&bias.as_chunks().0[share.matrix * each + panel + p])),
                        None => value,
                    };
                    let start = share.output((block + r) * LANES + row) * weight.outputs + output;
                    let end = start + LANES.min(weight.outputs - output);
                    // SAFETY: items of a region are disjoint in panels or in rows of the output.
                    let out = unsafe { product.out.part(start..end) };
                    write(isa, value, product.store, out);
                }
            }
        }
    }
}

/// Whether a weight's products run on tiles.
pub fn has(weight: &Linear) -> bool {
    matches!(weight.body, Body::Tiles(_))
}
