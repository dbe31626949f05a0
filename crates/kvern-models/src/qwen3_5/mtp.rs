//! The multi-token-prediction head of Qwen3.5: a layer of full attention that guesses the token after the next.
//!
//! ```text
//! u = Fc · [rms(embed(token p + 1)) | rms(hidden p)]      hidden: the trunk's, after its final norm
//! u = the layer, whose keys and values are a column of the head's own, at p
//! guess of token p + 2 = Head · rms(u)
//! ```
//!
//! So the head is one token behind its row. Its columns are a companion group with a lag of 1, and the hidden state that it waits with from one step to the
//! next is a recurrent state: a convolution with the kernel `[1, 0]` shifts hidden states by one token. A guess on a guess takes the head's own
//! normed output for the hidden state.

use kvern_backend::{Backend, Slot};
use kvern_state::{Codec, GroupSpec};

use super::{Config, Full, Layer, Mixer, Workspace, load_full};
use crate::loader::Loader;
use crate::{Error, LoadOptions};

pub(super) struct Mtp<B: Backend> {
    embed_norm: B::Vector,
    hidden_norm: B::Vector,
    /// The halves of `fc`.
    fc_embed: B::Linear,
    fc_hidden: B::Linear,
    layer: Layer<B>,
    norm: B::Vector,
    /// Where the hidden state of the row's last token waits.
    carry: Slot,
    /// The kernel `[1, 0]`.
    shift: B::Vector,
    /// `[tokens, hidden]`: embeddings, the hidden states of the tokens before, and the head's normed output.
    embedded: B::Tensor,
    shifted: B::Tensor,
    out: B::Tensor,
}

/// What a row remembers for the head: its columns, and the hidden state.
pub(super) fn states(config: &Config, own: Codec, options: &LoadOptions<'_>) -> [GroupSpec; 2] {
    let attention = |codecs| GroupSpec::attention(1, config.kv_heads, config.head_dim, config.head_dim, codecs);
    // A layer by itself, neither first nor last of the model's.
    let columns = options.kv.apply(config.layers, 2 * config.layers + 1, own, attention);
    [columns.companion(1), GroupSpec::recurrent(1, &[("hidden", config.hidden)])]
}

impl<B: Backend> Mtp<B> {
    pub(super) fn load(
        loader: &mut Loader<'_, B>,
        config: &Config,
        [columns, carry]: [Slot; 2],
        options: &LoadOptions<'_>,
    ) -> Result<Self, Error> {
        let (backend, hidden, ffn) = (loader.backend, config.hidden, config.intermediate);
        // A converter may have added 1 to the norms of the trunk and left these as they were. Of a head that it has treated, no norm has a mean near 0.
        let names = ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "layers.0.input_layernorm", "norm"];
        let mut lowest = f32::INFINITY;
        for name in names {
            let weights = loader.take(&format!("mtp.{name}.weight"), &[hidden])?.to_vec();
            lowest = lowest.min(weights.iter().sum::<f32>() / hidden as f32);
        }
        let offset = if lowest < 0.5 { 1.0 } else { 0.0 };
        let mixer: Full<B> = load_full(loader, config, "mtp.layers.0.self_attn", offset)?;
        let fc = |loader: &mut Loader<'_, B>, range| -> Result<B::Linear, Error> {
            let fc = loader.take("mtp.fc.weight", &[hidden, 2 * hidden])?;
            Ok(backend.linear(fc.columns(range)?, None)?)
        };
        let mut norm = |name: &str| loader.norm(&format!("mtp.{name}.weight"), hidden, offset);
        let (embed_norm, hidden_norm) = (norm("pre_fc_norm_embedding")?, norm("pre_fc_norm_hidden")?);
        let (input_norm, post_norm) = (norm("layers.0.input_layernorm")?, norm("layers.0.post_attention_layernorm")?);
        let norm = norm("norm")?;
        let mut linear = |part: &str, shape| loader.linear(&format!("mtp.layers.0.mlp.{part}"), shape, false, None);
        let layer = Layer {
            slot: columns,
            input_norm,
            mixer: Mixer::Full(mixer),
            post_norm,
            gate: linear("gate_proj", [ffn, hidden])?,
            up: linear("up_proj", [ffn, hidden])?,
            down: linear("down_proj", [hidden, ffn])?,
        };
        let tokens = || backend.tensor(options.max_tokens, hidden);
        Ok(Self {
            embed_norm,
            hidden_norm,
            fc_embed: fc(loader, 0..hidden)?,
            fc_hidden: fc(loader, hidden..2 * hidden)?,
            layer,
            norm,
            carry,
            shift: backend.vector(&[vec![1.0; hidden], vec![0.0; hidden]].concat())?,
            embedded: tokens()?,
            shifted: tokens()?,
            out: tokens()?,
        })
    }

    pub(super) fn linears(&self) -> Vec<&B::Linear> {
        [self.layer.linears(), vec![&self.fc_embed, &self.fc_hidden]].concat()
    }

    /// Takes the trunk's hidden states of a step, and keeps the last one of each row for the next step.
    pub(super) fn carry(
        &mut self,
        backend: &B,
        step: &B::Step,
        pages: &mut B::Pages,
        hidden: &B::Tensor,
    ) -> Result<(), Error> {
        backend.resize(&mut self.shifted, backend.rows(step).0)?;
        Ok(backend.convolve(step, pages, (self.carry, 0), &self.shift, hidden, &mut self.shifted)?)
    }

    /// Runs the head, and leaves its normed output at the step's outputs in `w.base.last_norm`.
    pub(super) fn run(
        &mut self,
        backend: &B,
        step: &B::Step,
        pages: &mut B::Pages,
        (config, embed, lengths): (&Config, &B::Linear, &[B::Vector; 2]),
        guess: usize,
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
        backend.rms_norm(hidden, &self.hidden_norm, config.eps, &mut w.base.h)?;
        backend.rms_norm_in_place(&mut self.embedded, &self.embed_norm, config.eps)?;
        backend.project(&self.embedded, &mut [(&self.fc_embed, &mut w.base.x)])?;
        backend.project_add(&w.base.h, &self.fc_hidden, &mut w.base.x)?;
        self.layer.run(backend, step, pages, (config, lengths), w)?;
        backend.resize(&mut self.out, tokens)?;
        backend.rms_norm(&w.base.x, &self.norm, config.eps, &mut self.out)?;
        Ok(backend.outputs(step, &self.out, &mut w.base.last_norm)?)
    }
}
