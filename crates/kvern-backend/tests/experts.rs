//! Experts, heads with matrices of their own, and the small verbs around them: against the reference, and with the same bits in any company. A device
//! without kernels for them says so where weights are packed.

mod common;
#[path = "../../../tests/support/subjects.rs"]
mod subjects;

use common::{Noise, difference, tensor, values};
use kvern_backend::{Backend, Error, Reference, Routing, Score};
use kvern_base::{Raw, f16};
use kvern_weights::{BlockFormat, Encoding, Tensor};
use subjects::{Set, on, sets};

const EXPERTS: usize = 5;
const OUTPUTS: usize = 48;
const INPUTS: usize = 64;
const PICKS: usize = 2;

fn encodings() -> [Encoding; 5] {
    use BlockFormat::{Mxfp4, Q4_1, Q8_0};
    [
        Encoding::Raw(Raw::F32),
        Encoding::Raw(Raw::F16),
        Encoding::Block(Q4_1),
        Encoding::Block(Q8_0),
        Encoding::Block(Mxfp4),
    ]
}

/// A stack of random matrices.
fn weight(encoding: &Encoding, rows: usize, cols: usize) -> Tensor {
    let mut noise = Noise(rows as u64);
    let bytes = match encoding {
        Encoding::Raw(Raw::F32) => (0..rows * cols).flat_map(|_| noise.value().to_le_bytes()).collect(),
        Encoding::Raw(_) => (0..rows * cols).flat_map(|_| f16::from_f32(noise.value()).to_le_bytes()).collect(),
        Encoding::Block(format) => {
            let blocks = rows * cols / format.block();
            let mut bytes: Vec<u8> = (0..blocks * format.bytes()).map(|_| noise.bits() as u8).collect();
            for block in bytes.chunks_exact_mut(format.bytes()) {
                match format {
                    BlockFormat::Mxfp4 => block[0] = 124 + block[0] % 4,
                    _ => block[..2].copy_from_slice(&f16::from_f32(0.01).to_le_bytes()),
                }
                if *format == BlockFormat::Q4_1 {
                    block[2..4].copy_from_slice(&f16::from_f32(-0.07).to_le_bytes());
                }
            }
            bytes
        }
        _ => unreachable!("other tensors come from files"),
    };
    Tensor::in_memory("w", &[rows, cols], encoding.clone(), bytes).unwrap()
}

fn bias(rows: usize) -> Tensor {
    let bytes = values(3, rows).iter().flat_map(|x| x.to_le_bytes()).collect();
    Tensor::in_memory("b", &[rows], Encoding::Raw(Raw::F32), bytes).unwrap()
}

/// Picks of `tokens` tokens: two different experts each, and weights.
fn picks(tokens: std::ops::Range<usize>) -> Vec<f32> {
    let of = |token: usize| {
        let first = token * 7 % EXPERTS;
        [first as f32, ((first + 1 + token % 3) % EXPERTS) as f32, 0.75, -0.5]
    };
    tokens.flat_map(of).collect()
}

/// Tensors with as many rows as their values make.
fn empty<B: Backend>(backend: &B, rows: usize, width: usize) -> B::Tensor {
    tensor(backend, &vec![f32::NAN; rows * width], width)
}

/// Experts of some tokens of a batch: into their inner width, and back with a row for each pick, and combined.
fn experts<B: Backend>(backend: &B, encoding: &Encoding, tokens: std::ops::Range<usize>) -> Result<Vec<f32>, Error> {
    let into = backend.stack(weight(encoding, EXPERTS * OUTPUTS, INPUTS), Some(bias(EXPERTS * OUTPUTS)), EXPERTS)?;
    let back = backend.stack(weight(&Encoding::Raw(Raw::F16), EXPERTS * INPUTS, OUTPUTS), None, EXPERTS)?;
    let count = tokens.len();
    let x = tensor(backend, &values(9, 40 * INPUTS)[tokens.start * INPUTS..tokens.end * INPUTS], INPUTS);
    let picks = tensor(backend, &picks(tokens), 2 * PICKS);
    let mut inner = empty(backend, count * PICKS, OUTPUTS);
    backend.project_picked(&x, &picks, &mut [(&into, &mut inner)])?;
    let mut outer = empty(backend, count * PICKS, INPUTS);
    backend.project_picked(&inner, &picks, &mut [(&back, &mut outer)])?;
    let mut out = empty(backend, count, INPUTS);
    backend.combine(&outer, &picks, &mut out)?;
    backend.combine_add(&outer, &picks, &mut out)?;
    backend.download(&out)
}

#[test]
fn experts_agree_with_the_reference_and_their_company_shows_in_no_bit() {
    for encoding in encodings() {
        let want = experts(&Reference::new(), &encoding, 0..40).unwrap();
        let typical = (want.iter().map(|x| x * x).sum::<f32>() / want.len() as f32).sqrt();
        for set in sets() {
            let run = |threads: usize, tokens: std::ops::Range<usize>| {
                on!(set, threads, false, |backend| experts(backend, &encoding, tokens))
            };
            if matches!(set, Set::Cuda) {
                assert!(matches!(run(1, 0..40), Err(Error::Verb { verb: "stack" })));
                continue;
            }
            let whole = run(2, 0..40).unwrap();
            let error = difference(&whole, &want) / typical;
            assert!(error < if matches!(encoding, Encoding::Raw(_)) { 2e-6 } else { 2e-4 }, "{encoding}: {error}");
            for tokens in [0..1, 3..4, 39..40, 5..12, 0..39] {
                let range = tokens.start * INPUTS..tokens.end * INPUTS;
                assert!(run(1, tokens.clone()).unwrap() == whole[range], "{encoding}, {}, {tokens:?}", set.name());
            }
        }
    }
}

fn heads<B: Backend>(backend: &B, encoding: &Encoding, rows: usize) -> Vec<f32> {
    let stack = backend.stack(weight(encoding, EXPERTS * OUTPUTS, INPUTS), None, EXPERTS).unwrap();
    let x = tensor(backend, &values(5, rows * EXPERTS * INPUTS), EXPERTS * INPUTS);
    let mut out = empty(backend, rows, EXPERTS * OUTPUTS);
    backend.project_heads(&x, &stack, &mut out).unwrap();
    backend.download(&out).unwrap()
}

#[test]
fn heads_with_matrices_of_their_own_agree_with_the_reference() {
    for encoding in encodings() {
        let want = heads(&Reference::new(), &encoding, 9);
        let typical = (want.iter().map(|x| x * x).sum::<f32>() / want.len() as f32).sqrt();
        for set in sets().into_iter().filter(|set| matches!(set, Set::Cpu(_))) {
            let run = |rows: usize| on!(set, 2, false, |backend| heads(backend, &encoding, rows));
            let got = run(9);
            let error = difference(&got, &want) / typical;
            assert!(error < if matches!(encoding, Encoding::Raw(_)) { 2e-6 } else { 2e-4 }, "{encoding}: {error}");
            assert!(run(1) == got[..EXPERTS * OUTPUTS], "{encoding}, {}", set.name());
        }
    }
}

/// A product that the stack's shape cannot have, and a pick of no expert.
#[test]
fn stacks_that_do_not_fit_are_errors() {
    for set in sets().into_iter().filter(|set| matches!(set, Set::Cpu(_))) {
        on!(set, 1, false, |backend| {
            let raw = Encoding::Raw(Raw::F32);
            let odd = backend.stack(weight(&raw, 3 * 20, INPUTS), None, 3);
            assert!(matches!(odd, Err(Error::Unsupported { needs: "a multiple of 16", .. })));
            assert!(matches!(backend.stack(weight(&raw, 32, INPUTS), None, 3), Err(Error::Shape { .. })));
            let stack = backend.stack(weight(&raw, 2 * 16, INPUTS), None, 2).unwrap();
            let x = tensor(backend, &values(1, INPUTS), INPUTS);
            let mut out = empty(backend, 1, 16);
            let picks = tensor(backend, &[2.0, 1.0], 2);
            let error = backend.project_picked(&x, &picks, &mut [(&stack, &mut out)]).unwrap_err();
            assert!(matches!(error, Error::Shape { what: "matrices of the stack", expected: 3, found: 2, .. }));
        });
    }
}

/// The verbs around experts and latents, one after another over the same values.
fn small<B: Backend>(backend: &B) -> Vec<Vec<f32>> {
    let of = |seed: u64, rows: usize, width: usize| tensor(backend, &values(seed, rows * width), width);
    let mut results = Vec::new();
    let mut keep = |x: &B::Tensor| results.push(backend.download(x).unwrap());
    let mut x = of(1, 3, 37);
    backend.scale(-1.5, &mut x).unwrap();
    keep(&x);
    let mut part = empty(backend, 3, 11);
    backend.slice(&x, 5, &mut part).unwrap();
    keep(&part);
    if backend.stack(weight(&Encoding::Raw(Raw::F32), 32, INPUTS), None, 2).is_err() {
        return results;
    }
    let [weight, bias] = [2, 3].map(|seed| backend.vector(&values(seed, 37)).unwrap());
    backend.layer_norm_in_place(&mut x, [&weight, &bias], 1e-6).unwrap();
    keep(&x);
    let (mut gate, mut up) = (of(4, 3, 37), of(5, 3, 37));
    backend.scale(4.0, &mut gate).unwrap();
    backend.scale(4.0, &mut up).unwrap();
    backend.gate_clamped((1.702, 2.5), &mut gate, &up).unwrap();
    keep(&gate);
    let mut joined = empty(backend, 3, 2 * (8 + 5));
    backend.join(2, &of(6, 3, 16), &of(7, 3, 10), &mut joined).unwrap();
    keep(&joined);
    let (bias, factors) = (backend.vector(&values(8, 6)).unwrap(), backend.vector(&values(9, 6)).unwrap());
    for (score, normalize, groups) in [(Score::Softmax, true, None), (Score::Sigmoid, false, Some((3, 2)))] {
        let routing = Routing { score, normalize, scale: 2.5, groups };
        let mut picks = empty(backend, 3, 6);
        backend.route(&of(10, 3, 6), routing, [Some(&bias), Some(&factors)], &mut picks).unwrap();
        keep(&picks);
    }
    results
}

#[test]
fn small_verbs_agree_with_the_reference() {
    let want = small(&Reference::new());
    for set in sets() {
        let got = on!(set, 2, false, |backend| small(backend));
        assert!(got.len() == want.len() || matches!(set, Set::Cuda));
        for (index, (got, want)) in got.iter().zip(&want).enumerate() {
            let error = difference(got, want);
            assert!(error < 2e-6, "result {index}, {}: {error}", set.name());
        }
    }
}
