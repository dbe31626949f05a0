//! Model graphs: one file per family, written in the verbs of [`Backend`].
//!
//! **What.** [`load`] reads a checkpoint's configuration, looks its `model_type` up in the registry and builds the graph with all
//! weights packed. A [`Model`] turns a step plan into logits.
//!
//! **Why.** A graph is a straight list of verbs over a workspace of fixed size, so the same list runs on every backend.
//!
//! **Invariants.** Every tensor of the checkpoint is used, or loading fails and names one that is not. A graph allocates nothing after
//! loading.
//!
//! ```no_run
//! use kvern_backend::Reference;
//! use kvern_models::{LoadOptions, load};
//! let checkpoint = kvern_weights::Checkpoint::open("model.gguf".as_ref())?;
//! let model = load(&Reference::new(), checkpoint, &LoadOptions::default())?;
//! println!("{}: {} bytes of state per token", model.info().architecture, model.info().spec.row_bytes(64) / 64);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod config;
mod error;
mod experts;
mod gemma2;
mod gemma4;
mod gguf;
mod glm_moe_dsa;
mod gpt_oss;
mod llama;
mod loader;
mod mlp;
mod mtp;
mod qwen3_5;
pub mod rope;
mod workspace;

use std::ops::ControlFlow;

pub use error::Error;
use kvern_backend::Backend;
use kvern_state::{Codec, GroupSpec, StateSpec};
use kvern_weights::Checkpoint;

/// What is known of a model besides its weights.
#[derive(Debug, Clone)]
pub struct Info {
    /// The `model_type`, as Hugging Face names it.
    pub architecture: String,
    /// Layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Number of token ids.
    pub vocab: usize,
    /// The longest row, in tokens.
    pub context: usize,
    /// The state that a row holds.
    pub spec: StateSpec,
    /// Names the weights and the configuration, so that state of another model is not mistaken for this one's.
    pub fingerprint: String,
    /// How large the weights are.
    pub weights: Weights,
}

/// How large a model's weights are.
#[derive(Debug, Clone, Copy, Default)]
pub struct Weights {
    /// Bytes of all packed weights.
    pub bytes: usize,
    /// Bytes of packed weights that a step of one token reads, the head included; an embedding that is no head is not, and of experts those are that
    /// a token is routed to.
    pub step_bytes: usize,
    /// Weights that every token is multiplied with: those of all matrices but embedding and head, and of experts those that it is routed to.
    pub layer_parameters: usize,
}

/// A loaded graph.
pub trait Model<B: Backend>: Send {
    /// What is known of the model.
    fn info(&self) -> &Info;

    /// Runs a step: appends the step's tokens to the state behind `pages` and computes logits `[outputs, vocab]` at the tokens the
    /// plan names, in its order.
    ///
    /// # Errors
    /// The backend's.
    fn forward(&mut self, backend: &B, step: &B::Step, pages: &mut B::Pages) -> Result<&B::Tensor, Error>;

    /// The logits that the last [`Self::forward`] computed.
    fn logits(&self) -> &B::Tensor;

    /// Runs the model's draft head, if it was loaded with one: logits `[outputs, vocab]` of what follows on each output's token, as the head guesses.
    /// `guess` is 0 for a step that [`Self::forward`] has just run, in which the head stores what it makes of the real hidden states; `n` for
    /// the `n`th of a round's drafts, each of which has the same rows and takes the guess before it for its token.
    ///
    /// # Errors
    /// The backend's.
    fn draft(
        &mut self,
        _backend: &B,
        _step: &B::Step,
        _pages: &mut B::Pages,
        _guess: usize,
    ) -> Result<Option<&B::Tensor>, Error> {
        Ok(None)
    }
}

/// How keys and values are stored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KvPolicy {
    /// Codecs of keys and values; the weights' own type (`f16` for quantized weights) when absent.
    pub codecs: Option<(Codec, Codec)>,
    /// Other codecs for so many of the first layers and as many of the last.
    pub edges: Option<(usize, (Codec, Codec))>,
    /// Store a row's columns in the weights' own type until it has so many, and then all of them as above.
    pub start: Option<usize>,
}

impl KvPolicy {
    /// The state of layer `index` of `layers`, made by `group` from codecs.
    fn apply(&self, index: usize, layers: usize, own: Codec, group: impl Fn((Codec, Codec)) -> GroupSpec) -> GroupSpec {
        let edge = self.edges.filter(|(count, _)| index < *count || index + count >= layers);
        let own = (own, own);
        let codecs = edge.map(|(_, codecs)| codecs).or(self.codecs).unwrap_or(own);
        match self.start {
            Some(start) if codecs != own => {
                let late = group(codecs).planes.iter().map(|plane| plane.codec).collect();
                group(own).late(start, late)
            }
            _ => group(codecs),
        }
    }
}

/// How a model is loaded.
#[derive(Clone, Copy)]
pub struct LoadOptions<'a> {
    /// How keys and values are stored.
    pub kv: KvPolicy,
    /// The most tokens of one step.
    pub max_tokens: usize,
    /// The most tokens of one step that can have logits.
    pub max_outputs: usize,
    /// Tokens of a page.
    pub page: usize,
    /// Load the model's draft head too, if it has one. Its state then belongs to every row.
    pub draft: bool,
    /// Called with (tensors loaded, tensors in all); may stop the loading.
    pub progress: Option<&'a dyn Fn(usize, usize) -> ControlFlow<()>>,
}

impl Default for LoadOptions<'_> {
    fn default() -> Self {
        Self { kv: KvPolicy::default(), max_tokens: 512, max_outputs: 64, page: 64, draft: false, progress: None }
    }
}

/// Builds one family of models.
type Build<B> = fn(&B, Checkpoint, &LoadOptions<'_>) -> Result<Box<dyn Model<B>>, Error>;

/// Every `model_type` with the function that builds it, and the same models' names in GGUF files where those differ.
fn registry<B: Backend>() -> [(&'static str, Build<B>); 17] {
    [
        ("deepseek_v3", glm_moe_dsa::load),
        ("deepseek_v32", glm_moe_dsa::load),
        ("gemma2", gemma2::load),
        ("gemma4", gemma4::load),
        ("glm-dsa", glm_moe_dsa::load),
        ("glm_moe_dsa", glm_moe_dsa::load),
        ("gpt-oss", gpt_oss::load),
        ("gpt_oss", gpt_oss::load),
        ("llama", llama::load),
        ("mistral", llama::load),
        ("qwen2", llama::load),
        ("qwen3", llama::load),
        ("qwen35", qwen3_5::load),
        ("qwen35moe", qwen3_5::load),
        ("qwen3_5", qwen3_5::load),
        ("qwen3_5_moe", qwen3_5::load),
        ("qwen3_next", qwen3_5::load),
    ]
}

/// The names that the registry knows.
pub fn architectures() -> impl Iterator<Item = &'static str> {
    registry::<kvern_backend::Reference>().into_iter().map(|(name, _)| name)
}

/// Loads a model.
///
/// # Errors
/// [`Error`] for an architecture that is not known, a configuration that makes no sense, or weights that do not fit it.
pub fn load<B: Backend>(
    backend: &B,
    checkpoint: Checkpoint,
    options: &LoadOptions<'_>,
) -> Result<Box<dyn Model<B>>, Error> {
    let name = config::model_type(checkpoint.source())?;
    let entry = registry::<B>().into_iter().find(|(known, _)| *known == name);
    let (_, build) = entry.ok_or_else(|| Error::Architecture { found: name, known: architectures().collect() })?;
    build(backend, checkpoint, options)
}
