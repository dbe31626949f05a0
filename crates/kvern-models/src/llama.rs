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

use crate::config::{Fields, check_multiple, model_type};
use crate::gguf;
use crate::loader::{Loader, state_codec};
use crate::rope::{Rope, Scaling};
use crate::workspace::{Widths, Workspace};
use crate::{Error, Info, LoadOptions, Model};

/// The shapes and switches of one model of the family.
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
    /// Columns that a layer attends, its own included, from layer `full_layers` on.
    window: Option<usize>,
    full_layers: usize,
    eps: f32,
    rope: Rope,
    qkv_bias: bool,
    output_bias: bool,
    mlp_bias: bool,
    qk_norm: bool,
    /// Whether the embedding is also the head; decided by the presence of a head when absent.
    tied: Option<bool>,
    /// Whether the rows of Q and K are in interleaved order.
    interleaved: bool,
}

impl Config {
    fn from_json(name: &str, config: &Value) -> Result<Self, Error> {
        let fields = Fields::new(config, "");
        let heads = fields.needed("num_attention_heads")?;
        let hidden = fields.needed("hidden_size")?;
        let head_dim = fields.count("head_dim")?.unwrap_or(hidden / heads);
        let positions = fields.count("max_position_embeddings")?.unwrap_or(2048);
        let windowed = name == "mistral" || fields.flag("use_sliding_window")?.unwrap_or(false);
        let window = if windowed { fields.count("sliding_window")? } else { None };
        let full_layers = if name == "mistral" { 0 } else { fields.index("max_window_layers")?.unwrap_or(28) };
        let bias = fields.flag("attention_bias")?.unwrap_or(false);
        Ok(Self {
            hidden,
            layers: fields.needed("num_hidden_layers")?,
            intermediate: fields.needed("intermediate_size")?,
            heads,
            kv_heads: fields.count("num_key_value_heads")?.unwrap_or(heads),
            head_dim,
            vocab: fields.needed("vocab_size")?,
            context: positions,
            window,
            full_layers,
            eps: fields.float("rms_norm_eps")?.unwrap_or(1e-6) as f32,
            rope: Rope::from_config(fields, head_dim, positions)?,
            qkv_bias: bias || name == "qwen2",
            output_bias: bias && name != "qwen2",
            mlp_bias: fields.flag("mlp_bias")?.unwrap_or(false),
            qk_norm: name == "qwen3",
            tied: fields.flag("tie_word_embeddings")?,
            interleaved: false,
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
    gate: B::Linear,
    up: B::Linear,
    down: B::Linear,
}

struct Llama<B: Backend> {
    config: Config,
    info: Info,
    embed: B::Linear,
    head: Option<B::Linear>,
    norm: B::Vector,
    layers: Vec<Layer<B>>,
    /// Where each layer's state lies.
    slots: Vec<Slot>,
    frequencies: B::Vector,
    workspace: Workspace<B>,
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
    check_multiple("num_attention_heads", config.heads, "a multiple of num_key_value_heads", config.kv_heads)?;
    let fingerprint = checkpoint.fingerprint();
    if matches!(checkpoint.source(), Source::Gguf(_)) {
        checkpoint.rename(|name| gguf::tensor(name, &[]))?;
    }
    let mut loader = Loader::new(backend, checkpoint, options);
    if loader.checkpoint.has("rope_freqs.weight") {
        let divisors = loader.take("rope_freqs.weight", &[config.rope.dims / 2])?.to_vec();
        config.rope.scaling = Scaling::Divisors(divisors);
    }
    let (hidden, q_width, kv_width) =
        (config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim);
    let embed = loader.take("model.embed_tokens.weight", &[config.vocab, hidden])?;
    let stored = state_codec(&embed);
    let embed = backend.linear(embed, None)?;
    let tied = config.tied.unwrap_or(!loader.checkpoint.has("lm_head.weight"));
    let head = if tied { None } else { Some(loader.linear("lm_head", [config.vocab, hidden], false, None)?) };
    if tied {
        for part in ["weight", "scales", "biases"] {
            loader.checkpoint.ignore(&format!("lm_head.{part}"));
        }
    }
    let norm = loader.vector("model.norm.weight", hidden)?;
    let mut layers = Vec::with_capacity(config.layers);
    for index in 0..config.layers {
        let name = |part: &str| format!("model.layers.{index}.{part}");
        // Older checkpoints store the frequencies that the graph computes.
        loader.checkpoint.ignore(&name("self_attn.rotary_emb.inv_freq"));
        let qk_norm = if config.qk_norm {
            let q = loader.vector(&name("self_attn.q_norm.weight"), config.head_dim)?;
            Some((q, loader.vector(&name("self_attn.k_norm.weight"), config.head_dim)?))
        } else {
            None
        };
        let (q_order, k_order) = (config.order(config.heads), config.order(config.kv_heads));
        let (ffn, bias) = (config.intermediate, config.mlp_bias);
        layers.push(Layer {
            input_norm: loader.vector(&name("input_layernorm.weight"), hidden)?,
            q: loader.linear(&name("self_attn.q_proj"), [q_width, hidden], config.qkv_bias, q_order)?,
            k: loader.linear(&name("self_attn.k_proj"), [kv_width, hidden], config.qkv_bias, k_order)?,
            v: loader.linear(&name("self_attn.v_proj"), [kv_width, hidden], config.qkv_bias, None)?,
            o: loader.linear(&name("self_attn.o_proj"), [hidden, q_width], config.output_bias, None)?,
            qk_norm,
            post_norm: loader.vector(&name("post_attention_layernorm.weight"), hidden)?,
            gate: loader.linear(&name("mlp.gate_proj"), [ffn, hidden], bias, None)?,
            up: loader.linear(&name("mlp.up_proj"), [ffn, hidden], bias, None)?,
            down: loader.linear(&name("mlp.down_proj"), [hidden, ffn], bias, None)?,
        });
    }
    loader.checkpoint.finish()?;
    let dim = config.head_dim;
    let states = (0..config.layers).map(|index| {
        let window = config.window.filter(|_| index >= config.full_layers);
        options.kv.apply(index, config.layers, stored, |codecs| {
            let group = GroupSpec::attention(1, config.kv_heads, dim, dim, codecs);
            window.map_or(group.clone(), |size| group.windowed(Window { size, sinks: 0 }))
        })
    });
    let (spec, slots) = StateSpec::from_layers(options.page, states.collect())?;
    let linears = layers.iter().flat_map(|l| [&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down]);
    let layer_bytes: usize = linears.map(|linear| backend.linear_bytes(linear)).sum();
    let embed_bytes = backend.linear_bytes(&embed);
    let head_bytes = head.as_ref().map_or(0, |head| backend.linear_bytes(head));
    let layer_parameters = config.layers * hidden * (2 * q_width + 2 * kv_width + 3 * config.intermediate);
    let info = Info {
        architecture,
        layers: config.layers,
        hidden,
        heads: config.heads,
        vocab: config.vocab,
        context: config.context,
        spec,
        fingerprint,
        weight_bytes: layer_bytes + embed_bytes + head_bytes,
        step_weight_bytes: layer_bytes + if tied { embed_bytes } else { head_bytes },
        layer_parameters,
    };
    let widths = Widths {
        hidden,
        q: q_width,
        kv: kv_width,
        intermediate: config.intermediate,
        angles: config.rope.dims,
        vocab: config.vocab,
    };
    let workspace = Workspace::new(backend, options, &widths)?;
    let frequencies = backend.vector(&config.rope.frequencies())?;
    Ok(Box::new(Llama { config, info, embed, head, norm, layers, slots, frequencies, workspace }))
}

impl<B: Backend> Model<B> for Llama<B> {
    fn info(&self) -> &Info {
        &self.info
    }

    fn logits(&self) -> &B::Tensor {
        &self.workspace.logits
    }

    fn forward(&mut self, backend: &B, step: &B::Step, pages: &mut B::Pages) -> Result<&B::Tensor, Error> {
        let Self { config, workspace: w, .. } = self;
        w.resize(backend, step)?;
        backend.embed(step, &self.embed, 1.0, &mut w.x)?;
        backend.rope_angles(step, &self.frequencies, config.rope.attention_factor(), &mut w.angles)?;
        for (layer, &slot) in self.layers.iter().zip(&self.slots) {
            let scale = (config.head_dim as f32).sqrt().recip();
            let qkv = &mut [(&layer.q, &mut w.q), (&layer.k, &mut w.k), (&layer.v, &mut w.v)];
            backend.project_norm(&w.x, (&layer.input_norm, config.eps), &mut w.h, qkv)?;
            if let Some((q_norm, k_norm)) = &layer.qk_norm {
                backend.rms_norm_in_place(&mut w.q, q_norm, config.eps)?;
                backend.rms_norm_in_place(&mut w.k, k_norm, config.eps)?;
            }
            let rotation = (&w.angles, config.head_dim);
            backend.rope_append(step, pages, slot, (&mut w.q, &mut w.k, &w.v), rotation)?;
            let attention = Attention { slot, heads: config.heads, scale, softcap: None };
            backend.attend(step, pages, attention, None, &w.q, &mut w.attended)?;
            backend.project_add(&w.attended, &layer.o, &mut w.x)?;
            let gated = &mut [(&layer.gate, &mut w.gate), (&layer.up, &mut w.up)];
            backend.project_norm(&w.x, (&layer.post_norm, config.eps), &mut w.h, gated)?;
            backend.project_gate_add((Activation::Silu, &mut w.gate, &w.up), &layer.down, &mut w.x)?;
        }
        let head = self.head.as_ref().unwrap_or(&self.embed);
        w.head(backend, step, &self.norm, config.eps, head)?;
        Ok(&w.logits)
    }
}
