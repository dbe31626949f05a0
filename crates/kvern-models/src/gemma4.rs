//! Gemma 4, its text model: dense with per-layer inputs (E2B, E4B), or with experts beside the dense part.
//!
//! ```text
//! x = sqrt(hidden) * embed(tokens)
//! inputs of all layers = (rms(P · x / sqrt(hidden)) + sqrt(width) * embed'(tokens)) / sqrt(2)
//! each layer:  x += rms(O · attend(rope(rms(q)), rope(rms(k)), rms(v)))      with q, k, v = Q, K, V · rms(x); scores are not scaled
//!              x += rms(Mlp(rms(x)))                                         or, with experts:
//!              x += rms(rms(Mlp(rms(x))) + rms(Experts(rms(x))))             routed by Router · (rms(x) * scale / sqrt(hidden))
//!              x += rms(U · (gelu(G · x) * the layer's input))
//!              x *= the layer's scalar
//! logits = cap * tanh(Embed · rms(x) / cap)
//! ```
//!
//! Sliding and full layers differ in head dimension, rotation and, with `attention_k_eq_v`, in that a full layer's values are its keys before their norm and
//! rotation. Norms multiply by their weight alone (not 1 + weight, as in Gemma 2); that of values has none. The last layers own no state: they attend
//! that of the last layer before them of their kind. What they compute is needed only where logits are, so a step runs them there and nowhere else. In
//! the full layers' rotation only the first pairs of a head turn, at the frequencies that they have among all. Hugging Face transformers
//! decides where mlx-lm has other defaults.

mod config;

use kvern_backend::{Activation, Attention, Backend, Routing, Score, Slot};
use kvern_state::{GroupSpec, StateSpec, Window};
use kvern_weights::{Checkpoint, Source};

use self::config::{Config, Shape};
use crate::config::Outline;
use crate::experts::{Bank, ExpertSpace, Experts, Sizes, Unit};
use crate::loader::{Ends, Loader};
use crate::mlp::Mlp;
use crate::workspace::{self, Heads, Run};
use crate::{Error, Info, LoadOptions, Model};

/// What makes a layer's own keys and values.
struct Own<B: Backend> {
    k: B::Linear,
    /// Absent where values are the keys.
    v: Option<B::Linear>,
    k_norm: B::Vector,
}

/// The experts of a layer and the norms around them.
struct Sparse<B: Backend> {
    experts: Experts<B>,
    /// The router's norm, with its scale.
    router_norm: B::Vector,
    pre_norm: B::Vector,
    post_dense_norm: B::Vector,
    post_norm: B::Vector,
}

/// What a layer makes of its own input.
struct PerLayer<B: Backend> {
    gate: B::Linear,
    up: B::Linear,
    norm: B::Vector,
}

struct Layer<B: Backend> {
    /// Its kind: an index of what there is for each kind.
    kind: usize,
    slot: Slot,
    input_norm: B::Vector,
    q: B::Linear,
    q_norm: B::Vector,
    own: Option<Own<B>>,
    o: B::Linear,
    post_attention_norm: B::Vector,
    pre_mlp_norm: B::Vector,
    mlp: Mlp<B>,
    sparse: Option<Sparse<B>>,
    post_mlp_norm: B::Vector,
    per_layer: Option<PerLayer<B>>,
    scalar: f32,
}

/// What makes the layers' inputs.
struct Inputs<B: Backend> {
    embed: B::Linear,
    project: B::Linear,
    norm: B::Vector,
}

/// Activations of the layers' inputs: of all layers, at the tokens and at the outputs, and of one.
struct InputSpace<B: Backend> {
    all: B::Tensor,
    projected: B::Tensor,
    last: B::Tensor,
    one: B::Tensor,
    gate: B::Tensor,
}

/// Activations of experts: what the router sees, what the experts see, their sum, and the sum with the dense part.
struct SparseSpace<B: Backend> {
    experts: ExpertSpace<B>,
    seen: B::Tensor,
    h: B::Tensor,
    out: B::Tensor,
    sum: B::Tensor,
}

struct Workspace<B: Backend> {
    base: workspace::Workspace<B>,
    /// For each kind of layer, as are the norm of values and the rotations' frequencies.
    heads: [Heads<B>; 2],
    ones: [B::Vector; 2],
    frequencies: [B::Vector; 2],
    inputs: Option<InputSpace<B>>,
    sparse: Option<SparseSpace<B>>,
}

struct Gemma4<B: Backend> {
    config: Config,
    info: Info,
    ends: Ends<B>,
    inputs: Option<Inputs<B>>,
    layers: Vec<Layer<B>>,
    workspace: Workspace<B>,
}

fn load_sparse<B: Backend>(loader: &mut Loader<'_, B>, sizes: Sizes, name: &str) -> Result<Sparse<B>, Error> {
    let hidden = sizes.hidden;
    let root = (hidden as f32).sqrt().recip();
    Ok(Sparse {
        router_norm: loader.mapped(&format!("{name}.router.scale"), hidden, |scale| scale * root)?,
        experts: Experts {
            router: loader.linear(&format!("{name}.router.proj"), [sizes.experts, hidden], false, None)?,
            bias: None,
            factors: Some(loader.vector(&format!("{name}.router.per_expert_scale"), sizes.experts)?),
            routing: Routing { score: Score::Softmax, normalize: true, scale: 1.0, groups: None },
            unit: Unit::Gated(Activation::GeluTanh),
            bank: Bank::load(loader, name, sizes)?,
        },
        pre_norm: loader.vector(&format!("{name}.pre_feedforward_layernorm_2.weight"), hidden)?,
        post_dense_norm: loader.vector(&format!("{name}.post_feedforward_layernorm_1.weight"), hidden)?,
        post_norm: loader.vector(&format!("{name}.post_feedforward_layernorm_2.weight"), hidden)?,
    })
}

fn load_layer<B: Backend>(
    loader: &mut Loader<'_, B>,
    config: &Config,
    index: usize,
    slot: Slot,
) -> Result<Layer<B>, Error> {
    let Outline { hidden, heads, .. } = config.outline;
    let kind = usize::from(!config.sliding[index]);
    let Shape { dim, kv_heads, values_are_keys, .. } = config.shapes[kind];
    let layer = format!("model.layers.{index}");
    let name = |part: &str| format!("{layer}.{part}");
    let norm = |loader: &mut Loader<'_, B>, part: &str, width| loader.vector(&name(&format!("{part}.weight")), width);
    let linear = |loader: &mut Loader<'_, B>, part: &str, shape| loader.linear(&name(part), shape, false, None);
    let kv = [kv_heads * dim, hidden];
    let own = if index < config.shared_from {
        let k = linear(loader, "self_attn.k_proj", kv)?;
        let v = if values_are_keys { None } else { Some(linear(loader, "self_attn.v_proj", kv)?) };
        Some(Own { k, v, k_norm: norm(loader, "self_attn.k_norm", dim)? })
    } else {
        // Some checkpoints store what a layer without state has no use for.
        for part in ["k_proj", "v_proj", "k_norm", "v_norm"] {
            loader.checkpoint.ignore(&name(&format!("self_attn.{part}.weight")));
        }
        None
    };
    let per_layer = match config.per_layer {
        None => None,
        Some(width) => Some(PerLayer {
            gate: linear(loader, "per_layer_input_gate", [width, hidden])?,
            up: linear(loader, "per_layer_projection", [hidden, width])?,
            norm: norm(loader, "post_per_layer_input_norm", hidden)?,
        }),
    };
    let sparse = match config.experts {
        None => None,
        Some(sizes) => Some(load_sparse(loader, sizes, &layer)?),
    };
    Ok(Layer {
        kind,
        slot,
        input_norm: norm(loader, "input_layernorm", hidden)?,
        q: linear(loader, "self_attn.q_proj", [heads * dim, hidden])?,
        q_norm: norm(loader, "self_attn.q_norm", dim)?,
        own,
        o: linear(loader, "self_attn.o_proj", [hidden, heads * dim])?,
        post_attention_norm: norm(loader, "post_attention_layernorm", hidden)?,
        pre_mlp_norm: norm(loader, "pre_feedforward_layernorm", hidden)?,
        mlp: Mlp::load(loader, &name("mlp"), [hidden, config.intermediate[index]], false)?,
        sparse,
        post_mlp_norm: norm(loader, "post_feedforward_layernorm", hidden)?,
        per_layer,
        scalar: loader.take(&name("layer_scalar"), &[1])?.to_vec()[0],
    })
}

fn load_inputs<B: Backend>(loader: &mut Loader<'_, B>, config: &Config, width: usize) -> Result<Inputs<B>, Error> {
    let Outline { hidden, layers, .. } = config.outline;
    let embed = loader.take("model.embed_tokens_per_layer.weight", &[config.per_layer_vocab, layers * width])?;
    let root = 0.5f32.sqrt();
    Ok(Inputs {
        embed: loader.backend.linear(embed, None)?,
        project: loader.linear("model.per_layer_model_projection", [layers * width, hidden], false, None)?,
        norm: loader.mapped("model.per_layer_projection_norm.weight", width, |weight| weight * root)?,
    })
}

/// Loads the model.
pub(crate) fn load<B: Backend>(
    backend: &B,
    mut checkpoint: Checkpoint,
    options: &LoadOptions<'_>,
) -> Result<Box<dyn Model<B>>, Error> {
    let fingerprint = checkpoint.fingerprint();
    let config = match checkpoint.source() {
        Source::Directory { config, .. } => Config::from_json(config)?,
        Source::Gguf(metadata) => Config::from_gguf(&metadata.clone(), &mut checkpoint)?,
    };
    config::rename(&mut checkpoint)?;
    let mut loader = Loader::new(backend, checkpoint, options);
    let Outline { hidden, heads, layers: count, .. } = config.outline;
    let ends = loader.ends(&config.outline, 0.0)?;
    let states = (0..config.shared_from).map(|index| {
        let Shape { dim, kv_heads, .. } = config.shapes[usize::from(!config.sliding[index])];
        options.kv.apply(index, config.shared_from, ends.codec, |codecs| {
            let group = GroupSpec::attention(1, kv_heads, dim, dim, codecs);
            if config.sliding[index] { group.windowed(Window { size: config.window, sinks: 0 }) } else { group }
        })
    });
    let (spec, slots) = StateSpec::from_layers(options.page, states.collect())?;
    let slot = |index: usize| slots[config.owner(index)];
    let layers = (0..count).map(|index| load_layer(&mut loader, &config, index, slot(index)));
    let layers = layers.collect::<Result<Vec<_>, _>>()?;
    let inputs = match config.per_layer {
        None => None,
        Some(width) => Some(load_inputs(&mut loader, &config, width)?),
    };
    let info = config.outline.info("gemma4", spec, fingerprint, loader.finish()?);
    let tokens = |width| backend.tensor(options.max_tokens, width);
    let heads_of =
        |Shape { dim, kv_heads, rope, .. }: &Shape| Heads::new(backend, options, [heads, *kv_heads], [*dim, rope.dims]);
    let [sliding, full] = &config.shapes;
    let workspace = Workspace {
        base: workspace::Workspace::new(backend, options, &config.outline, &config.intermediate)?,
        heads: [heads_of(sliding)?, heads_of(full)?],
        ones: [backend.vector(&vec![1.0; sliding.dim])?, backend.vector(&vec![1.0; full.dim])?],
        frequencies: [backend.vector(&sliding.rope.frequencies())?, backend.vector(&full.rope.frequencies())?],
        inputs: match config.per_layer {
            None => None,
            Some(width) => Some(InputSpace {
                all: tokens(count * width)?,
                projected: tokens(count * width)?,
                last: backend.tensor(options.max_outputs.min(options.max_tokens), count * width)?,
                one: tokens(width)?,
                gate: tokens(width)?,
            }),
        },
        sparse: match config.experts {
            None => None,
            Some(sizes) => Some(SparseSpace {
                experts: ExpertSpace::new(backend, options, sizes)?,
                seen: tokens(hidden)?,
                h: tokens(hidden)?,
                out: tokens(hidden)?,
                sum: tokens(hidden)?,
            }),
        },
    };
    Ok(Box::new(Gemma4 { config, info, ends, inputs, layers, workspace }))
}

impl<B: Backend> Layer<B> {
    /// Runs the layer of number `index` on `w.base.x`.
    fn run(&self, run: &mut Run<'_, B>, config: &Config, index: usize, w: &mut Workspace<B>) -> Result<(), Error> {
        let Run { backend, step, pages } = run;
        let Outline { heads, eps, .. } = config.outline;
        let (a, base) = (&mut w.heads[self.kind], &mut w.base);
        let dim = config.shapes[self.kind].dim;
        if let Some(Own { k, v, k_norm }) = &self.own {
            let norm = (&self.input_norm, eps);
            match v {
                Some(v) => {
                    let qkv = &mut [(&self.q, &mut a.q), (k, &mut a.k), (v, &mut a.v)];
                    backend.project_norm(&base.x, norm, &mut base.h, qkv)?;
                    backend.rms_norm_in_place(&mut a.v, &w.ones[self.kind], eps)?;
                }
                None => {
                    backend.project_norm(&base.x, norm, &mut base.h, &mut [(&self.q, &mut a.q), (k, &mut a.k)])?;
                    backend.rms_norm(&a.k, &w.ones[self.kind], eps, &mut a.v)?;
                }
            }
            backend.rms_norm_in_place(&mut a.q, &self.q_norm, eps)?;
            backend.rms_norm_in_place(&mut a.k, k_norm, eps)?;
            a.append(*backend, step, pages, self.slot)?;
        } else {
            backend.project_norm(&base.x, (&self.input_norm, eps), &mut base.h, &mut [(&self.q, &mut a.q)])?;
            backend.rms_norm_in_place(&mut a.q, &self.q_norm, eps)?;
            backend.rope(&mut a.q, &a.angles, dim)?;
        }
        let attention = Attention { slot: self.slot, heads, scale: 1.0, softcap: None };
        backend.attend(step, pages, attention, None, &a.q, &mut a.attended)?;
        backend.project(&a.attended, &mut [(&self.o, &mut base.h)])?;
        backend.rms_norm_add(&base.h, &self.post_attention_norm, eps, &mut base.x)?;
        self.mlp.set(*backend, Activation::GeluTanh, (&self.pre_mlp_norm, eps), base)?;
        match (&self.sparse, &mut w.sparse) {
            (Some(sparse), Some(s)) => {
                backend.rms_norm(&base.h, &sparse.post_dense_norm, eps, &mut s.sum)?;
                backend.rms_norm(&base.x, &sparse.router_norm, eps, &mut s.seen)?;
                backend.rms_norm(&base.x, &sparse.pre_norm, eps, &mut s.h)?;
                sparse.experts.set(*backend, (&s.h, &s.seen), &mut s.experts, &mut s.out)?;
                backend.rms_norm_add(&s.out, &sparse.post_norm, eps, &mut s.sum)?;
                backend.rms_norm_add(&s.sum, &self.post_mlp_norm, eps, &mut base.x)?;
            }
            _ => backend.rms_norm_add(&base.h, &self.post_mlp_norm, eps, &mut base.x)?,
        }
        if let (Some(per_layer), Some(inputs), Some(width)) = (&self.per_layer, &mut w.inputs, config.per_layer) {
            backend.slice(&inputs.all, index * width, &mut inputs.one)?;
            backend.project(&base.x, &mut [(&per_layer.gate, &mut inputs.gate)])?;
            backend.gate(Activation::GeluTanh, &mut inputs.gate, &inputs.one)?;
            backend.project(&inputs.gate, &mut [(&per_layer.up, &mut base.h)])?;
            backend.rms_norm_add(&base.h, &per_layer.norm, eps, &mut base.x)?;
        }
        Ok(backend.scale(self.scalar, &mut base.x)?)
    }
}

impl<B: Backend> Inputs<B> {
    /// The inputs of all layers, from the embedded tokens.
    fn run(
        &self,
        backend: &B,
        step: &B::Step,
        (config, width): (&Config, usize),
        x: &B::Tensor,
        w: &mut InputSpace<B>,
    ) -> Result<(), Error> {
        let Outline { hidden, eps, .. } = config.outline;
        backend.embed(step, &self.embed, (0.5 * width as f32).sqrt(), &mut w.all)?;
        backend.project(x, &mut [(&self.project, &mut w.projected)])?;
        // The norm of y / sqrt(hidden) is that of y with `hidden` times as much added.
        Ok(backend.rms_norm_add(&w.projected, &self.norm, eps * hidden as f32, &mut w.all)?)
    }
}

impl<B: Backend> Workspace<B> {
    fn resize(&mut self, backend: &B, step: &B::Step) -> Result<(), Error> {
        self.base.resize(backend, step)?;
        let (tokens, outputs) = backend.rows(step);
        if let Some(inputs) = &mut self.inputs {
            backend.resize(&mut inputs.all, tokens)?;
            backend.resize(&mut inputs.projected, tokens)?;
            backend.resize(&mut inputs.last, outputs)?;
        }
        self.resize_layer(backend, step)
    }

    /// Gives everything that lives within a layer the rows of a step.
    fn resize_layer(&mut self, backend: &B, step: &B::Step) -> Result<(), Error> {
        let tokens = backend.rows(step).0;
        self.heads.iter_mut().try_for_each(|heads| heads.resize(backend, step))?;
        self.base.gated.iter_mut().try_for_each(|gated| gated.resize(backend, tokens))?;
        let inputs = self.inputs.iter_mut().flat_map(|inputs| [&mut inputs.one, &mut inputs.gate]);
        let sparse = self.sparse.iter_mut().flat_map(|s| [&mut s.seen, &mut s.h, &mut s.out, &mut s.sum]);
        let own = std::iter::once(&mut self.base.h).chain(inputs).chain(sparse);
        own.into_iter().try_for_each(|tensor| backend.resize(tensor, tokens))?;
        self.sparse.iter_mut().try_for_each(|sparse| sparse.experts.resize(backend, step))
    }

    fn angles(&mut self, backend: &B, step: &B::Step, shapes: &[Shape; 2]) -> Result<(), Error> {
        for ((heads, frequencies), shape) in self.heads.iter_mut().zip(&self.frequencies).zip(shapes) {
            backend.rope_angles(step, frequencies, shape.rope.attention_factor(), &mut heads.angles)?;
        }
        Ok(())
    }

    /// The stream and the layers' inputs change places with what they are at the outputs.
    fn swap(&mut self) {
        std::mem::swap(&mut self.base.x, &mut self.base.last);
        if let Some(inputs) = &mut self.inputs {
            std::mem::swap(&mut inputs.all, &mut inputs.last);
        }
    }
}

impl<B: Backend> Gemma4<B> {
    /// Runs the layers that own no state at the step's outputs only, and leaves their stream in `w.base.last`.
    fn tail(
        &mut self,
        backend: &B,
        (step, at_outputs): (&B::Step, &B::Step),
        pages: &mut B::Pages,
    ) -> Result<(), Error> {
        let Self { config, workspace: w, layers, .. } = self;
        backend.outputs(step, &w.base.x, &mut w.base.last)?;
        if let Some(inputs) = &mut w.inputs {
            backend.outputs(step, &inputs.all, &mut inputs.last)?;
        }
        w.resize_layer(backend, at_outputs)?;
        w.angles(backend, at_outputs, &config.shapes)?;
        w.swap();
        let mut run = Run { backend, step: at_outputs, pages };
        let tail = layers.iter().enumerate().skip(config.shared_from);
        let done = tail.into_iter().try_for_each(|(index, layer)| layer.run(&mut run, config, index, w));
        // Whatever happened, everything has its own memory again.
        w.swap();
        done
    }
}

impl<B: Backend> Model<B> for Gemma4<B> {
    fn info(&self) -> &Info {
        &self.info
    }

    fn logits(&self) -> &B::Tensor {
        &self.workspace.base.logits
    }

    fn forward(&mut self, backend: &B, step: &B::Step, pages: &mut B::Pages) -> Result<&B::Tensor, Error> {
        let Self { config, ends, inputs, layers, workspace: w, .. } = self;
        let (Outline { hidden, eps, .. }, shared_from, cap) = (&config.outline, config.shared_from, config.logit_cap);
        let (hidden, eps) = (*hidden, *eps);
        w.resize(backend, step)?;
        backend.embed(step, &ends.embed, (hidden as f32).sqrt(), &mut w.base.x)?;
        if let (Some(inputs), Some(space), Some(width)) = (inputs, &mut w.inputs, config.per_layer) {
            inputs.run(backend, step, (config, width), &w.base.x, space)?;
        }
        w.angles(backend, step, &config.shapes)?;
        let mut run = Run { backend, step, pages };
        for (index, layer) in layers.iter().enumerate().take(shared_from) {
            layer.run(&mut run, config, index, w)?;
        }
        let (tokens, outputs) = backend.rows(step);
        let at_outputs = if shared_from < layers.len() && outputs < tokens { backend.at_outputs(step) } else { None };
        if let Some(at_outputs) = at_outputs {
            if outputs > 0 {
                self.tail(backend, (step, &at_outputs), pages)?;
            }
        } else {
            for (index, layer) in layers.iter().enumerate().skip(shared_from) {
                layer.run(&mut run, config, index, w)?;
            }
            backend.outputs(step, &w.base.x, &mut w.base.last)?;
        }
        let Self { ends, workspace: w, .. } = self;
        let logits = &mut [(ends.head(), &mut w.base.logits)];
        backend.project_norm(&w.base.last, (&ends.norm, eps), &mut w.base.last_norm, logits)?;
        if let Some(cap) = cap {
            backend.softcap(cap, &mut w.base.logits)?;
        }
        Ok(&w.base.logits)
    }
}
