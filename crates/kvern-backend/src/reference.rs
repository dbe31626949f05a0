//! The reference backend: scalar, accumulating in `f64`, and as plain as it can be. It defines what every verb means.
//!
//! Weights are decoded to `f32`. A page is kept in canonical order, and a page that is handed out again is first filled with
//! bytes that decode to NaN, so that reading a column which was never written shows.

use std::collections::HashMap;
use std::ops::Range;

use kvern_state::{Class, PageCopy, Plane, StateSpec, StepPlan, Table};
use kvern_weights::Tensor as Weight;

use crate::{Activation, Attention, Backend, DeltaInputs, DeltaRule, Error, INDEX, Indexer, Part, Routing, Slot};

/// The reference backend.
#[derive(Debug, Default)]
pub struct Reference(());

/// Activations `[rows, width]`.
#[derive(Debug)]
pub struct Tensor {
    data: Vec<f32>,
    width: usize,
    capacity: usize,
}

impl Tensor {
    fn rows(&self) -> usize {
        self.data.len() / self.width
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.data[row * self.width..][..self.width]
    }

    fn row_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.data[row * self.width..][..self.width]
    }
}

/// A weight matrix `[outputs, inputs]`, decoded.
#[derive(Debug)]
pub struct Linear {
    data: Vec<f32>,
    inputs: usize,
    bias: Vec<f32>,
    /// Matrices of a stack.
    count: usize,
}

impl Linear {
    fn outputs(&self) -> usize {
        self.data.len() / self.inputs / self.count
    }
}

/// Page storage: `pages[class][id]`, each `[layer][plane][column][head]` in encoded bytes.
#[derive(Debug)]
pub struct Pages {
    spec: StateSpec,
    pages: Vec<Vec<Vec<u8>>>,
}

impl Pages {
    /// Byte range of one column of a part in a page.
    fn column(&self, class: &Class, part: Part, column: usize) -> Range<usize> {
        let layer: usize = class.planes.iter().map(Plane::column_bytes).sum();
        let before: usize = class.planes[..part.plane].iter().map(Plane::column_bytes).sum();
        let bytes = class.planes[part.plane].column_bytes();
        let start = (part.layer * layer + before) * class.columns + column * bytes;
        start..start + bytes
    }

    fn class(&self, table: &Table) -> &Class {
        &self.spec.classes()[table.class]
    }

    fn get(&self, part: Part, table: &Table, column: usize) -> &[u8] {
        let class = self.class(table);
        let (columns, range) = (class.columns, self.column(class, part, column % class.columns));
        &self.pages[table.class][table.id(column / columns) as usize][range]
    }

    fn get_mut(&mut self, part: Part, table: &Table, column: usize) -> &mut [u8] {
        let class = self.class(table);
        let (columns, range) = (class.columns, self.column(class, part, column % class.columns));
        &mut self.pages[table.class][table.id(column / columns) as usize][range]
    }

    /// One head's values of a column.
    fn decode(&self, part: Part, table: &Table, column: usize, head: usize) -> Vec<f32> {
        let plane = &self.class(table).planes[part.plane];
        let bytes = plane.codec.bytes(plane.dim);
        let mut values = vec![0.0; plane.dim];
        plane.codec.decode(&self.get(part, table, column)[head * bytes..][..bytes], &mut values);
        values
    }

    /// Makes a page that decodes to NaN.
    fn refresh(&mut self, class: usize, id: u32) {
        let pages = &mut self.pages[class];
        pages.resize(pages.len().max(id as usize + 1), Vec::new());
        pages[id as usize] = vec![0xFF; self.spec.classes()[class].bytes() as usize];
    }

    fn copy(&mut self, plan: &StepPlan, copy: &PageCopy) -> Result<(), Error> {
        if copy.from.class == copy.to.class {
            self.pages[copy.to.class][copy.to.id as usize] = self.pages[copy.from.class][copy.from.id as usize].clone();
            return Ok(());
        }
        let (layers, planes) = {
            let class = &self.spec.classes()[copy.to.class];
            (class.layers, class.planes.clone())
        };
        let table = |page: kvern_state::PageId| Table { class: page.class, ids: vec![page.id], ..Table::default() };
        let (from, to) = (table(copy.from), table(copy.to));
        for (layer, plane, column) in
            (0..layers).flat_map(|l| (0..planes.len()).flat_map(move |p| (0..copy.columns).map(move |c| (l, p, c))))
        {
            let Plane { heads, dim, codec, .. } = planes[plane];
            for head in 0..heads {
                let values = self.decode(Part { layer, plane }, &from, column, head);
                let bytes = self.get_mut(Part { layer, plane }, &to, column);
                if !codec.encode(&values, &mut bytes[head * codec.bytes(dim)..][..codec.bytes(dim)]) {
                    return Err(Error::not_finite_in(plan, &self.spec, copy.to, layer, column));
                }
            }
        }
        Ok(())
    }

    /// The state of one plane: zeros before the first token.
    fn state(&self, class: usize, slot: Slot, plane: usize, from: Option<u32>, size: usize) -> Vec<f64> {
        let part = Part { layer: slot.layer, plane };
        let Some(id) = from else { return vec![0.0; size] };
        let table = Table { class, ids: vec![id], ..Table::default() };
        self.decode(part, &table, 0, 0).into_iter().map(f64::from).collect()
    }

    fn store(&mut self, class: usize, slot: Slot, plane: usize, id: u32, state: &[f64]) {
        let part = Part { layer: slot.layer, plane };
        let table = Table { class, ids: vec![id], ..Table::default() };
        let values: Vec<f32> = state.iter().map(|&x| x as f32).collect();
        let codec = self.class(&table).planes[plane].codec;
        codec.encode(&values, self.get_mut(part, &table, 0));
    }
}

impl Reference {
    /// The backend; it has no settings.
    pub fn new() -> Self {
        Self(())
    }

    fn product(weight: &Linear, x: &[f32], output: usize) -> f32 {
        let row = &weight.data[output * weight.inputs..][..weight.inputs];
        let dot: f64 = row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
        (dot + f64::from(weight.bias.get(output).copied().unwrap_or(0.0))) as f32
    }

    /// Attention over the columns that each query sees, or those of them that are picked for it.
    fn attend_columns(
        &self,
        step: &StepPlan,
        pages: &Pages,
        attention: Attention,
        (sinks, picks): (Option<&Vec<f32>>, Option<&Tensor>),
        q: &Tensor,
        out: &mut Tensor,
    ) -> Result<(), Error> {
        let Attention { slot, heads, scale, softcap } = attention;
        let (q_shape, out_shape) = ((q.rows(), q.width), (out.rows(), out.width));
        attention.check(&pages.spec, step.tokens.len(), sinks.map(Vec::len), q_shape, out_shape)?;
        let group = &pages.spec.groups()[slot.group];
        let (share, k_dim, v_dim) = (heads / group.heads(), group.key_dim(), group.value_dim());
        let latent = group.kind == kvern_state::Kind::Latent;
        for segment in &step.segments {
            let columns = crate::columns("attend", segment, slot.group)?;
            let part = |plane| Part { layer: slot.layer, plane };
            // Columns that a query has seen, decoded: (plane, column, head).
            let mut decoded: HashMap<(usize, usize, usize), Vec<f32>> = HashMap::new();
            for (i, head) in (0..segment.count).flat_map(|i| (0..heads).map(move |head| (i, head))) {
                let row = segment.start + i;
                let q = &q.row(row)[head * k_dim..][..k_dim];
                let visible = segment.visible(columns, group.window, i, step.positions[row] as usize);
                let seen: Vec<usize> = match picks {
                    None => (0..visible.sinks).chain(visible.start..visible.end).collect(),
                    Some(picks) => picks.row(row).iter().filter(|&&x| x >= 0.0).map(|&x| x as usize).collect(),
                };
                for at in seen.iter().flat_map(|&column| [(0, column, head / share), (1, column, head / share)]) {
                    let (plane, column, head) = at;
                    decoded.entry(at).or_insert_with(|| pages.decode(part(plane), &columns.table, column, head));
                }
                let value_plane = usize::from(!latent);
                let score = |&column: &usize| {
                    let rest = if latent { decoded[&(1, column, 0)].as_slice() } else { &[] };
                    let key = decoded[&(0, column, head / share)].iter().chain(rest);
                    let dot: f64 = q.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                    let score = dot * f64::from(scale);
                    softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
                };
                let scores: Vec<f64> = seen.iter().map(score).collect();
                let sink = sinks.map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[head]));
                let max = scores.iter().copied().fold(sink, f64::max);
                let mut sum = if sinks.is_some() { (sink - max).exp() } else { 0.0 };
                let mut acc = vec![0.0; v_dim];
                for (&column, score) in seen.iter().zip(&scores) {
                    let weight = (score - max).exp();
                    sum += weight;
                    let value = &decoded[&(value_plane, column, head / share)];
                    acc.iter_mut().zip(value).for_each(|(acc, v)| *acc += weight * f64::from(*v));
                }
                let out = &mut out.row_mut(row)[head * v_dim..][..v_dim];
                out.iter_mut()
                    .zip(&acc)
                    .for_each(|(out, acc)| *out = if seen.is_empty() { 0.0 } else { (acc / sum) as f32 });
            }
        }
        Ok(())
    }

    fn normalize(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        let mean = x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>() / x.len() as f64;
        let factor = 1.0 / (mean + f64::from(eps)).sqrt();
        for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
            *out = (f64::from(*x) * factor * f64::from(*weight)) as f32;
        }
    }
}

fn activated(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            x / 2.0 * (1.0 + inner.tanh())
        }
    }
}

impl Backend for Reference {
    type Tensor = Tensor;
    type Linear = Linear;
    type Vector = Vec<f32>;
    type Pages = Pages;
    type Step = StepPlan;

    fn describe(&self) -> String {
        "reference (scalar, f64 accumulation)".into()
    }

    fn linear(&self, weight: Weight, bias: Option<Weight>) -> Result<Linear, Error> {
        self.stack(weight, bias, 1)
    }

    fn stack(&self, weight: Weight, bias: Option<Weight>, count: usize) -> Result<Linear, Error> {
        Error::check("stack", "remainder of the rows", 0, weight.rows() % count)?;
        let bias = bias.map(|bias| bias.to_vec()).unwrap_or_default();
        Ok(Linear { data: weight.to_vec(), inputs: weight.cols(), bias, count })
    }

    fn linear_bytes(&self, linear: &Linear) -> usize {
        size_of_val(linear.data.as_slice())
    }

    fn vector(&self, values: &[f32]) -> Result<Vec<f32>, Error> {
        Ok(values.to_vec())
    }

    fn tensor(&self, rows: usize, width: usize) -> Result<Tensor, Error> {
        Ok(Tensor { data: Vec::new(), width, capacity: rows })
    }

    fn resize(&self, tensor: &mut Tensor, rows: usize) -> Result<(), Error> {
        if rows > tensor.capacity {
            return Err(Error::Shape { verb: "resize", what: "rows", expected: tensor.capacity, found: rows });
        }
        tensor.data.resize(rows * tensor.width, 0.0);
        Ok(())
    }

    fn pages(&self, spec: &StateSpec) -> Result<Pages, Error> {
        Ok(Pages { spec: spec.clone(), pages: spec.classes().iter().map(|_| Vec::new()).collect() })
    }

    fn begin(&self, plan: StepPlan, pages: &mut Pages) -> Result<StepPlan, Error> {
        for page in &plan.fresh {
            pages.refresh(page.class, page.id);
        }
        for copy in &plan.copies {
            pages.copy(&plan, copy)?;
        }
        Ok(plan)
    }

    fn plan<'a>(&self, step: &'a StepPlan) -> &'a StepPlan {
        step
    }

    fn at_outputs(&self, step: &StepPlan) -> Option<StepPlan> {
        Some(step.at_outputs())
    }

    fn embed(&self, step: &StepPlan, table: &Linear, scale: f32, out: &mut Tensor) -> Result<(), Error> {
        Error::check("embed", "rows of the output", step.tokens.len(), out.rows())?;
        Error::check("embed", "width of the output", table.inputs, out.width)?;
        for (row, &token) in step.tokens.iter().enumerate() {
            let vocab = table.data.len() / table.inputs;
            if token as usize >= vocab {
                return Err(Error::Token { token, vocab });
            }
            let values = &table.data[token as usize * table.inputs..][..table.inputs];
            out.row_mut(row).iter_mut().zip(values).for_each(|(out, x)| *out = x * scale);
        }
        Ok(())
    }

    fn rms_norm(&self, x: &Tensor, weight: &Vec<f32>, eps: f32, out: &mut Tensor) -> Result<(), Error> {
        Error::check("rms_norm", "values of the output", x.data.len(), out.data.len())?;
        Error::check("rms_norm", "remainder of the width", 0, x.width % weight.len())?;
        for (x, out) in x.data.chunks_exact(weight.len()).zip(out.data.chunks_exact_mut(weight.len())) {
            Self::normalize(x, weight, eps, out);
        }
        Ok(())
    }

    fn rms_norm_in_place(&self, x: &mut Tensor, weight: &Vec<f32>, eps: f32) -> Result<(), Error> {
        Error::check("rms_norm", "remainder of the width", 0, x.width % weight.len())?;
        for x in x.data.chunks_exact_mut(weight.len()) {
            let before = x.to_vec();
            Self::normalize(&before, weight, eps, x);
        }
        Ok(())
    }

    fn rms_norm_add(&self, x: &Tensor, weight: &Vec<f32>, eps: f32, acc: &mut Tensor) -> Result<(), Error> {
        Error::check("rms_norm_add", "values of the sum", x.data.len(), acc.data.len())?;
        Error::check("rms_norm_add", "remainder of the width", 0, x.width % weight.len())?;
        let mut normalized = vec![0.0; weight.len()];
        for (x, acc) in x.data.chunks_exact(weight.len()).zip(acc.data.chunks_exact_mut(weight.len())) {
            Self::normalize(x, weight, eps, &mut normalized);
            acc.iter_mut().zip(&normalized).for_each(|(acc, x)| *acc += x);
        }
        Ok(())
    }

    fn project(&self, x: &Tensor, outs: &mut [(&Linear, &mut Tensor)]) -> Result<(), Error> {
        for (weight, out) in outs {
            Error::check("project", "width of the input", weight.inputs, x.width)?;
            Error::check("project", "width of the output", weight.data.len() / weight.inputs, out.width)?;
            Error::check("project", "rows of the output", x.rows(), out.rows())?;
            for row in 0..x.rows() {
                for (output, out) in out.row_mut(row).iter_mut().enumerate() {
                    *out = Self::product(weight, x.row(row), output);
                }
            }
        }
        Ok(())
    }

    fn project_add(&self, x: &Tensor, weight: &Linear, acc: &mut Tensor) -> Result<(), Error> {
        Error::check("project_add", "width of the input", weight.inputs, x.width)?;
        Error::check("project_add", "width of the output", weight.data.len() / weight.inputs, acc.width)?;
        Error::check("project_add", "rows of the output", x.rows(), acc.rows())?;
        for row in 0..x.rows() {
            for (output, acc) in acc.row_mut(row).iter_mut().enumerate() {
                *acc += Self::product(weight, x.row(row), output);
            }
        }
        Ok(())
    }

    fn rope_angles(&self, step: &StepPlan, frequencies: &Vec<f32>, scale: f32, out: &mut Tensor) -> Result<(), Error> {
        Error::check("rope_angles", "rows of the output", step.positions.len(), out.rows())?;
        Error::check("rope_angles", "width of the output", 2 * frequencies.len(), out.width)?;
        for (row, &position) in step.positions.iter().enumerate() {
            let (cos, sin) = out.row_mut(row).split_at_mut(frequencies.len());
            for (i, &frequency) in frequencies.iter().enumerate() {
                // The angle is rounded to f32 as the models' own code does; its sine and cosine are exact.
                let angle = f64::from(position as f32 * frequency);
                cos[i] = (angle.cos() * f64::from(scale)) as f32;
                sin[i] = (angle.sin() * f64::from(scale)) as f32;
            }
        }
        Ok(())
    }

    fn route(
        &self,
        logits: &Tensor,
        routing: Routing,
        sides: [Option<&Vec<f32>>; 2],
        picks: &mut Tensor,
    ) -> Result<(), Error> {
        let (x, out) = ((logits.rows(), logits.width), (picks.rows(), picks.width));
        routing.check(x, sides.map(|side| side.map(Vec::len)), out)?;
        let [bias, factors] = sides.map(|side| side.map(Vec::as_slice));
        (0..logits.rows()).for_each(|row| routing.pick(logits.row(row), bias, factors, picks.row_mut(row)));
        Ok(())
    }

    fn project_picked(&self, x: &Tensor, picks: &Tensor, outs: &mut [(&Linear, &mut Tensor)]) -> Result<(), Error> {
        for (weight, out) in outs {
            let shape = (weight.count, weight.outputs(), weight.inputs);
            crate::check_picked((x.rows(), x.width), (picks.rows(), picks.width), shape, (out.rows(), out.width))?;
            let count = picks.width / 2;
            for row in 0..out.rows() {
                let input = if x.rows() == picks.rows() { row / count } else { row };
                let first = picks.row(row / count)[row % count] as usize * weight.outputs();
                for (i, out) in out.row_mut(row).iter_mut().enumerate() {
                    *out = Self::product(weight, x.row(input), first + i);
                }
            }
        }
        Ok(())
    }

    fn combine(&self, x: &Tensor, picks: &Tensor, out: &mut Tensor) -> Result<(), Error> {
        out.data.fill(0.0);
        self.combine_add(x, picks, out)
    }

    fn combine_add(&self, x: &Tensor, picks: &Tensor, acc: &mut Tensor) -> Result<(), Error> {
        crate::check_combine((x.rows(), x.width), (picks.rows(), picks.width), (acc.rows(), acc.width))?;
        let count = picks.width / 2;
        for row in 0..acc.rows() {
            for (i, acc) in acc.row_mut(row).iter_mut().enumerate() {
                let term = |j: usize| f64::from(picks.row(row)[count + j]) * f64::from(x.row(row * count + j)[i]);
                *acc = (f64::from(*acc) + (0..count).map(term).sum::<f64>()) as f32;
            }
        }
        Ok(())
    }

    fn project_heads(&self, x: &Tensor, stack: &Linear, out: &mut Tensor) -> Result<(), Error> {
        Error::check("project_heads", "rows of the output", x.rows(), out.rows())?;
        Error::check("project_heads", "width of the input", stack.count * stack.inputs, x.width)?;
        Error::check("project_heads", "width of the output", stack.count * stack.outputs(), out.width)?;
        for row in 0..x.rows() {
            for (i, out) in out.row_mut(row).iter_mut().enumerate() {
                *out = Self::product(stack, &x.row(row)[i / stack.outputs() * stack.inputs..][..stack.inputs], i);
            }
        }
        Ok(())
    }

    fn layer_norm_in_place(&self, x: &mut Tensor, [weight, bias]: [&Vec<f32>; 2], eps: f32) -> Result<(), Error> {
        Error::check("layer_norm", "values of the weight", x.width, weight.len())?;
        Error::check("layer_norm", "values of the bias", x.width, bias.len())?;
        let width = x.width as f64;
        for row in 0..x.rows() {
            let row = x.row_mut(row);
            let mean = row.iter().map(|x| f64::from(*x)).sum::<f64>() / width;
            let variance = row.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / width;
            let factor = 1.0 / (variance + f64::from(eps)).sqrt();
            for ((x, weight), bias) in row.iter_mut().zip(weight).zip(bias) {
                *x = ((f64::from(*x) - mean) * factor * f64::from(*weight) + f64::from(*bias)) as f32;
            }
        }
        Ok(())
    }

    fn rope(&self, x: &mut Tensor, angles: &Tensor, head_dim: usize) -> Result<(), Error> {
        Error::check("rope", "rows of the angles", x.rows(), angles.rows())?;
        Error::check("rope", "remainder of the width", 0, x.width % head_dim)?;
        let pairs = angles.width / 2;
        for row in 0..x.rows() {
            let (cos, sin) = angles.row(row).split_at(pairs);
            for head in x.row_mut(row).chunks_exact_mut(head_dim) {
                for i in 0..pairs {
                    let (a, b) = (f64::from(head[i]), f64::from(head[i + pairs]));
                    let (cos, sin) = (f64::from(cos[i]), f64::from(sin[i]));
                    head[i] = (a * cos - b * sin) as f32;
                    head[i + pairs] = (b * cos + a * sin) as f32;
                }
            }
        }
        Ok(())
    }

    fn append(&self, step: &StepPlan, pages: &mut Pages, slot: Slot, planes: &[&Tensor]) -> Result<(), Error> {
        let shapes: Vec<_> = planes.iter().map(|plane| (plane.rows(), plane.width)).collect();
        crate::check_append(&pages.spec, slot, step.tokens.len(), &shapes)?;
        for (index, segment) in step.segments.iter().enumerate() {
            let columns = crate::columns("append", segment, slot.group)?;
            for (i, row) in segment.writers(columns).enumerate() {
                for (plane, values) in planes.iter().enumerate() {
                    let part = Part { layer: slot.layer, plane };
                    let Plane { heads, dim, codec, .. } = pages.class(&columns.table).planes[plane];
                    let column = pages.get_mut(part, &columns.table, columns.past + i);
                    for head in 0..heads {
                        let bytes = codec.bytes(dim);
                        let to = &mut column[head * bytes..][..bytes];
                        if !codec.encode(&values.row(row)[head * dim..][..dim], to) {
                            let Slot { group, layer } = slot;
                            return Err(Error::NotFinite { row: index, group, layer, column: columns.past + i });
                        }
                    }
                }
            }
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
    ) -> Result<(), Error> {
        self.attend_columns(step, pages, attention, (sinks, None), q, out)
    }

    fn select(
        &self,
        step: &StepPlan,
        pages: &Pages,
        indexer: Indexer,
        (q, weights): (&Tensor, &Tensor),
        picks: &mut Tensor,
    ) -> Result<(), Error> {
        let Indexer { slot, heads } = indexer;
        let shapes = [q, weights, &*picks].map(|tensor| (tensor.rows(), tensor.width));
        indexer.check(&pages.spec, step.tokens.len(), shapes)?;
        let group = &pages.spec.groups()[slot.group];
        let part = Part { layer: slot.layer, plane: INDEX };
        for segment in &step.segments {
            let columns = crate::columns("select", segment, slot.group)?;
            for i in 0..segment.count {
                let row = segment.start + i;
                let visible = segment.visible(columns, group.window, i, step.positions[row] as usize);
                let score = |column: usize| -> f64 {
                    let key = pages.decode(part, &columns.table, column, 0);
                    let head = |head: usize| {
                        let q = &q.row(row)[head * key.len()..][..key.len()];
                        let dot: f64 = q.iter().zip(&key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                        f64::from(weights.row(row)[head]) * dot.max(0.0)
                    };
                    (0..heads).map(head).sum()
                };
                let seen = (0..visible.sinks).chain(visible.start..visible.end);
                let mut scored: Vec<(f64, usize)> = seen.map(|column| (score(column), column)).collect();
                scored.sort_by(|a, b| b.0.total_cmp(&a.0));
                scored.truncate(picks.width);
                scored.sort_by_key(|&(_, column)| column);
                let picks = picks.row_mut(row);
                picks.fill(-1.0);
                picks.iter_mut().zip(&scored).for_each(|(pick, &(_, column))| *pick = column as f32);
            }
        }
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
    ) -> Result<(), Error> {
        Error::check("attend_picked", "rows of the picks", q.rows(), picks.rows())?;
        self.attend_columns(step, pages, attention, (None, Some(picks)), q, out)
    }

    fn convolve(
        &self,
        step: &StepPlan,
        pages: &mut Pages,
        (slot, plane): (Slot, usize),
        kernel: &Vec<f32>,
        x: &Tensor,
        out: &mut Tensor,
    ) -> Result<(), Error> {
        let (width, tokens) = (x.width, step.tokens.len());
        let (x_shape, out_shape) = ((x.rows(), width), (out.rows(), out.width));
        let taps = crate::check_convolution(&pages.spec, (slot, plane), tokens, kernel.len(), x_shape, out_shape)?;
        for segment in &step.segments {
            let states = crate::states("convolve", segment, slot.group)?;
            let mut inputs = pages.state(states.class, slot, plane, states.from, (taps - 1) * width);
            for i in 0..segment.count {
                inputs.extend(x.row(segment.start + i).iter().map(|&x| f64::from(x)));
                for (channel, out) in out.row_mut(segment.start + i).iter_mut().enumerate() {
                    let term =
                        |tap: usize| f64::from(kernel[tap * width + channel]) * inputs[(i + tap) * width + channel];
                    *out = (0..taps).map(term).sum::<f64>() as f32;
                }
            }
            for &(after, id) in &states.to {
                pages.store(states.class, slot, plane, id, &inputs[after * width..][..(taps - 1) * width]);
            }
        }
        Ok(())
    }

    fn delta_rule(
        &self,
        step: &StepPlan,
        pages: &mut Pages,
        rule: DeltaRule,
        inputs: DeltaInputs<'_, Tensor>,
        out: &mut Tensor,
    ) -> Result<(), Error> {
        let DeltaRule { slot, plane, heads, key_heads, key_dim, value_dim } = rule;
        let DeltaInputs { q, k, v, decay, beta } = inputs;
        let shapes = [q, k, v, decay, beta, &*out].map(|tensor| (tensor.rows(), tensor.width));
        rule.check(&pages.spec, step.tokens.len(), shapes)?;
        for segment in &step.segments {
            let states = crate::states("delta_rule", segment, slot.group)?;
            let mut s = pages.state(states.class, slot, plane, states.from, heads * key_dim * value_dim);
            let mut to = states.to.iter().peekable();
            for (i, row) in (segment.start..segment.start + segment.count).enumerate() {
                for head in 0..heads {
                    let s = &mut s[head * key_dim * value_dim..][..key_dim * value_dim];
                    let key = head / (heads / key_heads) * key_dim;
                    let (q, k) = (&q.row(row)[key..][..key_dim], &k.row(row)[key..][..key_dim]);
                    let (decay, beta) = (f64::from(decay.row(row)[head]), f64::from(beta.row(row)[head]));
                    s.iter_mut().for_each(|s| *s *= decay);
                    for d in 0..value_dim {
                        let held: f64 = (0..key_dim).map(|j| f64::from(k[j]) * s[j * value_dim + d]).sum();
                        let write = (f64::from(v.row(row)[head * value_dim + d]) - held) * beta;
                        (0..key_dim).for_each(|j| s[j * value_dim + d] += f64::from(k[j]) * write);
                        let read: f64 = (0..key_dim).map(|j| f64::from(q[j]) * s[j * value_dim + d]).sum();
                        out.row_mut(row)[head * value_dim + d] = read as f32;
                    }
                }
                // What is stored is what the next step reads, so that a step's end shows in no bit.
                s.iter_mut().for_each(|s| *s = f64::from(*s as f32));
                if let Some((_, id)) = to.next_if(|(after, _)| *after == i + 1) {
                    pages.store(states.class, slot, plane, *id, &s);
                }
            }
        }
        Ok(())
    }

    fn gate(&self, activation: Activation, gate: &mut Tensor, up: &Tensor) -> Result<(), Error> {
        Error::check("gate", "values of the factor", gate.data.len(), up.data.len())?;
        for (gate, up) in gate.data.iter_mut().zip(&up.data) {
            *gate = (activated(activation, f64::from(*gate)) * f64::from(*up)) as f32;
        }
        Ok(())
    }

    fn gate_clamped(&self, (alpha, limit): (f32, f32), gate: &mut Tensor, up: &Tensor) -> Result<(), Error> {
        Error::check("gate_clamped", "values of the factor", gate.data.len(), up.data.len())?;
        for (gate, up) in gate.data.iter_mut().zip(&up.data) {
            let (g, u) = (f64::from(gate.min(limit)), f64::from(up.clamp(-limit, limit)));
            *gate = (g / (1.0 + (-f64::from(alpha) * g).exp()) * (u + 1.0)) as f32;
        }
        Ok(())
    }

    fn activate(&self, activation: Activation, x: &mut Tensor) -> Result<(), Error> {
        x.data.iter_mut().for_each(|x| *x = activated(activation, f64::from(*x)) as f32);
        Ok(())
    }

    fn decay(&self, rate: &Vec<f32>, bias: &Vec<f32>, x: &mut Tensor) -> Result<(), Error> {
        Error::check("decay", "width of the rates", x.width, rate.len())?;
        Error::check("decay", "width of the bias", x.width, bias.len())?;
        for (i, x) in x.data.iter_mut().enumerate() {
            let (rate, bias) = (f64::from(rate[i % rate.len()]), f64::from(bias[i % bias.len()]));
            *x = (-rate * (f64::from(*x) + bias).exp().ln_1p()).exp() as f32;
        }
        Ok(())
    }

    fn softcap(&self, cap: f32, x: &mut Tensor) -> Result<(), Error> {
        let cap = f64::from(cap);
        x.data.iter_mut().for_each(|x| *x = (cap * (f64::from(*x) / cap).tanh()) as f32);
        Ok(())
    }

    fn scale(&self, factor: f32, x: &mut Tensor) -> Result<(), Error> {
        x.data.iter_mut().for_each(|x| *x *= factor);
        Ok(())
    }

    fn slice(&self, x: &Tensor, first: usize, out: &mut Tensor) -> Result<(), Error> {
        Error::check("slice", "rows of the output", x.rows(), out.rows())?;
        Error::check("slice", "end of the slice", (first + out.width).min(x.width), first + out.width)?;
        let width = out.width;
        (0..x.rows()).for_each(|row| out.row_mut(row).copy_from_slice(&x.row(row)[first..first + width]));
        Ok(())
    }

    fn join(&self, heads: usize, a: &Tensor, b: &Tensor, out: &mut Tensor) -> Result<(), Error> {
        crate::check_join(heads, [a, b, &*out].map(|tensor| (tensor.rows(), tensor.width)))?;
        let (first, second) = (a.width / heads, b.width / heads);
        for row in 0..out.rows() {
            for (head, out) in out.row_mut(row).chunks_exact_mut(first + second).enumerate() {
                out[..first].copy_from_slice(&a.row(row)[head * first..][..first]);
                out[first..].copy_from_slice(&b.row(row)[head * second..][..second]);
            }
        }
        Ok(())
    }

    fn outputs(&self, step: &StepPlan, x: &Tensor, out: &mut Tensor) -> Result<(), Error> {
        Error::check("outputs", "rows of the output", step.outputs.len(), out.rows())?;
        Error::check("outputs", "width of the output", x.width, out.width)?;
        for (row, &index) in step.outputs.iter().enumerate() {
            out.row_mut(row).copy_from_slice(x.row(index as usize));
        }
        Ok(())
    }

    fn upload(&self, values: &[f32], tensor: &mut Tensor) -> Result<(), Error> {
        Error::check("upload", "number of values", tensor.data.len(), values.len())?;
        tensor.data.copy_from_slice(values);
        Ok(())
    }

    fn download(&self, tensor: &Tensor) -> Result<Vec<f32>, Error> {
        Ok(tensor.data.clone())
    }

    fn export(
        &self,
        pages: &Pages,
        part: Part,
        table: &Table,
        columns: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let bytes = pages.class(table).planes[part.plane].column_bytes();
        crate::check_columns("export", &pages.spec, part, table, &columns, out.len())?;
        for (column, out) in columns.zip(out.chunks_exact_mut(bytes)) {
            out.copy_from_slice(pages.get(part, table, column));
        }
        Ok(())
    }

    fn import(
        &self,
        pages: &mut Pages,
        part: Part,
        table: &Table,
        columns: Range<usize>,
        bytes: &[u8],
    ) -> Result<(), Error> {
        let column_bytes = pages.class(table).planes[part.plane].column_bytes();
        crate::check_columns("import", &pages.spec, part, table, &columns, bytes.len())?;
        for &id in &table.ids {
            if pages.pages[table.class].get(id as usize).is_none_or(Vec::is_empty) {
                pages.refresh(table.class, id);
            }
        }
        for (column, bytes) in columns.zip(bytes.chunks_exact(column_bytes)) {
            pages.get_mut(part, table, column).copy_from_slice(bytes);
        }
        Ok(())
    }
}
