//! The Llama family: `llama` (SmolLM2 and MiniCPM5 among them), `mistral`, `qwen2`, `qwen3`.
//!
//! ```text
//! x = embed(tokens)
//! each layer:  x += O · attend(rope(q), rope(k), v)      with q, k, v = Q, K, V · rms(x)
//!              x += Down · (silu(Gate · h) * (Up · h))   with h = rms(x)
//! logits = Head · rms(x)
//! ```
//!
//! `qwen2` adds biases to Q, K and V; `qwen3` normalizes each head of q and k before the rotation. Layers attend all columns or those of a sliding
//! window: all layers of a `mistral` with a window, those from `max_window_layers` on of a `qwen2` or `qwen3` that uses one.
//!
//! In GGUF files of the architecture `llama` the rows of Q and K are stored in the order of interleaved rotation; they are read back
//! into half-split order. Where sources disagree, Hugging Face transformers decides.

use kvern_backend::{Activation, Attention, Backend, Slot};
use kvern_state::{GroupSpec, StateSpec, Window};
use kvern_weights::gguf::Metadata;
use kvern_weights::{Checkpoint, Source};
use serde_json::Value;

use crate::config::{Fields, Outline, model_type};
use crate::gguf;
use crate::loader::{Ends, Loader};
use crate::mlp::Mlp;
use crate::rope::{Rope, Scaling};
use crate::workspace::{Heads, Workspace};
use crate::{Error, Info, LoadOptions, Model};

/// The shapes and switches of one model of the family.
#[derive(Debug, Clone)]
struct Config {
    outline: Outline,
    intermediate: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Columns that a layer attends, its own included, from layer `full_layers` on.
    window: Option<usize>,
    full_layers: usize,
    rope: Rope,
    qkv_bias: bool,
    output_bias: bool,
    mlp_bias: bool,
    qk_norm: bool,
    /// Whether the rows of Q and K are in interleaved order.
    interleaved: bool,
}

impl Config {
    fn from_json(name: &str, config: &Value) -> Result<Self, Error> {
        let fields = Fields::new(config, "");
        let outline = Outline::new(fields, 2048)?;
        let head_dim = fields.count("head_dim")?.unwrap_or(outline.hidden / outline.heads);
        let windowed = name == "mistral" || fields.flag("use_sliding_window")?.unwrap_or(false);
        let window = if windowed { fields.count("sliding_window")? } else { None };
        let full_layers = if name == "mistral" { 0 } else { fields.index("max_window_layers")?.unwrap_or(28) };
        let bias = fields.flag("attention_bias")?.unwrap_or(false);
        Ok(Self {
            intermediate: fields.needed("intermediate_size")?,
            kv_heads: outline.kv_heads(fields)?,
            head_dim,
            window,
            full_layers,
            rope: Rope::from_config(fields, head_dim, outline.context)?,
            qkv_bias: bias || name == "qwen2",
            output_bias: bias && name != "qwen2",
            mlp_bias: fields.flag("mlp_bias")?.unwrap_or(false),
            qk_norm: name == "qwen3",
            interleaved: false,
            outline,
        })
    }

    fn from_gguf(name: &str, metadata: &Metadata, checkpoint: &Checkpoint) -> Result<Self, Error> {
        let mut config = Self::from_json(name, &gguf::config(name, metadata)?)?;
        let int = |key: &str| metadata.int(&format!("{name}.{key}"));
        if let Some(dims) = int("rope.dimension_count")? {
            config.rope.dims = usize::try_from(dims).unwrap_or(0);
            config.rope = config.rope.checked(config.head_dim)?;
        }
        let has_bias = |part: &str| checkpoint.has(&format!("blk.0.{part}.bias"));
        config.qkv_bias = has_bias("attn_q");
        config.output_bias = has_bias("attn_output");
        config.mlp_bias = has_bias("ffn_down");
        config.interleaved = name == "llama";
        Ok(config)
    }

    /// File row of each row of a Q or K weight with `heads` heads, if the file's rows are interleaved.
    fn order(&self, heads: usize) -> Option<Vec<u32>> {
        let half = self.rope.dims / 2;
        let row = |head: usize, i: usize| {
            let within = if i < half {
                2 * i
            } else if i < 2 * half {
                2 * (i - half) + 1
            } else {
                i
            };
            (head * self.head_dim + within) as u32
        };
        self.interleaved.then(|| (0..heads).flat_map(|head| (0..self.head_dim).map(move |i| row(head, i))).collect())
    }
}

struct Layer<B: Backend> {
    input_norm: B::Vector,
    q: B::Linear,
    k: B::Linear,
    v: B::Linear,
    o: B::Linear,
    /// Norms of each head of q and k.
    qk_norm: Option<(B::Vector, B::Vector)>,
    post_norm: B::Vector,
    mlp: Mlp<B>,
    slot: Slot,
}

struct Llama<B: Backend> {
    config: Config,
    info: Info,
    ends: Ends<B>,
    layers: Vec<Layer<B>>,
    frequencies: B::Vector,
    workspace: Workspace<B>,
    heads: Heads<B>,
}

/// Loads a model of the family.
pub(crate) fn load<B: Backend>(
    backend: &B,
    mut checkpoint: Checkpoint,
    options: &LoadOptions<'_>,
) -> Result<Box<dyn Model<B>>, Error> {
    let architecture = model_type(checkpoint.source())?;
    let mut config = match checkpoint.source() {
        Source::Directory { config, .. } => Config::from_json(&architecture, config)?,
        Source::Gguf(metadata) => Config::from_gguf(&architecture, metadata, &checkpoint)?,
    };
    let fingerprint = checkpoint.fingerprint();
    if matches!(checkpoint.source(), Source::Gguf(_)) {
        checkpoint.rename(|name| gguf::tensor(name, &[]))?;
    }
    let mut loader = Loader::new(backend, checkpoint, options);
    if loader.checkpoint.has("rope_freqs.weight") {
        let divisors = loader.take("rope_freqs.weight", &[config.rope.dims / 2])?.to_vec();
        config.rope.scaling = Scaling::Divisors(divisors);
    }
    let Outline { hidden, layers: count, heads, .. } = config.outline;
    let Config { kv_heads, head_dim: dim, intermediate, mlp_bias, .. } = config;
    let (q_width, kv_width) = (heads * dim, kv_heads * dim);
    let ends = loader.ends(&config.outline, 0.0)?;
    let states = (0..count).map(|index| {
        let window = config.window.filter(|_| index >= config.full_layers);
        options.kv.apply(index, count, ends.codec, |codecs| {
            let group = GroupSpec::attention(1, kv_heads, dim, dim, codecs);
            window.map_or(group.clone(), |size| group.windowed(Window { size, sinks: 0 }))
        })
    });
    let (spec, slots) = StateSpec::from_layers(options.page, states.collect())?;
    let mut layers = Vec::with_capacity(count);
    for (index, &slot) in slots.iter().enumerate() {
        let name = |part: &str| format!("model.layers.{index}.{part}");
        // Older checkpoints store the frequencies that the graph computes.
        loader.checkpoint.ignore(&name("self_attn.rotary_emb.inv_freq"));
        let qk_norm = if config.qk_norm {
            let q = loader.vector(&name("self_attn.q_norm.weight"), dim)?;
            Some((q, loader.vector(&name("self_attn.k_norm.weight"), dim)?))
        } else {
            None
        };
        let (q_order, k_order) = (config.order(heads), config.order(kv_heads));
        layers.push(Layer {
            input_norm: loader.vector(&name("input_layernorm.weight"), hidden)?,
            q: loader.linear(&name("self_attn.q_proj"), [q_width, hidden], config.qkv_bias, q_order)?,
            k: loader.linear(&name("self_attn.k_proj"), [kv_width, hidden], config.qkv_bias, k_order)?,
            v: loader.linear(&name("self_attn.v_proj"), [kv_width, hidden], config.qkv_bias, None)?,
            o: loader.linear(&name("self_attn.o_proj"), [hidden, q_width], config.output_bias, None)?,
            qk_norm,
            post_norm: loader.vector(&name("post_attention_layernorm.weight"), hidden)?,
            mlp: Mlp::load(&mut loader, &name("mlp"), [hidden, intermediate], mlp_bias)?,
            slot,
        });
    }
    let info = config.outline.info(&architecture, spec, fingerprint, loader.finish()?);
    let workspace = Workspace::new(backend, options, &config.outline, &[intermediate])?;
    let heads = Heads::new(backend, options, [heads, kv_heads], [dim, config.rope.dims])?;
    let frequencies = backend.vector(&config.rope.frequencies())?;
    Ok(Box::new(Llama { config, info, ends, layers, frequencies, workspace, heads }))
}

impl<B: Backend> Model<B> for Llama<B> {
    fn info(&self) -> &Info {
        &self.info
    }

    fn logits(&self) -> &B::Tensor {
        &self.workspace.logits
    }

    fn forward(&mut self, backend: &B, step: &B::Step, pages: &mut B::Pages) -> Result<&B::Tensor, Error> {
        let Self { config, ends, workspace: w, heads: a, .. } = self;
        let Outline { heads, eps, .. } = config.outline;
        w.resize(backend, step)?;
        a.resize(backend, step)?;
        backend.embed(step, &ends.embed, 1.0, &mut w.x)?;
        backend.rope_angles(step, &self.frequencies, config.rope.attention_factor(), &mut a.angles)?;
        for layer in &self.layers {
            let scale = (config.head_dim as f32).sqrt().recip();
            let qkv = &mut [(&layer.q, &mut a.q), (&layer.k, &mut a.k), (&layer.v, &mut a.v)];
            backend.project_norm(&w.x, (&layer.input_norm, eps), &mut w.h, qkv)?;
            if let Some((q_norm, k_norm)) = &layer.qk_norm {
                backend.rms_norm_in_place(&mut a.q, q_norm, eps)?;
                backend.rms_norm_in_place(&mut a.k, k_norm, eps)?;
            }
            a.append(backend, step, pages, layer.slot)?;
            let attention = Attention { slot: layer.slot, heads, scale, softcap: None };
            backend.attend(step, pages, attention, None, &a.q, &mut a.attended)?;
            backend.project_add(&a.attended, &layer.o, &mut w.x)?;
            layer.mlp.add(backend, Activation::Silu, (&layer.post_norm, eps), w)?;
        }
        w.head(backend, step, ends, eps)?;
        Ok(&w.logits)
    }
}
