//! Gemma 2.
//!
//! ```text
//! x = sqrt(hidden) * embed(tokens)
//! each layer:  x += rms(O · attend(rope(q), rope(k), v))             with q, k, v = Q, K, V · rms(x)
//!              x += rms(Down · (gelu(Gate · h) * (Up · h)))          with h = rms(x)
//! logits = cap * tanh(Embed · rms(x) / cap)
//! ```
//!
//! Scores are scaled by `query_pre_attn_scalar^-1/2` and capped before anything is left out of view. Layers alternate between a sliding window and full
//! attention, beginning with the window (mlx-lm attends everything everywhere; Hugging Face transformers decides). Norms multiply by
//! `1 + weight`; GGUF files hold that sum already. The embedding is also the head.

use kvern_backend::{Activation, Attention, Backend, Slot};
use kvern_state::{GroupSpec, StateSpec, Window};
use kvern_weights::gguf::Metadata;
use kvern_weights::{Checkpoint, Source};
use serde_json::{Value, json};

use crate::config::{Fields, Outline};
use crate::gguf;
use crate::loader::{Ends, Loader};
use crate::mlp::Mlp;
use crate::rope::Rope;
use crate::workspace::{Heads, Workspace};
use crate::{Error, Info, LoadOptions, Model};

/// The parts of a layer that have other names in GGUF files than elsewhere.
const GGUF_PARTS: [(&str, &str); 3] = [
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

/// The shapes and factors of a model.
#[derive(Debug, Clone)]
struct Config {
    outline: Outline,
    intermediate: usize,
    kv_heads: usize,
    head_dim: usize,
    window: usize,
    /// Which layers see a window.
    sliding: Vec<bool>,
    /// Factor on scores.
    scale: f32,
    /// Caps of scores and of logits.
    score_cap: Option<f32>,
    logit_cap: Option<f32>,
    rope: Rope,
    /// What is added to the weights of norms.
    norm_offset: f32,
}

impl Config {
    fn from_json(config: &Value) -> Result<Self, Error> {
        let fields = Fields::new(config, "");
        // The embedding is the head, whatever is said.
        let outline = Outline { tied: Some(true), ..Outline::new(fields, 8192)? };
        let head_dim = fields.count("head_dim")?.unwrap_or(256);
        let scalar = fields.positive("query_pre_attn_scalar")?.unwrap_or(256.0);
        fields.only("hidden_activation", "gelu_pytorch_tanh")?;
        let kinds = ["sliding_attention", "full_attention"];
        let sliding = fields.layer_types(outline.layers, kinds, "sliding_attention or full_attention")?;
        let sliding = sliding.unwrap_or_else(|| (0..outline.layers).map(|layer| layer % 2 == 0).collect());
        Ok(Self {
            intermediate: fields.needed("intermediate_size")?,
            kv_heads: outline.kv_heads(fields)?,
            head_dim,
            window: fields.count("sliding_window")?.unwrap_or(4096),
            sliding,
            scale: (1.0 / scalar.sqrt()) as f32,
            score_cap: fields.positive("attn_logit_softcapping")?.map(|cap| cap as f32),
            logit_cap: fields.positive("final_logit_softcapping")?.map(|cap| cap as f32),
            rope: Rope::from_config(fields, head_dim, outline.context)?,
            outline,
            norm_offset: 1.0,
        })
    }

    fn from_gguf(metadata: &Metadata) -> Result<Self, Error> {
        let mut config = gguf::config("gemma2", metadata)?;
        let float = |key: &str| metadata.float(&format!("gemma2.{key}"));
        config["attn_logit_softcapping"] = json!(float("attn_logit_softcapping")?);
        config["final_logit_softcapping"] = json!(float("final_logit_softcapping")?);
        config["sliding_window"] = json!(metadata.int("gemma2.attention.sliding_window")?);
        let mut config = Self::from_json(&config)?;
        // Files do not say the scalar. The 27 B model, of 46 layers, has its width by heads; the others the head dimension.
        let Outline { layers, hidden, heads, .. } = config.outline;
        let scalar = if layers == 46 { hidden / heads } else { config.head_dim };
        config.scale = (scalar as f32).sqrt().recip();
        config.norm_offset = 0.0;
        Ok(config)
    }
}

struct Layer<B: Backend> {
    input_norm: B::Vector,
    q: B::Linear,
    k: B::Linear,
    v: B::Linear,
    o: B::Linear,
    post_attention_norm: B::Vector,
    pre_mlp_norm: B::Vector,
    mlp: Mlp<B>,
    post_mlp_norm: B::Vector,
    slot: Slot,
}

struct Gemma2<B: Backend> {
    config: Config,
    info: Info,
    ends: Ends<B>,
    layers: Vec<Layer<B>>,
    frequencies: B::Vector,
    workspace: Workspace<B>,
    heads: Heads<B>,
}

/// Loads the model.
pub(crate) fn load<B: Backend>(
    backend: &B,
    mut checkpoint: Checkpoint,
    options: &LoadOptions<'_>,
) -> Result<Box<dyn Model<B>>, Error> {
    let config = match checkpoint.source() {
        Source::Directory { config, .. } => Config::from_json(config)?,
        Source::Gguf(metadata) => Config::from_gguf(metadata)?,
    };
    let fingerprint = checkpoint.fingerprint();
    if matches!(checkpoint.source(), Source::Gguf(_)) {
        checkpoint.rename(|name| gguf::tensor(name, &GGUF_PARTS))?;
    }
    let mut loader = Loader::new(backend, checkpoint, options);
    let Outline { hidden, heads, layers: count, .. } = config.outline;
    let Config { kv_heads, head_dim: dim, intermediate, norm_offset, .. } = config;
    let (q_width, kv_width) = (heads * dim, kv_heads * dim);
    let ends = loader.ends(&config.outline, norm_offset)?;
    let states = config.sliding.iter().enumerate().map(|(index, &sliding)| {
        options.kv.apply(index, count, ends.codec, |codecs| {
            let group = GroupSpec::attention(1, kv_heads, dim, dim, codecs);
            if sliding { group.windowed(Window { size: config.window, sinks: 0 }) } else { group }
        })
    });
    let (spec, slots) = StateSpec::from_layers(options.page, states.collect())?;
    let mut layers = Vec::with_capacity(count);
    for (index, &slot) in slots.iter().enumerate() {
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let mut norm = |part: &str| loader.norm(&name(&format!("{part}.weight")), hidden, norm_offset);
        let (input_norm, post_attention_norm) = (norm("input_layernorm")?, norm("post_attention_layernorm")?);
        let (pre_mlp_norm, post_mlp_norm) = (norm("pre_feedforward_layernorm")?, norm("post_feedforward_layernorm")?);
        let mut linear = |part: &str, shape| loader.linear(&name(part), shape, false, None);
        layers.push(Layer {
            input_norm,
            q: linear("self_attn.q_proj", [q_width, hidden])?,
            k: linear("self_attn.k_proj", [kv_width, hidden])?,
            v: linear("self_attn.v_proj", [kv_width, hidden])?,
            o: linear("self_attn.o_proj", [hidden, q_width])?,
            post_attention_norm,
            pre_mlp_norm,
            mlp: Mlp::load(&mut loader, &name("mlp"), [hidden, intermediate], false)?,
            post_mlp_norm,
            slot,
        });
    }
    let info = config.outline.info("gemma2", spec, fingerprint, loader.finish()?);
    let workspace = Workspace::new(backend, options, &config.outline, &[intermediate])?;
    let heads = Heads::new(backend, options, [heads, kv_heads], [dim, config.rope.dims])?;
    let frequencies = backend.vector(&config.rope.frequencies())?;
    Ok(Box::new(Gemma2 { config, info, ends, layers, frequencies, workspace, heads }))
}

impl<B: Backend> Model<B> for Gemma2<B> {
    fn info(&self) -> &Info {
        &self.info
    }

    fn logits(&self) -> &B::Tensor {
        &self.workspace.logits
    }

    fn forward(&mut self, backend: &B, step: &B::Step, pages: &mut B::Pages) -> Result<&B::Tensor, Error> {
        let Self { config, ends, workspace: w, heads: a, .. } = self;
        let Outline { hidden, heads, eps, .. } = config.outline;
        w.resize(backend, step)?;
        a.resize(backend, step)?;
        backend.embed(step, &ends.embed, (hidden as f32).sqrt(), &mut w.x)?;
        backend.rope_angles(step, &self.frequencies, config.rope.attention_factor(), &mut a.angles)?;
        let (scale, softcap) = (config.scale, config.score_cap);
        for layer in &self.layers {
            let qkv = &mut [(&layer.q, &mut a.q), (&layer.k, &mut a.k), (&layer.v, &mut a.v)];
            backend.project_norm(&w.x, (&layer.input_norm, eps), &mut w.h, qkv)?;
            a.append(backend, step, pages, layer.slot)?;
            let attention = Attention { slot: layer.slot, heads, scale, softcap };
            backend.attend(step, pages, attention, None, &a.q, &mut a.attended)?;
            backend.project(&a.attended, &mut [(&layer.o, &mut w.h)])?;
            backend.rms_norm_add(&w.h, &layer.post_attention_norm, eps, &mut w.x)?;
            layer.mlp.set(backend, Activation::GeluTanh, (&layer.pre_mlp_norm, eps), w)?;
            backend.rms_norm_add(&w.h, &layer.post_mlp_norm, eps, &mut w.x)?;
        }
        w.head(backend, step, ends, eps)?;
        if let Some(cap) = config.logit_cap {
            backend.softcap(cap, &mut w.logits)?;
        }
        Ok(&w.logits)
    }
}
