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

use crate::config::{Fields, check_multiple};
use crate::gguf;
use crate::loader::{Loader, state_codec};
use crate::rope::Rope;
use crate::workspace::{Widths, Workspace};
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
    hidden: usize,
    layers: usize,
    intermediate: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    vocab: usize,
    context: usize,
    window: usize,
    /// Which layers see a window.
    sliding: Vec<bool>,
    /// Factor on scores.
    scale: f32,
    /// Caps of scores and of logits.
    score_cap: Option<f32>,
    logit_cap: Option<f32>,
    eps: f32,
    rope: Rope,
    /// What is added to the weights of norms.
    norm_offset: f32,
}

impl Config {
    fn from_json(config: &Value) -> Result<Self, Error> {
        let fields = Fields::new(config, "");
        let heads = fields.needed("num_attention_heads")?;
        let layers = fields.needed("num_hidden_layers")?;
        let head_dim = fields.count("head_dim")?.unwrap_or(256);
        let context = fields.count("max_position_embeddings")?.unwrap_or(8192);
        let scalar = fields.float("query_pre_attn_scalar")?.unwrap_or(256.0);
        let wrong = |field: &str, expected, found: String| Error::Config { field: field.into(), expected, found };
        if scalar <= 0.0 {
            return Err(wrong("query_pre_attn_scalar", "a positive number", scalar.to_string()));
        }
        let cap = |field: &str| match fields.float(field)? {
            Some(cap) if cap <= 0.0 => Err(wrong(field, "a positive number", cap.to_string())),
            cap => Ok(cap.map(|cap| cap as f32)),
        };
        if let Some(found) = fields.text("hidden_activation")?.filter(|name| *name != "gelu_pytorch_tanh") {
            return Err(wrong("hidden_activation", "gelu_pytorch_tanh", found.into()));
        }
        let kinds = ["sliding_attention", "full_attention"];
        let sliding = fields.layer_types(layers, kinds, "sliding_attention or full_attention")?;
        let sliding = sliding.unwrap_or_else(|| (0..layers).map(|layer| layer % 2 == 0).collect());
        let kv_heads = fields.count("num_key_value_heads")?.unwrap_or(heads);
        check_multiple("num_attention_heads", heads, "a multiple of num_key_value_heads", kv_heads)?;
        Ok(Self {
            hidden: fields.needed("hidden_size")?,
            layers,
            intermediate: fields.needed("intermediate_size")?,
            heads,
            kv_heads,
            head_dim,
            vocab: fields.needed("vocab_size")?,
            context,
            window: fields.count("sliding_window")?.unwrap_or(4096),
            sliding,
            scale: (1.0 / scalar.sqrt()) as f32,
            score_cap: cap("attn_logit_softcapping")?,
            logit_cap: cap("final_logit_softcapping")?,
            eps: fields.float("rms_norm_eps")?.unwrap_or(1e-6) as f32,
            rope: Rope::from_config(fields, head_dim, context)?,
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
        let scalar = if config.layers == 46 { config.hidden / config.heads } else { config.head_dim };
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
    gate: B::Linear,
    up: B::Linear,
    down: B::Linear,
    post_mlp_norm: B::Vector,
    slot: Slot,
}

struct Gemma2<B: Backend> {
    config: Config,
    info: Info,
    embed: B::Linear,
    norm: B::Vector,
    layers: Vec<Layer<B>>,
    frequencies: B::Vector,
    workspace: Workspace<B>,
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
    let Config { hidden, head_dim, intermediate: ffn, norm_offset, .. } = config;
    let (q_width, kv_width) = (config.heads * head_dim, config.kv_heads * head_dim);
    let embed = loader.take("model.embed_tokens.weight", &[config.vocab, hidden])?;
    let own = state_codec(&embed);
    let embed = backend.linear(embed, None)?;
    // A head that is stored although it is the embedding.
    loader.checkpoint.ignore("lm_head.weight");
    let states = config.sliding.iter().enumerate().map(|(index, &sliding)| {
        options.kv.apply(index, config.layers, own, |codecs| {
            let group = GroupSpec::attention(1, config.kv_heads, head_dim, head_dim, codecs);
            if sliding { group.windowed(Window { size: config.window, sinks: 0 }) } else { group }
        })
    });
    let (spec, slots) = StateSpec::from_layers(options.page, states.collect())?;
    let mut layers = Vec::with_capacity(config.layers);
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
            gate: linear("mlp.gate_proj", [ffn, hidden])?,
            up: linear("mlp.up_proj", [ffn, hidden])?,
            down: linear("mlp.down_proj", [hidden, ffn])?,
            post_mlp_norm,
            slot,
        });
    }
    let norm = loader.norm("model.norm.weight", hidden, norm_offset)?;
    loader.checkpoint.finish()?;
    let linears = layers.iter().flat_map(|l| [&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down]);
    let weight_bytes = backend.linear_bytes(&embed) + linears.map(|l| backend.linear_bytes(l)).sum::<usize>();
    let info = Info {
        architecture: "gemma2".into(),
        layers: config.layers,
        hidden,
        heads: config.heads,
        vocab: config.vocab,
        context: config.context,
        spec,
        fingerprint,
        weight_bytes,
        step_weight_bytes: weight_bytes,
        layer_parameters: config.layers * hidden * (2 * q_width + 2 * kv_width + 3 * ffn),
    };
    let widths =
        Widths { hidden, q: q_width, kv: kv_width, intermediate: ffn, angles: config.rope.dims, vocab: config.vocab };
    let workspace = Workspace::new(backend, options, &widths)?;
    let frequencies = backend.vector(&config.rope.frequencies())?;
    Ok(Box::new(Gemma2 { config, info, embed, norm, layers, frequencies, workspace }))
}

impl<B: Backend> Model<B> for Gemma2<B> {
    fn info(&self) -> &Info {
        &self.info
    }

    fn logits(&self) -> &B::Tensor {
        &self.workspace.logits
    }

    fn forward(&mut self, backend: &B, step: &B::Step, pages: &mut B::Pages) -> Result<&B::Tensor, Error> {
        let Self { config, workspace: w, .. } = self;
        w.resize(backend, step)?;
        backend.embed(step, &self.embed, (config.hidden as f32).sqrt(), &mut w.x)?;
        backend.rope_angles(step, &self.frequencies, config.rope.attention_factor(), &mut w.angles)?;
        let (scale, softcap) = (config.scale, config.score_cap);
        for layer in &self.layers {
            let qkv = &mut [(&layer.q, &mut w.q), (&layer.k, &mut w.k), (&layer.v, &mut w.v)];
            backend.project_norm(&w.x, (&layer.input_norm, config.eps), &mut w.h, qkv)?;
            let rotation = (&w.angles, config.head_dim);
            backend.rope_append(step, pages, layer.slot, (&mut w.q, &mut w.k, &w.v), rotation)?;
            let attention = Attention { slot: layer.slot, heads: config.heads, scale, softcap };
            backend.attend(step, pages, attention, None, &w.q, &mut w.attended)?;
            backend.project(&w.attended, &mut [(&layer.o, &mut w.h)])?;
            backend.rms_norm_add(&w.h, &layer.post_attention_norm, config.eps, &mut w.x)?;
            let gated = &mut [(&layer.gate, &mut w.gate), (&layer.up, &mut w.up)];
            backend.project_norm(&w.x, (&layer.pre_mlp_norm, config.eps), &mut w.h, gated)?;
            backend.gate(Activation::GeluTanh, &mut w.gate, &w.up)?;
            backend.project(&w.gate, &mut [(&layer.down, &mut w.h)])?;
            backend.rms_norm_add(&w.h, &layer.post_mlp_norm, config.eps, &mut w.x)?;
        }
        w.head(backend, step, &self.norm, config.eps, &self.embed)?;
        if let Some(cap) = config.logit_cap {
            backend.softcap(cap, &mut w.logits)?;
        }
        Ok(&w.logits)
    }
}
