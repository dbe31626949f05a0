//! Weights repacked at load into panels whose lanes are outputs.
//!
//! A panel holds [`LANES`] outputs. Raw weights lie as `[panel][input][lane]`. Codes lie as `[panel][unit]`, a unit being 8 inputs:
//!
//! ```text
//! step  = 4 inputs × 16 lanes = 64 codes, code 4·lane + j belongs to input j of the step; a unit is two steps
//! 8 bit   64 bytes of the first step, 64 of the second
//! 4 bit   64 bytes: the first step in the low nibbles, the second in the high nibbles
//! 5, 6    a 4-bit unit, then for each further bit 8 bytes of mask for the first step and 8 for the second
//! 2, 3    masks only
//! ```
//!
//! Scales (and biases) lie as `[panel][group][lane]`, in the smallest float type that holds each of them exactly. Nothing is rounded
//! by packing, and lanes past the last output hold zeros.

use kvern_base::{AllocError, Buffer, Element, Raw, bf16, f16};
use kvern_weights::{Affine, Encoding, Tensor as Weight};

use crate::KernelSet;
use crate::isa::{Isa, LANES, Lane};
use crate::pool::{Disjoint, Pool};
#[cfg(target_arch = "x86_64")]
use crate::tiles;

/// Inputs of one unit of codes.
pub const UNIT: usize = 8;

/// A packed weight matrix, or a stack of them.
#[derive(Debug)]
pub struct Linear {
    /// Matrices of the stack.
    pub count: usize,
    /// Rows of one matrix; of a stack, whole panels.
    pub outputs: usize,
    /// Columns of the weight.
    pub inputs: usize,
    /// The weights.
    pub body: Body,
    /// One value per output, if there is a bias; padded to whole panels.
    pub bias: Option<Vec<f32>>,
}

/// The weights of a [`Linear`].
#[derive(Debug)]
pub enum Body {
    /// Raw elements.
    Raw(Raw, Buffer),
    /// Quantized codes.
    Codes(Codes),
    /// Raw elements of bf16 as tiles; see [`crate::tiles`].
    Tiles(Buffer),
}

/// Packed codes with their scales.
#[derive(Debug)]
pub struct Codes {
    /// The affine form.
    pub affine: Affine,
    /// Units.
    pub codes: Buffer,
    /// Scales.
    pub scales: Floats,
    /// Biases, for a biased format.
    pub biases: Option<Floats>,
}

/// Floats in the smallest type that holds them exactly.
#[derive(Debug)]
pub struct Floats {
    raw: Raw,
    data: Buffer,
}

impl Floats {
    fn pack(values: &[f32]) -> Result<Self, AllocError> {
        fn exact<E: Element>(values: &[f32]) -> bool {
            values.iter().all(|&x| E::from_f32(x).to_f32().to_bits() == x.to_bits())
        }
        fn store<E: Element>(values: &[f32]) -> Result<Floats, AllocError> {
            let mut data = Buffer::of::<E>(values.len())?;
            data.view_mut::<E>().iter_mut().zip(values).for_each(|(out, &x)| *out = E::from_f32(x));
            Ok(Floats { raw: E::RAW, data })
        }
        if exact::<f16>(values) {
            store::<f16>(values)
        } else if exact::<bf16>(values) {
            store::<bf16>(values)
        } else {
            store::<f32>(values)
        }
    }

    /// Bytes in use.
    pub fn bytes(&self) -> usize {
        self.data.len()
    }

    fn get(&self, index: usize) -> f32 {
        match self.raw {
            Raw::F32 => self.data.view::<f32>()[index],
            Raw::F16 => self.data.view::<f16>()[index].to_f32(),
            Raw::Bf16 => self.data.view::<bf16>()[index].to_f32(),
        }
    }

    /// The 16 lanes of one group of one panel.
    #[inline(always)]
    pub fn lanes<S: Isa>(&self, isa: S, index: usize) -> S::F {
        match self.raw {
            Raw::F32 => f32::load(isa, &self.data.view().as_chunks().0[index]),
            Raw::F16 => f16::load(isa, &self.data.view().as_chunks().0[index]),
            Raw::Bf16 => bf16::load(isa, &self.data.view().as_chunks().0[index]),
        }
    }
}

impl Codes {
    /// Bytes of one unit.
    pub fn unit_bytes(&self) -> usize {
        self.affine.bits as usize * LANES
    }

    fn code(&self, panel: usize, lane: usize, input: usize, inputs: usize) -> u8 {
        let unit = (panel * (inputs / UNIT) + input / UNIT) * self.unit_bytes();
        let unit = &self.codes.bytes()[unit..][..self.unit_bytes()];
        let (step, byte) = (input % UNIT / 4, 4 * lane + input % 4);
        let (mut code, mut masks, first) = match self.affine.bits {
            8 => return unit[64 * step + byte],
            4.. => (unit[byte] >> (4 * step) & 15, &unit[64..], 4),
            _ => (0, unit, 0),
        };
        for bit in first..self.affine.bits {
            code |= (masks[8 * step + byte / 8] >> (byte % 8) & 1) << bit;
            masks = &masks[16..];
        }
        code
    }
}

impl Linear {
    /// Packs a weight, which is `count` matrices one below the other; `exact` decodes quantized weights to `f32` instead of keeping codes, and `set` says what
    /// kernels there are.
    pub fn pack(
        (pool, set): (&Pool, KernelSet),
        weight: &Weight,
        bias: Option<&Weight>,
        count: usize,
        exact: bool,
    ) -> Result<Self, AllocError> {
        let (outputs, inputs) = (weight.rows() / count, weight.cols());
        let panels = weight.rows().div_ceil(LANES);
        let body = match (weight.affine(), weight.encoding()) {
            (Some(affine), _) if !exact => Body::Codes(pack_codes(pool, weight, affine)?),
            (None, Encoding::Raw(Raw::F16)) if !exact => pack_raw::<f16>(pool, weight)?,
            (None, Encoding::Raw(Raw::Bf16)) if !exact => match pack_tiles((pool, set), weight)? {
                Some(tiles) => Body::Tiles(tiles),
                None => pack_raw::<bf16>(pool, weight)?,
            },
            _ => pack_raw::<f32>(pool, weight)?,
        };
        let bias = bias.map(|bias| {
            let mut values = bias.to_vec();
            values.resize(panels * LANES, 0.0);
            values
        });
        Ok(Self { count, outputs, inputs, body, bias })
    }

    /// Panels of 16 outputs of one matrix.
    pub fn panels(&self) -> usize {
        self.outputs.div_ceil(LANES)
    }

    /// Bytes that the weights occupy.
    pub fn bytes(&self) -> usize {
        match &self.body {
            Body::Raw(_, data) | Body::Tiles(data) => data.len(),
            Body::Codes(codes) => {
                codes.codes.len() + codes.scales.bytes() + codes.biases.as_ref().map_or(0, Floats::bytes)
            }
        }
    }

    /// Decodes one row of the weight.
    pub fn row(&self, output: usize, out: &mut [f32]) {
        let (panel, lane) = (output / LANES, output % LANES);
        fn raw<E: Element>(data: &Buffer, panel: usize, lane: usize, out: &mut [f32]) {
            let from = data.view::<E>()[panel * out.len() * LANES..].iter().skip(lane).step_by(LANES);
            out.iter_mut().zip(from).for_each(|(out, x)| *out = x.to_f32());
        }
        match &self.body {
            Body::Raw(Raw::F32, data) => raw::<f32>(data, panel, lane, out),
            Body::Raw(Raw::F16, data) => raw::<f16>(data, panel, lane, out),
            Body::Raw(Raw::Bf16, data) => raw::<bf16>(data, panel, lane, out),
            #[cfg(target_arch = "x86_64")]
            Body::Tiles(data) => tiles::row(data, output, out),
            #[cfg(not(target_arch = "x86_64"))]
            Body::Tiles(_) => unreachable!("no other processor has tiles"),
            Body::Codes(codes) => {
                let Affine { group, zero, .. } = codes.affine;
                for (input, out) in out.iter_mut().enumerate() {
                    let index = (panel * (self.inputs / group) + input / group) * LANES + lane;
                    let code = i32::from(codes.code(panel, lane, input, self.inputs)) - zero;
                    let bias = codes.biases.as_ref().map_or(0.0, |biases| biases.get(index));
                    *out = codes.scales.get(index) * code as f32 + bias;
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn pack_tiles((pool, set): (&Pool, KernelSet), weight: &Weight) -> Result<Option<Buffer>, AllocError> {
    if set.tiles().is_some() { tiles::pack(pool, weight) } else { Ok(None) }
}

#[cfg(not(target_arch = "x86_64"))]
fn pack_tiles(_: (&Pool, KernelSet), _: &Weight) -> Result<Option<Buffer>, AllocError> {
    Ok(None)
}

fn pack_raw<E: Lane>(pool: &Pool, weight: &Weight) -> Result<Body, AllocError> {
    let (outputs, inputs) = (weight.rows(), weight.cols());
    let panel = inputs * LANES;
    let panels = outputs.div_ceil(LANES);
    let mut data = Buffer::of::<E>(panels * panel)?;
    let parts = Disjoint::new(data.view_mut::<E>());
    pool.each(panels, |index| {
        // SAFETY: panels are disjoint.
        let out = unsafe { parts.part(index * panel..(index + 1) * panel) };
        let mut row = vec![0.0; inputs];
        for lane in 0..LANES.min(outputs - index * LANES) {
            weight.decode_row(index * LANES + lane, &mut row);
            out.iter_mut().skip(lane).step_by(LANES).zip(&row).for_each(|(out, &x)| *out = E::from_f32(x));
        }
    });
    Ok(Body::Raw(E::RAW, data))
}

fn pack_codes(pool: &Pool, weight: &Weight, affine: Affine) -> Result<Codes, AllocError> {
    let (outputs, inputs) = (weight.rows(), weight.cols());
    let (panels, groups, bits) = (outputs.div_ceil(LANES), inputs / affine.group, affine.bits as usize);
    let panel = inputs / UNIT * bits * LANES;
    let mut packed = Buffer::zeroed(panels * panel)?;
    let mut scales = vec![0.0f32; panels * groups * LANES];
    let mut biases = vec![0.0f32; panels * groups * LANES];
    let (packed_parts, scale_parts, bias_parts) =
        (Disjoint::new(packed.bytes_mut()), Disjoint::new(&mut scales), Disjoint::new(&mut biases));
    pool.each(panels, |index| {
        let floats = index * groups * LANES..(index + 1) * groups * LANES;
        // SAFETY: panels are disjoint.
        let (out, scales, biases) = unsafe {
            let out = packed_parts.part(index * panel..(index + 1) * panel);
            (out, scale_parts.part(floats.clone()), bias_parts.part(floats))
        };
        let mut codes = vec![0u8; LANES * inputs];
        let (mut row_scales, mut row_biases) = (vec![0.0; groups], vec![0.0; groups]);
        for lane in 0..LANES.min(outputs - index * LANES) {
            let codes = &mut codes[lane * inputs..][..inputs];
            weight.decode_groups(index * LANES + lane, codes, &mut row_scales, &mut row_biases);
            for group in 0..groups {
                scales[group * LANES + lane] = row_scales[group];
                biases[group * LANES + lane] = row_biases[group];
            }
        }
        for (unit, out) in out.chunks_exact_mut(bits * LANES).enumerate() {
            pack_unit(
                bits as u32,
                |lane| codes[lane * inputs + unit * UNIT..].first_chunk().copied().unwrap_or_default(),
                out,
            );
        }
    });
    let biases = affine.biased.then(|| Floats::pack(&biases)).transpose()?;
    Ok(Codes { affine, codes: packed, scales: Floats::pack(&scales)?, biases })
}

/// Packs the 8 codes of each lane.
#[inline(always)]
fn pack_unit(bits: u32, codes: impl Fn(usize) -> [u8; UNIT], out: &mut [u8]) {
    let (nibbles, masks, first) = match bits {
        8 => (out, [].as_mut_slice(), 8),
        4.. => {
            let (nibbles, masks) = out.split_at_mut(64);
            (nibbles, masks, 4)
        }
        _ => ([].as_mut_slice(), out, 0),
    };
    for lane in 0..LANES {
        let codes = codes(lane);
        let [a, b, c, d, e, f, g, h] = codes;
        let (low, high) = ([a, b, c, d], [e, f, g, h]);
        if bits == 8 {
            nibbles[4 * lane..][..4].copy_from_slice(&low);
            nibbles[64 + 4 * lane..][..4].copy_from_slice(&high);
        } else if bits >= 4 {
            let both = (u32::from_le_bytes(low) & 0x0F0F_0F0F) | (u32::from_le_bytes(high) & 0x0F0F_0F0F) << 4;
            nibbles[4 * lane..][..4].copy_from_slice(&both.to_le_bytes());
        }
        for bit in first..bits {
            let masks = &mut masks[16 * (bit - first) as usize..][..16];
            for (j, &code) in codes.iter().enumerate() {
                let (step, byte) = (j / 4, 4 * lane + j % 4);
                masks[8 * step + byte / 8] |= (code >> bit & 1) << (byte % 8);
            }
        }
    }
}
