//! The verbs as launches.

use std::ops::Range;

use kvern_backend::{
    Activation, Attention, Backend, DeltaInputs, DeltaRule, Error as BackendError, Limits, Part, Slot, check_append,
    check_convolution,
};
use kvern_state::{Kind, StateSpec, StepPlan, Table};
use kvern_weights::Tensor as WeightTensor;

use crate::attention::Attend;
use crate::device::{Argument, Error, Grid, Trying, lock};
use crate::gpu::{Cuda, Drawn, OUTPUTS, RESERVE, Tensor};
use crate::linear::{Linear, Packing, Vector};
use crate::pages::Pages;
use crate::product::{Input, activation};
use crate::record::{Mode, Recorder, Way};
use crate::step::{Plan, Step};

/// `State` of `kernels/recurrent.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Recurrent {
    plan: Plan,
    pages: crate::pages::Store,
    offset: u64,
}

impl Argument for Recurrent {}

impl Backend for Cuda {
    type Tensor = Tensor;
    type Linear = Linear;
    type Vector = Vector;
    type Pages = Pages;
    type Step = Step;

    fn describe(&self) -> String {
        let properties = self.device.properties();
        let exact = if self.exact { ", exact f32" } else { "" };
        format!("cuda ({}, {}{exact})", properties.name, properties.architecture)
    }

    fn facts(&self) -> Vec<(&'static str, String)> {
        let properties = self.device.properties();
        vec![("gpu", properties.name.clone()), ("architecture", properties.architecture.clone())]
    }

    fn limits(&self) -> Result<Option<Limits>, BackendError> {
        const STREAM: usize = 4 << 30;
        const ROUNDS: u32 = 1 << 16;
        let stream = self.device.allocate(STREAM)?;
        stream.clear()?;
        let sum = self.device.allocate(4)?;
        let multiprocessors = self.device.properties().multiprocessors;
        let best = |run: &dyn Fn() -> Result<(), Error>| -> Result<f64, Error> {
            let mut best = f64::INFINITY;
            for _ in 0..10 {
                best = best.min(self.time(run)?);
            }
            Ok(best)
        };
        let read = best(&|| {
            let grid = Grid::new(multiprocessors * 16, 512);
            let arguments: &[&dyn Argument] = &[&stream.address(), &(STREAM as u64 / 16), &sum.address()];
            // SAFETY: exactly the allocation.
            unsafe { self.device.launch("read_all", grid, arguments) }
        })?;
        let blocks = multiprocessors * 4;
        let multiply = best(&|| {
            // SAFETY: the kernel touches nothing but a float.
            unsafe { self.device.launch("multiply_all", Grid::new(blocks, 256), &[&ROUNDS, &sum.address()]) }
        })?;
        // Eight warps a block, eight instructions a round, 16 x 8 x 16 multiply-adds each.
        let operations = f64::from(blocks) * 8.0 * f64::from(ROUNDS) * 8.0 * 2048.0 * 2.0;
        Ok(Some(Limits { read_gb_s: STREAM as f64 / read / 1e9, dot_gops: operations / multiply / 1e9 }))
    }

    fn free_memory(&self) -> Result<Option<u64>, BackendError> {
        Ok(Some(self.device.free()?.saturating_sub(RESERVE)))
    }

    fn linear(&self, weight: WeightTensor, bias: Option<WeightTensor>) -> Result<Linear, BackendError> {
        // A new model; what is recorded is another one's.
        lock(&self.state).recorder.clear();
        Linear::pack(&self.device, &weight, bias.as_ref(), self.exact)
    }

    fn linear_bytes(&self, linear: &Linear) -> usize {
        linear.bytes()
    }

    fn vector(&self, values: &[f32]) -> Result<Vector, BackendError> {
        Ok(Vector::new(&self.device, values)?)
    }

    fn tensor(&self, rows: usize, width: usize) -> Result<Tensor, BackendError> {
        // Steps are rounded up, so a workspace may need more rows than were asked for.
        let memory = self.device.allocate(crate::step::rounded(rows) * width * 4)?;
        Ok(Tensor { memory, rows: 0, width, capacity: crate::step::rounded(rows) })
    }

    fn resize(&self, tensor: &mut Tensor, rows: usize) -> Result<(), BackendError> {
        if rows > tensor.capacity {
            let (expected, found) = (tensor.capacity, rows);
            return Err(BackendError::Shape { verb: "resize", what: "rows", expected, found });
        }
        tensor.rows = rows;
        Ok(())
    }

    fn pages(&self, spec: &StateSpec) -> Result<Pages, BackendError> {
        // What is recorded names the pages that it was recorded with.
        lock(&self.state).recorder.clear();
        Pages::new(&self.device, spec)
    }

    fn begin(&self, plan: StepPlan, pages: &mut Pages) -> Result<Step, BackendError> {
        self.device.bind()?;
        let mut state = lock(&self.state);
        let (step, moved) = state.uploads.begin(plan, pages)?;
        if moved {
            state.recorder.clear();
        }
        Ok(step)
    }

    fn plan<'a>(&self, step: &'a Step) -> &'a StepPlan {
        &step.plan
    }

    fn rows(&self, step: &Step) -> (usize, usize) {
        (step.tokens, step.outputs)
    }

    fn run<E: From<BackendError>>(
        &self,
        step: &Step,
        pages: &mut Pages,
        mut verbs: impl FnMut(&mut Pages) -> Result<(), E>,
    ) -> Result<(), E> {
        let size = step.size.filter(|_| !self.eager && lock(&self.state).profile.is_none());
        let way = size.map_or(Way::Plain, |size| lock(&self.state).recorder.way(size));
        let fail = |error: Error| E::from(error.into());
        match (way, size) {
            (Way::Record, Some(size)) => {
                Recorder::begin(&self.device).map_err(fail)?;
                let recorded = verbs(pages);
                let keep = recorded.is_ok().then_some(size);
                lock(&self.state).recorder.end(&self.device, keep).map_err(fail)?;
                recorded?;
                lock(&self.state).recorder.play(size).map_err(fail)?;
            }
            (Way::Play, Some(size)) => {
                lock(&self.state).mode = Mode::Skip;
                let checked = verbs(pages);
                lock(&self.state).mode = Mode::Enqueue;
                checked?;
                lock(&self.state).recorder.play(size).map_err(fail)?;
            }
            _ => verbs(pages)?,
        }
        if step.draws {
            self.fetch(step.plan.outputs.len()).map_err(fail)?;
        }
        Ok(())
    }

    fn embed(&self, step: &Step, table: &Linear, scale: f32, out: &mut Tensor) -> Result<(), BackendError> {
        BackendError::check("embed", "rows of the output", step.tokens, out.rows)?;
        BackendError::check("embed", "width of the output", table.inputs, out.width)?;
        if let Some(&token) = step.plan.tokens.iter().find(|&&token| token as usize >= table.outputs) {
            return Err(BackendError::Token { token, vocab: table.outputs });
        }
        let drawn = lock(&self.state).drawn.address();
        let count = step.tokens as u32;
        // SAFETY: a pair for each token, of which those that name a token name an output of the last draw.
        unsafe {
            self.launch("resolve", Grid::values(step.tokens), &[&step.pending_at(), &count, &drawn, &step.tokens_at()])
        }?;
        let arguments: &[&dyn Argument] = &[
            &table.weight(0),
            &(table.packing as u32),
            &(table.blocks() as u32),
            &step.tokens_at(),
            &scale,
            &out.address(),
            &(out.width as u32),
        ];
        // SAFETY: the shapes and the tokens were checked; drawn tokens are ids of the same vocabulary.
        unsafe { self.launch("embed", Grid::rows(step.tokens, out.width), arguments) }
    }

    fn rms_norm(&self, x: &Tensor, weight: &Vector, eps: f32, out: &mut Tensor) -> Result<(), BackendError> {
        BackendError::check("rms_norm", "width of the output", x.width, out.width)?;
        BackendError::check("rms_norm", "rows of the output", x.rows, out.rows)?;
        self.norm(x.address(), x.shape(), weight, eps, out.address(), false)
    }

    fn rms_norm_in_place(&self, x: &mut Tensor, weight: &Vector, eps: f32) -> Result<(), BackendError> {
        self.norm(x.address(), x.shape(), weight, eps, x.address(), false)
    }

    fn rms_norm_add(&self, x: &Tensor, weight: &Vector, eps: f32, acc: &mut Tensor) -> Result<(), BackendError> {
        BackendError::check("rms_norm_add", "width of the sum", x.width, acc.width)?;
        BackendError::check("rms_norm_add", "rows of the sum", x.rows, acc.rows)?;
        self.norm(x.address(), x.shape(), weight, eps, acc.address(), true)
    }

    fn project(&self, x: &Tensor, outs: &mut [(&Linear, &mut Tensor)]) -> Result<(), BackendError> {
        self.products((x, Input::Plain), outs, false)
    }

    fn project_add(&self, x: &Tensor, weight: &Linear, acc: &mut Tensor) -> Result<(), BackendError> {
        self.products((x, Input::Plain), &mut [(weight, acc)], true)
    }

    fn project_norm(
        &self,
        x: &Tensor,
        (norm, eps): (&Vector, f32),
        h: &mut Tensor,
        outs: &mut [(&Linear, &mut Tensor)],
    ) -> Result<(), BackendError> {
        if norm.len != x.width || outs.iter().any(|(weight, _)| weight.packing == Packing::Exact) {
            self.rms_norm(x, norm, eps, h)?;
            return self.project(h, outs);
        }
        self.products((x, Input::Normed(norm, eps)), outs, false)
    }

    fn project_gate_add(
        &self,
        (function, gate, up): (Activation, &mut Tensor, &Tensor),
        weight: &Linear,
        acc: &mut Tensor,
    ) -> Result<(), BackendError> {
        if weight.packing == Packing::Exact {
            self.gate(function, gate, up)?;
            return self.project_add(gate, weight, acc);
        }
        BackendError::check("gate", "width of the factor", gate.width, up.width)?;
        BackendError::check("gate", "rows of the factor", gate.rows, up.rows)?;
        self.products((gate, Input::Gated(function, up)), &mut [(weight, acc)], true)
    }

    fn rope_angles(&self, step: &Step, frequencies: &Vector, scale: f32, out: &mut Tensor) -> Result<(), BackendError> {
        BackendError::check("rope_angles", "rows of the output", step.tokens, out.rows)?;
        BackendError::check("rope_angles", "width of the output", 2 * frequencies.len, out.width)?;
        let count = frequencies.len as u32;
        let arguments: &[&dyn Argument] =
            &[&step.positions_at(), &frequencies.memory.address(), &count, &scale, &out.address()];
        // SAFETY: the shapes were checked.
        unsafe { self.launch("rope_angles", Grid::rows(step.tokens, frequencies.len), arguments) }
    }

    fn rope(&self, x: &mut Tensor, angles: &Tensor, head_dim: usize) -> Result<(), BackendError> {
        BackendError::check("rope", "rows of the angles", x.rows, angles.rows)?;
        BackendError::check("rope", "remainder of the width", 0, x.width % head_dim)?;
        let (width, dim, count) = (x.width as u32, head_dim as u32, angles.width as u32 / 2);
        let arguments: &[&dyn Argument] = &[&x.address(), &angles.address(), &width, &dim, &count];
        // SAFETY: the shapes were checked.
        unsafe { self.launch("rope", Grid::rows(x.rows, x.width / 2), arguments) }
    }

    fn append(&self, step: &Step, pages: &mut Pages, slot: Slot, planes: &[&Tensor]) -> Result<(), BackendError> {
        let shapes: Vec<_> = planes.iter().map(|plane| plane.shape()).collect();
        check_append(pages.spec(), slot, step.tokens, &shapes)?;
        for segment in &step.plan.segments {
            kvern_backend::columns("append", segment, slot.group)?;
        }
        let plan = step.plan(slot);
        for (index, plane) in planes.iter().enumerate() {
            let arguments: &[&dyn Argument] = &[
                &plan,
                &pages.stores(),
                &pages.planes(slot),
                &(planes.len() as u32),
                &(index as u32),
                &plane.address(),
                &(plane.width as u32),
            ];
            // SAFETY: the shapes were checked, and the plan's pages exist.
            unsafe { self.launch("append", Grid::rows(step.tokens, plane.width), arguments) }?;
        }
        Ok(())
    }

    fn rope_append(
        &self,
        step: &Step,
        pages: &mut Pages,
        slot: Slot,
        (q, k, v): (&mut Tensor, &mut Tensor, &Tensor),
        (angles, head_dim): (&Tensor, usize),
    ) -> Result<(), BackendError> {
        let attention = pages.spec().groups()[slot.group].kind == Kind::Attention;
        if !attention || pages.spec().groups()[slot.group].key_dim() != head_dim || head_dim > 256 {
            self.rope(q, angles, head_dim)?;
            self.rope(k, angles, head_dim)?;
            return self.append(step, pages, slot, &[k, v]);
        }
        check_append(pages.spec(), slot, step.tokens, &[k.shape(), v.shape()])?;
        BackendError::check("rope", "rows of the angles", q.rows, angles.rows)?;
        BackendError::check("rope", "remainder of the width", 0, q.width % head_dim)?;
        BackendError::check("rope", "rows of the queries", step.tokens, q.rows)?;
        for segment in &step.plan.segments {
            kvern_backend::columns("append", segment, slot.group)?;
        }
        let (heads, kv_heads) = ((q.width / head_dim) as u32, pages.spec().groups()[slot.group].heads() as u32);
        let (dim, count) = (head_dim as u32, angles.width as u32 / 2);
        let arguments: &[&dyn Argument] = &[
            &step.plan(slot),
            &pages.stores(),
            &pages.planes(slot),
            &q.address(),
            &k.address(),
            &v.address(),
            &angles.address(),
            &heads,
            &kv_heads,
            &dim,
            &count,
        ];
        // Four heads a block.
        let grid = Grid::new(((heads + 2 * kv_heads).div_ceil(4), step.tokens as u32), 4 * dim);
        // SAFETY: the shapes were checked, and the plan's pages exist.
        unsafe { self.launch("rope_append", grid, arguments) }
    }

    fn attend(
        &self,
        step: &Step,
        pages: &Pages,
        attention: Attention,
        sinks: Option<&Vector>,
        q: &Tensor,
        out: &mut Tensor,
    ) -> Result<(), BackendError> {
        let Attention { slot, heads, scale, softcap } = attention;
        attention.check(pages.spec(), step.tokens, sinks.map(|sinks| sinks.len), q.shape(), out.shape())?;
        for segment in &step.plan.segments {
            kvern_backend::columns("attend", segment, slot.group)?;
        }
        let group = &pages.spec().groups()[slot.group];
        let attend = Attend {
            plan: step.plan(slot),
            classes: pages.stores(),
            planes: pages.planes(slot),
            q: q.address(),
            sinks: sinks.map_or(0, |sinks| sinks.memory.address()),
            out: out.address(),
            scale,
            softcap: softcap.unwrap_or(0.0),
            heads: heads as u32,
            kv_heads: group.heads() as u32,
            key_dim: group.key_dim() as u32,
            value_dim: group.value_dim() as u32,
            plane_count: group.planes.len() as u32,
            latent: u32::from(group.kind == Kind::Latent),
        };
        if let Some(matrix) = Self::matrix(pages.spec(), slot, heads) {
            return self.attend_matrix(step, &attend, matrix);
        }
        let grid = Grid::new((heads as u32, step.tokens as u32), 128);
        // SAFETY: the shapes were checked, and the plan's pages exist.
        unsafe { self.launch("attend_any", grid, &[&attend]) }
    }

    fn convolve(
        &self,
        step: &Step,
        pages: &mut Pages,
        (slot, plane): (Slot, usize),
        kernel: &Vector,
        x: &Tensor,
        out: &mut Tensor,
    ) -> Result<(), BackendError> {
        let taps = check_convolution(pages.spec(), (slot, plane), step.tokens, kernel.len, x.shape(), out.shape())?;
        if taps > 8 {
            return Err(BackendError::Unsupported {
                what: "a convolution",
                found: taps.to_string(),
                needs: "at most 8 taps",
            });
        }
        let Some(class) = self.states("convolve", step, slot.group)? else { return Ok(()) };
        let part = Part { layer: slot.layer, plane };
        let (store, _) = pages.plane(class, part);
        let state = Recurrent { plan: step.plan(slot), pages: store, offset: pages.offset(class, part) };
        let grid = Grid::new(((x.width as u32).div_ceil(256), step.segments() as u32), 256);
        let (taps, width) = (taps as u32, x.width as u32);
        let arguments: &[&dyn Argument] =
            &[&state, &kernel.memory.address(), &taps, &x.address(), &out.address(), &width];
        // SAFETY: the shapes were checked, and the plan's states exist.
        unsafe { self.launch("convolve", grid, arguments) }
    }

    fn delta_rule(
        &self,
        step: &Step,
        pages: &mut Pages,
        rule: DeltaRule,
        inputs: DeltaInputs<'_, Tensor>,
        out: &mut Tensor,
    ) -> Result<(), BackendError> {
        let DeltaRule { slot, plane, heads, key_heads, key_dim, value_dim } = rule;
        let DeltaInputs { q, k, v, decay, beta } = inputs;
        rule.check(pages.spec(), step.tokens, [q, k, v, decay, beta, &*out].map(Tensor::shape))?;
        if key_dim > 256 {
            let found = key_dim.to_string();
            return Err(BackendError::Unsupported { what: "a key dimension", found, needs: "at most 256" });
        }
        let Some(class) = self.states("delta_rule", step, slot.group)? else { return Ok(()) };
        let part = Part { layer: slot.layer, plane };
        let (store, _) = pages.plane(class, part);
        let state = Recurrent { plan: step.plan(slot), pages: store, offset: pages.offset(class, part) };
        let grid = Grid::new(((value_dim as u32).div_ceil(32), heads as u32, step.segments() as u32), 256);
        let arguments: &[&dyn Argument] = &[
            &state,
            &q.address(),
            &k.address(),
            &v.address(),
            &decay.address(),
            &beta.address(),
            &out.address(),
            &(heads as u32),
            &(key_heads as u32),
            &(key_dim as u32),
            &(value_dim as u32),
        ];
        // SAFETY: the shapes were checked, and the plan's states exist.
        unsafe { self.launch("delta_rule", grid, arguments) }
    }

    fn gate(&self, function: Activation, gate: &mut Tensor, up: &Tensor) -> Result<(), BackendError> {
        BackendError::check("gate", "width of the factor", gate.width, up.width)?;
        BackendError::check("gate", "rows of the factor", gate.rows, up.rows)?;
        self.activated(function, gate, up.address())
    }

    fn activate(&self, function: Activation, x: &mut Tensor) -> Result<(), BackendError> {
        self.activated(function, x, 0)
    }

    fn decay(&self, rate: &Vector, bias: &Vector, x: &mut Tensor) -> Result<(), BackendError> {
        BackendError::check("decay", "width of the rates", x.width, rate.len)?;
        BackendError::check("decay", "width of the bias", x.width, bias.len)?;
        let (width, count) = (x.width as u32, x.len() as u64);
        let arguments: &[&dyn Argument] =
            &[&x.address(), &rate.memory.address(), &bias.memory.address(), &width, &count];
        // SAFETY: the shapes were checked.
        unsafe { self.launch("decay", Grid::values(x.len()), arguments) }
    }

    fn softcap(&self, cap: f32, x: &mut Tensor) -> Result<(), BackendError> {
        // SAFETY: exactly the tensor's values.
        unsafe { self.launch("softcap", Grid::values(x.len()), &[&x.address(), &cap, &(x.len() as u64)]) }
    }

    fn scale(&self, factor: f32, x: &mut Tensor) -> Result<(), BackendError> {
        // SAFETY: exactly the tensor's values.
        unsafe { self.launch("scale", Grid::values(x.len()), &[&x.address(), &factor, &(x.len() as u64)]) }
    }

    fn slice(&self, x: &Tensor, first: usize, out: &mut Tensor) -> Result<(), BackendError> {
        BackendError::check("slice", "rows of the output", x.rows, out.rows)?;
        let end = first + out.width;
        BackendError::check("slice", "end of the slice", end.min(x.width), end)?;
        let (first, from, width) = (first as u32, x.width as u32, out.width as u32);
        let arguments: &[&dyn Argument] = &[&x.address(), &out.address(), &first, &from, &width];
        // SAFETY: the shapes were checked.
        unsafe { self.launch("slice", Grid::rows(out.rows, out.width), arguments) }
    }

    fn outputs(&self, step: &Step, x: &Tensor, out: &mut Tensor) -> Result<(), BackendError> {
        BackendError::check("outputs", "rows of the output", step.outputs, out.rows)?;
        BackendError::check("outputs", "width of the output", x.width, out.width)?;
        let arguments: &[&dyn Argument] = &[&step.outputs_at(), &x.address(), &out.address(), &(x.width as u32)];
        // SAFETY: the shapes were checked, and outputs name tokens.
        unsafe { self.launch("gather", Grid::rows(step.outputs, x.width), arguments) }
    }

    fn draws(&self) -> bool {
        true
    }

    fn draw(&self, step: &Step, logits: &Tensor) -> Result<(), BackendError> {
        BackendError::check("draw", "rows of the logits", step.outputs, logits.rows)?;
        if step.outputs > OUTPUTS {
            let found = step.outputs.to_string();
            return Err(BackendError::Unsupported { what: "a number of outputs", found, needs: "at most 16384" });
        }
        if !step.draws {
            return Ok(());
        }
        let drawn = lock(&self.state).drawn.address();
        let arguments: &[&dyn Argument] = &[&logits.address(), &(logits.width as u32), &step.draws_at(), &drawn];
        // SAFETY: a draw and a place for each row of logits.
        unsafe { self.launch("draw", Grid::new(step.outputs as u32, 1024), arguments) }
    }

    fn drawn(&self) -> Result<Vec<u32>, BackendError> {
        let Some(Drawn { pinned, event, count }) = lock(&self.state).results.pop_front() else { return Ok(Vec::new()) };
        self.device.bind()?;
        event.synchronize().trying("finish a step")?;
        let tokens = bytemuck::cast_slice(&pinned.bytes()[..count * 4]).to_vec();
        lock(&self.state).spare.push(pinned);
        Ok(tokens)
    }

    fn upload(&self, values: &[f32], tensor: &mut Tensor) -> Result<(), BackendError> {
        BackendError::check("upload", "number of values", tensor.len(), values.len())?;
        Ok(tensor.memory.write(0, values)?)
    }

    fn download(&self, tensor: &Tensor) -> Result<Vec<f32>, BackendError> {
        let mut values = vec![0.0; tensor.len()];
        tensor.memory.read(0, &mut values)?;
        Ok(values)
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
        Ok(pages.export(part, table, columns, out)?)
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
        Ok(pages.import(part, table, columns, bytes)?)
    }
}

impl Cuda {
    fn states(&self, verb: &'static str, step: &Step, group: usize) -> Result<Option<usize>, BackendError> {
        let mut class = None;
        for segment in &step.plan.segments {
            class = Some(kvern_backend::states(verb, segment, group)?.class);
        }
        Ok(class)
    }

    /// A norm of each run of the weight's length.
    fn norm(
        &self,
        x: u64,
        (rows, width): (usize, usize),
        weight: &Vector,
        eps: f32,
        out: u64,
        add: bool,
    ) -> Result<(), BackendError> {
        BackendError::check("rms_norm", "remainder of the width", 0, width % weight.len)?;
        let runs = rows * (width / weight.len);
        let arguments: &[&dyn Argument] =
            &[&x, &weight.memory.address(), &eps, &(weight.len as u32), &out, &u32::from(add)];
        // SAFETY: the shapes were checked.
        unsafe { self.launch("rms_norm", Grid::rows(runs, weight.len), arguments) }
    }

    fn activated(&self, function: Activation, x: &mut Tensor, up: u64) -> Result<(), BackendError> {
        let arguments: &[&dyn Argument] = &[&x.address(), &up, &activation(function), &(x.len() as u64)];
        // SAFETY: exactly the tensor's values, of which `up` has as many or is none.
        unsafe { self.launch("activate", Grid::values(x.len()), arguments) }
    }
}
