//! Random programs of all operations against a naive batch, byte for byte.
//!
//! The naive batch is a `Vec<Vec<u32>>`: each row's columns, as the tags that were written. The real batch's columns live in pages of
//! tags that a small store keeps, as a backend would.

use std::collections::BTreeMap;

use kvern_state::{Batch, Codec, Error, GroupSpec, Pool, Row, StateSpec, StepPlan};
use proptest::prelude::*;

/// A tag that no column has: what a fresh or freed page holds.
const POISON: u32 = u32::MAX;

/// The bytes behind pages: `pages[group][id]` holds a tag per column.
#[derive(Default)]
struct Store {
    pages: BTreeMap<(usize, u32), Vec<u32>>,
}

impl Store {
    /// Executes a plan: copies, then writes each token's tag into every group.
    fn execute(&mut self, plan: &StepPlan, page: usize) {
        for copy in &plan.copies {
            let from = self.pages[&(copy.group, copy.from)].clone();
            self.pages.insert((copy.group, copy.to), from);
        }
        for segment in &plan.segments {
            for (group, table) in segment.tables.iter().enumerate() {
                assert_eq!(
                    table.len(),
                    (segment.past + segment.count).div_ceil(page),
                    "a table covers its row exactly"
                );
                for i in 0..segment.count {
                    let position = segment.past + i;
                    let key = (group, table[position / page]);
                    if position % page == 0 {
                        self.pages.insert(key, vec![POISON; page]);
                    }
                    self.pages.get_mut(&key).unwrap()[position % page] = plan.tokens[segment.start + i];
                }
            }
        }
    }

    fn columns(&self, group: usize, table: impl Iterator<Item = u32>, len: usize, page: usize) -> Vec<u32> {
        let mut columns: Vec<u32> = table.flat_map(|id| self.pages[&(group, id)].clone()).collect();
        assert!(columns.len() < len + page);
        columns.truncate(len);
        columns
    }
}

#[derive(Debug, Clone)]
enum Op {
    Admit(Vec<usize>),
    DropAdmission(usize),
    Append(Vec<usize>),
    DropAppend(Vec<usize>),
    Round { appends: Vec<Vec<usize>>, keep: Option<Vec<usize>> },
    Filter(Vec<usize>),
    Extract(usize),
    Readmit,
    Fork,
    Swap,
    Read(usize),
    Clear,
}

fn op() -> impl Strategy<Value = Op> {
    let counts = || prop::collection::vec(0usize..40, 1..6);
    prop_oneof![
        2 => prop::collection::vec(1usize..200, 1..3).prop_map(Op::Admit),
        1 => (1usize..200).prop_map(Op::DropAdmission),
        6 => counts().prop_map(Op::Append),
        1 => counts().prop_map(Op::DropAppend),
        4 => (prop::collection::vec(counts(), 0..3), prop::option::of(counts()))
            .prop_map(|(appends, keep)| Op::Round { appends, keep }),
        2 => prop::collection::vec(0usize..6, 0..6).prop_map(Op::Filter),
        1 => (0usize..6).prop_map(Op::Extract),
        1 => Just(Op::Readmit),
        1 => Just(Op::Fork),
        1 => Just(Op::Swap),
        1 => (0usize..6).prop_map(Op::Read),
        1 => Just(Op::Clear),
    ]
}

/// The real thing and its naive double.
struct World {
    pool: Pool,
    store: Store,
    batch: Batch,
    rows: Vec<Vec<u32>>,
    /// A second batch, and rows outside any batch.
    other: (Batch, Vec<Vec<u32>>),
    outside: Vec<(Row, Vec<u32>)>,
    reads: Vec<(Vec<kvern_state::Read>, Vec<u32>)>,
    tag: u32,
}

impl World {
    fn new(page: usize, groups: usize, budget: u64) -> Self {
        let (k, v) = (Codec::F32, Codec::F16);
        let group = |layers| GroupSpec { layers, kv_heads: 1, k_dim: 2, v_dim: 2, k, v };
        let pool = Pool::new(StateSpec::new(page, (1..=groups).map(group).collect()).unwrap(), budget);
        let (batch, other) = (Batch::new(&pool), (Batch::new(&pool), Vec::new()));
        let (rows, outside, reads, store) = (Vec::new(), Vec::new(), Vec::new(), Store::default());
        Self { pool, store, batch, rows, other, outside, reads, tag: 0 }
    }

    fn page(&self) -> usize {
        self.pool.spec().page()
    }

    /// As many counts as there are rows.
    fn fit(&self, counts: &[usize]) -> Vec<usize> {
        (0..self.rows.len()).map(|row| counts[row % counts.len()]).collect()
    }

    fn tokens(&mut self, counts: &[usize]) -> Vec<u32> {
        let start = self.tag;
        self.tag += counts.iter().sum::<usize>() as u32;
        (start..self.tag).collect()
    }

    fn apply(&mut self, op: Op) {
        let page = self.page();
        match op {
            Op::Admit(limits) => {
                let rows = limits.iter().map(|&limit| (self.pool.row(), limit)).collect();
                match self.batch.prepare_admit(rows) {
                    Ok(admission) => {
                        admission.commit();
                        self.rows.extend(limits.iter().map(|_| Vec::new()));
                    }
                    Err(refused) => {
                        assert!(matches!(refused.error, Error::Budget { .. }));
                        assert_eq!(refused.rows.len(), limits.len(), "the rows come back");
                    }
                }
            }
            Op::DropAdmission(limit) => {
                let before = self.pool.usage();
                drop(self.batch.prepare_admit(vec![(self.pool.row(), limit)]));
                assert_eq!(self.pool.usage(), before);
            }
            Op::Append(counts) => {
                let counts = self.fit(&counts);
                let tokens = self.tokens(&counts);
                if let Ok(append) = self.batch.prepare_append(&counts) {
                    let plan = append.plan(&tokens, &[]).unwrap();
                    self.store.execute(&plan, page);
                    append.commit();
                    extend(&mut self.rows, &counts, &tokens);
                }
            }
            Op::DropAppend(counts) => {
                let counts = self.fit(&counts);
                let before = self.pool.usage();
                drop(self.batch.prepare_append(&counts));
                assert_eq!(self.pool.usage(), before);
            }
            Op::Round { appends, keep } => {
                let appends: Vec<_> = appends.iter().map(|counts| self.fit(counts)).collect();
                let tokens: Vec<_> = appends.iter().map(|counts| self.tokens(counts)).collect();
                let keep = keep.map(|keep| self.fit(&keep));
                let starts: Vec<usize> = self.rows.iter().map(Vec::len).collect();
                let mut round = self.batch.begin_round();
                for (counts, tokens) in appends.iter().zip(&tokens) {
                    if let Ok(append) = round.prepare_append(counts) {
                        self.store.execute(&append.plan(tokens, &[]).unwrap(), page);
                        append.commit();
                        extend(&mut self.rows, counts, tokens);
                    }
                }
                let mut keeps = vec![0; starts.len()];
                if let Some(keep) = keep {
                    for (row, keep) in keep.into_iter().enumerate() {
                        keeps[row] = keep.min(self.rows[row].len() - starts[row]);
                    }
                    // One too many is refused and changes nothing.
                    let mut bad = keeps.clone();
                    if let Some(first) = bad.first_mut() {
                        *first = self.rows[0].len() - starts[0] + 1;
                        let (again, error) = round.commit(&bad).unwrap_err();
                        assert!(matches!(error, Error::Keep { row: 0, .. }));
                        round = again;
                    }
                    round.commit(&keeps).map_err(|(_, error)| error).unwrap();
                } else {
                    drop(round);
                }
                for ((row, start), keep) in self.rows.iter_mut().zip(starts).zip(keeps) {
                    row.truncate(start + keep);
                }
            }
            Op::Filter(keep) => {
                let mut seen = std::collections::BTreeSet::new();
                let valid = keep.iter().all(|&row| row < self.rows.len() && seen.insert(row));
                assert_eq!(self.batch.filter(&keep).is_ok(), valid);
                if valid {
                    self.rows = keep.iter().map(|&row| self.rows[row].clone()).collect();
                }
            }
            Op::Extract(row) => match self.batch.extract(row) {
                Ok(taken) => self.outside.push((taken, self.rows.remove(row))),
                Err(error) => assert_eq!(error, Error::NoRow { index: row, rows: self.rows.len() }),
            },
            Op::Readmit => {
                if let Some((row, columns)) = self.outside.pop() {
                    match self.batch.prepare_admit(vec![(row, columns.len() + 10)]) {
                        Ok(admission) => {
                            admission.commit();
                            self.rows.push(columns);
                        }
                        Err(mut refused) => self.outside.push((refused.rows.remove(0), columns)),
                    }
                }
            }
            Op::Fork => self.other = (self.batch.fork(), self.rows.clone()),
            Op::Swap => {
                std::mem::swap(&mut self.batch, &mut self.other.0);
                std::mem::swap(&mut self.rows, &mut self.other.1);
            }
            Op::Read(row) => {
                if let Some(columns) = self.rows.get(row) {
                    let groups = 0..self.pool.spec().groups().len();
                    let reads = groups.map(|group| self.batch.rows()[row].read(group)).collect();
                    self.reads.push((reads, columns.clone()));
                }
            }
            Op::Clear => {
                self.batch.clear();
                self.rows.clear();
            }
        }
    }

    /// Every row, wherever it is, holds exactly its columns; reads hold what they held when they were taken; the books are exact.
    fn check(&self) {
        let batches = [(&self.batch, &self.rows), (&self.other.0, &self.other.1)];
        let running = batches.iter().flat_map(|(batch, rows)| batch.rows().iter().zip(*rows));
        for (row, columns) in running.chain(self.outside.iter().map(|(row, columns)| (row, columns))) {
            assert_eq!(row.len(), columns.len());
            for group in 0..self.pool.spec().groups().len() {
                assert_eq!(self.store.columns(group, row.table(group), row.len(), self.page()), *columns);
            }
        }
        for (reads, columns) in &self.reads {
            for (group, read) in reads.iter().enumerate() {
                let table = read.pages().iter().map(kvern_state::Page::id);
                assert_eq!(self.store.columns(group, table, read.len(), self.page()), *columns);
            }
        }
        // Pages in use are those that some table or read holds, each counted once.
        let mut held = std::collections::BTreeSet::new();
        let mut hold = |group: usize, ids: &mut dyn Iterator<Item = u32>| held.extend(ids.map(|id| (group, id)));
        for group in 0..self.pool.spec().groups().len() {
            for row in
                self.batch.rows().iter().chain(self.other.0.rows()).chain(self.outside.iter().map(|(row, _)| row))
            {
                hold(group, &mut row.table(group));
            }
            for (reads, _) in &self.reads {
                hold(group, &mut reads[group].pages().iter().map(kvern_state::Page::id));
            }
        }
        let usage = self.pool.usage();
        assert_eq!(usage.used, held.iter().map(|(group, _)| self.pool.spec().page_bytes(*group)).sum::<u64>());
        assert!(usage.used + usage.promised <= usage.budget);
    }
}

fn extend(rows: &mut [Vec<u32>], counts: &[usize], mut tokens: &[u32]) {
    for (row, &count) in rows.iter_mut().zip(counts) {
        let (own, rest) = tokens.split_at(count);
        row.extend_from_slice(own);
        tokens = rest;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn random_programs_agree_with_the_naive_batch(
        page in prop::sample::select(vec![4usize, 8, 16, 32]),
        groups in 1usize..4,
        budget in 2_000u64..200_000,
        ops in prop::collection::vec(op(), 1..40),
    ) {
        let mut world = World::new(page, groups, budget);
        for op in ops {
            world.apply(op);
            world.check();
        }
        let pool = world.pool.clone();
        drop(world);
        prop_assert_eq!((pool.usage().used, pool.usage().promised), (0, 0), "everything is given back");
    }
}

fn pool(budget_tokens: usize) -> Pool {
    let group = GroupSpec { layers: 1, kv_heads: 1, k_dim: 4, v_dim: 4, k: Codec::F32, v: Codec::F32 };
    let spec = StateSpec::new(4, vec![group]).unwrap();
    let budget = spec.row_bytes(budget_tokens);
    Pool::new(spec, budget)
}

/// Appends `count` tokens to the only row.
fn grow(batch: &mut Batch, count: usize) -> Result<StepPlan, Error> {
    let append = batch.prepare_append(&[count])?;
    let plan = append.plan(&vec![0; count], &[])?;
    append.commit();
    Ok(plan)
}

#[test]
fn an_admitted_row_grows_to_its_limit_whatever_else_happens() {
    let pool = pool(16);
    let mut batch = Batch::new(&pool);
    batch.prepare_admit(vec![(pool.row(), 12)]).unwrap().commit();
    assert_eq!(pool.usage().promised, pool.spec().row_bytes(12), "the estimate is the real occupation");
    // A neighbour takes what is left, and no more.
    let mut neighbour = Batch::new(&pool);
    assert!(matches!(neighbour.prepare_admit(vec![(pool.row(), 5)]), Err(refused) if refused.rows.len() == 1));
    neighbour.prepare_admit(vec![(pool.row(), 4)]).unwrap().commit();
    grow(&mut neighbour, 4).unwrap();
    assert!(matches!(grow(&mut neighbour, 1), Err(Error::Budget { .. })));
    for _ in 0..12 {
        grow(&mut batch, 1).unwrap();
    }
    assert_eq!((pool.usage().used, pool.usage().promised), (pool.spec().row_bytes(16), 0));
    assert!(matches!(grow(&mut batch, 1), Err(Error::Budget { free: 0, .. })));
}

#[test]
fn a_shared_tail_is_copied_once_and_a_full_page_never() {
    let pool = pool(100);
    let mut batch = Batch::new(&pool);
    batch.prepare_admit(vec![(pool.row(), 20)]).unwrap().commit();
    grow(&mut batch, 6).unwrap();
    let mut fork = batch.fork();
    assert_eq!(grow(&mut fork, 1).unwrap().copies.len(), 1, "the tail was shared");
    assert_eq!(grow(&mut fork, 1).unwrap().copies.len(), 0, "now it is not");
    assert_eq!(grow(&mut batch, 1).unwrap().copies.len(), 0, "the original has its tail for itself again");
    grow(&mut batch, 1).unwrap();
    let mut fork = batch.fork();
    assert_eq!(grow(&mut fork, 1).unwrap().copies.len(), 0, "a full page is not written to");
}

#[test]
fn a_rolled_back_round_returns_its_pages_and_its_promise() {
    let pool = pool(100);
    let mut batch = Batch::new(&pool);
    batch.prepare_admit(vec![(pool.row(), 30)]).unwrap().commit();
    grow(&mut batch, 5).unwrap();
    let before = pool.usage();
    let mut round = batch.begin_round();
    let append = round.prepare_append(&[20]).unwrap();
    append.commit();
    assert_eq!(round.rows()[0].len(), 25);
    drop(round);
    assert_eq!((batch.rows()[0].len(), pool.usage()), (5, before));
}

#[test]
fn wrong_counts_change_nothing() {
    let pool = pool(100);
    let mut batch = Batch::new(&pool);
    batch.prepare_admit(vec![(pool.row(), 30), (pool.row(), 30)]).unwrap().commit();
    assert!(matches!(batch.prepare_append(&[1]), Err(Error::Count { expected: 2, found: 1, .. })));
    let append = batch.prepare_append(&[1, 2]).unwrap();
    assert!(matches!(append.plan(&[7], &[]), Err(Error::Count { expected: 3, found: 1, .. })));
    assert!(matches!(append.plan(&[7; 3], &[3]), Err(Error::NoToken { index: 3, tokens: 3 })));
    drop(append);
    let round = batch.begin_round();
    let (round, error) = round.commit(&[0]).unwrap_err();
    assert!(matches!(error, Error::Count { .. }));
    drop(round);
    assert!(matches!(batch.filter(&[0, 0]), Err(Error::NoRow { index: 0, rows: 2 })));
    let stranger = self::pool(100).row();
    assert!(matches!(batch.prepare_admit(vec![(stranger, 1)]), Err(refused) if refused.error == Error::ForeignRow));
    assert_eq!(batch.rows().len(), 2);
    assert!(StateSpec::new(6, vec![]).is_err());
}
