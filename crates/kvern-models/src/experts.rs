//! A mixture of experts: each token is routed to a few of many feed-forward units.
//!
//! ```text
//! picks, weights = route(Router · r)                                 r: what the router sees of the stream
//! acc += Σ_j weight_j * Down_j · unit(Gate_j · h, Up_j · h)          over the picks, in their order
//! ```
//!
//! Weights stay packed, and only those of picked experts are read. Experts of a layer are stacks ([`Backend::stack`]), however a checkpoint has them: one
//! tensor for gate and up of all experts, one for each matrix of all experts, or one for each matrix of each expert.

use kvern_backend::{Activation, Backend, Routing};
use kvern_weights::Tensor;

use crate::loader::Loader;
use crate::mlp::Mlp;
use crate::{Error, LoadOptions};

/// What an expert makes of gate and up.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Unit {
    /// `activation(gate) * up`.
    Gated(Activation),
    /// gpt-oss's, with its (alpha, limit).
    Clamped(f32, f32),
}

/// Sizes of a layer's experts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) experts: usize,
    /// Experts of a token.
    pub(crate) picks: usize,
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
}

/// A layer's router and experts.
pub(crate) struct Experts<B: Backend> {
    pub(crate) router: B::Linear,
    /// What is added to scores where experts are picked, and factors on the weights.
    pub(crate) bias: Option<B::Vector>,
    pub(crate) factors: Option<B::Vector>,
    pub(crate) routing: Routing,
    pub(crate) unit: Unit,
    pub(crate) bank: Bank<B>,
}

/// Stacks of the experts' matrices.
pub(crate) struct Bank<B: Backend> {
    gate: B::Linear,
    up: B::Linear,
    down: B::Linear,
}

/// Activations: `[tokens, experts]`, `[tokens, 2 * picks]`, and `[tokens * picks, …]`.
pub(crate) struct ExpertSpace<B: Backend> {
    logits: B::Tensor,
    picks: B::Tensor,
    gate: B::Tensor,
    up: B::Tensor,
    out: B::Tensor,
    count: usize,
}

impl<B: Backend> ExpertSpace<B> {
    pub(crate) fn new(backend: &B, options: &LoadOptions<'_>, sizes: Sizes) -> Result<Self, Error> {
        let tokens = options.max_tokens;
        let each = |width| backend.tensor(tokens * sizes.picks, width);
        Ok(Self {
            logits: backend.tensor(tokens, sizes.experts)?,
            picks: backend.tensor(tokens, 2 * sizes.picks)?,
            gate: each(sizes.intermediate)?,
            up: each(sizes.intermediate)?,
            out: each(sizes.hidden)?,
            count: sizes.picks,
        })
    }

    /// Gives every tensor the rows of a step.
    pub(crate) fn resize(&mut self, backend: &B, step: &B::Step) -> Result<(), Error> {
        let tokens = backend.rows(step).0;
        backend.resize(&mut self.logits, tokens)?;
        backend.resize(&mut self.picks, tokens)?;
        let Self { gate, up, out, count, .. } = self;
        Ok([gate, up, out].into_iter().try_for_each(|tensor| backend.resize(tensor, tokens * *count))?)
    }
}

impl<B: Backend> Bank<B> {
    /// The experts under `name` (`{name}.experts.gate_up_proj` and so on), in whichever layout the checkpoint has them.
    pub(crate) fn load(loader: &mut Loader<'_, B>, name: &str, sizes: Sizes) -> Result<Self, Error> {
        let Sizes { experts, hidden, intermediate, picks } = sizes;
        let stacks = [experts, picks];
        let fused = format!("{name}.experts.gate_up_proj");
        if loader.checkpoint.has(&fused) {
            // Of each expert, the gate's rows come before those of up.
            let mut half = |second: usize| -> Result<B::Linear, Error> {
                let first = |expert: usize| (2 * expert + second) * intermediate;
                let order = (0..experts).flat_map(|expert| first(expert)..first(expert) + intermediate);
                let tensor = loader.take(&fused, &[experts, 2 * intermediate, hidden])?;
                loader.stack(tensor.with_row_order(order.map(|row| row as u32).collect()), None, stacks)
            };
            let (gate, up) = (half(0)?, half(1)?);
            let (own, stacked) = (format!("{name}.experts.down_proj"), format!("{name}.switch_mlp.down_proj.weight"));
            let down = if loader.checkpoint.has(&stacked) { stacked } else { own };
            let down = loader.take(&down, &[experts, hidden, intermediate])?;
            return Ok(Self { gate, up, down: loader.stack(down, None, stacks)? });
        }
        let mut matrix = |part: &str, [outputs, inputs]: [usize; 2]| -> Result<B::Linear, Error> {
            let stacked = format!("{name}.switch_mlp.{part}.weight");
            if loader.checkpoint.has(&stacked) {
                let tensor = loader.take(&stacked, &[experts, outputs, inputs])?;
                return loader.stack(tensor, None, stacks);
            }
            let each =
                |expert: usize| loader.take(&format!("{name}.experts.{expert}.{part}.weight"), &[outputs, inputs]);
            let tensors = (0..experts).map(each).collect::<Result<Vec<_>, _>>()?;
            loader.stack(Tensor::stack(tensors)?, None, stacks)
        };
        Ok(Self {
            gate: matrix("gate_proj", [intermediate, hidden])?,
            up: matrix("up_proj", [intermediate, hidden])?,
            down: matrix("down_proj", [hidden, intermediate])?,
        })
    }

    pub(crate) fn new(gate: B::Linear, up: B::Linear, down: B::Linear) -> Self {
        Self { gate, up, down }
    }

    /// A bank of one expert.
    pub(crate) fn one(mlp: Mlp<B>) -> Self {
        let [gate, up, down] = mlp.into_parts();
        Self { gate, up, down }
    }
}

impl<B: Backend> Experts<B> {
    /// `acc +=` what the experts make of `h`, routed by `seen`.
    pub(crate) fn add(
        &self,
        backend: &B,
        inputs: (&B::Tensor, &B::Tensor),
        w: &mut ExpertSpace<B>,
        acc: &mut B::Tensor,
    ) -> Result<(), Error> {
        self.run(backend, inputs, w)?;
        Ok(backend.combine_add(&w.out, &w.picks, acc)?)
    }

    /// `out =` what the experts make of `h`, routed by `seen`.
    pub(crate) fn set(
        &self,
        backend: &B,
        inputs: (&B::Tensor, &B::Tensor),
        w: &mut ExpertSpace<B>,
        out: &mut B::Tensor,
    ) -> Result<(), Error> {
        self.run(backend, inputs, w)?;
        Ok(backend.combine(&w.out, &w.picks, out)?)
    }

    fn run(&self, backend: &B, (h, seen): (&B::Tensor, &B::Tensor), w: &mut ExpertSpace<B>) -> Result<(), Error> {
        backend.project(seen, &mut [(&self.router, &mut w.logits)])?;
        let sides = [self.bias.as_ref(), self.factors.as_ref()];
        backend.route(&w.logits, self.routing, sides, &mut w.picks)?;
        let gated = &mut [(&self.bank.gate, &mut w.gate), (&self.bank.up, &mut w.up)];
        backend.project_picked(h, &w.picks, gated)?;
        match self.unit {
            Unit::Gated(activation) => backend.gate(activation, &mut w.gate, &w.up)?,
            Unit::Clamped(alpha, limit) => backend.gate_clamped((alpha, limit), &mut w.gate, &w.up)?,
        }
        Ok(backend.project_picked(&w.gate, &w.picks, &mut [(&self.bank.down, &mut w.out)])?)
    }
}
