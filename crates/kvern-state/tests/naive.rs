//! Random programs of all operations over random specs against a naive batch, byte for byte after every operation.

mod common;

use std::collections::BTreeSet;

use common::{GUESS, Naive, Store, groups};
use kvern_state::{Batch, Demand, Error, Pool, Read, Row, StateSpec};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

#[derive(Debug, Clone)]
enum Op {
    Admit(Vec<usize>),
    DropAdmission(usize),
    Append { counts: Vec<usize>, companions: bool },
    DropAppend(Vec<usize>),
    Round { appends: Vec<(Vec<usize>, bool)>, keep: Option<Vec<usize>> },
    Filter(Vec<usize>),
    Extract(usize),
    Readmit,
    Truncate(usize),
    Fork,
    Swap,
    Read(usize),
    Clear,
}

fn op() -> impl Strategy<Value = Op> {
    let counts = || prop::collection::vec(prop_oneof![3 => 0usize..4, 1 => 0usize..40], 1..6);
    prop_oneof![
        2 => prop::collection::vec(1usize..200, 1..3).prop_map(Op::Admit),
        1 => (1usize..200).prop_map(Op::DropAdmission),
        6 => (counts(), prop::bool::weighted(0.9)).prop_map(|(counts, companions)| Op::Append { counts, companions }),
        1 => counts().prop_map(Op::DropAppend),
        5 => (prop::collection::vec((counts(), prop::bool::weighted(0.3)), 0..4), prop::option::of(counts()))
            .prop_map(|(appends, keep)| Op::Round { appends, keep }),
        2 => prop::collection::vec(0usize..6, 0..6).prop_map(Op::Filter),
        1 => (0usize..6).prop_map(Op::Extract),
        1 => Just(Op::Readmit),
        1 => (0usize..200).prop_map(Op::Truncate),
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
    rows: Vec<Naive>,
    /// A second batch, and rows outside any batch.
    other: (Batch, Vec<Naive>),
    outside: Vec<(Row, Naive)>,
    reads: Vec<(Vec<Option<Read>>, Naive)>,
    tag: u32,
}

/// As many counts as there are rows, none of which crosses the start of late encoding.
fn fit(rows: &[Row], counts: &[usize]) -> Vec<usize> {
    rows.iter().enumerate().map(|(row, state)| counts[row % counts.len()].min(state.room())).collect()
}

impl World {
    fn new(spec: StateSpec, budget: u64) -> Self {
        let pool = Pool::new(spec, budget);
        let (batch, other) = (Batch::new(&pool), (Batch::new(&pool), Vec::new()));
        let (rows, outside, reads, store) = (Vec::new(), Vec::new(), Vec::new(), Store::default());
        Self { pool, store, batch, rows, other, outside, reads, tag: 0 }
    }

    fn tokens(&mut self, counts: &[usize]) -> Vec<u32> {
        let start = self.tag;
        self.tag += counts.iter().sum::<usize>() as u32;
        (start..self.tag).collect()
    }

    fn apply(&mut self, op: Op) {
        let pool = self.pool.clone();
        let spec = pool.spec();
        match op {
            Op::Admit(limits) => {
                let rows = limits.iter().map(|&limit| (pool.row(), limit)).collect();
                match self.batch.prepare_admit(rows) {
                    Ok(admission) => {
                        admission.commit();
                        self.rows.extend(limits.iter().map(|_| Naive::new(spec)));
                    }
                    Err(refused) => {
                        assert!(matches!(refused.error, Error::Budget { .. }));
                        assert_eq!(refused.rows.len(), limits.len(), "the rows come back");
                    }
                }
            }
            Op::DropAdmission(limit) => {
                let before = pool.usage();
                drop(self.batch.prepare_admit(vec![(pool.row(), limit)]));
                assert_eq!(pool.usage(), before);
            }
            Op::Append { counts, companions } => {
                let counts = fit(self.batch.rows(), &counts);
                let tokens = self.tokens(&counts);
                if let Ok(mut append) = self.batch.prepare_append(&counts) {
                    if !companions {
                        append = append.without_companions();
                    }
                    self.store.execute(spec, &append.plan(&tokens, &[]).unwrap());
                    append.commit();
                    extend(spec, &mut self.rows, &counts, &tokens, companions);
                }
            }
            Op::DropAppend(counts) => {
                let counts = fit(self.batch.rows(), &counts);
                let tokens = self.tokens(&counts);
                let before = pool.usage();
                // A step that fails may have written anything into the room that it was given.
                if let Ok(append) = self.batch.prepare_append(&counts) {
                    self.store.execute(spec, &append.plan(&tokens, &[]).unwrap());
                }
                assert_eq!(pool.usage(), before);
            }
            Op::Round { appends, keep } => self.round(spec, &appends, keep),
            Op::Filter(keep) => {
                let mut seen = BTreeSet::new();
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
                if let Some((row, naive)) = self.outside.pop() {
                    match self.batch.prepare_admit(vec![(row, naive.tokens.len() + 10)]) {
                        Ok(admission) => {
                            admission.commit();
                            self.rows.push(naive);
                        }
                        Err(mut refused) => self.outside.push((refused.rows.remove(0), naive)),
                    }
                }
            }
            Op::Truncate(len) => {
                if let Some((row, naive)) = self.outside.last_mut() {
                    let possible = row.resumable(len);
                    assert_eq!(row.truncate(len).is_ok(), possible);
                    if possible {
                        naive.truncate(spec, len);
                    }
                }
            }
            Op::Fork => self.other = (self.batch.fork(), self.rows.clone()),
            Op::Swap => {
                std::mem::swap(&mut self.batch, &mut self.other.0);
                std::mem::swap(&mut self.rows, &mut self.other.1);
            }
            Op::Read(row) => {
                if let Some(naive) = self.rows.get(row) {
                    let groups = 0..spec.groups().len();
                    let reads = groups.map(|group| self.batch.rows()[row].read(group)).collect();
                    self.reads.push((reads, naive.clone()));
                }
            }
            Op::Clear => {
                self.batch.clear();
                self.rows.clear();
            }
        }
    }

    fn round(&mut self, spec: &StateSpec, appends: &[(Vec<usize>, bool)], keep: Option<Vec<usize>>) {
        let starts = self.rows.clone();
        let before = self.pool.usage();
        let mut tag = self.tag;
        let mut tokens = |counts: &[usize], mark: u32| -> Vec<u32> {
            let start = tag;
            tag += counts.iter().sum::<usize>() as u32;
            (start..tag).map(|tag| tag | mark).collect()
        };
        let mut round = self.batch.begin_round();
        for (counts, draft) in appends {
            let counts = fit(round.rows(), counts);
            if *draft {
                let guesses = tokens(&counts, GUESS);
                match round.prepare_draft(&counts) {
                    Ok(append) => {
                        self.store.execute(spec, &append.plan(&guesses, &[]).unwrap());
                        append.commit();
                    }
                    Err(Error::NoCompanion) => assert!(spec.groups().iter().all(|group| group.lag.is_none())),
                    Err(error) => assert!(matches!(error, Error::Budget { .. } | Error::Crosses { .. })),
                }
                continue;
            }
            let tokens = tokens(&counts, 0);
            if let Ok(append) = round.prepare_append(&counts) {
                self.store.execute(spec, &append.plan(&tokens, &[]).unwrap());
                append.commit();
                extend(spec, &mut self.rows, &counts, &tokens, true);
            }
        }
        // A fork of a row in a round is the row as it stands.
        for (row, naive) in round.rows().iter().zip(&self.rows) {
            naive.check(&self.store, &row.fork());
        }
        let mut keeps = vec![0; starts.len()];
        if let Some(keep) = keep {
            for (row, start) in starts.iter().enumerate() {
                keeps[row] = keep[row % keep.len()].min(self.rows[row].tokens.len() - start.tokens.len());
            }
            // One too many is refused and changes nothing.
            let mut bad = keeps.clone();
            if let Some(first) = bad.first_mut() {
                *first = self.rows[0].tokens.len() - starts[0].tokens.len() + 1;
                let (again, error) = round.commit(&bad).unwrap_err();
                assert!(matches!(error, Error::Keep { row: 0, .. }));
                round = again;
            }
            round.commit(&keeps).map_err(|(_, error)| error).unwrap();
        } else {
            drop(round);
            let shared = !self.other.1.is_empty() || !self.reads.is_empty() || !self.outside.is_empty();
            assert!(shared || self.pool.usage() == before, "a dropped round gives everything back");
        }
        for ((row, start), keep) in self.rows.iter_mut().zip(&starts).zip(keeps) {
            row.settle(spec, start, start.tokens.len() + keep);
        }
        self.tag = tag;
    }

    /// Every row, wherever it is, holds exactly its columns; reads hold what they held when they were taken; the books are exact.
    fn check(&self) {
        let spec = self.pool.spec();
        let running = self.batch.rows().iter().zip(&self.rows);
        let other = self.other.0.rows().iter().zip(&self.other.1);
        let outside = self.outside.iter().map(|(row, naive)| (row, naive));
        let mut held = BTreeSet::new();
        for (row, naive) in running.chain(other).chain(outside) {
            naive.check(&self.store, row);
            for group in 0..spec.groups().len() {
                let pages = row.pages(group);
                held.extend(pages.ids().iter().map(|&id| (pages.class(), id)));
            }
        }
        for (reads, naive) in &self.reads {
            for (group, read) in reads.iter().enumerate() {
                if let Some(read) = read {
                    naive.check_read(&self.store, spec, group, read);
                    held.extend(read.table().ids.iter().map(|&id| (read.table().class, id)));
                }
            }
        }
        // Pages in use are those that some row or read holds, each counted once.
        let usage = self.pool.usage();
        assert_eq!(usage.used, held.iter().map(|(class, _)| spec.classes()[*class].bytes()).sum::<u64>());
        assert!(usage.used + usage.promised <= usage.budget);
    }
}

fn extend(spec: &StateSpec, rows: &mut [Naive], counts: &[usize], mut tokens: &[u32], companions: bool) {
    for (row, &count) in rows.iter_mut().zip(counts) {
        let (own, rest) = tokens.split_at(count);
        row.append(spec, own, companions);
        tokens = rest;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]
    #[test]
    fn random_programs_agree_with_the_naive_batch(
        page in prop::sample::select(vec![4usize, 8, 16, 32]),
        choice in prop::collection::vec(0usize..10, 1..5),
        size in 4usize..=64,
        start in 1usize..50,
        budget in 2_000u64..200_000,
        ops in prop::collection::vec(op(), 1..40),
    ) {
        let mut world = World::new(StateSpec::new(page, groups(&choice, size, start)).unwrap(), budget);
        for op in ops {
            world.apply(op);
            world.check();
        }
        let pool = world.pool.clone();
        drop(world);
        prop_assert_eq!((pool.usage().used, pool.usage().promised), (0, 0), "everything is given back");
    }

    /// A row that was promised its demand never fails, whatever it does within that demand, and never takes more.
    #[test]
    fn the_promise_is_enough_and_the_estimate_exact(
        page in prop::sample::select(vec![4usize, 8, 16, 32]),
        choice in prop::collection::vec(0usize..10, 1..5),
        size in 4usize..=64,
        start in 1usize..50,
        tokens in 1usize..300,
        step in 1usize..40,
        round in 0usize..8,
        program in prop::collection::vec((1usize..40, prop::option::of((0usize..8, 0usize..8))), 1..200),
    ) {
        let spec = StateSpec::new(page, groups(&choice, size, start)).unwrap();
        let demand = Demand { tokens, step, round };
        let pool = Pool::new(spec.clone(), spec.peak_bytes(demand));
        let mut batch = Batch::new(&pool);
        batch.prepare_admit(vec![(pool.row(), demand)]).unwrap().commit();
        prop_assert_eq!(pool.usage().promised, spec.peak_bytes(demand));
        for (count, drafts) in program {
            let left = |row: &Row| (tokens - row.len()).min(row.room());
            match drafts.filter(|_| round > 0) {
                None => batch.prepare_append(&[count.min(step).min(left(&batch.rows()[0]))]).unwrap().commit(),
                Some((first, keep)) => {
                    let mut open = batch.begin_round();
                    let first = first.min(round).min(left(&open.rows()[0]));
                    open.prepare_append(&[first]).unwrap().commit();
                    let second = (round - first).min(left(&open.rows()[0]));
                    open.prepare_append(&[second]).unwrap().commit();
                    open.commit(&[keep.min(first + second)]).map_err(|(_, error)| error).unwrap();
                }
            }
            let len = batch.rows()[0].len();
            prop_assert_eq!(pool.usage().used, spec.row_bytes(len), "{} tokens", len);
            prop_assert_eq!(pool.usage().used + pool.usage().promised, spec.peak_bytes(demand));
        }
    }
}

/// Bytes of this process in memory.
fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS"))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024)
}

/// A long life of one pool after another; `KVERN_SOAK` says how many operations in all.
#[test]
fn soak() {
    let operations: usize = std::env::var("KVERN_SOAK").ok().and_then(|n| n.parse().ok()).unwrap_or(20_000);
    let lives = 10;
    let mut runner = TestRunner::deterministic();
    let mut early = None;
    for life in 0..lives {
        let choice: Vec<usize> = (0..4).map(|i| life + i * 3).collect();
        let spec = StateSpec::new([4, 8, 16, 32][life % 4], groups(&choice, 5 + 6 * life, 3 + 4 * life)).unwrap();
        let budget = 100_000;
        let mut world = World::new(spec.clone(), budget);
        for _ in 0..operations / lives {
            let op = op().new_tree(&mut runner).unwrap().current();
            world.apply(op);
            world.check();
            world.reads.drain(..world.reads.len().saturating_sub(4));
            world.outside.drain(..world.outside.len().saturating_sub(4));
        }
        for class in 0..spec.classes().len() {
            let most = budget / spec.classes()[class].bytes();
            assert!(world.store.highest(class) < most, "page numbers are used again");
        }
        let pool = world.pool.clone();
        drop(world);
        assert_eq!((pool.usage().used, pool.usage().promised), (0, 0));
        if life == 1 {
            early = resident();
        }
    }
    if let (Some(early), Some(late)) = (early, resident()) {
        assert!(late < early + (8 << 20), "memory grew from {early} to {late} bytes");
    }
}

/// A pool with room for a number of pages and no more: each admission, append and round fails at each page in turn, and nothing has changed.
#[test]
fn running_out_at_any_page_changes_nothing() {
    for choice in [vec![0, 5, 6], vec![1, 3, 7, 9], vec![2, 4, 8, 6]] {
        let spec = StateSpec::new(4, groups(&choice, 9, 13)).unwrap();
        let mut successes = 0;
        for budget in (0..spec.row_bytes(13) * 4).step_by(16) {
            let mut world = World::new(spec.clone(), budget);
            let row = world.pool.row();
            // Without a promise, so that every page can be missing.
            world.batch.prepare_admit(vec![(row, 0)]).unwrap().commit();
            world.rows.push(Naive::new(&spec));
            world.check();
            for op in [
                Op::Append { counts: vec![6], companions: true },
                Op::Fork,
                Op::Append { counts: vec![7], companions: true },
                Op::Round { appends: vec![(vec![2], true), (vec![5], false), (vec![3], false)], keep: Some(vec![4]) },
                Op::Append { counts: vec![20], companions: true },
            ] {
                world.apply(op);
                world.check();
            }
            successes += usize::from(world.rows[0].tokens.len() >= 37);
            let pool = world.pool.clone();
            drop(world);
            assert_eq!((pool.usage().used, pool.usage().promised), (0, 0));
        }
        assert!(successes > 0, "with enough room everything fits");
    }
}
