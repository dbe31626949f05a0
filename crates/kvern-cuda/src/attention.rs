//! Attention: which kernels serve a group.

use kvern_backend::{Error as BackendError, Slot};
use kvern_base::Raw;
use kvern_state::{Kind, StateSpec};

use crate::device::{Argument, Grid};
use crate::gpu::Cuda;
use crate::step::{Plan, Step};

/// `Attention` of `kernels/attention.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attend {
    pub(crate) plan: Plan,
    pub(crate) classes: u64,
    pub(crate) planes: u64,
    pub(crate) q: u64,
    pub(crate) sinks: u64,
    pub(crate) out: u64,
    pub(crate) scale: f32,
    pub(crate) softcap: f32,
    pub(crate) heads: u32,
    pub(crate) kv_heads: u32,
    pub(crate) key_dim: u32,
    pub(crate) value_dim: u32,
    pub(crate) plane_count: u32,
    pub(crate) latent: u32,
}

impl Argument for Attend {}

impl Cuda {
    /// The 16-bit type and dimension of keys and values, where the kernels for matrix instructions serve a group.
    pub(crate) fn matrix(spec: &StateSpec, slot: Slot, heads: usize) -> Option<(Raw, usize)> {
        let group = &spec.groups()[slot.group];
        let [keys, values] = group.planes.as_slice() else { return None };
        let (raw, dim) = (keys.codec.raw()?, keys.dim);
        let alike = values.codec == keys.codec && values.dim == dim && group.late.is_none();
        let served = group.kind == Kind::Attention && matches!(dim, 64 | 128) && heads / group.heads() <= 16;
        (alike && served && spec.page() == 64 && raw != Raw::F32).then_some((raw, dim))
    }

    /// Attends a step with those kernels: tokens of short segments each on its own, stride by stride, and long segments as windows.
    pub(crate) fn attend_matrix(
        &self,
        step: &Step,
        attend: &Attend,
        (raw, dim): (Raw, usize),
    ) -> Result<(), BackendError> {
        let (decode, window) = match (raw, dim) {
            (Raw::F16, 64) => ("attend_decode_f16_64", "attend_window_f16_64"),
            (Raw::F16, _) => ("attend_decode_f16_128", "attend_window_f16_128"),
            (_, 64) => ("attend_decode_bf16_64", "attend_window_bf16_64"),
            (_, _) => ("attend_decode_bf16_128", "attend_window_bf16_128"),
        };
        let kv_heads = attend.kv_heads;
        if step.singles > 0 {
            let bytes = step.singles * attend.heads as usize * step.strides * (dim + 2) * 4;
            let parts = self.reserve(|state| &mut state.parts, bytes)?;
            let (singles, strides) = (step.singles as u32, step.strides as u32);
            let grid = Grid::new((strides, kv_heads, singles), 128);
            // SAFETY: the shapes were checked, and the scratch has a part for each stride of each row.
            unsafe { self.launch(decode, grid, &[attend, &parts, &strides]) }?;
            if strides > 1 {
                let merge = if dim == 64 { "attend_merge_64" } else { "attend_merge_128" };
                let grid = Grid::new((attend.heads, singles), dim as u32);
                // SAFETY: as above.
                unsafe { self.launch(merge, grid, &[attend, &parts, &strides]) }?;
            }
        }
        if step.window > 0 {
            let rows = step.window as u32 * (attend.heads / kv_heads);
            let shared = 2 * 2 * 64 * dim as u32 * 2 + 128 * dim as u32 * 4;
            let blocks = (rows.div_ceil(128), kv_heads, step.segments() as u32);
            // SAFETY: the shapes were checked.
            unsafe { self.launch(window, Grid { shared, ..Grid::new(blocks, 256) }, &[attend]) }?;
        }
        Ok(())
    }
}
