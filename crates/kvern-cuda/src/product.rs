//! Products of activations and packed weights: which kernel serves how many rows, and what becomes of activations first.

use kvern_backend::{Activation, Error as BackendError};

use crate::device::{Argument, Grid};
use crate::gpu::{Cuda, Tensor};
use crate::linear::{BLOCK, Linear, Packing, Vector, Weights};

/// The kernels of a packing: for up to 8, 16, 32 and 64 rows, and for any number.
macro_rules! kernels {
    ($packing:literal) => {
        [
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
        let mut rest: Vec<usize> = (0..outs.len()).collect();
        let mut prepared = None;
        while let Some(&first) = rest.first() {
            let packing = outs[first].0.packing;
            let same = |&&index: &&usize| outs[index].0.packing == packing;
            let most = if packing == Packing::Exact { 1 } else { Weights::MOST };
            let group: Vec<usize> = rest.iter().filter(same).take(most).copied().collect();
            rest.retain(|index| !group.contains(index));
            if packing == Packing::Exact {
                let (weight, out) = &mut outs[first];
                self.exact_product(x, weight, out, add)?;
                continue;
            }
            let rounded = match prepared {
                Some((brain, rounded)) if brain == packing.brain() => rounded,
                _ => self.prepare(x, &input, packing.brain())?,
            };
            prepared = Some((packing.brain(), rounded));
            let weights: Vec<(&Linear, u64)> = group.iter().map(|&i| (outs[i].0, outs[i].1.address())).collect();
            self.packed_products(&weights, rounded, x.rows, add)?;
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

    /// Rounds activations to 16 bits; says where they are, and a factor for each row.
    fn prepare(&self, x: &Tensor, input: &Input<'_>, brain: bool) -> Result<(u64, u64), BackendError> {
        let padded = x.width.next_multiple_of(BLOCK);
        // Whole blocks of rows, so that no kernel reads past the end.
        let rows = x.rows.next_multiple_of(128);
        let inputs = self.reserve(|state| &mut state.inputs, rows * padded * 2)?;
        let scales = self.reserve(|state| &mut state.scales, rows * 4)?;
        let shared = padded as u32 * 4;
        if shared + 512 > self.device.properties().shared {
            let found = x.width.to_string();
            return Err(BackendError::Unsupported { what: "a row", found, needs: "rows that fit into shared memory" });
        }
        let (kind, other, eps, function) = match *input {
            Input::Plain => (0u32, 0, 0.0, 0),
            Input::Normed(weight, eps) => (1, weight.memory.address(), eps, 0),
            Input::Gated(function, up) => (2, up.address(), 0.0, activation(function)),
        };
        // The number of threads decides the order of a norm's sum: it follows from the width alone.
        let threads = (x.width as u32).div_ceil(4).next_multiple_of(32).min(1024);
        let grid = Grid { shared, ..Grid::new(x.rows as u32, threads) };
        let arguments: &[&dyn Argument] = &[
            &x.address(),
            &other,
            &kind,
            &function,
            &eps,
            &(x.width as u32),
            &(padded as u32),
            &u32::from(brain),
            &inputs,
            &scales,
        ];
        // SAFETY: `other` is as wide as the norm or has the rows of `x`; the scratch was reserved for these rows.
        unsafe { self.launch("prepare", grid, arguments) }?;
        Ok((inputs, scales))
    }

    /// Products of prepared activations and weights of one packing.
    fn packed_products(
        &self,
        outs: &[(&Linear, u64)],
        (inputs, scales): (u64, u64),
        rows: usize,
        add: bool,
    ) -> Result<(), BackendError> {
        let (first, _) = outs[0];
        let names = match first.packing {
            Packing::Half => kernels!("half"),
            Packing::Brain => kernels!("brain"),
            Packing::Codes4 => kernels!("codes4"),
            _ => kernels!("codes8"),
        };
        let (name, tiles) = match rows {
            0..=8 => (names[0], 1),
            9..=16 => (names[1], 1),
            17..=32 => (names[2], 2),
            33..=64 => (names[3], 1),
            _ => (names[4], 8),
        };
        let mut weights = Weights::default();
        for (linear, out) in outs {
            weights.push(linear, *out, tiles);
        }
        let blocks = weights.total() / tiles;
        let grid = if tiles == 8 {
            // Four blocks of inputs in flight, of 128 outputs and of 128 rows, and a sum for each of both.
            let weight = 8 * first.packing.block_bytes() as u32;
            Grid { shared: 4 * (weight + 16384) + 65536, ..Grid::new(((rows as u32).div_ceil(128), blocks), 256) }
        } else {
            Grid::new(blocks, 256)
        };
        let arguments: &[&dyn Argument] = &[
            &weights,
            &inputs,
            &scales,
            &(rows as u32),
            &(first.blocks() as u32),
            &(first.segment() as u32),
            &u32::from(add),
        ];
        // SAFETY: the shapes were checked, and the activations prepared in whole blocks of rows.
        unsafe { self.launch(name, grid, arguments) }
    }
}
