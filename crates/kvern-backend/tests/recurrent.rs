//! Recurrent layers against the reference backend, and their state under every way of reaching it.

mod common;
#[path = "../../../tests/support/subjects.rs"]
mod subjects;

use common::{difference, tensor, values};
use kvern_backend::{Backend, DeltaInputs, DeltaRule, Reference, Slot, freeze};
use kvern_state::{Append, Batch, GroupSpec, Identity, Pool, StateSpec};
use subjects::{on, sets};

const HEADS: usize = 4;
const KEY_HEADS: usize = 2;
const KEY: usize = 24;
const VALUE: usize = 32;
const CHANNELS: usize = 300;
const TAPS: usize = 4;
const STATE: Slot = Slot { group: 0, layer: 1 };

fn spec() -> StateSpec {
    let parts = [("tail", (TAPS - 1) * CHANNELS), ("state", HEADS * KEY * VALUE)];
    StateSpec::new(16, vec![GroupSpec::recurrent(2, &parts)]).unwrap()
}

/// A backend with storage, and rows that run on it.
struct Run<'a, B: Backend> {
    backend: &'a B,
    pages: B::Pages,
    batch: Batch,
}

/// Runs both recurrences for the tokens of an append; inputs follow from tokens alone. Gives the outputs.
fn step<B: Backend>(backend: &B, pages: &mut B::Pages, append: &Append<'_>, tokens: &[u32]) -> Vec<f32> {
    let step = backend.begin(append.plan(tokens, &[]).unwrap(), pages).unwrap();
    let inputs = |salt: u64, width: usize, scale: f32, offset: f32| {
        let row = |&token: &u32| values(salt * 1000 + u64::from(token), width);
        let values: Vec<f32> = tokens.iter().flat_map(row).map(|x| offset + scale * x).collect();
        tensor(backend, &values, width)
    };
    let kernel = backend.vector(&values(1, TAPS * CHANNELS)).unwrap();
    let x = inputs(2, CHANNELS, 1.0, 0.0);
    let mut convolved = tensor(backend, &vec![f32::NAN; tokens.len() * CHANNELS], CHANNELS);
    backend.convolve(&step, pages, (STATE, 0), &kernel, &x, &mut convolved).unwrap();
    let rule = DeltaRule { slot: STATE, plane: 1, heads: HEADS, key_heads: KEY_HEADS, key_dim: KEY, value_dim: VALUE };
    let keys = KEY_HEADS * KEY;
    let (q, k, v) = (inputs(3, keys, 0.3, 0.0), inputs(4, keys, 0.3, 0.0), inputs(5, HEADS * VALUE, 1.0, 0.0));
    let (decay, beta) = (inputs(6, HEADS, 0.1, 0.9), inputs(7, HEADS, 0.4, 0.5));
    let mut out = tensor(backend, &vec![f32::NAN; tokens.len() * HEADS * VALUE], HEADS * VALUE);
    let inputs = DeltaInputs { q: &q, k: &k, v: &v, decay: &decay, beta: &beta };
    backend.delta_rule(&step, pages, rule, inputs, &mut out).unwrap();
    let (convolved, out) = (backend.download(&convolved).unwrap(), backend.download(&out).unwrap());
    convolved.chunks(CHANNELS).zip(out.chunks(HEADS * VALUE)).flat_map(|(a, b)| [a, b].concat()).collect()
}

impl<'a, B: Backend> Run<'a, B> {
    fn new(backend: &'a B, rows: usize) -> Self {
        let pool = Pool::new(spec(), 1 << 30);
        let mut batch = Batch::new(&pool);
        batch.prepare_admit((0..rows).map(|_| (pool.row(), 1000)).collect()).unwrap().commit();
        Self { backend, pages: backend.pages(pool.spec()).unwrap(), batch }
    }

    /// Appends tokens to every row; gives each row's outputs.
    fn append(&mut self, rows: &[&[u32]]) -> Vec<Vec<f32>> {
        let counts: Vec<usize> = rows.iter().map(|tokens| tokens.len()).collect();
        let append = self.batch.prepare_append(&counts).unwrap();
        let out = step(self.backend, &mut self.pages, &append, &rows.concat());
        append.commit();
        let mut rest = out.as_slice();
        let width = CHANNELS + HEADS * VALUE;
        let mut own = |count: usize| {
            let (own, later) = rest.split_at(count * width);
            rest = later;
            own.to_vec()
        };
        counts.into_iter().map(&mut own).collect()
    }

    fn hash(&self, row: usize, tokens: &[u32]) -> String {
        let row = &self.batch.rows()[row];
        freeze(self.backend, &self.pages, row, Identity::default(), tokens).unwrap().state_hash()
    }
}

#[test]
fn agrees_with_the_reference() {
    let tokens: Vec<u32> = (0..150).collect();
    let reference = Reference::new();
    let want = Run::new(&reference, 1).append(&[&tokens]).remove(0);
    for set in sets() {
        let got = on!(set, 2, false, |backend| Run::new(backend, 1).append(&[&tokens]).remove(0));
        let error = difference(&got, &want);
        assert!(error < 1e-5, "{}: {error}", set.name());
    }
}

#[test]
fn bits_do_not_depend_on_chunks_company_or_threads() {
    let tokens: Vec<u32> = (0..90).collect();
    fn alone<B: Backend>(backend: &B, tokens: &[u32]) -> (Vec<f32>, String) {
        let mut run = Run::new(backend, 1);
        (run.append(&[tokens]).remove(0), run.hash(0, tokens))
    }
    fn chunked<B: Backend>(backend: &B, tokens: &[u32], chunk: usize) -> (Vec<f32>, String) {
        let mut run = Run::new(backend, 3);
        let mut got = Vec::new();
        for (i, chunk) in tokens.chunks(chunk).enumerate() {
            let company: Vec<u32> = (0..i as u32 % 5).collect();
            got.extend(run.append(&[&company, chunk, &company[..company.len() / 2]]).swap_remove(1));
        }
        (got, run.hash(1, tokens))
    }
    for set in sets() {
        let want = on!(set, 1, false, |backend| alone(backend, &tokens));
        for (threads, chunk) in [(1, 1), (2, 2), (3, 7), (2, 64)] {
            let got = on!(set, threads, false, |backend| chunked(backend, &tokens, chunk));
            assert!(got == want, "{}, {threads} threads, chunks of {chunk}", set.name());
        }
    }
}

/// One state for each position of a round; committing chooses one of them and computes nothing.
#[test]
fn a_round_leaves_the_state_of_a_row_that_never_drafted() {
    let tokens: Vec<u32> = (0..60).collect();
    fn check<B: Backend>(backend: &B, tokens: &[u32]) {
        let mut plain = Run::new(backend, 1);
        let hashes: Vec<String> = (0..tokens.len())
            .map(|i| {
                plain.append(&[&tokens[i..=i]]);
                plain.hash(0, &tokens[..=i])
            })
            .collect();
        let mut run = Run::new(backend, 1);
        let mut len = 0;
        // Rounds with zero drafts follow on rounds that keep several.
        for (drafts, keep) in (0..=6).flat_map(|drafts| (0..=drafts).map(move |keep| (drafts, keep))).chain([(0, 0)]) {
            if len + keep > tokens.len() {
                break;
            }
            let drafted: Vec<u32> = (0..drafts).map(|i| if i < keep { tokens[len + i] } else { 999 }).collect();
            let mut round = run.batch.begin_round();
            let append = round.prepare_append(&[drafts]).unwrap();
            step(backend, &mut run.pages, &append, &drafted);
            append.commit();
            round.commit(&[keep]).map_err(|(_, error)| error).unwrap();
            len += keep;
            if len > 0 {
                assert_eq!(run.hash(0, &tokens[..len]), hashes[len - 1], "{drafts} drafted, {keep} kept");
            }
        }
        assert!(len > 40);
    }
    check(&Reference::new(), &tokens);
    for set in sets() {
        on!(set, 2, false, |backend| check(backend, &tokens));
    }
}

#[test]
fn a_kernel_of_one_and_zero_shifts_a_row_by_one_token() {
    fn check<B: Backend>(backend: &B) {
        let width = 20;
        let spec = StateSpec::new(16, vec![GroupSpec::recurrent(1, &[("hidden", width)])]).unwrap();
        let pool = Pool::new(spec.clone(), 1 << 20);
        let mut pages = backend.pages(&spec).unwrap();
        let mut batch = Batch::new(&pool);
        batch.prepare_admit(vec![(pool.row(), 10)]).unwrap().commit();
        let kernel = backend.vector(&[vec![1.0; width], vec![0.0; width]].concat()).unwrap();
        let mut got = Vec::new();
        for (i, count) in [1, 3, 1].into_iter().enumerate() {
            let append = batch.prepare_append(&[count]).unwrap();
            let step = backend.begin(append.plan(&vec![0; count], &[]).unwrap(), &mut pages).unwrap();
            let x = tensor(backend, &values(i as u64, count * width), width);
            let mut out = tensor(backend, &vec![f32::NAN; count * width], width);
            let slot = Slot { group: 0, layer: 0 };
            backend.convolve(&step, &mut pages, (slot, 0), &kernel, &x, &mut out).unwrap();
            got.extend(backend.download(&out).unwrap());
            append.commit();
        }
        let all = [vec![0.0; width], values(0, width), values(1, 3 * width)].concat();
        assert_eq!(got, all);
    }
    for set in sets() {
        on!(set, 1, false, |backend| check(backend));
    }
}
