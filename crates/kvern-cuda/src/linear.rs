//! Weight matrices on the device, packed as `kernels/linear.cu` reads them.

use std::thread;

use kvern_backend::Error as BackendError;
use kvern_base::Raw;
use kvern_weights::{Affine, Encoding, Tensor};

use crate::device::{Argument, Device, Error, Grid, Memory, Pinned};

/// Inputs of a block of packed weights.
pub(crate) const BLOCK: usize = 64;
/// Outputs of a tile of packed weights.
pub(crate) const TILE: usize = 16;
/// Bytes of weights that are on their way to the device at a time.
const STAGING: usize = 64 << 20;

/// How a matrix is stored; the numbers are those of `kernels/linear.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packing {
    /// `f16`.
    Half,
    /// `bf16`.
    Brain,
    /// Codes of up to 4 bits, with scales and biases of groups in `f16`.
    Codes4,
    /// Codes of up to 8 bits, likewise.
    Codes8,
    /// `f32`, as it is.
    Exact,
}

/// The most segments that the inputs of a sum are cut into.
pub(crate) const SEGMENTS: usize = 8;

/// Of blocks of inputs, those of a segment, whatever the number of rows.
pub(crate) fn segment(blocks: usize) -> usize {
    blocks.div_ceil(SEGMENTS)
}

impl Packing {
    /// Whether weights are codes with scales and biases.
    pub(crate) fn coded(self) -> bool {
        matches!(self, Self::Codes4 | Self::Codes8)
    }

    /// Bytes of 64 inputs of one tile.
    pub(crate) fn block_bytes(self) -> usize {
        match self {
            Self::Half | Self::Brain => 2048,
            Self::Codes4 => 512,
            Self::Codes8 => 1024,
            Self::Exact => TILE * BLOCK * 4,
        }
    }
}

/// A packed matrix `[outputs, inputs]`.
pub struct Linear {
    pub(crate) packing: Packing,
    pub(crate) outputs: usize,
    pub(crate) inputs: usize,
    codes: Memory,
    scales: Option<Memory>,
    bias: Option<Memory>,
    shift: u32,
}

/// `Weight` of `kernels/linear.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Weight {
    codes: u64,
    scales: u64,
    bias: u64,
    out: u64,
    outputs: u32,
    width: u32,
    shift: u32,
    pad: u32,
}

/// `Weights` of `kernels/linear.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Weights {
    of: [Weight; Self::MOST],
    tiles: [u32; Self::MOST],
    count: u32,
}

impl Argument for Weight {}
impl Argument for Weights {}

impl Weights {
    /// Weights of one launch.
    pub(crate) const MOST: usize = 4;

    /// Adds a matrix whose products go to `out`, in blocks of `tiles` tiles.
    pub(crate) fn push(&mut self, linear: &Linear, out: u64, tiles: u32) {
        let before = self.total();
        self.of[self.count as usize] = linear.weight(out);
        self.tiles[self.count as usize] = before + (linear.outputs.div_ceil(TILE) as u32).next_multiple_of(tiles);
        self.count += 1;
    }

    /// Tiles of all matrices.
    pub(crate) fn total(&self) -> u32 {
        self.count.checked_sub(1).map_or(0, |last| self.tiles[last as usize])
    }
}

impl Linear {
    /// Blocks of inputs.
    pub(crate) fn blocks(&self) -> usize {
        self.inputs.div_ceil(BLOCK)
    }

    /// Inputs that share a scale within a block.
    pub(crate) fn unit(&self) -> usize {
        (1 << self.shift).min(BLOCK)
    }

    pub(crate) fn weight(&self, out: u64) -> Weight {
        Weight {
            codes: self.codes.address(),
            scales: self.scales.as_ref().map_or(0, Memory::address),
            bias: self.bias.as_ref().map_or(0, Memory::address),
            out,
            outputs: self.outputs as u32,
            width: self.outputs as u32,
            shift: self.shift,
            pad: 0,
        }
    }

    /// Addresses of weights and bias of a matrix in f32.
    pub(crate) fn raw_parts(&self) -> (u64, u64) {
        (self.codes.address(), self.bias.as_ref().map_or(0, Memory::address))
    }

    pub(crate) fn bytes(&self) -> usize {
        let bytes = |memory: &Option<Memory>| memory.as_ref().map_or(0, Memory::bytes);
        self.codes.bytes() + bytes(&self.scales) + bytes(&self.bias)
    }

    /// Packs a matrix; `exact` decodes it to `f32`.
    pub(crate) fn pack(
        device: &Device,
        weight: &Tensor,
        bias: Option<&Tensor>,
        exact: bool,
    ) -> Result<Self, BackendError> {
        let (outputs, inputs) = (weight.rows(), weight.cols());
        let affine = weight.affine();
        let packing = match weight.encoding() {
            _ if exact => Packing::Exact,
            Encoding::Raw(Raw::F32) => Packing::Exact,
            Encoding::Raw(Raw::F16) => Packing::Half,
            Encoding::Raw(Raw::Bf16) => Packing::Brain,
            _ if affine.is_some_and(|affine| affine.bits <= 4) => Packing::Codes4,
            _ => Packing::Codes8,
        };
        let bias = match bias {
            None => None,
            Some(bias) => {
                let values = bias.to_vec();
                BackendError::check("linear", "values of the bias", outputs, values.len())?;
                let memory = device.allocate(values.len() * 4)?;
                memory.write(0, &values)?;
                Some(memory)
            }
        };
        // Two tiles, so that no kernel reads past the end.
        let (tiles, blocks) = (outputs.div_ceil(TILE).next_multiple_of(2), inputs.div_ceil(BLOCK));
        let bytes = match packing {
            Packing::Exact => outputs * inputs * 4,
            _ => tiles * blocks * packing.block_bytes(),
        };
        let codes = device.allocate(bytes)?;
        let mut linear = Self { packing, outputs, inputs, codes, scales: None, bias, shift: 6 };
        match affine {
            Some(affine) if !exact => {
                // Groups are powers of two in every format.
                linear.shift = affine.group.ilog2();
                linear.scales = Some(device.allocate(tiles * blocks * BLOCK / affine.group * TILE * 4)?);
                linear.fill_codes(device, weight, affine)?;
            }
            _ => linear.fill_raw(device, weight)?,
        }
        Ok(linear)
    }

    /// Rows that are staged together, when each takes so many bytes.
    fn rows_at_once(&self, bytes: usize) -> usize {
        // Whole pairs of tiles.
        (STAGING / bytes.max(1)).next_multiple_of(2 * TILE).min(self.outputs.next_multiple_of(2 * TILE))
    }

    fn fill_raw(&self, device: &Device, weight: &Tensor) -> Result<(), BackendError> {
        let exact = self.packing == Packing::Exact;
        let row_bytes = self.inputs * if exact { 4 } else { 2 };
        let rows = self.rows_at_once(row_bytes);
        let mut staging = Pinned::new(device, rows * row_bytes)?;
        let raw = device.allocate(rows * row_bytes)?;
        for first in (0..self.outputs).step_by(rows) {
            let count = rows.min(self.outputs - first);
            let bytes = &mut staging.bytes_mut()[..count * row_bytes];
            in_parallel(bytes, row_bytes, |row, out| match weight.raw_row(first + row).filter(|_| !exact) {
                Some(bytes) => out.copy_from_slice(bytes),
                None => {
                    let mut values = vec![0.0; out.len() / 4];
                    weight.decode_row(first + row, &mut values);
                    out.copy_from_slice(bytemuck::cast_slice(&values));
                }
            });
            if exact {
                self.codes.write(first * row_bytes, &staging.bytes()[..count * row_bytes])?;
                continue;
            }
            raw.take(&staging, count * row_bytes)?;
            let blocks = self.blocks() as u32;
            let to = self.codes.address() + (first / TILE * self.blocks() * self.packing.block_bytes()) as u64;
            let grid = Grid::new((blocks.div_ceil(4), (count.div_ceil(TILE) as u32).next_multiple_of(2)), 128);
            let arguments: &[&dyn Argument] = &[&raw.address(), &(count as u32), &(self.inputs as u32), &blocks, &to];
            // SAFETY: `raw` has `count` rows; `codes` has all tiles of them, in pairs.
            unsafe { device.launch("pack_raw", grid, arguments) }?;
            device.wait()?;
        }
        Ok(())
    }

    fn fill_codes(&self, device: &Device, weight: &Tensor, affine: Affine) -> Result<(), BackendError> {
        let (group, zero) = (affine.group, affine.zero as f32);
        let groups = self.inputs / group;
        let row_bytes = self.inputs + groups * 8;
        let rows = self.rows_at_once(row_bytes);
        let mut staging = Pinned::new(device, rows * row_bytes)?;
        let raw = device.allocate(rows * row_bytes)?;
        let bits: u32 = if self.packing == Packing::Codes4 { 4 } else { 8 };
        for first in (0..self.outputs).step_by(rows) {
            let count = rows.min(self.outputs - first);
            let bytes = &mut staging.bytes_mut()[..count * row_bytes];
            let (codes, scales) = bytes.split_at_mut(count * self.inputs);
            // Codes of all rows, then scales of all rows, then biases.
            let mut decoded: Vec<(Vec<f32>, Vec<f32>)> = vec![(vec![0.0; groups], vec![0.0; groups]); count];
            pairs_in_parallel(codes, self.inputs, &mut decoded, |row, codes, (scales, biases)| {
                weight.decode_groups(first + row, codes, scales, biases);
            });
            let (scales, biases) = scales.split_at_mut(count * groups * 4);
            for (row, (s, b)) in decoded.iter().enumerate() {
                scales[row * groups * 4..][..groups * 4].copy_from_slice(bytemuck::cast_slice(s));
                biases[row * groups * 4..][..groups * 4].copy_from_slice(bytemuck::cast_slice(b));
            }
            raw.take(&staging, count * row_bytes)?;
            let blocks = self.blocks() as u32;
            let tiles = (count.div_ceil(TILE) as u32).next_multiple_of(2);
            let (outputs, inputs) = (count as u32, self.inputs as u32);
            let first_tile = first / TILE;
            let to = self.codes.address() + (first_tile * self.blocks() * self.packing.block_bytes()) as u64;
            let grid = Grid::new((blocks.div_ceil(4), tiles), 128);
            // SAFETY: `raw` has the codes of `count` rows; `codes` has all tiles of them, in pairs.
            unsafe { device.launch("pack_codes", grid, &[&raw.address(), &outputs, &inputs, &blocks, &bits, &to]) }?;
            let scales = raw.address() + (count * self.inputs) as u64;
            let biases = scales + (count * groups * 4) as u64;
            let padded = self.blocks() * BLOCK / group;
            let to = self.scales.as_ref().map_or(0, Memory::address) + (first_tile * padded * TILE * 4) as u64;
            let grid = Grid::new(((padded * TILE).div_ceil(256) as u32, tiles), 256);
            let arguments: &[&dyn Argument] =
                &[&scales, &biases, &zero, &outputs, &(groups as u32), &(padded as u32), &to];
            // SAFETY: as above, with scales and biases behind the codes.
            unsafe { device.launch("pack_scales", grid, arguments) }?;
            device.wait()?;
        }
        Ok(())
    }
}

/// Threads that decode weights: a few are as fast as the bus.
fn threads() -> usize {
    thread::available_parallelism().map_or(1, |cores| cores.get().min(8))
}

/// Calls `run(row, bytes)` for rows of `row_bytes`.
fn in_parallel(bytes: &mut [u8], row_bytes: usize, run: impl Fn(usize, &mut [u8]) + Sync) {
    let rows = bytes.len() / row_bytes.max(1);
    let mut nothing = vec![(); rows];
    pairs_in_parallel(bytes, row_bytes, &mut nothing, |row, bytes, ()| run(row, bytes));
}

/// Calls `run(row, bytes, other)` for rows of `row_bytes`, each with its entry of `others`.
fn pairs_in_parallel<T: Send>(
    bytes: &mut [u8],
    row_bytes: usize,
    others: &mut [T],
    run: impl Fn(usize, &mut [u8], &mut T) + Sync,
) {
    let share = others.len().div_ceil(threads()).max(1);
    thread::scope(|scope| {
        let parts = bytes.chunks_mut(share * row_bytes).zip(others.chunks_mut(share));
        for (part, (bytes, others)) in parts.enumerate() {
            let run = &run;
            scope.spawn(move || {
                for (row, (bytes, other)) in bytes.chunks_mut(row_bytes).zip(others).enumerate() {
                    run(part * share + row, bytes, other);
                }
            });
        }
    });
}

/// Values of a vector on the device.
pub struct Vector {
    pub(crate) memory: Memory,
    pub(crate) len: usize,
}

impl Vector {
    pub(crate) fn new(device: &Device, values: &[f32]) -> Result<Self, Error> {
        let memory = device.allocate(values.len() * 4)?;
        memory.write(0, values)?;
        Ok(Self { memory, len: values.len() })
    }
}
