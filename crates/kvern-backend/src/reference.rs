//! The reference backend: scalar, accumulating in `f64`, and as plain as it can be. It defines what every verb means.
//!
//! Weights are decoded to `f32`. A page is kept in canonical order, and a page that is handed out again is first filled with
//! bytes that decode to NaN, so that reading a column which was never written shows.

use kvern_state::{StateSpec, StepPlan};
use kvern_weights::Tensor as Weight;

use crate::{Activation, Attention, Backend, Columns, Error, Slot};

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
}

/// Page storage: `pages[group][id]`, each `[layer][token][head][k | v]` in encoded bytes.
#[derive(Debug)]
pub struct Pages {
    spec: StateSpec,
    pages: Vec<Vec<Vec<u8>>>,
}

impl Pages {
    /// Byte ranges of one head's key and value in a page.
    fn column(&self, slot: Slot, token: usize, head: usize) -> (std::ops::Range<usize>, std::ops::Range<usize>) {
        let group = &self.spec.groups()[slot.group];
        let (k, v) = (group.k.bytes(group.k_dim), group.v.bytes(group.v_dim));
        let start = ((slot.layer * self.spec.page() + token) * group.kv_heads + head) * (k + v);
        (start..start + k, start + k..start + k + v)
    }

    fn key(&self, slot: Slot, table: &[u32], position: usize, head: usize) -> &[u8] {
        let range = self.column(slot, position % self.spec.page(), head).0;
        &self.pages[slot.group][table[position / self.spec.page()] as usize][range]
    }

    fn value(&self, slot: Slot, table: &[u32], position: usize, head: usize) -> &[u8] {
        let range = self.column(slot, position % self.spec.page(), head).1;
        &self.pages[slot.group][table[position / self.spec.page()] as usize][range]
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

    fn normalize(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        let mean = x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>() / x.len() as f64;
        let factor = 1.0 / (mean + f64::from(eps)).sqrt();
        for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
            *out = (f64::from(*x) * factor * f64::from(*weight)) as f32;
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
        let bias = bias.map(|bias| bias.to_vec()).unwrap_or_default();
        Ok(Linear { data: weight.to_vec(), inputs: weight.cols(), bias })
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
        Ok(Pages { spec: spec.clone(), pages: spec.groups().iter().map(|_| Vec::new()).collect() })
    }

    fn begin(&self, plan: StepPlan, pages: &mut Pages) -> Result<StepPlan, Error> {
        let page = pages.spec.page();
        for group in 0..pages.pages.len() {
            let bytes = pages.spec.page_bytes(group) as usize;
            for segment in &plan.segments {
                // The pages that this step is the first to write start as NaN.
                let first = segment.past.div_ceil(page).min(segment.tables[group].len());
                for &id in &segment.tables[group][first..] {
                    let pages = &mut pages.pages[group];
                    pages.resize(pages.len().max(id as usize + 1), Vec::new());
                    pages[id as usize] = vec![0xFF; bytes];
                }
            }
        }
        for copy in &plan.copies {
            let pages = &mut pages.pages[copy.group];
            pages.resize(pages.len().max(copy.to as usize + 1), Vec::new());
            pages[copy.to as usize] = pages[copy.from as usize].clone();
        }
        Ok(plan)
    }

    fn plan<'a>(&self, step: &'a StepPlan) -> &'a StepPlan {
        step
    }

    fn embed(&self, step: &StepPlan, table: &Linear, out: &mut Tensor) -> Result<(), Error> {
        Error::check("embed", "rows of the output", step.tokens.len(), out.rows())?;
        Error::check("embed", "width of the output", table.inputs, out.width)?;
        for (row, &token) in step.tokens.iter().enumerate() {
            let vocab = table.data.len() / table.inputs;
            if token as usize >= vocab {
                return Err(Error::Token { token, vocab });
            }
            out.row_mut(row).copy_from_slice(&table.data[token as usize * table.inputs..][..table.inputs]);
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

    fn append(&self, step: &StepPlan, pages: &mut Pages, slot: Slot, k: &Tensor, v: &Tensor) -> Result<(), Error> {
        let group = pages.spec.groups()[slot.group].clone();
        Error::check("append", "width of the keys", group.kv_heads * group.k_dim, k.width)?;
        Error::check("append", "width of the values", group.kv_heads * group.v_dim, v.width)?;
        Error::check("append", "rows of the keys", step.tokens.len(), k.rows())?;
        Error::check("append", "rows of the values", step.tokens.len(), v.rows())?;
        for segment in &step.segments {
            for i in 0..segment.count {
                let (row, position) = (segment.start + i, segment.past + i);
                let id = segment.tables[slot.group][position / pages.spec.page()] as usize;
                for head in 0..group.kv_heads {
                    let (key, value) = pages.column(slot, position % pages.spec.page(), head);
                    let page = &mut pages.pages[slot.group][id];
                    group.k.encode(&k.row(row)[head * group.k_dim..][..group.k_dim], &mut page[key]);
                    group.v.encode(&v.row(row)[head * group.v_dim..][..group.v_dim], &mut page[value]);
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
        q: &Tensor,
        out: &mut Tensor,
    ) -> Result<(), Error> {
        let group = &pages.spec.groups()[attention.slot.group];
        attention.check(group, step.tokens.len(), (q.rows(), q.width), (out.rows(), out.width))?;
        let share = attention.heads / group.kv_heads;
        let (mut key, mut value) = (vec![0.0; group.k_dim], vec![0.0; group.v_dim]);
        for segment in &step.segments {
            let table = &segment.tables[attention.slot.group];
            for (i, head) in (0..segment.count).flat_map(|i| (0..attention.heads).map(move |head| (i, head))) {
                let row = segment.start + i;
                let q = &q.row(row)[head * group.k_dim..][..group.k_dim];
                let mut scores = Vec::with_capacity(segment.past + i + 1);
                for position in 0..=segment.past + i {
                    group.k.decode(pages.key(attention.slot, table, position, head / share), &mut key);
                    let dot: f64 = q.iter().zip(&key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                    scores.push(dot * f64::from(attention.scale));
                }
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let mut sum = 0.0;
                let mut acc = vec![0.0; group.v_dim];
                for (position, score) in scores.iter().enumerate() {
                    let weight = (score - max).exp();
                    sum += weight;
                    group.v.decode(pages.value(attention.slot, table, position, head / share), &mut value);
                    acc.iter_mut().zip(&value).for_each(|(acc, v)| *acc += weight * f64::from(*v));
                }
                let out = &mut out.row_mut(row)[head * group.v_dim..][..group.v_dim];
                out.iter_mut().zip(&acc).for_each(|(out, acc)| *out = (acc / sum) as f32);
            }
        }
        Ok(())
    }

    fn gate(&self, activation: Activation, gate: &mut Tensor, up: &Tensor) -> Result<(), Error> {
        Error::check("gate", "values of the factor", gate.data.len(), up.data.len())?;
        for (gate, up) in gate.data.iter_mut().zip(&up.data) {
            let x = f64::from(*gate);
            let activated = match activation {
                Activation::Silu => x / (1.0 + (-x).exp()),
            };
            *gate = (activated * f64::from(*up)) as f32;
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

    fn export(&self, pages: &Pages, slot: Slot, table: &[u32], len: usize) -> Result<Columns, Error> {
        let heads = pages.spec.groups()[slot.group].kv_heads;
        let mut columns = Columns { k: Vec::new(), v: Vec::new() };
        for (position, head) in (0..len).flat_map(|position| (0..heads).map(move |head| (position, head))) {
            columns.k.extend_from_slice(pages.key(slot, table, position, head));
            columns.v.extend_from_slice(pages.value(slot, table, position, head));
        }
        Ok(columns)
    }
}
