//! Qwen3.5, dense and with experts, and Qwen3-Next: gated delta nets with a full-attention layer in every few.
//!
//! ```text
//! x = embed(tokens)
//! each layer:  x += Mixer(rms(x))
//!              x += Down · (silu(Gate · h) * (Up · h))                                  with h = rms(x), or
//!              x += Σ weight_e Expert_e(h) + sigmoid(SharedGate · h) * Shared(h)
//! logits = Head · rms(x)
//!
//! full attention:   O · (sigmoid(g) * attend(rope(rms(q)), rope(rms(k)), v))    with q, g, k, v = Q, G, K, V · h
//! gated delta net:  O · (silu(z) * rms(delta(q, k, v, decay, beta)))
//!    q, k, v = silu(conv(Q, K, V · h)), q and k of length 1 per head, q further by key_dim^-1/2
//!    decay = exp(-e^A_log * softplus(A · h + dt_bias)), beta = sigmoid(B · h), z = Z · h
//! ```
//!
//! Traps: `q_proj` holds query and gate of each head one after the other; rope turns the first part of a head only; norms multiply by `1 + weight`, but
//! for the delta net's own; a trained checkpoint has convolutions `[channels, 1, taps]` and raw norm weights, a converted one
//! `[channels, taps, 1]` and the sums. (The weights themselves do not tell: the mean of a trained raw one can be 0.94.) Experts' weights are always
//! brought to a sum of 1, whatever the configuration says. The recurrence runs in f32, token by token, in prefill and decode alike. The
//! multi-token-prediction head (`mtp.*`) is loaded if asked for; a vision part is left out. Where the tensors of a delta net lie is [`layout`]'s affair.

mod layout;

use kvern_backend::{Activation, Attention, Backend, DeltaInputs, DeltaRule, Routing, Score, Slot};
use kvern_state::{Codec, GroupSpec, StateSpec};
use kvern_weights::{Checkpoint, Source};
use serde_json::Value;

use self::layout::Layout;
use crate::config::{Fields, Outline, check_multiple, model_type};
use crate::experts::{Bank, ExpertSpace, Experts, Sizes, Unit};
use crate::loader::{Ends, Loader};
use crate::mlp::Mlp;
use crate::mtp::{self, Mtp};
use crate::rope::Rope;
use crate::workspace::{self, Heads, Run};
use crate::{Error, Info, LoadOptions, Model};

/// The shapes of a model.
#[derive(Debug, Clone)]
struct Config {
    outline: Outline,
    /// Of dense layers, if there are any.
    intermediate: Option<usize>,
    /// Which layers attend, and which have experts.
    attends: Vec<bool>,
    sparse: Vec<bool>,
    /// Of the experts, and of the one that all tokens share.
    experts: Option<(Sizes, Sizes)>,
    kv_heads: usize,
    head_dim: usize,
    rope: Rope,
    /// Of a delta net: heads of keys and of values, their dimensions, and the convolution's taps.
    key_heads: usize,
    value_heads: usize,
    key_dim: usize,
    value_dim: usize,
    taps: usize,
}

impl Config {
    fn from_json(config: &Value) -> Result<Self, Error> {
        let outer = Fields::new(config, "");
        let fields = outer.object("text_config", "text_config.")?.unwrap_or(outer);
        let mut outline = Outline::new(fields, 32_768)?;
        outline.tied = outline.tied.or(outer.flag("tie_word_embeddings")?);
        let layers = outline.layers;
        let interval = fields.count("full_attention_interval")?.unwrap_or(4);
        let kinds = ["full_attention", "linear_attention"];
        let attends = fields.layer_types(layers, kinds, "full_attention or linear_attention")?;
        let attends = attends.unwrap_or_else(|| (1..=layers).map(|layer| layer % interval == 0).collect());
        let (key_heads, value_heads) =
            (fields.needed("linear_num_key_heads")?, fields.needed("linear_num_value_heads")?);
        check_multiple("linear_num_value_heads", value_heads, "a multiple of linear_num_key_heads", key_heads)?;
        if fields.flag("attn_output_gate")? == Some(false) {
            return Err(fields.wrong("attn_output_gate", "true"));
        }
        let head_dim = fields.count("head_dim")?.unwrap_or(256);
        let sizes = |experts, picks, intermediate| Sizes { experts, picks, hidden: outline.hidden, intermediate };
        let experts = match fields.count("num_experts")? {
            None => None,
            Some(count) => {
                let picks = fields.needed("num_experts_per_tok")?;
                if picks > count {
                    return Err(fields.wrong("num_experts_per_tok", "at most num_experts"));
                }
                let shared = sizes(1, 1, fields.needed("shared_expert_intermediate_size")?);
                Some((sizes(count, picks, fields.needed("moe_intermediate_size")?), shared))
            }
        };
        let step = fields.count("decoder_sparse_step")?.unwrap_or(1);
        let dense = fields.indices("mlp_only_layers")?.unwrap_or_default();
        let is_sparse = |layer: usize| experts.is_some() && !dense.contains(&layer) && (layer + 1).is_multiple_of(step);
        let sparse: Vec<bool> = (0..layers).map(is_sparse).collect();
        let intermediate = if sparse.contains(&false) { Some(fields.needed("intermediate_size")?) } else { None };
        Ok(Self {
            intermediate,
            attends,
            sparse,
            experts,
            kv_heads: outline.kv_heads(fields)?,
            head_dim,
            rope: Rope::from_config(fields, head_dim, outline.context)?,
            key_heads,
            value_heads,
            key_dim: fields.needed("linear_key_head_dim")?,
            value_dim: fields.needed("linear_value_head_dim")?,
            taps: fields.count("linear_conv_kernel_dim")?.unwrap_or(4),
            outline,
        })
    }

    /// Widths of the queries or keys and of the values of a delta net.
    fn delta_widths(&self) -> [usize; 2] {
        [self.key_heads * self.key_dim, self.value_heads * self.value_dim]
    }

    /// Keys and values of a layer of full attention.
    fn columns(&self, codecs: (Codec, Codec)) -> GroupSpec {
        GroupSpec::attention(1, self.kv_heads, self.head_dim, self.head_dim, codecs)
    }

    /// What a delta net remembers: the planes that [`Delta`] names.
    fn states(&self) -> GroupSpec {
        let [keys, values] = self.delta_widths();
        let tail = self.taps - 1;
        let state = self.value_heads * self.key_dim * self.value_dim;
        let parts = [("q tail", tail * keys), ("k tail", tail * keys), ("v tail", tail * values), ("state", state)];
        GroupSpec::recurrent(1, &parts)
    }
}

struct Full<B: Backend> {
    q: B::Linear,
    gate: B::Linear,
    k: B::Linear,
    v: B::Linear,
    o: B::Linear,
    q_norm: B::Vector,
    k_norm: B::Vector,
}

struct Delta<B: Backend> {
    /// Projections and kernels of queries, keys and values, in the order of their planes.
    inputs: [(B::Linear, B::Vector); 3],
    z: B::Linear,
    a: B::Linear,
    b: B::Linear,
    /// `e^A_log`.
    rate: B::Vector,
    bias: B::Vector,
    norm: B::Vector,
    o: B::Linear,
}

/// The plane of the recurrence.
const STATE: usize = 3;

enum Mixer<B: Backend> {
    Full(Full<B>),
    Delta(Delta<B>),
}

enum FeedForward<B: Backend> {
    Dense(Mlp<B>),
    /// The experts, and the shared one as a bank of its own, which every token is routed to by a sigmoid.
    Sparse([Experts<B>; 2]),
}

struct Layer<B: Backend> {
    slot: Slot,
    input_norm: B::Vector,
    mixer: Mixer<B>,
    post_norm: B::Vector,
    feed_forward: FeedForward<B>,
}

/// Activations of a step: those of every decoder, the gate of full attention, and what a delta net needs; all `[tokens, …]`.
struct Workspace<B: Backend> {
    base: workspace::Workspace<B>,
    heads: Heads<B>,
    q_gate: B::Tensor,
    /// Queries, keys and values before and after the convolution.
    raw: [B::Tensor; 3],
    convolved: [B::Tensor; 3],
    z: B::Tensor,
    decay: B::Tensor,
    beta: B::Tensor,
    read: B::Tensor,
    experts: Option<[ExpertSpace<B>; 2]>,
    /// Weights that bring queries and keys of a delta net to their length: `key_dim^-1` and `key_dim^-1/2`.
    lengths: [B::Vector; 2],
}

struct Qwen35<B: Backend> {
    config: Config,
    info: Info,
    ends: Ends<B>,
    layers: Vec<Layer<B>>,
    frequencies: B::Vector,
    mtp: Option<Mtp<B, Layer<B>>>,
    workspace: Workspace<B>,
}

fn load_full<B: Backend>(
    loader: &mut Loader<'_, B>,
    config: &Config,
    name: &str,
    offset: f32,
) -> Result<Full<B>, Error> {
    let Config { kv_heads, head_dim: dim, .. } = *config;
    let Outline { hidden, heads, .. } = config.outline;
    // Each head has its query first and its gate after it.
    let part = |second: usize| {
        let row = |head: usize| (2 * head + second) * dim..(2 * head + second + 1) * dim;
        Some((0..heads).flat_map(row).map(|row| row as u32).collect())
    };
    let both = [2 * heads * dim, hidden];
    Ok(Full {
        q: loader.linear(&format!("{name}.q_proj"), both, false, part(0))?,
        gate: loader.linear(&format!("{name}.q_proj"), both, false, part(1))?,
        k: loader.linear(&format!("{name}.k_proj"), [kv_heads * dim, hidden], false, None)?,
        v: loader.linear(&format!("{name}.v_proj"), [kv_heads * dim, hidden], false, None)?,
        o: loader.linear(&format!("{name}.o_proj"), [hidden, heads * dim], false, None)?,
        q_norm: loader.norm(&format!("{name}.q_norm.weight"), dim, offset)?,
        k_norm: loader.norm(&format!("{name}.k_norm.weight"), dim, offset)?,
    })
}

fn load_delta<B: Backend>(
    loader: &mut Loader<'_, B>,
    (config, layout): (&Config, Layout),
    name: &str,
) -> Result<Delta<B>, Error> {
    let backend = loader.backend;
    let kernels = layout.kernels(loader, config, name)?;
    let mut linear = |part: layout::Part| {
        loader.linear(&format!("{name}.{}", part.name), [part.rows, config.outline.hidden], false, part.order)
    };
    let [q, k, v, z, b, a] = layout.parts(config);
    let (q, k, v) = (linear(q)?, linear(k)?, linear(v)?);
    let (z, b, a) = (linear(z)?, linear(b)?, linear(a)?);
    let [q_kernel, k_kernel, v_kernel] = kernels;
    let (rate, bias) = layout.decay(loader, config, name)?;
    let o = layout.output(loader, config, name)?;
    Ok(Delta {
        inputs: [(q, q_kernel), (k, k_kernel), (v, v_kernel)],
        z,
        a,
        b,
        rate: backend.vector(&rate)?,
        bias: backend.vector(&bias)?,
        norm: loader.vector(&format!("{name}.norm.weight"), config.value_dim)?,
        o: loader.pack(o, None)?,
    })
}

fn load_feed_forward<B: Backend>(
    loader: &mut Loader<'_, B>,
    (config, sparse): (&Config, bool),
    name: &str,
) -> Result<FeedForward<B>, Error> {
    let hidden = config.outline.hidden;
    let Some((sizes, shared)) = config.experts.filter(|_| sparse) else {
        let width = config.intermediate.unwrap_or(0);
        return Ok(FeedForward::Dense(Mlp::load(loader, name, [hidden, width], false)?));
    };
    let unit = Unit::Gated(Activation::Silu);
    let experts = Experts {
        router: loader.linear(&format!("{name}.gate"), [sizes.experts, hidden], false, None)?,
        bias: None,
        factors: None,
        routing: Routing { score: Score::Softmax, normalize: true, scale: 1.0, groups: None },
        unit,
        bank: Bank::load(loader, name, sizes)?,
    };
    let one = Mlp::load(loader, &format!("{name}.shared_expert"), [hidden, shared.intermediate], false)?;
    let shared = Experts {
        router: loader.linear(&format!("{name}.shared_expert_gate"), [1, hidden], false, None)?,
        bias: None,
        factors: None,
        routing: Routing { score: Score::Sigmoid, normalize: false, scale: 1.0, groups: None },
        unit,
        bank: Bank::one(one),
    };
    Ok(FeedForward::Sparse([experts, shared]))
}

fn load_layer<B: Backend>(
    loader: &mut Loader<'_, B>,
    config: &Config,
    (name, slot): (&str, Slot),
    (mixer, sparse, offset): (Mixer<B>, bool, f32),
) -> Result<Layer<B>, Error> {
    let hidden = config.outline.hidden;
    Ok(Layer {
        slot,
        input_norm: loader.norm(&format!("{name}.input_layernorm.weight"), hidden, offset)?,
        mixer,
        post_norm: loader.norm(&format!("{name}.post_attention_layernorm.weight"), hidden, offset)?,
        feed_forward: load_feed_forward(loader, (config, sparse), &format!("{name}.mlp"))?,
    })
}

/// The multi-token-prediction head: a layer of full attention.
fn load_mtp<B: Backend>(
    loader: &mut Loader<'_, B>,
    config: &Config,
    (layout, columns, carry): (Layout, Slot, Slot),
    options: &LoadOptions<'_>,
) -> Result<Mtp<B, Layer<B>>, Error> {
    let Outline { hidden, eps, .. } = config.outline;
    let names = |offset| mtp::Names {
        embed_norm: "mtp.pre_fc_norm_embedding.weight".into(),
        hidden_norm: "mtp.pre_fc_norm_hidden.weight".into(),
        fc: "mtp.fc.weight".into(),
        norm: "mtp.norm.weight".into(),
        offset,
    };
    let offset = if layout == Layout::Gguf { 0.0 } else { mtp_offset(loader, hidden)? };
    let mixer = Mixer::Full(load_full(loader, config, "mtp.layers.0.self_attn", offset)?);
    let sparse = config.experts.is_some();
    let layer = load_layer(loader, config, ("mtp.layers.0", columns), (mixer, sparse, offset))?;
    Mtp::load(loader, &names(offset), (hidden, eps), (layer, carry), options)
}

/// What the norms of a head lack. A converter may have added 1 to the norms of the trunk and left these as they were; of a head that it has treated, no
/// norm has a mean near 0.
fn mtp_offset<B: Backend>(loader: &mut Loader<'_, B>, hidden: usize) -> Result<f32, Error> {
    let mut lowest = f32::INFINITY;
    for name in ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "layers.0.input_layernorm", "norm"] {
        let weights = loader.take(&format!("mtp.{name}.weight"), &[hidden])?.to_vec();
        lowest = lowest.min(weights.iter().sum::<f32>() / hidden as f32);
    }
    Ok(if lowest < 0.5 { 1.0 } else { 0.0 })
}

/// Loads the model.
pub(crate) fn load<B: Backend>(
    backend: &B,
    mut checkpoint: Checkpoint,
    options: &LoadOptions<'_>,
) -> Result<Box<dyn Model<B>>, Error> {
    let architecture = model_type(checkpoint.source())?;
    let config = match checkpoint.source() {
        Source::Directory { config, .. } => Config::from_json(config)?,
        Source::Gguf(metadata) => Config::from_json(&layout::gguf_config(&architecture, metadata)?)?,
    };
    let fingerprint = checkpoint.fingerprint();
    layout::rename(&mut checkpoint, config.outline.layers)?;
    let left_out = |name: &&str| is_vision(name) || (!options.draft && name.starts_with("mtp."));
    let others: Vec<String> = checkpoint.names().filter(left_out).map(String::from).collect();
    others.iter().for_each(|name| checkpoint.ignore(name));
    let layout = Layout::of(&checkpoint, &config);
    let mut loader = Loader::new(backend, checkpoint, options);
    let Outline { hidden, heads, layers: count, .. } = config.outline;
    // What the norms' weights lack.
    let offset = if layout.is_raw() { 1.0 } else { 0.0 };
    let ends = loader.ends(&config.outline, offset)?;
    let state = |index: usize| match config.attends[index] {
        true => options.kv.apply(index, count, ends.codec, |codecs| config.columns(codecs)),
        false => config.states(),
    };
    let mut states: Vec<GroupSpec> = (0..count).map(state).collect();
    if options.draft {
        // A layer by itself, neither first nor last of the model's.
        let columns = options.kv.apply(count, 2 * count + 1, ends.codec, |codecs| config.columns(codecs));
        states.extend([columns.companion(1), mtp::carry(hidden)]);
    }
    let (spec, mut slots) = StateSpec::from_layers(options.page, states)?;
    let head_slots = slots.split_off(count);
    let mut layers = Vec::with_capacity(count);
    for (index, &slot) in slots.iter().enumerate() {
        let name = format!("model.layers.{index}");
        let mixer = if config.attends[index] {
            Mixer::Full(load_full(&mut loader, &config, &format!("{name}.self_attn"), offset)?)
        } else {
            Mixer::Delta(load_delta(&mut loader, (&config, layout), &format!("{name}.linear_attn"))?)
        };
        layers.push(load_layer(&mut loader, &config, (&name, slot), (mixer, config.sparse[index], offset))?);
    }
    let mtp = match head_slots[..] {
        [columns, carry] => Some(loader.beside(|loader| load_mtp(loader, &config, (layout, columns, carry), options))?),
        _ => None,
    };
    let info = config.outline.info(&architecture, spec, fingerprint, loader.finish()?);
    let tokens = |width| backend.tensor(options.max_tokens, width);
    let [keys, values] = config.delta_widths();
    let experts = config.experts.map(|(sizes, shared)| [sizes, shared].map(|s| ExpertSpace::new(backend, options, s)));
    let experts = match experts {
        Some([experts, shared]) => Some([experts?, shared?]),
        None => None,
    };
    let dim = config.key_dim as f32;
    let length = |length| backend.vector(&vec![length; config.key_dim]);
    let workspace = Workspace {
        base: workspace::Workspace::new(backend, options, &config.outline, config.intermediate.as_slice())?,
        heads: Heads::new(backend, options, [heads, config.kv_heads], [config.head_dim, config.rope.dims])?,
        q_gate: tokens(heads * config.head_dim)?,
        raw: [tokens(keys)?, tokens(keys)?, tokens(values)?],
        convolved: [tokens(keys)?, tokens(keys)?, tokens(values)?],
        z: tokens(values)?,
        decay: tokens(config.value_heads)?,
        beta: tokens(config.value_heads)?,
        read: tokens(values)?,
        experts,
        lengths: [length(1.0 / dim)?, length(dim.sqrt().recip())?],
    };
    let frequencies = backend.vector(&config.rope.frequencies())?;
    Ok(Box::new(Qwen35 { config, info, ends, layers, frequencies, mtp, workspace }))
}

/// Whether a tensor belongs to the part of a model that sees.
fn is_vision(name: &str) -> bool {
    ["model.visual.", "visual.", "vision_tower."].iter().any(|prefix| name.starts_with(prefix))
}

impl<B: Backend> Layer<B> {
    /// Adds the layer's mixer and its feed-forward part to `w.base.x`.
    fn run(&self, run: &mut Run<'_, B>, config: &Config, w: &mut Workspace<B>) -> Result<(), Error> {
        let (backend, eps) = (run.backend, config.outline.eps);
        backend.rms_norm(&w.base.x, &self.input_norm, eps, &mut w.base.h)?;
        match &self.mixer {
            Mixer::Full(full) => full.run(run, self.slot, config, w)?,
            Mixer::Delta(delta) => delta.run(run, self.slot, config, w)?,
        }
        match (&self.feed_forward, &mut w.experts) {
            (FeedForward::Sparse(both), Some(spaces)) => {
                backend.rms_norm(&w.base.x, &self.post_norm, eps, &mut w.base.h)?;
                for (experts, space) in both.iter().zip(spaces) {
                    experts.add(backend, (&w.base.h, &w.base.h), space, &mut w.base.x)?;
                }
                Ok(())
            }
            (FeedForward::Dense(mlp), _) => mlp.add(backend, Activation::Silu, (&self.post_norm, eps), &mut w.base),
            // A model with experts has room for them.
            (FeedForward::Sparse(_), None) => Ok(()),
        }
    }
}

impl<B: Backend> Full<B> {
    /// `x += O · (sigmoid(g) * attend(q, k, v))` of `h`.
    fn run(&self, run: &mut Run<'_, B>, slot: Slot, config: &Config, w: &mut Workspace<B>) -> Result<(), Error> {
        let Run { backend, step, pages } = run;
        let Outline { heads, eps, .. } = config.outline;
        let scale = (config.head_dim as f32).sqrt().recip();
        let a = &mut w.heads;
        let outs = &mut [(&self.q, &mut a.q), (&self.gate, &mut w.q_gate), (&self.k, &mut a.k), (&self.v, &mut a.v)];
        backend.project(&w.base.h, outs)?;
        backend.rms_norm_in_place(&mut a.q, &self.q_norm, eps)?;
        backend.rms_norm_in_place(&mut a.k, &self.k_norm, eps)?;
        a.append(*backend, step, pages, slot)?;
        let attention = Attention { slot, heads, scale, softcap: None };
        backend.attend(step, pages, attention, None, &a.q, &mut a.attended)?;
        backend.gate(Activation::Sigmoid, &mut w.q_gate, &a.attended)?;
        Ok(backend.project_add(&w.q_gate, &self.o, &mut w.base.x)?)
    }
}

impl<B: Backend> Delta<B> {
    /// `x += O · (silu(z) * rms(delta(…)))` of `h`.
    fn run(&self, run: &mut Run<'_, B>, slot: Slot, config: &Config, w: &mut Workspace<B>) -> Result<(), Error> {
        let Run { backend, step, pages } = run;
        let [(q, _), (k, _), (v, _)] = &self.inputs;
        let [raw_q, raw_k, raw_v] = &mut w.raw;
        backend.project(
            &w.base.h,
            &mut [
                (q, raw_q),
                (k, raw_k),
                (v, raw_v),
                (&self.z, &mut w.z),
                (&self.a, &mut w.decay),
                (&self.b, &mut w.beta),
            ],
        )?;
        for (plane, ((_, kernel), (raw, convolved))) in
            self.inputs.iter().zip(w.raw.iter().zip(&mut w.convolved)).enumerate()
        {
            backend.convolve(step, pages, (slot, plane), kernel, raw, convolved)?;
            backend.activate(Activation::Silu, convolved)?;
        }
        backend.decay(&self.rate, &self.bias, &mut w.decay)?;
        backend.activate(Activation::Sigmoid, &mut w.beta)?;
        let [q, k, v] = &mut w.convolved;
        // x / sqrt(sum x² + 1e-6), as a norm over the mean.
        let eps = 1e-6 / config.key_dim as f32;
        backend.rms_norm_in_place(q, &w.lengths[0], eps)?;
        backend.rms_norm_in_place(k, &w.lengths[1], eps)?;
        let Config { key_heads, value_heads: heads, key_dim, value_dim, .. } = *config;
        let rule = DeltaRule { slot, plane: STATE, heads, key_heads, key_dim, value_dim };
        let inputs = DeltaInputs { q, k, v, decay: &w.decay, beta: &w.beta };
        backend.delta_rule(step, pages, rule, inputs, &mut w.read)?;
        backend.rms_norm_in_place(&mut w.read, &self.norm, config.outline.eps)?;
        backend.gate(Activation::Silu, &mut w.z, &w.read)?;
        Ok(backend.project_add(&w.z, &self.o, &mut w.base.x)?)
    }
}

impl<B: Backend> Workspace<B> {
    fn resize(&mut self, backend: &B, step: &B::Step) -> Result<(), Error> {
        self.base.resize(backend, step)?;
        self.heads.resize(backend, step)?;
        self.experts.iter_mut().flatten().try_for_each(|space| space.resize(backend, step))?;
        let (tokens, _) = backend.rows(step);
        let own = [&mut self.q_gate, &mut self.z, &mut self.decay, &mut self.beta, &mut self.read];
        for tensor in own.into_iter().chain(&mut self.raw).chain(&mut self.convolved) {
            backend.resize(tensor, tokens)?;
        }
        Ok(())
    }
}

impl<B: Backend> Model<B> for Qwen35<B> {
    fn info(&self) -> &Info {
        &self.info
    }

    fn logits(&self) -> &B::Tensor {
        &self.workspace.base.logits
    }

    fn forward(&mut self, backend: &B, step: &B::Step, pages: &mut B::Pages) -> Result<&B::Tensor, Error> {
        let Self { config, ends, workspace: w, .. } = self;
        w.resize(backend, step)?;
        backend.embed(step, &ends.embed, 1.0, &mut w.base.x)?;
        backend.rope_angles(step, &self.frequencies, config.rope.attention_factor(), &mut w.heads.angles)?;
        let mut run = Run { backend, step, pages };
        for layer in &self.layers {
            layer.run(&mut run, config, w)?;
        }
        if let Some(mtp) = &mut self.mtp {
            // The head takes the normed hidden state of every token.
            backend.rms_norm(&w.base.x, &ends.norm, config.outline.eps, &mut w.base.h)?;
            mtp.carry(backend, step, run.pages, &w.base.h)?;
        }
        w.base.head(backend, step, ends, config.outline.eps)?;
        Ok(&w.base.logits)
    }

    fn draft(
        &mut self,
        backend: &B,
        step: &B::Step,
        pages: &mut B::Pages,
        guess: usize,
    ) -> Result<Option<&B::Tensor>, Error> {
        let Self { config, ends, workspace: w, mtp: Some(mtp), .. } = self else { return Ok(None) };
        if guess > 0 {
            w.resize(backend, step)?;
            backend.rope_angles(step, &self.frequencies, config.rope.attention_factor(), &mut w.heads.angles)?;
        }
        mtp.enter(backend, step, pages, (&ends.embed, guess), &mut w.base)?;
        mtp.layer.run(&mut Run { backend, step, pages }, config, w)?;
        mtp.leave(backend, step, ends.head(), &mut w.base)?;
        Ok(Some(&w.base.logits))
    }
}
