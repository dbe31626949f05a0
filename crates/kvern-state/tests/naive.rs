//! Random programs of all operations over random specs against a naive batch, byte for byte after every operation.

mod common;

use std::collections::BTreeSet;

use common::{GUESS, Naive, Store, groups};
use kvern_state::{Batch, Codec, Demand, Error, GroupSpec, Pool, Read, Row, StateSpec, StepPlan, Window};
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

/// A window's memory does not grow, whatever the mix of steps and rounds, over a hundred thousand tokens.
#[test]
fn a_window_stays_small_for_ever() {
    let (page, size) = (16, 100);
    let group = GroupSpec::attention(1, 1, 2, 2, (Codec::F16, Codec::F16)).windowed(Window { size, sinks: 0 });
    let spec = StateSpec::new(page, vec![group]).unwrap();
    let bytes = spec.classes()[0].bytes();
    let pool = Pool::new(spec, 1 << 30);
    let mut batch = Batch::new(&pool);
    batch.prepare_admit(vec![(pool.row(), Demand { tokens: 100_000, step: 64, round: 8 })]).unwrap().commit();
    let mut i = 0;
    while batch.rows()[0].len() < 100_000 {
        i += 1;
        if i % 3 == 0 {
            let mut round = batch.begin_round();
            round.prepare_append(&[i % 9]).unwrap().commit();
            let open = pool.usage().used / bytes;
            assert!(open as usize <= (size + 8).div_ceil(page) + 1);
            round.commit(&[i % 9 / 2]).map_err(|(_, error)| error).unwrap();
        } else {
            batch.prepare_append(&[1 + i % 64]).unwrap().commit();
        }
        assert!(pool.usage().used / bytes <= (size.div_ceil(page) + 1) as u64);
    }
}

#[test]
fn forks_hold_what_they_share_once() {
    let spec = StateSpec::new(64, vec![GroupSpec::attention(4, 1, 8, 8, (Codec::F16, Codec::F16))]).unwrap();
    let page = spec.classes()[0].bytes();
    let pool = Pool::new(spec.clone(), 1 << 30);
    let mut batch = Batch::new(&pool);
    batch.prepare_admit(vec![(pool.row(), 9000)]).unwrap().commit();
    grow(&mut batch, 8192).unwrap();
    let rows = (0..16).map(|_| (batch.rows()[0].fork(), 9000)).collect();
    let mut forks = Batch::new(&pool);
    forks.prepare_admit(rows).unwrap().commit();
    forks.prepare_append(&[1; 16]).unwrap().commit();
    assert_eq!(pool.usage().used, (8192 / 64 + 16) * page);
}

/// Draft columns are guesses: none of them stays, however the round goes on.
#[test]
fn guesses_of_a_draft_head_end_with_the_next_step() {
    let spec = StateSpec::new(4, vec![attention(), attention().companion(1)]).unwrap();
    let pool = Pool::new(spec, 1 << 20);
    let mut batch = Batch::new(&pool);
    assert!(batch.begin_round().prepare_draft(&[]).is_ok());
    batch.prepare_admit(vec![(pool.row(), Demand { tokens: 50, step: 10, round: 8 })]).unwrap().commit();
    grow(&mut batch, 6).unwrap();
    let columns = |row: &Row| (row.len(), row.columns(0), row.columns(1));
    assert_eq!(columns(&batch.rows()[0]), (6, 6, 5));
    let mut round = batch.begin_round();
    for i in 0..3 {
        let append = round.prepare_draft(&[1]).unwrap();
        // The first guess begins from the token that the row has not processed yet.
        assert_eq!(append.plan(&[0], &[]).unwrap().positions, [6 + i]);
        append.commit();
    }
    assert_eq!(columns(&round.rows()[0]), (6, 6, 8));
    let append = round.prepare_append(&[4]).unwrap();
    let plan = append.plan(&[0; 4], &[]).unwrap();
    let head = plan.segments[0].columns(1).unwrap();
    assert_eq!((head.past, head.count, plan.segments[0].writers(head)), (5, 4, 0..4));
    append.commit();
    assert_eq!(columns(&round.rows()[0]), (10, 10, 9));
    round.commit(&[2]).map_err(|(_, error)| error).unwrap();
    assert_eq!(columns(&batch.rows()[0]), (8, 8, 7));
    // A step without the head leaves it behind, and it counts on from where it is.
    batch.prepare_append(&[3]).unwrap().without_companions().commit();
    assert_eq!(columns(&batch.rows()[0]), (11, 11, 7));
    grow(&mut batch, 2).unwrap();
    assert_eq!(columns(&batch.rows()[0]), (13, 13, 9));
    let plain = Pool::new(StateSpec::new(4, vec![attention()]).unwrap(), 1 << 20);
    assert!(matches!(Batch::new(&plain).begin_round().prepare_draft(&[]), Err(Error::NoCompanion)));
}

fn attention() -> GroupSpec {
    GroupSpec::attention(1, 1, 2, 2, (Codec::F16, Codec::F16))
}

#[test]
fn a_step_does_not_cross_the_start_of_late_encoding() {
    let group = attention().late(10, vec![Codec::F16, Codec::Bf16]);
    let pool = Pool::new(StateSpec::new(4, vec![group]).unwrap(), 1 << 20);
    let mut batch = Batch::new(&pool);
    batch.prepare_admit(vec![(pool.row(), 50)]).unwrap().commit();
    assert_eq!(batch.rows()[0].room(), 10);
    assert_eq!(batch.prepare_append(&[11]).map(drop), Err(Error::Crosses { count: 11, room: 10 }));
    grow(&mut batch, 10).unwrap();
    let plan = grow(&mut batch, 30).unwrap();
    assert_eq!(plan.copies.len(), 3, "every page is encoded once");
    assert!(plan.copies.iter().all(|copy| copy.from.class != copy.to.class));
    let mut row = batch.extract(0).unwrap();
    assert_eq!((row.min_reusable(), row.room()), (10, usize::MAX));
    assert_eq!(row.truncate(9), Err(Error::NotResumable { len: 9, tokens: 40 }));
    row.truncate(12).unwrap();
    // An empty row is never encoded, and a row that is cut to nothing begins anew.
    row.truncate(0).unwrap();
    assert_eq!((row.room(), pool.usage().used), (10, 0));
}

fn pool(budget_tokens: usize) -> Pool {
    let group = GroupSpec::attention(1, 1, 4, 4, (Codec::F32, Codec::F32));
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

/// A row that was promised room to copy a shared tail keeps that promise through a dropped round, though nobody shares the tail any more.
#[test]
fn a_dropped_round_keeps_a_promise_that_is_not_needed_any_more() {
    let pool = pool(100);
    let mut batch = Batch::new(&pool);
    batch.prepare_admit(vec![(pool.row(), 30)]).unwrap().commit();
    grow(&mut batch, 1).unwrap();
    let fork = batch.fork();
    drop(batch.begin_round());
    drop(fork);
    let before = pool.usage();
    let mut round = batch.begin_round();
    round.prepare_append(&[9]).unwrap().commit();
    drop(round);
    assert_eq!(pool.usage(), before);
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
