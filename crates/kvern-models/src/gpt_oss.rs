//! gpt-oss: attention with sinks, alternating windows, and experts in MXFP4.
//!
//! ```text
//! x = embed(tokens)
//! each layer:  x += O · attend(rope(q), rope(k), v)                    with q, k, v = Q, K, V · rms(x), all with biases
//!              x += Σ weight_e Down_e · unit(Gate_e · h, Up_e · h)     with h = rms(x)
//! logits = Head · rms(x)
//! ```
//!
//! Each head has a sink: a score that takes part in the softmax and adds nothing to the sum. Layers alternate between a sliding window and full attention, beginning
//! with the window. Experts are weighed by the softmax over the picked logits; their unit is `g sigmoid(alpha g) (u + 1)` with `g` capped from above and `u` on both
//! sides. On the hub, gate and up of an expert are the even and the odd rows of one matrix.

use kvern_backend::{Attention, Backend, Routing, Score, Slot};
use kvern_state::{GroupSpec, StateSpec, Window};
use kvern_weights::gguf::Metadata;
use kvern_weights::{Checkpoint, Source, Tensor};
use serde_json::{Value, json};

use crate::config::{Fields, Outline};
use crate::experts::{Bank, ExpertSpace, Experts, Sizes, Unit};
use crate::loader::{Ends, Loader};
use crate::rope::Rope;
use crate::workspace::{Heads, Workspace};
use crate::{Error, Info, LoadOptions, Model, gguf};

/// The parts of a layer that have other names in GGUF files than elsewhere.
const GGUF_PARTS: [(&str, &str); 3] = [
    ("post_attention_norm", "post_attention_layernorm"),
    ("attn_sinks", "self_attn.sinks"),
    ("ffn_gate_inp", "mlp.router"),
];

/// The shapes of a model.
#[derive(Debug, Clone)]
struct Config {
    outline: Outline,
    kv_heads: usize,
    head_dim: usize,
    /// Which layers see a window.
    sliding: Vec<bool>,
    window: usize,
    bias: bool,
    sizes: Sizes,
    /// Of the experts' unit: alpha and limit.
    unit: (f32, f32),
    rope: Rope,
}

impl Config {
    fn from_json(config: &Value) -> Result<Self, Error> {
        let fields = Fields::new(config, "");
        let outline = Outline::new(fields, 131_072)?;
        let kinds = ["sliding_attention", "full_attention"];
        let sliding = fields.layer_types(outline.layers, kinds, "sliding_attention or full_attention")?;
        let head_dim = fields.count("head_dim")?.unwrap_or(64);
        let picks = fields.count("num_experts_per_tok")?.or(fields.count("experts_per_token")?).unwrap_or(4);
        let sizes = Sizes {
            experts: fields.needed("num_local_experts")?,
            picks,
            hidden: outline.hidden,
            intermediate: fields.needed("intermediate_size")?,
        };
        if picks > sizes.experts {
            return Err(fields.wrong("num_experts_per_tok", "at most num_local_experts"));
        }
        Ok(Self {
            kv_heads: outline.kv_heads(fields)?,
            head_dim,
            sliding: sliding.unwrap_or_else(|| (0..outline.layers).map(|layer| layer % 2 == 0).collect()),
            window: fields.count("sliding_window")?.unwrap_or(128),
            bias: fields.flag("attention_bias")?.unwrap_or(true),
            sizes,
            unit: (
                fields.float("swiglu_alpha")?.unwrap_or(1.702) as f32,
                fields.positive("swiglu_limit")?.unwrap_or(7.0) as f32,
            ),
            rope: Rope::from_config(fields, head_dim, outline.context)?,
            outline,
        })
    }

    fn from_gguf(metadata: &Metadata) -> Result<Self, Error> {
        let mut config = gguf::config("gpt-oss", metadata)?;
        let int = |key: &str| metadata.int(&format!("gpt-oss.{key}"));
        config["sliding_window"] = json!(int("attention.sliding_window")?);
        config["num_local_experts"] = json!(int("expert_count")?);
        config["num_experts_per_tok"] = json!(int("expert_used_count")?);
        config["intermediate_size"] = json!(int("expert_feed_forward_length")?);
        if config["rope_scaling"].is_object() {
            // As the models do it; files do not say.
            config["rope_scaling"]["truncate"] = json!(false);
        }
        Self::from_json(&config)
    }
}

struct Layer<B: Backend> {
    slot: Slot,
    input_norm: B::Vector,
    q: B::Linear,
    k: B::Linear,
    v: B::Linear,
    o: B::Linear,
    sinks: B::Vector,
    post_norm: B::Vector,
    experts: Experts<B>,
}

struct GptOss<B: Backend> {
    config: Config,
    info: Info,
    ends: Ends<B>,
    layers: Vec<Layer<B>>,
    frequencies: B::Vector,
    workspace: Workspace<B>,
    heads: Heads<B>,
    experts: ExpertSpace<B>,
}

/// The experts of a layer, on the hub or in a GGUF file; each matrix with a bias.
fn load_bank<B: Backend>(loader: &mut Loader<'_, B>, sizes: Sizes, name: &str) -> Result<Bank<B>, Error> {
    let Sizes { experts, picks, hidden, intermediate } = sizes;
    let stacks = [experts, picks];
    if loader.is_gguf() {
        let mut stack = |part: &str, [outputs, inputs]: [usize; 2]| -> Result<B::Linear, Error> {
            let name = format!("{name}.switch_mlp.{part}");
            let bias = loader.take(&format!("{name}.bias"), &[experts, outputs])?;
            let weight = loader.take(&format!("{name}.weight"), &[experts, outputs, inputs])?;
            loader.stack(weight, Some(bias), stacks)
        };
        let (gate, up) = (stack("gate_proj", [intermediate, hidden])?, stack("up_proj", [intermediate, hidden])?);
        return Ok(Bank::new(gate, up, stack("down_proj", [hidden, intermediate])?));
    }
    let name = format!("{name}.experts");
    let mut half = |second: usize| -> Result<B::Linear, Error> {
        let order: Vec<u32> = (0..experts * intermediate).map(|row| (2 * row + second) as u32).collect();
        let weight = loader.take(&format!("{name}.gate_up_proj"), &[experts, 2 * intermediate, hidden])?;
        let bias = loader.take(&format!("{name}.gate_up_proj_bias"), &[experts, 2 * intermediate])?;
        loader.stack(weight.with_row_order(order.clone()), Some(bias.with_element_order(&order)?), stacks)
    };
    let (gate, up) = (half(0)?, half(1)?);
    let weight = loader.take(&format!("{name}.down_proj"), &[experts, hidden, intermediate])?;
    let bias: Tensor = loader.take(&format!("{name}.down_proj_bias"), &[experts, hidden])?;
    Ok(Bank::new(gate, up, loader.stack(weight, Some(bias), stacks)?))
}

fn load_layer<B: Backend>(
    loader: &mut Loader<'_, B>,
    config: &Config,
    index: usize,
    slot: Slot,
) -> Result<Layer<B>, Error> {
    let Config { kv_heads, head_dim: dim, bias, sizes, unit: (alpha, limit), .. } = *config;
    let Outline { hidden, heads, .. } = config.outline;
    let name = |part: &str| format!("model.layers.{index}.{part}");
    let sinks = if loader.is_gguf() { "self_attn.sinks.weight" } else { "self_attn.sinks" };
    let mut linear = |part: &str, shape, bias| loader.linear(&name(part), shape, bias, None);
    let (q, kv) = ([heads * dim, hidden], [kv_heads * dim, hidden]);
    Ok(Layer {
        slot,
        q: linear("self_attn.q_proj", q, bias)?,
        k: linear("self_attn.k_proj", kv, bias)?,
        v: linear("self_attn.v_proj", kv, bias)?,
        o: linear("self_attn.o_proj", [hidden, heads * dim], bias)?,
        experts: Experts {
            router: linear("mlp.router", [sizes.experts, hidden], true)?,
            bias: None,
            factors: None,
            routing: Routing { score: Score::Softmax, normalize: true, scale: 1.0, groups: None },
            unit: Unit::Clamped(alpha, limit),
            bank: load_bank(loader, sizes, &name("mlp"))?,
        },
        input_norm: loader.vector(&name("input_layernorm.weight"), hidden)?,
        sinks: loader.vector(&name(sinks), heads)?,
        post_norm: loader.vector(&name("post_attention_layernorm.weight"), hidden)?,
    })
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
    let Outline { heads, layers: count, .. } = config.outline;
    let Config { kv_heads, head_dim: dim, .. } = config;
    let ends = loader.ends(&config.outline, 0.0)?;
    let states = config.sliding.iter().enumerate().map(|(index, &sliding)| {
        options.kv.apply(index, count, ends.codec, |codecs| {
            let group = GroupSpec::attention(1, kv_heads, dim, dim, codecs);
            if sliding { group.windowed(Window { size: config.window, sinks: 0 }) } else { group }
        })
    });
    let (spec, slots) = StateSpec::from_layers(options.page, states.collect())?;
    let layers = slots.iter().enumerate().map(|(index, &slot)| load_layer(&mut loader, &config, index, slot));
    let layers = layers.collect::<Result<Vec<_>, _>>()?;
    let info = config.outline.info("gpt_oss", spec, fingerprint, loader.finish()?);
    let workspace = Workspace::new(backend, options, &config.outline, &[])?;
    let heads = Heads::new(backend, options, [heads, kv_heads], [dim, config.rope.dims])?;
    let experts = ExpertSpace::new(backend, options, config.sizes)?;
    let frequencies = backend.vector(&config.rope.frequencies())?;
    Ok(Box::new(GptOss { config, info, ends, layers, frequencies, workspace, heads, experts }))
}

impl<B: Backend> Model<B> for GptOss<B> {
    fn info(&self) -> &Info {
        &self.info
    }

    fn logits(&self) -> &B::Tensor {
        &self.workspace.logits
    }

    fn forward(&mut self, backend: &B, step: &B::Step, pages: &mut B::Pages) -> Result<&B::Tensor, Error> {
        let Self { config, ends, workspace: w, heads: a, experts: space, .. } = self;
        let Outline { heads, eps, .. } = config.outline;
        w.resize(backend, step)?;
        a.resize(backend, step)?;
        space.resize(backend, step)?;
        backend.embed(step, &ends.embed, 1.0, &mut w.x)?;
        backend.rope_angles(step, &self.frequencies, config.rope.attention_factor(), &mut a.angles)?;
        for layer in &self.layers {
            let scale = (config.head_dim as f32).sqrt().recip();
            let qkv = &mut [(&layer.q, &mut a.q), (&layer.k, &mut a.k), (&layer.v, &mut a.v)];
            backend.project_norm(&w.x, (&layer.input_norm, eps), &mut w.h, qkv)?;
            a.append(backend, step, pages, layer.slot)?;
            let attention = Attention { slot: layer.slot, heads, scale, softcap: None };
            backend.attend(step, pages, attention, Some(&layer.sinks), &a.q, &mut a.attended)?;
            backend.project_add(&a.attended, &layer.o, &mut w.x)?;
            backend.rms_norm(&w.x, &layer.post_norm, eps, &mut w.h)?;
            layer.experts.add(backend, (&w.h, &w.h), space, &mut w.x)?;
        }
        w.head(backend, step, ends, eps)?;
        Ok(&w.logits)
    }
}
