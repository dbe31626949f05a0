//! Attention against the reference backend, and its bits under every way of computing it.

mod common;

use common::{cpu, difference, tensor, values};
use kvern_backend::{Attention, Backend, Columns, Reference, Slot};
use kvern_cpu::KernelSet;
use kvern_state::{Batch, Codec, GroupSpec, Pool, StateSpec};

/// One case: shapes, and the length of each row.
#[derive(Clone)]
struct Case {
    heads: usize,
    kv_heads: usize,
    k_dim: usize,
    v_dim: usize,
    k: Codec,
    v: Codec,
    page: usize,
    rows: Vec<usize>,
}

impl Case {
    fn new(heads: usize, kv_heads: usize, dim: usize, rows: &[usize]) -> Self {
        let (k, v) = (Codec::F16, Codec::F16);
        Self { heads, kv_heads, k_dim: dim, v_dim: dim, k, v, page: 64, rows: rows.to_vec() }
    }

    fn spec(&self) -> StateSpec {
        let Self { kv_heads, k_dim, v_dim, k, v, .. } = *self;
        StateSpec::new(self.page, vec![GroupSpec { layers: 2, kv_heads, k_dim, v_dim, k, v }]).unwrap()
    }
}

/// Runs all rows, `chunk` tokens of each row a step, and gives each row's outputs at all positions and its columns.
fn run<B: Backend>(backend: &B, case: &Case, chunk: usize) -> Vec<(Vec<f32>, Columns)> {
    let spec = case.spec();
    let pool = Pool::new(spec.clone(), 1 << 32);
    let mut pages = backend.pages(&spec).unwrap();
    let mut batch = Batch::new(&pool);
    batch.prepare_admit(case.rows.iter().map(|&len| (pool.row(), len)).collect()).unwrap().commit();
    let slot = Slot { group: 0, layer: 1 };
    let attention = Attention { slot, heads: case.heads, scale: 1.7 / (case.k_dim as f32).sqrt() };
    let mut outs = vec![Vec::new(); case.rows.len()];
    // A row's inputs depend on its length and the position alone, so that it can be found again in another batch.
    let inputs = |widths: usize, salt: u64, batch: &Batch, counts: &[usize]| -> Vec<f32> {
        let row = |(row, &count): (usize, &usize)| {
            let start = batch.rows()[row].len();
            let at = move |position| values(salt + ((case.rows[row] as u64) << 32) + position as u64, widths);
            (start..start + count).flat_map(at).collect::<Vec<f32>>()
        };
        counts.iter().enumerate().flat_map(row).collect()
    };
    loop {
        let counts: Vec<usize> =
            case.rows.iter().zip(batch.rows()).map(|(&len, row)| chunk.min(len - row.len())).collect();
        let tokens: usize = counts.iter().sum();
        if tokens == 0 {
            break;
        }
        let q = inputs(case.heads * case.k_dim, 1 << 20, &batch, &counts);
        let k = inputs(case.kv_heads * case.k_dim, 2 << 20, &batch, &counts);
        let v = inputs(case.kv_heads * case.v_dim, 3 << 20, &batch, &counts);
        let append = batch.prepare_append(&counts).unwrap();
        let step = backend.begin(append.plan(&vec![0; tokens], &[]).unwrap(), &mut pages).unwrap();
        let (q, k) = (tensor(backend, &q, case.heads * case.k_dim), tensor(backend, &k, case.kv_heads * case.k_dim));
        let v = tensor(backend, &v, case.kv_heads * case.v_dim);
        backend.append(&step, &mut pages, slot, &k, &v).unwrap();
        let mut out = tensor(backend, &vec![f32::NAN; tokens * case.heads * case.v_dim], case.heads * case.v_dim);
        backend.attend(&step, &pages, attention, &q, &mut out).unwrap();
        let out = backend.download(&out).unwrap();
        append.commit();
        let mut rest = out.as_slice();
        for (row, &count) in counts.iter().enumerate() {
            let (own, others) = rest.split_at(count * case.heads * case.v_dim);
            outs[row].extend_from_slice(own);
            rest = others;
        }
    }
    let columns = |row: usize| {
        let table: Vec<u32> = batch.rows()[row].table(0).collect();
        backend.export(&pages, slot, &table, case.rows[row]).unwrap()
    };
    outs.into_iter().enumerate().map(|(row, out)| (out, columns(row))).collect()
}

fn agrees(case: &Case) {
    let want = run(&Reference::new(), case, 1000);
    for set in KernelSet::available() {
        let got = run(&cpu(set, 2, false), case, 1000);
        for (got, want) in got.iter().zip(&want) {
            assert!(got.1 == want.1, "{}: the stored columns are the reference's", set.name());
            let error = difference(&got.0, &want.0);
            assert!(error < 5e-6, "{}: {error}", set.name());
        }
    }
}

#[test]
fn agrees_with_the_reference_around_every_border() {
    let around = [1, 2, 15, 16, 17, 63, 64, 65, 127, 129];
    agrees(&Case::new(6, 2, 32, &around));
    agrees(&Case { page: 16, ..Case::new(6, 2, 32, &around) });
    agrees(&Case::new(3, 1, 16, &[511, 512, 513, 1025]));
}

#[test]
fn agrees_with_the_reference_for_all_head_shapes() {
    for ratio in [1, 2, 3, 4, 5, 8, 16] {
        agrees(&Case::new(2 * ratio, 2, 32, &[70]));
    }
    for dim in [16, 64, 80, 96, 128, 192, 256, 512] {
        agrees(&Case::new(3, 1, dim, &[70]));
    }
    agrees(&Case { k_dim: 192, v_dim: 128, ..Case::new(4, 2, 0, &[70]) });
    agrees(&Case { k_dim: 20, v_dim: 48, ..Case::new(4, 2, 0, &[70]) });
}

#[test]
fn agrees_with_the_reference_on_all_codecs() {
    for k in [Codec::F32, Codec::F16, Codec::Bf16] {
        for v in [Codec::F32, Codec::F16, Codec::Bf16] {
            agrees(&Case { k, v, ..Case::new(4, 2, 32, &[90, 5]) });
        }
    }
}

#[test]
fn bits_do_not_depend_on_chunks_company_or_threads() {
    // Long enough for several strides; 40 and 7 are company.
    let case = Case::new(6, 2, 32, &[1100, 40, 7]);
    for set in KernelSet::available() {
        let want = run(&cpu(set, 1, false), &case, 2000);
        for (threads, chunk) in [(1, 1), (2, 7), (5, 64), (2, 512), (3, 2000)] {
            assert!(
                run(&cpu(set, threads, false), &case, chunk) == want,
                "{}, {threads} threads, chunks of {chunk}",
                set.name()
            );
        }
        for (row, want) in want.iter().enumerate() {
            let alone = Case { rows: vec![case.rows[row]], ..case.clone() };
            assert!(run(&cpu(set, 2, false), &alone, 100)[0] == *want, "{}: row {row} alone", set.name());
        }
    }
}

#[test]
fn accuracy_does_not_decay_with_length() {
    // The last token of a long row, against the reference's f64 sums.
    for set in KernelSet::available() {
        let error = |len: usize| {
            let case = Case { k: Codec::F32, v: Codec::F32, ..Case::new(1, 1, 16, &[len]) };
            let last = |out: &[(Vec<f32>, Columns)]| out[0].0[(len - 1) * 16..].to_vec();
            difference(&last(&run(&cpu(set, 2, false), &case, 512)), &last(&run(&Reference::new(), &case, len)))
        };
        // Values are in -1..1, so one rounding step of the output is 6e-8.
        assert!(error(1000) < 4e-7, "{}", set.name());
        assert!(error(8000) < 4e-7, "{}", set.name());
    }
}

#[test]
fn pages_that_cannot_be_laid_out_are_refused() {
    let backend = cpu(KernelSet::available()[0], 1, false);
    for case in [Case { page: 8, ..Case::new(1, 1, 16, &[]) }, Case { page: 1024, ..Case::new(1, 1, 16, &[]) }] {
        assert!(backend.pages(&case.spec()).is_err());
    }
    assert!(backend.pages(&Case { k_dim: 16, v_dim: 24, ..Case::new(1, 1, 0, &[]) }.spec()).is_err());
}
