//! Qwen3.5, dense: gated delta nets with a full-attention layer in every few.
//!
//! ```text
//! x = embed(tokens)
//! each layer:  x += Mixer(rms(x))
//!              x += Down · (silu(Gate · h) * (Up · h))         with h = rms(x)
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
//! `[channels, taps, 1]` and the sums. (The weights themselves do not tell: the mean of a trained raw one can be 0.94.) The recurrence runs in f32, token by token, in prefill and decode alike. The
//! multi-token-prediction head (`mtp.*`) is loaded if asked for; a vision part is left out.

mod mtp;

use kvern_backend::{Activation, Attention, Backend, DeltaInputs, DeltaRule, Slot};
use kvern_state::{GroupSpec, StateSpec};
use kvern_weights::{Checkpoint, Source};
use serde_json::Value;

use self::mtp::Mtp;
use crate::config::{Fields, check_multiple};
use crate::loader::{Loader, state_codec};
use crate::rope::Rope;
use crate::workspace::{self, Widths};
use crate::{Error, Info, LoadOptions, Model};

/// The shapes of a model.
#[derive(Debug, Clone)]
struct Config {
    hidden: usize,
    layers: usize,
    intermediate: usize,
    vocab: usize,
    context: usize,
    eps: f32,
    tied: bool,
    /// Which layers attend.
    attends: Vec<bool>,
    heads: usize,
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
        let wrong = |field: &str, expected, found: String| Error::Config { field: field.into(), expected, found };
        let layers = fields.needed("num_hidden_layers")?;
        let interval = fields.count("full_attention_interval")?.unwrap_or(4);
        let kinds = ["full_attention", "linear_attention"];
        let attends = fields.layer_types(layers, kinds, "full_attention or linear_attention")?;
        let attends = attends.unwrap_or_else(|| (1..=layers).map(|layer| layer % interval == 0).collect());
        let heads = fields.needed("num_attention_heads")?;
        let kv_heads = fields.count("num_key_value_heads")?.unwrap_or(heads);
        check_multiple("num_attention_heads", heads, "a multiple of num_key_value_heads", kv_heads)?;
        let (key_heads, value_heads) =
            (fields.needed("linear_num_key_heads")?, fields.needed("linear_num_value_heads")?);
        check_multiple("linear_num_value_heads", value_heads, "a multiple of linear_num_key_heads", key_heads)?;
        if fields.flag("attn_output_gate")? == Some(false) {
            return Err(wrong("attn_output_gate", "true", "false".into()));
        }
        let head_dim = fields.count("head_dim")?.unwrap_or(256);
        let context = fields.count("max_position_embeddings")?.unwrap_or(32_768);
        let tied = fields.flag("tie_word_embeddings")?.or(outer.flag("tie_word_embeddings")?).unwrap_or(false);
        Ok(Self {
            hidden: fields.needed("hidden_size")?,
            layers,
            intermediate: fields.needed("intermediate_size")?,
            vocab: fields.needed("vocab_size")?,
            context,
            eps: fields.float("rms_norm_eps")?.unwrap_or(1e-6) as f32,
            tied,
            attends,
            heads,
            kv_heads,
            head_dim,
            rope: Rope::from_config(fields, head_dim, context)?,
            key_heads,
            value_heads,
            key_dim: fields.needed("linear_key_head_dim")?,
            value_dim: fields.needed("linear_value_head_dim")?,
            taps: fields.count("linear_conv_kernel_dim")?.unwrap_or(4),
        })
    }

    /// Widths of the queries or keys and of the values of a delta net.
    fn delta_widths(&self) -> [usize; 2] {
        [self.key_heads * self.key_dim, self.value_heads * self.value_dim]
    }

    /// What a layer's row remembers.
    fn state(
        &self,
        index: usize,
        kv: impl Fn(&dyn Fn((kvern_state::Codec, kvern_state::Codec)) -> GroupSpec) -> GroupSpec,
    ) -> GroupSpec {
        if self.attends[index] {
            return kv(&|codecs| GroupSpec::attention(1, self.kv_heads, self.head_dim, self.head_dim, codecs));
        }
        let [keys, values] = self.delta_widths();
        let tail = self.taps - 1;
        let state = self.value_heads * self.key_dim * self.value_dim;
        // The planes that `Delta` names.
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

struct Layer<B: Backend> {
    slot: Slot,
    input_norm: B::Vector,
    mixer: Mixer<B>,
    post_norm: B::Vector,
    gate: B::Linear,
    up: B::Linear,
    down: B::Linear,
}

/// Activations of a step: those of every decoder, the gate of full attention, and what a delta net needs; all `[tokens, …]`.
struct Workspace<B: Backend> {
    base: workspace::Workspace<B>,
    q_gate: B::Tensor,
    /// Queries, keys and values before and after the convolution.
    raw: [B::Tensor; 3],
    convolved: [B::Tensor; 3],
    z: B::Tensor,
    decay: B::Tensor,
    beta: B::Tensor,
    read: B::Tensor,
}

struct Qwen35<B: Backend> {
    config: Config,
    info: Info,
    embed: B::Linear,
    head: Option<B::Linear>,
    norm: B::Vector,
    layers: Vec<Layer<B>>,
    frequencies: B::Vector,
    /// Weights that bring queries and keys of a delta net to their length: `key_dim^-1` and `key_dim^-1/2`.
    lengths: [B::Vector; 2],
    mtp: Option<Mtp<B>>,
    workspace: Workspace<B>,
}

/// Rows `first..first + count` of a matrix that holds several.
fn rows(first: usize, count: usize) -> Option<Vec<u32>> {
    Some((first as u32..(first + count) as u32).collect())
}

fn load_full<B: Backend>(
    loader: &mut Loader<'_, B>,
    config: &Config,
    name: &str,
    offset: f32,
) -> Result<Full<B>, Error> {
    let Config { hidden, heads, kv_heads, head_dim: dim, .. } = *config;
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

fn load_delta<B: Backend>(loader: &mut Loader<'_, B>, config: &Config, name: &str) -> Result<Delta<B>, Error> {
    let Config { hidden, value_heads, taps, .. } = *config;
    let [keys, values] = config.delta_widths();
    let channels = 2 * keys + values;
    let conv = format!("{name}.conv1d.weight");
    // A converter moves the axis of taps; the elements stay where they are.
    let converted = is_converted(&loader.checkpoint, name);
    let kernel = loader.take(&conv, &if converted { [channels, taps, 1] } else { [channels, 1, taps] })?.to_vec();
    let backend = loader.backend;
    let mut input = |first: usize, width: usize| -> Result<(B::Linear, B::Vector), Error> {
        let taps_first = (0..taps).flat_map(|tap| (first..first + width).map(move |channel| channel * taps + tap));
        let kernel = backend.vector(&taps_first.map(|at| kernel[at]).collect::<Vec<f32>>())?;
        Ok((loader.linear(&format!("{name}.in_proj_qkv"), [channels, hidden], false, rows(first, width))?, kernel))
    };
    let inputs = [input(0, keys)?, input(keys, keys)?, input(2 * keys, values)?];
    let rate = loader.take(&format!("{name}.A_log"), &[value_heads])?.to_vec();
    let rate: Vec<f32> = rate.into_iter().map(|log| f64::from(log).exp() as f32).collect();
    Ok(Delta {
        inputs,
        z: loader.linear(&format!("{name}.in_proj_z"), [values, hidden], false, None)?,
        a: loader.linear(&format!("{name}.in_proj_a"), [value_heads, hidden], false, None)?,
        b: loader.linear(&format!("{name}.in_proj_b"), [value_heads, hidden], false, None)?,
        rate: backend.vector(&rate)?,
        bias: loader.vector(&format!("{name}.dt_bias"), value_heads)?,
        norm: loader.vector(&format!("{name}.norm.weight"), config.value_dim)?,
        o: loader.linear(&format!("{name}.out_proj"), [hidden, values], false, None)?,
    })
}

/// Whether a delta net's tensors went through a converter.
fn is_converted(checkpoint: &Checkpoint, name: &str) -> bool {
    checkpoint.shape(&format!("{name}.conv1d.weight")).is_some_and(|shape| shape.last() == Some(&1))
}

/// Loads the model.
pub(crate) fn load<B: Backend>(
    backend: &B,
    mut checkpoint: Checkpoint,
    options: &LoadOptions<'_>,
) -> Result<Box<dyn Model<B>>, Error> {
    let config = match checkpoint.source() {
        Source::Directory { config, .. } => Config::from_json(config)?,
        Source::Gguf(_) => {
            let (field, found) = ("general.architecture".into(), "qwen3_5 in a GGUF file".into());
            return Err(Error::Config { field, expected: "a directory in Hugging Face layout", found });
        }
    };
    let fingerprint = checkpoint.fingerprint();
    // Multimodal checkpoints name the text model one level deeper.
    checkpoint.rename(|name| {
        name.replacen("model.language_model.", "model.", 1).replacen("language_model.model.", "model.", 1)
    })?;
    let left_out = |name: &&str| is_vision(name) || (!options.draft && name.starts_with("mtp."));
    let others: Vec<String> = checkpoint.names().filter(left_out).map(String::from).collect();
    others.iter().for_each(|name| checkpoint.ignore(name));
    let mut loader = Loader::new(backend, checkpoint, options);
    let Config { hidden, intermediate: ffn, .. } = config;
    let delta = config.attends.iter().position(|attends| !attends);
    let converted =
        delta.is_some_and(|index| is_converted(&loader.checkpoint, &format!("model.layers.{index}.linear_attn")));
    // What the norms' weights lack.
    let offset = if converted { 0.0 } else { 1.0 };
    let embed = loader.take("model.embed_tokens.weight", &[config.vocab, hidden])?;
    let own = state_codec(&embed);
    let embed = backend.linear(embed, None)?;
    let head = if config.tied {
        loader.checkpoint.ignore("lm_head.weight");
        None
    } else {
        Some(loader.linear("lm_head", [config.vocab, hidden], false, None)?)
    };
    let mut states: Vec<GroupSpec> = (0..config.layers)
        .map(|index| config.state(index, |group| options.kv.apply(index, config.layers, own, group)))
        .collect();
    if options.draft {
        states.extend(mtp::states(&config, own, options));
    }
    let (spec, mut slots) = StateSpec::from_layers(options.page, states)?;
    let head_slots = slots.split_off(config.layers);
    let mut layers = Vec::with_capacity(config.layers);
    for (index, &slot) in slots.iter().enumerate() {
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let mixer = if config.attends[index] {
            Mixer::Full(load_full(&mut loader, &config, &name("self_attn"), offset)?)
        } else {
            Mixer::Delta(load_delta(&mut loader, &config, &name("linear_attn"))?)
        };
        layers.push(Layer {
            slot,
            input_norm: loader.norm(&name("input_layernorm.weight"), hidden, offset)?,
            mixer,
            post_norm: loader.norm(&name("post_attention_layernorm.weight"), hidden, offset)?,
            gate: loader.linear(&name("mlp.gate_proj"), [ffn, hidden], false, None)?,
            up: loader.linear(&name("mlp.up_proj"), [ffn, hidden], false, None)?,
            down: loader.linear(&name("mlp.down_proj"), [hidden, ffn], false, None)?,
        });
    }
    let norm = loader.norm("model.norm.weight", hidden, offset)?;
    let mtp = match head_slots[..] {
        [columns, carry] => Some(Mtp::load(&mut loader, &config, [columns, carry], options)?),
        _ => None,
    };
    loader.checkpoint.finish()?;
    let layer_bytes: usize = layers.iter().flat_map(Layer::linears).map(|linear| backend.linear_bytes(linear)).sum();
    let mtp_bytes: usize = mtp.iter().flat_map(Mtp::linears).map(|linear| backend.linear_bytes(linear)).sum();
    let embed_bytes = backend.linear_bytes(&embed);
    let head_bytes = head.as_ref().map_or(0, |head| backend.linear_bytes(head));
    let [keys, values] = config.delta_widths();
    let (q_width, kv_width) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
    let mixer_parameters = |&attends: &bool| match attends {
        true => hidden * (3 * q_width + 2 * kv_width),
        false => hidden * (2 * keys + 3 * values + 2 * config.value_heads),
    };
    let info = Info {
        architecture: "qwen3_5".into(),
        layers: config.layers,
        hidden,
        heads: config.heads,
        vocab: config.vocab,
        context: config.context,
        spec,
        fingerprint,
        weight_bytes: layer_bytes + embed_bytes + head_bytes + mtp_bytes,
        step_weight_bytes: layer_bytes + if head.is_some() { head_bytes } else { embed_bytes },
        layer_parameters: config.attends.iter().map(mixer_parameters).sum::<usize>() + config.layers * 3 * hidden * ffn,
    };
    let tokens = |width| backend.tensor(options.max_tokens, width);
    let widths =
        Widths { hidden, q: q_width, kv: kv_width, intermediate: ffn, angles: config.rope.dims, vocab: config.vocab };
    let workspace = Workspace {
        base: workspace::Workspace::new(backend, options, &widths)?,
        q_gate: tokens(q_width)?,
        raw: [tokens(keys)?, tokens(keys)?, tokens(values)?],
        convolved: [tokens(keys)?, tokens(keys)?, tokens(values)?],
        z: tokens(values)?,
        decay: tokens(config.value_heads)?,
        beta: tokens(config.value_heads)?,
        read: tokens(values)?,
    };
    let frequencies = backend.vector(&config.rope.frequencies())?;
    let dim = config.key_dim as f32;
    let lengths =
        [backend.vector(&vec![1.0 / dim; config.key_dim])?, backend.vector(&vec![dim.sqrt().recip(); config.key_dim])?];
    Ok(Box::new(Qwen35 { config, info, embed, head, norm, layers, frequencies, lengths, mtp, workspace }))
}

/// Whether a tensor belongs to the part of a model that sees.
fn is_vision(name: &str) -> bool {
    ["model.visual.", "visual.", "vision_tower."].iter().any(|prefix| name.starts_with(prefix))
}

impl<B: Backend> Layer<B> {
    /// Adds the layer's mixer and its feed-forward part to `w.base.x`.
    fn run(
        &self,
        backend: &B,
        step: &B::Step,
        pages: &mut B::Pages,
        (config, lengths): (&Config, &[B::Vector; 2]),
        w: &mut Workspace<B>,
    ) -> Result<(), Error> {
        backend.rms_norm(&w.base.x, &self.input_norm, config.eps, &mut w.base.h)?;
        match &self.mixer {
            Mixer::Full(full) => full.run(backend, step, pages, self.slot, config, w)?,
            Mixer::Delta(delta) => delta.run(backend, step, pages, self.slot, (config, lengths), w)?,
        }
        let w = &mut w.base;
        let gated = &mut [(&self.gate, &mut w.gate), (&self.up, &mut w.up)];
        backend.project_norm(&w.x, (&self.post_norm, config.eps), &mut w.h, gated)?;
        Ok(backend.project_gate_add((Activation::Silu, &mut w.gate, &w.up), &self.down, &mut w.x)?)
    }

    fn linears(&self) -> Vec<&B::Linear> {
        let mut all = vec![&self.gate, &self.up, &self.down];
        match &self.mixer {
            Mixer::Full(full) => all.extend([&full.q, &full.gate, &full.k, &full.v, &full.o]),
            Mixer::Delta(delta) => {
                all.extend([&delta.z, &delta.a, &delta.b, &delta.o]);
                all.extend(delta.inputs.iter().map(|(linear, _)| linear));
            }
        }
        all
    }
}

impl<B: Backend> Full<B> {
    /// `x += O · (sigmoid(g) * attend(q, k, v))` of `h`.
    fn run(
        &self,
        backend: &B,
        step: &B::Step,
        pages: &mut B::Pages,
        slot: Slot,
        config: &Config,
        w: &mut Workspace<B>,
    ) -> Result<(), Error> {
        let scale = (config.head_dim as f32).sqrt().recip();
        backend.project(
            &w.base.h,
            &mut [
                (&self.q, &mut w.base.q),
                (&self.gate, &mut w.q_gate),
                (&self.k, &mut w.base.k),
                (&self.v, &mut w.base.v),
            ],
        )?;
        backend.rms_norm_in_place(&mut w.base.q, &self.q_norm, config.eps)?;
        backend.rms_norm_in_place(&mut w.base.k, &self.k_norm, config.eps)?;
        let (base, dim) = (&mut w.base, config.head_dim);
        backend.rope_append(step, pages, slot, (&mut base.q, &mut base.k, &base.v), (&base.angles, dim))?;
        let attention = Attention { slot, heads: config.heads, scale, softcap: None };
        backend.attend(step, pages, attention, None, &w.base.q, &mut w.base.attended)?;
        backend.gate(Activation::Sigmoid, &mut w.q_gate, &w.base.attended)?;
        Ok(backend.project_add(&w.q_gate, &self.o, &mut w.base.x)?)
    }
}

impl<B: Backend> Delta<B> {
    /// `x += O · (silu(z) * rms(delta(…)))` of `h`.
    fn run(
        &self,
        backend: &B,
        step: &B::Step,
        pages: &mut B::Pages,
        slot: Slot,
        (config, lengths): (&Config, &[B::Vector; 2]),
        w: &mut Workspace<B>,
    ) -> Result<(), Error> {
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
        backend.rms_norm_in_place(q, &lengths[0], eps)?;
        backend.rms_norm_in_place(k, &lengths[1], eps)?;
        let Config { key_heads, value_heads: heads, key_dim, value_dim, .. } = *config;
        let rule = DeltaRule { slot, plane: STATE, heads, key_heads, key_dim, value_dim };
        let inputs = DeltaInputs { q, k, v, decay: &w.decay, beta: &w.beta };
        backend.delta_rule(step, pages, rule, inputs, &mut w.read)?;
        backend.rms_norm_in_place(&mut w.read, &self.norm, config.eps)?;
        backend.gate(Activation::Silu, &mut w.z, &w.read)?;
        Ok(backend.project_add(&w.z, &self.o, &mut w.base.x)?)
    }
}

impl<B: Backend> Workspace<B> {
    fn resize(&mut self, backend: &B, step: &B::Step) -> Result<(), Error> {
        self.base.resize(backend, step)?;
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
        let Self { config, workspace: w, .. } = self;
        w.resize(backend, step)?;
        backend.embed(step, &self.embed, 1.0, &mut w.base.x)?;
        backend.rope_angles(step, &self.frequencies, config.rope.attention_factor(), &mut w.base.angles)?;
        for layer in &self.layers {
            layer.run(backend, step, pages, (config, &self.lengths), w)?;
        }
        if let Some(mtp) = &mut self.mtp {
            // The head takes the normed hidden state of every token.
            backend.rms_norm(&w.base.x, &self.norm, config.eps, &mut w.base.h)?;
            mtp.carry(backend, step, pages, &w.base.h)?;
        }
        let head = self.head.as_ref().unwrap_or(&self.embed);
        w.base.head(backend, step, &self.norm, config.eps, head)?;
        Ok(&w.base.logits)
    }

    fn draft(
        &mut self,
        backend: &B,
        step: &B::Step,
        pages: &mut B::Pages,
        guess: usize,
    ) -> Result<Option<&B::Tensor>, Error> {
        let Self { config, workspace: w, mtp: Some(mtp), .. } = self else { return Ok(None) };
        if guess > 0 {
            w.resize(backend, step)?;
            backend.rope_angles(step, &self.frequencies, config.rope.attention_factor(), &mut w.base.angles)?;
        }
        mtp.run(backend, step, pages, (config, &self.embed, &self.lengths), guess, w)?;
        let head = self.head.as_ref().unwrap_or(&self.embed);
        backend.project(&w.base.last_norm, &mut [(head, &mut w.base.logits)])?;
        Ok(Some(&w.base.logits))
    }
}
