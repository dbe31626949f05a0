//! The activations of a decoder's step, which every graph here has, allocated once for the largest step.

use kvern_backend::Backend;

use crate::{Error, LoadOptions};

/// Activations: `[tokens, …]`, the last three `[outputs, …]`.
pub(crate) struct Workspace<B: Backend> {
    /// The residual stream, and what a norm makes of it.
    pub(crate) x: B::Tensor,
    pub(crate) h: B::Tensor,
    pub(crate) q: B::Tensor,
    pub(crate) k: B::Tensor,
    pub(crate) v: B::Tensor,
    pub(crate) attended: B::Tensor,
    pub(crate) gate: B::Tensor,
    pub(crate) up: B::Tensor,
    pub(crate) angles: B::Tensor,
    /// The stream where logits are wanted, and what the last norm makes of it.
    pub(crate) last: B::Tensor,
    pub(crate) last_norm: B::Tensor,
    pub(crate) logits: B::Tensor,
}

/// Widths of a decoder's activations.
pub(crate) struct Widths {
    pub(crate) hidden: usize,
    pub(crate) q: usize,
    pub(crate) kv: usize,
    pub(crate) intermediate: usize,
    /// Rotated dimensions of a head.
    pub(crate) angles: usize,
    pub(crate) vocab: usize,
}

impl<B: Backend> Workspace<B> {
    pub(crate) fn new(backend: &B, options: &LoadOptions<'_>, widths: &Widths) -> Result<Self, Error> {
        let tokens = |width| backend.tensor(options.max_tokens, width);
        let outputs = |width| backend.tensor(options.max_outputs.min(options.max_tokens), width);
        Ok(Self {
            x: tokens(widths.hidden)?,
            h: tokens(widths.hidden)?,
            q: tokens(widths.q)?,
            k: tokens(widths.kv)?,
            v: tokens(widths.kv)?,
            attended: tokens(widths.q)?,
            gate: tokens(widths.intermediate)?,
            up: tokens(widths.intermediate)?,
            angles: tokens(widths.angles)?,
            last: outputs(widths.hidden)?,
            last_norm: outputs(widths.hidden)?,
            logits: outputs(widths.vocab)?,
        })
    }

    /// Gives every tensor the rows of a step.
    pub(crate) fn resize(&mut self, backend: &B, step: &B::Step) -> Result<(), Error> {
        let (tokens, outputs) = backend.rows(step);
        let Self { x, h, q, k, v, attended, gate, up, angles, last, last_norm, logits } = self;
        for tensor in [x, h, q, k, v, attended, gate, up, angles] {
            backend.resize(tensor, tokens)?;
        }
        for tensor in [last, last_norm, logits] {
            backend.resize(tensor, outputs)?;
        }
        Ok(())
    }

    /// `logits = Head · rms(x)` where the step wants them.
    pub(crate) fn head(
        &mut self,
        backend: &B,
        step: &B::Step,
        norm: &B::Vector,
        eps: f32,
        head: &B::Linear,
    ) -> Result<(), Error> {
        backend.outputs(step, &self.x, &mut self.last)?;
        let logits = &mut [(head, &mut self.logits)];
        Ok(backend.project_norm(&self.last, (norm, eps), &mut self.last_norm, logits)?)
    }
}
