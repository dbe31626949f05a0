//! The activations of a decoder's step, which every graph here has, allocated once for the largest step.

use std::collections::BTreeSet;

use kvern_backend::{Backend, Slot};

use crate::config::Outline;
use crate::loader::Ends;
use crate::{Error, LoadOptions};

/// Activations: `[tokens, …]`, the last three `[outputs, …]`.
pub(crate) struct Workspace<B: Backend> {
    /// The residual stream, and what a norm makes of it.
    pub(crate) x: B::Tensor,
    pub(crate) h: B::Tensor,
    /// Of dense feed-forward parts, for each of their widths.
    pub(crate) gated: Vec<Gated<B>>,
    /// The stream where logits are wanted, and what the last norm makes of it.
    pub(crate) last: B::Tensor,
    pub(crate) last_norm: B::Tensor,
    pub(crate) logits: B::Tensor,
}

/// What a gated unit makes of its input.
pub(crate) struct Gated<B: Backend> {
    pub(crate) width: usize,
    pub(crate) gate: B::Tensor,
    pub(crate) up: B::Tensor,
}

impl<B: Backend> Workspace<B> {
    /// For a decoder whose dense feed-forward parts have these widths, in any order.
    pub(crate) fn new(
        backend: &B,
        options: &LoadOptions<'_>,
        outline: &Outline,
        widths: &[usize],
    ) -> Result<Self, Error> {
        let tokens = |width| backend.tensor(options.max_tokens, width);
        let outputs = |width| backend.tensor(options.max_outputs.min(options.max_tokens), width);
        let widths: BTreeSet<usize> = widths.iter().copied().collect();
        let gated = |width| Ok(Gated { width, gate: tokens(width)?, up: tokens(width)? });
        let Outline { hidden, vocab, .. } = *outline;
        Ok(Self {
            x: tokens(hidden)?,
            h: tokens(hidden)?,
            gated: widths.into_iter().map(gated).collect::<Result<_, Error>>()?,
            last: outputs(hidden)?,
            last_norm: outputs(hidden)?,
            logits: outputs(vocab)?,
        })
    }

    /// Gives every tensor the rows of a step.
    pub(crate) fn resize(&mut self, backend: &B, step: &B::Step) -> Result<(), Error> {
        let (tokens, outputs) = backend.rows(step);
        let Self { x, h, gated, last, last_norm, logits } = self;
        backend.resize(x, tokens)?;
        backend.resize(h, tokens)?;
        gated.iter_mut().try_for_each(|gated| gated.resize(backend, tokens))?;
        for tensor in [last, last_norm, logits] {
            backend.resize(tensor, outputs)?;
        }
        Ok(())
    }

    /// `logits = Head · rms(x)` where the step wants them.
    pub(crate) fn head(&mut self, backend: &B, step: &B::Step, ends: &Ends<B>, eps: f32) -> Result<(), Error> {
        backend.outputs(step, &self.x, &mut self.last)?;
        let logits = &mut [(ends.head(), &mut self.logits)];
        Ok(backend.project_norm(&self.last, (&ends.norm, eps), &mut self.last_norm, logits)?)
    }
}

impl<B: Backend> Gated<B> {
    pub(crate) fn resize(&mut self, backend: &B, tokens: usize) -> Result<(), Error> {
        backend.resize(&mut self.gate, tokens)?;
        Ok(backend.resize(&mut self.up, tokens)?)
    }
}

/// Activations of attention with heads of one shape: `[tokens, …]`.
pub(crate) struct Heads<B: Backend> {
    pub(crate) q: B::Tensor,
    pub(crate) k: B::Tensor,
    pub(crate) v: B::Tensor,
    pub(crate) attended: B::Tensor,
    /// The rotations of the step's positions.
    pub(crate) angles: B::Tensor,
    dim: usize,
}

impl<B: Backend> Heads<B> {
    /// For so many heads of queries and of keys and values, of `dim` values each, of which `rotated` are rotated.
    pub(crate) fn new(
        backend: &B,
        options: &LoadOptions<'_>,
        [heads, kv_heads]: [usize; 2],
        [dim, rotated]: [usize; 2],
    ) -> Result<Self, Error> {
        let tokens = |width| backend.tensor(options.max_tokens, width);
        let (q, kv) = (heads * dim, kv_heads * dim);
        Ok(Self { q: tokens(q)?, k: tokens(kv)?, v: tokens(kv)?, attended: tokens(q)?, angles: tokens(rotated)?, dim })
    }

    /// Gives every tensor the rows of a step.
    pub(crate) fn resize(&mut self, backend: &B, step: &B::Step) -> Result<(), Error> {
        let tokens = backend.rows(step).0;
        let Self { q, k, v, attended, angles, .. } = self;
        Ok([q, k, v, attended, angles].into_iter().try_for_each(|tensor| backend.resize(tensor, tokens))?)
    }

    /// Rotates queries and keys and stores keys and values.
    pub(crate) fn append(
        &mut self,
        backend: &B,
        step: &B::Step,
        pages: &mut B::Pages,
        slot: Slot,
    ) -> Result<(), Error> {
        let Self { q, k, v, angles, dim, .. } = self;
        Ok(backend.rope_append(step, pages, slot, (q, k, v), (angles, *dim))?)
    }
}

/// A step in work: what every verb of a layer needs.
pub(crate) struct Run<'a, B: Backend> {
    pub(crate) backend: &'a B,
    pub(crate) step: &'a B::Step,
    pub(crate) pages: &'a mut B::Pages,
}
