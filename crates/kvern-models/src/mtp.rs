//! Multi-token-prediction heads: a layer that guesses the token after the next (DeepSeek-V3, arXiv 2412.19437, section 2.2).
//!
//! ```text
//! u = Fc · [rms(embed(token p + 1)) | rms(hidden p)]      hidden: the trunk's, after its final norm
//! u = the layer, whose state is a column of the head's own, at p
//! guess of token p + 2 = Head · rms(u)
//! ```
//!
//! So the head is one token behind its row. Its columns are a companion group with a lag of 1, and the hidden state that it waits with from one step to the
//! next is a recurrent state: a convolution with the kernel `[1, 0]` shifts hidden states by one token. A guess on a guess takes the head's own
//! normed output for the hidden state.

use kvern_backend::{Backend, Slot};
use kvern_state::GroupSpec;

use crate::loader::Loader;
use crate::workspace::Workspace;
use crate::{Error, LoadOptions};

/// A head around a layer of its family.
pub(crate) struct Mtp<B: Backend, L> {
    embed_norm: B::Vector,
    hidden_norm: B::Vector,
    /// The halves of `Fc`.
    fc_embed: B::Linear,
    fc_hidden: B::Linear,
    pub(crate) layer: L,
    norm: B::Vector,
    /// Where the hidden state of the row's last token waits.
    carry: Slot,
    /// The kernel `[1, 0]`.
    shift: B::Vector,
    /// `[tokens, hidden]`: embeddings, the hidden states of the tokens before, and the head's normed output.
    embedded: B::Tensor,
    shifted: B::Tensor,
    out: B::Tensor,
    eps: f32,
}

/// What a head's tensors are called, and what its norms' weights lack.
pub(crate) struct Names {
    pub(crate) embed_norm: String,
    pub(crate) hidden_norm: String,
    pub(crate) fc: String,
    pub(crate) norm: String,
    pub(crate) offset: f32,
}

/// The state of the row's last token, which the head waits with.
pub(crate) fn carry(hidden: usize) -> GroupSpec {
    GroupSpec::recurrent(1, &[("hidden", hidden)])
}

impl<B: Backend, L> Mtp<B, L> {
    pub(crate) fn load(
        loader: &mut Loader<'_, B>,
        names: &Names,
        (hidden, eps): (usize, f32),
        (layer, carry): (L, Slot),
        options: &LoadOptions<'_>,
    ) -> Result<Self, Error> {
        let backend = loader.backend;
        let fc = |loader: &mut Loader<'_, B>, range| -> Result<B::Linear, Error> {
            let fc = loader.take(&names.fc, &[hidden, 2 * hidden])?.columns(range)?;
            loader.pack(fc, None)
        };
        let tokens = || backend.tensor(options.max_tokens, hidden);
        Ok(Self {
            embed_norm: loader.norm(&names.embed_norm, hidden, names.offset)?,
            hidden_norm: loader.norm(&names.hidden_norm, hidden, names.offset)?,
            fc_embed: fc(loader, 0..hidden)?,
            fc_hidden: fc(loader, hidden..2 * hidden)?,
            layer,
            norm: loader.norm(&names.norm, hidden, names.offset)?,
            carry,
            shift: backend.vector(&[vec![1.0; hidden], vec![0.0; hidden]].concat())?,
            embedded: tokens()?,
            shifted: tokens()?,
            out: tokens()?,
            eps,
        })
    }

    /// Takes the trunk's hidden states of a step, and keeps the last one of each row for the next step.
    pub(crate) fn carry(
        &mut self,
        backend: &B,
        step: &B::Step,
        pages: &mut B::Pages,
        hidden: &B::Tensor,
    ) -> Result<(), Error> {
        backend.resize(&mut self.shifted, backend.rows(step).0)?;
        Ok(backend.convolve(step, pages, (self.carry, 0), &self.shift, hidden, &mut self.shifted)?)
    }

    /// What the head's layer is given, in `w.x`; see [`crate::Model::draft`] for `guess`.
    pub(crate) fn enter(
        &mut self,
        backend: &B,
        step: &B::Step,
        pages: &mut B::Pages,
        (embed, guess): (&B::Linear, usize),
        w: &mut Workspace<B>,
    ) -> Result<(), Error> {
        let (tokens, _) = backend.rows(step);
        backend.resize(&mut self.embedded, tokens)?;
        backend.embed(step, embed, 1.0, &mut self.embedded)?;
        if guess == 1 {
            // A guess adds no token, so that nothing but the state of the last one comes out; what goes in does not matter.
            backend.resize(&mut self.shifted, tokens)?;
            backend.convolve(step, pages, (self.carry, 0), &self.shift, &self.embedded, &mut self.shifted)?;
        }
        let hidden = if guess < 2 { &self.shifted } else { &self.out };
        backend.rms_norm(hidden, &self.hidden_norm, self.eps, &mut w.h)?;
        backend.rms_norm_in_place(&mut self.embedded, &self.embed_norm, self.eps)?;
        backend.project(&self.embedded, &mut [(&self.fc_embed, &mut w.x)])?;
        Ok(backend.project_add(&w.h, &self.fc_hidden, &mut w.x)?)
    }

    /// Logits at the step's outputs, from what the layer has left in `w.x`.
    pub(crate) fn leave(
        &mut self,
        backend: &B,
        step: &B::Step,
        head: &B::Linear,
        w: &mut Workspace<B>,
    ) -> Result<(), Error> {
        backend.resize(&mut self.out, backend.rows(step).0)?;
        backend.rms_norm(&w.x, &self.norm, self.eps, &mut self.out)?;
        backend.outputs(step, &self.out, &mut w.last_norm)?;
        Ok(backend.project(&w.last_norm, &mut [(head, &mut w.logits)])?)
    }
}
