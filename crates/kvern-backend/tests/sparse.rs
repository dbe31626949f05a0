//! Sparse attention in latent groups: the picked columns and what comes of them, against the reference, and the same bits for any cut of a prompt, in
//! company and on any number of threads.

mod common;
#[path = "../../../tests/support/subjects.rs"]
mod subjects;

use common::{difference, tensor, values};
use kvern_backend::{Attention, Backend, Indexer, Reference, Slot};
use kvern_state::{Batch, Codec, GroupSpec, Pool, StateSpec};
use subjects::{Set, on, sets};

const LATENT: usize = 32;
const ROPE: usize = 16;
const INDEX: usize = 32;
const PICKS: usize = 20;
const SLOT: Slot = Slot { group: 0, layer: 0 };

#[derive(Clone, Copy)]
struct Shape {
    heads: usize,
    index_heads: usize,
    codec: Codec,
    softcap: Option<f32>,
}

/// Runs rows of so many tokens in steps of `chunk`, and gives picks and outputs of each token, row by row.
fn run<B: Backend>(backend: &B, shape: Shape, rows: &[usize], chunk: usize) -> Vec<(Vec<f32>, Vec<f32>)> {
    let Shape { heads, index_heads, codec, softcap } = shape;
    let spec = StateSpec::new(16, vec![GroupSpec::latent(1, LATENT, ROPE, Some(INDEX), codec)]).unwrap();
    let pool = Pool::new(spec, 1 << 24);
    let mut pages = backend.pages(pool.spec()).unwrap();
    let mut batch = Batch::new(&pool);
    batch.prepare_admit(rows.iter().map(|&tokens| (pool.row(), tokens)).collect()).unwrap().commit();
    let mut results = vec![(Vec::new(), Vec::new()); rows.len()];
    let mut done = vec![0; rows.len()];
    while done.iter().zip(rows).any(|(done, all)| done < all) {
        let counts: Vec<usize> = done.iter().zip(rows).map(|(done, all)| chunk.min(all - done)).collect();
        // Where each token stands, (row, position): all that its values follow from.
        let at: Vec<(usize, usize)> =
            counts.iter().enumerate().flat_map(|(row, &n)| (0..n).map(move |i| (row, i))).collect();
        let at: Vec<(usize, usize)> = at.into_iter().map(|(row, i)| (row, done[row] + i)).collect();
        let of = |salt: u64, width: usize| {
            let token =
                |&(row, position): &(usize, usize)| values(salt << 40 | (rows[row] * 1000 + position) as u64, width);
            tensor(backend, &at.iter().flat_map(token).collect::<Vec<f32>>(), width)
        };
        let append = batch.prepare_append(&counts).unwrap();
        let step = backend.begin(append.plan(&vec![1; at.len()], &[]).unwrap(), &mut pages).unwrap();
        backend.append(&step, &mut pages, SLOT, &[&of(1, LATENT), &of(2, ROPE), &of(3, INDEX)]).unwrap();
        let mut picks = tensor(backend, &vec![f32::NAN; at.len() * PICKS], PICKS);
        let inputs = (&of(4, index_heads * INDEX), &of(5, index_heads));
        backend.select(&step, &pages, Indexer { slot: SLOT, heads: index_heads }, inputs, &mut picks).unwrap();
        let mut out = tensor(backend, &vec![f32::NAN; at.len() * heads * LATENT], heads * LATENT);
        let attention = Attention { slot: SLOT, heads, scale: 0.3, softcap };
        let q = of(6, heads * (LATENT + ROPE));
        backend.attend_picked(&step, &pages, attention, &picks, &q, &mut out).unwrap();
        let (picks, out) = (backend.download(&picks).unwrap(), backend.download(&out).unwrap());
        for (i, &(row, _)) in at.iter().enumerate() {
            results[row].0.extend_from_slice(&picks[i * PICKS..][..PICKS]);
            results[row].1.extend_from_slice(&out[i * heads * LATENT..][..heads * LATENT]);
        }
        append.commit();
        done.iter_mut().zip(&counts).for_each(|(done, count)| *done += count);
    }
    results
}

fn shapes() -> [Shape; 4] {
    let shape = |heads, index_heads, codec, softcap| Shape { heads, index_heads, codec, softcap };
    [
        shape(1, 1, Codec::F32, None),
        shape(8, 17, Codec::F16, None),
        shape(11, 8, Codec::Bf16, Some(1.5)),
        shape(4, 32, Codec::F32, None),
    ]
}

#[test]
fn picks_and_outputs_agree_with_the_reference() {
    for (index, shape) in shapes().into_iter().enumerate() {
        let want = run(&Reference::new(), shape, &[90, 7, 41], 64);
        for set in sets().into_iter().filter(|set| matches!(set, Set::Cpu(_))) {
            let got = on!(set, 2, false, |backend| run(backend, shape, &[90, 7, 41], 64));
            for (got, want) in got.iter().zip(&want) {
                assert!(got.0 == want.0, "picks of shape {index}, {}", set.name());
                let error = difference(&got.1, &want.1);
                assert!(error < 2e-6, "shape {index}, {}: {error}", set.name());
            }
        }
    }
}

#[test]
fn neither_cuts_nor_company_nor_threads_show_in_a_bit() {
    for (index, shape) in shapes().into_iter().enumerate() {
        for set in sets().into_iter().filter(|set| matches!(set, Set::Cpu(_))) {
            let by = |threads: usize, rows: &[usize], chunk: usize| {
                on!(set, threads, false, |backend| run(backend, shape, rows, chunk))
            };
            // More columns than a thread scores at a time.
            let whole = by(1, &[600, 33], 600);
            for chunk in [1, 7, 200] {
                assert!(by(3, &[600], chunk)[0] == whole[0], "shape {index}, {}, chunks of {chunk}", set.name());
            }
            assert!(by(2, &[33, 600], 50)[0] == whole[1], "shape {index}, {}", set.name());
        }
    }
}

#[test]
fn equal_scores_are_picked_in_the_order_of_their_columns() {
    // Index keys of zeros score alike.
    for set in sets().into_iter().filter(|set| matches!(set, Set::Cpu(_))) {
        on!(set, 2, false, |backend| {
            let spec = StateSpec::new(16, vec![GroupSpec::latent(1, LATENT, ROPE, Some(INDEX), Codec::F32)]).unwrap();
            let pool = Pool::new(spec, 1 << 24);
            let mut pages = backend.pages(pool.spec()).unwrap();
            let mut batch = Batch::new(&pool);
            batch.prepare_admit(vec![(pool.row(), 50)]).unwrap().commit();
            let append = batch.prepare_append(&[50]).unwrap();
            let step = backend.begin(append.plan(&[1; 50], &[]).unwrap(), &mut pages).unwrap();
            let zeros = |width: usize| tensor(backend, &vec![0.0; 50 * width], width);
            backend.append(&step, &mut pages, SLOT, &[&zeros(LATENT), &zeros(ROPE), &zeros(INDEX)]).unwrap();
            let (mut picks, inputs) = (zeros(PICKS), (&zeros(INDEX), &zeros(1)));
            backend.select(&step, &pages, Indexer { slot: SLOT, heads: 1 }, inputs, &mut picks).unwrap();
            let first: Vec<f32> = (0..PICKS).map(|column| column as f32).collect();
            assert_eq!(backend.download(&picks).unwrap()[49 * PICKS..], first);
            append.commit();
        });
    }
}
