//! The [`Backend`] trait: the verbs that a model graph is written in, and the scalar reference that defines them.
//!
//! **What.** A graph is a straight list of verbs over a workspace of tensors that was allocated once for the largest step. A
//! backend turns each verb into kernels. [`Reference`] does it in the most obvious way, accumulating in `f64`; every other
//! backend is tested against it.
//!
//! **Why.** One graph per model, whatever runs it. Verbs are as large as pays: a backend overrides a composed verb where fusing
//! helps, and inherits the composition otherwise. A device that works on its own time enqueues what a verb means; the caller waits for it only
//! where values come back to the host ([`Backend::download`], [`Backend::drawn`], [`Backend::export`]).
//!
//! **Invariants.** Rows of a tensor never meet: what a verb writes into row `i` depends on row `i` of its inputs and on that
//! row's state alone, and its rounding depends neither on the number of rows nor on the number of threads. Verbs on tensors
//! neither allocate nor wait for a device.
//!
//! ```
//! use kvern_backend::{Backend, Reference};
//! let backend = Reference::new();
//! let mut x = backend.tensor(1, 4)?;
//! backend.resize(&mut x, 1)?;
//! backend.upload(&[3.0; 4], &mut x)?;
//! let weight = backend.vector(&[1.0, 2.0, 3.0, 4.0])?;
//! backend.rms_norm_in_place(&mut x, &weight, 0.0)?;
//! assert_eq!(backend.download(&x)?, [1.0, 2.0, 3.0, 4.0]);
//! # Ok::<(), kvern_backend::Error>(())
//! ```

#![forbid(unsafe_code)]

use std::ops::Range;

mod error;
mod freeze;
mod reference;
mod routing;

pub use error::Error;
pub use freeze::{freeze, thaw};
pub use kvern_state::Slot;
use kvern_state::{Columns, Kind, Segment, StateSpec, States, StepPlan, Table};
use kvern_weights::Tensor as Weight;
pub use reference::Reference;
pub use routing::{Routing, Score};

/// What an attention layer computes beyond its shapes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention {
    /// The layer's state, of an attention or latent group. Its window decides what a query sees.
    pub slot: Slot,
    /// Query heads; a multiple of the group's key/value heads.
    pub heads: usize,
    /// Factor on every score.
    pub scale: f32,
    /// `cap * tanh(score / cap)` in place of every scaled score.
    pub softcap: Option<f32>,
}

impl Attention {
    /// Checks the group's kind and the shapes, (rows, width), of queries and output for a step of `tokens` tokens.
    ///
    /// # Errors
    /// [`Error::Kind`], or [`Error::Shape`] naming the first that does not fit the group.
    pub fn check(
        &self,
        spec: &StateSpec,
        tokens: usize,
        sinks: Option<usize>,
        q: (usize, usize),
        out: (usize, usize),
    ) -> Result<(), Error> {
        let group = &spec.groups()[self.slot.group];
        if group.kind == Kind::Recurrent {
            return Err(Error::Kind { verb: "attend", group: self.slot.group, found: group.kind.name() });
        }
        Error::check("attend", "remainder of the heads", 0, self.heads % group.heads())?;
        Error::check("attend", "number of sinks", self.heads, sinks.unwrap_or(self.heads))?;
        Error::check("attend", "width of the queries", self.heads * group.key_dim(), q.1)?;
        Error::check("attend", "width of the output", self.heads * group.value_dim(), out.1)?;
        Error::check("attend", "rows of the queries", tokens, q.0)?;
        Error::check("attend", "rows of the output", tokens, out.0)
    }
}

/// A recurrent layer by the gated delta rule (Yang et al. 2024, "Gated Delta Networks", equation 10): for each token and value head, with
/// the state `S` of `[key_dim, value_dim]`,
/// `S = decay S; S += k (beta (v - kᵀ S))ᵀ; out = qᵀ S`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaRule {
    /// The layer's state, of a recurrent group.
    pub slot: Slot,
    /// The plane that holds `S`: `[heads, key_dim, value_dim]`.
    pub plane: usize,
    /// Value heads.
    pub heads: usize,
    /// Key heads, each of which serves `heads / key_heads` value heads.
    pub key_heads: usize,
    /// Values of a key and a query.
    pub key_dim: usize,
    /// Values of a value.
    pub value_dim: usize,
}

/// Inputs of [`Backend::delta_rule`].
#[derive(Debug)]
pub struct DeltaInputs<'a, T> {
    /// Queries `[T, key_heads * key_dim]`.
    pub q: &'a T,
    /// Keys, as queries.
    pub k: &'a T,
    /// Values `[T, heads * value_dim]`.
    pub v: &'a T,
    /// Factor on the state `[T, heads]`.
    pub decay: &'a T,
    /// Strength of the write `[T, heads]`.
    pub beta: &'a T,
}

impl DeltaRule {
    /// Checks the kind of the state and the widths of the inputs, in the order of [`DeltaInputs`] and then the output, each with as many
    /// rows as the step has tokens.
    ///
    /// # Errors
    /// [`Error::Kind`] or [`Error::Shape`].
    pub fn check(&self, spec: &StateSpec, tokens: usize, shapes: [(usize, usize); 6]) -> Result<(), Error> {
        let size = self.heads * self.key_dim * self.value_dim;
        check_state("delta_rule", spec, self.slot, self.plane, size)?;
        Error::check("delta_rule", "remainder of the heads", 0, self.heads % self.key_heads)?;
        let (keys, values) = (self.key_heads * self.key_dim, self.heads * self.value_dim);
        let widths = [keys, keys, values, self.heads, self.heads, values];
        let names = ["queries", "keys", "values", "decay", "beta", "output"];
        for ((shape, width), name) in shapes.into_iter().zip(widths).zip(names) {
            Error::check("delta_rule", name, width, shape.1)?;
            Error::check("delta_rule", name, tokens, shape.0)?;
        }
        Ok(())
    }
}

/// Checks that a slot is a recurrent group's and its plane holds `size` values.
///
/// # Errors
/// [`Error::Kind`] or [`Error::Shape`].
pub fn check_state(verb: &'static str, spec: &StateSpec, slot: Slot, plane: usize, size: usize) -> Result<(), Error> {
    let group = &spec.groups()[slot.group];
    if group.kind != Kind::Recurrent {
        return Err(Error::Kind { verb, group: slot.group, found: group.kind.name() });
    }
    Error::check(verb, "values of the state", group.planes[plane].width(), size)
}

/// Checks the shapes of a convolution, (rows, width) of input and output, and gives the number of its taps.
///
/// # Errors
/// [`Error::Kind`] or [`Error::Shape`].
pub fn check_convolution(
    spec: &StateSpec,
    (slot, plane): (Slot, usize),
    tokens: usize,
    kernel: usize,
    x: (usize, usize),
    out: (usize, usize),
) -> Result<usize, Error> {
    Error::check("convolve", "remainder of the kernel", 0, kernel % x.1)?;
    let taps = kernel / x.1;
    check_state("convolve", spec, slot, plane, taps.saturating_sub(1) * x.1)?;
    Error::check("convolve", "width of the output", x.1, out.1)?;
    Error::check("convolve", "rows of the input", tokens, x.0)?;
    Error::check("convolve", "rows of the output", tokens, out.0)?;
    Ok(taps)
}

/// Checks the shapes, (rows, width), of what a step of `tokens` tokens appends to the planes of a group.
///
/// # Errors
/// [`Error::Kind`] or [`Error::Shape`].
pub fn check_append(spec: &StateSpec, slot: Slot, tokens: usize, planes: &[(usize, usize)]) -> Result<(), Error> {
    let group = &spec.groups()[slot.group];
    if group.kind == Kind::Recurrent {
        return Err(Error::Kind { verb: "append", group: slot.group, found: group.kind.name() });
    }
    Error::check("append", "number of planes", group.planes.len(), planes.len())?;
    for (plane, &(rows, width)) in group.planes.iter().zip(planes) {
        Error::check("append", plane.name, plane.width(), width)?;
        Error::check("append", plane.name, tokens, rows)?;
    }
    Ok(())
}

/// Checks that so many bytes are those of columns of a part, as [`Backend::export`] gives and [`Backend::import`] takes them.
///
/// # Errors
/// [`Error::Shape`].
pub fn check_columns(
    verb: &'static str,
    spec: &StateSpec,
    part: Part,
    table: &Table,
    columns: &Range<usize>,
    bytes: usize,
) -> Result<(), Error> {
    let column = spec.classes()[table.class].planes[part.plane].column_bytes();
    Error::check(verb, "bytes of the columns", column * columns.len(), bytes)
}

/// A segment's columns of the group that a verb's slot names.
///
/// # Errors
/// [`Error::Kind`] when the plan has none there.
pub fn columns<'a>(verb: &'static str, segment: &'a Segment, group: usize) -> Result<&'a Columns, Error> {
    segment.columns(group).ok_or(Error::Kind { verb, group, found: "no columns in this step" })
}

/// A segment's recurrent state of the group that a verb's slot names.
///
/// # Errors
/// [`Error::Kind`] when the plan has none there.
pub fn states<'a>(verb: &'static str, segment: &'a Segment, group: usize) -> Result<&'a States, Error> {
    segment.states(group).ok_or(Error::Kind { verb, group, found: "no state in this step" })
}

/// A sparse attention's choice of columns (DeepSeek-V3.2, "DeepSeek Sparse Attention"): a query scores the column with the index key `k` by
/// `Σ_h weights[h] * max(0, q[h] · k)` and keeps those of the largest scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Indexer {
    /// The layer's state, of a latent group with index keys.
    pub slot: Slot,
    /// Index heads.
    pub heads: usize,
}

/// The plane of a latent group that holds index keys.
pub const INDEX: usize = 2;

impl Indexer {
    /// Checks the group's kind and the shapes, (rows, width), of queries, weights and picks for a step of `tokens` tokens.
    ///
    /// # Errors
    /// [`Error::Kind`] or [`Error::Shape`].
    pub fn check(&self, spec: &StateSpec, tokens: usize, shapes: [(usize, usize); 3]) -> Result<(), Error> {
        let group = &spec.groups()[self.slot.group];
        let Some(plane) = group.planes.get(INDEX).filter(|_| group.kind == Kind::Latent) else {
            return Err(Error::Kind { verb: "select", group: self.slot.group, found: "one without index keys" });
        };
        Error::check("select", "width of the queries", self.heads * plane.dim, shapes[0].1)?;
        Error::check("select", "width of the weights", self.heads, shapes[1].1)?;
        for ((rows, _), name) in shapes.into_iter().zip(["queries", "weights", "picks"]) {
            Error::check("select", name, tokens, rows)?;
        }
        Ok(())
    }
}

/// Checks the shapes, (rows, width), of a product by picked matrices, for each output of which there are (matrices, outputs, inputs): the input has a
/// row for each token or for each of its picks.
///
/// # Errors
/// [`Error::Shape`].
pub fn check_picked(
    x: (usize, usize),
    picks: (usize, usize),
    (_, outputs, inputs): (usize, usize, usize),
    out: (usize, usize),
) -> Result<(), Error> {
    let rows = picks.0 * picks.1 / 2;
    Error::check("project_picked", "width of the input", inputs, x.1)?;
    Error::check("project_picked", "rows of the input", if x.0 == picks.0 { x.0 } else { rows }, x.0)?;
    Error::check("project_picked", "width of the output", outputs, out.1)?;
    Error::check("project_picked", "rows of the output", rows, out.0)
}

/// Checks the shapes, (rows, width), of two tensors of `heads` runs and of what is to hold both.
///
/// # Errors
/// [`Error::Shape`].
pub fn check_join(heads: usize, [a, b, out]: [(usize, usize); 3]) -> Result<(), Error> {
    Error::check("join", "remainder of the first", 0, a.1 % heads)?;
    Error::check("join", "remainder of the second", 0, b.1 % heads)?;
    Error::check("join", "width of the output", a.1 + b.1, out.1)?;
    Error::check("join", "rows of the second", a.0, b.0)?;
    Error::check("join", "rows of the output", a.0, out.0)
}

/// Checks the shapes, (rows, width), of what experts made of tokens, their picks and the sum.
///
/// # Errors
/// [`Error::Shape`].
pub fn check_combine(x: (usize, usize), picks: (usize, usize), out: (usize, usize)) -> Result<(), Error> {
    Error::check("combine", "rows of the picks", out.0, picks.0)?;
    Error::check("combine", "rows of the input", out.0 * (picks.1 / 2), x.0)?;
    Error::check("combine", "width of the input", out.1, x.1)
}

/// A function of single values, as on the gate of a gated unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// `1 / (1 + e^-x)`.
    Sigmoid,
    /// `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`: the tanh form of GELU (Hendrycks and Gimpel 2016).
    GeluTanh,
}

/// What a device can do at most, measured.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Memory read, in 10^9 bytes per second.
    pub read_gb_s: f64,
    /// Multiply-adds of the kind that products of packed weights use, in 10^9 operations per second (a multiply-add is two).
    pub dot_gops: f64,
}

/// One plane of one layer of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// The layer within its group.
    pub layer: usize,
    /// The plane.
    pub plane: usize,
}

/// The verbs.
///
/// Tensors are matrices `[rows, width]` of activations. `T` below is the number of tokens of the step, and a tensor's rows are
/// the step's tokens unless said otherwise.
pub trait Backend: Send + Sync + 'static {
    /// A matrix of activations.
    type Tensor: Send;
    /// A weight matrix `[outputs, inputs]`, packed for this backend, with an optional bias.
    type Linear: Send + Sync;
    /// A weight vector.
    type Vector: Send + Sync;
    /// The bytes behind the pages of a pool.
    type Pages: Send;
    /// A step's plan, where the backend's verbs can read it.
    type Step;

    /// The device and kernel set in words, for logs and reports.
    fn describe(&self) -> String;
    /// The same as names and values, for reports that machines read.
    fn facts(&self) -> Vec<(&'static str, String)> {
        Vec::new()
    }
    /// Measures the device's limits, if the backend knows how.
    fn limits(&self) -> Result<Option<Limits>, Error> {
        Ok(None)
    }
    /// Bytes that state can take on a device with memory of its own; a backend that lives in the host's memory does not say.
    fn free_memory(&self) -> Result<Option<u64>, Error> {
        Ok(None)
    }

    /// Packs a weight matrix, and the bias that is added to its product.
    fn linear(&self, weight: Weight, bias: Option<Weight>) -> Result<Self::Linear, Error>;
    /// Packs a stack of `count` matrices of one shape, the rows of one after those of another: the experts of a layer, or what each of its heads
    /// multiplies with.
    fn stack(&self, _weight: Weight, _bias: Option<Weight>, _count: usize) -> Result<Self::Linear, Error> {
        Err(Error::Verb { verb: "stack" })
    }
    /// Bytes that a packed matrix occupies.
    fn linear_bytes(&self, linear: &Self::Linear) -> usize;
    /// Uploads a vector.
    fn vector(&self, values: &[f32]) -> Result<Self::Vector, Error>;
    /// Allocates a tensor for up to `rows` rows; it has no rows until [`Self::resize`].
    fn tensor(&self, rows: usize, width: usize) -> Result<Self::Tensor, Error>;
    /// Sets a tensor's number of rows, within what was allocated. Contents are unspecified afterwards.
    fn resize(&self, tensor: &mut Self::Tensor, rows: usize) -> Result<(), Error>;
    /// Page storage for a pool of this state.
    fn pages(&self, spec: &StateSpec) -> Result<Self::Pages, Error>;

    /// Takes a step's plan over and makes its page copies and new pages.
    fn begin(&self, plan: StepPlan, pages: &mut Self::Pages) -> Result<Self::Step, Error>;
    /// The plan behind a step.
    fn plan<'a>(&self, step: &'a Self::Step) -> &'a StepPlan;
    /// Rows of a step's tensors: (tokens, outputs). A backend that keeps recorded steps of a few sizes rounds them up; what is in the rows beyond the
    /// plan's means nothing.
    fn rows(&self, step: &Self::Step) -> (usize, usize) {
        let plan = self.plan(step);
        (plan.tokens.len(), plan.outputs.len())
    }
    /// The step's outputs as a step of their own that adds no columns, for the last layers of a graph that stores nothing in them; absent where the
    /// backend does not have such steps.
    fn at_outputs(&self, _step: &Self::Step) -> Option<Self::Step> {
        None
    }
    /// Runs the verbs of a step. The list must depend on nothing but [`Self::rows`] for as long as no weights or pages are made anew: a backend may record what the verbs enqueue and play it
    /// again for the next step of the same size, in which the verbs check their operands and do nothing else.
    fn run<E: From<Error>>(
        &self,
        _step: &Self::Step,
        pages: &mut Self::Pages,
        mut verbs: impl FnMut(&mut Self::Pages) -> Result<(), E>,
    ) -> Result<(), E> {
        verbs(pages)
    }

    /// `out[t] = scale * table[token t]`: rows of a weight matrix.
    fn embed(&self, step: &Self::Step, table: &Self::Linear, scale: f32, out: &mut Self::Tensor) -> Result<(), Error>;
    /// `out = x / sqrt(mean(x²) + eps) * weight`, over each run of `weight.len()` values; a row may hold several runs (heads).
    fn rms_norm(&self, x: &Self::Tensor, weight: &Self::Vector, eps: f32, out: &mut Self::Tensor) -> Result<(), Error>;
    /// [`Self::rms_norm`] in place.
    fn rms_norm_in_place(&self, x: &mut Self::Tensor, weight: &Self::Vector, eps: f32) -> Result<(), Error>;
    /// `acc +=` the [`Self::rms_norm`] of `x`.
    fn rms_norm_add(
        &self,
        x: &Self::Tensor,
        weight: &Self::Vector,
        eps: f32,
        acc: &mut Self::Tensor,
    ) -> Result<(), Error>;
    /// `out = x · weightᵀ + bias`, for several weights of one input.
    fn project(&self, x: &Self::Tensor, outs: &mut [(&Self::Linear, &mut Self::Tensor)]) -> Result<(), Error>;
    /// `acc += x · weightᵀ + bias`.
    fn project_add(&self, x: &Self::Tensor, weight: &Self::Linear, acc: &mut Self::Tensor) -> Result<(), Error>;
    /// [`Self::rms_norm`] of `x`, projected; what is left in `h` is not specified.
    fn project_norm(
        &self,
        x: &Self::Tensor,
        (norm, eps): (&Self::Vector, f32),
        h: &mut Self::Tensor,
        outs: &mut [(&Self::Linear, &mut Self::Tensor)],
    ) -> Result<(), Error> {
        self.rms_norm(x, norm, eps, h)?;
        self.project(h, outs)
    }
    /// `acc += (activation(gate) * up) · weightᵀ + bias`; what is left in `gate` is not specified.
    fn project_gate_add(
        &self,
        (activation, gate, up): (Activation, &mut Self::Tensor, &Self::Tensor),
        weight: &Self::Linear,
        acc: &mut Self::Tensor,
    ) -> Result<(), Error> {
        self.gate(activation, gate, up)?;
        self.project_add(gate, weight, acc)
    }
    /// Picks experts for each token: the row of `picks` gets `k` experts' numbers, and then their weights ([`Routing::pick`]).
    fn route(
        &self,
        _logits: &Self::Tensor,
        _routing: Routing,
        _sides: [Option<&Self::Vector>; 2],
        _picks: &mut Self::Tensor,
    ) -> Result<(), Error> {
        Err(Error::Verb { verb: "route" })
    }
    /// `out[t * k + j] = x[t] · weight[picks[t][j]]ᵀ + bias`, for several stacks of one input; of an input with a row for each pick, row `t * k + j` in place
    /// of `t`. Only picked matrices are read.
    fn project_picked(
        &self,
        _x: &Self::Tensor,
        _picks: &Self::Tensor,
        _outs: &mut [(&Self::Linear, &mut Self::Tensor)],
    ) -> Result<(), Error> {
        Err(Error::Verb { verb: "project_picked" })
    }
    /// `out[t] = Σ_j weight of pick j * x[t * k + j]`, in the order of the picks.
    fn combine(&self, _x: &Self::Tensor, _picks: &Self::Tensor, _out: &mut Self::Tensor) -> Result<(), Error> {
        Err(Error::Verb { verb: "combine" })
    }
    /// `acc +=` the [`Self::combine`] of `x`, one term after another.
    fn combine_add(&self, _x: &Self::Tensor, _picks: &Self::Tensor, _acc: &mut Self::Tensor) -> Result<(), Error> {
        Err(Error::Verb { verb: "combine_add" })
    }
    /// Each head by a matrix of its own: run `i` of each row of `x`, of as many values as a matrix of the stack has inputs, becomes run `i` of `out`.
    fn project_heads(&self, _x: &Self::Tensor, _stack: &Self::Linear, _out: &mut Self::Tensor) -> Result<(), Error> {
        Err(Error::Verb { verb: "project_heads" })
    }
    /// `x = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over each row.
    fn layer_norm_in_place(&self, _x: &mut Self::Tensor, _affine: [&Self::Vector; 2], _eps: f32) -> Result<(), Error> {
        Err(Error::Verb { verb: "layer_norm" })
    }
    /// The rotations of the step's positions: `out[t] = scale * [cos(p f_0) … cos(p f_n) sin(p f_0) … sin(p f_n)]`.
    fn rope_angles(
        &self,
        step: &Self::Step,
        frequencies: &Self::Vector,
        scale: f32,
        out: &mut Self::Tensor,
    ) -> Result<(), Error>;
    /// Rotates, in each run of `head_dim` values, the pairs `(i, i + n)` for `i < n`, where `n` is the number of frequencies.
    fn rope(&self, x: &mut Self::Tensor, angles: &Self::Tensor, head_dim: usize) -> Result<(), Error>;
    /// Encodes and stores the step's columns: a tensor for each plane of the group. Rows of tokens that add no column are left out.
    fn append(
        &self,
        step: &Self::Step,
        pages: &mut Self::Pages,
        slot: Slot,
        planes: &[&Self::Tensor],
    ) -> Result<(), Error>;
    /// [`Self::rope`] of `q` and `k`, and [`Self::append`] of `k` and `v` with their rotations; what is left in `k` is not specified.
    fn rope_append(
        &self,
        step: &Self::Step,
        pages: &mut Self::Pages,
        slot: Slot,
        (q, k, v): (&mut Self::Tensor, &mut Self::Tensor, &Self::Tensor),
        (angles, head_dim): (&Self::Tensor, usize),
    ) -> Result<(), Error> {
        self.rope(q, angles, head_dim)?;
        self.rope(k, angles, head_dim)?;
        self.append(step, pages, slot, &[k, v])
    }
    /// `out[t] = softmax(scale * q[t] · Kᵀ) · V` per head, over the columns that the token sees ([`Segment::visible`]); zeros if it sees none.
    ///
    /// Of a latent group, keys are `[latent | rope]` and values the latent. `sinks` has a score for each head that takes part in the softmax
    /// and adds nothing to the sum.
    fn attend(
        &self,
        step: &Self::Step,
        pages: &Self::Pages,
        attention: Attention,
        sinks: Option<&Self::Vector>,
        q: &Self::Tensor,
        out: &mut Self::Tensor,
    ) -> Result<(), Error>;
    /// Picks the columns that each query attends: the `width` of `picks` with the largest scores of those it sees, the lower column among equals; in
    /// ascending order, and -1 after the last.
    fn select(
        &self,
        _step: &Self::Step,
        _pages: &Self::Pages,
        _indexer: Indexer,
        _inputs: (&Self::Tensor, &Self::Tensor),
        _picks: &mut Self::Tensor,
    ) -> Result<(), Error> {
        Err(Error::Verb { verb: "select" })
    }
    /// [`Self::attend`] in a latent group, over the columns that [`Self::select`] picked.
    fn attend_picked(
        &self,
        _step: &Self::Step,
        _pages: &Self::Pages,
        _attention: Attention,
        _picks: &Self::Tensor,
        _q: &Self::Tensor,
        _out: &mut Self::Tensor,
    ) -> Result<(), Error> {
        Err(Error::Verb { verb: "attend_picked" })
    }
    /// `out[t] = Σ_j kernel[j] * x[t + j + 1 - taps]` per channel, `kernel` being `[taps, channels]`, over the row's earlier inputs: the
    /// last `taps - 1` of them are the state in `plane`, oldest first, and zeros before the first token. A kernel of `[1, 0]` shifts a row by one token.
    fn convolve(
        &self,
        step: &Self::Step,
        pages: &mut Self::Pages,
        state: (Slot, usize),
        kernel: &Self::Vector,
        x: &Self::Tensor,
        out: &mut Self::Tensor,
    ) -> Result<(), Error>;
    /// Runs a recurrence token by token, whatever the chunk.
    fn delta_rule(
        &self,
        step: &Self::Step,
        pages: &mut Self::Pages,
        rule: DeltaRule,
        inputs: DeltaInputs<'_, Self::Tensor>,
        out: &mut Self::Tensor,
    ) -> Result<(), Error>;
    /// `gate = activation(gate) * up`.
    fn gate(&self, activation: Activation, gate: &mut Self::Tensor, up: &Self::Tensor) -> Result<(), Error>;
    /// `gate = g * sigmoid(alpha g) * (u + 1)` with `g = min(gate, limit)` and `u` in `-limit..=limit`: the gated unit of gpt-oss, of (alpha, limit).
    fn gate_clamped(&self, _unit: (f32, f32), _gate: &mut Self::Tensor, _up: &Self::Tensor) -> Result<(), Error> {
        Err(Error::Verb { verb: "gate_clamped" })
    }
    /// `x = activation(x)`.
    fn activate(&self, activation: Activation, x: &mut Self::Tensor) -> Result<(), Error>;
    /// `x = exp(-rate * log(1 + e^(x + bias)))` per channel: what is left of a recurrent state after a token.
    fn decay(&self, rate: &Self::Vector, bias: &Self::Vector, x: &mut Self::Tensor) -> Result<(), Error>;
    /// `x = cap * tanh(x / cap)`.
    fn softcap(&self, cap: f32, x: &mut Self::Tensor) -> Result<(), Error>;
    /// `x = factor * x`.
    fn scale(&self, factor: f32, x: &mut Self::Tensor) -> Result<(), Error>;
    /// `out[t] = x[t][first..]`, as many values as `out` is wide.
    fn slice(&self, x: &Self::Tensor, first: usize, out: &mut Self::Tensor) -> Result<(), Error>;
    /// Lays heads together: run `i` of each row of `out` is run `i` of `a` and then run `i` of `b`, of `heads` runs each.
    fn join(&self, _heads: usize, _a: &Self::Tensor, _b: &Self::Tensor, _out: &mut Self::Tensor) -> Result<(), Error> {
        Err(Error::Verb { verb: "join" })
    }
    /// `out[i] = x[outputs[i]]`: the rows whose logits the step wants.
    fn outputs(&self, step: &Self::Step, x: &Self::Tensor, out: &mut Self::Tensor) -> Result<(), Error>;

    /// Whether the backend draws tokens by itself, so that the next step may follow before the host knows them.
    fn draws(&self) -> bool {
        false
    }
    /// Draws a token from each row of logits for which the plan says how.
    fn draw(&self, _step: &Self::Step, _logits: &Self::Tensor) -> Result<(), Error> {
        Ok(())
    }
    /// The tokens drawn by the oldest step that was not asked yet, waiting for it: one for each output of its plan, of which those that the caller draws
    /// mean nothing.
    fn drawn(&self) -> Result<Vec<u32>, Error> {
        Ok(Vec::new())
    }

    /// Copies values from the host over a tensor's rows.
    fn upload(&self, values: &[f32], tensor: &mut Self::Tensor) -> Result<(), Error>;
    /// Copies a tensor to the host, waiting for it.
    fn download(&self, tensor: &Self::Tensor) -> Result<Vec<f32>, Error>;
    /// Copies columns out in canonical order: token by token, head by head, encoded as the class says. `out` holds them exactly.
    fn export(
        &self,
        pages: &Self::Pages,
        part: Part,
        table: &Table,
        columns: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), Error>;
    /// The inverse of [`Self::export`], into pages that need not have been used before.
    fn import(
        &self,
        pages: &mut Self::Pages,
        part: Part,
        table: &Table,
        columns: Range<usize>,
        bytes: &[u8],
    ) -> Result<(), Error>;
}
