//! Products of activations and packed weights: which kernel serves how many rows, and what becomes of activations first.

use kvern_backend::{Activation, Error as BackendError};

use crate::device::{Argument, Grid};
use crate::gpu::{Cuda, Tensor};
use crate::linear::{BLOCK, Linear, Packing, SEGMENTS, Vector, Weights, segment};

/// The kernels of a packing: for one row and few rows that fit into shared memory, for up to 8, 16, 32 and 64 rows, and for any number.
macro_rules! kernels {
    ($packing:literal) => {
        [
            concat!($packing, "_one"),
            concat!($packing, "_few"),
            concat!($packing, "_narrow8"),
            concat!($packing, "_narrow16"),
            concat!($packing, "_narrow32"),
            concat!($packing, "_narrow64"),
            concat!($packing, "_wide"),
        ]
    };
}

/// What becomes the activations of a product; the numbers are those of `kernels/linear.cu`.
pub(crate) enum Input<'a> {
    Plain,
    /// The norm's weight and epsilon.
    Normed(&'a Vector, f32),
    /// What the activated values are multiplied with.
    Gated(Activation, &'a Tensor),
}

/// `Inputs` of `kernels/linear.cu`: prepared activations, and how they are multiplied.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Inputs {
    x: u64,
    scales: u64,
    sums: u64,
    rows: u32,
    stride: u32,
    blocks: u32,
    length: u32,
    unit: u32,
    add: u32,
}

impl Argument for Inputs {}

/// What 16 bits activations become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Bf16,
    F16,
    /// `f16`, and the sums of units of so many inputs.
    Summed(u32),
}

impl Form {
    fn of(weight: &Linear) -> Self {
        match weight.packing {
            Packing::Brain => Self::Bf16,
            packing if packing.coded() => Self::Summed(weight.unit() as u32),
            _ => Self::F16,
        }
    }
}

/// The number of a function in the kernels.
pub(crate) fn activation(activation: Activation) -> u32 {
    match activation {
        Activation::Silu => 0,
        Activation::Sigmoid => 1,
        Activation::GeluTanh => 2,
    }
}

impl Cuda {
    /// `out = input(x) · weightᵀ + bias`, or that added to what is there.
    pub(crate) fn products(
        &self,
        (x, input): (&Tensor, Input<'_>),
        outs: &mut [(&Linear, &mut Tensor)],
        add: bool,
    ) -> Result<(), BackendError> {
        for (weight, out) in outs.iter() {
            BackendError::check("project", "width of the input", weight.inputs, x.width)?;
            BackendError::check("project", "width of the output", weight.outputs, out.width)?;
            BackendError::check("project", "rows of the output", x.rows, out.rows)?;
        }
        // A step need not have outputs.
        if x.rows == 0 {
            return Ok(());
        }
        let mut rest: Vec<usize> = (0..outs.len()).collect();
        let mut prepared = None;
        while let Some(&first) = rest.first() {
            let (packing, form) = (outs[first].0.packing, Form::of(outs[first].0));
            let same = |&&index: &&usize| outs[index].0.packing == packing && Form::of(outs[index].0) == form;
            let most = if packing == Packing::Exact { 1 } else { Weights::MOST };
            let group: Vec<usize> = rest.iter().filter(same).take(most).copied().collect();
            rest.retain(|index| !group.contains(index));
            if packing == Packing::Exact {
                let (weight, out) = &mut outs[first];
                self.exact_product(x, weight, out, add)?;
                continue;
            }
            let inputs = match prepared {
                Some((last, inputs)) if last == form => inputs,
                _ => self.prepare(x, &input, form)?,
            };
            prepared = Some((form, inputs));
            let weights: Vec<(&Linear, u64)> = group.iter().map(|&i| (outs[i].0, outs[i].1.address())).collect();
            self.packed_products(&weights, Inputs { add: u32::from(add), ..inputs })?;
        }
        Ok(())
    }

    /// Products with weights in f32, whose activations stay in f32.
    fn exact_product(&self, x: &Tensor, weight: &Linear, out: &mut Tensor, add: bool) -> Result<(), BackendError> {
        let raw = weight.raw_parts();
        let grid = Grid::new(((weight.outputs as u32).div_ceil(8), (x.rows as u32).div_ceil(4)), 256);
        let (outputs, inputs) = (weight.outputs as u32, weight.inputs as u32);
        let arguments: &[&dyn Argument] =
            &[&raw.0, &raw.1, &x.address(), &out.address(), &outputs, &inputs, &(x.rows as u32), &u32::from(add)];
        // SAFETY: the shapes were checked.
        unsafe { self.launch("exact", grid, arguments) }
    }

    /// Rounds activations to 16 bits, for products of matrices with as many inputs.
    fn prepare(&self, x: &Tensor, input: &Input<'_>, form: Form) -> Result<Inputs, BackendError> {
        let padded = x.width.next_multiple_of(BLOCK);
        // Whole blocks of rows, so that no kernel reads past the end.
        let rows = x.rows.next_multiple_of(128);
        let (brain, unit) = match form {
            Form::Bf16 => (1u32, 0u32),
            Form::F16 => (0, 0),
            Form::Summed(unit) => (0, unit),
        };
        let units = padded.checked_div(unit as usize).unwrap_or(0);
        let blocks = padded / BLOCK;
        let length = segment(blocks);
        let (kind, other, eps, function) = match *input {
            Input::Plain => (0u32, 0, 0.0, 0),
            Input::Normed(weight, eps) => (1, weight.memory.address(), eps, 0),
            Input::Gated(function, up) => (2, up.address(), 0.0, activation(function)),
        };
        // A norm is of a whole row; segments do not need each other else.
        let (share, shares) = match input {
            Input::Normed(..) => (padded, 1),
            _ => (length * BLOCK, blocks.div_ceil(length)),
        };
        let shared = share as u32 * 4;
        if shared + 512 > self.device.properties().shared {
            let found = x.width.to_string();
            return Err(BackendError::Unsupported { what: "a row", found, needs: "rows that fit into shared memory" });
        }
        let inputs = Inputs {
            x: self.reserve(|state| &mut state.inputs, rows * padded * 2)?,
            scales: self.reserve(|state| &mut state.scales, SEGMENTS * rows * 4)?,
            sums: self.reserve(|state| &mut state.sums, rows * units * 4)?,
            rows: x.rows as u32,
            stride: rows as u32,
            blocks: blocks as u32,
            length: length as u32,
            unit: unit.checked_ilog2().unwrap_or(BLOCK.ilog2()),
            add: 0,
        };
        // The number of threads decides the order of a norm's sum: it follows from the width alone.
        let threads = (share as u32 / 4).next_multiple_of(32).min(1024);
        let grid = Grid { shared, ..Grid::new((x.rows as u32, shares as u32), threads) };
        let arguments: &[&dyn Argument] = &[
            &x.address(),
            &other,
            &kind,
            &function,
            &eps,
            &(x.width as u32),
            &(padded as u32),
            &((length * BLOCK) as u32),
            &brain,
            &unit,
            &inputs.x,
            &inputs.scales,
            &inputs.sums,
            &inputs.stride,
        ];
        // SAFETY: `other` is as wide as the norm or has the rows of `x`; the scratch was reserved for these rows.
        unsafe { self.launch("prepare", grid, arguments) }?;
        Ok(inputs)
    }

    /// Products of prepared activations and weights of one packing.
    fn packed_products(&self, outs: &[(&Linear, u64)], inputs: Inputs) -> Result<(), BackendError> {
        let packing = outs[0].0.packing;
        let names = match packing {
            Packing::Half => kernels!("half"),
            Packing::Brain => kernels!("brain"),
            Packing::Codes4 => kernels!("codes4"),
            _ => kernels!("codes8"),
        };
        // Of a block of inputs, of each of 16 outputs and of each row: scales of units, and their sums.
        let units = if packing.coded() { (BLOCK >> inputs.unit) as u32 } else { 0 };
        let tile_bytes = packing.block_bytes() as u32 + units * 64;
        let few = self.few(packing, inputs, tile_bytes, units);
        let (name, tiles) = match inputs.rows {
            0..=1 if few.is_some() => (names[0], 1),
            0..=8 if few.is_some() => (names[1], 1),
            0..=8 => (names[2], 1),
            9..=16 => (names[3], 1),
            17..=32 => (names[4], 2),
            33..=64 => (names[5], 1),
            _ => (names[6], 8),
        };
        let mut weights = Weights::default();
        for (linear, out) in outs {
            weights.push(linear, *out, tiles);
        }
        let blocks = weights.total() / tiles;
        let grid = match few {
            Some((most, shared)) => Grid { shared, ..Grid::new(blocks.min(most), 256) },
            // Four blocks of inputs in flight, of 128 outputs and of 128 rows, and a sum for each of both.
            None if tiles == 8 => {
                let shared = 4 * (8 * tile_bytes + 128 * (128 + units * 4)) + 65536;
                Grid { shared, ..Grid::new((inputs.rows.div_ceil(128), blocks), 256) }
            }
            None => Grid::new(blocks, 256),
        };
        // SAFETY: the shapes were checked, and the activations prepared in whole blocks of rows.
        unsafe { self.launch(name, grid, &[&weights, &inputs]) }
    }

    /// Blocks of the kernel for few rows that run at a time, and the shared memory of each; nothing where another kernel serves.
    fn few(&self, packing: Packing, inputs: Inputs, tile_bytes: u32, units: u32) -> Option<(u32, u32)> {
        let Inputs { rows, blocks, .. } = inputs;
        // Blocks in each warp's ring.
        let ring = if packing == Packing::Codes4 { 8 } else { 4 };
        let shared = 8 * ring * tile_bytes + rows * blocks * (128 + units * 4) + 2 * 8 * rows * 64;
        let properties = self.device.properties();
        // The device keeps a KiB of each block's for itself. More than three would have too few registers.
        let at_once = ((properties.shared + 1024) / (shared + 1024)).min(3);
        (rows <= 8 && at_once >= 2).then_some((properties.multiprocessors * at_once, shared))
    }
}
