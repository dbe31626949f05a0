//! Matrix products of activations with packed weights.
//!
//! A tile is `R` rows × `P` panels of 16 outputs, with every accumulator in a register. Inputs are walked in ascending order, so an
//! output's rounding is the same in a tile of one row and of six:
//! - raw weights: one fused multiply-add per input, in runs of 32 inputs whose sums are added up in order;
//! - codes: integer dot products are exact within a group (high bytes of the activations first, then, after a shift, low bytes); each
//!   group then adds `scale_w * scale_x * dot`, and `bias_w * Σx`.
//!
//! Threads split panels, never a sum.
//!
//! A product with a stack of matrices is a product for each [`Share`] of the rows: a row's tile is the same whichever rows share its matrix.

#![allow(
    clippy::needless_range_loop,
    reason = "tiles are indexed by constants; iterators would not keep them in registers"
)]

use kvern_base::{Raw, bf16, f16};

use crate::isa::{Isa, Kernel, LANES, Lane};
use crate::pack::{Body, Codes, Linear, UNIT};
use crate::pool::{Disjoint, Pool};
use crate::quantize::{GROUP, Planes, Quantized, Rows};
use crate::tensor::Matrix;
use crate::{KernelSet, Tensor};

/// What to do with a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Store {
    /// `out = product`.
    Set,
    /// `out += product`.
    Add,
}

/// A row of the input, and the row of the output that it becomes.
#[derive(Debug, Clone, Copy)]
pub struct Pair {
    /// The input's.
    pub input: u32,
    /// The output's.
    pub output: u32,
}

/// Rows that one matrix of a stack is multiplied with.
#[derive(Debug, Clone, Copy)]
pub struct Share<'a> {
    /// The matrix.
    pub matrix: usize,
    /// The rows; all of them, in order, when absent.
    pairs: Option<&'a [Pair]>,
}

impl<'a> Share<'a> {
    /// All rows, for what is no stack.
    pub const WHOLE: Share<'static> = Share { matrix: 0, pairs: None };

    /// Some rows by the matrix of this number.
    pub fn new(matrix: usize, pairs: &'a [Pair]) -> Self {
        Self { matrix, pairs: Some(pairs) }
    }

    /// Number of the rows, of which `x` has some.
    pub fn rows(&self, x: Matrix<'_>) -> usize {
        self.pairs.map_or(x.rows(), <[Pair]>::len)
    }

    /// Row of the input.
    #[inline(always)]
    pub fn input(&self, row: usize) -> usize {
        self.pairs.map_or(row, |pairs| pairs[row].input as usize)
    }

    /// Row of the output.
    #[inline(always)]
    pub fn output(&self, row: usize) -> usize {
        self.pairs.map_or(row, |pairs| pairs[row].output as usize)
    }
}

/// One product of a region.
pub struct Product<'a> {
    /// The weight.
    pub weight: &'a Linear,
    /// Which rows are multiplied with which of its matrices.
    pub shares: &'a [Share<'a>],
    /// What to do with the product.
    pub store: Store,
    /// The output's values.
    pub out: Disjoint<'a, f32>,
    /// Panels walked side by side.
    panels: usize,
}

impl<'a> Product<'a> {
    /// `out` (or `out +=`) the products of shares of the rows, no row of the output being in two of them.
    pub fn new(weight: &'a Linear, shares: &'a [Share<'a>], out: &'a mut Tensor, store: Store) -> Self {
        // With few rows the weights are what is read: more panels at once keep more of them in flight.
        let panels = if out.rows() < 4 * shares.len() { 4 } else { 2 };
        Self { weight, shares, store, out: Disjoint::new(out.values_mut()), panels }
    }

    /// Blocks of one share.
    fn blocks(&self) -> usize {
        self.weight.panels().div_ceil(self.panels)
    }
}

/// Computes products of one input in one parallel region; `quantized` holds `x` if any weight has codes.
pub fn products(set: KernelSet, pool: &Pool, x: Matrix<'_>, quantized: &Quantized, products: &[Product<'_>]) {
    let blocks: usize = products.iter().map(|product| product.shares.len() * product.blocks()).sum();
    let grain = blocks.div_ceil(pool.threads() * 6);
    pool.run(blocks, grain, |range| {
        let mut first = 0;
        for product in products {
            for &share in product.shares {
                let (start, end) = (range.start.max(first), range.end.min(first + product.blocks()));
                for block in start..end.max(start) {
                    let panel = share.matrix * product.weight.panels() + (block - first) * product.panels;
                    set.run(Block { product, share, x, quantized, panel });
                }
                first += product.blocks();
            }
        }
    });
}

/// Up to `product.panels` panels × all rows of a share.
struct Block<'a> {
    product: &'a Product<'a>,
    share: Share<'a>,
    x: Matrix<'a>,
    quantized: &'a Quantized,
    panel: usize,
}

impl Kernel for Block<'_> {
    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let (weight, share) = (self.product.weight, self.share);
        match &weight.body {
            Body::Raw(Raw::F32, data) => self.rows(isa, &RawPanels { data: data.view::<f32>(), x: self.x, share }),
            Body::Raw(Raw::F16, data) => self.rows(isa, &RawPanels { data: data.view::<f16>(), x: self.x, share }),
            Body::Raw(Raw::Bf16, data) => self.rows(isa, &RawPanels { data: data.view::<bf16>(), x: self.x, share }),
            // Those have products of their own.
            Body::Tiles(_) => {}
            Body::Codes(codes) => {
                let x = self.quantized.rows();
                match (codes.affine.bits, codes.affine.group) {
                    (2, _) => self.rows(isa, &CodePanels::<2, 32, 2> { codes, x, share }),
                    (3, _) => self.rows(isa, &CodePanels::<3, 48, 2> { codes, x, share }),
                    (4, _) => self.rows(isa, &CodePanels::<4, 64, 2> { codes, x, share }),
                    (5, _) => self.rows(isa, &CodePanels::<5, 80, 2> { codes, x, share }),
                    (6, 16) => self.rows(isa, &CodePanels::<6, 96, 1> { codes, x, share }),
                    (6, _) => self.rows(isa, &CodePanels::<6, 96, 2> { codes, x, share }),
                    _ => self.rows(isa, &CodePanels::<8, 128, 2> { codes, x, share }),
                }
            }
        }
    }
}

/// A tile's inner loop over one kind of panel.
trait Panels {
    fn tile<S: Isa, const R: usize, const P: usize>(
        &self,
        isa: S,
        inputs: usize,
        row: usize,
        panel: usize,
    ) -> [[S::F; P]; R];
}

impl Block<'_> {
    #[inline(always)]
    fn rows<S: Isa>(&self, isa: S, panels: &impl Panels) {
        let each = self.product.weight.panels();
        let (left, rows) = ((self.share.matrix + 1) * each - self.panel, self.share.rows(self.x));
        if self.product.panels == 4 && left >= 4 {
            for row in 0..rows {
                self.tile::<S, 1, 4>(isa, panels, self.panel, row);
            }
            return;
        }
        let mut panel = self.panel;
        let end = panel + left.min(self.product.panels);
        while panel < end {
            let wide = end - panel >= 2;
            let mut row = 0;
            // A macro, not a closure: a closure would be compiled without the instruction set.
            macro_rules! tiles {
                ($r:literal, $p:literal) => {
                    while rows - row >= $r {
                        self.tile::<S, $r, $p>(isa, panels, panel, row);
                        row += $r;
                    }
                };
            }
            if wide {
                if S::WIDE {
                    tiles!(6, 2);
                }
                tiles!(2, 2);
                tiles!(1, 2);
            } else {
                tiles!(2, 1);
                tiles!(1, 1);
            }
            panel += if wide { 2 } else { 1 };
        }
    }

    /// One tile: computed and stored.
    #[inline(always)]
    fn tile<S: Isa, const R: usize, const P: usize>(&self, isa: S, panels: &impl Panels, panel: usize, row: usize) {
        let weight = self.product.weight;
        let tile = panels.tile::<S, R, P>(isa, weight.inputs, row, panel);
        for (r, lanes) in tile.iter().enumerate() {
            for (p, &value) in lanes.iter().enumerate() {
                let output = (panel + p - self.share.matrix * weight.panels()) * LANES;
                let value = match &weight.bias {
                    Some(bias) => isa.add(value, isa.load(&bias.as_chunks().0[panel + p])),
                    None => value,
                };
                let start = self.share.output(row + r) * weight.outputs + output;
                let end = start + LANES.min(weight.outputs - output);
                // SAFETY: blocks of a region are disjoint in panels or in rows of the output, and tiles of a block in rows.
                let out = unsafe { self.product.out.part(start..end) };
                write(isa, value, self.product.store, out);
            }
        }
    }
}

/// Stores the lanes that there are outputs for, or adds them.
#[inline(always)]
pub fn write<S: Isa>(isa: S, value: S::F, store: Store, out: &mut [f32]) {
    if let Some(out) = out.first_chunk_mut::<LANES>() {
        let value = if store == Store::Add { isa.add(isa.load(out), value) } else { value };
        isa.store(value, out);
    } else {
        let mut lanes = [0.0; LANES];
        isa.store(value, &mut lanes);
        for (out, lane) in out.iter_mut().zip(lanes) {
            *out = if store == Store::Add { *out + lane } else { lane };
        }
    }
}

struct RawPanels<'a, E> {
    data: &'a [E],
    x: Matrix<'a>,
    share: Share<'a>,
}

impl<E: Lane> Panels for RawPanels<'_, E> {
    #[inline(always)]
    fn tile<S: Isa, const R: usize, const P: usize>(
        &self,
        isa: S,
        inputs: usize,
        row: usize,
        panel: usize,
    ) -> [[S::F; P]; R] {
        const CHUNK: usize = 8;
        // Chunks that are summed on their own: an error then grows with 32 terms and with the number of runs, not with all inputs.
        const RUN: usize = 4;
        let all = self.data.as_chunks::<LANES>().0;
        let mut weights: [&[[E; LANES]]; P] = [&[]; P];
        for p in 0..P {
            weights[p] = &all[(panel + p) * inputs..][..inputs];
        }
        let mut rows: [&[f32]; R] = [&[]; R];
        for r in 0..R {
            rows[r] = self.x.row(self.share.input(row + r));
        }
        let mut total = [[isa.splat(0.0); P]; R];
        let whole = inputs / CHUNK;
        for run in (0..whole).step_by(RUN) {
            let mut acc = [[isa.splat(0.0); P]; R];
            for chunk in run..whole.min(run + RUN) {
                let mut w: [&[[E; LANES]; CHUNK]; P] = [&weights[0].as_chunks().0[chunk]; P];
                for p in 1..P {
                    w[p] = &weights[p].as_chunks().0[chunk];
                }
                let mut x: [&[f32; CHUNK]; R] = [&rows[0].as_chunks().0[chunk]; R];
                for r in 1..R {
                    x[r] = &rows[r].as_chunks().0[chunk];
                }
                for k in 0..CHUNK {
                    for p in 0..P {
                        let w = E::load(isa, &w[p][k]);
                        for r in 0..R {
                            acc[r][p] = isa.fma(w, isa.splat(x[r][k]), acc[r][p]);
                        }
                    }
                }
            }
            for r in 0..R {
                for p in 0..P {
                    total[r][p] = isa.add(total[r][p], acc[r][p]);
                }
            }
        }
        for k in whole * CHUNK..inputs {
            for p in 0..P {
                let w = E::load(isa, &weights[p][k]);
                for r in 0..R {
                    total[r][p] = isa.fma(w, isa.splat(rows[r][k]), total[r][p]);
                }
            }
        }
        total
    }
}

/// Panels of `BITS`-bit codes in units of `BYTES`; a sum is exact over `BLOCKS` blocks of 16 inputs, the smaller of the weights' and the
/// activations' group.
struct CodePanels<'a, const BITS: u32, const BYTES: usize, const BLOCKS: usize> {
    codes: &'a Codes,
    x: Rows<'a>,
    share: Share<'a>,
}

impl<const BITS: u32, const BYTES: usize, const BLOCKS: usize> CodePanels<'_, BITS, BYTES, BLOCKS> {
    /// The two steps of a unit.
    #[inline(always)]
    fn unit<S: Isa>(isa: S, unit: &[u8; BYTES]) -> [S::B; 2] {
        let wide = |at: usize| unit[at..].first_chunk::<64>();
        let (mut steps, masks, first) = match BITS {
            8 => match (wide(0), wide(64)) {
                (Some(first), Some(second)) => return [isa.bytes(first), isa.bytes(second)],
                _ => return [isa.no_bytes(); 2],
            },
            4.. => match wide(0) {
                Some(both) => ([isa.low(isa.bytes(both)), isa.high(isa.bytes(both))], &unit[64..], 4),
                None => return [isa.no_bytes(); 2],
            },
            _ => ([isa.no_bytes(); 2], unit.as_slice(), 0),
        };
        let masks = masks.as_chunks::<8>().0;
        for bit in first..BITS {
            let at = 2 * (bit - first) as usize;
            steps[0] = isa.with_bit(steps[0], u64::from_le_bytes(masks[at]), 1 << bit);
            steps[1] = isa.with_bit(steps[1], u64::from_le_bytes(masks[at + 1]), 1 << bit);
        }
        steps
    }
}

impl<const BITS: u32, const BYTES: usize, const BLOCKS: usize> Panels for CodePanels<'_, BITS, BYTES, BLOCKS> {
    #[inline(always)]
    fn tile<S: Isa, const R: usize, const P: usize>(
        &self,
        isa: S,
        inputs: usize,
        row: usize,
        panel: usize,
    ) -> [[S::F; P]; R] {
        // Loops, not closures, wherever vectors are: a closure may be compiled without the instruction set.
        const { assert!(BYTES == BITS as usize * LANES) };
        let affine = self.codes.affine;
        let sum = BLOCKS * LANES;
        let (panel_units, groups) = (inputs / UNIT, inputs / affine.group);
        let mut x = [self.x.row(self.share.input(row)); R];
        let mut x_codes: [&[[Planes; BLOCKS]]; R] = [&[]; R];
        for r in 0..R {
            x[r] = self.x.row(self.share.input(row + r));
            x_codes[r] = x[r].codes.as_chunks().0;
        }
        let all = self.codes.codes.bytes().as_chunks::<BYTES>().0;
        let mut panels: [&[[u8; BYTES]]; P] = [&[]; P];
        for p in 0..P {
            panels[p] = &all[(panel + p) * panel_units..][..panel_units];
        }
        let mut acc = [[isa.splat(0.0); P]; R];
        for g in 0..inputs / sum {
            let mut codes: [&[Planes; BLOCKS]; R] = [&x_codes[0][g]; R];
            for r in 1..R {
                codes[r] = &x_codes[r][g];
            }
            let mut units: [&[[u8; BYTES]]; P] = [&[]; P];
            for p in 0..P {
                units[p] = &panels[p][g * 2 * BLOCKS..][..2 * BLOCKS];
            }
            let mut dots = [[isa.splat_i(0); P]; R];
            for plane in 0..2 {
                for u in 0..2 * BLOCKS {
                    for p in 0..P {
                        let [first, second] = Self::unit(isa, &units[p][u]);
                        for r in 0..R {
                            dots[r][p] = isa.dot::<BITS>(dots[r][p], first, codes[r][u / 2][plane][u % 2 * 2]);
                        }
                        for r in 0..R {
                            dots[r][p] = isa.dot::<BITS>(dots[r][p], second, codes[r][u / 2][plane][u % 2 * 2 + 1]);
                        }
                    }
                }
                if plane == 0 {
                    for r in 0..R {
                        for p in 0..P {
                            dots[r][p] = isa.times_256(dots[r][p]);
                        }
                    }
                }
            }
            if affine.zero != 0 {
                for r in 0..R {
                    let mut sum = 0;
                    for block in 0..BLOCKS {
                        sum += x[r].sums[g * BLOCKS + block];
                    }
                    let zero = isa.splat_i(-affine.zero * sum);
                    for p in 0..P {
                        dots[r][p] = isa.add_i(dots[r][p], zero);
                    }
                }
            }
            let x_group = g * sum / GROUP;
            for p in 0..P {
                let index = (panel + p) * groups + g * sum / affine.group;
                let scale = self.codes.scales.lanes(isa, index);
                for r in 0..R {
                    let scale = isa.mul(scale, isa.splat(x[r].scales[x_group]));
                    acc[r][p] = isa.fma(isa.to_f32(dots[r][p]), scale, acc[r][p]);
                }
                if let Some(biases) = &self.codes.biases {
                    let bias = biases.lanes(isa, index);
                    for r in 0..R {
                        acc[r][p] = isa.fma(bias, isa.splat(x[r].weighted[x_group]), acc[r][p]);
                    }
                }
            }
        }
        acc
    }
}
