//! Attention over paged keys and values.
//!
//! **Order.** For one query, columns are folded page by page in ascending order, with one step of the online softmax (Milakov and
//! Gimelshein 2018) a page; every [`STRIDE`] tokens the fold starts afresh, and the partial results `(max, sum, out)` are merged in
//! ascending order. Which queries share a tile, and which thread folds which stride, changes none of this, so decode, prefill and
//! verification give a query the same bits.
//!
//! A tile is up to [`TILE`] queries of one row that share a key/value head, ordered by position. Scores of columns that a query does not see
//! are replaced before they are used; pages that none of the tile's queries sees are not touched. A sink's score joins at the end, as a
//! partial result of its own.

use std::cell::RefCell;

use kvern_backend::Attention;
use kvern_base::{Raw, bf16, f16};
use kvern_state::{Columns, GroupSpec, Kind, Segment, StepPlan, Visible, rotation};

use crate::coded::{Integers, Scores, Values};
use crate::isa::{Isa, Kernel, LANES, Lane};
use crate::pages::{Layout, Pages, Plane, with_raw};
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
    /// The same for encoded state: queries, and the weights of a page.
    static INTEGERS: RefCell<[Integers; 2]> = RefCell::default();
}

/// What all tiles of a region share.
struct Shared<'a> {
    plan: &'a StepPlan,
    pages: &'a Pages,
    group: &'a GroupSpec,
    attention: Attention,
    sinks: Option<&'a [f32]>,
    /// Query heads per key/value head.
    share: usize,
    v_dim: usize,
    q: &'a Tensor,
    out: Disjoint<'a, f32>,
}

impl<'a> Shared<'a> {
    fn segment(&self, tile: Tile) -> (&'a Segment, &'a Columns) {
        let segment = &self.plan.segments[tile.segment];
        // The backend has checked that every segment has them.
        let columns = segment.columns(self.attention.slot.group);
        (segment, columns.unwrap_or_else(|| unreachable!("a segment without columns")))
    }

    /// Row and query head of the tile's query `i`, and the columns it sees.
    fn query(&self, tile: Tile, i: usize) -> (usize, usize, Visible) {
        let ((segment, columns), index) = (self.segment(tile), tile.first + i);
        let token = index / self.share;
        let row = segment.start + token;
        let visible = segment.visible(columns, self.group.window, token, self.plan.positions[row] as usize);
        (row, tile.head * self.share + index % self.share, visible)
    }

    /// Strides of which the tile sees something, ascending: of the sinks, and of the windows of its first to its last query.
    fn strides(&self, tile: Tile) -> impl Iterator<Item = usize> + use<> {
        let (first, last) = (self.query(tile, 0).2, self.query(tile, tile.count - 1).2);
        let sinks = last.sinks.div_ceil(STRIDE);
        (0..sinks).chain((first.start / STRIDE).max(sinks)..last.end.div_ceil(STRIDE))
    }

    #[inline(always)]
    fn write<S: Isa>(&self, isa: S, tile: Tile, partials: &mut Partials<'_>) {
        let v_dim = self.v_dim;
        let layout = self.pages.layout(self.segment(tile).1.table.class);
        let rotated = layout.planes.get(1).and_then(Plane::coded).is_some_and(|values| values.coding.is_rotated());
        if let Some(sinks) = self.sinks {
            let mut memory = vec![0.0; Partials::len(v_dim)];
            let mut sink = Partials::over(&mut memory);
            for i in 0..tile.count {
                (sink.max[i], sink.sum[i]) = (sinks[self.query(tile, i).1], 1.0);
            }
            partials.merge(isa, v_dim, tile.count, &mut sink);
        }
        for i in 0..tile.count {
            let (row, head, _) = self.query(tile, i);
            let start = (row * self.attention.heads + head) * v_dim;
            // SAFETY: tiles are disjoint in (row, head).
            let out = unsafe { self.out.part(start..start + v_dim) };
            // A query that sees nothing has summed up nothing.
            let sum = isa.splat(if partials.sum[i] == 0.0 { 1.0 } else { partials.sum[i] });
            for (out, x) in out.as_chunks_mut().0.iter_mut().zip(partials.out(i, v_dim)) {
                isa.store(isa.div(isa.load(x), sum), out);
            }
            if rotated {
                rotation::rotate_back(out);
            }
        }
    }
}

/// Runs attention for one layer of a step whose segments all have columns of the group.
#[expect(clippy::too_many_arguments, reason = "the verb's operands and where it runs")]
pub fn attend(
    set: KernelSet,
    pool: &Pool,
    plan: &StepPlan,
    pages: &Pages,
    attention: Attention,
    sinks: Option<&[f32]>,
    q: &Tensor,
    out: &mut Tensor,
) {
    let group = &pages.spec().groups()[attention.slot.group];
    let (share, v_dim) = (attention.heads / group.heads(), group.value_dim());
    let out = Disjoint::new(out.values_mut());
    let shared = Shared { plan, pages, group, attention, sinks, share, v_dim, q, out };
    let mut tiles = Vec::new();
    for (segment, s) in plan.segments.iter().enumerate() {
        let queries = s.count * share;
        for head in 0..group.heads() {
            let starts = (0..queries).step_by(TILE);
            tiles.extend(starts.map(|first| Tile { segment, head, first, count: TILE.min(queries - first) }));
        }
    }
    // Few tiles over long contexts: threads share a tile's strides instead of its queries.
    let strides: usize = tiles.iter().map(|&tile| shared.strides(tile).count()).sum();
    if tiles.len() < 4 * pool.threads() && strides > tiles.len() {
        let len = Partials::len(v_dim);
        let mut parts = vec![0.0; strides * len];
        let items: Vec<(Tile, usize)> =
            tiles.iter().flat_map(|&tile| shared.strides(tile).map(move |stride| (tile, stride))).collect();
        let disjoint = Disjoint::new(&mut parts);
        pool.run(items.len(), 1, |range| {
            for item in range {
                let (tile, stride) = items[item];
                // SAFETY: items are disjoint.
                let partials = unsafe { disjoint.part(item * len..(item + 1) * len) };
                let strides = std::iter::once(stride);
                set.run(Fold { shared: &shared, tile, strides, partials: Some(partials) });
            }
        });
        let mut rest = parts.as_mut_slice();
        for &tile in &tiles {
            let (own, others) = rest.split_at_mut(shared.strides(tile).count() * len);
            set.run(Merge { shared: &shared, tile, parts: own });
            rest = others;
        }
        return;
    }
    pool.run(tiles.len(), tiles.len().div_ceil(pool.threads() * 16), |range| {
        for &tile in &tiles[range] {
            let strides = shared.strides(tile);
            set.run(Fold { shared: &shared, tile, strides, partials: None });
        }
    });
}

/// Folds some strides of a tile, into `partials` or, if these are all strides, into the output.
struct Fold<'a, I> {
    shared: &'a Shared<'a>,
    tile: Tile,
    strides: I,
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
        let v_dim = self.shared.v_dim;
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

/// The part of a page that a query sees, in columns of the page: `0..sinks` and `start..end`.
#[derive(Clone, Copy, Default)]
struct Part {
    sinks: usize,
    start: usize,
    end: usize,
}

impl Part {
    fn new(visible: Visible, base: usize, columns: usize) -> Self {
        let within = |at: usize| at.saturating_sub(base).min(columns);
        let (sinks, start, end) = (within(visible.sinks), within(visible.start), within(visible.end));
        // An empty window ends with the sinks.
        if start < end { Self { sinks, start, end } } else { Self { sinks, start: sinks, end: sinks } }
    }
}

impl<I: Iterator<Item = usize>> Kernel for Fold<'_, I> {
    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let Shared { group, attention, v_dim, .. } = *self.shared;
        let (k_dim, columns) = (group.key_dim(), self.shared.segment(self.tile).1);
        let layout = self.shared.pages.layout(columns.table.class);
        let page = layout.columns;
        let (queries, scores, partials) = (TILE * k_dim, TILE * page, Partials::len(v_dim));
        let mut scratch = SCRATCH.take();
        let mut integers = INTEGERS.take();
        let [query_integers, weight_integers] = &mut integers;
        scratch.resize(scratch.len().max(queries + scores + 2 * partials), 0.0);
        let (queries, rest) = scratch.split_at_mut(queries);
        let (scores, rest) = rest.split_at_mut(scores);
        let (fresh, rest) = rest.split_at_mut(partials);
        let mut fresh = Partials::over(fresh);
        let (count, write) = (self.tile.count, self.partials.is_none());
        let mut all = Partials::over(self.partials.unwrap_or(&mut rest[..partials]));
        all.clear();
        let mut seen = [Visible::default(); TILE];
        for (i, out) in queries.chunks_exact_mut(k_dim).enumerate().take(count) {
            let (row, head, visible) = self.shared.query(self.tile, i);
            seen[i] = visible;
            let from = &self.shared.q.row(row)[head * k_dim..][..k_dim];
            out.iter_mut().zip(from).for_each(|(out, x)| *out = x * attention.scale);
        }
        let coded = [0, 1].map(|plane| layout.planes[plane].coded());
        if let Some(keys) = coded[0] {
            if keys.coding.is_rotated() {
                queries.chunks_exact_mut(k_dim).take(count).for_each(rotation::rotate);
            }
            query_integers.set_queries(isa, keys, queries, count);
        }
        let (first, last) = (seen[0].start, seen[count - 1]);
        for stride in self.strides {
            fresh.clear();
            let end = last.end.min((stride + 1) * STRIDE);
            for base in (stride * STRIDE..end).step_by(page) {
                // Not seen by any query, and perhaps not held.
                let unseen = |base: usize| base >= last.sinks && base + page <= first;
                if unseen(base) {
                    continue;
                }
                let columns_here = page.min(end - base);
                let mut parts = [Part::default(); TILE];
                let mut ends = [0; TILE];
                for i in 0..count {
                    parts[i] = Part::new(seen[i], base, columns_here);
                    ends[i] = parts[i].end;
                }
                let bytes_of = |base: usize| {
                    let id = columns.table.id(base / page);
                    self.shared.pages.page(columns.table.class, id, attention.slot.layer)
                };
                let bytes = bytes_of(base);
                // Pages lie apart, so that the processor does not see the next one coming.
                if base + page < end && !unseen(base + page) {
                    let next = bytes_of(base + page);
                    layout.planes.iter().for_each(|plane| isa.prefetch(plane.head_bytes(next, self.tile.head)));
                }
                let tile = PageTile { layout, bytes, head: self.tile.head };
                let keys = layout.planes[0];
                let values = if group.kind == Kind::Latent {
                    tile.latent_scores(isa, queries, count, columns_here, scores);
                    layout.planes[0]
                } else if let Some(coded) = coded[0] {
                    let (keys, queries) = ((coded, keys.head_bytes(bytes, tile.head)), (&*query_integers, count));
                    Scores { keys, queries, columns: columns_here, scores: &mut *scores }.compute(isa);
                    layout.planes[1]
                } else {
                    let raw = keys.codec.raw();
                    with_raw!(raw, E => tile.scores::<S, E>(isa, keys, queries, count, columns_here, scores));
                    layout.planes[1]
                };
                for i in 0..count {
                    if ends[i] > 0 {
                        let scores = &mut scores[i * page..][..page];
                        soften(isa, scores, parts[i], attention.softcap, i, v_dim, &mut fresh);
                    }
                }
                if let Some(coded) = coded[1] {
                    let values = (coded, values.head_bytes(bytes, tile.head));
                    let (ends, integers, out) = (&ends[..count], &mut *weight_integers, &mut *fresh.out);
                    Values { values, weights: scores, ends, integers, out }.compute(isa);
                } else {
                    let raw = values.codec.raw();
                    with_raw!(raw, E => tile.values::<S, E>(isa, values, scores, &ends, count, &mut fresh));
                }
            }
            all.merge(isa, v_dim, count, &mut fresh);
        }
        if write {
            self.shared.write(isa, self.tile, &mut all);
        }
        SCRATCH.set(scratch);
        INTEGERS.set(integers);
    }
}

/// Turns a page's scores into weights, and rescales what was folded before it.
#[inline(always)]
fn soften<S: Isa>(
    isa: S,
    scores: &mut [f32],
    part: Part,
    softcap: Option<f32>,
    query: usize,
    v_dim: usize,
    partials: &mut Partials<'_>,
) {
    let whole = part.end.next_multiple_of(LANES);
    let chunks = scores[..whole].as_chunks_mut::<LANES>().0;
    if let Some(cap) = softcap {
        let (cap, inverse) = (isa.splat(cap), isa.splat(1.0 / cap));
        for chunk in chunks.iter_mut() {
            isa.store(isa.mul(isa.tanh(isa.mul(isa.load(chunk), inverse)), cap), chunk);
        }
    }
    scores[part.sinks..part.start].fill(f32::NEG_INFINITY);
    scores[part.end..whole].fill(f32::NEG_INFINITY);
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
    layout: &'a Layout,
    /// The layer's.
    bytes: &'a [u8],
    head: usize,
}

impl PageTile<'_> {
    /// `scores[i][t] = queries[i] · key t` for the panels of 16 tokens that hold the first `columns`.
    #[inline(always)]
    fn scores<S: Isa, E: Lane>(
        &self,
        isa: S,
        plane: Plane,
        queries: &[f32],
        count: usize,
        columns: usize,
        scores: &mut [f32],
    ) {
        let (dim, page) = (plane.dim, self.layout.columns);
        let keys = plane.head::<E>(self.bytes, self.head).as_chunks::<LANES>().0;
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

    /// As [`Self::scores`], of keys `[latent | rope]` with their values in lanes.
    #[inline(always)]
    fn latent_scores<S: Isa>(&self, isa: S, queries: &[f32], count: usize, columns: usize, scores: &mut [f32]) {
        let (latent, rope) = (self.layout.planes[0], self.layout.planes[1]);
        let dim = latent.dim + rope.dim;
        with_raw!(latent.codec.raw(), E => {
            let latents = latent.head::<E>(self.bytes, 0).as_chunks::<LANES>().0;
            let ropes = rope.head::<E>(self.bytes, 0).as_chunks::<LANES>().0;
            let (split, rest) = (latent.dim / LANES, rope.dim / LANES);
            for column in 0..columns {
                let (latent, rope) = (&latents[column * split..][..split], &ropes[column * rest..][..rest]);
                for i in 0..count {
                    let q = queries[i * dim..][..dim].as_chunks::<LANES>().0;
                    let mut acc = isa.splat(0.0);
                    for (key, q) in latent.iter().chain(rope).zip(q) {
                        acc = isa.fma(<E as Lane>::load(isa, key), isa.load(q), acc);
                    }
                    scores[i * self.layout.columns + column] = isa.sum(acc);
                }
            }
        });
    }

    /// `partials[i].out += Σ_t scores[i][t] * value t` over the first `ends[i]` tokens.
    #[inline(always)]
    fn values<S: Isa, E: Lane>(
        &self,
        isa: S,
        plane: Plane,
        scores: &[f32],
        ends: &[usize; TILE],
        count: usize,
        partials: &mut Partials<'_>,
    ) {
        let (dim, page) = (plane.dim, self.layout.columns);
        let values = plane.head::<E>(self.bytes, self.head).as_chunks::<LANES>().0;
        let chunks = dim / LANES;
        let mut first = 0;
        macro_rules! group {
            ($n:literal) => {
                while count - first >= $n {
                    let mut common = page;
                    for i in 0..$n {
                        common = common.min(ends[first + i]);
                    }
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
                            for t in common..ends[first + i] {
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
