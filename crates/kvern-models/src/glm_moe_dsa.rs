//! GLM-5 and its relatives DeepSeek-V3 and -V3.2: latent attention, a sparse indexer, and experts.
//!
//! ```text
//! x = embed(tokens)
//! each layer:  x += O · heads(V · attend([Kᵀ · q | rope(q')], [latent | rope(k')]))      with q, q' = QB · rms(QA · h), latent = rms(KVA · h)
//!              x += Mlp(h)  or  Σ weight_e Expert_e(h) + Shared(h)
//! logits = Head · rms(x)
//!
//! index keys:  rope(layer_norm(WK · h))                                                  one head
//! a query attends the columns of the largest Σ_i w_i max(0, rope(WQ_i · rms(QA · h)) · key), w = W · h
//! ```
//!
//! Attention happens in the latent space, in decode and prefill alike, so that both give the same bits: what `kv_b_proj` would make of each column is
//! applied to the query and to the result, by head. All rotations of interleaved pairs become half-split ones by the order in which rows of weights are loaded.
//! GLM's indexer rotates interleaved pairs, DeepSeek-V3.2's half-split ones; the scores' factors change no order and are left out. Columns of equal
//! scores are taken in their order. From GLM-5.2 on, some layers have no indexer and attend what the indexer before them picked (`indexer_types`).
//! Experts are picked by their sigmoid and a bias, and weighed without the bias. The next-token-prediction layer after the last is loaded if asked for; it always has an indexer.

mod config;

use kvern_backend::{Activation, Attention, Backend, Indexer, Slot};
use kvern_state::{GroupSpec, StateSpec};
use kvern_weights::{Checkpoint, Source, Tensor};

use self::config::{Config, Index, Latent};
use crate::config::{Outline, model_type};
use crate::experts::{Bank, ExpertSpace, Experts, Unit};
use crate::loader::{Ends, Loader, rows};
use crate::mlp::Mlp;
use crate::mtp::{self, Mtp};
use crate::workspace::{self, Run};
use crate::{Error, Info, LoadOptions, Model};

/// Epsilons that no configuration names.
const LATENT_EPS: f32 = 1e-6;
const INDEX_EPS: f32 = 1e-6;

struct Indexing<B: Backend> {
    q: B::Linear,
    k: B::Linear,
    /// Weight and bias of the keys' norm.
    k_norm: [B::Vector; 2],
    weights: B::Linear,
}

struct Mixer<B: Backend> {
    q_a: B::Linear,
    q_a_norm: B::Vector,
    q_nope: B::Linear,
    q_rope: B::Linear,
    latent: B::Linear,
    latent_norm: B::Vector,
    k_rope: B::Linear,
    /// By head: queries into the latent space, and results out of it.
    absorb: B::Linear,
    values: B::Linear,
    o: B::Linear,
    indexing: Option<Indexing<B>>,
}

enum FeedForward<B: Backend> {
    Dense(Mlp<B>),
    Sparse { experts: Experts<B>, shared: Option<Mlp<B>> },
}

struct Layer<B: Backend> {
    slot: Slot,
    input_norm: B::Vector,
    mixer: Mixer<B>,
    post_norm: B::Vector,
    feed_forward: FeedForward<B>,
}

/// Activations of a step, `[tokens, …]`.
struct Workspace<B: Backend> {
    base: workspace::Workspace<B>,
    q_a: B::Tensor,
    q_nope: B::Tensor,
    q_rope: B::Tensor,
    absorbed: B::Tensor,
    q: B::Tensor,
    latent: B::Tensor,
    k_rope: B::Tensor,
    attended: B::Tensor,
    values: B::Tensor,
    angles: B::Tensor,
    index: Option<IndexSpace<B>>,
    experts: Option<ExpertSpace<B>>,
}

struct IndexSpace<B: Backend> {
    q: B::Tensor,
    k: B::Tensor,
    weights: B::Tensor,
    /// The columns that each query attends.
    picks: B::Tensor,
}

struct Glm<B: Backend> {
    config: Config,
    info: Info,
    ends: Ends<B>,
    layers: Vec<Layer<B>>,
    frequencies: B::Vector,
    mtp: Option<Mtp<B, Layer<B>>>,
    workspace: Workspace<B>,
}

/// Of `heads` runs of `run` rows, the part `first..first + count`; its first `2 * pairs` rows become half-split if they are `interleaved`.
fn part(heads: usize, run: usize, [first, count]: [usize; 2], interleaved: Option<usize>) -> Option<Vec<u32>> {
    let within = |i: usize| match interleaved {
        Some(pairs) if i < pairs => 2 * i,
        Some(pairs) if i < 2 * pairs => 2 * (i - pairs) + 1,
        _ => i,
    };
    let row = |head: usize, i: usize| (head * run + first + within(i)) as u32;
    Some((0..heads).flat_map(|head| (0..count).map(move |i| row(head, i))).collect())
}

/// What brings queries into the latent space, `[heads * latent, nope]`, and results out of it, `[heads * value, latent]`.
fn load_heads<B: Backend>(loader: &mut Loader<'_, B>, config: &Config, name: &str) -> Result<[B::Linear; 2], Error> {
    let Latent { latent, nope, value, .. } = config.attention;
    let heads = config.outline.heads;
    let (k_b, v_b) = (format!("{name}.k_b_proj.weight"), format!("{name}.v_b_proj.weight"));
    let both = if loader.checkpoint.has(&k_b) {
        [loader.take(&k_b, &[heads, latent, nope])?, loader.take(&v_b, &[heads, value, latent])?]
    } else {
        let run = nope + value;
        let mut rows = |part: Option<Vec<u32>>| -> Result<Tensor, Error> {
            let tensor = loader.take(&format!("{name}.kv_b_proj.weight"), &[heads * run, latent])?;
            Ok(tensor.with_row_order(part.unwrap_or_default()))
        };
        let keys = rows(part(heads, run, [0, nope], None))?;
        [keys.transposed(nope)?, rows(part(heads, run, [nope, value], None))?]
    };
    let [absorb, values] = both;
    Ok([loader.stack(absorb, None, [heads, heads])?, loader.stack(values, None, [heads, heads])?])
}

fn load_indexing<B: Backend>(
    loader: &mut Loader<'_, B>,
    config: &Config,
    (name, index): (&str, Index),
) -> Result<Indexing<B>, Error> {
    let Latent { q_rank, rope, .. } = config.attention;
    let Index { heads, dim, .. } = index;
    let hidden = config.outline.hidden;
    let pairs = index.interleaved.then_some(rope / 2);
    let order = part(1, dim, [0, dim], pairs);
    let in_order = |values: Vec<f32>| order.iter().flatten().map(|&row| values[row as usize]).collect::<Vec<f32>>();
    let weight = loader.take(&format!("{name}.k_norm.weight"), &[dim])?.to_vec();
    let bias = loader.take(&format!("{name}.k_norm.bias"), &[dim])?.to_vec();
    let k_norm = [loader.backend.vector(&in_order(weight))?, loader.backend.vector(&in_order(bias))?];
    let q_order = part(heads, dim, [0, dim], pairs);
    Ok(Indexing {
        q: loader.linear(&format!("{name}.wq_b"), [heads * dim, q_rank], false, q_order)?,
        k: loader.linear(&format!("{name}.wk"), [dim, hidden], false, order.clone())?,
        k_norm,
        weights: loader.linear(&format!("{name}.weights_proj"), [heads, hidden], false, None)?,
    })
}

fn load_mixer<B: Backend>(
    loader: &mut Loader<'_, B>,
    config: &Config,
    (name, index): (&str, Option<Index>),
) -> Result<Mixer<B>, Error> {
    let Latent { q_rank, latent, nope, rope, value, interleaved, bias } = config.attention;
    let Outline { hidden, heads, .. } = config.outline;
    let pairs = interleaved.then_some(rope / 2);
    let mut linear = |part: &str, shape, bias, order| loader.linear(&format!("{name}.{part}"), shape, bias, order);
    let (q_b, kv_a) = ([heads * (nope + rope), q_rank], [latent + rope, hidden]);
    let q_a = linear("q_a_proj", [q_rank, hidden], bias, None)?;
    let q_nope = linear("q_b_proj", q_b, false, part(heads, nope + rope, [0, nope], None))?;
    let q_rope = linear("q_b_proj", q_b, false, part(heads, nope + rope, [nope, rope], pairs))?;
    let latents = linear("kv_a_proj_with_mqa", kv_a, bias, rows(0, latent))?;
    let k_rope = linear("kv_a_proj_with_mqa", kv_a, bias, part(1, latent + rope, [latent, rope], pairs))?;
    let o = linear("o_proj", [hidden, heads * value], bias, None)?;
    let [absorb, values] = load_heads(loader, config, name)?;
    let indexing = match index {
        None => None,
        Some(index) => Some(load_indexing(loader, config, (&format!("{name}.indexer"), index))?),
    };
    Ok(Mixer {
        q_a,
        q_a_norm: loader.vector(&format!("{name}.q_a_layernorm.weight"), q_rank)?,
        q_nope,
        q_rope,
        latent: latents,
        latent_norm: loader.vector(&format!("{name}.kv_a_layernorm.weight"), latent)?,
        k_rope,
        absorb,
        values,
        o,
        indexing,
    })
}

fn load_feed_forward<B: Backend>(
    loader: &mut Loader<'_, B>,
    (config, sparse): (&Config, bool),
    name: &str,
) -> Result<FeedForward<B>, Error> {
    let hidden = config.outline.hidden;
    let Some(moe) = config.experts.as_ref().filter(|_| sparse) else {
        return Ok(FeedForward::Dense(Mlp::load(loader, name, [hidden, config.intermediate], false)?));
    };
    let sizes = moe.sizes;
    let experts = Experts {
        router: loader.linear(&format!("{name}.gate"), [sizes.experts, hidden], false, None)?,
        bias: Some(loader.vector(&format!("{name}.gate.e_score_correction_bias"), sizes.experts)?),
        factors: None,
        routing: moe.routing,
        unit: Unit::Gated(Activation::Silu),
        bank: Bank::load(loader, name, sizes)?,
    };
    let shared = match moe.shared {
        None => None,
        Some(width) => Some(Mlp::load(loader, &format!("{name}.shared_experts"), [hidden, width], false)?),
    };
    Ok(FeedForward::Sparse { experts, shared })
}

fn load_layer<B: Backend>(
    loader: &mut Loader<'_, B>,
    config: &Config,
    (number, slot): (usize, Slot),
    (index, sparse): (Option<Index>, bool),
) -> Result<Layer<B>, Error> {
    let hidden = config.outline.hidden;
    let name = |part: &str| format!("model.layers.{number}.{part}");
    // Older checkpoints store the frequencies that the graph computes.
    loader.checkpoint.ignore(&name("self_attn.rotary_emb.inv_freq"));
    Ok(Layer {
        slot,
        input_norm: loader.vector(&name("input_layernorm.weight"), hidden)?,
        mixer: load_mixer(loader, config, (&name("self_attn"), index))?,
        post_norm: loader.vector(&name("post_attention_layernorm.weight"), hidden)?,
        feed_forward: load_feed_forward(loader, (config, sparse), &name("mlp"))?,
    })
}

/// The next-token-prediction layer, which stands after the last.
fn load_mtp<B: Backend>(
    loader: &mut Loader<'_, B>,
    config: &Config,
    [columns, carry]: [Slot; 2],
    options: &LoadOptions<'_>,
) -> Result<Mtp<B, Layer<B>>, Error> {
    let Outline { hidden, layers, eps, .. } = config.outline;
    let name = |part: &str| format!("model.layers.{layers}.{part}.weight");
    let names = mtp::Names {
        embed_norm: name("enorm"),
        hidden_norm: name("hnorm"),
        fc: name("eh_proj"),
        norm: name("shared_head.norm"),
        offset: 0.0,
    };
    // Copies of the model's own.
    loader.checkpoint.ignore(&name("embed_tokens"));
    loader.checkpoint.ignore(&name("shared_head.head"));
    let layer = load_layer(loader, config, (layers, columns), (config.index, config.experts.is_some()))?;
    Mtp::load(loader, &names, (hidden, eps), (layer, carry), options)
}

/// Loads the model.
pub(crate) fn load<B: Backend>(
    backend: &B,
    mut checkpoint: Checkpoint,
    options: &LoadOptions<'_>,
) -> Result<Box<dyn Model<B>>, Error> {
    let architecture = model_type(checkpoint.source())?;
    let config = match checkpoint.source() {
        Source::Directory { config, .. } => Config::from_json(&architecture, config)?,
        Source::Gguf(metadata) => Config::from_gguf(&architecture, metadata)?,
    };
    let fingerprint = checkpoint.fingerprint();
    config::rename(&mut checkpoint)?;
    let Outline { hidden, heads, layers: count, .. } = config.outline;
    let is_left_out = |name: &&str| {
        let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
        layer.is_some_and(|layer| layer >= count + usize::from(options.draft))
    };
    let left_out: Vec<String> = checkpoint.names().filter(is_left_out).map(String::from).collect();
    left_out.iter().for_each(|name| checkpoint.ignore(name));
    let mut loader = Loader::new(backend, checkpoint, options);
    let ends = loader.ends(&config.outline, 0.0)?;
    let Latent { q_rank, latent, nope, rope, value, .. } = config.attention;
    let group = |index: usize, of: usize, indexer: Option<Index>| {
        options.kv.apply(index, of, ends.codec, |(codec, _)| {
            GroupSpec::latent(1, latent, rope, indexer.map(|indexer| indexer.dim), codec)
        })
    };
    let index = |layer: usize| config.index.filter(|_| config.own_index[layer]);
    let mut states: Vec<GroupSpec> = (0..count).map(|layer| group(layer, count, index(layer))).collect();
    if options.draft {
        // A layer by itself, neither first nor last of the model's.
        states.extend([group(count, 2 * count + 1, config.index).companion(1), mtp::carry(hidden)]);
    }
    let (spec, mut slots) = StateSpec::from_layers(options.page, states)?;
    let head_slots = slots.split_off(count);
    let of = |loader: &mut Loader<'_, B>, (number, &slot): (usize, &Slot)| {
        load_layer(loader, &config, (number, slot), (index(number), config.sparse[number]))
    };
    let layers = slots.iter().enumerate().map(|layer| of(&mut loader, layer)).collect::<Result<Vec<_>, _>>()?;
    let mtp = match head_slots[..] {
        [columns, carry] => Some(loader.beside(|loader| load_mtp(loader, &config, [columns, carry], options))?),
        _ => None,
    };
    let info = config.outline.info(&architecture, spec, fingerprint, loader.finish()?);
    let tokens = |width| backend.tensor(options.max_tokens, width);
    let workspace = Workspace {
        base: workspace::Workspace::new(backend, options, &config.outline, &config.widths())?,
        q_a: tokens(q_rank)?,
        q_nope: tokens(heads * nope)?,
        q_rope: tokens(heads * rope)?,
        absorbed: tokens(heads * latent)?,
        q: tokens(heads * (latent + rope))?,
        latent: tokens(latent)?,
        k_rope: tokens(rope)?,
        attended: tokens(heads * latent)?,
        values: tokens(heads * value)?,
        angles: tokens(rope)?,
        index: match config.index {
            None => None,
            Some(Index { heads, dim, picks, .. }) => Some(IndexSpace {
                q: tokens(heads * dim)?,
                k: tokens(dim)?,
                weights: tokens(heads)?,
                picks: tokens(picks)?,
            }),
        },
        experts: match &config.experts {
            None => None,
            Some(moe) => Some(ExpertSpace::new(backend, options, moe.sizes)?),
        },
    };
    let frequencies = backend.vector(&config.rope.frequencies())?;
    Ok(Box::new(Glm { config, info, ends, layers, frequencies, mtp, workspace }))
}

impl<B: Backend> Layer<B> {
    /// Adds attention and feed-forward part to `w.base.x`.
    fn run(&self, run: &mut Run<'_, B>, config: &Config, w: &mut Workspace<B>) -> Result<(), Error> {
        let (backend, eps) = (run.backend, config.outline.eps);
        backend.rms_norm(&w.base.x, &self.input_norm, eps, &mut w.base.h)?;
        self.mixer.run(run, self.slot, config, w)?;
        match (&self.feed_forward, &mut w.experts) {
            (FeedForward::Sparse { experts, shared }, Some(space)) => {
                let base = &mut w.base;
                backend.rms_norm(&base.x, &self.post_norm, eps, &mut base.h)?;
                experts.add(backend, (&base.h, &base.h), space, &mut base.x)?;
                if let Some(shared) = shared {
                    shared.add_of(backend, Activation::Silu, base)?;
                }
                Ok(())
            }
            (FeedForward::Dense(mlp), _) => mlp.add(backend, Activation::Silu, (&self.post_norm, eps), &mut w.base),
            // A model with experts has room for them.
            (FeedForward::Sparse { .. }, None) => Ok(()),
        }
    }
}

impl<B: Backend> Mixer<B> {
    /// `x += O · …` of `h`.
    fn run(&self, run: &mut Run<'_, B>, slot: Slot, config: &Config, w: &mut Workspace<B>) -> Result<(), Error> {
        let Run { backend, step, pages } = run;
        let Latent { rope, .. } = config.attention;
        let heads = config.outline.heads;
        let inputs = &mut [(&self.q_a, &mut w.q_a), (&self.latent, &mut w.latent), (&self.k_rope, &mut w.k_rope)];
        backend.project(&w.base.h, inputs)?;
        backend.rms_norm_in_place(&mut w.q_a, &self.q_a_norm, LATENT_EPS)?;
        backend.rms_norm_in_place(&mut w.latent, &self.latent_norm, LATENT_EPS)?;
        backend.project(&w.q_a, &mut [(&self.q_nope, &mut w.q_nope), (&self.q_rope, &mut w.q_rope)])?;
        backend.rope(&mut w.q_rope, &w.angles, rope)?;
        backend.rope(&mut w.k_rope, &w.angles, rope)?;
        backend.project_heads(&w.q_nope, &self.absorb, &mut w.absorbed)?;
        backend.join(heads, &w.absorbed, &w.q_rope, &mut w.q)?;
        match (&self.indexing, &mut w.index, config.index) {
            (Some(indexing), Some(space), Some(index)) => {
                backend.project(&w.q_a, &mut [(&indexing.q, &mut space.q)])?;
                let of_h = &mut [(&indexing.k, &mut space.k), (&indexing.weights, &mut space.weights)];
                backend.project(&w.base.h, of_h)?;
                let [weight, bias] = &indexing.k_norm;
                backend.layer_norm_in_place(&mut space.k, [weight, bias], INDEX_EPS)?;
                backend.rope(&mut space.q, &w.angles, index.dim)?;
                backend.rope(&mut space.k, &w.angles, index.dim)?;
                backend.append(step, pages, slot, &[&w.latent, &w.k_rope, &space.k])?;
                let indexer = Indexer { slot, heads: index.heads };
                backend.select(step, pages, indexer, (&space.q, &space.weights), &mut space.picks)?;
            }
            _ => backend.append(step, pages, slot, &[&w.latent, &w.k_rope])?,
        }
        let attention = Attention { slot, heads, scale: config.scale, softcap: None };
        match &w.index {
            Some(space) => backend.attend_picked(step, pages, attention, &space.picks, &w.q, &mut w.attended)?,
            None => backend.attend(step, pages, attention, None, &w.q, &mut w.attended)?,
        }
        backend.project_heads(&w.attended, &self.values, &mut w.values)?;
        Ok(backend.project_add(&w.values, &self.o, &mut w.base.x)?)
    }
}

impl<B: Backend> Workspace<B> {
    fn resize(&mut self, backend: &B, step: &B::Step) -> Result<(), Error> {
        let tokens = backend.rows(step).0;
        let Self { base, q_a, q_nope, q_rope, absorbed, q, latent, k_rope, attended, values, angles, index, experts } =
            self;
        base.resize(backend, step)?;
        experts.iter_mut().try_for_each(|space| space.resize(backend, step))?;
        let index = index.iter_mut().flat_map(|s| [&mut s.q, &mut s.k, &mut s.weights, &mut s.picks]);
        let own = [q_a, q_nope, q_rope, absorbed, q, latent, k_rope, attended, values, angles];
        Ok(own.into_iter().chain(index).try_for_each(|tensor| backend.resize(tensor, tokens))?)
    }
}

impl<B: Backend> Model<B> for Glm<B> {
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
        backend.rope_angles(step, &self.frequencies, config.rope.attention_factor(), &mut w.angles)?;
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
            backend.rope_angles(step, &self.frequencies, config.rope.attention_factor(), &mut w.angles)?;
        }
        mtp.enter(backend, step, pages, (&ends.embed, guess), &mut w.base)?;
        mtp.layer.run(&mut Run { backend, step, pages }, config, w)?;
        mtp.leave(backend, step, ends.head(), &mut w.base)?;
        Ok(Some(&w.base.logits))
    }
}
