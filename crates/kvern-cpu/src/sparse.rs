//! Sparse attention in latent groups: choosing columns by index keys, and attending the chosen ones.
//!
//! **Order.** A score is a sum over dimensions for each index head, and then over heads; a query's attention takes its columns in ascending order,
//! with one softmax over all of them. Both follow from the query and its row's columns alone. Threads split queries, strides of columns and heads.

use std::cell::RefCell;

use kvern_backend::{Attention, INDEX, Indexer};
use kvern_base::{Raw, bf16, f16};
use kvern_state::{Columns, Segment, StepPlan, Visible};

use crate::attention::{STRIDE, TILE};
use crate::isa::{Isa, Kernel, LANES, Lane};
use crate::pages::{Pages, with_raw};
use crate::pool::{Disjoint, Pool};
use crate::{KernelSet, Tensor};

/// Scores that are kept at a time, unless one query has more.
const SCORES: usize = 1 << 22;

/// A query of a step: its row among the tokens, and what it sees of which columns.
struct Query<'a> {
    row: usize,
    visible: Visible,
    columns: &'a Columns,
}

impl Query<'_> {
    fn seen(&self) -> usize {
        self.visible.sinks + self.visible.end - self.visible.start
    }

    /// The column that is seen as number `index`.
    fn column(&self, index: usize) -> usize {
        if index < self.visible.sinks { index } else { index - self.visible.sinks + self.visible.start }
    }
}

/// The queries of a step whose segments all have columns of the group.
fn queries<'a>(plan: &'a StepPlan, pages: &'a Pages, group: usize) -> Vec<Query<'a>> {
    let window = pages.spec().groups()[group].window;
    let of = |segment: &'a Segment| {
        let columns = segment.columns(group);
        (0..segment.count).filter_map(move |i| {
            let (row, columns) = (segment.start + i, columns?);
            let visible = segment.visible(columns, window, i, plan.positions[row] as usize);
            Some(Query { row, visible, columns })
        })
    };
    plan.segments.iter().flat_map(of).collect()
}

/// Picks columns by their scores.
pub fn select(
    set: KernelSet,
    pool: &Pool,
    (plan, pages): (&StepPlan, &Pages),
    indexer: Indexer,
    (q, weights): (&Tensor, &Tensor),
    picks: &mut Tensor,
) {
    let (all, count) = (queries(plan, pages, indexer.slot.group), picks.width());
    let picks = Disjoint::new(picks.values_mut());
    let mut rest = all.as_slice();
    while !rest.is_empty() {
        // As many queries as have room for their scores; those that see no more than they pick need none.
        let scored = |query: &Query<'_>| if query.seen() > count { query.seen() } else { 0 };
        let mut starts = vec![0];
        for query in rest {
            let end = starts[starts.len() - 1] + scored(query);
            if starts.len() > 1 && end > SCORES {
                break;
            }
            starts.push(end);
        }
        let (now, later) = rest.split_at(starts.len() - 1);
        rest = later;
        let mut scores = vec![0.0; starts[now.len()]];
        let items: Vec<(usize, usize)> = now
            .iter()
            .enumerate()
            .flat_map(|(i, query)| (0..scored(query)).step_by(STRIDE).map(move |first| (i, first)))
            .collect();
        let parts = Disjoint::new(&mut scores);
        pool.run(items.len(), 1, |range| {
            for &(i, first) in &items[range] {
                let query = &now[i];
                let last = query.seen().min(first + STRIDE);
                // SAFETY: items are disjoint.
                let scores = unsafe { parts.part(starts[i] + first..starts[i] + last) };
                set.run(Score { pages, indexer, query, q, weights, first, scores });
            }
        });
        pool.run(now.len(), now.len().div_ceil(pool.threads() * 4), |range| {
            for i in range {
                let query = &now[i];
                // SAFETY: rows are disjoint.
                let picks = unsafe { picks.part(query.row * count..(query.row + 1) * count) };
                pick(query, &scores[starts[i]..starts[i + 1]], picks);
            }
        });
    }
}

/// Takes the columns of the largest scores, the lower one among equals, in ascending order; all that are seen when there are no scores.
fn pick(query: &Query<'_>, scores: &[f32], picks: &mut [f32]) {
    let mut order: Vec<u32> = (0..query.seen() as u32).collect();
    if !scores.is_empty() {
        let larger = |&a: &u32, &b: &u32| scores[b as usize].total_cmp(&scores[a as usize]).then(a.cmp(&b));
        order.select_nth_unstable_by(picks.len() - 1, larger);
        order.truncate(picks.len());
        order.sort_unstable();
    }
    picks.fill(-1.0);
    picks.iter_mut().zip(order).for_each(|(pick, index)| *pick = query.column(index as usize) as f32);
}

/// Scores of the columns that a query sees as numbers `first..`.
struct Score<'a> {
    pages: &'a Pages,
    indexer: Indexer,
    query: &'a Query<'a>,
    q: &'a Tensor,
    weights: &'a Tensor,
    first: usize,
    scores: &'a mut [f32],
}

impl Kernel for Score<'_> {
    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let Self { pages, indexer, query, q, weights, first, scores } = self;
        let table = &query.columns.table;
        let layout = pages.layout(table.class);
        let plane = layout.planes[INDEX];
        let dim = plane.dim;
        // Lanes are heads, so that a column needs one sum over lanes.
        let blocks = indexer.heads.div_ceil(LANES);
        let mut by_head = vec![[0.0; LANES]; blocks * dim];
        let mut weight = vec![[0.0; LANES]; blocks];
        for head in 0..indexer.heads {
            let (block, lane) = (head / LANES, head % LANES);
            weight[block][lane] = weights.row(query.row)[head];
            for (d, &x) in q.row(query.row)[head * dim..][..dim].iter().enumerate() {
                by_head[block * dim + d][lane] = x;
            }
        }
        let mut key = vec![0.0; dim];
        for (index, score) in scores.iter_mut().enumerate() {
            let column = query.column(first + index);
            let bytes = pages.page(table.class, table.id(column / layout.columns), indexer.slot.layer);
            with_raw!(plane.codec.raw(), E => {
                let stored = plane.head::<E>(bytes, 0)[column % layout.columns * dim..][..dim].as_chunks::<LANES>().0;
                for (key, stored) in key.as_chunks_mut::<LANES>().0.iter_mut().zip(stored) {
                    isa.store(<E as Lane>::load(isa, stored), key);
                }
            });
            let mut sum = isa.splat(0.0);
            for (queries, weight) in by_head.chunks_exact(dim).zip(&weight) {
                let mut dot = isa.splat(0.0);
                for (q, &k) in queries.iter().zip(&key) {
                    dot = isa.fma(isa.load(q), isa.splat(k), dot);
                }
                sum = isa.fma(isa.max(dot, isa.splat(0.0)), isa.load(weight), sum);
            }
            *score = isa.sum(sum);
        }
    }
}

/// Attends the picked columns of each query.
pub fn attend(
    set: KernelSet,
    pool: &Pool,
    (plan, pages): (&StepPlan, &Pages),
    attention: Attention,
    picks: &Tensor,
    q: &Tensor,
    out: &mut Tensor,
) {
    let all = queries(plan, pages, attention.slot.group);
    let v_dim = pages.spec().groups()[attention.slot.group].value_dim();
    let tiles = attention.heads.div_ceil(TILE);
    let out = Disjoint::new(out.values_mut());
    let items = all.len() * tiles;
    pool.run(items, items.div_ceil(pool.threads() * 16), |range| {
        for item in range {
            let (query, first) = (&all[item / tiles], item % tiles * TILE);
            let count = TILE.min(attention.heads - first);
            let start = (query.row * attention.heads + first) * v_dim;
            // SAFETY: items are disjoint in (row, heads).
            let out = unsafe { out.part(start..start + count * v_dim) };
            set.run(Attend { pages, attention, query, picks: picks.row(query.row), q, first, count, out });
        }
    });
}

thread_local! {
    /// Scores of a tile of heads. Grows to what a model needs and stays.
    static WEIGHTS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// One query's heads `first .. first + count`.
struct Attend<'a> {
    pages: &'a Pages,
    attention: Attention,
    query: &'a Query<'a>,
    picks: &'a [f32],
    q: &'a Tensor,
    first: usize,
    count: usize,
    out: &'a mut [f32],
}

impl Kernel for Attend<'_> {
    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let Self { pages, attention, query, picks, q, first, count, out } = self;
        let table = &query.columns.table;
        let layout = pages.layout(table.class);
        let (latent, rope) = (layout.planes[0], layout.planes[1]);
        let (k_dim, v_dim) = (latent.dim + rope.dim, latent.dim);
        let picked = picks.iter().position(|&pick| pick < 0.0).unwrap_or(picks.len());
        let picks = &picks[..picked];
        out.fill(0.0);
        if picks.is_empty() {
            return;
        }
        let stride = picked.next_multiple_of(LANES);
        let mut memory = WEIGHTS.take();
        memory.clear();
        memory.resize(count * stride, f32::NEG_INFINITY);
        let queries = &q.row(query.row)[first * k_dim..][..count * k_dim];
        let bytes_of = |column: usize| pages.page(table.class, table.id(column / layout.columns), attention.slot.layer);
        with_raw!(latent.codec.raw(), E => {
            for (index, &pick) in picks.iter().enumerate() {
                let (bytes, column) = (bytes_of(pick as usize), pick as usize % layout.columns);
                let latents = latent.head::<E>(bytes, 0)[column * v_dim..][..v_dim].as_chunks::<LANES>().0;
                let ropes = rope.head::<E>(bytes, 0)[column * rope.dim..][..rope.dim].as_chunks::<LANES>().0;
                let mut head = 0;
                macro_rules! group {
                    ($n:literal) => {
                        while count - head >= $n {
                            let mut acc = [isa.splat(0.0); $n];
                            for (d, key) in latents.iter().chain(ropes).enumerate() {
                                let key = <E as Lane>::load(isa, key);
                                for i in 0..$n {
                                    let q = queries[(head + i) * k_dim + d * LANES..].first_chunk();
                                    acc[i] = isa.fma(key, q.map_or(isa.splat(0.0), |q| isa.load(q)), acc[i]);
                                }
                            }
                            for i in 0..$n {
                                memory[(head + i) * stride + index] = isa.sum(acc[i]) * attention.scale;
                            }
                            head += $n;
                        }
                    };
                }
                group!(8);
                group!(1);
            }
        });
        let mut sums = [1.0; TILE];
        for (scores, total) in memory.chunks_exact_mut(stride).zip(&mut sums) {
            let scores = scores.as_chunks_mut::<LANES>().0;
            if let Some(cap) = attention.softcap {
                let (cap, inverse) = (isa.splat(cap), isa.splat(1.0 / cap));
                for chunk in scores.iter_mut() {
                    isa.store(isa.mul(isa.tanh(isa.mul(isa.load(chunk), inverse)), cap), chunk);
                }
            }
            // A cap makes the infinite scores past the last column finite.
            let past = picked % LANES;
            if let Some(last) = scores.last_mut().filter(|_| past > 0) {
                last[past..].fill(f32::NEG_INFINITY);
            }
            let mut max = isa.splat(f32::NEG_INFINITY);
            for chunk in scores.iter() {
                max = isa.max(max, isa.load(chunk));
            }
            let shift = isa.splat(-isa.max_lane(max));
            let mut sum = isa.splat(0.0);
            for chunk in scores {
                let weight = isa.exp(isa.add(isa.load(chunk), shift));
                sum = isa.add(sum, weight);
                isa.store(weight, chunk);
            }
            *total = isa.sum(sum);
        }
        // Few enough columns at a time that their latents stay in the first cache while each chunk of them is summed up.
        const BLOCK: usize = 32;
        let chunks = v_dim / LANES;
        with_raw!(latent.codec.raw(), E => {
            for (block, picks) in picks.chunks(BLOCK).enumerate() {
                let mut values: [&[[E; LANES]]; BLOCK] = [&[]; BLOCK];
                for (value, &pick) in values.iter_mut().zip(picks) {
                    let column = pick as usize % layout.columns;
                    let latents = &latent.head::<E>(bytes_of(pick as usize), 0)[column * v_dim..][..v_dim];
                    *value = latents.as_chunks().0;
                }
                let mut head = 0;
                macro_rules! group {
                    ($n:literal) => {
                        while count - head >= $n {
                            for chunk in 0..chunks {
                                let mut acc = [isa.splat(0.0); $n];
                                for i in 0..$n {
                                    acc[i] = isa.load(&out[(head + i) * v_dim..].as_chunks().0[chunk]);
                                }
                                for (index, value) in values.iter().enumerate().take(picks.len()) {
                                    let value = <E as Lane>::load(isa, &value[chunk]);
                                    for i in 0..$n {
                                        let weight = memory[(head + i) * stride + block * BLOCK + index];
                                        acc[i] = isa.fma(value, isa.splat(weight), acc[i]);
                                    }
                                }
                                for i in 0..$n {
                                    isa.store(acc[i], &mut out[(head + i) * v_dim..].as_chunks_mut().0[chunk]);
                                }
                            }
                            head += $n;
                        }
                    };
                }
                group!(8);
                group!(1);
            }
        });
        for (out, &sum) in out.chunks_exact_mut(v_dim).zip(&sums) {
            let sum = isa.splat(sum);
            for out in out.as_chunks_mut::<LANES>().0 {
                isa.store(isa.div(isa.load(out), sum), out);
            }
        }
        WEIGHTS.set(memory);
    }
}
