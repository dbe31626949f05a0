//! [`Cpu`]: the verbs of [`Backend`] as calls of kernels.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use kvern_backend::{
    Activation, Attention, Backend, DeltaInputs, DeltaRule, Error as BackendError, Indexer, Limits, Part, Routing, Slot,
};
use kvern_base::AllocError;
use kvern_state::{Kind, StateSpec, StepPlan, Table};
use kvern_weights::Tensor as Weight;

use crate::matmul::{Product, Share, Store};
use crate::pack::{Body, Linear};
use crate::pages::Pages;
use crate::picked::Picked;
use crate::pool::Pool;
use crate::quantize::{GROUP, Quantized};
use crate::tensor::Matrix;
#[cfg(target_arch = "x86_64")]
use crate::tiles::{self, Split};
use crate::{KernelSet, Tensor, attention, elementwise, isa, limits, matmul, recurrent, sparse};

/// How a [`Cpu`] is made.
#[derive(Debug, Clone, Default)]
pub struct CpuOptions {
    /// Threads; the number of cores when absent.
    pub threads: Option<usize>,
    /// `scalar`, `avx2`, `avx512` or `amx`; the best of this CPU when absent.
    pub isa: Option<String>,
    /// Decode quantized weights to `f32` and keep activations in `f32`: slow, and as exact as `f32` gets.
    pub exact: bool,
}

/// Why a [`Cpu`] could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The asked instruction set is unknown or this CPU lacks it.
    #[error("instruction set `{asked}` is not available here; this CPU has {available}")]
    Isa {
        /// What was asked for.
        asked: String,
        /// What there is.
        available: String,
    },
    /// A worker thread could not be started.
    #[error("cannot start {threads} threads: {source}")]
    Threads {
        /// How many were asked for.
        threads: usize,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Memory ran out.
    #[error(transparent)]
    Alloc(#[from] AllocError),
}

/// The CPU backend.
pub struct Cpu {
    set: KernelSet,
    pool: Pool,
    exact: bool,
    quantized: Mutex<Quantized>,
    #[cfg(target_arch = "x86_64")]
    split: Mutex<Split>,
}

impl Cpu {
    /// Chooses the instruction set and starts the threads.
    ///
    /// # Errors
    /// [`Error`] when the instruction set is not available or threads cannot be started.
    pub fn new(options: &CpuOptions) -> Result<Self, Error> {
        let available = KernelSet::available();
        let set = match &options.isa {
            None => available.last().copied(),
            Some(asked) => available.iter().copied().find(|set| set.name() == asked),
        };
        let set = set.ok_or_else(|| Error::Isa {
            asked: options.isa.clone().unwrap_or_default(),
            available: available.iter().map(|set| set.name()).collect::<Vec<_>>().join(", "),
        })?;
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        let threads = options.threads.unwrap_or_else(cores).max(1);
        let pool = Pool::new(threads).map_err(|source| Error::Threads { threads, source })?;
        Ok(Self {
            set,
            pool,
            exact: options.exact,
            quantized: Mutex::new(Quantized::empty()?),
            #[cfg(target_arch = "x86_64")]
            split: Mutex::new(Split::empty()?),
        })
    }

    /// The instruction set in use.
    pub fn set(&self) -> KernelSet {
        self.set
    }

    /// The threads.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    fn products(&self, x: &Tensor, outs: &mut [(&Linear, &mut Tensor)], store: Store) -> Result<(), BackendError> {
        for (weight, out) in outs.iter() {
            BackendError::check("project", "width of the input", weight.inputs, x.width())?;
            BackendError::check("project", "width of the output", weight.outputs, out.width())?;
            BackendError::check("project", "rows of the output", x.rows(), out.rows())?;
        }
        self.shared_products(x.matrix(), outs, &[Share::WHOLE], store)
    }

    fn shared_products(
        &self,
        x: Matrix<'_>,
        outs: &mut [(&Linear, &mut Tensor)],
        shares: &[Share<'_>],
        store: Store,
    ) -> Result<(), BackendError> {
        let mut quantized = self.quantized.lock().unwrap_or_else(PoisonError::into_inner);
        if outs.iter().any(|(weight, _)| matches!(weight.body, Body::Codes(_))) {
            quantized.reserve(x.rows(), x.width())?;
            quantized.fill(self.set, &self.pool, x);
        }
        let products = outs.iter_mut().map(|(weight, out)| Product::new(weight, shares, out, store));
        #[cfg(target_arch = "x86_64")]
        let products: Vec<Product<'_>> = {
            let (tiled, others) = products.partition::<Vec<_>, _>(|product| tiles::has(product.weight));
            if let Some(amx) = self.set.tiles().filter(|_| !tiled.is_empty()) {
                let mut split = self.split.lock().unwrap_or_else(PoisonError::into_inner);
                split.fill(self.set, &self.pool, x, shares)?;
                tiles::products(self.set, amx, &self.pool, (x, &split), &tiled);
            }
            others
        };
        #[cfg(not(target_arch = "x86_64"))]
        let products: Vec<Product<'_>> = products.collect();
        matmul::products(self.set, &self.pool, x, &quantized, &products);
        Ok(())
    }
}

impl Backend for Cpu {
    type Tensor = Tensor;
    type Linear = Linear;
    type Vector = Vec<f32>;
    type Pages = Pages;
    type Step = StepPlan;

    fn describe(&self) -> String {
        let exact = if self.exact { ", exact f32" } else { "" };
        format!("cpu ({}, {} threads{exact})", self.set.name(), self.pool.threads())
    }

    fn facts(&self) -> Vec<(&'static str, String)> {
        vec![("isa", self.set.name().into()), ("threads", self.pool.threads().to_string())]
    }

    fn limits(&self) -> Result<Option<Limits>, BackendError> {
        Ok(Some(limits::measure(self)?))
    }

    fn linear(&self, weight: Weight, bias: Option<Weight>) -> Result<Linear, BackendError> {
        self.stack(weight, bias, 1)
    }

    fn stack(&self, weight: Weight, bias: Option<Weight>, count: usize) -> Result<Linear, BackendError> {
        BackendError::check("stack", "remainder of the rows", 0, weight.rows() % count)?;
        let outputs = weight.rows() / count;
        if count > 1 && !outputs.is_multiple_of(isa::LANES) {
            let what = "a stack's number of outputs";
            return Err(BackendError::Unsupported { what, found: outputs.to_string(), needs: "a multiple of 16" });
        }
        // Sums over quantized activations run in groups of 32; a format whose rows are no multiple of that is decoded.
        let exact = self.exact || !weight.cols().is_multiple_of(GROUP);
        Ok(Linear::pack((&self.pool, self.set), &weight, bias.as_ref(), count, exact)?)
    }

    fn linear_bytes(&self, linear: &Linear) -> usize {
        linear.bytes()
    }

    fn vector(&self, values: &[f32]) -> Result<Vec<f32>, BackendError> {
        Ok(values.to_vec())
    }

    fn tensor(&self, rows: usize, width: usize) -> Result<Tensor, BackendError> {
        Ok(Tensor::new(rows, width)?)
    }

    fn resize(&self, tensor: &mut Tensor, rows: usize) -> Result<(), BackendError> {
        let capacity = tensor.capacity();
        if tensor.resize(rows) {
            return Ok(());
        }
        Err(BackendError::Shape { verb: "resize", what: "rows", expected: capacity, found: rows })
    }

    fn pages(&self, spec: &StateSpec) -> Result<Pages, BackendError> {
        Pages::new(spec)
    }

    fn begin(&self, plan: StepPlan, pages: &mut Pages) -> Result<StepPlan, BackendError> {
        pages.begin(&plan)?;
        Ok(plan)
    }

    fn plan<'a>(&self, step: &'a StepPlan) -> &'a StepPlan {
        step
    }

    fn at_outputs(&self, step: &StepPlan) -> Option<StepPlan> {
        Some(step.at_outputs())
    }

    fn embed(&self, step: &StepPlan, table: &Linear, scale: f32, out: &mut Tensor) -> Result<(), BackendError> {
        BackendError::check("embed", "rows of the output", step.tokens.len(), out.rows())?;
        BackendError::check("embed", "width of the output", table.inputs, out.width())?;
        if let Some(&token) = step.tokens.iter().find(|&&token| token as usize >= table.outputs) {
            return Err(BackendError::Token { token, vocab: table.outputs });
        }
        elementwise::rows(&self.pool, out, |row, out| {
            table.row(step.tokens[row] as usize, out);
            if scale != 1.0 {
                out.iter_mut().for_each(|x| *x *= scale);
            }
        });
        Ok(())
    }

    fn rms_norm(&self, x: &Tensor, weight: &Vec<f32>, eps: f32, out: &mut Tensor) -> Result<(), BackendError> {
        BackendError::check("rms_norm", "width of the output", x.width(), out.width())?;
        BackendError::check("rms_norm", "rows of the output", x.rows(), out.rows())?;
        BackendError::check("rms_norm", "remainder of the width", 0, x.width() % weight.len())?;
        elementwise::rms_norm(self.set, &self.pool, Some(x), weight, eps, out);
        Ok(())
    }

    fn rms_norm_in_place(&self, x: &mut Tensor, weight: &Vec<f32>, eps: f32) -> Result<(), BackendError> {
        BackendError::check("rms_norm", "remainder of the width", 0, x.width() % weight.len())?;
        elementwise::rms_norm(self.set, &self.pool, None, weight, eps, x);
        Ok(())
    }

    fn rms_norm_add(&self, x: &Tensor, weight: &Vec<f32>, eps: f32, acc: &mut Tensor) -> Result<(), BackendError> {
        BackendError::check("rms_norm_add", "width of the sum", x.width(), acc.width())?;
        BackendError::check("rms_norm_add", "rows of the sum", x.rows(), acc.rows())?;
        BackendError::check("rms_norm_add", "remainder of the width", 0, x.width() % weight.len())?;
        elementwise::rms_norm_add(self.set, &self.pool, x, weight, eps, acc);
        Ok(())
    }

    fn project(&self, x: &Tensor, outs: &mut [(&Linear, &mut Tensor)]) -> Result<(), BackendError> {
        self.products(x, outs, Store::Set)
    }

    fn project_add(&self, x: &Tensor, weight: &Linear, acc: &mut Tensor) -> Result<(), BackendError> {
        self.products(x, &mut [(weight, acc)], Store::Add)
    }

    fn route(
        &self,
        logits: &Tensor,
        routing: Routing,
        sides: [Option<&Vec<f32>>; 2],
        picks: &mut Tensor,
    ) -> Result<(), BackendError> {
        routing.check(shape(logits), sides.map(|side| side.map(Vec::len)), shape(picks))?;
        let [bias, factors] = sides.map(|side| side.map(Vec::as_slice));
        elementwise::rows(&self.pool, picks, |row, picks| routing.pick(logits.row(row), bias, factors, picks));
        Ok(())
    }

    fn project_picked(
        &self,
        x: &Tensor,
        picks: &Tensor,
        outs: &mut [(&Linear, &mut Tensor)],
    ) -> Result<(), BackendError> {
        let Some(count) = outs.iter().map(|(stack, _)| stack.count).min() else { return Ok(()) };
        for (stack, out) in outs.iter() {
            let matrices = (stack.count, stack.outputs, stack.inputs);
            kvern_backend::check_picked(shape(x), shape(picks), matrices, shape(out))?;
        }
        let picked =
            Picked::experts(picks.matrix(), count, x.rows() != picks.rows()).map_err(|found| BackendError::Shape {
                verb: "project_picked",
                what: "matrices of the stack",
                expected: found + 1,
                found: count,
            })?;
        self.shared_products(x.matrix(), outs, &picked.shares(), Store::Set)
    }

    fn combine(&self, x: &Tensor, picks: &Tensor, out: &mut Tensor) -> Result<(), BackendError> {
        kvern_backend::check_combine(shape(x), shape(picks), shape(out))?;
        elementwise::combine(self.set, &self.pool, x, picks, Store::Set, out);
        Ok(())
    }

    fn combine_add(&self, x: &Tensor, picks: &Tensor, acc: &mut Tensor) -> Result<(), BackendError> {
        kvern_backend::check_combine(shape(x), shape(picks), shape(acc))?;
        elementwise::combine(self.set, &self.pool, x, picks, Store::Add, acc);
        Ok(())
    }

    fn project_heads(&self, x: &Tensor, stack: &Linear, out: &mut Tensor) -> Result<(), BackendError> {
        BackendError::check("project_heads", "rows of the output", x.rows(), out.rows())?;
        BackendError::check("project_heads", "width of the input", stack.count * stack.inputs, x.width())?;
        BackendError::check("project_heads", "width of the output", stack.count * stack.outputs, out.width())?;
        let heads = Picked::heads(x.rows(), stack.count);
        self.shared_products(x.runs(stack.inputs), &mut [(stack, out)], &heads.shares(), Store::Set)
    }

    fn layer_norm_in_place(
        &self,
        x: &mut Tensor,
        [weight, bias]: [&Vec<f32>; 2],
        eps: f32,
    ) -> Result<(), BackendError> {
        BackendError::check("layer_norm", "values of the weight", x.width(), weight.len())?;
        BackendError::check("layer_norm", "values of the bias", x.width(), bias.len())?;
        elementwise::layer_norm(&self.pool, x, weight, bias, eps);
        Ok(())
    }

    fn rope_angles(
        &self,
        step: &StepPlan,
        frequencies: &Vec<f32>,
        scale: f32,
        out: &mut Tensor,
    ) -> Result<(), BackendError> {
        BackendError::check("rope_angles", "rows of the output", step.positions.len(), out.rows())?;
        BackendError::check("rope_angles", "width of the output", 2 * frequencies.len(), out.width())?;
        elementwise::rows(&self.pool, out, |row, out| {
            let (cos, sin) = out.split_at_mut(frequencies.len());
            for (i, &frequency) in frequencies.iter().enumerate() {
                let angle = f64::from(step.positions[row] as f32 * frequency);
                let (s, c) = angle.sin_cos();
                cos[i] = (c * f64::from(scale)) as f32;
                sin[i] = (s * f64::from(scale)) as f32;
            }
        });
        Ok(())
    }

    fn rope(&self, x: &mut Tensor, angles: &Tensor, head_dim: usize) -> Result<(), BackendError> {
        BackendError::check("rope", "rows of the angles", x.rows(), angles.rows())?;
        BackendError::check("rope", "remainder of the width", 0, x.width() % head_dim)?;
        elementwise::rope(self.set, &self.pool, x, angles, head_dim);
        Ok(())
    }

    fn append(&self, step: &StepPlan, pages: &mut Pages, slot: Slot, planes: &[&Tensor]) -> Result<(), BackendError> {
        let shapes: Vec<_> = planes.iter().map(|plane| shape(plane)).collect();
        kvern_backend::check_append(pages.spec(), slot, step.tokens.len(), &shapes)?;
        for (row, segment) in step.segments.iter().enumerate() {
            let columns = kvern_backend::columns("append", segment, slot.group)?;
            let Slot { group, layer } = slot;
            let appended = pages.append(self.set, &self.pool, segment, columns, layer, planes);
            appended.map_err(|column| BackendError::NotFinite { row, group, layer, column })?;
        }
        Ok(())
    }

    fn attend(
        &self,
        step: &StepPlan,
        pages: &Pages,
        attention: Attention,
        sinks: Option<&Vec<f32>>,
        q: &Tensor,
        out: &mut Tensor,
    ) -> Result<(), BackendError> {
        attention.check(pages.spec(), step.tokens.len(), sinks.map(Vec::len), shape(q), shape(out))?;
        for segment in &step.segments {
            kvern_backend::columns("attend", segment, attention.slot.group)?;
        }
        attention::attend(self.set, &self.pool, step, pages, attention, sinks.map(Vec::as_slice), q, out);
        Ok(())
    }

    fn select(
        &self,
        step: &StepPlan,
        pages: &Pages,
        indexer: Indexer,
        inputs: (&Tensor, &Tensor),
        picks: &mut Tensor,
    ) -> Result<(), BackendError> {
        indexer.check(pages.spec(), step.tokens.len(), [inputs.0, inputs.1, &*picks].map(shape))?;
        for segment in &step.segments {
            kvern_backend::columns("select", segment, indexer.slot.group)?;
        }
        sparse::select(self.set, &self.pool, (step, pages), indexer, inputs, picks);
        Ok(())
    }

    fn attend_picked(
        &self,
        step: &StepPlan,
        pages: &Pages,
        attention: Attention,
        picks: &Tensor,
        q: &Tensor,
        out: &mut Tensor,
    ) -> Result<(), BackendError> {
        attention.check(pages.spec(), step.tokens.len(), None, shape(q), shape(out))?;
        BackendError::check("attend_picked", "rows of the picks", q.rows(), picks.rows())?;
        let group = attention.slot.group;
        if pages.spec().groups()[group].kind != Kind::Latent {
            let found = pages.spec().groups()[group].kind.name();
            return Err(BackendError::Kind { verb: "attend_picked", group, found });
        }
        for segment in &step.segments {
            kvern_backend::columns("attend_picked", segment, group)?;
        }
        sparse::attend(self.set, &self.pool, (step, pages), attention, picks, q, out);
        Ok(())
    }

    fn convolve(
        &self,
        step: &StepPlan,
        pages: &mut Pages,
        (slot, plane): (Slot, usize),
        kernel: &Vec<f32>,
        x: &Tensor,
        out: &mut Tensor,
    ) -> Result<(), BackendError> {
        let (tokens, state) = (step.tokens.len(), (slot, plane));
        kvern_backend::check_convolution(pages.spec(), state, tokens, kernel.len(), shape(x), shape(out))?;
        for segment in &step.segments {
            kvern_backend::states("convolve", segment, slot.group)?;
        }
        recurrent::convolve(&self.pool, step, pages, (slot.group, slot.layer, plane), kernel, x, out);
        Ok(())
    }

    fn delta_rule(
        &self,
        step: &StepPlan,
        pages: &mut Pages,
        rule: DeltaRule,
        inputs: DeltaInputs<'_, Tensor>,
        out: &mut Tensor,
    ) -> Result<(), BackendError> {
        let DeltaInputs { q, k, v, decay, beta } = inputs;
        rule.check(pages.spec(), step.tokens.len(), [q, k, v, decay, beta, &*out].map(shape))?;
        if !rule.value_dim.is_multiple_of(isa::LANES) {
            let found = rule.value_dim.to_string();
            return Err(BackendError::Unsupported { what: "a value dimension", found, needs: "a multiple of 16" });
        }
        for segment in &step.segments {
            kvern_backend::states("delta_rule", segment, rule.slot.group)?;
        }
        recurrent::delta_rule(self.set, &self.pool, step, pages, rule, &inputs, out);
        Ok(())
    }

    fn gate(&self, activation: Activation, gate: &mut Tensor, up: &Tensor) -> Result<(), BackendError> {
        BackendError::check("gate", "width of the factor", gate.width(), up.width())?;
        BackendError::check("gate", "rows of the factor", gate.rows(), up.rows())?;
        elementwise::activate(self.set, &self.pool, activation, gate, Some(up));
        Ok(())
    }

    fn gate_clamped(&self, unit: (f32, f32), gate: &mut Tensor, up: &Tensor) -> Result<(), BackendError> {
        BackendError::check("gate_clamped", "width of the factor", gate.width(), up.width())?;
        BackendError::check("gate_clamped", "rows of the factor", gate.rows(), up.rows())?;
        elementwise::gate_clamped(self.set, &self.pool, unit, gate, up);
        Ok(())
    }

    fn activate(&self, activation: Activation, x: &mut Tensor) -> Result<(), BackendError> {
        elementwise::activate(self.set, &self.pool, activation, x, None);
        Ok(())
    }

    fn decay(&self, rate: &Vec<f32>, bias: &Vec<f32>, x: &mut Tensor) -> Result<(), BackendError> {
        BackendError::check("decay", "width of the rates", x.width(), rate.len())?;
        BackendError::check("decay", "width of the bias", x.width(), bias.len())?;
        elementwise::decay(&self.pool, rate, bias, x);
        Ok(())
    }

    fn softcap(&self, cap: f32, x: &mut Tensor) -> Result<(), BackendError> {
        elementwise::softcap(self.set, &self.pool, cap, x);
        Ok(())
    }

    fn scale(&self, factor: f32, x: &mut Tensor) -> Result<(), BackendError> {
        elementwise::rows(&self.pool, x, |_, x| x.iter_mut().for_each(|x| *x *= factor));
        Ok(())
    }

    fn slice(&self, x: &Tensor, first: usize, out: &mut Tensor) -> Result<(), BackendError> {
        BackendError::check("slice", "rows of the output", x.rows(), out.rows())?;
        let end = first + out.width();
        BackendError::check("slice", "end of the slice", end.min(x.width()), end)?;
        elementwise::rows(&self.pool, out, |row, out| out.copy_from_slice(&x.row(row)[first..end]));
        Ok(())
    }

    fn join(&self, heads: usize, a: &Tensor, b: &Tensor, out: &mut Tensor) -> Result<(), BackendError> {
        kvern_backend::check_join(heads, [a, b, &*out].map(shape))?;
        let (first, second) = (a.width() / heads, b.width() / heads);
        elementwise::rows(&self.pool, out, |row, out| {
            for (head, out) in out.chunks_exact_mut(first + second).enumerate() {
                out[..first].copy_from_slice(&a.row(row)[head * first..][..first]);
                out[first..].copy_from_slice(&b.row(row)[head * second..][..second]);
            }
        });
        Ok(())
    }

    fn outputs(&self, step: &StepPlan, x: &Tensor, out: &mut Tensor) -> Result<(), BackendError> {
        BackendError::check("outputs", "rows of the output", step.outputs.len(), out.rows())?;
        BackendError::check("outputs", "width of the output", x.width(), out.width())?;
        elementwise::rows(&self.pool, out, |row, out| out.copy_from_slice(x.row(step.outputs[row] as usize)));
        Ok(())
    }

    fn upload(&self, values: &[f32], tensor: &mut Tensor) -> Result<(), BackendError> {
        BackendError::check("upload", "number of values", tensor.values().len(), values.len())?;
        tensor.values_mut().copy_from_slice(values);
        Ok(())
    }

    fn download(&self, tensor: &Tensor) -> Result<Vec<f32>, BackendError> {
        Ok(tensor.values().to_vec())
    }

    fn export(
        &self,
        pages: &Pages,
        part: Part,
        table: &Table,
        columns: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), BackendError> {
        kvern_backend::check_columns("export", pages.spec(), part, table, &columns, out.len())?;
        pages.export(part, table, columns, out);
        Ok(())
    }

    fn import(
        &self,
        pages: &mut Pages,
        part: Part,
        table: &Table,
        columns: Range<usize>,
        bytes: &[u8],
    ) -> Result<(), BackendError> {
        kvern_backend::check_columns("import", pages.spec(), part, table, &columns, bytes.len())?;
        Ok(pages.import(Some(&self.pool), part, table, columns, bytes)?)
    }
}

/// Rows and width.
fn shape(tensor: &Tensor) -> (usize, usize) {
    (tensor.rows(), tensor.width())
}
