//! Recurrent layers: the gated delta rule and the short convolution before it.
//!
//! **Order.** Tokens run one after another in every chunk, and each value of the state sees the same operations in the same order, so prefill, decode
//! and verification give the same bits. Work is cut by channels: 16 of them, with all that the state holds for them, stay in the first cache.

use kvern_backend::{DeltaInputs, DeltaRule};
use kvern_state::{States, StepPlan};

use crate::isa::{Isa, Kernel, LANES};
use crate::pages::{Layout, Pages};
use crate::pool::{Disjoint, Pool};
use crate::{KernelSet, Tensor};

/// The states of a segment's plane as `f32`: to read, and to write by number.
struct Slots<'a> {
    layout: &'a Layout,
    parts: &'a [Option<Disjoint<'a, u8>>],
    states: &'a States,
    layer: usize,
    plane: usize,
}

impl<'a> Slots<'a> {
    /// One slot's values.
    ///
    /// # Safety
    /// No two threads may write the same values, or read what another writes.
    unsafe fn values(&self, id: u32, range: std::ops::Range<usize>) -> &'a mut [f32] {
        let Some(Some(part)) = self.parts.get(id as usize) else { return &mut [] };
        let start = self.layout.layer(self.layer).start + self.layout.offset(self.plane);
        // SAFETY: as the caller says.
        bytemuck::cast_slice_mut(unsafe { part.part(start + 4 * range.start..start + 4 * range.end) })
    }
}

/// Runs a causal convolution per channel over the rows of a step. `taps` is `kernel.len() / width`.
pub fn convolve(
    pool: &Pool,
    plan: &StepPlan,
    pages: &mut Pages,
    (group, layer, plane): (usize, usize, usize),
    kernel: &[f32],
    x: &Tensor,
    out: &mut Tensor,
) {
    let width = x.width();
    let taps = kernel.len() / width;
    let class = pages.spec().class(group, false);
    let layout = pages.layout(class).clone();
    let parts = pages.parts(class);
    let out = Disjoint::new(out.values_mut());
    let blocks = width.div_ceil(256);
    for segment in &plan.segments {
        let Some(states) = segment.states(group).filter(|_| segment.count > 0) else { continue };
        let slots = Slots { layout: &layout, parts: &parts, states, layer, plane };
        pool.run(blocks, if segment.count * width < 1 << 14 { blocks } else { 1 }, |range| {
            for channels in range.map(|block| block * 256..width.min((block + 1) * 256)) {
                // Input `i` of the segment, counted from its first token; before that from the state.
                let input = |i: isize| -> Option<&[f32]> {
                    if i >= 0 {
                        return Some(&x.row(segment.start + i as usize)[channels.clone()]);
                    }
                    let row = (taps as isize - 1 + i) as usize * width;
                    // SAFETY: nobody writes the state that a step reads.
                    states.from.map(|id| &*unsafe { slots.values(id, row + channels.start..row + channels.end) })
                };
                for token in 0..segment.count {
                    let start = (segment.start + token) * width;
                    // SAFETY: blocks are disjoint in channels.
                    let out = unsafe { out.part(start + channels.start..start + channels.end) };
                    out.fill(0.0);
                    for tap in 0..taps {
                        let kernel = &kernel[tap * width..][channels.clone()];
                        if let Some(x) = input((token + tap) as isize + 1 - taps as isize) {
                            out.iter_mut().zip(x).zip(kernel).for_each(|((out, x), w)| *out += w * x);
                        }
                    }
                }
                for &(after, id) in &states.to {
                    for row in 0..taps - 1 {
                        // SAFETY: blocks are disjoint in channels.
                        let to = unsafe { slots.values(id, row * width + channels.start..row * width + channels.end) };
                        match input((after + row) as isize + 1 - taps as isize) {
                            Some(x) => to.copy_from_slice(x),
                            None => to.fill(0.0),
                        }
                    }
                }
            }
        });
    }
}

/// Runs the gated delta rule over the rows of a step.
pub fn delta_rule(
    set: KernelSet,
    pool: &Pool,
    plan: &StepPlan,
    pages: &mut Pages,
    rule: DeltaRule,
    inputs: &DeltaInputs<'_, Tensor>,
    out: &mut Tensor,
) {
    let class = pages.spec().class(rule.slot.group, false);
    let layout = pages.layout(class).clone();
    let parts = pages.parts(class);
    let out = Disjoint::new(out.values_mut());
    let blocks = rule.value_dim / LANES;
    for segment in &plan.segments {
        let Some(states) = segment.states(rule.slot.group).filter(|_| segment.count > 0) else { continue };
        let slots = Slots { layout: &layout, parts: &parts, states, layer: rule.slot.layer, plane: rule.plane };
        let items = rule.heads * blocks;
        pool.run(items, items.div_ceil(pool.threads() * 4), |range| {
            for item in range {
                let (head, block) = (item / blocks, item % blocks);
                let (first, count) = (segment.start, segment.count);
                set.run(Delta { rule, inputs, slots: &slots, out: &out, head, block, first, count });
            }
        });
    }
}

/// Sixteen values of one head over a segment's tokens.
struct Delta<'a> {
    rule: DeltaRule,
    inputs: &'a DeltaInputs<'a, Tensor>,
    slots: &'a Slots<'a>,
    out: &'a Disjoint<'a, f32>,
    head: usize,
    block: usize,
    first: usize,
    count: usize,
}

impl<'a> Delta<'a> {
    /// The block's part of row `j` of the state in a slot.
    ///
    /// # Safety
    /// As [`Slots::values`].
    #[inline(always)]
    unsafe fn row(&self, id: u32, j: usize) -> &'a mut [f32; LANES] {
        let DeltaRule { key_dim, value_dim, .. } = self.rule;
        let start = (self.head * key_dim + j) * value_dim + self.block * LANES;
        // SAFETY: as the caller says.
        let values = unsafe { self.slots.values(id, start..start + LANES) };
        &mut values.as_chunks_mut().0[0]
    }
}

impl Kernel for Delta<'_> {
    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let DeltaRule { heads, key_heads, key_dim, value_dim, .. } = self.rule;
        let DeltaInputs { q, k, v, decay, beta } = self.inputs;
        let key = self.head / (heads / key_heads) * key_dim;
        let mut state = vec![[0.0; LANES]; key_dim];
        if let Some(id) = self.slots.states.from {
            for (j, row) in state.iter_mut().enumerate() {
                // SAFETY: nobody writes the state that a step reads.
                *row = *unsafe { self.row(id, j) };
            }
        }
        let mut to = self.slots.states.to.iter().peekable();
        for token in 0..self.count {
            let row = self.first + token;
            let (q, k) = (&q.row(row)[key..][..key_dim], &k.row(row)[key..][..key_dim]);
            let at = self.head * value_dim + self.block * LANES;
            let value = isa.load(&v.row(row)[at..].as_chunks().0[0]);
            let (decay, beta) = (isa.splat(decay.row(row)[self.head]), isa.splat(beta.row(row)[self.head]));
            let mut held = isa.splat(0.0);
            for (s, &k) in state.iter_mut().zip(k) {
                let decayed = isa.mul(isa.load(s), decay);
                held = isa.fma(decayed, isa.splat(k), held);
                isa.store(decayed, s);
            }
            let write = isa.mul(isa.fma(held, isa.splat(-1.0), value), beta);
            let mut read = isa.splat(0.0);
            for ((s, &k), &q) in state.iter_mut().zip(k).zip(q) {
                let updated = isa.fma(write, isa.splat(k), isa.load(s));
                read = isa.fma(updated, isa.splat(q), read);
                isa.store(updated, s);
            }
            // SAFETY: items are disjoint in (head, block).
            let out = unsafe { self.out.part(row * heads * value_dim + at..row * heads * value_dim + at + LANES) };
            isa.store(read, &mut out.as_chunks_mut().0[0]);
            if let Some((_, id)) = to.next_if(|(after, _)| *after == token + 1) {
                for (j, from) in state.iter().enumerate() {
                    // SAFETY: items are disjoint in (head, block).
                    *unsafe { self.row(*id, j) } = *from;
                }
            }
        }
    }
}
