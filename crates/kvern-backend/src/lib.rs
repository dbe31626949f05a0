//! The [`Backend`] trait: the verbs that a model graph is written in, and the scalar reference that defines them.
//!
//! **What.** A graph is a straight list of verbs over a workspace of tensors that was allocated once for the largest step. A
//! backend turns each verb into kernels. [`Reference`] does it in the most obvious way, accumulating in `f64`; every other
//! backend is tested against it.
//!
//! **Why.** One graph per model, whatever runs it. Verbs are as large as pays: a backend overrides a composed verb where fusing
//! helps, and inherits the composition otherwise.
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

mod error;
mod reference;

pub use error::Error;
use kvern_state::{GroupSpec, StateSpec, StepPlan};
use kvern_weights::Tensor as Weight;
pub use reference::Reference;

/// Where a layer's state lies: the group in the model's [`StateSpec`], and the layer's index within that group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// The group.
    pub group: usize,
    /// The layer within the group.
    pub layer: usize,
}

/// What an attention layer computes beyond its shapes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention {
    /// The layer's state.
    pub slot: Slot,
    /// Query heads; a multiple of the group's key/value heads.
    pub heads: usize,
    /// Factor on every score.
    pub scale: f32,
}

impl Attention {
    /// Checks the shapes, (rows, width), of queries and output for a step of `tokens` tokens.
    ///
    /// # Errors
    /// [`Error::Shape`] naming the first that does not fit the group.
    pub fn check(&self, group: &GroupSpec, tokens: usize, q: (usize, usize), out: (usize, usize)) -> Result<(), Error> {
        Error::check("attend", "remainder of the heads", 0, self.heads % group.kv_heads)?;
        Error::check("attend", "width of the queries", self.heads * group.k_dim, q.1)?;
        Error::check("attend", "width of the output", self.heads * group.v_dim, out.1)?;
        Error::check("attend", "rows of the queries", tokens, q.0)?;
        Error::check("attend", "rows of the output", tokens, out.0)
    }
}

/// The function on the gate of a gated unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
}

/// One layer's columns of a row in canonical order, whatever the backend's layout of a page: token by token, head by head,
/// encoded as the group's codecs say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Columns {
    /// Keys.
    pub k: Vec<u8>,
    /// Values.
    pub v: Vec<u8>,
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

    /// Packs a weight matrix, and the bias that is added to its product.
    fn linear(&self, weight: Weight, bias: Option<Weight>) -> Result<Self::Linear, Error>;
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

    /// `out[t] = table[token t]`: rows of a weight matrix.
    fn embed(&self, step: &Self::Step, table: &Self::Linear, out: &mut Self::Tensor) -> Result<(), Error>;
    /// `out = x / sqrt(mean(x²) + eps) * weight`, over each run of `weight.len()` values; a row may hold several runs (heads).
    fn rms_norm(&self, x: &Self::Tensor, weight: &Self::Vector, eps: f32, out: &mut Self::Tensor) -> Result<(), Error>;
    /// [`Self::rms_norm`] in place.
    fn rms_norm_in_place(&self, x: &mut Self::Tensor, weight: &Self::Vector, eps: f32) -> Result<(), Error>;
    /// `out = x · weightᵀ + bias`, for several weights of one input.
    fn project(&self, x: &Self::Tensor, outs: &mut [(&Self::Linear, &mut Self::Tensor)]) -> Result<(), Error>;
    /// `acc += x · weightᵀ + bias`.
    fn project_add(&self, x: &Self::Tensor, weight: &Self::Linear, acc: &mut Self::Tensor) -> Result<(), Error>;
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
    /// Encodes and stores the step's keys and values at their positions.
    fn append(
        &self,
        step: &Self::Step,
        pages: &mut Self::Pages,
        slot: Slot,
        k: &Self::Tensor,
        v: &Self::Tensor,
    ) -> Result<(), Error>;
    /// `out[t] = softmax(scale * q[t] · Kᵀ) · V` per head, over the columns of the row at positions up to the token's own.
    fn attend(
        &self,
        step: &Self::Step,
        pages: &Self::Pages,
        attention: Attention,
        q: &Self::Tensor,
        out: &mut Self::Tensor,
    ) -> Result<(), Error>;
    /// `gate = activation(gate) * up`.
    fn gate(&self, activation: Activation, gate: &mut Self::Tensor, up: &Self::Tensor) -> Result<(), Error>;
    /// `out[i] = x[outputs[i]]`: the rows whose logits the step wants.
    fn outputs(&self, step: &Self::Step, x: &Self::Tensor, out: &mut Self::Tensor) -> Result<(), Error>;

    /// Copies values from the host over a tensor's rows.
    fn upload(&self, values: &[f32], tensor: &mut Self::Tensor) -> Result<(), Error>;
    /// Copies a tensor to the host, waiting for it.
    fn download(&self, tensor: &Self::Tensor) -> Result<Vec<f32>, Error>;
    /// Copies the first `len` columns of a layer out of the pages `table`.
    fn export(&self, pages: &Self::Pages, slot: Slot, table: &[u32], len: usize) -> Result<Columns, Error>;
}
