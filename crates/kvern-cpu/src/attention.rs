//! Attention over paged keys and values.
//!
//! **Order.** For one query, columns are folded page by page in ascending order, with one step of the online softmax (Milakov and
//! Gimelshein 2018) a page; every [`STRIDE`] tokens the fold starts afresh, and the partial results `(max, sum, out)` are merged in
//! ascending order. Which queries share a tile, and which thread folds which stride, changes none of this, so decode, prefill and
//! verification give a query the same bits.
//!
//! A tile is up to [`TILE`] queries of one row that share a key/value head, ordered by position. Scores past a query's own position
//! are replaced before they are used, and values past it are never read.

use std::cell::RefCell;

use kvern_backend::{Attention, Slot};
use kvern_base::{Raw, bf16, f16};
use kvern_state::{Segment, StepPlan};

use crate::isa::{Isa, Kernel, LANES, Lane};
use crate::pages::{Layout, Pages};
use crate::pool::{Disjoint, Pool};
use crate::{KernelSet, Tensor};

/// Queries of a tile.
pub const TILE: usize = 8;
/// Tokens between two starts of a query's fold, at absolute positions: whole pages.
pub const STRIDE: usize = 512;

/// Queries `first .. first + count` of a segment's position-major order for one key/value head.
#[derive(Debug, Clone, Copy)]
struct Tile {
    segment: usize,
    head: usize,
    first: usize,
    count: usize,
}

/// The folds of some columns for the queries of a tile: `max` and `sum` of the softmax, and the weighted sum of values, not yet divided.
struct Partials<'a> {
    max: &'a mut [f32],
    sum: &'a mut [f32],
    /// `[TILE][v_dim]`
    out: &'a mut [f32],
}

impl<'a> Partials<'a> {
    /// Floats that a tile's partials take.
    fn len(v_dim: usize) -> usize {
        TILE * (2 + v_dim)
    }

    /// Reads partials that [`Self::clear`] or a fold has written.
    fn over(memory: &'a mut [f32]) -> Self {
        let (max, rest) = memory.split_at_mut(TILE);
        let (sum, out) = rest.split_at_mut(TILE);
        Self { max, sum, out }
    }

    /// The fold of no columns.
    fn clear(&mut self) {
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
        self.out.fill(0.0);
    }

    fn out(&mut self, query: usize, v_dim: usize) -> &mut [[f32; LANES]] {
        self.out[query * v_dim..][..v_dim].as_chunks_mut().0
    }

    /// Adds a fold of later columns.
    #[inline(always)]
    fn merge<S: Isa>(&mut self, isa: S, v_dim: usize, count: usize, later: &mut Partials<'_>) {
        for query in 0..count {
            if later.sum[query] == 0.0 {
                continue;
            }
            let max = self.max[query].max(later.max[query]);
            // The first fold is taken as it is: exp(-inf) = 0 of nothing, and exp(0) = 1 of all.
            let (keep, add) = (exp(isa, self.max[query] - max), exp(isa, later.max[query] - max));
            self.max[query] = max;
            self.sum[query] = self.sum[query] * keep + later.sum[query] * add;
            let (keep, add) = (isa.splat(keep), isa.splat(add));
            for (own, later) in self.out(query, v_dim).iter_mut().zip(later.out(query, v_dim)) {
                isa.store(isa.fma(isa.load(later), add, isa.mul(isa.load(own), keep)), own);
            }
        }
    }
}

thread_local! {
    /// Memory of a tile in work: queries, scores, two sets of partials. Grows to what a model needs and stays.
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

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

    #[inline(always)]
    fn write<S: Isa>(&self, isa: S, tile: Tile, partials: &mut Partials<'_>) {
        let v_dim = self.layout.v_dim;
        for i in 0..tile.count {
            let (row, head, _) = self.query(tile, i);
            let start = (row * self.layout.heads * self.share + head) * v_dim;
            // SAFETY: tiles are disjoint in (row, head).
            let out = unsafe { self.out.part(start..start + v_dim) };
            let sum = isa.splat(partials.sum[i]);
            for (out, x) in out.as_chunks_mut().0.iter_mut().zip(partials.out(i, v_dim)) {
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
        let len = Partials::len(layout.v_dim);
        let mut parts = vec![0.0; strides * len];
        let items: Vec<(Tile, usize)> =
            tiles.iter().flat_map(|&tile| (0..shared.strides(tile)).map(move |stride| (tile, stride))).collect();
        let disjoint = Disjoint::new(&mut parts);
        pool.run(items.len(), 1, |range| {
            for item in range {
                let (tile, stride) = items[item];
                // SAFETY: items are disjoint.
                let partials = unsafe { disjoint.part(item * len..(item + 1) * len) };
                set.run(Fold { shared: &shared, tile, strides: stride..stride + 1, partials: Some(partials) });
            }
        });
        let mut rest = parts.as_mut_slice();
        for &tile in &tiles {
            let (own, others) = rest.split_at_mut(shared.strides(tile) * len);
            set.run(Merge { shared: &shared, tile, parts: own });
            rest = others;
        }
        return;
    }
    pool.run(tiles.len(), tiles.len().div_ceil(pool.threads() * 16), |range| {
        for &tile in &tiles[range] {
            let strides = 0..shared.strides(tile);
            set.run(Fold { shared: &shared, tile, strides, partials: None });
        }
    });
}

/// Folds some strides of a tile, into `partials` or, if these are all strides, into the output.
struct Fold<'a> {
    shared: &'a Shared<'a>,
    tile: Tile,
    strides: std::ops::Range<usize>,
    partials: Option<&'a mut [f32]>,
}

/// Merges the folds of a tile's strides and writes the outputs.
struct Merge<'a> {
    shared: &'a Shared<'a>,
    tile: Tile,
    parts: &'a mut [f32],
}

impl Kernel for Merge<'_> {
    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let v_dim = self.shared.layout.v_dim;
        let mut memory = vec![0.0; Partials::len(v_dim)];
        let mut merged = Partials::over(&mut memory);
        merged.clear();
        for part in self.parts.chunks_exact_mut(Partials::len(v_dim)) {
            merged.merge(isa, v_dim, self.tile.count, &mut Partials::over(part));
        }
        self.shared.write(isa, self.tile, &mut merged);
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
        let layout = self.shared.layout;
        let (queries, scores, partials) = (TILE * layout.k_dim, TILE * layout.page, Partials::len(layout.v_dim));
        let mut scratch = SCRATCH.take();
        scratch.resize(scratch.len().max(queries + scores + 2 * partials), 0.0);
        let (queries, rest) = scratch.split_at_mut(queries);
        let (scores, rest) = rest.split_at_mut(scores);
        let (fresh, rest) = rest.split_at_mut(partials);
        let mut fresh = Partials::over(fresh);
        let (last, write) = (self.tile.count - 1, self.partials.is_none());
        let mut all = Partials::over(self.partials.unwrap_or(&mut rest[..partials]));
        all.clear();
        let mut seen = [0; TILE];
        for (i, out) in queries.chunks_exact_mut(layout.k_dim).enumerate().take(self.tile.count) {
            let (row, head, columns) = self.shared.query(self.tile, i);
            seen[i] = columns;
            let from = &self.shared.q.row(row)[head * layout.k_dim..][..layout.k_dim];
            out.iter_mut().zip(from).for_each(|(out, x)| *out = x * self.shared.scale);
        }
        let table = &self.shared.segment(self.tile).tables[self.shared.slot.group];
        for stride in self.strides {
            fresh.clear();
            let end = seen[last].min((stride + 1) * STRIDE);
            for start in (stride * STRIDE..end).step_by(layout.page) {
                let bytes = self.shared.pages.page(self.shared.slot.group, table[start / layout.page]);
                let page = PageTile { layout, bytes, layer: self.shared.slot.layer, head: self.tile.head };
                let columns = layout.page.min(end - start);
                match layout.k {
                    Raw::F32 => page.scores::<S, f32>(isa, queries, self.tile.count, columns, scores),
                    Raw::F16 => page.scores::<S, f16>(isa, queries, self.tile.count, columns, scores),
                    Raw::Bf16 => page.scores::<S, bf16>(isa, queries, self.tile.count, columns, scores),
                }
                let mut visible = [0; TILE];
                for i in 0..self.tile.count {
                    visible[i] = seen[i].saturating_sub(start).min(columns);
                    if visible[i] > 0 {
                        soften(
                            isa,
                            &mut scores[i * layout.page..][..layout.page],
                            visible[i],
                            i,
                            layout.v_dim,
                            &mut fresh,
                        );
                    }
                }
                match layout.v {
                    Raw::F32 => page.values::<S, f32>(isa, scores, &visible, self.tile.count, &mut fresh),
                    Raw::F16 => page.values::<S, f16>(isa, scores, &visible, self.tile.count, &mut fresh),
                    Raw::Bf16 => page.values::<S, bf16>(isa, scores, &visible, self.tile.count, &mut fresh),
                }
            }
            all.merge(isa, layout.v_dim, self.tile.count, &mut fresh);
        }
        if write {
            self.shared.write(isa, self.tile, &mut all);
        }
        SCRATCH.set(scratch);
    }
}

/// Turns a page's scores into weights, and rescales what was folded before it.
#[inline(always)]
fn soften<S: Isa>(isa: S, scores: &mut [f32], visible: usize, query: usize, v_dim: usize, partials: &mut Partials<'_>) {
    let whole = visible.next_multiple_of(LANES);
    scores[visible..whole].fill(f32::NEG_INFINITY);
    let chunks = scores[..whole].as_chunks_mut::<LANES>().0;
    let before = partials.max[query];
    let mut max = isa.splat(before);
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
    let keep = exp(isa, before - max);
    partials.sum[query] = partials.sum[query] * keep + isa.sum(sum);
    if before != max {
        let keep = isa.splat(keep);
        for out in partials.out(query, v_dim) {
            isa.store(isa.mul(isa.load(out), keep), out);
        }
    }
    partials.max[query] = max;
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
    fn scores<S: Isa, E: Lane>(&self, isa: S, queries: &[f32], count: usize, columns: usize, scores: &mut [f32]) {
        let (dim, page) = (self.layout.k_dim, self.layout.page);
        let keys = self.layout.keys::<E>(self.bytes, self.layer, self.head).as_chunks::<LANES>().0;
        for (panel, keys) in keys.chunks_exact(dim).take(columns.div_ceil(LANES)).enumerate() {
            let mut first = 0;
            macro_rules! group {
                ($n:literal) => {
                    while count - first >= $n {
                        let mut rows: [&[f32]; $n] = [&[]; $n];
                        for i in 0..$n {
                            rows[i] = &queries[(first + i) * dim..][..keys.len()];
                        }
                        let mut acc = [isa.splat(0.0); $n];
                        for (d, key) in keys.iter().enumerate() {
                            let key = E::load(isa, key);
                            for i in 0..$n {
                                acc[i] = isa.fma(key, isa.splat(rows[i][d]), acc[i]);
                            }
                        }
                        for i in 0..$n {
                            isa.store(acc[i], &mut scores[(first + i) * page..][..page].as_chunks_mut().0[panel]);
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
        scores: &[f32],
        visible: &[usize; TILE],
        count: usize,
        partials: &mut Partials<'_>,
    ) {
        let (dim, page) = (self.layout.v_dim, self.layout.page);
        let values = self.layout.values::<E>(self.bytes, self.layer, self.head).as_chunks::<LANES>().0;
        let chunks = dim / LANES;
        let mut first = 0;
        macro_rules! group {
            ($n:literal) => {
                while count - first >= $n {
                    // Positions ascend within a tile, so the first query of the group sees the least.
                    let common = visible[first];
                    let mut rows: [&[f32]; $n] = [&[]; $n];
                    for i in 0..$n {
                        rows[i] = &scores[(first + i) * page..][..page];
                    }
                    for chunk in 0..chunks {
                        let mut acc = [isa.splat(0.0); $n];
                        for i in 0..$n {
                            acc[i] = isa.load(&partials.out(first + i, dim)[chunk]);
                        }
                        for (t, value) in values.iter().skip(chunk).step_by(chunks).enumerate().take(common) {
                            let value = E::load(isa, value);
                            for i in 0..$n {
                                acc[i] = isa.fma(value, isa.splat(rows[i][t]), acc[i]);
                            }
                        }
                        for i in 0..$n {
                            for t in common..visible[first + i] {
                                let value = E::load(isa, &values[t * chunks + chunk]);
                                acc[i] = isa.fma(value, isa.splat(rows[i][t]), acc[i]);
                            }
                            isa.store(acc[i], &mut partials.out(first + i, dim)[chunk]);
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
