//! Attention over paged keys and values.
//!
//! **Order.** For one query, columns are folded page by page in ascending order, with one step of the online softmax (Milakov and
//! Gimelshein 2018) a page; every [`STRIDE`] tokens the fold starts afresh, and the partial results `(max, sum, out)` are merged in
//! ascending order. Which queries share a tile, and which thread folds which stride, changes none of this, so decode, prefill and
//! verification give a query the same bits.
//!
//! A tile is up to [`TILE`] queries of one row that share a key/value head, ordered by position. Scores past a query's own position
//! are replaced before they are used, and values past it are never read.

use kvern_backend::{Attention, Slot};
use kvern_base::{Raw, bf16, f16};
use kvern_state::{Segment, StepPlan};

use crate::isa::{Isa, Kernel, LANES, Lane};
use crate::pages::{Layout, MAX_DIM, Pages};
use crate::pool::{Disjoint, Pool};
use crate::{KernelSet, Tensor};

/// Queries of a tile.
pub const TILE: usize = 8;
/// Tokens between two starts of a query's fold: whole pages, at absolute positions.
pub const STRIDE: usize = 512;
/// The largest page, in tokens, that a fold step takes.
pub const MAX_PAGE: usize = 256;

/// Queries `first .. first + count` of a segment's position-major order for one key/value head.
#[derive(Debug, Clone, Copy)]
struct Tile {
    segment: usize,
    head: usize,
    first: usize,
    count: usize,
}

/// The fold of some columns for one query.
#[derive(Clone, Copy)]
struct Partial {
    max: f32,
    sum: f32,
    out: [f32; MAX_DIM],
}

const EMPTY: Partial = Partial { max: f32::NEG_INFINITY, sum: 0.0, out: [0.0; MAX_DIM] };

/// What all tiles of a region share.
struct Shared<'a> {
    plan: &'a StepPlan,
    pages: &'a Pages,
    layout: Layout,
    slot: Slot,
    scale: f32,
    /// Query heads per key/value head.
    share: usize,
    q: &'a Tensor,
    out: Disjoint<'a, f32>,
}

impl Shared<'_> {
    fn segment(&self, tile: Tile) -> &Segment {
        &self.plan.segments[tile.segment]
    }

    /// Row and query head of the tile's query `i`, and how many columns it sees.
    fn query(&self, tile: Tile, i: usize) -> (usize, usize, usize) {
        let (segment, index) = (self.segment(tile), tile.first + i);
        let token = index / self.share;
        (segment.start + token, tile.head * self.share + index % self.share, segment.past + token + 1)
    }

    /// Strides that the tile's last query sees.
    fn strides(&self, tile: Tile) -> usize {
        self.query(tile, tile.count - 1).2.div_ceil(STRIDE)
    }

    fn write<S: Isa>(&self, isa: S, tile: Tile, partials: &[Partial; TILE]) {
        for (i, partial) in partials.iter().enumerate().take(tile.count) {
            let (row, head, _) = self.query(tile, i);
            let start = row * self.q.width() / self.layout.k_dim * self.layout.v_dim + head * self.layout.v_dim;
            // SAFETY: tiles are disjoint in (row, head).
            let out = unsafe { self.out.part(start..start + self.layout.v_dim) };
            let sum = isa.splat(partial.sum);
            for (out, x) in out.as_chunks_mut().0.iter_mut().zip(partial.out.as_chunks().0) {
                isa.store(isa.div(isa.load(x), sum), out);
            }
        }
    }
}

/// Runs attention for one layer of a step.
pub fn attend(
    set: KernelSet,
    pool: &Pool,
    plan: &StepPlan,
    pages: &Pages,
    attention: Attention,
    q: &Tensor,
    out: &mut Tensor,
) {
    let layout = pages.layout(attention.slot.group);
    let share = attention.heads / layout.heads;
    let out = Disjoint::new(out.values_mut());
    let shared = Shared { plan, pages, layout, slot: attention.slot, scale: attention.scale, share, q, out };
    let mut tiles = Vec::new();
    for (segment, s) in plan.segments.iter().enumerate() {
        let queries = s.count * share;
        for head in 0..layout.heads {
            let starts = (0..queries).step_by(TILE);
            tiles.extend(starts.map(|first| Tile { segment, head, first, count: TILE.min(queries - first) }));
        }
    }
    // Few tiles over long contexts: threads share a tile's strides instead of its queries.
    let strides: usize = tiles.iter().map(|&tile| shared.strides(tile)).sum();
    if tiles.len() < 4 * pool.threads() && strides > tiles.len() {
        let mut parts = vec![[EMPTY; TILE]; strides];
        let items: Vec<(Tile, usize)> =
            tiles.iter().flat_map(|&tile| (0..shared.strides(tile)).map(move |stride| (tile, stride))).collect();
        let disjoint = Disjoint::new(&mut parts);
        pool.run(items.len(), 1, |range| {
            for item in range {
                let (tile, stride) = items[item];
                // SAFETY: items are disjoint.
                let partials = unsafe { &mut disjoint.part(item..item + 1)[0] };
                set.run(Fold { shared: &shared, tile, strides: stride..stride + 1, partials, write: false });
            }
        });
        let mut rest = parts.as_slice();
        for &tile in &tiles {
            let (own, others) = rest.split_at(shared.strides(tile));
            set.run(Merge { shared: &shared, tile, parts: own });
            rest = others;
        }
        return;
    }
    pool.run(tiles.len(), tiles.len().div_ceil(pool.threads() * 16), |range| {
        for &tile in &tiles[range] {
            let strides = 0..shared.strides(tile);
            set.run(Fold { shared: &shared, tile, strides, partials: &mut [EMPTY; TILE], write: true });
        }
    });
}

/// Folds some strides for a tile.
struct Fold<'a> {
    shared: &'a Shared<'a>,
    tile: Tile,
    strides: std::ops::Range<usize>,
    partials: &'a mut [Partial; TILE],
    write: bool,
}

/// Merges the partial results of a tile's strides and writes the outputs.
struct Merge<'a> {
    shared: &'a Shared<'a>,
    tile: Tile,
    parts: &'a [[Partial; TILE]],
}

impl Kernel for Merge<'_> {
    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let mut merged = [EMPTY; TILE];
        for part in self.parts {
            for i in 0..self.tile.count {
                merge(isa, self.shared.layout.v_dim, &mut merged[i], &part[i]);
            }
        }
        self.shared.write(isa, self.tile, &merged);
    }
}

/// `a = a ∪ b`, where `b` covers later columns, or none.
#[inline(always)]
fn merge<S: Isa>(isa: S, dim: usize, a: &mut Partial, b: &Partial) {
    if b.sum == 0.0 {
        return;
    }
    if a.sum == 0.0 {
        a.max = b.max;
        a.sum = b.sum;
        a.out[..dim].copy_from_slice(&b.out[..dim]);
        return;
    }
    let max = a.max.max(b.max);
    let (keep, add) = (exp(isa, a.max - max), exp(isa, b.max - max));
    a.max = max;
    a.sum = a.sum * keep + b.sum * add;
    let (keep, add) = (isa.splat(keep), isa.splat(add));
    for (a, b) in a.out[..dim].as_chunks_mut().0.iter_mut().zip(b.out[..dim].as_chunks().0) {
        isa.store(isa.fma(isa.load(b), add, isa.mul(isa.load(a), keep)), a);
    }
}

#[inline(always)]
fn exp<S: Isa>(isa: S, x: f32) -> f32 {
    let mut lanes = [0.0; LANES];
    isa.store(isa.exp(isa.splat(x)), &mut lanes);
    lanes[0]
}

impl Kernel for Fold<'_> {
    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let Shared { layout, q, scale, .. } = *self.shared;
        let mut queries = [[0.0; MAX_DIM]; TILE];
        let mut seen = [0; TILE];
        for i in 0..self.tile.count {
            let (row, head, columns) = self.shared.query(self.tile, i);
            seen[i] = columns;
            let from = &q.row(row)[head * layout.k_dim..][..layout.k_dim];
            queries[i].iter_mut().zip(from).for_each(|(out, x)| *out = x * scale);
        }
        let last = seen[self.tile.count - 1];
        let table = &self.shared.segment(self.tile).tables[self.shared.slot.group];
        let mut scores = [[0.0; MAX_PAGE]; TILE];
        for stride in self.strides.clone() {
            let mut fresh = [EMPTY; TILE];
            let end = last.min((stride + 1) * STRIDE);
            for start in (stride * STRIDE..end).step_by(layout.page) {
                let bytes = self.shared.pages.page(self.shared.slot.group, table[start / layout.page]);
                let tile = PageTile { layout, bytes, layer: self.shared.slot.layer, head: self.tile.head };
                let columns = layout.page.min(end - start);
                match layout.k {
                    Raw::F32 => tile.scores::<S, f32>(isa, &queries, self.tile.count, columns, &mut scores),
                    Raw::F16 => tile.scores::<S, f16>(isa, &queries, self.tile.count, columns, &mut scores),
                    Raw::Bf16 => tile.scores::<S, bf16>(isa, &queries, self.tile.count, columns, &mut scores),
                }
                let mut visible = [0; TILE];
                for i in 0..self.tile.count {
                    visible[i] = seen[i].saturating_sub(start).min(columns);
                    if visible[i] > 0 {
                        soften(isa, &mut scores[i], visible[i], layout.v_dim, &mut fresh[i]);
                    }
                }
                match layout.v {
                    Raw::F32 => tile.values::<S, f32>(isa, &scores, &visible, self.tile.count, &mut fresh),
                    Raw::F16 => tile.values::<S, f16>(isa, &scores, &visible, self.tile.count, &mut fresh),
                    Raw::Bf16 => tile.values::<S, bf16>(isa, &scores, &visible, self.tile.count, &mut fresh),
                }
            }
            for i in 0..self.tile.count {
                merge(isa, layout.v_dim, &mut self.partials[i], &fresh[i]);
            }
        }
        if self.write {
            self.shared.write(isa, self.tile, self.partials);
        }
    }
}

/// Turns a page's scores into weights, and rescales what was folded before it.
#[inline(always)]
fn soften<S: Isa>(isa: S, scores: &mut [f32; MAX_PAGE], visible: usize, v_dim: usize, partial: &mut Partial) {
    let whole = visible.next_multiple_of(LANES);
    scores[visible..whole].fill(f32::NEG_INFINITY);
    let chunks = scores[..whole].as_chunks_mut::<LANES>().0;
    let mut max = isa.splat(partial.max);
    for chunk in chunks.iter() {
        max = isa.max(max, isa.load(chunk));
    }
    let max = isa.max_lane(max);
    let shift = isa.splat(-max);
    let mut sum = isa.splat(0.0);
    for chunk in chunks {
        let weight = isa.exp(isa.add(isa.load(chunk), shift));
        sum = isa.add(sum, weight);
        isa.store(weight, chunk);
    }
    let keep = exp(isa, partial.max - max);
    partial.sum = partial.sum * keep + isa.sum(sum);
    if partial.max != max {
        let keep = isa.splat(keep);
        for out in partial.out[..v_dim].as_chunks_mut().0 {
            isa.store(isa.mul(isa.load(out), keep), out);
        }
    }
    partial.max = max;
}

/// One head's keys and values in one page.
#[derive(Clone, Copy)]
struct PageTile<'a> {
    layout: Layout,
    bytes: &'a [u8],
    layer: usize,
    head: usize,
}

impl PageTile<'_> {
    /// `scores[i][t] = queries[i] · key t` for the panels of 16 tokens that hold the first `columns`.
    #[inline(always)]
    fn scores<S: Isa, E: Lane>(
        &self,
        isa: S,
        queries: &[[f32; MAX_DIM]; TILE],
        count: usize,
        columns: usize,
        scores: &mut [[f32; MAX_PAGE]; TILE],
    ) {
        let keys = self.layout.keys::<E>(self.bytes, self.layer, self.head).as_chunks::<LANES>().0;
        let panels = keys.chunks_exact(self.layout.k_dim).take(columns.div_ceil(LANES));
        for (panel, keys) in panels.enumerate() {
            let mut first = 0;
            macro_rules! group {
                ($n:literal) => {
                    while count - first >= $n {
                        let mut acc = [isa.splat(0.0); $n];
                        let rows: &[[f32; MAX_DIM]; $n] = queries[first..].first_chunk().unwrap_or(&[[0.0; MAX_DIM]; $n]);
                        for (d, key) in keys.iter().enumerate().take(MAX_DIM) {
                            let key = E::load(isa, key);
                            for i in 0..$n {
                                acc[i] = isa.fma(key, isa.splat(rows[i][d]), acc[i]);
                            }
                        }
                        for i in 0..$n {
                            isa.store(acc[i], &mut scores[first + i].as_chunks_mut().0[panel]);
                        }
                        first += $n;
                    }
                };
            }
            group!(8);
            group!(3);
            group!(1);
        }
    }

    /// `partials[i].out += Σ_t scores[i][t] * value t` over the first `visible[i]` tokens.
    #[inline(always)]
    fn values<S: Isa, E: Lane>(
        &self,
        isa: S,
        scores: &[[f32; MAX_PAGE]; TILE],
        visible: &[usize; TILE],
        count: usize,
        partials: &mut [Partial; TILE],
    ) {
        let dim = self.layout.v_dim;
        let values = self.layout.values::<E>(self.bytes, self.layer, self.head).as_chunks::<LANES>().0;
        let chunks = dim / LANES;
        let mut first = 0;
        macro_rules! group {
            ($n:literal) => {
                while count - first >= $n {
                    // Positions ascend within a tile, so the first query of the group sees the least.
                    let common = visible[first];
                    for chunk in 0..chunks {
                        let mut acc: [S::F; $n] =
                            std::array::from_fn(|i| isa.load(&partials[first + i].out.as_chunks().0[chunk]));
                        for t in 0..common.min(MAX_PAGE) {
                            let value = E::load(isa, &values[t * chunks + chunk]);
                            for i in 0..$n {
                                acc[i] = isa.fma(value, isa.splat(scores[first + i][t]), acc[i]);
                            }
                        }
                        for i in 0..$n {
                            for t in common..visible[first + i].min(MAX_PAGE) {
                                let value = E::load(isa, &values[t * chunks + chunk]);
                                acc[i] = isa.fma(value, isa.splat(scores[first + i][t]), acc[i]);
                            }
                            isa.store(acc[i], &mut partials[first + i].out.as_chunks_mut().0[chunk]);
                        }
                    }
                    first += $n;
                }
            };
        }
        group!(8);
        group!(3);
        group!(1);
    }
}
